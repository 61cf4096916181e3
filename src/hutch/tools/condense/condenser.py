"""From what a command printed to what a model reads.

Bytes become lines as they arrive (`stream`). At the end the family of the command shortens the
lines, and its result is checked: it is never longer than the output and never hides a failure, and
what it hides is counted, with the id under which it can be recalled. There is no I/O, and nothing
is raised, whatever the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, cast

from . import detect, generic
from .builds import BUILDS, INSTALLS
from .checks import CHECKS
from .custom import Filter
from .family import CommandLine, Family, Gap, Hidden, Shown, count
from .files import CONTENTS, DATA, FILES
from .git import DIFF, GIT
from .logs import ENGINES, LOGS
from .sift import failing
from .stream import BLOCK, PrintedLines
from .tests import TESTS

SMALL = 800  # bytes; shorter output is shown as it is
MOST = 24 * 1024  # characters of any output that are shown, beside lines that look like failures
WORTH = 0.9  # lines are hidden only if the text shrinks to this fraction of the output
SOME = 150  # lines at each end that a family is recognised by
LOST = 12  # lines with failures that a family hid and that are put back; with more, it is not used
_WORD = re.compile(r"\w{3,}")

# In this order: the first one that knows a call has it. So `cat x.log` is a log, not contents.
FAMILIES: tuple[Family, ...] = (
    *TESTS,
    *INSTALLS,
    *CHECKS,
    *BUILDS,
    *ENGINES,
    *GIT,
    *FILES,
    DIFF,
    *DATA,
    *LOGS,
    CONTENTS,
)


@dataclass(frozen=True)
class CondensedOutput:
    """What a model reads of an output."""

    text: str
    family: str  # "git status"; "other" if no family knows it; "" if it is shown as it is
    program: str  # "git"
    raw_bytes: int
    hidden_lines: int = 0
    stdout: str = ""  # the two streams by themselves, for a Condenser(apart=True)
    stderr: str = ""


class Condenser:
    """Shortens output that arrives in pieces: `feed` it, then `finish`."""

    def __init__(
        self, command: str, *, filters: Sequence[Filter] = (), apart: bool = False
    ) -> None:
        """`apart`: also shorten stdout and stderr each by itself."""
        self._command, self._filters = command, filters
        self._both = PrintedLines()
        self._begun = {"stdout": b"", "stderr": b""}  # lines that have not ended yet
        self._apart = {"stdout": PrintedLines(), "stderr": PrintedLines()} if apart else {}

    def feed(self, data: bytes, stream: Literal["stdout", "stderr"] = "stdout") -> None:
        if self._apart:
            self._apart[stream].feed(data)
        # Whole lines only, so that one stream cannot split a line of the other.
        lines, newline, rest = (self._begun[stream] + data).rpartition(b"\n")
        if len(rest) > BLOCK:
            lines, newline, rest = lines + newline + rest, b"", b""
        self._begun[stream] = rest
        self._both.feed(lines + newline)

    def finish(self, exit_code: int | None = 0, *, recall: str | None = None) -> CondensedOutput:
        """The result; to be called once. `recall`: the id under which the output is kept."""
        self._both.feed(b"".join(self._begun.values()))
        argvs = detect.calls(self._command)
        calls = [CommandLine(argv, exit_code) for argv in argvs]
        names = [self._command[: detect.MAX_COMMAND], *map(" ".join, argvs)]
        chosen = next((one for one in self._filters if one.applies_to(names)), None)
        parts = [
            _no_longer(*_condensed(stream, calls, chosen, recall), size=stream.size)
            for stream in (self._both, *self._apart.values())
        ]
        text, family, hidden = parts[0]
        return CondensedOutput(
            text,
            family,
            _program_of(calls),
            self._both.size,
            hidden,
            *(text for text, _, _ in parts[1:]),
        )


def condense(
    command: str,
    data: bytes | str,
    exit_code: int | None = 0,
    *,
    recall: str | None = None,
    filters: Sequence[Filter] = (),
) -> CondensedOutput:
    """Shorten a whole output at once."""
    condenser = Condenser(command, filters=filters)
    condenser.feed(data.encode("utf-8", "replace") if isinstance(data, str) else data)
    return condenser.finish(exit_code, recall=recall)


def _condensed(
    stream: PrintedLines, calls: list[CommandLine], custom: Filter | None, recall: str | None
) -> tuple[str, str, int]:
    """The text, the family, and how many lines are hidden."""
    lines, is_ended = stream.end()
    end = "\n" if is_ended and lines else ""
    plain = "\n".join(lines) + end
    own = custom.shorten(lines) if custom else None
    if custom and own is not None:
        shown, name = own, custom.name
    elif stream.size <= SMALL:
        return plain, "", 0
    else:
        is_text = "\ufffd" not in plain and "\0" not in plain
        shown, name = _by_family(lines if is_text else _readable(lines), calls)
    text, hidden = _as_text(shown, lines, recall, end)
    if any(isinstance(line, Gap) for line in lines):
        return text, name, hidden
    if len(text) < len(plain) * (WORTH if hidden and own is None else 1):
        return text, name, hidden
    if len(plain) <= MOST + generic.FAILURES:
        return plain, "", 0
    text, hidden = _as_text(generic.cut(list(lines), MOST), lines, recall, end)
    return text, name, hidden


def _no_longer(text: str, family: str, hidden: int, *, size: int) -> tuple[str, str, int]:
    """Keep the text within `size` bytes: an invalid byte becomes U+FFFD, which has three."""
    if "\ufffd" in text and len(text.encode("utf-8", "replace")) > size:
        text = text.replace("\ufffd", "?")
    return text, family, hidden


def _as_text(shown: Shown, lines: list[str], recall: str | None, end: str) -> tuple[str, int]:
    tidied = _tidied(lines, shown)
    hidden = sum(part.lines for part in tidied if isinstance(part, Hidden))
    return _rendered(tidied, recall) + end, hidden


def _readable(lines: list[str]) -> list[str]:
    """Replace binary data, from its first line to its last, by a Gap; failures in it stay."""
    places = [at for at, line in enumerate(lines) if _is_binary(line)]
    if not places:
        return lines
    start, end = places[0], places[-1] + 1
    binary = set(places)
    between = [line for at, line in enumerate(lines[start:end], start) if at not in binary]
    kept = list(filter(failing(between), between))
    gap = Gap("[...]")
    gap.lines, gap.what = sum(map(count, lines[start:end])) - len(kept), "binary data"
    return [*lines[:start], gap, *kept, *lines[end:]]


def _is_binary(line: str) -> bool:
    odd = line.count("\ufffd") + line.count("\0")
    return odd > 2 and odd * 10 > len(line)


def _by_family(lines: list[str], calls: list[CommandLine]) -> tuple[Shown, str]:
    """Shortened by the first matching family that changes anything; else in the generic way."""
    for family, call in _families_of(lines, calls):
        shown: Shown = family.shorten(call, lines)
        if family.is_content and (shown != lines or family.knows(call)):
            may_fail = call.failed or family.has_failures
            return generic.cut(shown, MOST, generic.FAILURES if may_fail else 0), family.name
        if shown == lines:
            continue
        if not family.has_failures and (lost := _lost(lines, shown)):
            if len(lost) > LOST:
                continue
            shown = [*shown, "[among what is hidden:]", *lost]
        return generic.cut(shown, MOST), family.name
    return generic.shorten(lines), generic.NAME


def _families_of(
    lines: list[str], calls: list[CommandLine]
) -> Iterator[tuple[Family, CommandLine]]:
    """The families to try: by name if all programs are of one; by looks; then by a known name."""
    known = [
        (family, call)
        for call in calls
        if (family := next((one for one in FAMILIES if one.knows(call)), None))
    ]
    if calls and len(known) == len(calls) and len({family.name for family, _ in known}) == 1:
        yield known[0]
    some = lines if len(lines) <= 2 * SOME else lines[:SOME] + lines[-SOME:]
    exit_code = calls[0].exit_code if calls else None
    for family in FAMILIES:
        if family.looks_like and family.looks_like(some):
            own = (call for call in calls if family.knows(call))
            yield family, next(own, CommandLine((), exit_code))
    if len(known) == 1 and len(calls) > 1 and not known[0][0].is_content:
        yield known[0]


def _lost(lines: list[str], shown: Shown) -> list[str]:
    """Lines that look like failures and have a word that is nowhere in what is shown."""
    if not any(isinstance(part, Hidden) for part in shown):
        return []
    words: set[str] = set()
    for part in shown:
        if isinstance(part, str):
            words.update(_WORD.findall(part))
    failures = filter(failing(lines), dict.fromkeys(lines))
    return [line for line in failures if not words.issuperset(_WORD.findall(line))]


def _tidied(lines: list[str], shown: Shown) -> Shown:
    """Turn gaps into Hidden, also those that a family dropped, and join those in a row."""
    tidied: Shown = []
    gaps = {id(line): line for line in lines if isinstance(line, Gap)}
    for part in shown:
        if isinstance(part, Gap):
            gaps.pop(id(part), None)
            part = Hidden(part.lines, part.what)
        last = tidied[-1] if tidied else None
        if isinstance(part, Hidden) and isinstance(last, Hidden) and last.what == part.what:
            tidied[-1] = Hidden(last.lines + part.lines, part.what, part.characters)
        else:
            tidied.append(part)
    counted = sum(part.lines for part in tidied if isinstance(part, Hidden))
    lost = [gap for gap in gaps.values() if gap.lines > counted]
    return [*(Hidden(gap.lines, gap.what) for gap in lost), *tidied]


def _rendered(shown: Shown, recall: str | None) -> str:
    """Markers in a row become one, and the first marker says how to recall what is hidden."""
    how = f': recall("{recall}")' if recall else ""
    lines: list[str] = []
    for is_hidden, group in groupby(shown, lambda part: isinstance(part, Hidden)):
        if is_hidden:
            lines.append(f"[{', '.join(map(_marker, cast(list[Hidden], group)))} hidden{how}]")
            how = ""
        else:
            lines += cast(list[str], group)
    return "\n".join(lines)


def _marker(hidden: Hidden) -> str:
    if hidden.characters:
        return f"{hidden.characters} characters of this line"
    what = f" of {hidden.what}" if hidden.what else ""
    return f"{hidden.lines} line{'s' * (hidden.lines != 1)}{what}"


def _program_of(calls: list[CommandLine]) -> str:
    """The name of the first program, if it is one that may be written into a log of usage."""
    name = calls[0].program if calls else ""
    return name if re.fullmatch(r"[\w.+-]{1,32}", name) else ""
