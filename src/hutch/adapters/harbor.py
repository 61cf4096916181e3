"""Harbor: `harbor run -p TASK -a AGENT -e hutch.adapters.harbor:HutchEnvironment`.

Harbor's tasks have absolute paths: /tests, /solution, /logs, and often /app. In an imported image
these folders are created; where the root of a box is read-only (`host`, and images of packages),
temporary folders of this machine are mounted, and removed with the box.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hutch
from hutch.client._async import AsyncSandbox
from hutch.errors import BoxLost, NotFound
from hutch.types import Chunk, Mount, Result

from . import needs

with needs("harbor"):
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import (
        EnvironmentCapabilities,
        EnvironmentResourceCapabilities,
    )
    from harbor.environments.definition import parse_dockerfile_workdir

PLACES = ("/tests", "/solution", "/logs", "/app", "/installed-agent", "/artifacts")
WORKDIR = "/app"
MEMORY = 2048  # MiB, for a task that names no limit


class HutchEnvironment(BaseEnvironment):
    """One box for one trial.

    Keyword arguments (`--ek image=python`): `image`, `backend`, `runtime` and `url`, as in
    `AsyncSandbox.create`; `places`: absolute paths that a task needs beside Harbor's own, separated
    by commas.
    """

    def __init__(
        self,
        *args: Any,
        image: str | None = None,
        backend: str | None = None,
        runtime: str | None = None,
        url: str | None = None,
        places: str = "",
        **kwargs: Any,
    ) -> None:
        self._image = image
        self._where: dict[str, Any] = {"backend": backend, "runtime": runtime, "url": url}
        self._places = (*PLACES, *(path for path in places.split(",") if path))
        self._box: AsyncSandbox | None = None
        self._folder: str | None = None
        self._shell = "bash"
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "hutch"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _validate_definition(self) -> None:
        if self._image is None and self.task_env_config.docker_image is None:
            raise ValueError(
                "this task's image is to be built from a Dockerfile, which Hutch does not do: "
                "build it with Docker, bring it in with `hutch image import --from-docker`, and "
                "name it with --ek image=NAME. The image `host` has what this machine has"
            )

    # --- the box ----------------------------------------------------------------------

    @property
    def box(self) -> AsyncSandbox:
        if self._box is None:
            raise RuntimeError("the environment has not been started")
        return self._box

    async def start(self, force_build: bool) -> None:
        try:
            self._box = await self._open(())
            if not await self._can_make_places():
                await self._box.close()
                self._box = await self._open(self._mounted())
            await self.box.files.make_dir(self._workdir)
            if (await self.box.commands.run("command -v bash")).exit_code:
                self._shell = "sh"
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await asyncio.shield(self.stop(delete=True))
            raise
        if self._network_is_public:
            self.logger.debug("the task may use the network, but boxes have none")

    async def _open(self, mounts: tuple[Mount, ...]) -> AsyncSandbox:
        more: dict[str, Any] = {"env": {"HOME": "/home/user"}} if mounts else {}
        return await hutch.AsyncSandbox.create(
            image=self._image or self.task_env_config.docker_image,
            cpus=self._effective_cpus or 2.0,
            memory=f"{self._effective_memory_mb or MEMORY}m",
            user="user" if self._has_one_user else "root",
            mounts=mounts,
            **more,
            **self._where,
        )

    async def _can_make_places(self) -> bool:
        made = await self.box.commands.run(["mkdir", "-p", self._workdir, *self._places])
        return made.ok

    def _mounted(self) -> tuple[Mount, ...]:
        self._folder = tempfile.mkdtemp(prefix="hutch-harbor-")
        os.chmod(self._folder, 0o755)
        wanted = {"/" + path.split("/")[1] for path in (*self._places, self._workdir)}
        wanted -= {"/workspace", "/tmp", "/home"}  # every box has these
        for path in wanted:
            os.mkdir(self._folder + path)
        return tuple(Mount(self._folder + path, path) for path in sorted(wanted))

    @property
    def _workdir(self) -> str:
        if self.task_env_config.workdir:
            return str(self.task_env_config.workdir)
        dockerfile = self.environment_dir / "Dockerfile"
        return (parse_dockerfile_workdir(dockerfile) if dockerfile.exists() else None) or WORKDIR

    @property
    def _has_one_user(self) -> bool:
        """Whether boxes have a single user: those of an ordinary user on this machine do."""
        is_here = not (self._where["url"] or os.environ.get("HUTCH_URL"))
        return is_here and os.getuid() != 0

    async def stop(self, delete: bool) -> None:
        """End the box, even if `delete` is false."""
        if self._box is not None:
            try:
                await self._box.close()
            except BoxLost:
                pass
            self._box = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # --- commands and files -----------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        who = self._resolve_user(user)
        tell = self._output_callback()
        stream = await self.box.commands.stream(
            [self._shell, "-c", command],
            cwd=cwd or self._workdir,
            env=self._merge_env(env),
            user=None if who is None or self._has_one_user else str(who),
            timeout=timeout_sec,
        )
        result: Result | None = None
        try:
            async with stream:
                async for item in stream:
                    if isinstance(item, Result):
                        result = item
                    elif tell and isinstance(item, Chunk):
                        await tell(item.text, item.stream)
        except NotFound as exc:
            return ExecResult(stdout="", stderr=f"{exc}\n", return_code=127)
        assert result is not None
        if result.timed_out:
            raise RuntimeError(f"the command was killed after {timeout_sec} seconds")
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=result.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self.box.files.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.box.files.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.box.files.download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.box.files.download(source_dir, target_dir)
