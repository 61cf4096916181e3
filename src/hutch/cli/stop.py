"""`hutch stop`: stop the server of this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
from contextlib import nullcontext
from pathlib import Path

from hutch import factory
from hutch.backends.namespaces import NamespacesBackend
from hutch.errors import Conflict, HutchError, InvalidRequest, ServerUnavailable
from hutch.pidfile import ProcessHandle, claim, server_of
from hutch.settings.reading import load
from hutch.types import BoxInfo

from .options import Parser, make_parser, seconds
from .place import data_folder
from .program import Launcher, run_to_end
from .screen import complain, local_time
from .server import all_sessions, reach

STOP_TIMEOUT = 60  # seconds, on top of the time to drain


def build_parser() -> Parser:
    parser = make_parser(
        "hutch stop",
        "hutch stop [--kill] [--drain TIME] [--data-dir DIR]",
        "Stop the server of this machine, and wait until it has ended. Sessions keep\n"
        "running, with all that runs in them, until their deadline; when the server is\n"
        "started again, it takes them over.",
        "exit codes: 0, even if no server runs; 125 if hutch failed.",
    )
    parser.add_argument("sessions", nargs="*", help=argparse.SUPPRESS)  # as docker takes them
    parser.add_argument(
        "--kill", action="store_true", help="end the sessions, too, even if their server is gone"
    )
    parser.add_argument(
        "--drain",
        metavar="TIME",
        help="how long to wait for running commands: 30, 30s, 5m (default: the server's setting)",
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="the server's data folder (default: HUTCH_DATA_DIR, or as in the config file)",
    )
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    if args.sessions:
        raise InvalidRequest(
            "hutch stop stops the server, and sessions keep running; to end a session: "
            f"hutch rm {shlex.quote(args.sessions[0])}"
        )
    if args.drain is not None:
        args.drain = 0.0 if args.drain == "0" else seconds(args.drain, "--drain")
    if args.data_dir:
        os.environ["HUTCH_DATA_DIR"] = os.path.abspath(args.data_dir)
    return run_to_end(_stop(args, data_folder()))


async def _stop(args: argparse.Namespace, data: Path) -> int:
    server = server_of(data)
    with server.held() if server else nullcontext() as process:
        if server is None or process is None:
            return await _without_server(data, kill=args.kill)
        sessions = await _sessions()
        _write_options(data, args)
        if not await _is_ended(process, args.drain):
            raise ServerUnavailable(
                f"the server (pid {server.pid}) does not stop; kill -9 is safe: the next "
                "`hutch serve` finds all sessions"
            )
    print(_farewell(sessions, killed=args.kill, data_dir=args.data_dir))
    return 0


async def _without_server(data: Path, *, kill: bool) -> int:
    missing = f"no server is running on {data}; for another folder: hutch stop --data-dir DIR"
    if not (data / "run").is_dir():
        complain(missing)
        return 0
    with claim(data) as is_ours:
        if not is_ours:
            raise Conflict(
                f"a server uses {data}, but its pid is unknown: it is just starting, or "
                "run/daemon.json is broken. Nothing was stopped. Try again, or find its pid: "
                f"fuser {data}/run/daemon.lock"
            )
        complain(missing)
        return await _end_what_is_left(data) if kill else 0


async def _end_what_is_left(data: Path) -> int:
    """End sessions and boxes whose server is gone. The caller holds the lock of the folder."""
    try:
        if (data / "hutch.db").exists():
            await _close_sessions(data / "hutch.db")
    finally:
        await _end_boxes(data)
        _unmount_workspaces(data)
    return 0


def _unmount_workspaces(data: Path) -> None:
    from hutch.server.volumes import volumes_in

    for volume in volumes_in(data / "workspaces"):
        volume.unmount()


async def _end_boxes(data: Path) -> None:
    backend = NamespacesBackend(lasting=str(data / "run"))
    count = len(await backend.list())
    await backend.leave()
    await backend.end()
    if count:
        print(f"ended {_count(count, 'box', 'boxes')} that a server had left")
    for name, file, what in (
        ("docker", "docker.yard", ("container", "containers")),
        ("kubernetes", "kubernetes.scope", ("Pod", "Pods")),
    ):
        if (data / "run" / file).exists():
            await _end_others(data, name, *what)


async def _close_sessions(database: Path) -> None:
    """Mark sessions as closed, or the next server would report them as crashed or asleep."""
    from hutch.server.adoption import close_all  # slow to import, and rarely needed
    from hutch.server.store import Store

    store = await Store.open(database)
    try:
        count = await close_all(store)
    finally:
        await store.close()
    if count:
        print(f"ended {_count(count, 'session', 'sessions')} that a server had left")


async def _end_others(data: Path, name: str, one: str, many: str) -> None:
    """End what a server had made with another backend."""
    # Only then: settings that are wrong must not keep containers alive.
    cluster = load(data).settings.cluster() if name == "kubernetes" else None
    backend = factory.backend(name, lasting=str(data / "run"), cluster=cluster)
    try:
        count = len(await backend.list())
    finally:
        await backend.close()
    if count:
        print(f"ended {_count(count, one, many)} that a server had left")


async def _sessions() -> list[BoxInfo] | None:
    """The sessions of the server; None if it does not answer, which must not prevent the stop."""
    os.environ.pop("HUTCH_URL", None)
    try:
        async with asyncio.timeout(5), reach(None) as transport:
            return await all_sessions(transport)
    except (HutchError, TimeoutError):
        return None


def _write_options(data: Path, args: argparse.Namespace) -> None:
    """Write how to stop to a file, which a signal cannot carry. No file if there are no options."""
    path = data / "run" / "stop.json"
    if not args.kill and args.drain is None:
        return
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(handle, "w") as file:
        json.dump({"drain": args.drain, "kill": args.kill}, file)


async def _is_ended(process: ProcessHandle, drain: float | None) -> bool:
    process.signal(signal.SIGTERM)
    return await asyncio.to_thread(process.ends_within, STOP_TIMEOUT + (drain or 0))


def _farewell(sessions: list[BoxInfo] | None, *, killed: bool, data_dir: str | None = None) -> str:
    if sessions is None:
        return "stopped" if killed else "stopped; sessions go on"
    one = len(sessions) == 1
    count = _count(len(sessions), "session", "sessions")
    if killed or not sessions:
        return f"stopped; {count} ended with it"
    go = f"stopped; {count} {'goes' if one else 'go'} on"
    again = f"`{_serve_again(sessions[0].backend, data_dir)}` has {'it' if one else 'them'} again"
    ends = [session.expires_at for session in sessions]
    last = max((end for end in ends if end is not None), default=None)
    if None in ends or last is None:
        return f"{go} without a deadline; {again}"
    return f"{go}, {'until' if one else 'the last until'} {local_time(last)}; {again}"


def _serve_again(backend: str, data_dir: str | None) -> str:
    """The command that starts a server for these sessions again."""
    words = ["hutch", "serve"]
    if data_dir:
        words += ["--data-dir", shlex.quote(data_dir)]
    if backend != factory.NAMES[0]:
        words += ["--backend", backend]
    return " ".join(words)


def _count(number: int, one: str, many: str) -> str:
    return f"{number or 'no'} {one if number == 1 else many}"
