"""What families share: which lines must stay, and ways to leave out the others.

A hidden failure is the worst mistake there is here, so the check errs on the side of keeping.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import AnyStr

from .family import Again, Gap, Hidden, Shown, count

# These are searched for first, as plain strings: a regular expression of all the words takes
# fifteen times as long on lines that have none.
_STEMS = (
    "error", "fail", "fatal", "panic", "exception", "traceback", "abort", "denied", "refused",
    "cannot", "can't", "unable", "undefined", "unresolved", "segfault", "segmentation", "killed",
    "timed out", "timeout", "conflict", "not found", "no such", "invalid", "missing", "critical",
    "assert", "reject", "unhealthy", "unreachable", "backoff", "out of memory", "oom",
    "err!",
    "✗", "✘", "✖", "×",
)  # fmt: skip
_OF_PYTEST = "E  "  # pytest's prefix of each line of a reason
_ENDING = re.compile(
    r"(?:s|ed|ing|ures?|ked|ion|ions|ionerror|killed| fault|loopbackoff)?(?![a-z0-9_])"
)
_NO_FAILURE = re.compile(
    r"\b(?:0|no) (?:errors?|fail(?:ed|ures?|s)?|warnings?|issues|problems|conflicts)\b"
)
# Lines about a test that passed, or has begun: such a word is only part of its name.
_TEST = r"[^\s:]+(?:::[^\s\[:]+)+(?:\[.*\])?"  # of pytest
_WENT_WELL = re.compile(
    rf"{_TEST} (?:PASSED|SKIPPED|XFAIL)(?: +\[ *\d+%\])?$|(?=[^\s:]+\.py::){_TEST} $"
    rf"|\[gw\d+\] \[ *\d+%\] (?:PASSED|SKIPPED|XFAIL) {_TEST}\s*$"
    r"|\s*[✓✔√↓○] "  # the rest of it is the name
    r"|PASS \S+(?: \([\d.]+ m?s\))?$"
    r"|\s*--- (?:PASS|SKIP): \S+ \([\d.]+s\)$|=== (?:RUN|PAUSE|CONT|NAME) +\S+$"
    r"|ok\s+\S+\s+(?:[\d.]+s|\(cached\))(?:\s+coverage: [\d.]+% of statements)?$"
    r"|\?\s+\S+\s+\[no test files\]$|ok \d+ - "
    r"|test \S+(?: - .*)? \.\.\. (?:ok|ignored)$|\w+ \([\w.]+\) \.\.\. ok$"
    r"|\s+PASS \[ *[\d.]+s\] (?:\( *\d+/\d+\) )?\S+ \S+$"
)
LONGEST = 2000  # characters; regular expressions are not tried on longer lines


def looks_like_failure(line: str) -> bool:
    """Whether the line reports something that went wrong. Such a line is always shown."""
    low = line.lower()
    for stem in _STEMS:
        if stem in low:
            break
    else:
        return line.startswith(_OF_PYTEST)
    if isinstance(line, Gap) or (len(line) <= LONGEST and _WENT_WELL.match(line)):
        return False
    low = _NO_FAILURE.sub("", low)
    return any(_says(stem, low, line) for stem in _STEMS if stem in low)


def _says(stem: str, low: str, line: str) -> bool:
    """Whether the stem begins a word, or ends one as in `ValueError` (not as in `thiserror`)."""
    at = low.find(stem)
    may_end_one = stem.capitalize() in line
    while at >= 0:
        before = low[at - 1] if at else " "
        is_inside = before.isalnum() or before == "_"
        if _ENDING.match(low, at + len(stem)) and (not is_inside or may_end_one):
            return True
        at = low.find(stem, at + len(stem))
    return False


def failing(lines: Iterable[str | Hidden]) -> Callable[[str], bool]:
    """`looks_like_failure` for these lines: searches all of them at once, which is faster."""
    text = "\n".join(line for line in lines if isinstance(line, str))
    low = text.lower()
    if len(low) != len(text):  # a few letters, like İ, become longer in lower case
        return looks_like_failure
    places = [*lines_with(_STEMS, low, "\n"), *lines_with((_OF_PYTEST.lower(),), low, "\n")]
    suspects = {text[start:end] for start, end in places}
    return lambda line: line in suspects and looks_like_failure(line)


def lines_with(words: Iterable[AnyStr], text: AnyStr, newline: AnyStr) -> Iterator[tuple[int, int]]:
    """Start and end of each line that contains one of the words; by word, then by position."""
    for word in words:
        at = text.find(word)
        while at >= 0:
            end = text.find(newline, at)
            end = len(text) if end < 0 else end
            yield text.rfind(newline, 0, at) + 1, end
            at = text.find(word, end)


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
