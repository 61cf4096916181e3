"""Tools that run something: any command, git, and Python. The shell and the Python are kept."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from hutch.client._async_code import Functions
from hutch.client._async_stream import AsyncStream
from hutch.errors import InvalidRequest, NotFound
from hutch.types import CellResult, Chunk, Execution, Result

from . import usage
from .condense import Condenser
from .condense.custom import own_filters
from .declare import Answer, Picture, Tool, ToolContext
from .pictures import decoded, seen
from .reading import PICTURE

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
    return await _run_in_shell(ctx, command, timeout, raw)


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
    answer = await _run_in_shell(ctx, shlex.join(["git", *words]), timeout, raw)
    if answer.exit_code != NOT_FOUND or (await ctx.box.shell.run("command -v git")).ok:
        return answer
    no_git = "There is no git in this box: install it, or use an image that has it."
    return replace(answer, text=_with_notes(answer.text, [no_git]), failed=True)


async def _run_in_shell(ctx: ToolContext, command: str, timeout: float, raw: bool) -> Answer:
    stream = await ctx.box.shell.stream(command, timeout=timeout, keep=True)
    return await answer_of(ctx, command, stream, timeout, raw)


async def answer_of(
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
        gap = f"the middle of {result.total_bytes:,} bytes is hidden: {recall_hint(result.kept)}"
        text, stdout, stderr = (both_ends(whole, RAW, gap) for whole in (text, stdout, stderr))
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
    text = _with_notes(text, _notes(result, timeout))
    # Some models reject an empty text.
    return Answer(text if text.strip() else "(no output)", result.exit_code, details=details)


def both_ends(text: str, room: int, gap: str) -> str:
    """The text, or its two ends with `[gap]` between them if it is longer than `room`."""
    half = room // 2
    return text if len(text) <= room else f"{text[:half]}\n[{gap}]\n{text[-half:]}"


def recall_hint(kept: str | None) -> str:
    """How a model can get all of an output."""
    return f'recall("{kept}")' if kept else "write it to a file, and read that"


def _notes(result: Result, timeout: float | None) -> list[str]:
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


def _with_notes(text: str, notes: list[str]) -> str:
    if notes and text and not text.endswith("\n"):
        text += "\n"
    return text + "\n".join(notes)


# --- Python -------------------------------------------------------------------------


TEXT = 30_000  # characters of one value that are shown
PICTURES = 8  # of one cell
TIMED_OUT = 124  # the exit code of timeout(1)


async def python(
    ctx: ToolContext,
    code: Annotated[str, "Python code; the value of a last expression is shown."],
    timeout: Annotated[int, "Seconds after which it is interrupted."] = 60,
) -> Answer:
    """Run Python in a session that stays: variables and imports are there next time.

    Shows what it prints, the value of its last expression, and its figures as images. The box has
    no network: use the packages that are there.
    """
    if timeout < 1:
        raise InvalidRequest("timeout is 1 second or more")
    try:
        execution, printed = await _run_cell(ctx, code, timeout)
    except NotFound:
        raise NotFound("there is no Python in this box: use bash") from None
    looks = [look for result in execution.results if (look := _picture(result))]
    drawn = [look for look in looks if isinstance(look, Picture)]
    pictures = [picture for picture in drawn if len(picture.data) <= PICTURE]
    parts = [printed, *(_short(_text(result), _whole_hint(result)) for result in execution.results)]
    parts += [look for look in looks if isinstance(look, str)]
    if execution.error and not execution.died:
        parts.append(
            execution.error.traceback or f"{execution.error.name}: {execution.error.value}"
        )
    parts.append(_notes_of_cell(execution, timeout))
    if unseen := len(drawn) - len(pictures[:PICTURES]):
        parts.append(f"[figures not shown: {unseen}. Save them to files, smaller, and read those]")
    text = "\n".join(_plain(*parts))
    exit_code = TIMED_OUT if execution.timed_out else 0 if execution.ok else 1
    details = {
        "timed_out": execution.timed_out,
        "restarted": execution.restarted,
        "kept": execution.kept,
    }
    shown = tuple(pictures[:PICTURES])
    return Answer(text or "(no output)", exit_code, pictures=shown, details=details)


async def _run_cell(ctx: ToolContext, code: str, timeout: int) -> tuple[Execution, str]:
    """Run a cell; returns its execution, and what it printed, shortened for a model."""
    condenser = Condenser("python")
    execution: Execution | None = None
    cell = ctx.box.stream_code(code, timeout=timeout, keep=True, functions=ctx.functions)
    async with await cell as stream:
        async for item in stream:
            if isinstance(item, Execution):
                execution = item
            elif isinstance(item, Chunk):
                condenser.feed(item.data, item.stream)
    assert execution is not None, "a cell ended without an execution"
    if not ctx.condense:
        printed = "\n".join(_plain(execution.logs.stdout, execution.logs.stderr))
        return execution, both_ends(
            printed, RAW, f"the middle is hidden: {recall_hint(execution.kept)}"
        )
    condensed = condenser.finish(0 if execution.ok else 1, recall=execution.kept)
    usage.note_run(condensed, execution.logs.stdout + execution.logs.stderr)
    if execution.kept and condensed.hidden_lines:
        ctx.hidden[execution.kept] = (condensed.family, condensed.program)
    return execution, condensed.text


def with_functions(python: Tool, functions: Functions) -> Tool:
    """The tool, with a description that lists what its code can call.

    Raises InvalidRequest if a name is not an identifier, or a function is not callable.
    """
    lines = [python.description, "", "Code can call these, without an import:"]
    for name, function in functions.items():
        if not (name.isidentifier() and callable(function)):
            raise InvalidRequest(f"not a function, or not an identifier: {name!r:.100}")
        does = (inspect.getdoc(function) or "").partition("\n")[0]
        lines.append(f"- {name}{_signature(function)}: {does}".rstrip(": "))
    return replace(python, description="\n".join(lines))


def _signature(function: Callable[..., object]) -> str:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [_without_secrets(parameter) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters))
    return text.replace("'", "")  # annotations may be strings


def _without_secrets(parameter: inspect.Parameter) -> inspect.Parameter:
    """Replace a default by `...`: it may be a key, which a model must not see."""
    if parameter.default is parameter.empty or isinstance(parameter.default, int | float | None):
        return parameter
    return parameter.replace(default=_Some())


class _Some:
    def __repr__(self) -> str:
        return "..."


def _plain(*parts: str) -> list[str]:
    return [part.removesuffix("\n") for part in parts if part]


def _text(result: CellResult) -> str:
    if result.png or result.jpeg:
        return ""  # shown as an image
    text = result.text or result.markdown or result.latex
    if text is None and not result.files:
        text = f"[shown as {', '.join(result.formats())}]"
    files = [f"[too large to show: {path}]" for path in result.files.values()]
    return "\n".join([text or "", *files]).strip("\n")


def _whole_hint(result: CellResult) -> str:
    """How a model can see a value whole: what is printed can be recalled."""
    return "print(_), then recall what is hidden of that" if result.is_main else "print it instead"


def _picture(result: CellResult) -> Picture | str | None:
    if result.png:
        return seen(decoded(result.png), "image/png")
    return seen(decoded(result.jpeg), "image/jpeg") if result.jpeg else None


def _notes_of_cell(execution: Execution, timeout: int) -> str:
    notes = []
    if execution.restarted:
        notes.append("[the session had died and was restarted: earlier variables are gone]")
    if execution.timed_out:
        notes.append(f"[interrupted after {timeout} seconds; raise timeout, or do less at once]")
    elif execution.interrupted:
        notes.append("[interrupted]")
    if execution.died:
        why = " for lack of memory" if execution.oom else ""
        notes.append(f"[the session died{why} ({execution.died}): its variables are gone]")
    return "\n".join(notes)


def _short(text: str, more: str) -> str:
    """Both ends of a long text; `more` says how to see the rest."""
    return both_ends(text, TEXT, f"{len(text) - TEXT:,} characters hidden: {more}")
