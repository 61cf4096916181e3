"""How things are measured: in turns, so that whatever slows the machine slows everybody."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Promise:
    """A bound on the median of ours, or on how many times better we are than a peer."""

    bound: float
    at_most: bool = True
    of_value: bool = False  # for ours in another way: on its own value, not on a ratio

    def kept(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass
class Contender:
    """Someone who does the job: `measure` does it once and says what it cost."""

    name: str
    measure: Callable[[], float] | None
    n: int = 1
    missing: str = ""  # why it is not measured
    promise: Promise | None = None  # for ours: on the value; for a peer: on the ratio
    values: list[float] = field(default_factory=list)

    @property
    def p50(self) -> float:
        return quantile(self.values, 0.5)


def absent(name: str, why: str, promise: Promise | None = None) -> Contender:
    return Contender(name, None, 0, why, promise)


def take_turns(contenders: Sequence[Contender]) -> None:
    """A B C A B C...; the turns of one that has fewer are spread over the whole time."""
    most = max((c.n for c in contenders if c.measure), default=0)
    for turn in range(most):
        for contender in contenders:
            due = turn * contender.n // most != (turn + 1) * contender.n // most
            if contender.measure and due:
                contender.values.append(contender.measure())


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def quantile(values: Sequence[float], q: float) -> float:
    """The nearest value at or above rank q: never one that was not seen."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))]
