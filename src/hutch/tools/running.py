"""The tool that runs Python in a kept kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from hutch.client._async_code import Functions
from hutch.errors import InvalidRequest, NotFound
from hutch.types import CellResult, Chunk, Execution

from . import usage
from .condense import Condenser
from .declare import Answer, Picture, Tool, ToolContext
from .pictures import decoded, seen
from .reading import PICTURE
from .shell import RAW, again, ends

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
        done, printed = await _run(ctx, code, timeout)
    except NotFound:
        raise NotFound("there is no Python in this box: use bash") from None
    looks = [look for result in done.results if (look := _picture(result))]
    drawn = [look for look in looks if isinstance(look, Picture)]
    pictures = [picture for picture in drawn if len(picture.data) <= PICTURE]
    parts = [printed, *(_short(_text(result), _again(result)) for result in done.results)]
    parts += [look for look in looks if isinstance(look, str)]
    if done.error and not done.died:
        parts.append(done.error.traceback or f"{done.error.name}: {done.error.value}")
    parts.append(_fate(done, timeout))
    if unseen := len(drawn) - len(pictures[:PICTURES]):
        parts.append(f"[figures not shown: {unseen}. Save them to files, smaller, and read those]")
    text = "\n".join(_plain(*parts))
    exit_code = TIMED_OUT if done.timed_out else 0 if done.ok else 1
    details = {"timed_out": done.timed_out, "restarted": done.restarted, "kept": done.kept}
    shown = tuple(pictures[:PICTURES])
    return Answer(text or "(no output)", exit_code, pictures=shown, details=details)


async def _run(ctx: ToolContext, code: str, timeout: int) -> tuple[Execution, str]:
    """How the cell ended, and what it printed, shortened for a model."""
    condenser = Condenser("python")
    done: Execution | None = None
    cell = ctx.box.stream_code(code, timeout=timeout, keep=True, functions=ctx.functions)
    async with await cell as stream:
        async for item in stream:
            if isinstance(item, Execution):
                done = item
            elif isinstance(item, Chunk):
                condenser.feed(item.data, item.stream)
    assert done is not None, "a cell ended without an execution"
    if not ctx.condense:
        printed = "\n".join(_plain(done.logs.stdout, done.logs.stderr))
        return done, ends(printed, RAW, f"the middle is hidden: {again(done.kept)}")
    condensed = condenser.finish(0 if done.ok else 1, recall=done.kept)
    usage.note_run(condensed, done.logs.stdout + done.logs.stderr)
    if done.kept and condensed.hidden_lines:
        ctx.hidden[done.kept] = (condensed.family, condensed.program)
    return done, condensed.text


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


def _again(result: CellResult) -> str:
    """How a model can see a value whole: what is printed can be recalled."""
    return "print(_), then recall what is hidden of that" if result.is_main else "print it instead"


def _picture(result: CellResult) -> Picture | str | None:
    if result.png:
        return seen(decoded(result.png), "image/png")
    return seen(decoded(result.jpeg), "image/jpeg") if result.jpeg else None


def _fate(done: Execution, timeout: int) -> str:
    notes = []
    if done.restarted:
        notes.append("[the session had died and was restarted: earlier variables are gone]")
    if done.timed_out:
        notes.append(f"[interrupted after {timeout} seconds; raise timeout, or do less at once]")
    elif done.interrupted:
        notes.append("[interrupted]")
    if done.died:
        why = " for want of memory" if done.oom else ""
        notes.append(f"[the session died{why} ({done.died}): its variables are gone]")
    return "\n".join(notes)


def _short(text: str, more: str) -> str:
    """Both ends of a long text; `more` says how to see the rest."""
    return ends(text, TEXT, f"{len(text) - TEXT:,} characters hidden: {more}")
