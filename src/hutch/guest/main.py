"""Puts a guest together. The zygote calls `serve` in a fork; elsewhere it is `hutch.guest`."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from hutch import wire

from .agent import Agent, Call, Handler, Place
from .files import Files
from .memory import watch_memory
from .process import run_exec
from .shell import Shells
from .spawn import Programs, Reaper, ignore_signals
from .watch import run_watch


def serve(sock: socket.socket, place: Place) -> None:
    """Answer the host on `sock` until it hangs up."""
    ignore_signals()
    os.umask(0o022)  # not the caller's: what we make for the box is as its own programs make it
    asyncio.run(_serve(sock, place))


async def _serve(sock: socket.socket, place: Place) -> None:
    reaper = Reaper()
    programs = Programs(place, reaper)
    shells = Shells(programs)
    files = Files(place, reaper)

    async def exec_(request: wire.Exec, call: Call) -> dict[str, Any]:
        return await run_exec(request, call, programs)

    async def watch(request: wire.Watch, call: Call) -> dict[str, Any]:
        return await run_watch(request, call, place)

    handlers: dict[type[Any], Handler] = {
        wire.SetEnv: programs.set_env,
        wire.Exec: exec_,
        wire.Shell: shells.run,
        wire.OpenShell: shells.open,
        wire.CloseShell: shells.close,
        wire.Read: files.read,
        wire.Write: files.write,
        wire.Edit: files.edit,
        wire.Stat: files.stat,
        wire.List: files.list,
        wire.MakeDir: files.make_dir,
        wire.Move: files.move,
        wire.Remove: files.remove,
        wire.Search: files.search,
        wire.Glob: files.glob,
        wire.Watch: watch,
    }
    watchdog = asyncio.ensure_future(watch_memory(place.memory)) if place.memory else None
    await Agent(sock, handlers).serve()
    if watchdog:
        watchdog.cancel()
