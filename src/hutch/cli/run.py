"""`hutch run`: run a command in a new box."""

from __future__ import annotations

import argparse
import json
from contextlib import AsyncExitStack

from hutch import operations as op
from hutch.errors import HutchError, InvalidRequest
from hutch.types import BoxInfo, Result

from . import FAILED
from .boxes import as_ended, box_for, dismiss, warn_of_limits
from .options import (
    Parser,
    add_box_options,
    add_json_option,
    add_terminal_options,
    make_parser,
    seconds,
    split,
    takes_next,
    to_operation,
)
from .program import (
    TIMED_OUT,
    Launcher,
    explained,
    follow,
    network_advice,
    own_stdin,
    run_to_end,
    tell_of_unread_stdin,
    text_of,
)
from .screen import OutputStream, complain, error_to_json, to_json


def build_parser() -> Parser:
    parser = make_parser(
        "hutch run",
        "hutch run [options] [--] COMMAND [ARGUMENT...]",
        "Run a command in a fresh box. Its output is printed as it comes, hutch exits\n"
        "with its exit code, and nothing is left but what it wrote to a workspace or\n"
        "mount. A box has no network.",
        "exit codes: the command's own, and 128+n if signal n ended it; 124 after\n"
        "--timeout; 125 if hutch failed; 126 if the command cannot be executed; 127 if\n"
        "there is no such command.\n"
        "\n"
        "examples:\n"
        "  hutch run -- python3 -c \"print('hello from a box')\"\n"
        "  hutch run --workspace . --timeout 5m -- make test\n"
        "  hutch run -m 256m -e LANG -v ./data:/data:ro -- sh -c 'sort /data/* | uniq -c'\n"
        "  hutch run -it -- bash\n"
        "  tar c src | hutch run --stdin -- tar t",
    )
    parser.add_argument("--timeout", metavar="TIME", help="stop it after 90, 90s, 5m, 1h or 1d")
    add_terminal_options(parser)
    parser.add_argument(
        "--rm", action="store_true", help="accepted and ignored: a box is always removed"
    )
    add_json_option(parser)
    _add_project_options(parser)
    add_box_options(parser)
    return parser


def _add_project_options(parser: Parser) -> None:
    project = parser.add_argument_group("a project")
    project.add_argument(
        "--project",
        metavar="DIR",
        help="put this folder at /workspace, and install what its lock file or else "
        "its requirements.txt, pyproject.toml, package.json and the like ask for",
    )
    project.add_argument(
        "--copy",
        action="store_true",
        help="use a copy of the folder, so that it stays unchanged (default); --mount "
        "without a value uses the folder itself",
    )
    project.add_argument(
        "--out",
        action="append",
        default=[],
        metavar="PATH",
        help="copy this file, folder or pattern like dist/*.whl back afterwards; may be repeated",
    )
    project.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="NAME",
        help="install this extra or group of pyproject.toml too; may be repeated",
    )
    project.add_argument(
        "--persistent", action="store_true", help="keep the box of the project from run to run"
    )
    project.add_argument(
        "--reset",
        action="store_true",
        help="remove the saved box of the project; if there is a command, before it runs",
    )
    project.add_argument("--in-place", action="store_true", help=argparse.SUPPRESS)


def main(words: list[str], launcher: Launcher) -> int:
    parser = build_parser()
    options, command = split(_mark_in_place(words, parser.with_value()), parser.with_value())
    try:
        args = parser.parse_args(options)
        _check(args, command)
        box = to_operation(args)
        args.given = options
        args.command = tuple(map(text_of, command))
        args.seconds = None if args.timeout is None else seconds(args.timeout)
    except HutchError as exc:
        complain(str(exc), error=True)
        dismiss(launcher)
        if "--json" in options:
            print(json.dumps(error_to_json(exc), indent=2))
        return FAILED
    if args.tty:
        from . import shell

        return shell.run_in_terminal(box, args, command, launcher)
    return run_to_end((_run if command else _reset)(box, args, launcher))


def _mark_in_place(words: list[str], with_value: set[str]) -> list[str]:
    """Tell `--mount` alone, which mounts the project, apart from `--mount HOST:BOX`."""
    ours, _ = split(words, with_value)
    if not any(word.partition("=")[0] == "--project" for word in ours):
        return words
    words, place = list(words), 0
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        word, after = words[place], words[place + 1 : place + 2]
        fields = ("type=", "source=", "src=")
        if word == "--mount" and not (after and (":" in after[0] or after[0].startswith(fields))):
            words[place] = "--in-place"
        place += 2 if takes_next(words[place], with_value) else 1
    return words


def _check(args: argparse.Namespace, command: list[str]) -> None:
    if args.project is not None:
        from . import project  # slow to import, and few need it

        project.check(args)
    else:
        for name in ("copy", "in_place", "out", "extra", "persistent", "reset"):
            if getattr(args, name):
                raise InvalidRequest(f"--{name.replace('_', '-')} needs --project")
    if args.tty:
        for name in ("project", "json", "timeout"):
            if getattr(args, name):
                raise InvalidRequest(f"--tty cannot be combined with --{name}")
        return
    if not command and not args.reset:
        raise InvalidRequest(
            "no command given. For example: hutch run -- echo hello (see hutch run --help)"
        )


async def _reset(box: op.OpenSession, args: argparse.Namespace, launcher: Launcher) -> int:
    from . import project

    was_there = project.reset(args, launcher)
    outcome = "removed the saved box of" if was_there else "there is no saved box for"
    text = f"{outcome} {args.top}"
    report = json.dumps({"removed": was_there}, indent=2) if args.json else text
    await OutputStream(1).write(f"{report}\n".encode(errors="surrogateescape"))
    return 0


async def _run(box: op.OpenSession, args: argparse.Namespace, launcher: Launcher) -> int:
    outputs = OutputStream(1), OutputStream(2)
    try:
        async with AsyncExitStack() as stack:
            env, project_box = {}, None
            if args.project is None:
                opened = box_for(args, box, launcher)
                transport, info = await stack.enter_async_context(opened)
            else:
                from . import project

                opening = project.open_project(args, box, launcher)
                project_box = await stack.enter_async_context(opening)
                transport, info, env = project_box.transport, project_box.info, project_box.env
            warn_of_limits(args.given, info)
            stdin = own_stdin() if args.stdin else None
            program = op.RunProgram(
                info.id, args.command, env=env, stdin=stdin, timeout=args.seconds
            )
            async with explained(transport, info, args.command):
                result = await follow(transport, program, None if args.json else outputs)
    except HutchError as exc:
        if args.json:
            await outputs[0].write_json(error_to_json(exc))
        raise
    if not args.stdin:
        tell_of_unread_stdin("hutch run")
    if args.json:
        more = {"project": project_box.report()} if project_box else {}
        await outputs[0].write_json(_report(result, as_ended(info)) | more)
    elif result.timed_out:
        complain(f"timed out after {args.seconds:g} s, and stopped")
    elif result.oom:
        complain(f"out of memory: the box has {args.memory}, and --memory gives it more")
    elif "network" not in args.relax and (
        advice := network_advice(args.command, result.exit_code, result.output)
    ):
        complain(advice)
    return TIMED_OUT if result.timed_out else result.exit_code


def _report(result: Result, info: BoxInfo) -> dict[str, object]:
    names = (
        "exit_code",
        "timed_out",
        "oom",
        "duration_ms",
        "total_bytes",
        "truncated",
        "stdout",
        "stderr",
    )
    return {**{name: getattr(result, name) for name in names}, "box": to_json(info)}
