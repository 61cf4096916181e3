"""Every operation, over HTTP. The routes are those of `operations.py` and `serving.py`.

A request is checked for where it comes from, then for who sends it, then for what it asks; and is
answered with what the service says. Whoever hangs up cancels what they asked for.
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
from hutch.codec import dump, to_json
from hutch.errors import HutchError, InvalidRequest, NotFound
from hutch.types import Execution, Result

from . import contents, docs, ports, sandkasten, terminals
from .ask import Act, Ask, Gone, Refused
from .figures import KIND, Figures
from .openapi import document
from .origins import Origins
from .routes import Route, Router
from .streams import EVENT_STREAM, last_of, send_events

if TYPE_CHECKING:
    from hutch.engine.service import Service

SESSION = re.compile(r"[0-9a-f]{8}-[0-9a-f]{3,4}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MAX_UPLOAD = 10 << 20  # bytes, of a form with files; other ways to send files have no limit
_SANDKASTEN_WORKSPACE = "sandkasten-ws-"
log = logging.getLogger("hutch.api")

# Operations whose answer has a form of its own.
_OWN: dict[type[op.Operation], Act] = {
    op.ReadFile: contents.read_file,
    op.OpenSession: sandkasten.open_session,
    op.GetStats: sandkasten.stats,
    serving.ExportWorkspace: contents.export_workspace,
    serving.ExportJournal: contents.export_journal,
}


class App:
    """An ASGI application."""

    def __init__(
        self, service: Service, *, hosts: Iterable[str] = (), max_upload: int = MAX_UPLOAD
    ) -> None:
        self._service = service
        self._origins = Origins(hosts)
        self._figures = Figures(service)
        self._openapi = dump(document())
        self._router: Router[Act] = Router()
        self._sockets: Router[terminals.SocketAct] = Router()
        for cls in op.TABLE.values():
            act = _OWN.get(cls) or partial(perform, cls)
            for template in templates(cls):
                self._router.add(cls.verb, Route(template, act))
        for verb, template, own in sandkasten.routes(max_upload):
            self._router.add(verb, Route(template, own))
        for template, on_socket in terminals.ROUTES:
            self._sockets.add("GET", Route(template, on_socket))
        self._router.add("*", Route(ports.TEMPLATE, ports.forward, rest=True))
        for template, own, is_public in (
            ("/healthz", _healthy, True), ("/readyz", _ready, True),
            ("/openapi.json", self._describe, True), ("/docs", docs.page, True),
            ("/docs.js", docs.script, True), ("/metrics", self._measure, False),
        ):  # fmt: skip
            self._router.add("GET", Route(template, own, is_public))

    def __repr__(self) -> str:
        return f"<App of {self._service!r}>"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        ask = Ask(scope, receive, send, self._service)
        if scope["type"] == "websocket":
            await terminals.open_socket(ask, receive, send, self._find_socket)
            return
        connection = scope["state"]["connection"]
        connection.task = asyncio.current_task()
        began = time.perf_counter()
        try:
            await self._answer(ask)
        except Gone:
            pass
        except asyncio.CancelledError:
            if not connection.is_gone:
                raise
        finally:
            connection.task, connection.only_looks_on = None, False
            seconds = time.perf_counter() - began
            self._figures.add(ask.method, ask.template, ask.status or 499, seconds)

    async def _answer(self, ask: Ask) -> None:
        try:
            self._origins.check(ask)
            await self._find(ask)(ask)
        except (HutchError, Refused) as exc:
            await ask.fail(exc)
        except Gone:
            raise
        except Exception:
            log.exception("request %s failed", ask.id.decode())
            await ask.fail(HutchError(f"the server failed: its log says how ({ask.id.decode()})"))

    def _find(self, ask: Ask) -> Act:
        try:
            route, parameters = self._router.find(ask.method, ask.path)
        except (NotFound, Refused):
            ask.authenticate()  # strangers are not told what there is
            raise
        ask.template = route.template
        if not route.is_public:
            ask.authenticate()
        ask.parameters = _checked(parameters)
        return route.act

    def _find_socket(self, ask: Ask) -> terminals.SocketAct:
        self._origins.check(ask)
        route, parameters = self._sockets.find("GET", ask.path)
        ask.parameters = _checked(parameters)
        return route.act

    async def _describe(self, ask: Ask) -> None:
        await ask.answer(200, self._openapi)

    async def _measure(self, ask: Ask) -> None:
        await ask.answer(200, self._figures.text(), kind=KIND)


def make_app(service: Service, *, hosts: Iterable[str] = (), max_upload: int = MAX_UPLOAD) -> App:
    """`hosts`: names that clients may use for this server, beside those of the loopback."""
    return App(service, hosts=hosts, max_upload=max_upload)


def templates(cls: type[op.Operation]) -> list[str]:
    """Where an operation is found: those on files of a session also on those of a workspace."""
    prefix = "/v1/sessions/{session}/files"
    if not cls.route.startswith(prefix):
        return [cls.route]
    return [cls.route, cls.route.replace("/sessions/{session}/", "/workspaces/{workspace}/")]


async def perform(cls: type[op.Operation], ask: Ask) -> None:
    """Carry out one operation, and answer with its value, its events, or its last item."""
    if cls.streams and ask.method == "HEAD":
        raise Refused(405, "this path takes GET, not HEAD", headers=[(b"allow", cls.verb.encode())])
    answer = await ask.perform(await ask.operation(cls))
    if not cls.streams:
        await ask.answer_with(cls, answer)
    elif not _has_last(cls) or EVENT_STREAM in ask.headers.get(b"accept", b""):
        # When the server stops, it does not wait for those who only look on.
        ask.scope["state"]["connection"].only_looks_on = cls.verb == "GET"
        await send_events(ask, answer)
    else:
        await ask.answer(200, to_json(await last_of(answer)))


def _has_last(cls: type[op.Operation]) -> bool:
    """Whether the last item says it all."""
    items = getattr(cls.answer, "__args__", ())
    return Result in items or Execution in items


def _checked(parameters: dict[str, str]) -> dict[str, str]:
    session = parameters.get("session")
    if session is not None and not SESSION.fullmatch(session):
        raise InvalidRequest(f"this is no id of a session: {session[:64]!a}")
    if "workspace" in parameters:
        name = parameters["workspace"].removeprefix(_SANDKASTEN_WORKSPACE)
        parameters = {**parameters, "workspace": name}
    return parameters


async def _healthy(ask: Ask) -> None:
    await ask.answer(200, b'{"status":"ok"}')


async def _ready(ask: Ask) -> None:
    if ask.service.is_ready:
        await ask.answer(200, b'{"status":"ready"}')
    else:
        await ask.answer(503, b'{"status":"not ready"}')
