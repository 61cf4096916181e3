"""Decides which requests go into the audit log.

Every operation that changes something is one line. Reads are not recorded, unless they are denied.
Requests without a key, and denied ones, cause a bounded number of lines; the others are counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, replace

from hutch import operations as op
from hutch import serving
from hutch.errors import HutchError, NoSession, NotPermitted, QuotaReached, Unauthorized
from hutch.serving import Key
from hutch.types import BoxInfo

from .audit import Audit
from .keys import Caller
from .quotas import Budget
from .times import show_moment

log = logging.getLogger("hutch.audit")
# Operations that come in series: one line for the first, and one per minute.
OFTEN = ("SendInput", "ResizeTerminal", "AnswerCall", "Dial")
OFTEN_SECONDS = 60.0
SUMMARY_SECONDS = 60.0
MAX_REMEMBERED = 1000


class NotYours(NoSession):
    """A session of another owner, or outside the key's limits.

    To the caller it does not exist.
    """


@dataclass(frozen=True)
class Dial:
    """A connection to a port in a box, which is not an operation."""

    session: str


Recorded = op.Operation[object] | Dial


class Recorder:
    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._strangers = Budget(each=(5, 1), together=(30, 10))
        self._denials = Budget(each=(30, 10), together=(300, 100))
        self._often: OrderedDict[tuple[str, ...], float] = OrderedDict()  # latest last
        self._summarized = time.monotonic()

    def performed(self, operation: Recorded, caller: Caller, answer: object) -> None:
        """Record an operation that was carried out or, if it streams, has begun. Never raises."""
        try:
            self._performed(operation, caller, answer)
        except Exception:
            # The operation was carried out, so its caller gets the answer all the same.
            log.exception("cannot record %s in the audit log", type(operation).__name__)

    def failed(self, operation: Recorded, caller: Caller, exc: BaseException) -> None:
        """Record an operation that failed. Never raises, so that the caller gets `exc`."""
        try:
            self._failed(operation, caller, exc)
        except Exception:
            log.exception("cannot record %s in the audit log", type(operation).__name__)

    def _performed(self, operation: Recorded, caller: Caller, answer: object) -> None:
        name = type(operation).__name__
        if not _changes(operation):
            return
        if isinstance(operation, serving.RedeemTicket) and isinstance(answer, Key):
            # The route is public: only the key that it answers with says who called.
            caller = replace(caller, owner=answer.owner, key=answer.id)
        target = _target(operation, answer)
        if name in OFTEN and self._is_repeated(name, caller, target):
            return
        is_stream = isinstance(operation, op.Operation) and operation.streams
        outcome = "started" if is_stream else "ok"
        self._add("request", caller, name, target, outcome, _detail(operation, answer))

    def _failed(self, operation: Recorded, caller: Caller, exc: BaseException) -> None:
        name, target = type(operation).__name__, _target(operation, None)
        if isinstance(operation, serving.RedeemTicket) and isinstance(
            exc, Unauthorized | QuotaReached
        ):
            self.auth_failed("unknown ticket", caller.peer, caller.request)
        elif isinstance(exc, NotPermitted | QuotaReached | NotYours):
            # Also what the user in a box may not do: the two cannot be distinguished.
            outcome = "not_yours" if isinstance(exc, NotYours) else exc.code
            self.denied(caller, name, target, outcome)
        elif _changes(operation) and not (
            name in OFTEN and self._is_repeated(name, caller, target)
        ):
            self._add("request", caller, name, target, _outcome(exc), _detail(operation, None))

    def denied(self, caller: Caller, operation: str, target: str, outcome: str) -> None:
        if self._denials.take(caller.key or caller.owner):
            self._add("denied", caller, operation, target, outcome, {})

    def auth_failed(self, why: str, peer: str, request: str, key: Key | None = None) -> None:
        """`key`: only if the whole key was sent, because anyone can send an id."""
        if self._strangers.take(peer):
            self._audit.add(
                "auth_failed",
                owner=key.owner if key else "",
                key=key.id if key else "",
                outcome=why,
                peer=peer,
                request=request,
            )

    def summarize(self) -> None:
        """Record once a minute how many lines were left out. To be called every second."""
        now = time.monotonic()
        if now - self._summarized < SUMMARY_SECONDS:
            return
        self._summarized = now
        for event, budget in (("auth_failed", self._strangers), ("denied", self._denials)):
            if count := budget.take_suppressed():
                self._audit.add(event, outcome="suppressed", detail={"lines": str(count)})

    def _is_repeated(self, name: str, caller: Caller, target: str) -> bool:
        """Whether there was a line about this in the last minute."""
        what = (name, caller.key or "", caller.owner, caller.peer, target)
        now = time.monotonic()
        if now - self._often.get(what, -OFTEN_SECONDS) < OFTEN_SECONDS:
            return True
        self._often[what] = now
        self._often.move_to_end(what)
        if len(self._often) > MAX_REMEMBERED:
            self._often.popitem(last=False)
        return False

    def _add(
        self,
        event: str,
        caller: Caller,
        operation: str,
        target: str,
        outcome: str,
        detail: dict[str, str],
    ) -> None:
        self._audit.add(
            event,
            owner=caller.owner,
            key=caller.key or "",
            operation=operation,
            target=target,
            outcome=outcome,
            peer=caller.peer,
            request=caller.request,
            detail=detail,
        )


def _outcome(exc: BaseException) -> str:
    if isinstance(exc, HutchError):
        return exc.code
    return "cancelled" if isinstance(exc, asyncio.CancelledError) else "internal"


def _changes(operation: Recorded) -> bool:
    if isinstance(operation, serving.CheckSettings):
        return False
    return isinstance(operation, Dial) or operation.verb != "GET"


def _target(operation: Recorded, answer: object) -> str:
    """The id of what the operation is about; of what it made, from the answer."""
    if isinstance(answer, BoxInfo):
        return answer.id
    if isinstance(answer, Key) and isinstance(operation, serving.MakeKey | serving.RedeemTicket):
        return answer.id
    for name in ("session", "workspace", "key", "owner", "image", "name", "id"):
        value = getattr(operation, name, None)
        if isinstance(value, str) and value:
            return value
    return ""


def _detail(operation: Recorded, answer: object) -> dict[str, str]:
    """Details, without secrets, of operations that change rights or open sessions."""
    match operation, answer:
        case serving.RedeemTicket(), Key() as key:
            ends = show_moment(key.expires_at or 0)
            return {"parent": key.parent, "scope": key.scope, "expires": ends}
        case serving.MakeKey() | serving.ExtendKey() | serving.RotateKey(), Key() as key:
            ends = "never" if key.expires_at is None else show_moment(key.expires_at)
            detail = {"key": key.id, "owner": key.owner, "scope": key.scope, "expires": ends}
            limits = {"images": key.images, "workspaces": key.workspaces}
            return detail | {name: " ".join(names) for name, names in limits.items() if names}
        case op.OpenSession(), BoxInfo() as info:
            detail = {"image": info.image}
            return detail | ({"workspace": info.workspace_id} if info.workspace_id else {})
        case serving.SetQuota() as quota, _:
            names = ("sessions", "memory", "cpus", "disk", "rate")
            return {name: str(getattr(quota, name)) for name in names}
        case serving.SetWorkspaceQuota() as change, _:
            of = {"owner": change.owner[:64]} if change.owner else {}
            return {"quota": str(change.quota), **of}
        case serving.SizePool() as pool, _:
            return {"size": str(pool.size)}
        case serving.ChangeSettings() as settings, _:  # even of one that was refused
            return {"keys": " ".join(sorted(settings.changes))[:1000]}
        case serving.PreviewPort() as preview, _:
            return {"port": preview.port[:5]}
    return {}
