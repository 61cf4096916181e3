"""Composes `hutch serve`: settings, a backend whose boxes outlive it, the service, HTTP.

Everything is below one folder, which one process at a time uses. What must survive a crash is in
the database there, or held by the launcher; this process may be killed at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from hutch import __version__, factory, pidfile
from hutch.client.http import address_of
from hutch.errors import Conflict, InvalidRequest
from hutch.settings import FIELDS, Settings
from hutch.settings.reading import default_of
from hutch.settings.writing import SettingsFile

from .http.app import App
from .http.limits import ConnectionLimits
from .http.mcp import Mcp
from .http.pages import NOT_BUILT, DashboardPages, is_built
from .http.server import HTTPServer
from .http.tls import Certificate
from .log import ServerLog, limit_logs
from .peers import HttpPeer
from .service import Service

log = logging.getLogger("hutch")
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(
    settings: Settings,
    ready: Callable[[str], object] = lambda url: None,
    file: SettingsFile | None = None,
) -> int:
    """Serve until a signal comes. `ready` is called with the url once requests are answered.

    `file` is where the settings come from, for operators who change them over HTTP.
    """
    folder = prepare(Path(settings.data_dir))
    os.environ["HUTCH_DATA_DIR"] = str(folder)  # images are kept there, too
    with claimed(folder):
        return asyncio.run(_serve(settings, folder, ready, file))


def prepare(folder: Path) -> Path:
    """Make the data folder, readable by its owner only. Raises InvalidRequest."""
    folder = folder.absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise InvalidRequest(f"{folder} belongs to another user: choose another --data-dir")
        (folder / "run").mkdir(mode=0o700, exist_ok=True)
        for private in (folder, folder / "run"):
            os.chmod(private, 0o700)  # it may have been made before, with another mode
    except OSError as exc:
        raise InvalidRequest(f"cannot use the data folder {folder}: {exc.strerror}") from None
    return folder


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other servers off this folder. Raises Conflict, which names the server that has it."""
    with pidfile.claim(folder) as is_ours:
        if not is_ours:
            first = pidfile.server_of(folder)
            who = f"pid {first.pid}, {first.url}" if first else "it is just starting"
            raise Conflict(
                f"another server has {folder} ({who}): stop it with `hutch stop`, or choose "
                "another folder with --data-dir"
            )
        yield


async def _serve(
    settings: Settings,
    folder: Path,
    ready: Callable[[str], object],
    file: SettingsFile | None,
) -> int:
    _check_replica_url(settings)
    files = _raise_limits()
    log_records = ServerLog()
    logging.getLogger().addHandler(log_records)
    # Its lines would contain whole urls, and with them what callers request.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # It warns of every write to a client that has disconnected, which is normal.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    limit_logs()
    with contextlib.suppress(OSError):
        (folder / "run/stop.json").unlink()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP:
        loop.add_signal_handler(number, stop.set)
    certificate = None
    if settings.tls_cert and settings.tls_key:
        certificate = Certificate(settings.tls_cert, settings.tls_key)
    rules = settings.rules()
    if not rules.no_dashboard and not is_built():
        rules = replace(rules, no_dashboard=NOT_BUILT)
    began = time.monotonic()
    backend = factory.backend(
        settings.backend, lasting=str(folder / "run"), cluster=settings.cluster()
    )
    service = await Service.open(
        folder,
        backend,
        factory.images(settings.backend),
        rules,
        settings.api_key or None,
        settings=file,
        log_records=log_records,
        url=settings.kubernetes_replica_url or "",
        connect=HttpPeer,
    )
    took = time.monotonic() - began
    service.audit.add("server_started", detail={"version": __version__, **_in_force(settings)})
    try:
        _check_exposure(settings, service)
        agents = Mcp(lambda: import_module("hutch.mcp.http").McpEndpoint)
        pages = DashboardPages(is_enabled=settings.dashboard_enabled)
        app = App(service, hosts=settings.allowed_hosts, agents=agents, pages=pages)
        socket = folder / "run/hutch.sock"
        server = await HTTPServer.start(
            app, settings.listen, socket, _limits(settings, files), certificate
        )
        try:
            _log_start(service, took)  # not before the port is ours
            _leave_card(_card(server.url, socket), folder)
            ready(server.url)
            log.info("listening on %s", server.url)
            await stop.wait()
        finally:
            pidfile.take_back(folder)
            stopping = _read_stop_file(folder, settings)
            log.info("stopping")
            service.audit.add(
                "server_stopped",
                detail={"drain": str(stopping.drain), "kill": str(stopping.kill)},
            )
            await server.stop(stopping.drain)
            await agents.close()
    except BaseException:
        await service.close()
        raise
    stay = await service.close(drain=stopping.drain, kill=stopping.kill)
    log.info("stopped: %d sessions stay until their deadline", stay)
    return 0


def _check_replica_url(settings: Settings) -> None:
    """Raises InvalidRequest."""
    if url := settings.kubernetes_replica_url:
        if settings.backend != "kubernetes":
            raise InvalidRequest(
                "kubernetes.replica_url is set, and only servers with backend kubernetes share "
                f"sessions, not {settings.backend}"
            )
        address_of(url)


def _log_start(service: Service, took: float) -> None:
    report = service.adoption
    log.info(
        "started in %.0f ms: %d sessions adopted, %d expired, %d lost, %d kept for another "
        "version, %d boxes swept",
        took * 1000,
        report.adopted,
        report.expired,
        report.lost,
        report.stranded,
        report.swept,
    )


def _check_exposure(settings: Settings, service: Service) -> None:
    if service.is_open and not settings.listen.is_loopback:
        raise InvalidRequest(
            f"{settings.listen} can be reached from other machines, and there is no key: make one "
            "with `hutch init`, or set api_key (HUTCH_API_KEY); or listen on 127.0.0.1"
        )


def _in_force(settings: Settings) -> dict[str, str]:
    """Settings that differ from their defaults, for the audit log."""
    changed = {}
    for key, field in FIELDS.items():
        value = getattr(settings, field.name)
        if key == "data_dir" or value != default_of(key):
            is_secret = key == "api_key"
            changed[key] = "(set)" if is_secret else str(field.metadata["kind"].show(value))
    return changed


class _Stopping(NamedTuple):
    drain: float  # seconds to wait for what runs
    kill: bool  # whether to end all sessions


def _read_stop_file(folder: Path, settings: Settings) -> _Stopping:
    """How to stop, as `hutch stop` wrote it; the settings, if it was another signal."""
    path = folder / "run/stop.json"
    default = _Stopping(settings.drain_seconds, False)
    try:
        body = json.loads(path.read_bytes())
        path.unlink()
    except (OSError, ValueError):
        return default
    drain, kill = (body.get(name) if isinstance(body, dict) else None for name in default._fields)
    if not isinstance(drain, int | float) or isinstance(drain, bool) or not 0 <= drain < math.inf:
        drain = default.drain
    return _Stopping(float(drain), kill if isinstance(kill, bool) else default.kill)


def _card(url: str, socket: Path) -> pidfile.ServerPidFile:
    pid = os.getpid()
    return pidfile.ServerPidFile(
        pid, pidfile.began(pid) or 0, pidfile.boot(), url, str(socket), __version__
    )


def _leave_card(card: pidfile.ServerPidFile, folder: Path) -> None:
    try:
        card.leave_in(folder)
    except OSError as exc:
        # The server is useful on a full disk, too: files can be removed.
        log.warning(
            "cannot write run/daemon.json: %s; `hutch stop` does not find this server: "
            "kill %d ends it",
            exc.strerror,
            card.pid,
        )


def _raise_limits() -> int:
    """Raise the limit of open files, and return it: boxes and connections need descriptors."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def _limits(settings: Settings, files: int) -> ConnectionLimits:
    """The limits of connections. Boxes need descriptors, too."""
    return ConnectionLimits(
        max_connections=settings.connections_per_address,
        max_per_owner=settings.connections_per_owner,
        max_total=min(settings.connections_total, max(1, files // 2)),
    )
