"""Which box a call means: the one that it names, or else the caller's own.

The protocol has no sessions any more, so a box is an argument like any other. Who leaves it out has
one box of their own, made when it is first needed: one for a process (stdio), for a key (HTTP), or
for a session of the older protocol. A box that died is never replaced behind a model's back: the
call that finds out says so, and the next begins anew.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from dataclasses import replace

from hutch import operations as op
from hutch.client._async import AsyncSandbox
from hutch.errors import BoxLost, HutchError, NoSession, SessionEnded
from hutch.tools import AsyncToolbox
from hutch.types import ENDED, BoxInfo

from .clients import Visitor
from .progress import Overheard

LABEL = "mcp"  # of the box that a caller at a server gets without naming one
MAX_KNOWN = 1000  # boxes whose tools are remembered: what was read in them, what can be recalled

Opened = tuple[BoxInfo, str]  # and what the model is told about it


class Boxes:
    def __init__(self) -> None:
        self._own: OrderedDict[tuple[str, str], asyncio.Task[Opened]] = OrderedDict()
        self._known: OrderedDict[tuple[str, str, bool], AsyncToolbox] = OrderedDict()
        self._to_close: dict[str, Visitor] = {}

    def __repr__(self) -> str:
        return f"<Boxes {len(self._own)} of callers' own, {len(self._known)} known>"

    async def find(self, visitor: Visitor, id: str | None) -> tuple[AsyncToolbox, str]:
        """The tools of a box, and what is new about it."""
        if id:
            return await self._named(visitor, id), ""
        key = (visitor.name, visitor.talk)
        opening = self._own.get(key)
        is_new = opening is None
        if opening is None:
            opening = self._own[key] = asyncio.ensure_future(self._open_own(visitor))
            opening.add_done_callback(_look_at)
            if len(self._own) > MAX_KNOWN:
                self._own.popitem(last=False)
        try:
            info, note = await asyncio.shield(opening)
        except Exception:
            if self._own.get(key) is opening:  # the next one may try again
                del self._own[key]
            raise
        return self._tools(visitor, info), note if is_new else ""

    def own(self, visitor: Visitor) -> AsyncToolbox | None:
        """The caller's own, if there is one already."""
        opening = self._own.get((visitor.name, visitor.talk))
        is_there = opening and opening.done() and not opening.cancelled()
        if not opening or not is_there or opening.exception():
            return None
        return self._tools(visitor, opening.result()[0])

    def known(self, visitor: Visitor) -> list[AsyncToolbox]:
        """Those that the caller has used, the last one first."""
        found = {key[1]: box for key, box in self._known.items() if key[0] == visitor.name}
        return list(reversed(found.values()))

    def lost(self, visitor: Visitor, toolbox: AsyncToolbox) -> bool:
        """Forget a box that is gone. Whether it was the caller's own."""
        own, id = self.own(visitor), toolbox.desk.box.id
        was_own = own is not None and own.desk.box.id == id
        if was_own:
            del self._own[visitor.name, visitor.talk]
        self._forget(id)
        return was_own

    async def create(self, visitor: Visitor, order: op.OpenSession) -> AsyncToolbox:
        info = await visitor.transport.perform(order)
        if visitor.owner is None:  # at a server, boxes stay until their deadline
            self._to_close[info.id] = visitor
        return self._tools(visitor, info)

    async def close(self, visitor: Visitor, id: str) -> None:
        await visitor.transport.perform(op.CloseSession(id))
        if (own := self.own(visitor)) and own.desk.box.id == id:
            del self._own[visitor.name, visitor.talk]
        self._forget(id)

    async def leave(self, visitor: Visitor) -> None:
        """The caller goes, and their own box with them, also one that is being opened."""
        if opening := self._own.get((visitor.name, visitor.talk)):
            await asyncio.wait([opening])
        if own := self.own(visitor):
            try:
                await self.close(visitor, own.desk.box.id)
            except HutchError:
                pass  # it was gone, or ends at its deadline

    async def close_made(self) -> None:
        """End every box that was made here, for callers who end with us."""
        for opening in self._own.values():
            if not opening.done():
                opening.cancel()
        await asyncio.gather(*self._own.values(), return_exceptions=True)
        for id, visitor in list(self._to_close.items()):
            try:
                await self.close(visitor, id)
            except HutchError:
                pass  # likewise

    async def _open_own(self, visitor: Visitor) -> Opened:
        if visitor.owner is None:
            return _new(await self.create(visitor, visitor.order))
        label = f"{visitor.name}/{visitor.talk}"
        wanted = op.ListSessions("live", owner=visitor.owner, label=f"{LABEL}={label}", limit=1)
        for info in await visitor.transport.perform(wanted):
            if info.owner == visitor.owner:  # the server was started anew, and the box went on
                return info, f"[This is your box {info.id}, as you left it.]"
        labels = {**visitor.order.labels, LABEL: label}
        return _new(await self.create(visitor, replace(visitor.order, labels=labels)))

    async def _named(self, visitor: Visitor, id: str) -> AsyncToolbox:
        if found := self._use(visitor, id):
            return found
        info = await visitor.transport.perform(op.GetSession(id))
        if info.status in ENDED:
            raise SessionEnded(f"box {id} is {info.status}" + (f": {info.why}" if info.why else ""))
        return self._tools(visitor, info)

    def _use(self, visitor: Visitor, id: str) -> AsyncToolbox | None:
        key = (visitor.name, id, visitor.wishes.raw)
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def _tools(self, visitor: Visitor, info: BoxInfo) -> AsyncToolbox:
        """As this caller wishes them now: another request may have wished them otherwise."""
        if found := self._use(visitor, info.id):
            return found
        box = AsyncSandbox(info, Overheard(visitor.transport), owned=False)
        toolbox = AsyncToolbox(box, condense=not visitor.wishes.raw)
        self._known[visitor.name, info.id, visitor.wishes.raw] = toolbox
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return toolbox

    def _forget(self, id: str) -> None:
        self._to_close.pop(id, None)
        for key in [key for key in self._known if key[1] == id]:
            del self._known[key]


def _new(toolbox: AsyncToolbox) -> Opened:
    box = toolbox.desk.box
    return box.info, f"[This is a new box, {box.id}. It is kept for later calls.]"


def _look_at(opening: asyncio.Task[Opened]) -> None:
    """Whoever wanted it may have left; asyncio would complain that nobody took its error."""
    if not opening.cancelled():
        opening.exception()


def gone(exc: BoxLost, id: str, *, was_own: bool) -> str:
    """What a model is told when a box is no more."""
    why = re.sub(rf"\b(box|session) {re.escape(id)}\b", "it", str(exc))  # its name was said
    if was_own:
        lost = f"Your box {id} is gone, with its files and all that ran in it: {why}."
        return f"{lost} The next call without `box` gets a new, empty one."
    reason = "" if isinstance(exc, NoSession) else f" to work in: {why}"
    return f"There is no box {id}{reason}. Leave out `box` to use your own."
