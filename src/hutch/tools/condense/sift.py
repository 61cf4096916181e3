"""What families share: leave out lines and count them; shorten rules, tables and paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from .failures import LONGEST, failing
from .family import Again, Hidden, Shown, count

COLUMNS = 40  # of a table at most
_FEW_PATHS = 4  # in one folder: fewer are not worth grouping
_RULE = re.compile(r"([=_*⎯─━-])(?:\1{4,}|(?: \1){4,} *$)")


def like(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
    """Match the beginning of a line; never of a very long one, which would take too much time."""
    return pattern.match(line) if len(line) <= LONGEST else None


def is_like(pattern: re.Pattern[str], line: str) -> bool:
    return like(pattern, line) is not None


def without(lines: Iterable[str | Hidden], boring: Callable[[str], bool], what: str) -> Shown:
    """All lines but the boring ones; one `Hidden` stands where the first of them was.

    There is one marker for all of them, because each costs as much as a line. Lines that look like
    failures stay, however boring they are.
    """
    lines = list(lines)
    is_failure = failing(lines)
    shown: Shown = []
    hidden, place, dropped = 0, 0, False
    for line in lines:
        if isinstance(line, Hidden):
            shown.append(line)
            continue
        dropped = dropped if isinstance(line, Again) else boring(line) and not is_failure(line)
        if not dropped:
            shown.append(line)
            continue
        if not hidden:
            place = len(shown)
        hidden += count(line)
    if hidden:
        shown.insert(place, Hidden(hidden, what))
    return shown


def without_until_it_fails(lines: list[str], boring: Callable[[str], bool], what: str) -> Shown:
    """`without` up to the first line that looks like a failure; everything after it stays."""
    is_failure = failing(lines)
    start = next((at for at, line in enumerate(lines) if is_failure(line)), len(lines))
    return [*without(lines[:start], boring, what), *lines[start:]]


def tight(line: str) -> str:
    """The line with shorter rules: `===== FAILURES =====` is `=== FAILURES ===`."""
    return _RULE.sub(r"\1\1\1", line) if _RULE.search(line) else line


def gathered(lines: Shown) -> Shown:
    """Markers moved to the end, one for each kind; empty lines as in `squeezed`."""
    kinds: dict[str, int] = {}
    for line in lines:
        if isinstance(line, Hidden):
            kinds[line.what] = kinds.get(line.what, 0) + line.lines
    kept = squeezed([line for line in lines if isinstance(line, str)])
    return [*kept, *(Hidden(number, what) for what, number in kinds.items())]


def squeezed(lines: Shown) -> Shown:
    """One empty line for several in a row; none at either end, and none after a marker."""
    kept: Shown = []
    for line in lines:
        if isinstance(line, Hidden) or line.strip():
            kept.append(line)
        elif kept and kept[-1] != "" and not isinstance(kept[-1], Hidden):
            kept.append("")
    while kept and kept[-1] == "":
        kept.pop()
    return kept


def table(lines: list[str], leave_out: Sequence[str] = ()) -> list[str] | None:
    """A table without its padding; None if the lines are not one.

    The header says where columns begin. An empty cell becomes `-`, so that columns stay distinct.
    `leave_out`: names of columns.
    """
    if len(lines) < 2:
        return None
    starts = [title.start() for title in re.finditer(r"(?:^|(?<= {2}))\S", lines[0])]
    if not 2 <= len(starts) <= COLUMNS:
        return None
    ends = [*starts[1:], None]
    rows = []
    for line in lines:
        if any(at and len(line) > at and line[at - 1] != " " for at in starts):
            return None
        rows.append([line[at:end].strip() or "-" for at, end in zip(starts, ends, strict=True)])
    wanted = [at for at, name in enumerate(rows[0]) if name not in leave_out]
    return ["  ".join(row[at] for at in wanted) for row in rows]


def grouped(paths: list[str]) -> list[str]:
    """Each folder once, with its names: `src/a/: x.py y.py`; or the paths, if that is longer.

    A path with a space in it stays as it is, because its parts could be taken for several names.
    """
    folders: dict[str, list[str]] = {}
    lines: list[str] = []
    for path in paths:
        folder, _, name = path.rstrip("/").rpartition("/")
        if " " in path or path.endswith(":"):
            lines.append(path)
        else:
            folders.setdefault(folder, []).append(name + "/" * path.endswith("/"))
    for folder, names in folders.items():
        # Without a folder `/x` and `x` would look alike.
        if len(names) < _FEW_PATHS or not folder:
            lines += [f"{folder}/{name}" if folder else name for name in names]
        else:
            lines.append(f"{folder}/: {' '.join(names)}")
    return lines if sum(map(len, lines)) < sum(map(len, paths)) else paths
