"""A journal as something else: the recording of a terminal, or a notebook."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from hutch.serving import JournalEntry

from .journal import DROPPED

COLUMNS, ROWS = 80, 24
BROKEN_OFF = "broken_off"


def as_asciicast(entries: Sequence[JournalEntry]) -> Iterator[bytes]:
    """Version 2: a header, then a line for each thing that was shown, at its true time."""
    begin = _started(entries[0]) if entries else 0.0
    yield json.dumps(_header(begin)).encode() + b"\n"
    last = 0.0
    for entry in entries:
        for at, shown in _shown(entry):
            if not shown:
                continue
            # Commands of several shells overlap; a recording goes one way.
            last = max(last, at - begin)
            event = [round(last, 6), "o", shown.replace("\n", "\r\n")]
            yield json.dumps(event).encode() + b"\n"


def as_notebook(entries: Sequence[JournalEntry]) -> Iterator[bytes]:
    """Version 4.5. Commands are cells of bash, each of a shell of its own."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = json.dumps({"kernelspec": kernel, "language_info": {"name": "python"}})
    yield f'{{"nbformat": 4, "nbformat_minor": 5, "metadata": {metadata}, "cells": ['.encode()
    between = b"\n"
    for entry in entries:
        if (cell := _cell(entry)) is not None:
            yield between + json.dumps(cell).encode()
            between = b",\n"
    yield b"\n]}\n"


def _header(begin: float) -> dict[str, Any]:
    return {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "timestamp": int(begin),
        "idle_time_limit": 2.0,  # for players: nobody watches an agent think
        "env": {"SHELL": "/bin/bash", "TERM": "xterm-256color"},
    }


def _started(entry: JournalEntry) -> float:
    return entry.happened_at - float(entry.body.get("duration_ms", 0)) / 1000


def _shown(entry: JournalEntry) -> list[tuple[float, str]]:
    """What a terminal would have shown of it, and when."""
    body, started, ended = entry.body, _started(entry), entry.happened_at
    if _is_terminal(entry):
        return [(ended, f"# terminal: {shlex.join(body.get('argv', ()))}\n")]
    if entry.kind == BROKEN_OFF:
        prompts = (">>> ", "... ") if "code" in body else ("$ ", "> ")
        typed = body.get("code") or body.get("command") or ""
        return [(ended, _prompted(typed, *prompts) + "# broken off\n")]
    if entry.kind in ("command", "program"):
        typed = _typed(entry)
        return [(started, _prompted(typed, "$ ", "> ")), (ended, _whole(body.get("output", "")))]
    if entry.kind == "cell":
        said = [body.get("stdout", ""), body.get("stderr", "")]
        said += [form for r in body.get("results", ()) if (form := r["forms"].get("text/plain"))]
        error = body.get("error")
        if error:
            said.append(error["traceback"] or f"{error['name']}: {error['value']}")
        shown = "".join(_whole(text) for text in said)
        return [(started, _prompted(body.get("code", ""), ">>> ", "... ")), (ended, shown)]
    return [(ended, f"# {_remark(entry)}\n")]


def _cell(entry: JournalEntry) -> dict[str, Any] | None:
    body = entry.body
    if _is_terminal(entry):
        return None  # what was typed into it is not known
    if entry.kind == BROKEN_OFF:
        source = body["code"] if "code" in body else f"%%bash\n{body.get('command', '')}"
        return _code(entry, source, None, [_stream("stderr", "broken off\n")])
    if entry.kind == "cell":
        return _code(entry, body.get("code", ""), body.get("count") or None, _outputs(entry))
    if entry.kind in ("command", "program"):
        output = body.get("output", "")
        outputs = [_stream("stdout", output)] if output else []
        if body.get("exit_code"):
            outputs.append(_stream("stderr", f"exit code {body['exit_code']}\n"))
        return _code(entry, "%%bash\n" + _typed(entry), None, outputs)
    if entry.kind == DROPPED:
        return {
            "id": _id(entry),
            "cell_type": "markdown",
            "metadata": {},
            "source": _remark(entry),
        }
    return None


def _code(
    entry: JournalEntry, source: str, count: int | None, outputs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": _id(entry),
        "cell_type": "code",
        "execution_count": count,
        "metadata": {"happened_at": entry.happened_at},
        "source": source,
        "outputs": outputs,
    }


def _outputs(entry: JournalEntry) -> list[dict[str, Any]]:
    body = entry.body
    outputs = [_stream(name, body[name]) for name in ("stdout", "stderr") if body.get(name)]
    for result in body.get("results", ()):
        output = {"output_type": "display_data", "data": result["forms"], "metadata": {}}
        if result["is_main"]:
            output |= {
                "output_type": "execute_result",
                "execution_count": body.get("count") or None,
            }
        outputs.append(output)
    if error := body.get("error"):
        outputs.append(
            {
                "output_type": "error",
                "ename": error["name"],
                "evalue": error["value"],
                "traceback": error["traceback"].splitlines(),
            }
        )
    return outputs


def _stream(name: str, text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


def _is_terminal(entry: JournalEntry) -> bool:
    return entry.kind == "program" and bool(entry.body.get("terminal"))


def _typed(entry: JournalEntry) -> str:
    if entry.kind == "command":
        return str(entry.body.get("command", ""))
    return shlex.join(entry.body.get("argv", ())) + " &"


def _prompted(typed: str, first: str, then: str) -> str:
    return first + f"\n{then}".join(typed.splitlines() or [""]) + "\n"


def _whole(text: str) -> str:
    """With the end of its last line, so that a prompt begins a new one."""
    return text if not text or text.endswith("\n") else text + "\n"


def _remark(entry: JournalEntry) -> str:
    body = entry.body
    if entry.kind == DROPPED:
        return f"{body.get('entries', 0)} entries are not kept"
    more = ", ".join(f"{name}: {value}" for name, value in body.items() if value is not None)
    return " ".join(f"{entry.kind} {more}".split())[:500]


def _id(entry: JournalEntry) -> str:
    return f"entry-{entry.number}"
