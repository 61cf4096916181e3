"""The tool that applies a patch: to all files that it names, or to none.

There are two formats. Between `*** Begin Patch` and `*** End Patch`, the lines around a change say
where it belongs; a unified diff also has line numbers, which are used if the lines fit there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Literal

from hutch.errors import BoxError, CallerError, Conflict, HutchError, InvalidRequest, NotFound

from .declare import Answer, ToolContext
from .paths import absolute, at_home, given, near, shown
from .writing import content_of, digest, has_crlf, nearest, remember, to_crlf

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
# Typographic characters that models and word processors write in place of ASCII ones.
_PUNCTUATION = str.maketrans(
    "‐‑‒–—−‘’‚‛“”„‟\u00a0\u2002\u2003\u2009\u202f", "------" + "'" * 4 + '"' * 4 + " " * 5
)
_FENCE = re.compile(r"\s*```\w*\n(.*?)\n?```\s*", re.DOTALL)


@dataclass
class Hunk:
    """Lines with a sign each: ` ` is kept, `-` removed, `+` added."""

    above: list[str] = field(default_factory=list)  # lines somewhere before it, in this order
    lines: list[tuple[str, str]] = field(default_factory=list)
    at: int | None = None  # index of the line where it should be
    at_end: bool = False
    no_newline: set[str] = field(default_factory=set)  # signs of last lines without a newline

    @property
    def old(self) -> list[str]:
        return [text for sign, text in self.lines if sign != "+"]


@dataclass
class FileChange:
    """What a patch does to one file."""

    kind: Literal["add", "update", "delete"]
    path: str
    hunks: list[Hunk] = field(default_factory=list)
    move_to: str | None = None


def parse(patch: str) -> list[FileChange]:
    """The changes in a patch, in order. Raises InvalidRequest, with the line that is wrong."""
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
        raise InvalidRequest(f"this is not a patch: {HOW}")
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
        self._changes: list[FileChange] = []

    def parse(self) -> list[FileChange]:
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
            self._changes.append(FileChange("add", path, [Hunk()]))
        elif word == "Delete File":
            self._changes.append(FileChange("delete", path))
        elif word == "Update File":
            self._changes.append(FileChange("update", path))
        elif word == "Move to" and last and last.kind == "update" and not last.hunks:
            last.move_to = path
        elif word.rstrip() == "End of File" and last and last.hunks:
            last.hunks[-1].at_end = True
        else:
            raise self._wrong(line)
        if word.endswith("File") and word != "End of File" and not path:
            raise self._wrong(line)

    def _body(self, line: str, change: FileChange) -> None:
        if change.kind == "add":
            if line.startswith("+"):
                change.hunks[0].lines.append(("+", line[1:]))
            elif line.strip():
                raise InvalidRequest(
                    f"line {self._at} of the patch: in a file that is added, "
                    f"each line begins with +, not {line[:80]!r}"
                )
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
            pass  # "\ No newline at end of file": the file's own ending is kept
        else:
            raise self._wrong(line)

    def _wrong(self, line: str) -> InvalidRequest:
        return InvalidRequest(f"line {self._at} of the patch is {line[:80]!r}: {HOW}")


class _Unified:
    """What `diff -u` and `git diff` write."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._changes: list[FileChange] = []
        self._left = (0, 0)  # old and new lines that the header of the hunk still promises

    def parse(self) -> list[FileChange]:
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
                self._changes.append(FileChange("update", renamed, move_to=given(line[10:])))
            elif line.startswith(("Binary files ", "GIT binary patch")):
                raise InvalidRequest("a patch cannot change a binary file: use write or bash")
            elif line.startswith("diff --git "):
                renamed = ""
            elif line[:1] in (" ", "+", "-") and self._in_hunk():
                self._add(line)
            at += 1
        return self._changes

    def _is_file(self, at: int) -> bool:
        """Whether a file starts here, even if the hunk promised more lines: models miscount."""
        one, other, then = [*self._lines[at : at + 3], "", ""][:3]
        if not (one.startswith("--- ") and other.startswith("+++ ")):
            return False
        return self._left == (0, 0) or then.startswith("@@ ")

    def _in_hunk(self) -> bool:
        return bool(self._changes and self._changes[-1].hunks)

    def _file(self, before: str, after: str) -> FileChange:
        old, new = (given(name.split("\t")[0].strip()) for name in (before, after))
        if old.startswith(("a/", "/dev/null")) and new.startswith(("b/", "/dev/null")):
            old, new = (name if name == "/dev/null" else name[2:] for name in (old, new))
        if old == new == "/dev/null":
            raise InvalidRequest("a patch of /dev/null")
        if old == "/dev/null":
            return FileChange("add", new)
        return FileChange("delete", old) if new == "/dev/null" else FileChange("update", new)

    def _hunk(self, numbers: re.Match[str], at: int) -> None:
        if not self._changes:
            raise InvalidRequest(f"line {at + 1} of the patch: there are no --- and +++ lines")
        first, count, _, new = numbers.groups()
        size = 1 if count is None else int(count)
        # In a hunk that removes nothing, the number is that of the line before it.
        place = int(first) - 1 if size else int(first)
        self._changes[-1].hunks.append(Hunk(at=max(0, place)))
        self._left = (size, 1 if new is None else int(new))

    def _add(self, line: str) -> None:
        sign = line[:1] or " "
        self._changes[-1].hunks[-1].lines.append((sign, line[1:]))
        old, new = self._left
        self._left = (max(0, old - (sign != "+")), max(0, new - (sign != "-")))


# --- applying it ------------------------------------------------------------------------


def apply(text: str, hunks: Sequence[Hunk], path: str) -> str:
    """The text after all hunks. Raises Conflict, with the reason for every hunk that fails."""
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
    spans.sort(key=lambda span: span[:2])
    for before, after in pairwise(spans):
        if before[0] + before[1] > after[0]:
            wrong.append(f"two hunks of {shown(path)} change line {after[0] + 1}")
    if wrong:
        raise Conflict("\n".join(wrong))
    for start, size, new in reversed(spans):
        lines[start : start + size] = new
    return "\n".join(lines) + "\n" * ends if lines else ""


def _after(hunk: Hunk, span: Sequence[str]) -> list[str]:
    """What the lines become. Kept lines stay as they are in the file, not as in the patch."""
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
    """Where a hunk fits, and the lines there. Raises LookupError if it fits nowhere."""
    for above in hunk.above:
        cursor = _found_above(lines, above, cursor) + 1
    old = hunk.old
    if not old:
        nowhere = hunk.at is None and not hunk.above
        place = len(lines) if nowhere else cursor if hunk.above else min(hunk.at or 0, len(lines))
        return place, []
    # A blank line at the end of a hunk often belongs to the patch and not to the file.
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


# --- the tool ---------------------------------------------------------------------------


@dataclass
class Draft:
    """The content of a file before and after the patch; None if it does not exist."""

    path: str
    before: bytes | None
    after: bytes | None
    mode: int | None = None  # of the file, or of the one that is moved here


async def apply_patch(
    ctx: ToolContext,
    patch: Annotated[str, "The patch: *** Begin Patch … *** End Patch, or a unified diff."],
) -> Answer:
    """Change, add, delete and move files by one patch: all of it, or nothing if any does not fit.

    Paths are relative to the workspace, wherever the shell is.

    *** Begin Patch
    *** Update File: path
    @@ def the_function_above():
     a line that stays
    -a line that goes
    +a line that comes
    *** End Patch

    Also: *** Add File: path (then lines with +), *** Delete File: path, and *** Move to: path after
    an Update File line. Give about three lines that stay around each change. Unified diffs do, too.
    """
    drafts: dict[str, Draft] = {}
    done, wrong = [], []
    for change in parse(patch):
        try:
            done.append(await _drafted(ctx, change, drafts))
        except CallerError as exc:
            wrong.append(str(exc))
    if wrong:
        raise Conflict("\n".join([*wrong, "Nothing was changed."]))
    changed = [draft for draft in drafts.values() if draft.before != draft.after]
    await _carried_out(ctx, changed)
    return Answer("\n".join(done), details={"files": [near(ctx, d.path) for d in changed]})


async def _drafted(ctx: ToolContext, change: FileChange, drafts: dict[str, Draft]) -> str:
    """Apply a change to the drafts, which have the earlier changes of the patch already."""
    to = change.move_to and await at_home(ctx, change.move_to)
    change = replace(change, path=await at_home(ctx, change.path), move_to=to)
    draft = await _draft(ctx, change.path, drafts)
    name = shown(change.path)
    if change.kind == "add":
        if draft.after is not None:
            raise Conflict(f"{name} is there already: use Update File, or write")
        lines = [text for hunk in change.hunks for _, text in hunk.lines]
        unended = any("+" in hunk.no_newline for hunk in change.hunks)
        text = "\n".join(lines) + "\n" * (bool(lines) and not unended)
        draft.after = text.encode("utf-8", "surrogateescape")
        return f"Added {name}"
    if draft.after is None:
        await content_of(ctx, change.path)  # raises if the file is missing in the box, too
        raise NotFound(f"{name} was deleted or moved earlier in this patch")
    if change.kind == "delete":
        draft.after = None
        return f"Deleted {name}"
    after = _changed(draft.after, change)
    if change.move_to is None or absolute(ctx, change.move_to) == absolute(ctx, change.path):
        draft.after = after
        return f"Updated {name}{_counts(change)}"
    target = await _draft(ctx, change.move_to, drafts)
    if target.after is not None:
        raise Conflict(f"{shown(change.move_to)} is there already: delete it, or move elsewhere")
    target.after, target.mode, draft.after = after, draft.mode, None
    return f"Moved {name} to {shown(change.move_to)}{_counts(change)}"


async def _draft(ctx: ToolContext, path: str, drafts: dict[str, Draft]) -> Draft:
    full = absolute(ctx, path)
    if full not in drafts:
        try:
            entry = await ctx.box.files.stat(path)
            content = await content_of(ctx, path)
        except NotFound:
            drafts[full] = Draft(full, None, None)
        else:
            mode = entry.mode & 0o777 if entry.kind == "file" else None  # a link has none
            drafts[full] = Draft(full, content, content, mode)
    return drafts[full]


def _changed(content: bytes, change: FileChange) -> bytes:
    crlf = has_crlf(content)
    plain = content.replace(b"\r\n", b"\n") if crlf else content
    after = apply(plain.decode("utf-8", "surrogateescape"), change.hunks, change.path)
    data = after.encode("utf-8", "surrogateescape")
    return to_crlf(data) if crlf else data


def _counts(change: FileChange) -> str:
    signs = [sign for hunk in change.hunks for sign, _ in hunk.lines]
    return f" (+{signs.count('+')} -{signs.count('-')})" if signs else ""


async def _carried_out(ctx: ToolContext, drafts: list[Draft]) -> None:
    """Write first, then delete; if one fails, restore the others."""
    done: list[Draft] = []
    try:
        for draft in sorted(drafts, key=lambda draft: draft.after is None):
            await _settle(ctx, draft.path, draft.before, draft.after, draft.mode)
            done.append(draft)
    except BoxError:
        raise
    except HutchError as exc:
        kept = []
        for draft in reversed(done):
            try:
                await _settle(ctx, draft.path, draft.after, draft.before, draft.mode)
            except CallerError:
                kept.append(near(ctx, draft.path))  # something else has changed it since
        changed = f"Only {', '.join(kept)} was changed." if kept else "Nothing was changed."
        raise Conflict(f"{exc}. {changed}") from exc


async def _settle(
    ctx: ToolContext, path: str, now: bytes | None, then: bytes | None, mode: int | None
) -> None:
    """Replace the content `now` by `then`. Raises Conflict if it is not `now` any more."""
    if then is None:
        await ctx.box.files.remove(path)
        ctx.seen.pop(path, None)
        return
    expect = "" if now is None else digest(now)
    await ctx.box.files.write(path, then, expect=expect, mode=mode if now is None else None)
    remember(ctx, path, then)
