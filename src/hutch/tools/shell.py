"""Tools that run something in the kept shell: any command, and git."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Annotated

from hutch.client._async_stream import AsyncStream
from hutch.errors import InvalidRequest
from hutch.types import Chunk, Result

from . import usage
from .condense import Condenser
from .condense.custom import own_filters
from .declare import Answer, ToolContext

NOT_FOUND = 127
RAW = 100_000  # characters of raw output that are shown
_AS_PRINTED = "Show its output as it was printed; of more than 100,000 characters, both ends"


async def bash(
    ctx: ToolContext,
    command: Annotated[str, "The command to run"],
    timeout: Annotated[int, "Seconds after which it is killed, with all it started"] = 30,
    raw: Annotated[bool, _AS_PRINTED] = False,
) -> Answer:
    """Run a command in a shell that stays: its directory and variables are there next time.

    The box has no network: nothing can be downloaded or installed from one. Long output is
    shortened without losing failures; what is hidden is marked, and `recall` brings it back.
    """
    return await run(ctx, command, timeout, raw)


async def git(
    ctx: ToolContext,
    args: Annotated[str, "Its arguments, as in a shell: log --oneline -5"],
    timeout: Annotated[int, "Seconds after which it is killed"] = 30,
    raw: Annotated[bool, _AS_PRINTED] = False,
) -> Answer:
    """Run git in the shell's directory. The box has no network: no clone, fetch or push of one."""
    try:
        words = shlex.split(args)
    except ValueError as exc:
        raise InvalidRequest(f"args: {exc}; quote them as for a shell") from None
    answer = await run(ctx, shlex.join(["git", *words]), timeout, raw)
    if answer.exit_code != NOT_FOUND or (await ctx.box.shell.run("command -v git")).ok:
        return answer
    no_git = "There is no git in this box: install it, or use an image that has it."
    return replace(answer, text=_with(answer.text, [no_git]), failed=True)


async def run(ctx: ToolContext, command: str, timeout: float, raw: bool = False) -> Answer:
    stream = await ctx.box.shell.stream(command, timeout=timeout, keep=True)
    return await told(ctx, command, stream, timeout, raw)


async def told(
    ctx: ToolContext,
    command: str,
    stream: AsyncStream[Chunk | Result],
    timeout: float | None,
    raw: bool = False,
) -> Answer:
    """The answer of a command: its output, and how it ended unless it succeeded."""
    is_raw = raw or not ctx.condense
    filters = () if is_raw else own_filters()
    condenser = Condenser(command, filters=filters, apart=ctx.apart)
    result: Result | None = None
    async with stream:
        async for item in stream:
            if isinstance(item, Result):
                result = item
            elif not is_raw:
                condenser.feed(item.data, item.stream)
    assert result is not None, "a command ended without a result"
    details: dict[str, object] = {
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "cwd": result.cwd,
        "kept": result.kept,
        "restarted": result.restarted,
        "oom": result.oom,
    }
    text, stdout, stderr = result.output, result.stdout, result.stderr
    if is_raw:
        gap = f"the middle of {result.total_bytes:,} bytes is hidden: {again(result.kept)}"
        text, stdout, stderr = (ends(whole, RAW, gap) for whole in (text, stdout, stderr))
    else:
        code = None if result.timed_out else result.exit_code
        condensed = condenser.finish(code, recall=result.kept)
        text, stdout, stderr = condensed.text, condensed.stdout, condensed.stderr
        usage.note_run(condensed, result.output)
        if result.kept and condensed.hidden_lines:
            ctx.hidden[result.kept] = (condensed.family, condensed.program)
        details |= {"family": condensed.family, "hidden_lines": condensed.hidden_lines}
    if ctx.apart:
        details |= {"stdout": stdout, "stderr": stderr}
    text = _with(text, _endings(result, timeout))
    # Some models reject an empty text.
    return Answer(text if text.strip() else "(no output)", result.exit_code, details=details)


def ends(text: str, room: int, gap: str) -> str:
    """The text, or its two ends with `[gap]` between them if it is longer than `room`."""
    half = room // 2
    return text if len(text) <= room else f"{text[:half]}\n[{gap}]\n{text[-half:]}"


def again(kept: str | None) -> str:
    """How a model can get all of an output."""
    return f'recall("{kept}")' if kept else "write it to a file, and read that"


def _endings(result: Result, timeout: float | None) -> list[str]:
    notes = []
    if result.restarted:
        notes.append(
            "[the shell was restarted: the one before had ended; its directory and exported "
            "variables are there, all else of it is gone]"
        )
    if result.oom:
        notes.append("[something was killed: there was not enough memory]")
    if result.timed_out:
        notes.append(
            f"[timed out after {timeout or 0:g} s: killed, with all it started; "
            "raise timeout, or run it in the background with &]"
        )
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    return notes


def _with(text: str, notes: list[str]) -> str:
    if notes and text and not text.endswith("\n"):
        text += "\n"
    return text + "\n".join(notes)
