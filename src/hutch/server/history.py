"""What happened lately, for charts: in memory, of bounded size, and forgotten with the server.

Each request adds to a few counters. Every ten seconds they become a sample, and every five minutes
the samples of that time become one more. There is one series for the whole server, and one for each
of the owners that were active last.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from hutch.serving import Failure, Sample
from hutch.types import STATES, State

SHORT, LONG = 10.0, 300.0  # seconds of one sample, in the last hour and in the last day
HOUR, DAY = 360, 288  # samples
MAX_OWNERS = 64  # with a series; one takes up to 300 KB
MAX_FAILURES = 100
MAX_WHY = 1000  # characters
MAX_NAME = 256  # likewise, of an image or a workspace: callers may ask for names that cannot be
LOOKED = 60.0  # seconds after someone looked, in which memory and cpu are measured
FailureKind = Literal["open", "wake", "save", "lost", "limit"]
# Latencies are counted in steps of 10 %, so that intervals can be added up.
_FIRST, _STEP = 1e-5, math.log(1.1)
_STEPS = 240  # the last one is a day


@dataclass(frozen=True)
class BoxUsage:
    """What the boxes of an owner, or of all, use now."""

    memory: int
    cpus: float


@dataclass
class _Tally:
    """What happened in an interval that is not over."""

    opened: int = 0
    commands: int = 0
    cells: int = 0
    errors: int = 0
    openings: Counter[int] = field(default_factory=Counter)  # by step of their latency
    runs: Counter[int] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)  # as it was measured
    cpus: list[float] = field(default_factory=list)

    def add(self, other: _Tally) -> None:
        self.opened += other.opened
        self.commands += other.commands
        self.cells += other.cells
        self.errors += other.errors
        self.openings.update(other.openings)
        self.runs.update(other.runs)
        self.memory += other.memory
        self.cpus += other.cpus

    @property
    def happened(self) -> int:
        return self.opened + self.commands + self.cells + self.errors


@dataclass(frozen=True)
class _Interval:
    at: float  # when it ended
    short: float  # seconds
    long: float | None  # seconds of the longer one, if that ends, too
    is_kept: bool = False  # even if nothing happened


# The fields of a Sample after its time, but with the states as counts: as a record, each would take
# four times the memory.
_Row = tuple[object, ...]


class _Series:
    def __init__(self) -> None:
        self.short, self.long = _Tally(), _Tally()
        self.hour: deque[tuple[float, _Row]] = deque(maxlen=HOUR)  # by the time of their end
        self.day: deque[tuple[float, _Row]] = deque(maxlen=DAY)
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)

    def rows(self, period: Literal["hour", "day"]) -> dict[float, _Row]:
        return dict(self.hour if period == "hour" else self.day)

    def end(self, interval: _Interval, states: Counter[State], usage: BoxUsage | None) -> None:
        """Turn what happened into rows."""
        tally, self.short = self.short, _Tally()
        if usage is not None:
            tally.memory.append(usage.memory)
            tally.cpus.append(usage.cpus)
        counts = tuple(states[state] for state in STATES)
        if interval.is_kept or any(counts) or tally.happened:
            self.hour.append((interval.at, _row_of(tally, interval.short, counts)))
        self.long.add(tally)
        if interval.long is not None:
            tally, self.long = self.long, _Tally()
            if interval.is_kept or any(counts) or tally.happened:
                self.day.append((interval.at, _row_of(tally, interval.long, counts)))


class History:
    def __init__(
        self, now: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._now, self._steady = now, steady
        self._all = _Series()
        self._owners: OrderedDict[str, _Series] = OrderedDict()  # the most active last
        self._short_began = self._long_began = steady()
        self._looked_at = -math.inf

    # --- what happens ---------------------------------------------------------------------

    def opened(self, owner: str, seconds: float) -> None:
        """A session was opened, which took so long."""
        step = _step_of(seconds)
        for series in (self._all, self._series(owner)):
            series.short.opened += 1
            series.short.openings[step] += 1

    def ran(self, owner: str, seconds: float, *, is_cell: bool) -> None:
        """A command or a cell has ended, after so long."""
        step = _step_of(seconds)
        for series in (self._all, self._series(owner)):
            if is_cell:
                series.short.cells += 1
            else:
                series.short.commands += 1
            series.short.runs[step] += 1

    def erred(self, owner: str) -> None:
        """An operation was answered with an error."""
        for series in (self._all, self._series(owner)):
            series.short.errors += 1

    def failed(
        self,
        owner: str,
        kind: FailureKind,
        why: str,
        *,
        session: str = "",
        image: str = "",
        code: str = "",
        workspace_id: str | None = None,
    ) -> None:
        """A session failed, or could not be opened."""
        failure = Failure(
            self._now(),
            owner,
            kind,
            session,
            image[:MAX_NAME],
            code,
            why[:MAX_WHY],
            workspace_id and workspace_id[:MAX_NAME],
        )
        for series in (self._all, self._series(owner)):
            series.failures.append(failure)

    def _series(self, owner: str) -> _Series:
        series = self._owners.get(owner)
        if series is None:
            series = self._owners[owner] = _Series()
            if len(self._owners) > MAX_OWNERS:
                self._owners.popitem(last=False)
        else:
            self._owners.move_to_end(owner)
        return series

    # --- samples --------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether it is time for `sample`."""
        return self._steady() - self._short_began >= SHORT

    @property
    def is_looked_at(self) -> bool:
        """Whether someone looked in the last minute: then it is worth measuring boxes."""
        return self._steady() - self._looked_at < LOOKED

    def sample(
        self, states: Mapping[str, Counter[State]], usage: Mapping[str, BoxUsage] | None = None
    ) -> None:
        """End the interval. `states`: how many sessions each owner has in each state.

        `usage`: of each owner that has boxes; None if it was not measured.
        """
        steady = self._steady()
        long = steady - self._long_began
        ended = _Interval(self._now(), steady - self._short_began, long if long >= LONG else None)
        self._short_began = steady
        if ended.long is not None:
            self._long_began = steady
        for owner in states.keys() - self._owners.keys():
            if len(self._owners) < MAX_OWNERS:
                self._series(owner)
        none = BoxUsage(0, 0.0)
        for owner, series in self._owners.items():
            used = None if usage is None else usage.get(owner, none)
            series.end(ended, states.get(owner, Counter()), used)
        everything = None
        if usage is not None:
            memory = sum(used.memory for used in usage.values())
            everything = BoxUsage(memory, sum(used.cpus for used in usage.values()))
        together = sum(states.values(), Counter[State]())
        self._all.end(replace(ended, is_kept=True), together, everything)

    def samples(self, period: Literal["hour", "day"], owner: str | None = None) -> list[Sample]:
        """Oldest first; of one owner, or of the whole server."""
        self._looked_at = self._steady()
        rows = (self._all if owner is None else self._owners.get(owner, _Series())).rows(period)
        # An owner has no row for an interval in which there was nothing.
        empty = _row_of(_Tally(), 0.0, (0,) * len(STATES))
        return [
            _sample(at, rows.get(at, (row[0], *empty[1:])))
            for at, row in self._all.rows(period).items()
        ]

    def failures(self, owner: str | None = None) -> list[Failure]:
        """Newest first; of one owner, or of all."""
        series = self._all if owner is None else self._owners.get(owner, _Series())
        return list(reversed(series.failures))


def _row_of(tally: _Tally, seconds: float, counts: tuple[int, ...]) -> _Row:
    return (
        seconds,
        counts,
        tally.opened,
        tally.commands,
        tally.cells,
        tally.errors,
        _percentile(tally.openings, 0.5),
        _percentile(tally.openings, 0.95),
        _percentile(tally.runs, 0.5),
        _percentile(tally.runs, 0.95),
        round(sum(tally.memory) / len(tally.memory)) if tally.memory else None,
        round(sum(tally.cpus) / len(tally.cpus), 3) if tally.cpus else None,
    )


def _sample(at: float, row: _Row) -> Sample:
    seconds, counts, *rest = cast(Any, row)  # as `_row_of` made it
    states: dict[str, int] = {
        state: count for state, count in zip(STATES, counts, strict=True) if count
    }
    return Sample(at, round(seconds, 3), states, *rest)


def _step_of(seconds: float) -> int:
    if seconds <= _FIRST:
        return 0
    return min(round(math.log(seconds / _FIRST) / _STEP), _STEPS)


def _percentile(counts: Counter[int], part: float) -> float | None:
    """The latency that this part of them does not exceed; exact to a step."""
    wanted = math.ceil(part * counts.total())
    so_far = 0
    for step in sorted(counts):
        so_far += counts[step]
        if so_far >= wanted:
            return float(f"{_FIRST * math.exp(step * _STEP):.3g}")
    return None
