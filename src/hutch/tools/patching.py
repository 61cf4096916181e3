"""The tool that applies a patch: to all the files that it names, or to none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from hutch.errors import BoxError, CallerError, Conflict, HutchError, NotFound

from .answers import Answer
from .context import ToolContext
from .patches import Change, apply, parse
from .paths import absolute, at_home, near, shown
from .writing import content_of, digest, has_crlf, remember, to_crlf


@dataclass
class Draft:
    """A file as it is, and as it shall be. None: there is none."""

    path: str
    before: bytes | None
    after: bytes | None
    mode: int | None = None  # of the file that it takes the place of


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


async def _drafted(ctx: ToolContext, change: Change, drafts: dict[str, Draft]) -> str:
    """Do it on paper. What earlier changes of the patch did is there already."""
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
        await content_of(ctx, change.path)  # it says what there is instead
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


def _changed(content: bytes, change: Change) -> bytes:
    crlf = has_crlf(content)
    plain = content.replace(b"\r\n", b"\n") if crlf else content
    after = apply(plain.decode("utf-8", "surrogateescape"), change.hunks, change.path)
    data = after.encode("utf-8", "surrogateescape")
    return to_crlf(data) if crlf else data


def _counts(change: Change) -> str:
    signs = [sign for hunk in change.hunks for sign, _ in hunk.lines]
    return f" (+{signs.count('+')} -{signs.count('-')})" if signs else ""


async def _carried_out(ctx: ToolContext, drafts: list[Draft]) -> None:
    """Write first, delete after; if one fails, put back what the others were."""
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
                kept.append(near(ctx, draft.path))  # somebody else changes it, too
        changed = f"Only {', '.join(kept)} was changed." if kept else "Nothing was changed."
        raise Conflict(f"{exc}. {changed}") from exc


async def _settle(
    ctx: ToolContext, path: str, now: bytes | None, then: bytes | None, mode: int | None
) -> None:
    """Make a file that is `now` into what it shall be `then`."""
    if then is None:
        await ctx.box.files.remove(path)
        ctx.seen.pop(path, None)
        return
    expect = "" if now is None else digest(now)
    await ctx.box.files.write(path, then, expect=expect, mode=mode if now is None else None)
    remember(ctx, path, then)
