"""Puts a guest together. The zygote calls `serve` in a fork; elsewhere it is `hutch.guest`."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from hutch import wire

from . import archive
from .agent import Agent, Call, Handler, Place
from .files import Files
from .keeper import Calls
from .kernels import Kernels
from .memory import watch_memory
from .process import run_exec
from .shell import Shells
from .spawn import Programs, Reaper, ignore_signals
from .tree import helpers, table
from .watch import run_watch

FORKS: Calls = {"pack": archive.pack, "unpack": archive.unpack}


def serve(sock: socket.socket, place: Place, calls: Calls | None = None) -> None:
    """Answer the host on `sock` until it hangs up.

    `calls` are what a forked process may go on as, instead of executing a program.
    """
    ignore_signals()
    os.umask(0o022)  # not the caller's: what we make for the box is as its own programs make it
    asyncio.run(_serve(sock, place, calls or {}))


async def _serve(sock: socket.socket, place: Place, calls: Calls) -> None:
    reaper = Reaper()
    programs = Programs(place, reaper, {**calls, **FORKS})
    shells = Shells(programs)
    kernels = Kernels(programs)
    files = Files(place, reaper)

    async def exec_(request: wire.Exec, call: Call) -> dict[str, Any]:
        return await run_exec(request, call, programs)

    async def activity(request: wire.Activity, call: Call) -> dict[str, Any]:
        quiet = {os.getpid(), *helpers, *shells.pids(), *kernels.pids()}
        return {"programs": sum(r.pid not in quiet and r.state != "Z" for r in table())}

    async def pack(request: wire.Pack, call: Call) -> dict[str, Any]:
        return await run_exec(
            wire.Exec(["pack", *place.rooms], cwd="/"), call, programs, become="pack"
        )

    async def unpack(request: wire.Unpack, call: Call) -> dict[str, Any]:
        job = wire.Exec(["unpack"], cwd="/", stdin=True)
        return await run_exec(job, call, programs, become="unpack")

    async def watch(request: wire.Watch, call: Call) -> dict[str, Any]:
        return await run_watch(request, call, place)

    handlers: dict[type[Any], Handler] = {
        wire.SetEnv: programs.set_env,
        wire.Exec: exec_,
        wire.Shell: shells.run,
        wire.OpenShell: shells.open,
        wire.CloseShell: shells.close,
        wire.RunCell: kernels.run,
        wire.Interrupt: kernels.interrupt,
        wire.OpenContext: kernels.open,
        wire.ListContexts: kernels.list,
        wire.RestartContext: kernels.restart,
        wire.CloseContext: kernels.close,
        wire.Variables: kernels.variables,
        wire.SetIdle: kernels.set_idle,
        wire.SleepContext: kernels.sleep,
        wire.SaveContext: kernels.save,
        wire.LoadContext: kernels.load,
        wire.Activity: activity,
        wire.Pack: pack,
        wire.Unpack: unpack,
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
