"""`hutch run`: one command in a box of its own."""

from __future__ import annotations

import argparse
import json

from hutch import operations as op
from hutch.errors import HutchError, InvalidRequest
from hutch.types import BoxInfo, Result, plain

from .boxes import box_for, dismiss, warn_of_limits
from .options import Parser, add_box_options, make_parser, seconds, split, to_operation
from .program import (
    FAILED,
    TIMED_OUT,
    Launcher,
    explained,
    follow,
    own_stdin,
    run_to_end,
    text_of,
)
from .screen import Screen, complain


def parser() -> Parser:
    made = make_parser(
        "hutch run",
        "hutch run [options] [--] COMMAND [ARGUMENT...]",
        "Run a command in a fresh box. Its output comes as it is made, its exit code is\n"
        "ours, and nothing is left afterwards but what it wrote to a workspace or mount.\n"
        "There is no network in a box.",
        "exit codes: the command's own, and 128+n if signal n ended it; 124 after\n"
        "--timeout; 125 if hutch failed; 126 if the command cannot be executed; 127 if\n"
        "there is no such command.\n"
        "\n"
        "examples:\n"
        "  hutch run -- python3 -c \"print('hello from a box')\"\n"
        "  hutch run --workspace . --timeout 5m -- make test\n"
        "  hutch run --memory 256m --env LANG -- sh -c 'sort data.txt | uniq -c'\n"
        "  tar c src | hutch run --stdin -- tar t",
    )
    made.add_argument("--timeout", metavar="TIME", help="stop it after 90, 90s, 5m or 1h")
    made.add_argument("--stdin", action="store_true", help="give it your stdin (else it is empty)")
    made.add_argument("--json", action="store_true",
                      help="print one JSON object at the end, instead of the output")  # fmt: skip
    add_box_options(made)
    return made


def main(words: list[str], launcher: Launcher) -> int:
    made = parser()
    options, command = split(words, made.with_value())
    try:
        chosen = made.parse_args(options)
        if not command:
            raise InvalidRequest(
                "what shall it run? For example: hutch run -- echo hello (see hutch run --help)"
            )
        box = to_operation(chosen)
        chosen.given = options
        chosen.command = tuple(map(text_of, command))
        chosen.seconds = None if chosen.timeout is None else seconds(chosen.timeout)
    except HutchError as exc:
        complain(str(exc))
        dismiss(launcher)
        if "--json" in options:
            print(json.dumps(_error(exc), indent=2))
        return FAILED
    return run_to_end(_run(box, chosen, launcher))


async def _run(box: op.OpenSession, chosen: argparse.Namespace, launcher: Launcher) -> int:
    screens = Screen(1), Screen(2)
    try:
        async with box_for(chosen, box, launcher) as (perform, info):
            warn_of_limits(chosen.given, info)
            stdin = own_stdin() if chosen.stdin else None
            program = op.RunProgram(info.id, chosen.command, stdin=stdin, timeout=chosen.seconds)
            async with explained(perform, info.id, chosen.command[0]):
                result = await follow(perform, program, None if chosen.json else screens)
    except HutchError as exc:
        if chosen.json:
            await _print(screens[0], _error(exc))
        raise
    if chosen.json:
        await _print(screens[0], _report(result, info))
    elif result.timed_out:
        complain(f"timed out after {chosen.seconds:g} s, and stopped")
    elif result.oom:
        complain(f"out of memory: the box has {chosen.memory}, and --memory gives it more")
    return TIMED_OUT if result.timed_out else result.exit_code


def _report(result: Result, info: BoxInfo) -> dict[str, object]:
    names = ("exit_code", "timed_out", "oom", "duration_ms", "total_bytes", "truncated",
             "stdout", "stderr")  # fmt: skip
    return {**{name: getattr(result, name) for name in names}, "box": plain(info)}


def _error(exc: HutchError) -> dict[str, object]:
    return {"error": {"code": exc.code, "message": str(exc)}}


async def _print(screen: Screen, value: dict[str, object]) -> None:
    await screen.write(json.dumps(value, indent=2).encode() + b"\n")
