"""Quotas of owners: how much they may have, and how many requests they may send.

And budgets for what strangers may cause.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields

from hutch.errors import InvalidRequest, QuotaReached
from hutch.serving import Quota, Usage
from hutch.types import GiB, Limits, MiB

from .store import Store
from .workspaces import check_owner

BURST_SECONDS = 2.0  # after a pause, an owner may send this many seconds' requests at once
MIN_BURST = 10.0
MAX_BUCKETS = 10_000
MAX_IN_BUDGET = 1000  # callers or addresses that a budget tells apart


class RateLimited(QuotaReached):
    """More requests per second than the owner may send."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


@dataclass
class Bucket:
    """Tokens that come back at a rate, up to a burst."""

    tokens: float
    at: float  # when they were counted

    def refill(self, rate: float, burst: float, now: float) -> None:
        self.tokens = min(burst, self.tokens + max(0.0, now - self.at) * rate)
        self.at = now

    def take(self, rate: float, now: float) -> float:
        """Take a token and return 0; or return the seconds until there is one."""
        self.refill(rate, burst_of(rate), now)
        if self.tokens >= 1:
            self.tokens -= 1
            return 0.0
        return (1 - self.tokens) / rate


class Budget:
    """Limits what requests without a key, or without permission, may cause: lines, and tries.

    Each gets a few at once and some more per minute; all of them together likewise. Those that
    get nothing are counted.
    """

    def __init__(self, each: tuple[int, float], together: tuple[int, float]) -> None:
        """Both are (at once, per minute)."""
        self._each, self._together = each, together
        self._all = Bucket(together[0], time.monotonic())
        self._of: OrderedDict[str, Bucket] = OrderedDict()  # latest used last
        self.suppressed = 0

    def take(self, who: str) -> bool:
        now = time.monotonic()
        own = self._of.setdefault(who, Bucket(self._each[0], now))
        for bucket, (burst, per_minute) in ((own, self._each), (self._all, self._together)):
            bucket.refill(per_minute / 60, burst, now)
        is_allowed = own.tokens >= 1 and self._all.tokens >= 1
        if is_allowed:
            own.tokens -= 1
            self._all.tokens -= 1
        else:
            self.suppressed += 1
        self._of.move_to_end(who)
        if len(self._of) > MAX_IN_BUDGET:
            self._of.popitem(last=False)
        return is_allowed

    def take_suppressed(self) -> int:
        suppressed, self.suppressed = self.suppressed, 0
        return suppressed


class Quotas:
    """`await Quotas.open(store, default)` makes one. Quotas are set only here."""

    def __init__(
        self,
        store: Store,
        default: Quota,
        own: dict[str, Quota],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.default = default
        self._store = store
        self._own = own
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()  # the latest used last

    @classmethod
    async def open(
        cls, store: Store, default: Quota, clock: Callable[[], float] = time.monotonic
    ) -> Quotas:
        return cls(store, default, await store.quotas(), clock)

    def of(self, owner: str) -> Quota:
        return self._own.get(owner, self.default)

    def disk_of(self, owner: str) -> int | None:
        """What all workspaces and sleeping sessions of an owner may have together, in bytes."""
        return self.of(owner).disk

    async def set(self, owner: str, quota: Quota) -> None:
        """Set a quota that replaces the default. Raises InvalidRequest."""
        check_owner(owner)
        check_quota(quota)
        await self._store.set_quota(owner, quota)
        self._own[owner] = quota

    def learn(self, owner: str, quota: Quota) -> None:
        """Note what another server has set."""
        self._own[owner] = quota

    def check_open(self, owner: str, used: Usage, limits: Limits) -> None:
        """Raises QuotaReached if one more box with these limits would be too much."""
        quota = self.of(owner)
        _check("sessions", quota.sessions, used.sessions, 1, str)
        _check("memory", quota.memory, used.memory, limits.memory, in_units)
        _check("cpus", quota.cpus, used.cpus, limits.cpus, lambda n: f"{n:g}")

    def check_rate(self, owner: str) -> None:
        """Raises RateLimited, with `retry_after`, if this request is one too many."""
        rate = self.of(owner).rate
        if rate is None:
            return
        now = self._clock()
        bucket = self._buckets.get(owner)
        if bucket is None:
            bucket = self._buckets[owner] = Bucket(burst_of(rate), now)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(owner)
        wait = bucket.take(rate, now)
        if wait:
            raise RateLimited(
                f"{owner} may send {rate:g} requests per second, and sends more: "
                f"try again in {wait:.2f} s",
                wait,
            )


def burst_of(rate: float) -> float:
    return max(MIN_BURST, BURST_SECONDS * rate)


def check_quota(quota: Quota) -> None:
    """Raises InvalidRequest unless every number in it makes sense."""
    for name in (f.name for f in fields(quota)):
        value = getattr(quota, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{name} must be a number, or left out, not {value!r}")
        if not math.isfinite(value) or not 0 <= value < 1 << 62:
            raise InvalidRequest(f"{name} must be finite and at least 0, not {value!r}")
        if name == "rate" and value < 0.01:
            raise InvalidRequest(f"rate must be at least 0.01 per second, not {value!r}")


def _check(
    what: str,
    allowed: float | None,
    used: float,
    wanted: float,
    show: Callable[[float], str],
) -> None:
    if allowed is not None and used + wanted > allowed * (1 + 1e-9):  # sums of cpus are inexact
        raise QuotaReached(
            f"{what}: {show(used)} used and {show(wanted)} asked for, of {show(allowed)} that "
            "this owner may have at once. Close a session, or ask for less"
        )


def in_units(size: float) -> str:
    """Bytes in the largest unit that fits."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (1024, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:g} bytes"
