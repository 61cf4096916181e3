"""What a journal says of an operation: bounded, and text only."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from hutch.operations import (
    EditFile,
    MakeDir,
    MoveFile,
    Operation,
    RemoveFile,
    RunCode,
    RunProgram,
    RunShell,
    StartProgram,
    UnpackFolder,
    WriteFile,
)
from hutch.types import FORMATS, CellResult, Execution, Process, Result

MAX_COMMAND = 64 * 1024  # letters, as all of these
END = 8 * 1024  # of an output, at each of its two ends
MAX_FORM = 256 * 1024  # of one form of a result
MAX_RESULTS = 1024 * 1024  # of all results of a cell
MAX_PATH = 4096

DOES: Mapping[
    type[Operation[object]], str
] = {  # what is worth a line, of all that is done to files
    WriteFile: "write",
    EditFile: "edit",
    MakeDir: "mkdir",
    MoveFile: "move",
    RemoveFile: "remove",
    UnpackFolder: "unpack",
}


def command_entry(o: RunShell | RunProgram, result: Result) -> dict[str, Any]:
    """Kind `command`. That of a program has no shell."""
    shell = text(o.shell, 256) if isinstance(o, RunShell) else None
    command = o.command if isinstance(o, RunShell) else shlex.join(o.argv)
    return {
        "shell": shell,
        "command": text(command, MAX_COMMAND),
        "exit_code": result.exit_code,
        "cwd": result.cwd and text(result.cwd, MAX_PATH),
        "duration_ms": result.duration_ms,
        "timed_out": result.timed_out,
        "truncated": result.truncated or len(result.output) > 2 * END,
        "output": clip(result.output),
    }


def program_entry(o: StartProgram, process: Process) -> dict[str, Any]:
    """Kind `program`: one that goes on by itself, or has a terminal."""
    argv = [text(word, MAX_COMMAND // 16) for word in o.argv[:16]]
    if len(o.argv) > 16:
        argv.append(f"[... {len(o.argv) - 16} more ...]")
    body = {"argv": argv, "id": process.id, "cwd": o.cwd and text(o.cwd, MAX_PATH)}
    return {**body, "terminal": True} if o.terminal else body


def cell_entry(o: RunCode, execution: Execution) -> dict[str, Any]:
    """Kind `cell`."""
    error = execution.error
    return {
        "context": text(o.context, 256),
        "code": text(o.code, MAX_COMMAND),
        "results": _results(execution.results),
        "stdout": clip(execution.logs.stdout),
        "stderr": clip(execution.logs.stderr),
        "error": error
        and {
            "name": text(error.name, 256),
            "value": clip(error.value),
            "traceback": clip(error.traceback),
        },
        "count": execution.execution_count,
        "duration_ms": execution.duration_ms,
        "timed_out": execution.timed_out,
    }


def file_entry(o: Operation[object], answer: object) -> dict[str, Any]:
    """Kind `file`, of an operation in DOES."""
    body: dict[str, Any] = {"do": DOES[type(o)], "path": text(getattr(o, "path", ""), MAX_PATH)}
    if isinstance(o, MoveFile):
        body["to"] = text(o.to, MAX_PATH)
    if isinstance(o, WriteFile):
        body["size"] = answer
    return body


def text(value: str, limit: int) -> str:
    """Its first letters, without those that no UTF-8 has."""
    cut = value[:limit].encode("utf-8", "replace").decode()
    return cut if len(value) <= limit else f"{cut}\n[... {len(value) - limit} letters not kept ...]"


def clip(value: str) -> str:
    """Its two ends."""
    if len(value) <= 2 * END:
        return text(value, 2 * END)
    gap = f"\n[... {len(value) - 2 * END} letters not kept ...]\n"
    return text(value[:END], END) + gap + text(value[-END:], END)


def _results(results: tuple[CellResult, ...]) -> list[dict[str, Any]]:
    """Each with its forms by their types, and the types of those that were too large."""
    room, kept = MAX_RESULTS, []
    for result in results:
        forms: dict[str, Any] = {}
        left_out: list[str] = []
        for kind, value in _forms(result):
            size = len(value if isinstance(value, str) else json.dumps(value))
            if size <= min(MAX_FORM, room):
                room -= size
                forms[kind] = text(value, size) if isinstance(value, str) else value
            else:
                left_out.append(kind)
        if room <= 0:
            break
        room -= 64  # many small ones are bounded, too
        entry: dict[str, Any] = {"is_main": result.is_main, "forms": forms}
        kept.append({**entry, "left_out": left_out} if left_out else entry)
    return kept


def _forms(result: CellResult) -> list[tuple[str, Any]]:
    named = ((kind, getattr(result, name)) for kind, name in FORMATS.items())
    extra = ((text(kind, 256), value) for kind, value in result.extra.items())
    return [(kind, value) for kind, value in (*named, *extra) if value is not None]


def broken_off_entry(o: Operation[object]) -> dict[str, Any]:
    """Kind `broken_off`: a command or a cell that its caller left, or that its box took along."""
    if isinstance(o, RunShell):
        return {"shell": text(o.shell, 256), "command": text(o.command, MAX_COMMAND)}
    if isinstance(o, RunCode):
        return {"context": text(o.context, 256), "code": text(o.code, MAX_COMMAND)}
    return {"command": text(shlex.join(getattr(o, "argv", ())), MAX_COMMAND)}
