"""The table for people, and the same as JSON for programs."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

from .measure import Contender, quantile
from .scenarios import Scenario

HEADINGS = ("scenario", "who", "n", "p50", "p95", "ratio", "promise", "")


@dataclass
class Row:
    """One scenario as it was measured: ours first, then ours in other ways, then the peers."""

    scenario: Scenario
    contenders: list[Contender]

    def ratio(self, peer: Contender) -> float | None:
        """How many times better ours is than this one."""
        ours = self.contenders[0]
        if peer is not ours and self.is_on_value(peer):
            return None
        if not ours.values or not peer.values or not ours.p50 or not peer.p50:
            return None
        return ours.p50 / peer.p50 if self.scenario.more_is_better else peer.p50 / ours.p50

    def bad_end(self, contender: Contender) -> float:
        """What one run in twenty is worse than."""
        return quantile(contender.values, 0.05 if self.scenario.more_is_better else 0.95)

    def is_on_value(self, contender: Contender) -> bool:
        """Whether what is promised is about its value, and not about a ratio."""
        promise = contender.promise
        return contender is self.contenders[0] or (promise is not None and promise.of_value)

    def verdict(self, contender: Contender) -> str:
        """kept, MISSED, untested, or nothing where nothing was promised."""
        if contender.promise is None:
            return ""
        own = self.is_on_value(contender)
        value = (contender.p50 if contender.values else None) if own else self.ratio(contender)
        if value is None:
            return "untested"
        return "kept" if contender.promise.kept(value) else "MISSED"


def machine() -> dict[str, Any]:
    """The facts about this machine that a comparison needs."""
    with open("/proc/meminfo") as file:
        memory = int(file.readline().split()[1]) // (1024 * 1024)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "an ordinary user",
        "load": round(os.getloadavg()[0], 2),
    }


def headline(found: dict[str, Any]) -> str:
    kernel = ".".join(found["kernel"].split("-")[0].split(".")[:2])
    return (
        f"{found['cores']} cores, {found['memory_gib']} GiB, Linux {kernel} "
        f"{found['architecture']}, Python {found['python']}, as {found['user']}; "
        f"load at the start {found['load']}"
    )


def table(rows: list[Row]) -> str:
    """Markdown that also reads well in a terminal."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    for row in rows:
        for contender in row.contenders:
            first = contender is row.contenders[0]
            lines.append((row.scenario.title if first else "", *_cells(row, contender)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def _cells(row: Row, contender: Contender) -> tuple[str, ...]:
    promised = _promise(row, contender)
    if not contender.values:
        why = contender.missing or "not measured"
        return (contender.name, "", "", "", "", promised, row.verdict(contender) or why)
    unit = row.scenario.unit
    ratio = None if contender is row.contenders[0] else row.ratio(contender)
    return (
        contender.name,
        str(len(contender.values)),
        f"{_number(contender.p50)} {unit}",
        f"{_number(row.bad_end(contender))} {unit}" if len(contender.values) > 1 else "",
        "" if ratio is None else f"{_number(ratio)}×",
        promised,
        row.verdict(contender),
    )


def _promise(row: Row, contender: Contender) -> str:
    if contender.promise is None:
        return ""
    unit = f" {row.scenario.unit}" if row.is_on_value(contender) else "×"
    sign = "≤" if contender.promise.at_most else "≥"
    return f"{sign} {_number(contender.promise.bound)}{unit}"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def missing(rows: list[Row]) -> list[str]:
    """Who could not be measured, and why; each once."""
    return list(
        dict.fromkeys(f"{c.name}: {c.missing}" for r in rows for c in r.contenders if c.missing)
    )


def as_json(found: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    return {"machine": found, "scenarios": [_row_as_json(row) for row in rows]}


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "key": row.scenario.key,
        "title": row.scenario.title,
        "unit": row.scenario.unit,
        "more_is_better": row.scenario.more_is_better,
        "contenders": [
            {
                "name": c.name,
                "n": len(c.values),
                "p50": c.p50 if c.values else None,
                "p95": row.bad_end(c) if c.values else None,
                "ratio": row.ratio(c),
                "promise": None if c.promise is None else _promise(row, c),
                "verdict": row.verdict(c) or None,
                "missing": c.missing or None,
                "values": c.values,
            }
            for c in row.contenders
        ],
    }
