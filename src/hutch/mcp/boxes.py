"""Which box a call is for: the one that it names, or else the caller's own.

The protocol has no sessions any more, so a box is an argument like any other. A caller who leaves
it out gets a box of their own, created by the first call: one per process (stdio), per key (HTTP),
or per session of the older protocol. A box that died is never replaced silently: the call that
notices says so, and the next one gets a new box.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from functools import partial

from hutch import operations as op
from hutch.client._async import AsyncSandbox
from hutch.errors import BoxLost, HutchError, NoSession, SessionEnded
from hutch.tools import AsyncToolbox
from hutch.tools.toolbox import Once
from hutch.types import ENDED, BoxInfo

from .clients import McpClient
from .progress import ProgressTransport

LABEL = "mcp"  # of a caller's own box, at a server
MAX_KNOWN = 1000  # boxes whose tools are kept, with the files they read and what can be recalled

Opened = tuple[BoxInfo, str]  # with a note for the model


class McpBoxes:
    """The boxes of all callers. Errors of the transport are raised as they are."""

    def __init__(self) -> None:
        self._own: OrderedDict[tuple[str, str], Once[Opened]] = OrderedDict()
        self._known: OrderedDict[tuple[str, str, bool], AsyncToolbox] = OrderedDict()
        self._to_close: dict[str, McpClient] = {}

    def __repr__(self) -> str:
        return f"<McpBoxes {len(self._own)} of callers' own, {len(self._known)} known>"

    async def find(self, client: McpClient, id: str | None) -> tuple[AsyncToolbox, str]:
        """The tools of a box, and a note for the model, or "".

        Without an `id`, it is the caller's own box, which is created if needed. Raises SessionEnded
        if the box has ended.
        """
        if id:
            return await self._named(client, id), ""
        key = (client.name, client.session_id)
        opening = self._own.setdefault(key, Once(partial(self._open_own, client)))
        if len(self._own) > MAX_KNOWN:
            self._own.popitem(last=False)
        is_new = not opening.has_begun
        info, note = await opening.get()
        return self._tools(client, info), note if is_new else ""

    def own(self, client: McpClient) -> AsyncToolbox | None:
        """The caller's own box, if it has been opened."""
        opening = self._own.get((client.name, client.session_id))
        opened = opening.value if opening else None
        return self._tools(client, opened[0]) if opened else None

    def known(self, client: McpClient) -> list[AsyncToolbox]:
        """The boxes that the caller has used, the most recent first."""
        by_id = {key[1]: box for key, box in self._known.items() if key[0] == client.name}
        return list(reversed(by_id.values()))

    def lost(self, client: McpClient, toolbox: AsyncToolbox) -> bool:
        """Forget a box that is gone. True if it was the caller's own."""
        own, id = self.own(client), toolbox.context.box.id
        was_own = own is not None and own.context.box.id == id
        if was_own:
            del self._own[client.name, client.session_id]
        self._forget(id)
        return was_own

    async def create(self, client: McpClient, order: op.OpenSession) -> AsyncToolbox:
        info = await client.transport.perform(order)
        if client.owner is None:  # at a server, boxes stay until their deadline
            self._to_close[info.id] = client
        return self._tools(client, info)

    async def close(self, client: McpClient, id: str) -> None:
        await client.transport.perform(op.CloseSession(id))
        if (own := self.own(client)) and own.context.box.id == id:
            del self._own[client.name, client.session_id]
        self._forget(id)

    async def leave(self, client: McpClient) -> None:
        """Close the caller's own box, even one that is still being opened."""
        opening = self._own.get((client.name, client.session_id))
        if opening and opening.has_begun:
            with suppress(HutchError):  # its caller has the error
                await opening.get()
        if own := self.own(client):
            try:
                await self.close(client, own.context.box.id)
            except HutchError:
                pass  # it was gone, or ends at its deadline

    async def close_made(self) -> None:
        """Close the boxes of callers that end with this process."""
        await asyncio.gather(*(opening.cancel() for opening in self._own.values()))
        for id, client in list(self._to_close.items()):
            try:
                await self.close(client, id)
            except HutchError:
                pass  # it is gone already, or ends at its deadline

    async def _open_own(self, client: McpClient) -> Opened:
        if client.owner is None:
            return _new(await self.create(client, client.order))
        label = f"{client.name}/{client.session_id}"
        earlier = op.ListSessions("live", owner=client.owner, label=f"{LABEL}={label}", limit=1)
        for info in await client.transport.perform(earlier):
            if info.owner == client.owner:  # it survived a restart of the server
                return info, f"[This is your box {info.id}, as you left it.]"
        labels = {**client.order.labels, LABEL: label}
        return _new(await self.create(client, replace(client.order, labels=labels)))

    async def _named(self, client: McpClient, id: str) -> AsyncToolbox:
        if toolbox := self._use(client, id):
            return toolbox
        info = await client.transport.perform(op.GetSession(id))
        if info.status in ENDED:
            raise SessionEnded(f"box {id} is {info.status}" + (f": {info.why}" if info.why else ""))
        return self._tools(client, info)

    def _use(self, client: McpClient, id: str) -> AsyncToolbox | None:
        key = (client.name, id, client.options.raw)
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def _tools(self, client: McpClient, info: BoxInfo) -> AsyncToolbox:
        """The tools of a box, for the options of this request: another may have other options."""
        if known := self._use(client, info.id):
            return known
        box = AsyncSandbox(info, ProgressTransport(client.transport), owned=False)
        toolbox = AsyncToolbox(box, condense=not client.options.raw)
        self._known[client.name, info.id, client.options.raw] = toolbox
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return toolbox

    def _forget(self, id: str) -> None:
        self._to_close.pop(id, None)
        for key in [key for key in self._known if key[1] == id]:
            del self._known[key]


def _new(toolbox: AsyncToolbox) -> Opened:
    box = toolbox.context.box
    return box.info, f"[This is a new box, {box.id}. It is kept for later calls.]"


def gone(exc: BoxLost, id: str, *, was_own: bool) -> str:
    """What a model is told when a box is gone."""
    why = re.sub(rf"\b(box|session) {re.escape(id)}\b", "it", str(exc))  # named once is enough
    if was_own:
        lost = f"Your box {id} is gone, with its files and all that ran in it: {why}."
        return f"{lost} The next call without `box` gets a new, empty one."
    reason = "" if isinstance(exc, NoSession) else f" to work in: {why}"
    return f"There is no box {id}{reason}. Leave out `box` to use your own."
