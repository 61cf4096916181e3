"""Assemble a guest: its handlers, and the loop that serves them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

from hutch import wire

from . import archive
from .agent import Agent, GuestConfig, Handler, Handlers, Responder, accept_from, serve_all
from .denials import Denials
from .files import FileHandlers
from .kernels import Kernels
from .ports import dial, list_ports
from .procfs import helpers, table, watch_memory
from .programs import Collector, Jobs, run_exec
from .reaper import Calls
from .shell import ShellHandlers
from .spawn import ChildWatcher, Programs, ignore_signals
from .tar import answer_of, untar
from .tar import tar as write_tar

# Accepts connections of hosts and answers them, until there are no more.
ServeHosts = Callable[[Handlers], Awaitable[None]]

FORKS: Calls = {
    "pack": archive.pack,
    "unpack": archive.unpack,
    "tar": write_tar,
    "untar": untar,
}


def serve(
    sock: socket.socket,
    config: GuestConfig,
    calls: Calls | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Answer the host on `sock` until it hangs up; with a listener, until that is closed.

    `calls` are functions that a fork may run instead of executing a program. `listener` is a
    SOCK_SEQPACKET over which further connections come (see agent.py).
    """

    async def hosts(handlers: Handlers) -> None:
        if listener:
            await serve_all(accept_from(listener, sock), handlers)
        else:
            await Agent(sock, handlers).serve()

    serve_hosts(hosts, config, calls or {})


def serve_hosts(hosts: ServeHosts, config: GuestConfig, calls: Calls) -> None:
    """Run the guest until `hosts` returns."""
    ignore_signals()
    os.umask(0o022)  # not that of the caller: files get the same modes as those of programs
    asyncio.run(_serve(hosts, config, calls))


async def _serve(hosts: ServeHosts, config: GuestConfig, calls: Calls) -> None:
    children = ChildWatcher()
    programs = Programs(config, children, {**calls, **FORKS})
    shells = ShellHandlers(programs)
    kernels = Kernels(programs)
    jobs = Jobs(programs)
    files = FileHandlers(config, children)
    denials = Denials(config.denials, config.denied_calls)

    async def exec_(request: wire.Exec, responder: Responder) -> dict[str, object]:
        return await run_exec(request, responder, programs)

    async def activity(request: wire.Activity, responder: Responder) -> dict[str, object]:
        quiet = {os.getpid(), *helpers, *shells.pids(), *kernels.pids()}
        running = [row for row in table() if row.pid not in quiet and row.state != "Z"]
        # In a container, processes without a parent are relays, which the engine started.
        programs = sum(row.parent != 0 for row in running)
        uses = config.groups.numbers() if config.groups else {}
        return {"programs": programs, "denied": denials.entries(), "uses": uses}

    def counting(handler: Handler) -> Handler:
        """Add to the answer how many programs were OOM-killed since the request came."""
        groups = config.groups
        if not groups or groups.oom_kills() is None:
            return handler

        async def handle(request: wire.GuestRequest, responder: Responder) -> dict[str, object]:
            before = groups.oom_kills() or 0
            answer = await handler(request, responder)
            return {**answer, "oom_kills": (groups.oom_kills() or 0) - before}

        return handle

    async def pack(request: wire.Pack, responder: Responder) -> dict[str, object]:
        return await run_exec(
            wire.Exec(["pack", *config.rooms], cwd="/"), responder, programs, become="pack"
        )

    async def unpack(request: wire.Unpack, responder: Responder) -> dict[str, object]:
        job = wire.Exec(["unpack"], cwd="/", stdin=True)
        return await run_exec(job, responder, programs, become="unpack")

    async def tar(request: wire.Tar, responder: Responder) -> dict[str, object]:
        return await run_exec(
            wire.Exec(["tar"], cwd=request.path), responder, programs, become="tar"
        )

    async def untar_(request: wire.Untar, responder: Responder) -> dict[str, object]:
        collected = Collector(responder)
        job = wire.Exec(["untar"], cwd=request.path, stdin=True)
        await run_exec(job, responder, programs, become="untar", sink=collected)
        return answer_of(collected.stdout)

    async def survey(request: wire.Survey, responder: Responder) -> dict[str, object]:
        # All at once: they may change while a note waits for credit.
        kinds = {"job": jobs.entries(), "shell": shells.entries(), "context": kernels.entries()}
        for kind, entries in kinds.items():
            for entry in entries:
                await responder.note(**{kind: entry})
        return {}

    handlers: Handlers = {
        wire.SetEnv: programs.set_env,
        wire.Exec: counting(exec_),
        wire.ShellCommand: counting(shells.run),
        wire.StartShell: shells.open,
        wire.EndShell: shells.close,
        wire.RunCell: counting(kernels.run),
        wire.ReplyToCall: kernels.answer,
        wire.Interrupt: kernels.interrupt,
        wire.StartKernel: kernels.open,
        wire.ListKernels: kernels.list,
        wire.RestartKernel: kernels.restart,
        wire.EndKernel: kernels.close,
        wire.Variables: kernels.variables,
        wire.SetIdle: kernels.set_idle,
        wire.SleepKernel: kernels.sleep,
        wire.SaveKernel: kernels.save,
        wire.LoadKernel: kernels.load,
        wire.Activity: activity,
        wire.Pack: pack,
        wire.Unpack: unpack,
        wire.Start: jobs.start,
        wire.Attach: jobs.attach,
        wire.Forget: jobs.forget,
        wire.Survey: survey,
        wire.Ports: list_ports,
        wire.Connect: dial,
        wire.Tar: tar,
        wire.Untar: untar_,
        wire.Read: files.read,
        wire.Write: files.write,
        wire.Edit: files.edit,
        wire.Stat: files.stat,
        wire.List: files.list,
        wire.Mkdir: files.make_dir,
        wire.Move: files.move,
        wire.Remove: files.remove,
        wire.Search: files.search,
        wire.Glob: files.glob,
        wire.Diff: files.diff,
        wire.Watch: files.watch,
    }
    watchdog = asyncio.ensure_future(watch_memory(config.memory)) if config.memory else None
    await hosts(handlers)
    await jobs.close()
    if watchdog:
        watchdog.cancel()
