"""The ASGI application: every operation, with the routes of `operations.py` and `serving.py`.

First the origin of a request is checked, then its key, then its content; then the service carries
it out. A client that disconnects cancels its request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from hutch import operations as op
from hutch import serving
from hutch.codec import dump
from hutch.errors import HutchError, InvalidRequest, NotFound, ServerUnavailable, as_answers
from hutch.operations import Operation, StreamOperation

from . import docs, mcp, ports, sandkasten, streams, terminals
from .metrics import KIND, Metrics
from .openapi import document
from .origins import Origins
from .request import Act, ClientDisconnected, HTTPError, Request, workspace_name
from .routes import SESSION, Route, Router, templates
from .streams import EVENT_STREAM, send_events

if TYPE_CHECKING:
    from hutch.server.service import Service

MAX_UPLOAD = 10 << 20  # bytes, of a form with files; other ways to send files have no limit
HEALTH = ("/healthz", "/readyz")  # answered however many connections there are
_SESSION = re.compile(SESSION)
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
    """An ASGI application."""

    def __init__(
        self,
        service: Service,
        *,
        hosts: Iterable[str] = (),
        max_upload: int = MAX_UPLOAD,
        agents: mcp.Mcp | None = None,
    ) -> None:
        self._service = service
        self._origins = Origins(hosts)
        self._metrics = Metrics(service)
        self._openapi = dump(document())
        self._router: Router[Act] = Router()
        self._sockets: Router[terminals.SocketAct] = Router()
        for name, cls in op.TABLE.items():
            act = _OWN.get(cls) or partial(perform, cls)
            for template, _ in templates(name, cls):
                self._router.add(cls.verb, Route(template, act))
        for verb, template, own in sandkasten.routes(max_upload):
            self._router.add(verb, Route(template, own))
        for template, on_socket in terminals.ROUTES:
            self._sockets.add("GET", Route(template, on_socket))
        self._router.add("*", Route(ports.TEMPLATE, ports.forward, rest=True))
        if agents:
            self._router.add("*", Route(mcp.TEMPLATE, agents))
        for template, own, is_public in (
            ("/healthz", _healthy, True),
            ("/readyz", _ready, True),
            ("/openapi.json", self._describe, True),
            ("/docs", docs.page, True),
            ("/", docs.home, True),
            ("/docs.js", docs.script, True),
            ("/metrics", self._measure, False),
        ):
            self._router.add("GET", Route(template, own, is_public))

    def __repr__(self) -> str:
        return f"<App of {self._service!r}>"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive, send, self._service)
        try:
            if scope["type"] == "websocket":
                await terminals.open_socket(request, receive, send, self._find_socket)
            else:
                await self._take(request)
        finally:
            request.end()

    async def _take(self, request: Request) -> None:
        connection = request.scope["state"]["connection"]
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
        if request.scope["state"]["connection"].in_reserve and route.template not in HEALTH:
            raise ServerUnavailable("too many connections; try again")
        if not route.is_public:
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


def make_app(
    service: Service,
    *,
    hosts: Iterable[str] = (),
    max_upload: int = MAX_UPLOAD,
    agents: mcp.Mcp | None = None,
) -> App:
    """`hosts`: names of this server for the Host header, besides those of the loopback.

    `agents`: the handler of /mcp, if there is one.
    """
    return App(service, hosts=hosts, max_upload=max_upload, agents=agents)


async def perform(cls: type[Operation[object]], request: Request) -> None:
    """Carry out one operation, and answer with its answer, or with its events."""
    if cls.streams and request.method == "HEAD":
        raise HTTPError(
            405, "this path takes GET, not HEAD", headers=[(b"allow", cls.verb.encode())]
        )
    operation = await request.operation(cls)
    wants_events = EVENT_STREAM in request.headers.get(b"accept", b"")
    if isinstance(operation, op.RunCode) and operation.functions and not wants_events:
        raise InvalidRequest("functions need events: Accept: text/event-stream, to see the calls")
    events = wants_events or cls.answer is None
    if isinstance(operation, StreamOperation) and events:
        # When the server stops, it does not wait for clients that only follow a stream.
        request.scope["state"]["connection"].only_looks_on = cls.verb == "GET"
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
