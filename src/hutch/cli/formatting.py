"""How results are printed: tables, sizes and times for people, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from hutch.errors import HutchError
from hutch.types import plain, show_size

from .screen import BOLD, GREEN, RED, YELLOW, coloured, visible

COLOURS = {"running": GREEN, "asleep": YELLOW, "crashed": RED}  # by the value of STATUS

SPANS = [(86_400, "d"), (3600, "h"), (60, "m"), (1, "s")]


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """Print aligned columns. `right`: the names of right-aligned columns."""
    table = [list(header), *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        if row is table[0]:
            cells = [coloured(cell, BOLD) for cell in cells]
        elif "STATUS" in header:
            place = header.index("STATUS")
            if colour := COLOURS.get(row[place]):
                cells[place] = coloured(cells[place], colour)
        line = "  ".join(cells).rstrip() + "\n"
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding))


def _cell(text: str) -> str:
    return visible(text).replace("\n", "\\n").replace("\t", "\\t") or "-"


def size(count: int | None) -> str:
    return "" if count is None else show_size(count)


def span(seconds: float) -> str:
    """In the largest unit of which there are at least two: 90 s is 90s, not 1m."""
    for unit, name in SPANS:
        if abs(seconds) >= 2 * unit or unit == 1:
            return f"{max(0, int(abs(seconds) // unit))}{name}"
    raise AssertionError("the last unit is one second")


def local_time(seconds: float) -> str:
    """Local time with its offset, where "3m ago" is not exact enough."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def since(then: float | None, now: float) -> str:
    return "" if then is None else f"{span(now - then)} ago"


def until(then: float | None, now: float) -> str:
    if then is None:
        return ""
    return f"in {span(then - now)}" if then > now else "due"


# --- --json ------------------------------------------------------------------------------


def to_json(value: object) -> Any:
    """Like `plain`, but with times (`created_at`) as text: 2027-01-31T12:00:00.000Z."""
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if not hasattr(value, "__dataclass_fields__"):
        return plain(value)
    record = {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
    return {
        name: moment(it) if name.endswith("_at") and isinstance(it, float) else to_json(it)
        for name, it in record.items()
    }


def print_json(value: object) -> None:
    print(json.dumps(to_json(value), indent=2))


def moment(seconds: float) -> str:
    """RFC 3339 in UTC, to the millisecond, as in the audit log."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{thousandths:03}Z"


def error_to_json(exc: HutchError) -> dict[str, object]:
    return {"error": {"code": exc.code, "message": str(exc)}}
