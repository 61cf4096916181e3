"""Inspect: `Task(sandbox="hutch")`. Every sample gets a box of its own.

Every process of Inspect loads this module through its entry point, so it imports nothing of ours
that it does not need.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import hutch
from hutch.errors import (
    BackendUnavailable,
    BoxError,
    BoxLost,
    InvalidRequest,
    IsFolder,
    NoSpace,
    NotFound,
    NotPermitted,
    ServerUnavailable,
)

from . import collected, fitted, needs, order_of

if TYPE_CHECKING:
    from hutch.client._async import AsyncSandbox

with needs("inspect"):
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxConnection,
        SandboxEnvironment,
        SandboxEnvironmentLimits,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
    from inspect_ai.util._sandbox.environment import SandboxUnavailableError
    from pydantic import BaseModel, ConfigDict


class HutchConfig(BaseModel):
    """The options of a task's boxes, as `AsyncSandbox.create` takes them.

    Without a `url` or HUTCH_URL, boxes belong to the process of the evaluation. There is no field
    for a key, because a config is written to logs: set HUTCH_API_KEY.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = None
    memory: int | str = "1g"
    cpus: float = 2.0
    pids: int = 512
    disk: int | str | None = None
    env: dict[str, str] = {}
    user: str = "user"
    workdir: str = "/workspace"
    backend: str | None = None
    runtime: str | None = None
    url: str | None = None

    def __hash__(self) -> int:  # samples of the same config are prepared together
        return hash(self.model_dump_json())


@sandboxenv(name="hutch")
class HutchSandboxEnvironment(SandboxEnvironment):
    """One box, for one sample. `box` is the box."""

    _open: ClassVar[set[HutchSandboxEnvironment]] = set()

    def __init__(self, box: AsyncSandbox, config: HutchConfig) -> None:
        super().__init__()
        self.box, self._config = box, config

    # --- a sample's box ---------------------------------------------------------------

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        wanted = _config_of(config)
        environment = cls(await hutch.AsyncSandbox.create(**order_of(wanted)), wanted)
        cls._open.add(environment)
        return {"default": environment}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            await environment.as_type(HutchSandboxEnvironment).close()

    @classmethod
    async def task_cleanup(
        cls, task_name: str, config: BaseModel | str | None, cleanup: bool
    ) -> None:
        """Close what interrupted samples left."""
        while cleanup and cls._open:
            await next(iter(cls._open)).close()

    async def close(self) -> None:
        type(self)._open.discard(self)
        try:
            await self.box.close()
        except BoxLost:
            pass

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return HutchConfig(**config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        return 2 * (os.cpu_count() or 1)

    def default_polling_interval(self) -> float:
        return 0.2

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        server = self._config.url or os.environ.get("HUTCH_URL")
        if not server:
            raise NotImplementedError(
                "a box in the evaluation's own process cannot be reached from a terminal: use a "
                "server, with HUTCH_URL"
            )
        command = f"hutch shell --url {shlex.quote(server)} {self.box.id}"
        return SandboxConnection(type="hutch", command=command, container=self.box.id)

    # --- commands and files -----------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command. It is not retried after a timeout, which is always the command's own."""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            with _errors_of_inspect():
                argv = await fitted(self.box, cmd)
                outcome = await collected(
                    self.box, argv, limit, cwd=cwd, env=env, user=user, stdin=input, timeout=timeout
                )
        except NotFound as exc:
            return ExecResult(False, 127, "", f"{exc}\n")
        except InvalidRequest as exc:
            if user is None:
                raise
            raise SandboxUserUnsupportedError(str(exc)) from exc
        if outcome.result is None:
            raise OutputLimitExceededError(
                SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR,
                _text(max(outcome.stdout, outcome.stderr, key=len)[:limit]),
            )
        if outcome.result.timed_out:
            raise TimeoutError(f"the command was killed after {timeout} seconds")
        code = outcome.result.exit_code
        return ExecResult(code == 0, code, _text(outcome.stdout), _text(outcome.stderr))

    async def write_file(self, file: str, contents: str | bytes) -> None:
        with _errors_of_inspect(), _errors_of_files():
            await self.box.files.write(file, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _errors_of_inspect(), _errors_of_files():
            data = await self.box.files.read(file, "bytes", length=limit + 1)
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data


def _config_of(config: BaseModel | str | None) -> HutchConfig:
    if isinstance(config, HutchConfig):
        return config
    if config is None or isinstance(config, str):  # Task(sandbox=("hutch", "python"))
        return HutchConfig(image=config)
    raise TypeError(f"the sandbox 'hutch' takes a HutchConfig, not a {type(config).__name__}")


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "replace")


@contextmanager
def _errors_of_inspect() -> Iterator[None]:
    try:
        yield
    except (BoxError, BackendUnavailable, ServerUnavailable) as exc:
        raise SandboxUnavailableError(f"{exc} ({exc.code})") from exc
    except NotPermitted as exc:
        raise PermissionError(str(exc)) from exc


@contextmanager
def _errors_of_files() -> Iterator[None]:
    try:
        yield
    except NotFound as exc:
        raise FileNotFoundError(str(exc)) from exc
    except NoSpace as exc:
        raise OSError(errno.ENOSPC, str(exc)) from exc
    except IsFolder as exc:
        raise IsADirectoryError(f"{exc} (it is a directory)") from exc
