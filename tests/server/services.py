"""A service on a folder, for tests; and one in a process of its own that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from must_work import need

from hutch import factory
from hutch import operations as op
from hutch.backends.namespaces import NamespacesBackend
from hutch.errors import BackendUnavailable
from hutch.server.keys import OPERATOR, Caller
from hutch.server.rules import Rules
from hutch.server.service import Service
from hutch.types import BoxInfo, Result

ADMIN = Caller(OPERATOR, "admin")
ALICE = Caller("alice", "run")
BOB = Caller("bob", "run")


def place(folder: Path) -> Path:
    (folder / "run").mkdir(mode=0o700, exist_ok=True, parents=True)
    return folder


@contextlib.asynccontextmanager
async def service(
    folder: Path, rules: Rules | None = None, *, kill: bool = True, api_key: str | None = None
) -> AsyncIterator[Service]:
    """`kill`: its sessions end with it."""
    backend = NamespacesBackend(lasting=str(place(folder) / "run"))
    try:
        images = factory.images("namespaces")
        made = await Service.open(folder, backend, images, rules or Rules(), api_key)
    except BackendUnavailable as exc:
        need("namespaces", str(exc))
    try:
        yield made
    finally:
        await made.close(kill=kill)


async def run(made: Service, id: str, command: str, caller: Caller = ADMIN) -> Result:
    return await made.perform(op.RunShell(id, command), caller)


async def opened(made: Service, caller: Caller = ADMIN, **more: Any) -> BoxInfo:
    info = await made.perform(op.OpenSession(**more), caller)
    assert isinstance(info, BoxInfo)
    return info


class Victim:
    """A service in a process of its own, told line by line what to do."""

    def __init__(self, folder: Path, **options: Any) -> None:
        place(folder)
        arguments = json.dumps({"folder": str(folder), **options})
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("victim.py")), arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def ask(self, name: str, **fields: Any) -> Any:
        """The answer; None if it died over it."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps({"do": name, **fields}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            with contextlib.suppress(OSError):
                stream.close()


async def end_all(folder: Path) -> None:
    async with service(folder):
        pass


def clean_up(folder: Path) -> None:
    """Whatever a test left below a folder: adopted, and ended."""
    asyncio.run(end_all(folder))


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run_test(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run_test
