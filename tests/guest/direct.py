"""A guest as a plain child of the test: no box around it, so that it can be looked into."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from hutch import wire
from hutch.backends.namespaces import SocketStream
from hutch.engine.link import Link

SOURCE = Path(wire.__file__).parents[2]
START = """
import sys
sys.path.insert(0, sys.argv[1])
from hutch.guest.__main__ import main
{before}
main(sys.argv[2:])
"""


class Guest:
    def __init__(
        self, process: subprocess.Popen[bytes], link: Link, listener: socket.socket
    ) -> None:
        self.process, self.link, self._listener = process, link, listener
        self.links = [link]  # with those that were replaced

    async def connect(self) -> Link:
        """Another connection, in the place of the one before."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._listener, [b"c"], [theirs.fileno()])
        self.link = await Link.open(SocketStream(ours))
        self.links.append(self.link)
        return self.link

    async def run(self, request: Any) -> tuple[dict[str, Any], bytes]:
        """Its result, and all it printed."""
        printed = b""
        async with self.link.call(request) as call:
            async for event in call:
                if isinstance(event, wire.Data):
                    printed += event.data
            return call.result, printed

    async def shell(self, command: str, timeout: float | None = None) -> tuple[int, str]:
        result, printed = await self.run(wire.ShellCommand("main", command, timeout))
        return result["exit_code"], printed.decode()

    async def program(self, *argv: str, timeout: float | None = None) -> tuple[int, str]:
        result, printed = await self.run(wire.Exec(list(argv), timeout=timeout))
        return result["exit_code"], printed.decode()

    async def cell(
        self, code: str, timeout: float | None = None, context: str = "main"
    ) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
        """How it ended, what it showed, and what it printed."""
        messages, shown, printed = wire.Messages(), [], b""
        async with self.link.call(wire.RunCell(context, code, timeout)) as call:
            async for event in call:
                if isinstance(event, wire.Data) and event.channel == wire.RESULTS:
                    shown += messages.feed(event.data)
                elif isinstance(event, wire.Data):
                    printed += event.data
            return call.result, shown, printed.decode()

    async def warm(self) -> None:
        """Start what a guest keeps: a shell, and idle subreapers."""
        await self.shell("true")
        await asyncio.gather(*[self.program("sleep", "0.1") for _ in range(3)])

    def open_files(self) -> list[str]:
        found = []
        for path in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since
                found.append(os.readlink(path).split(":")[0])
        return sorted(found)

    def children(self) -> list[str]:
        """Name and state of each process whose parent is the guest."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            state, parent = rest.split()[:2]
            if int(parent) == self.process.pid:
                found.append(f"{name} {state}")
        return sorted(found)

    def tree(self) -> list[int]:
        """All that was started below the guest."""
        found, pending = [], [self.process.pid]
        while pending:
            for task in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
                with suppress(OSError):
                    pids = [int(pid) for pid in task.read_text().split()]
                    found += pids
                    pending += pids
        return found


def _lib(folder: Path) -> Path:
    """Where a kernel finds its code under the name that it has in a box."""
    lib = folder / ".lib"
    lib.mkdir(exist_ok=True)
    if not (lib / "hutch_kernel").exists():
        (lib / "hutch_kernel").symlink_to(SOURCE / "hutch" / "kernel")
    return lib


@asynccontextmanager
async def _guest(folder: Path, before: str, lib: Path | None) -> AsyncIterator[Guest]:
    ours, theirs = socket.socketpair()
    listener, their_listener = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start = [sys.executable, "-I", "-S", "-c", START.format(before=before), str(SOURCE)]
    options = ["--fd", str(theirs.fileno()), "--workdir", str(folder), "--private", str(folder)]
    options += ["--lib", str(lib or _lib(folder))]
    options += ["--listener", str(their_listener.fileno())]
    fds = [theirs.fileno(), their_listener.fileno()]
    process = subprocess.Popen([*start, *options], pass_fds=fds)
    theirs.close()
    their_listener.close()
    try:
        guest = Guest(process, await Link.open(SocketStream(ours)), listener)
        try:
            yield guest
            # Outside a box, what a guest leaves behind is left to the process that started it.
            await guest.shell("kill -9 $(jobs -p) 2>/dev/null; true", 20)
            await guest.link.ask(wire.EndShell("main"))
            for context in (await guest.link.ask(wire.ListKernels()))["contexts"]:
                await guest.link.ask(wire.EndKernel(context["context"]))
        finally:
            listener.close()
            for link in guest.links:
                await link.close()
        process.wait(20)
    finally:
        listener.close()
        process.kill()
        process.wait()


def with_guest(
    folder: Path,
    work: Callable[[Guest], Awaitable[None]],
    *,
    before: str = "",
    lib: Path | None = None,
    seconds: int = 60,
) -> None:
    """Run `work` with a fresh guest. `before` is Python that the guest runs first."""

    async def main() -> None:
        async with asyncio.timeout(seconds), _guest(folder, before, lib) as guest:
            await work(guest)

    asyncio.run(main())
