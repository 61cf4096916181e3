"""Journals: what happened in a session, one line for each event, in a file of bounded size.

A file of JSON lines that is only appended to. When it exceeds its limit, the older half is removed,
and a line says how many entries that was. Numbers continue, even after a crash that tore the last
line. Adding never fails: entries that do not fit on a full disk are counted, and a line before the
next one that fits says how many are missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from hutch.engine.outputs import ENDS
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
from hutch.serving import JournalEntry
from hutch.types import FORMATS, CellResult, Execution, Process, Result

TAIL = 64 * 1024  # bytes at the end of a file, where its last number usually is
GAP = 256  # bytes, more than the line about missing entries needs
DROPPED = "dropped"  # the kind of a line that stands for missing entries


MAX_COMMAND = 64 * 1024  # characters, as the limits below
END = ENDS // 2  # at each end of an output
MAX_FORM = 256 * 1024  # one form of a result
MAX_RESULTS = 1024 * 1024  # all results of a cell
MAX_PATH = 4096
# File operations that are recorded, and how they are called in the journal.
FILE_ACTIONS: Mapping[type[Operation[object]], str] = {
    WriteFile: "write",
    EditFile: "edit",
    MakeDir: "mkdir",
    MoveFile: "move",
    RemoveFile: "remove",
    UnpackFolder: "unpack",
}


class _Numbered(msgspec.Struct):
    number: int


_entry = msgspec.json.Decoder(JournalEntry)
_numbered = msgspec.json.Decoder(_Numbered)
_encode = msgspec.json.Encoder().encode


class Journal:
    """The journal of one session. A file has one writer, and is made by the first entry."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.dropped = 0  # entries that did not fit, and that no line mentions yet
        self._last: int | None = None  # number; None: the file was not read yet
        self._size = 0
        self._rotations = 0  # how often the older half was removed
        self._closed = False
        self._followers: set[asyncio.Event] = set()

    def add(self, kind: str, **body: object) -> JournalEntry:
        """Append an entry. Never raises."""
        if self._last is None:
            try:
                self._last, self._size = self._read_end()
            except OSError:
                self.dropped += 1
                return JournalEntry(0, time.time(), kind, body)
            self._last += self.dropped
        self._last += 1
        entry = JournalEntry(self._last, time.time(), kind, body)
        line = _line(entry)
        if len(line) > self.limit // 2:
            line = _line(replace(entry, body={"too_large": len(line)}))
        if self.dropped:
            line = _gap(entry.number - 1, self.dropped) + line
        try:
            if self._size + len(line) > self.limit:
                self._rotate(len(line))
            self._append(line)
            self.dropped = 0
        except OSError:
            self.dropped += 1
        for follower in self._followers:
            follower.set()
        return entry

    def note(self, o: Operation[object], answer: object) -> None:
        """Add an entry for an operation, if it changed something."""
        match o, answer:
            case RunCode(), Execution():
                self.add("cell", **cell_entry(o, answer))
            case RunShell() | RunProgram(), Result():
                self.add("command", **command_entry(o, answer))
            case StartProgram(), Process():
                self.add("program", **program_entry(o, answer))
            case _ if type(o) in FILE_ACTIONS:
                self.add("file", **file_entry(o, answer))
        if isinstance(answer, Result | Execution) and answer.oom:
            self.add("limit", why="a process was killed for lack of memory")

    def read(self, after: int = 0, limit: int = 1000) -> list[JournalEntry]:
        """Entries after number `after`, oldest first. To be called in a thread."""
        reader = _Reader(self.path)
        try:
            return [entry for entry in reader.more() if entry.number > after][:limit]
        finally:
            reader.close()

    async def follow(self, after: int = 0) -> AsyncGenerator[JournalEntry, None]:
        """Entries after number `after`, and those to come, until the journal is closed."""
        added = asyncio.Event()
        self._followers.add(added)
        reader, rotations = _Reader(self.path), self._rotations
        try:
            while True:
                added.clear()
                over = self._closed
                if rotations != self._rotations:
                    reader.close()
                    reader, rotations = _Reader(self.path), self._rotations
                for entry in await asyncio.to_thread(reader.more):
                    if entry.number > after:
                        after = entry.number
                        yield entry
                if over:
                    return
                await added.wait()
        finally:
            self._followers.discard(added)
            reader.close()

    def close(self) -> None:
        """No more entries: followers end after the last one. It can still be read."""
        self._closed = True
        for follower in self._followers:
            follower.set()

    def _append(self, line: bytes) -> None:
        # Opened each time, so that a thousand idle journals need no descriptors.
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, line) < len(line):
                os.ftruncate(fd, size)
                raise OSError("the disk is full")
        finally:
            os.close(fd)
        self._size = size + len(line)

    def _rotate(self, coming: int) -> None:
        """Remove the older half, and enough that `coming` bytes fit."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return  # it was removed: a new one begins
        begin = len(data) - min(self.limit // 2, self.limit - coming - GAP)
        cut = data.find(b"\n", max(0, begin - 1)) + 1 or len(data)
        last_gone = _last_number(data[:cut])
        first = _gap(last_gone, last_gone)  # numbers start at 1 without gaps
        part = self.path.with_name(self.path.name + ".part")
        try:
            with open(part, "wb", opener=_private) as file:
                file.writelines([first, data[cut:]])
            part.rename(self.path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._size = len(first) + len(data) - cut
        self._rotations += 1

    def _read_end(self) -> tuple[int, int]:
        """The last number and the size of the file, after a torn last line was cut off."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0, 0
        try:
            size = os.fstat(fd).st_size
            length = TAIL
            while True:
                start = max(0, size - length)
                data = os.pread(fd, size - start, start)
                # With `start` in the middle of a line, skip to the first newline.
                last = _last_number(data[data.find(b"\n") + 1 if start else 0 :])
                if last or not start:
                    break
                length *= 4
            whole = start + data.rfind(b"\n") + 1
            if whole < size:
                os.ftruncate(fd, whole)
            return last, whole
        finally:
            os.close(fd)


class _Reader:
    """Reads a journal incrementally, from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._at = 0
        self._closed = False
        self._lock = threading.Lock()  # a follower may leave while a thread reads for it

    def more(self) -> list[JournalEntry]:
        with self._lock:
            try:
                data = self._read()
            except OSError:
                return []
        return list(_entries(data))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _read(self) -> bytes:
        if self._closed:
            return b""
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, max(0, size - self._at), self._at)
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole


def _entries(data: bytes) -> Iterator[JournalEntry]:
    for line in data.split(b"\n"):
        if (entry := _parsed(line)) is not None:
            yield entry


def _parsed(line: bytes) -> JournalEntry | None:
    try:
        return _entry.decode(line)
    except (msgspec.DecodeError, ValueError):
        return None


def _last_number(data: bytes) -> int:
    """The number of the last complete line that has one, or 0."""
    end = data.rfind(b"\n")
    while end >= 0:
        begin = data.rfind(b"\n", 0, end) + 1
        try:
            return _numbered.decode(data[begin:end]).number
        except (msgspec.DecodeError, ValueError):
            end = begin - 1
    return 0


def _line(entry: JournalEntry) -> bytes:
    try:
        return _encode(entry) + b"\n"
    except Exception:  # mostly text that is not Unicode; an operation must not fail because of it
        return _encode(replace(entry, body={"text": _repr(entry.body)})) + b"\n"


def _repr(body: Mapping[str, object]) -> str:
    try:
        return repr(body)[:4096]
    except Exception:
        return "(cannot be encoded)"


def _gap(last: int, entries: int) -> bytes:
    """A line that stands for this many entries, with the number of the last of them."""
    return _line(JournalEntry(last, time.time(), DROPPED, {"entries": entries}))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# --- entries ----------------------------------------------------------------------------


def command_entry(o: RunShell | RunProgram, result: Result) -> dict[str, object]:
    """Kind `command`; `shell` is None for a program."""
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
        **_kept(result),
    }


def program_entry(o: StartProgram, process: Process) -> dict[str, object]:
    """Kind `program`: started in the background, or in a terminal."""
    argv = [text(word, MAX_COMMAND // 16) for word in o.argv[:16]]
    if len(o.argv) > 16:
        argv.append(f"[... {len(o.argv) - 16} more ...]")
    cwd = o.cwd and text(o.cwd, MAX_PATH)
    body: dict[str, object] = {"argv": argv, "id": process.id, "cwd": cwd}
    return {**body, "terminal": True} if o.terminal else body


def cell_entry(o: RunCode, execution: Execution) -> dict[str, object]:
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
        **_kept(execution),
    }


def _kept(outcome: Result | Execution) -> dict[str, object]:
    """The name of the whole output, if it was too long for its result."""
    return {"kept": outcome.kept} if outcome.kept else {}


def file_entry(o: Operation[object], answer: object) -> dict[str, object]:
    """Kind `file`, for an operation in FILE_ACTIONS."""
    body: dict[str, object] = {
        "do": FILE_ACTIONS[type(o)],
        "path": text(getattr(o, "path", ""), MAX_PATH),
    }
    if isinstance(o, MoveFile):
        body["to"] = text(o.to, MAX_PATH)
    if isinstance(o, WriteFile):
        body["size"] = answer
    return body


def text(value: str, limit: int) -> str:
    """Its first `limit` characters, without lone surrogates."""
    cut = value[:limit].encode("utf-8", "replace").decode()
    return (
        cut if len(value) <= limit else f"{cut}\n[... {len(value) - limit} characters not kept ...]"
    )


def clip(value: str) -> str:
    """Its beginning and its end."""
    if len(value) <= 2 * END:
        return text(value, 2 * END)
    gap = f"\n[... {len(value) - 2 * END} characters not kept ...]\n"
    return text(value[:END], END) + gap + text(value[-END:], END)


def _results(results: tuple[CellResult, ...]) -> list[dict[str, object]]:
    """Each with its forms by MIME type, and the types of those that were too large."""
    room, kept = MAX_RESULTS, []
    for result in results:
        forms: dict[str, object] = {}
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
        room -= 64  # so that the number of small results is bounded, too
        entry: dict[str, object] = {"is_main": result.is_main, "forms": forms}
        kept.append({**entry, "left_out": left_out} if left_out else entry)
    return kept


def _forms(result: CellResult) -> list[tuple[str, object]]:
    named = ((kind, getattr(result, name)) for kind, name in FORMATS.items())
    extra = ((text(kind, 256), value) for kind, value in result.extra.items())
    return [(kind, value) for kind, value in (*named, *extra) if value is not None]


def broken_off_entry(o: Operation[object]) -> dict[str, object]:
    """Kind `broken_off`: a command or cell whose caller left, or whose box died."""
    if isinstance(o, RunShell):
        return {"shell": text(o.shell, 256), "command": text(o.command, MAX_COMMAND)}
    if isinstance(o, RunCode):
        return {"context": text(o.context, 256), "code": text(o.code, MAX_COMMAND)}
    return {"command": text(shlex.join(getattr(o, "argv", ())), MAX_COMMAND)}


# --- exports: the recording of a terminal, or a notebook ------------------------------------

COLUMNS, ROWS = 80, 24
BROKEN_OFF = "broken_off"


def as_asciicast(entries: Sequence[JournalEntry]) -> Iterator[bytes]:
    """An asciicast, version 2: a header, then a line for each output, with its time."""
    begin = _started(entries[0]) if entries else 0.0
    yield json.dumps(_header(begin)).encode() + b"\n"
    last = 0.0
    for entry in entries:
        for at, shown in _shown(entry):
            if not shown:
                continue
            # Commands of several shells overlap, but times in a recording only grow.
            last = max(last, at - begin)
            event = [round(last, 6), "o", shown.replace("\n", "\r\n")]
            yield json.dumps(event).encode() + b"\n"


def as_notebook(entries: Sequence[JournalEntry]) -> Iterator[bytes]:
    """A notebook, version 4.5. Commands are `%%bash` cells, which do not share a shell."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = json.dumps({"kernelspec": kernel, "language_info": {"name": "python"}})
    yield f'{{"nbformat": 4, "nbformat_minor": 5, "metadata": {metadata}, "cells": ['.encode()
    between = b"\n"
    for entry in entries:
        if (cell := _cell(entry)) is not None:
            yield between + json.dumps(cell).encode()
            between = b",\n"
    yield b"\n]}\n"


def _header(begin: float) -> dict[str, object]:
    return {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "timestamp": int(begin),
        "idle_time_limit": 2.0,  # players shorten longer pauses
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
        texts = [body.get("stdout", ""), body.get("stderr", "")]
        texts += [form for r in body.get("results", ()) if (form := r["forms"].get("text/plain"))]
        error = body.get("error")
        if error:
            texts.append(error["traceback"] or f"{error['name']}: {error['value']}")
        shown = "".join(_whole(text) for text in texts)
        return [(started, _prompted(body.get("code", ""), ">>> ", "... ")), (ended, shown)]
    return [(ended, f"# {_remark(entry)}\n")]


def _cell(entry: JournalEntry) -> dict[str, object] | None:
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
    entry: JournalEntry, source: str, count: int | None, outputs: list[dict[str, object]]
) -> dict[str, object]:
    return {
        "id": _id(entry),
        "cell_type": "code",
        "execution_count": count,
        "metadata": {"happened_at": entry.happened_at},
        "source": source,
        "outputs": outputs,
    }


def _outputs(entry: JournalEntry) -> list[dict[str, object]]:
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


def _stream(name: str, text: str) -> dict[str, object]:
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
    """With a newline at its end, so that a prompt begins a new line."""
    return text if not text or text.endswith("\n") else text + "\n"


def _remark(entry: JournalEntry) -> str:
    body = entry.body
    if entry.kind == DROPPED:
        return f"{body.get('entries', 0)} entries are not kept"
    more = ", ".join(f"{name}: {value}" for name, value in body.items() if value is not None)
    return " ".join(f"{entry.kind} {more}".split())[:500]


def _id(entry: JournalEntry) -> str:
    return f"entry-{entry.number}"
