"""Servers that share their sessions: who has which, and what happens when one of them is gone.

A session is at one server, its *holder*. Each other server forwards the requests for it, as the
caller that it has checked. If the holder cannot be reached, a server that gets a request takes the
session over: it writes itself into the record, which the backend lets only one of them do, and
connects to the box. The shells there do not notice. A holder that was only slow sees that its
connection was replaced, or reads the record, and forgets the session.

One server at a time, the *reaper*, takes over what nobody asks for, so that idle limits and
deadlines are kept. Nothing depends on it for being right: a box also knows its deadline.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

import msgspec

from hutch import serving
from hutch.backends.base import ByteStream
from hutch.engine.sealing import Sealer
from hutch.errors import BackendUnavailable, HutchError, ServerUnavailable, Unauthorized
from hutch.operations import Operation, StreamOperation
from hutch.serving import SCOPES
from hutch.types import ENDED, BoxInfo

from .adoption import take_over
from .keys import OPERATOR, Caller
from .sessions import Sessions
from .shared_store import SharedStore
from .store import SessionRecord

T = TypeVar("T")
ItemT = TypeVar("ItemT")
TOKEN = "hutch-replica."  # what the keys that servers send each other begin with
ANSWER = 5.0  # seconds for another server to say that it is there, on a busy machine
FRESH = 1.0  # seconds for which such an answer holds
MOVES = 10  # changes of a session's holder during one request
TASK, TERM = "hutch-reaper", 30  # the lease of the reaper, and its seconds
SILENCE = 15.0  # seconds without an answer, after which the reaper takes the sessions of a server
AT_ONCE = 8
CLOSED = "it was closed"
log = logging.getLogger("hutch")


class PeerLost(Exception):
    """The other server cannot be reached, is another one by now, or no longer has the session.

    Nothing was done.
    """


class Peer(Protocol):
    """A way to another server. All methods raise PeerLost, and what it answers."""

    async def perform(self, operation: Operation[T]) -> T: ...

    def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncGenerator[ItemT, None]:
        """For a stream of bytes, an empty piece comes first."""

    async def dial(self, session: str, port: int) -> ByteStream: ...


Connect = Callable[[str, str], Peer]  # to a url, with a key


class _Pass(msgspec.Struct):
    """What a server tells another one: who is asking whom."""

    to: str
    caller: Caller


def new_name(url: str) -> str:
    """A name for a server: no other one has it, nor this one after a restart."""
    return f"{url}#{secrets.token_hex(8)}"


class Replicas:
    def __init__(self, store: SharedStore, sessions: Sessions, connect: Connect) -> None:
        self._store, self._sessions, self._connect = store, sessions, connect
        self._answered: dict[str, float] = {}  # when each server did last
        self._silent: dict[str, float] = {}  # since when the reaper has heard nothing of a server
        self._taking: dict[str, asyncio.Task[None]] = {}  # sessions that are taken over
        self._losing: set[asyncio.Task[None]] = set()
        store.session_changed = self._session_changed

    def _session_changed(self, info: BoxInfo, holder: str) -> None:
        if info.id in self._sessions.lives:
            if holder != self._store.me:
                losing = asyncio.create_task(self._sessions.lose(info.id))
                self._losing.add(losing)
                losing.add_done_callback(self._losing.discard)
        elif not self._sessions.has(info.id):
            self._sessions.feed.add(info)

    # --- forwarding -----------------------------------------------------------------------

    async def holder(self, id: str, caller: Caller, *, lost: str = "", closes: bool = False) -> str:
        """The other server that has a session; "" if it is here, or has ended.

        A session whose server does not answer is taken over first; `lost`: a server that is known
        not to. `closes`: the session is only wanted to be closed. Raises BackendUnavailable, and
        Unauthorized to another server, if this is not the one that it meant.
        """
        for _ in range(MOVES):
            if self._sessions.has(id):
                return ""
            record = await self._store.get(id)
            if record is None or record.info.status in ENDED:
                return ""
            holder = self._store.holder_of(id) or ""
            if holder != self._store.me:
                if caller.is_forwarded:
                    raise Unauthorized(f"this server does not hold session {id}")
                if holder != lost and await self._answers(holder):
                    return holder
                self._answered.pop(holder, None)
            await self._take_over(record, holder, closes=closes)
        raise ServerUnavailable(f"session {id} moves between servers all the time: try again")

    async def last_holder(self, id: str, caller: Caller) -> str:
        """The other server that has a session, or had it at its end; "" if it does not answer."""
        holder = self._store.holder_of(id) or ""
        is_here = caller.is_forwarded or self._sessions.has(id) or holder == self._store.me
        return "" if is_here or not await self._answers(holder) else holder

    def peer(self, holder: str, caller: Caller) -> Peer:
        return self._connect(_url(holder), self._key_for(holder, caller))

    async def watched(self, holder: str, work: Awaitable[T]) -> T:
        """The answer of a server, which may take its time as long as the server is there.

        Raises ServerUnavailable if it is not: it is not known then what it has done.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=ANSWER))[0]:
                if not await self._answers(holder) and not task.done():
                    raise ServerUnavailable(
                        f"the server at {_url(holder)} has the session, and stopped answering in "
                        "the middle of this request: try again, and another one takes over"
                    )
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _answers(self, holder: str) -> bool:
        """Whether a server is there, and still the one of that name."""
        if time.monotonic() - self._answered.get(holder, -FRESH) < FRESH:
            return True
        try:
            async with asyncio.timeout(ANSWER):
                # Whoever has the address by now may do nothing with this key.
                asked = self.peer(holder, Caller(OPERATOR, SCOPES[0])).perform(serving.WhoAmI())
                proof = (await asked).label.encode("utf-8", "replace")
        except (PeerLost, HutchError, TimeoutError):
            proof = b""
        if not hmac.compare_digest(proof, self._proof_of(holder).encode()):
            self._answered.pop(holder, None)
            return False
        self._answered[holder] = time.monotonic()
        return True

    def proof(self) -> str:
        """What only this server tells other ones, so that they know it from a Pod at its address.

        An address is given to another Pod soon after its Pod is gone, and a box may be that.
        """
        return self._proof_of(self._store.me)

    def _proof_of(self, holder: str) -> str:
        return self._store.sealer.digest(f"server\0{holder}")

    # --- keys of servers ------------------------------------------------------------------

    def _key_for(self, holder: str, caller: Caller) -> str:
        passed = _Pass(holder, replace(caller, is_local=False, peer="", request=""))
        body = base64.urlsafe_b64encode(msgspec.json.encode(passed)).decode().rstrip("=")
        return f"{TOKEN}{body}.{_signature(self._store.sealer, body)}"

    def caller_of(self, key: str) -> Caller:
        """Whom another server forwards a request for. Raises Unauthorized."""
        body, _, signature = key.removeprefix(TOKEN).partition(".")
        expected = _signature(self._store.sealer, body)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode()):
            raise Unauthorized("unknown or revoked key")
        try:
            text = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
            passed = msgspec.json.decode(text, type=_Pass)
        except (ValueError, msgspec.DecodeError):
            raise Unauthorized("unknown or revoked key") from None
        if passed.to != self._store.me:
            raise Unauthorized("this key is for another server, or for one that was here before")
        return replace(passed.caller, is_forwarded=True)

    # --- taking over ----------------------------------------------------------------------

    async def _take_over(self, record: SessionRecord, holder: str, *, closes: bool) -> None:
        """Returns when it is known who has the session; a caller that leaves does not stop it."""
        id = record.info.id
        taking = self._taking.get(id)
        if taking is None:
            taking = asyncio.create_task(self._take(record, holder, closes=closes))
            self._taking[id] = taking
            taking.add_done_callback(lambda _: self._taking.pop(id, None))
        await asyncio.shield(taking)

    async def _take(self, record: SessionRecord, holder: str, *, closes: bool) -> None:
        if record.saved is not None and not closes:
            self._check_saved(record, holder)
        taken = await self._store.take(record.info.id, holder)
        # Another request may have taken it over here since this one looked.
        is_here = self._sessions.has(record.info.id)
        if taken is not None and taken.info.status not in ENDED and not is_here:
            log.info("taking over session %s", taken.info.id)
            await take_over(self._sessions, taken, CLOSED if closes else "")

    def _check_saved(self, record: SessionRecord, holder: str) -> None:
        """Raises BackendUnavailable if the saved state of a sleeping session is not here."""
        assert record.saved is not None
        path = self._sessions.folder_of(record.info.id) / record.saved["manifest"]
        if not path.is_file():
            raise BackendUnavailable(
                f"session {record.info.id} sleeps, and its files are at {_url(holder)}, which does "
                "not answer: start that server again, or let all servers have one folder for "
                "sessions"
            )

    # --- reaping --------------------------------------------------------------------------

    async def reap(self) -> None:
        """Take over sessions that are nobody's. To be called every few seconds."""
        await self._take_all([info.id for info in self._store.mine()])
        await self._take_all(await self._asleep_here())
        self._store.leads = await self._store.lead(TASK, TERM)
        if not self._store.leads:
            self._silent.clear()
            return
        by_holder: dict[str, list[str]] = {}
        for info in self._store.held_by_others():
            by_holder.setdefault(self._store.holder_of(info.id) or "", []).append(info.id)
        for holder, ids in by_holder.items():
            if await self._answers(holder):
                self._silent.pop(holder, None)
            elif time.monotonic() - self._silent.setdefault(holder, time.monotonic()) > SILENCE:
                await self._take_all(ids)

    async def _asleep_here(self) -> list[str]:
        """Sessions that sleep in files of this server, and whose server is gone.

        It was this one, before it was started again: no other could wake them.
        """
        ids = []
        for info in self._store.held_by_others():
            folder = self._sessions.folder_of(info.id)
            if info.status != "asleep" or not folder.is_dir():
                continue
            record, holder = await self._store.get(info.id), self._store.holder_of(info.id)
            is_here = record and record.saved and (folder / record.saved["manifest"]).is_file()
            if is_here and holder and not await self._answers(holder):
                ids.append(info.id)
        return ids

    async def _take_all(self, ids: list[str]) -> None:
        turns = asyncio.Semaphore(AT_ONCE)

        async def take(id: str) -> None:
            async with turns:
                record, holder = await self._store.get(id), self._store.holder_of(id)
                if record and holder and not self._sessions.has(id):
                    with suppress(HutchError):  # tried again in the next round
                        await self._take_over(record, holder, closes=False)

        await asyncio.gather(*map(take, ids))

    async def close(self) -> None:
        under_way = [*self._taking.values(), *self._losing]
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._store.resign(TASK)


def _url(holder: str) -> str:
    return holder.rpartition("#")[0]


def _signature(sealer: Sealer, body: str) -> str:
    return sealer.digest(f"replica\0{body}").rpartition(":")[2]
