"""The ASGI application: every operation, with the routes of `operations.py` and `serving.py`.

The origin of a request is checked first, then its key, then its content. Then the service carries
it out. A client that disconnects cancels its request.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hutch import operations as op
from hutch import serving
from hutch.codec import dump
from hutch.errors import HutchError, InvalidRequest, NotFound, ServerUnavailable, as_answers
from hutch.operations import Operation, StreamOperation

from . import mcp, ports, sandkasten, streams, terminals
from .limits import ConnectionLimits
from .openapi import document
from .pages import DashboardPages, docs_page, docs_script
from .request import (
    Act,
    ClientDisconnected,
    HTTPError,
    Receive,
    Request,
    Scope,
    Send,
    workspace_name,
)
from .routes import SESSION_PATTERN, Route, Router, templates
from .streams import EVENT_STREAM, send_events

if TYPE_CHECKING:
    from hutch.server.service import Service

MAX_UPLOAD = 10 << 20  # bytes, of a form with files; other ways to send files have no limit
HEALTH = ("/healthz", "/readyz")  # answered however many connections there are
_SESSION = re.compile(SESSION_PATTERN)
log = logging.getLogger("hutch.server.http")

# Operations whose answer is not simply JSON or events.
_OWN: dict[type[Operation[object]], Act] = {
    op.ReadFile: streams.read_file,
    op.PackFolder: streams.pack_folder,
    op.OpenSession: sandkasten.open_session,
    op.GetStats: sandkasten.stats,
    serving.ExportWorkspace: streams.export_workspace,
    serving.ExportJournal: streams.export_journal,
}


class App:
    def __init__(
        self,
        service: Service,
        *,
        hosts: Iterable[str] = (),
        max_upload: int = MAX_UPLOAD,
        agents: mcp.Mcp | None = None,
        pages: DashboardPages | None = None,
    ) -> None:
        """`hosts`: names of this server for the Host header, besides the loopback's.

        `agents`: the handler of /mcp, if there is one. `pages`: the dashboard, if not the one that
        is installed.
        """
        self._service = service
        self._origins = Origins(hosts)
        self._metrics = Metrics(service)
        self._openapi = dump(document())
        self._router: Router[Act] = Router()
        self._sockets: Router[terminals.SocketAct] = Router()
        for name, cls in op.TABLE.items():
            act = _OWN.get(cls) or partial(perform, cls)
            for template, _ in templates(name, cls):
                self._router.add(cls.verb, Route(template, act, cls.is_public))
        for verb, template, own in sandkasten.routes(max_upload):
            self._router.add(verb, Route(template, own))
        for template, on_socket in terminals.ROUTES:
            self._sockets.add("GET", Route(template, on_socket))
        self._router.add("*", Route(ports.TEMPLATE, ports.forward, rest=True))
        self._router.add("*", Route(ports.PREVIEW, ports.preview, is_public=True, rest=True))
        if agents:
            self._router.add("*", Route(mcp.TEMPLATE, agents))
        for template, own, is_public in (
            ("/healthz", _healthy, True),
            ("/readyz", _ready, True),
            ("/openapi.json", self._describe, True),
            ("/docs", docs_page, True),
            ("/docs.js", docs_script, True),
            ("/metrics", self._measure, False),
        ):
            self._router.add("GET", Route(template, own, is_public))
        for template, own in (pages or DashboardPages()).routes():
            self._router.add("GET", Route(template, own, is_public=True))

    def __repr__(self) -> str:
        return f"<App of {self._service!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send, self._service)
        try:
            if scope["type"] == "websocket":
                await terminals.open_socket(request, receive, send, self._find_socket)
            else:
                await self._take(request)
        finally:
            request.end()

    async def _take(self, request: Request) -> None:
        connection = request.connection
        connection.task = asyncio.current_task()
        began = time.perf_counter()
        try:
            await self._answer(request)
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            if not connection.is_gone:
                raise
        finally:
            connection.task, connection.only_looks_on = None, False
            seconds = time.perf_counter() - began
            self._metrics.add(request.method, request.template, request.status or 499, seconds)

    async def _answer(self, request: Request) -> None:
        fail = partial(mcp.fail, request) if request.path == mcp.TEMPLATE else request.fail
        try:
            self._origins.check(request)
            with as_answers():
                await self._find(request)(request)
        except (HutchError, HTTPError) as exc:
            await fail(exc)
        except ClientDisconnected:
            raise
        except Exception:
            log.exception("request %s failed", request.id.decode())
            await fail(
                HutchError(f"internal error: see the server's log (request {request.id.decode()})")
            )

    def _find(self, request: Request) -> Act:
        try:
            route, parameters = self._router.find(request.method, request.path)
        except (NotFound, HTTPError):
            request.authenticate()  # without a key, unknown paths look like known ones
            raise
        request.template = route.template
        if request.connection.in_reserve and route.template not in HEALTH:
            raise ServerUnavailable("too many connections; try again")
        if route.is_public:
            request.come_without_key()
        else:
            request.authenticate()
        request.parameters = _checked(parameters)
        return route.act

    def _find_socket(self, request: Request) -> terminals.SocketAct:
        self._origins.check(request)
        route, parameters = self._sockets.find("GET", request.path)
        request.parameters = _checked(parameters)
        return route.act

    async def _describe(self, request: Request) -> None:
        await request.answer(200, self._openapi)

    async def _measure(self, request: Request) -> None:
        sees_all = request.caller.scope in ("metrics", "admin")
        owner = None if sees_all else request.caller.owner
        await request.answer(200, self._metrics.text(request.limits, owner), kind=KIND)


async def perform(cls: type[Operation[object]], request: Request) -> None:
    """Carry out one operation, and send its answer, or its events.

    Raises HutchError, or HTTPError, if it fails before the response has begun.
    """
    if cls.streams and request.method == "HEAD":
        raise HTTPError(
            405, "this path takes GET, not HEAD", headers=[(b"allow", cls.verb.encode())]
        )
    operation = await request.operation(cls)
    wants_events = EVENT_STREAM in request.headers.get(b"accept", b"")
    if isinstance(operation, op.RunCode) and operation.functions and not wants_events:
        raise InvalidRequest(
            "functions are called through events: send `Accept: text/event-stream`"
        )
    events = wants_events or cls.answer is None
    if isinstance(operation, StreamOperation) and events:
        # When the server stops, it does not wait for clients that only follow a stream.
        request.connection.only_looks_on = cls.verb == "GET"
        await send_events(request, await request.stream(operation))
    else:
        await request.answer_with(operation, await request.perform(operation))


def _checked(parameters: dict[str, str]) -> dict[str, str]:
    session = parameters.get("session")
    if session is not None and not _SESSION.fullmatch(session):
        raise InvalidRequest(f"not a session id: {session[:64]!a}")
    if "workspace" in parameters:
        parameters = {**parameters, "workspace": workspace_name(parameters["workspace"])}
    return parameters


async def _healthy(request: Request) -> None:
    await request.answer(200, b'{"status":"ok"}')


async def _ready(request: Request) -> None:
    if request.service.is_ready:
        await request.answer(200, b'{"status":"ready"}')
    else:
        await request.answer(503, b'{"status":"not ready"}')


# --- metrics ---------------------------------------------------------------------------------

KIND = b"text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


class Metrics:
    """For Prometheus: requests and their durations, sessions, and connections."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._counts = Counter(
            "hutch_requests",
            "Requests, by route and status.",
            ["verb", "route", "status"],
            registry=self._registry,
        )
        self._times = Histogram(
            "hutch_request_seconds",
            "How long requests took.",
            ["verb", "route"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._limits = ConnectionLimits()  # replaced by the server's own with the first request
        self._registry.register(self)
        # Looking labels up is slow, so their counters are kept.
        self._counters: dict[tuple[str, str, int], Counter] = {}
        self._timers: dict[tuple[str, str], Histogram] = {}

    def add(self, verb: str, route: str, status: int, seconds: float) -> None:
        """`route` is a template, so that callers cannot make up series."""
        counter = self._counters.get((verb, route, status))
        if counter is None:
            labels = self._counts.labels(verb, route, status)
            counter = self._counters[verb, route, status] = labels
        counter.inc()
        timer = self._timers.get((verb, route))
        if timer is None:
            timer = self._timers[verb, route] = self._times.labels(verb, route)
        timer.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield from _gauges(self._service.watching.metrics())
        ended = CounterMetricFamily(
            "hutch_connections_ended", "Connections that the server ended.", labels=["reason"]
        )
        for reason, count in self._limits.ended.items():
            ended.add_metric([reason], count)
        yield ended
        yield GaugeMetricFamily("hutch_connections", "Open connections.", self._limits.count)

    def text(self, limits: ConnectionLimits, owner: str | None) -> bytes:
        """All metrics; for one owner, only those of their own sessions."""
        if owner is not None:
            own = CollectorRegistry()
            own.register(_Fixed(_gauges(self._service.watching.metrics(owner))))
            return generate_latest(own)
        self._limits = limits
        return generate_latest(self._registry)


class _Fixed(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics


def _gauges(values: Mapping[str, float]) -> Iterator[Metric]:
    for name, value in values.items():
        yield GaugeMetricFamily(f"hutch_{name}", name.replace("_", " "), value)


# --- Host and Origin -------------------------------------------------------------------------

LOOPBACK = frozenset(("127.0.0.1", "localhost", "[::1]"))
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::([0-9]{1,5}))?")


class Origins:
    """Checks of Host and Origin: from a browser, only pages of this server may send requests.

    An attacker's name can be made to resolve to this machine (DNS rebinding), so the Host header
    must have one of our names; and pages of other origins are refused, with or without a key. Both
    are checked before anything else.
    """

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        """`hosts`: names of this server, without a port, besides the loopback's."""
        self._hosts = LOOPBACK | {host.lower().rstrip(".") for host in hosts}

    def check(self, request: Request) -> None:
        """Raises HTTPError unless host and origin are allowed."""
        if request.doubled is not None:
            raise HTTPError(400, f"more than one {request.doubled.decode()} header: send one")
        host = request.headers.get(b"host", b"").decode("latin-1")
        match = _HOST.fullmatch(host)
        if not match:
            raise HTTPError(400, "the Host header must name this server")
        if not request.is_local and not self._is_ours(match[1].lower(), request):
            raise HTTPError(
                421, f"this server is not called {host}: see `allowed_hosts` in its config"
            )
        self._check_browser(request, host)

    def _is_ours(self, name: str, request: Request) -> bool:
        if name.rstrip(".") in self._hosts:
            return True
        # An address cannot be pointed elsewhere, as a name can.
        server = request.scope.get("server")
        try:
            address = ipaddress.ip_address(name.strip("[]"))
            return server is not None and address == ipaddress.ip_address(server[0])
        except ValueError:
            return False

    def _check_browser(self, request: Request, host: str) -> None:
        origin = request.headers.get(b"origin")
        if request.path.startswith("/preview/") and origin in (None, b"null"):
            return  # a page in a sandbox, which belongs to no site; it has to know the token
        if origin is not None:
            text = origin.decode("latin-1")
            # Behind a proxy that terminates TLS, we cannot know which of the two it was.
            schemes = (
                ("https",) if request.scope["scheme"] in ("https", "wss") else ("http", "https")
            )
            if text not in [f"{scheme}://{host}" for scheme in schemes]:
                raise HTTPError(403, "pages of other servers may not use this one", code=_CODE)
        site = request.headers.get(b"sec-fetch-site", b"none")
        if site not in (b"none", b"same-origin") and not _opens_dashboard(request):
            raise HTTPError(403, "pages of other servers may not use this one", code=_CODE)
        if (
            request.scope["type"] == "websocket"
            and origin is None
            # Not Sec-Fetch-Mode: the WebSocket of Node sends that alone, and is in no page.
            and b"sec-fetch-site" in request.headers
        ):
            raise HTTPError(403, "a WebSocket from a browser needs an Origin header", code=_CODE)


def _opens_dashboard(request: Request) -> bool:
    """Whether a link leads a browser's whole window to the dashboard.

    That page is public, the same for everyone, and cannot be framed. `hutch dashboard` leads there
    from a file, which to a browser is another site.
    """
    return (
        request.method == "GET"
        and request.path == "/"
        and request.headers.get(b"sec-fetch-mode") == b"navigate"
        and request.headers.get(b"sec-fetch-dest") == b"document"
    )


_CODE = "not_permitted"
