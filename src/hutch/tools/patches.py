"""Patches as models write them, and what they make of a text. Nothing here touches a file.

Two formats are read. The one between `*** Begin Patch` and `*** End Patch` finds its place by the
lines around a change; a unified diff also says where that was, which is believed if it fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from hutch.errors import Conflict, InvalidRequest

from .nearest import nearest
from .paths import given, shown

HOW = """\
a patch is either
*** Begin Patch
*** Update File: path
@@ a line above the change, if the rest is not unique
 a line that stays
-a line that goes
+a line that comes
*** End Patch
(also: *** Add File: path, with + before each line; *** Delete File: path; *** Move to: path)
or a unified diff, with --- and +++ lines"""

_UNIFIED = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
# What models and word processors make of plain signs.
_PUNCTUATION = str.maketrans(
    "‐‑‒–—−‘’‚‛“”„‟\u00a0\u2002\u2003\u2009\u202f", "------" + "'" * 4 + '"' * 4 + " " * 5
)
_FENCE = re.compile(r"\s*```\w*\n(.*?)\n?```\s*", re.DOTALL)


@dataclass
class Hunk:
    """Lines with a sign each: ` ` stays, `-` goes, `+` comes."""

    above: list[str] = field(default_factory=list)  # lines that are before it, in this order
    lines: list[tuple[str, str]] = field(default_factory=list)
    at: int | None = None  # the line where it should be, counted from 0
    at_end: bool = False
    no_newline: set[str] = field(default_factory=set)  # signs of last lines that have no end

    @property
    def old(self) -> list[str]:
        return [text for sign, text in self.lines if sign != "+"]


@dataclass
class Change:
    """What a patch does to one file."""

    kind: Literal["add", "update", "delete"]
    path: str
    hunks: list[Hunk] = field(default_factory=list)
    move_to: str | None = None


def parse(patch: str) -> list[Change]:
    """The changes in a patch, in order. InvalidRequest says what is wrong with it, and where."""
    if fenced := _FENCE.fullmatch(patch):
        patch = fenced[1]
    if patch.count("\n") == patch.count("\r\n"):
        patch = patch.replace("\r\n", "\n")
    lines = patch.split("\n")
    begin = next((n for n, line in enumerate(lines) if line.rstrip() == "*** Begin Patch"), None)
    if begin is not None:
        changes = _Sections(lines, begin + 1).parse()
    elif any(line.startswith(("--- ", "diff --git ")) for line in lines):
        changes = _Unified(lines).parse()
    else:
        raise InvalidRequest(f"this is no patch: {HOW}")
    if not changes:
        raise InvalidRequest(f"this patch changes nothing: {HOW}")
    for change in changes:
        if change.kind == "update":
            change.hunks = [h for h in change.hunks if any(sign != " " for sign, _ in h.lines)]
        if change.kind == "update" and not change.hunks and change.move_to is None:
            raise InvalidRequest(f"the patch does not say what to change in {shown(change.path)}")
    return changes


class _Sections:
    """The format between `*** Begin Patch` and `*** End Patch`."""

    def __init__(self, lines: Sequence[str], at: int) -> None:
        self._lines, self._at = lines, at
        self._changes: list[Change] = []

    def parse(self) -> list[Change]:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            if line.rstrip() == "*** End Patch":
                break
            if line.startswith("*** "):
                self._heading(line)
            elif self._changes and self._changes[-1].kind != "delete":
                self._body(line, self._changes[-1])
            elif line.strip():
                raise self._wrong(line)
        return self._changes

    def _heading(self, line: str) -> None:
        word, _, rest = line[4:].partition(":")
        path, last = given(rest.strip()), self._changes[-1] if self._changes else None
        if word == "Add File":
            self._changes.append(Change("add", path, [Hunk()]))
        elif word == "Delete File":
            self._changes.append(Change("delete", path))
        elif word == "Update File":
            self._changes.append(Change("update", path))
        elif word == "Move to" and last and last.kind == "update" and not last.hunks:
            last.move_to = path
        elif word.rstrip() == "End of File" and last and last.hunks:
            last.hunks[-1].at_end = True
        else:
            raise self._wrong(line)
        if word.endswith("File") and word != "End of File" and not path:
            raise self._wrong(line)

    def _body(self, line: str, change: Change) -> None:
        if change.kind == "add":
            if line.startswith("+"):
                change.hunks[0].lines.append(("+", line[1:]))
            elif line.strip():
                raise InvalidRequest(f"line {self._at} of the patch: in a file that is added, "
                                     f"each line begins with +, not {line[:80]!r}")  # fmt: skip
            return
        if line.startswith("@@"):
            hunks = change.hunks
            if not hunks or hunks[-1].lines:
                hunks.append(Hunk())
            if numbers := _UNIFIED.match(line):
                hunks[-1].at = max(0, int(numbers[1]) - 1)
            elif above := line[2:].strip().removesuffix("@@").rstrip():
                hunks[-1].above.append(above)
            return
        if not change.hunks:
            change.hunks.append(Hunk())
        if not line or line[0] in " +-":
            change.hunks[-1].lines.append((line[:1] or " ", line[1:]))
        elif line.startswith("\\"):
            pass  # "No newline at end of file": the file's own end is kept
        else:
            raise self._wrong(line)

    def _wrong(self, line: str) -> InvalidRequest:
        return InvalidRequest(f"line {self._at} of the patch is {line[:80]!r}: {HOW}")


class _Unified:
    """What `diff -u` and `git diff` write."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._changes: list[Change] = []
        self._left = (0, 0)  # lines that the hunk says it still has, of the old and of the new

    def parse(self) -> list[Change]:
        at, renamed = 0, ""
        while at < len(self._lines):
            line = self._lines[at]
            if self._is_file(at):
                change = self._file(line[4:], self._lines[at + 1][4:])
                if renamed and self._changes and self._changes[-1].move_to:
                    change.path, change.move_to = renamed, self._changes.pop().move_to
                self._changes.append(change)
                renamed, self._left = "", (0, 0)
                at += 1
            elif self._left > (0, 0) and line[:1] in ("", " ", "+", "-"):
                self._add(line)
            elif numbers := _UNIFIED.match(line):
                self._hunk(numbers, at)
            elif line.startswith("\\") and self._changes and self._changes[-1].hunks:
                hunk = self._changes[-1].hunks[-1]
                hunk.no_newline.add(hunk.lines[-1][0] if hunk.lines else " ")
            elif line.startswith("rename from "):
                renamed = given(line[12:])
            elif line.startswith("rename to ") and renamed:
                self._changes.append(Change("update", renamed, move_to=given(line[10:])))
            elif line.startswith(("Binary files ", "GIT binary patch")):
                raise InvalidRequest("a patch cannot change a binary file: use write or bash")
            elif line.startswith("diff --git "):
                renamed = ""
            elif line[:1] in (" ", "+", "-") and self._in_hunk():
                self._add(line)
            at += 1
        return self._changes

    def _is_file(self, at: int) -> bool:
        """Even where the hunk says that it has more lines: models do not count well."""
        one, other, then = [*self._lines[at : at + 3], "", ""][:3]
        if not (one.startswith("--- ") and other.startswith("+++ ")):
            return False
        return self._left == (0, 0) or then.startswith("@@ ")

    def _in_hunk(self) -> bool:
        return bool(self._changes and self._changes[-1].hunks)

    def _file(self, before: str, after: str) -> Change:
        old, new = (given(name.split("\t")[0].strip()) for name in (before, after))
        if old.startswith(("a/", "/dev/null")) and new.startswith(("b/", "/dev/null")):
            old, new = (name if name == "/dev/null" else name[2:] for name in (old, new))
        if old == new == "/dev/null":
            raise InvalidRequest("a patch of /dev/null")
        if old == "/dev/null":
            return Change("add", new)
        return Change("delete", old) if new == "/dev/null" else Change("update", new)

    def _hunk(self, numbers: re.Match[str], at: int) -> None:
        if not self._changes:
            raise InvalidRequest(f"line {at + 1} of the patch: there are no --- and +++ lines")
        first, count, _, new = numbers.groups()
        size = 1 if count is None else int(count)
        # A hunk that takes nothing away is said to be after its line, and not at it.
        place = int(first) - 1 if size else int(first)
        self._changes[-1].hunks.append(Hunk(at=max(0, place)))
        self._left = (size, 1 if new is None else int(new))

    def _add(self, line: str) -> None:
        sign = line[:1] or " "
        self._changes[-1].hunks[-1].lines.append((sign, line[1:]))
        old, new = self._left
        self._left = (max(0, old - (sign != "+")), max(0, new - (sign != "-")))


# --- applied ----------------------------------------------------------------------------


def apply(text: str, hunks: Sequence[Hunk], path: str) -> str:
    """The text after all of them. Conflict says of every hunk that does not fit what is wrong."""
    lines = text.removesuffix("\n").split("\n") if text else []
    ends = text.endswith("\n") or not text
    spans: list[tuple[int, int, list[str]]] = []
    wrong, cursor = [], 0
    for number, hunk in enumerate(hunks, 1):
        try:
            start, span = _placed(lines, hunk, cursor)
        except LookupError as exc:
            wrong.append(f"hunk {number} of {shown(path)} does not fit: {exc}")
            continue
        cursor = start + len(span)
        spans.append((start, len(span), _after(hunk, span)))
        if cursor == len(lines) and hunk.no_newline:
            ends = not hunk.no_newline & {"+", " "}
    spans.sort(key=lambda found: found[:2])
    for before, after in pairwise(spans):
        if before[0] + before[1] > after[0]:
            wrong.append(f"two hunks of {shown(path)} change line {after[0] + 1}")
    if wrong:
        raise Conflict("\n".join(wrong))
    for start, size, new in reversed(spans):
        lines[start : start + size] = new
    return "\n".join(lines) + "\n" * ends if lines else ""


def _after(hunk: Hunk, span: Sequence[str]) -> list[str]:
    """What the lines of the file become. Those that stay do so as they are in the file."""
    out, at = [], 0
    for sign, text in hunk.lines:
        if sign == "+":
            out.append(text)
            continue
        if at < len(span):
            out += [span[at]] if sign == " " else []
        at += 1
    return out


def _placed(lines: Sequence[str], hunk: Hunk, cursor: int) -> tuple[int, Sequence[str]]:
    """Where a hunk fits, and the lines there. LookupError if it does not."""
    for above in hunk.above:
        cursor = _found_above(lines, above, cursor) + 1
    old = hunk.old
    if not old:
        nowhere = hunk.at is None and not hunk.above
        place = len(lines) if nowhere else cursor if hunk.above else min(hunk.at or 0, len(lines))
        return place, []
    # A blank line at its end often belongs to the patch and not to the file.
    for wanted in [old, old[:-1]] if len(old) > 1 and hunk.lines[-1] == (" ", "") else [old]:
        for alike in (str, str.rstrip, str.strip, _plain):
            places = _places(lines, [alike(line) for line in wanted], alike)
            if places:
                start = _chosen(places, hunk, cursor, len(lines) - len(wanted))
                return start, lines[start : start + len(wanted)]
    raise LookupError(f"its lines are not there. {nearest(lines, old)}")


def _plain(line: str) -> str:
    return line.translate(_PUNCTUATION).strip()


def _places(lines: Sequence[str], wanted: Sequence[str], alike: Callable[[str], str]) -> list[int]:
    have = [alike(line) for line in lines]
    size, first = len(wanted), wanted[0]
    return [
        at
        for at, line in enumerate(have[: len(have) - size + 1])
        if line == first and have[at : at + size] == wanted
    ]


def _chosen(places: Sequence[int], hunk: Hunk, cursor: int, end: int) -> int:
    if hunk.at_end and end in places:
        return end
    if hunk.at is not None:
        aim = hunk.at
        return min(places, key=lambda place: abs(place - aim))
    return next((place for place in places if place >= cursor), places[0])


def _found_above(lines: Sequence[str], above: str, cursor: int) -> int:
    for start in (cursor, 0):
        for alike in (str.strip, _plain):
            for at in range(start, len(lines)):
                if alike(lines[at]) == alike(above):
                    return at
    raise LookupError(f"there is no line {above[:200]!r}. {nearest(lines, [above])}")
