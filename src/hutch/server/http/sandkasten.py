"""Sandkasten's routes, bodies and statuses, for clients that were written for it.

Its paths are below /workspace, its commands run in the main shell, and both streams are one.
"""

from __future__ import annotations

import base64
import codecs
import json
import posixpath
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from hutch import operations as op
from hutch.codec import WORKSPACE, dump, load_object, operation_of, to_json
from hutch.errors import HutchError, InvalidRequest
from hutch.types import Chunk, Result

from .request import Act, HTTPError, Request
from .sandkasten_schema import MAX_READ_BYTES, MAX_TIMEOUT_MS
from .streams import event, send_events
from .uploads import receive_files

MAX_EVENT = 8192
MAX_COMMAND = 1 << 20
READ_BYTES = 10_000_000
ROOT = "/workspace"
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B]|[=>78])"
)
_UNFINISHED = re.compile(r"\x1b[^\x1b]{0,80}\Z")


def routes(max_upload: int) -> list[tuple[str, str, Act]]:
    session, workspace = "/v1/sessions/{session}", "/v1/workspaces/{workspace}"
    upload = partial(_upload, max_upload)
    return [
        ("POST", f"{session}/exec", _exec),
        ("POST", f"{session}/exec/stream", _exec_stream),
        ("POST", f"{session}/fs/write", _write),
        ("POST", f"{session}/fs/upload", upload),
        ("GET", f"{session}/fs/read", _read),
        ("POST", f"{workspace}/fs/write", _write),
        ("POST", f"{workspace}/fs/upload", upload),
        ("GET", f"{workspace}/fs/read", _read),
        ("GET", f"{workspace}/fs", _list),
    ]


# --- sessions ---------------------------------------------------------------------------


async def open_session(request: Request) -> None:
    """Created, says the status. Who names no image gets the server's own."""
    body = load_object(await request.json())
    if "image" not in body and not body.get("packages"):
        body["image"] = ""  # the service has a default
    if (key := request.headers.get(b"idempotency-key")) is not None:
        body.setdefault("idempotency_key", key.decode("latin-1"))
    asked = operation_of(op.OpenSession, request.parameters, request.query(), dump(body))
    info = await request.perform(asked)
    location = f"/v1/sessions/{info.id}".encode()
    await request.answer(201, to_json(info), [(b"location", location)])


async def stats(request: Request) -> None:
    """With its names beside ours."""
    asked = await request.operation(op.GetStats)
    used = await request.perform(asked)
    info = await request.perform(op.GetSession(asked.session))
    body = {
        **asdict(used),
        "memory_bytes": used.memory or 0,
        "memory_limit": info.limits.memory,
        "cpu_usage_usec": int((used.cpu_seconds or 0) * 1_000_000),
    }
    await request.answer(200, dump(body))


# --- commands ---------------------------------------------------------------------------


async def _command(request: Request) -> tuple[op.RunShell, bool, bool]:
    """The command, whether its output is wanted raw, and whether nobody waits for it."""
    body = load_object(await request.json())
    _known(body, "cmd", "timeout_ms", "raw_output", "background")
    command = body.get("cmd")
    if not isinstance(command, str) or not command.strip():
        raise InvalidRequest("cmd must be given")
    size = len(command.encode("utf-8", "surrogatepass"))
    if size > MAX_COMMAND:
        raise HTTPError(
            400,
            f"cmd can have {MAX_COMMAND} bytes",
            details={
                "cmd_bytes": size,
                "max_cmd_bytes": MAX_COMMAND,
                "recommendation": "write it to a file with fs/write, and run that",
            },
        )
    timeout = timeout_of(body.get("timeout_ms") or 0, request.service.rules.max_exec_timeout)
    for name in ("raw_output", "background"):
        if not isinstance(body.get(name, False), bool):
            raise InvalidRequest(f"{name} must be true or false")
    run = op.RunShell(request.parameters["session"], command, timeout=timeout)
    return run, body.get("raw_output", False), body.get("background", False)


def timeout_of(milliseconds: object, longest: float) -> float:
    """In seconds: what is asked for, but no longer than the operator allows, who may allow more."""
    most = max(MAX_TIMEOUT_MS, int(longest * 1000))
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int):
        raise InvalidRequest("timeout_ms must be a whole number")
    if not 0 <= milliseconds <= most:
        raise InvalidRequest(f"timeout_ms must be from 0 to {most}")
    return min(milliseconds / 1000, longest) if milliseconds else longest


async def _exec(request: Request) -> None:
    run, raw, background = await _command(request)
    if background:
        argv = ("sh", "-c", run.command)
        process = await request.perform(op.StartProgram(run.session, argv))
        await request.answer(202, to_json(process))
        return
    result = await request.perform(run)
    output = result.output if raw else Cleaner().whole(result.output)
    body: dict[str, object] = {
        "exit_code": result.exit_code,
        "cwd": result.cwd or "",
        "output": output,
        "truncated": result.truncated,
        "duration_ms": result.duration_ms,
    }
    if result.timed_out:
        raise HTTPError(
            504,
            f"the command was killed after {result.duration_ms / 1000:.1f} s",
            error_code="COMMAND_TIMEOUT",
            code="timed_out",
            details=body,
        )
    await request.answer(200, dump(body))


async def _exec_stream(request: Request) -> None:
    run, raw, background = await _command(request)
    if background:
        raise InvalidRequest("what runs in the background is not streamed: use exec")
    await send_events(request, await request.stream(run), _Frames(raw), _failed)


class _Frames:
    """Its events: pieces of text as they come, however the bytes were cut."""

    def __init__(self, raw: bool) -> None:
        self._cleaner = None if raw else Cleaner()
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: make("replace") for name in ("stdout", "stderr")}

    def __call__(self, item: Chunk | Result) -> list[bytes]:
        if isinstance(item, Chunk):
            return self._chunk(self._decode(item.stream, item.data))
        rest = "".join(decoder.decode(b"", True) for decoder in self._decoders.values())
        if self._cleaner:
            rest = self._cleaner.feed(rest) + self._cleaner.end()
        if item.timed_out:
            seconds = item.duration_ms / 1000
            why = {
                "error": f"the command was killed after {seconds:.1f} s",
                "error_code": "COMMAND_TIMEOUT",
            }
            return [*_say(rest), event("error", _ascii(why))]
        done = {"exit_code": item.exit_code, "cwd": item.cwd, "duration_ms": item.duration_ms}
        return [*_say(rest), event("done", _ascii(done))]

    def _decode(self, stream: Literal["stdout", "stderr"], data: bytes) -> str:
        return self._decoders[stream].decode(data)

    def _chunk(self, text: str) -> list[bytes]:
        return _say(self._cleaner.feed(text) if self._cleaner else text)


def _say(text: str) -> list[bytes]:
    """Events of at most MAX_EVENT bytes: its SDK for TypeScript drops one that takes two reads."""
    pieces = [text[at : at + MAX_EVENT] for at in range(0, len(text), MAX_EVENT)]
    return [made for piece in pieces for made in _chunk_events(piece)]


def _chunk_events(text: str) -> list[bytes]:
    made = event("chunk", _ascii({"chunk": text, "timestamp": int(time.time() * 1000)}))
    if len(made) <= MAX_EVENT:
        return [made]
    half = len(text) // 2  # a character takes up to twelve bytes
    return [*_chunk_events(text[:half]), *_chunk_events(text[half:])]


def _failed(exc: HutchError) -> bytes:
    return event("error", _ascii({"error": str(exc), "error_code": exc.code.upper()}))


def _ascii(value: object) -> bytes:
    # Its SDK splits what it reads at every kind of line end that Unicode has.
    return json.dumps(value).encode()


class Cleaner:
    """Takes the colours, titles and returns of a terminal out of a text that comes in pieces."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        if "\x1b" not in text and "\r" not in text and not self._held:
            return text
        text = _ESCAPES.sub("", self._held + text)
        self._held = ""
        if unfinished := _UNFINISHED.search(text):
            text, self._held = text[: unfinished.start()], unfinished[0]
        elif text.endswith("\r"):
            text, self._held = text[:-1], "\r"
        return text.replace("\r\n", "\n")

    def end(self) -> str:
        held, self._held = self._held, ""
        return held

    def whole(self, text: str) -> str:
        return self.feed(text) + self.end()


# --- files ------------------------------------------------------------------------------


def _place(request: Request) -> tuple[str, Callable[[object], str]]:
    """Whose files these are, and what makes one of its paths one of ours."""
    if "workspace" in request.parameters:
        return WORKSPACE + request.parameters["workspace"], _relative
    return request.parameters["session"], _absolute


def _absolute(path: object) -> str:
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidRequest("path must be given")
    clean = posixpath.normpath(posixpath.join(ROOT, path))
    if clean != ROOT and not clean.startswith(ROOT + "/"):
        raise InvalidRequest(f"path must be below {ROOT}")
    return clean


def _relative(path: object) -> str:
    return posixpath.relpath(_absolute(path), ROOT)


async def _write(request: Request) -> None:
    session, place = _place(request)
    body = load_object(await request.json())
    _known(body, "path", "text", "content_base64")
    path = place(body.get("path"))
    if ("text" in body) == ("content_base64" in body):
        raise InvalidRequest("give text or content_base64, and not both")
    given = body.get("text", body.get("content_base64"))
    if not isinstance(given, str):
        raise InvalidRequest("text and content_base64 must be text")
    is_text = "text" in body
    try:
        data = given.encode() if is_text else base64.b64decode(given, validate=True)
    except ValueError:
        raise InvalidRequest("text must be Unicode, and content_base64 base64") from None
    await request.perform(op.WriteFile(session, path, data))
    await request.answer(200, b'{"ok":true}')


async def _read(request: Request) -> None:
    session, place = _place(request)
    query = request.query()
    _known(query, "path", "max_bytes")
    path = place(query.get("path"))
    given = query.get("max_bytes", str(READ_BYTES))
    if not given.isascii() or not given.isdigit() or not 0 < int(given[:12]) <= MAX_READ_BYTES:
        raise InvalidRequest(f"max_bytes must be from 1 to {MAX_READ_BYTES}")
    most = int(given)
    stream = await request.stream(op.ReadFile(session, path, length=most + 1))
    try:
        data = b"".join([piece async for piece in stream])
    finally:
        await stream.aclose()
    body = {
        "path": query["path"],
        "content_base64": base64.b64encode(data[:most]).decode(),
        "truncated": len(data) > most,
    }
    await request.answer(200, dump(body))


async def _list(request: Request) -> None:
    session, place = _place(request)
    query = request.query()
    _known(query, "path")
    entries = await request.perform(op.ListFiles(session, place(query.get("path") or ".")))
    found = [{"name": entry.name, "is_dir": entry.kind == "dir"} for entry in entries]
    await request.answer(200, dump({"entries": found}))


async def _upload(limit: int, request: Request) -> None:
    session, place = _place(request)
    paths = await receive_files(request, session, place, limit)
    await request.answer(200, dump({"ok": True, "paths": paths}))


def _known(given: dict[str, Any], *names: str) -> None:
    for name in given:
        if name not in names:
            raise InvalidRequest(f"no field {name[:64]!a} here: there are {', '.join(names)}")
