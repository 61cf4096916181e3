"""`hutch python`: run Python in a box, and show results as a notebook does."""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import CallerError, HutchError, InvalidRequest
from hutch.types import BoxInfo, Call, CellResult, Chunk, Execution

from . import FAILED
from .boxes import as_ended, box_for, dismiss, refuse_box_options, warn_of_limits
from .options import (
    Parser,
    add_box_options,
    add_json_option,
    make_parser,
    seconds,
    split,
    to_operation,
)
from .program import TIMED_OUT, Launcher, network_advice, run_to_end, text_of
from .screen import OutputStream, complain, error_to_json, to_json

# Formats that are written to files. A table is printed as text, whatever else it offers.
SUFFIX = {"png": "png", "jpeg": "jpg", "svg": "svg", "pdf": "pdf"}
SUFFIX_OF_LARGE = {**SUFFIX, "html": "html", "text": "txt", "json": "json", "markdown": "md"}
RAISED = 1


def build_parser() -> Parser:
    parser = make_parser(
        "hutch python",
        "hutch python [options] FILE [ARGUMENT...]\n"
        "       hutch python [options] -c CODE [ARGUMENT...]\n"
        "       hutch python [options] - [ARGUMENT...]",
        "Run Python in a fresh box, the way a notebook does: the value of the last\n"
        "expression is printed, tables as text; pictures are written to files, whose\n"
        "names are printed to stderr. The code is read from stdin if FILE is `-`, or if\n"
        "it is omitted and stdin is a pipe. With --session, it runs as the next cell of\n"
        "that session, which keeps its variables.",
        "exit codes: 0; that of sys.exit; 1 after an exception; 124 after --timeout; 125\n"
        "if hutch failed; 128+n if signal n ended it.\n"
        "\n"
        "examples:\n"
        "  hutch python -c 'sum(range(10))'\n"
        "  hutch python --image data --workspace . --out plots report.py\n"
        "  echo 'print(6 * 7)' | hutch python",
    )
    parser.add_argument("--session", metavar="ID", help="run it in this session of a server")
    parser.add_argument("--timeout", metavar="TIME", help="stop it after 90, 90s, 5m, 1h or 1d")
    parser.add_argument(
        "--out", metavar="DIR", help="where to write pictures (default: a new temporary folder)"
    )
    add_json_option(parser)
    add_box_options(parser, image="python", has_short=False)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    parser = build_parser()
    options, rest = split(words, parser.with_value(), ("-", "-c"))
    try:
        args = parser.parse_args(options)
        box = to_operation(args)
        args.given = options
        if args.session:
            refuse_box_options(options, ("--timeout", "--out", "--json"))
        args.seconds = None if args.timeout is None else seconds(args.timeout)
        if args.out and os.path.exists(args.out) and not os.path.isdir(args.out):
            raise InvalidRequest(f"--out {args.out} is not a folder")
        args.code, args.argv = _code(rest)
    except HutchError as exc:
        complain(str(exc), error=True)
        dismiss(launcher)
        if "--json" in options:
            print(json.dumps(error_to_json(exc), indent=2))
        return FAILED
    return run_to_end(_run(box, args, launcher))


def _code(words: list[str]) -> tuple[str, list[str]]:
    """The code, and its sys.argv."""
    if words[:1] == ["-c"]:
        if len(words) < 2:
            raise InvalidRequest("-c needs code: hutch python -c 'print(1)'")
        return text_of(words[1]), ["-c", *map(text_of, words[2:])]
    if not words and os.isatty(0):
        raise InvalidRequest(
            "no code given. For example: hutch python -c 'print(1)' (see hutch python --help)"
        )
    name = words[0] if words else "-"
    try:
        if name == "-":
            content = sys.stdin.buffer.read()
        else:
            with open(name, "rb") as file:
                content = file.read()
        return content.decode("utf-8-sig"), [text_of(name), *map(text_of, words[1:])]
    except OSError as exc:
        raise InvalidRequest(f"cannot read {name}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"cannot read {name}: it is not text in UTF-8") from None


async def _run(box: op.OpenSession, args: argparse.Namespace, launcher: Launcher) -> int:
    outputs = OutputStream(1), OutputStream(2)
    try:
        async with box_for(args, box, launcher) as (transport, info):
            warn_of_limits(args.given, info)
            if not args.session or args.argv[1:]:  # what a session's cells had stays
                await _execute(transport, op.RunCode(info.id, _arguments(args.argv)), None)
            cell = op.RunCode(info.id, args.code, timeout=args.seconds)
            show = None if args.json else Show(outputs, transport, info, args.out)
            execution = await _execute(transport, cell, show)
            if not args.session:
                execution = _renamed(execution, args.argv[0])
    except HutchError as exc:
        if args.json:
            await outputs[0].write_json(error_to_json(exc))
        raise
    if args.json:
        box_info = info if args.session else as_ended(info)
        await outputs[0].write_json({**to_json(execution), "box": to_json(box_info)})
    else:
        await _explain(execution, outputs[1], args)
        if execution.error and "network" not in info.relaxed:
            output = execution.logs.stdout + execution.logs.stderr
            if advice := network_advice([args.code], RAISED, output):
                complain(advice)
    return _exit_code(execution)


def _renamed(execution: Execution, name: str) -> Execution:
    """Name the file in tracebacks. Code without one is cell 1: the one before only set sys.argv."""
    shown = "<cell 1>" if name in ("-c", "-") else name
    error = execution.error
    if error:
        text = error.traceback.replace(
            f'File "<cell {execution.execution_count}>"', f'File "{shown}"'
        )
        error = replace(error, traceback=text)
    return replace(execution, error=error, execution_count=min(execution.execution_count, 1))


def _arguments(argv: list[str]) -> str:
    return f"__import__('sys').argv[:] = {argv!r}"


async def _execute(transport: AsyncTransport, cell: op.RunCode, show: Show | None) -> Execution:
    async with aclosing(await transport.stream(cell)) as stream:
        async for item in stream:
            if isinstance(item, Execution):
                if show:
                    await show.finish()
                return item
            if show and not isinstance(item, Call):
                await show.show(item)
    raise AssertionError("a cell ended without an execution")


class Show:
    """Prints what a cell shows, and writes pictures to a folder."""

    def __init__(
        self,
        outputs: tuple[OutputStream, OutputStream],
        transport: AsyncTransport,
        info: BoxInfo,
        out: str | None,
    ) -> None:
        self._outputs, self._transport, self._info = outputs, transport, info
        self._folder = out
        self._count = 0

    async def show(self, item: Chunk | CellResult) -> None:
        if isinstance(item, Chunk):
            await self._outputs[item.stream == "stderr"].write(item.data)
            return
        self._count += 1
        written = 0
        for suffix, data in _pictures(item):
            self._write(suffix, data)
            written += 1
        for form, path in item.files.items():
            self._write(SUFFIX_OF_LARGE.get(form, "bin"), await self._fetch(path))
            written += 1
        text = item.markdown or item.text
        if text and not written:
            data = text.encode("utf-8", "replace")
            await self._outputs[0].write(data if data.endswith(b"\n") else data + b"\n")

    async def finish(self) -> None:
        for output in self._outputs:
            await output.finish()

    async def _fetch(self, path: str) -> bytes:
        """A form of a result that was too large to be sent with the result."""
        try:
            stream = await self._transport.stream(op.ReadFile(self._info.id, path))
            async with aclosing(stream):
                return b"".join([piece async for piece in stream])
        except CallerError as exc:
            complain(f"cannot get {path} from the box: {exc}")
            return b""

    def _write(self, suffix: str, data: bytes) -> None:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="hutch-python-")
        os.makedirs(self._folder, exist_ok=True)
        path = os.path.join(self._folder, f"cell-{self._count}.{suffix}")
        with open(path, "wb") as file:
            file.write(data)
        complain(f"wrote {path}")


def _pictures(result: CellResult) -> Iterator[tuple[str, bytes]]:
    for form, suffix in SUFFIX.items():
        text = getattr(result, form)
        if text is None or form in result.files:
            continue
        try:
            yield suffix, text.encode() if form == "svg" else base64.b64decode(text)
        except ValueError:
            complain(f"a result has invalid {form}")
    if result.html and any("vnd." in kind for kind in result.extra):
        yield "html", result.html.encode()  # a chart that moves: its text says nothing


async def _explain(execution: Execution, stderr: OutputStream, args: argparse.Namespace) -> None:
    error = execution.error
    if execution.timed_out:
        complain(f"timed out after {args.seconds:g} s, and stopped")
    elif execution.oom:
        complain(f"out of memory: the box has {args.memory}, and --memory gives it more")
    elif execution.died:
        complain(f"the kernel ended: {execution.died}")
    elif error and error.name == "SystemExit":
        if _status(error.value) is None:
            await stderr.write(error.value.encode("utf-8", "replace") + b"\n")
    elif error:
        text = error.traceback or f"{error.name}: {error.value}"
        await stderr.write(text.rstrip("\n").encode("utf-8", "replace") + b"\n")
    await stderr.finish()


def _exit_code(execution: Execution) -> int:
    error = execution.error
    if execution.timed_out:
        return TIMED_OUT
    if execution.died:
        found = re.search(r"(signal|code) (\d+)", execution.died)
        return (128 if found[1] == "signal" else 0) + int(found[2]) % 256 if found else RAISED
    if error and error.name == "SystemExit":
        status = _status(error.value)
        return RAISED if status is None else status
    return RAISED if error else 0


def _status(value: str) -> int | None:
    """The argument of sys.exit as an exit code; None if it was a message."""
    if value in ("", "None"):
        return 0
    return int(value) % 256 if re.fullmatch(r"-?\d{1,9}", value) else None
