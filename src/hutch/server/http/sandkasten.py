"""Sandkasten's routes, bodies and statuses, for clients that were written for it.

Its paths are below /workspace, its commands run in the main shell, and both streams are one text.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import json
import posixpath
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Literal

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from hutch import operations as op
from hutch.codec import dump, load_object, to_json
from hutch.errors import HutchError, InvalidRequest
from hutch.serving import WORKSPACE_FILES
from hutch.types import Chunk, Result

from .request import Act, HTTPError, Request
from .streams import event, send_events

MAX_EVENT = 8192
MAX_COMMAND = 1 << 20
MAX_TIMEOUT_MS = 600_000  # in a request; the operator may allow less, or more
READ_BYTES = 10_000_000
MAX_READ_BYTES = 100_000_000
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
    """Answers 201. The idempotency key can also be a header."""
    operation = await request.operation(op.OpenSession)
    key = request.headers.get(b"idempotency-key")
    if key is not None and operation.idempotency_key is None:
        operation = replace(operation, idempotency_key=key.decode("latin-1"))
    info = await request.perform(operation)
    location = f"/v1/sessions/{info.id}".encode()
    await request.answer(201, to_json(info), [(b"location", location)])


async def stats(request: Request) -> None:
    """The statistics, under Sandkasten's names and under ours."""
    operation = await request.operation(op.GetStats)
    used = await request.perform(operation)
    info = await request.perform(op.GetSession(operation.session))
    body = {
        **asdict(used),
        "memory_bytes": used.memory or 0,
        "memory_limit": info.limits.memory,
        "cpu_usage_usec": int((used.cpu_seconds or 0) * 1_000_000),
    }
    await request.answer(200, dump(body))


# --- commands ---------------------------------------------------------------------------


async def _command(request: Request) -> tuple[op.RunShell, bool, bool]:
    """The command, whether its output is wanted raw, and whether it runs in the background."""
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
    run = op.RunShell(request.parameters["session"], command, timeout=timeout)
    return run, _flag(body, "raw_output"), _flag(body, "background")


def _flag(body: dict[str, object], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false")
    return value


def timeout_of(milliseconds: object, longest: float) -> float:
    """In seconds: the timeout of the request, but no longer than the operator allows.

    Raises InvalidRequest if it is not a number that Sandkasten takes.
    """
    # A timeout above the operator's limit is lowered, not refused, up to Sandkasten's own limit.
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
        raise InvalidRequest("a command in the background is not streamed: use exec")
    await send_events(request, await request.stream(run), _Frames(raw), _failed)


class _Frames:
    """Sandkasten's events: text as it arrives, decoded across chunks."""

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
    """Events of at most MAX_EVENT bytes: its TypeScript SDK drops one that takes two reads."""
    pieces = [text[at : at + MAX_EVENT] for at in range(0, len(text), MAX_EVENT)]
    return [data for piece in pieces for data in _chunk_events(piece)]


def _chunk_events(text: str) -> list[bytes]:
    data = event("chunk", _ascii({"chunk": text, "timestamp": int(time.time() * 1000)}))
    if len(data) <= MAX_EVENT:
        return [data]
    half = len(text) // 2  # a character takes up to twelve bytes
    return [*_chunk_events(text[:half]), *_chunk_events(text[half:])]


def _failed(exc: HutchError) -> bytes:
    return event("error", _ascii({"error": str(exc), "error_code": exc.code.upper()}))


def _ascii(value: object) -> bytes:
    # Its SDK splits what it reads at every line end of Unicode, so these must be escaped.
    return json.dumps(value).encode()


class Cleaner:
    """Removes terminal escape sequences and carriage returns from text that comes in pieces."""

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
    """The session or workspace, and the function that maps Sandkasten's paths to ours."""
    if "workspace" in request.parameters:
        return WORKSPACE_FILES + request.parameters["workspace"], _relative
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
        raise InvalidRequest("give either text or content_base64")
    content = body.get("text", body.get("content_base64"))
    if not isinstance(content, str):
        raise InvalidRequest("text and content_base64 must be text")
    is_text = "text" in body
    try:
        data = content.encode() if is_text else base64.b64decode(content, validate=True)
    except ValueError:
        raise InvalidRequest("text must be Unicode, and content_base64 base64") from None
    await request.perform(op.WriteFile(session, path, data))
    await request.answer(200, b'{"ok":true}')


async def _read(request: Request) -> None:
    session, place = _place(request)
    query = request.query()
    _known(query, "path", "max_bytes")
    path = place(query.get("path"))
    limit = query.get("max_bytes", str(READ_BYTES))
    if not limit.isascii() or not limit.isdigit() or not 0 < int(limit[:12]) <= MAX_READ_BYTES:
        raise InvalidRequest(f"max_bytes must be from 1 to {MAX_READ_BYTES}")
    most = int(limit)
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
    listed = [{"name": entry.name, "is_dir": entry.kind == "dir"} for entry in entries]
    await request.answer(200, dump({"entries": listed}))


async def _upload(limit: int, request: Request) -> None:
    session, place = _place(request)
    paths = await receive_files(request, session, place, limit)
    await request.answer(200, dump({"ok": True, "paths": paths}))


def _known(fields: Iterable[str], *names: str) -> None:
    for name in fields:
        if name not in names:
            raise InvalidRequest(f"no field {name[:64]!a} here: there are {', '.join(names)}")


# --- uploads: files in a form, written to the box as they arrive, never whole in memory -----

MAX_FILES = 100
MAX_FIELD = 4096  # bytes, of a field that is not a file
_END = b""
# A part begins, with its name and file name; its data; it ends; the form is over.
FormEvent = (
    tuple[Literal["begin"], tuple[str, bytes | None]]
    | tuple[Literal["data"], bytes]
    | tuple[Literal["end", "over"], None]
)


class FormParser:
    """Parses a form: `feed` takes bytes, and returns the events that they complete."""

    def __init__(self, boundary: bytes) -> None:
        self._events: list[FormEvent] = []
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._headers.clear,
                "on_header_field": self._on_name,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_part_end": lambda: self._events.append(("end", None)),
                "on_end": lambda: self._events.append(("over", None)),
            },
        )

    def feed(self, data: bytes) -> list[FormEvent]:
        """Raises InvalidRequest if the form is malformed."""
        try:
            self._parser.write(data)
        except FormParserError as exc:
            raise InvalidRequest(f"malformed form: {exc}") from None
        events, self._events = self._events, []
        return events

    def _on_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check()

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check()

    def _check(self) -> None:
        if len(self._name) + len(self._value) > MAX_FIELD or len(self._headers) > 16:
            raise InvalidRequest("the headers of a part of this form are too long")

    def _on_header(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._events.append(("begin", (name, options.get(b"filename"))))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(("data", data[start:end]))


async def receive_files(
    request: Request, session: str, place: Callable[[object], str], limit: int
) -> list[str]:
    """Write the files of a form below its `path`, which comes first. Returns their paths.

    Raises HTTPError if it is too large or not a form, and InvalidRequest for a malformed one.
    """
    kind, options = parse_options_header(request.headers.get(b"content-type", b""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise HTTPError(415, "files are sent as multipart/form-data here")
    if int(request.headers.get(b"content-length", b"0")) > limit:
        raise _too_large(limit)
    form = UploadForm(request, session, place)
    parts, size, is_over = FormParser(options[b"boundary"]), 0, False
    try:
        async for piece in request.chunks():
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            for form_event in parts.feed(piece):
                is_over = is_over or form_event[0] == "over"
                await form.take(form_event)
        if not is_over:
            raise InvalidRequest("the form is incomplete")
    finally:
        await form.leave()
    if not form.paths:
        raise InvalidRequest("there is no file in this form: name it `file` or `files`")
    return form.paths


class UploadForm:
    """Writes the files of one form to the box, and collects their paths."""

    def __init__(self, request: Request, session: str, place: Callable[[object], str]) -> None:
        self._request, self._session, self._place = request, session, place
        self._folder = "."
        self.paths: list[str] = []
        self._field: tuple[str, bytearray] | None = None
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(2)
        self._writing: asyncio.Task[object] | None = None

    async def take(self, form_event: FormEvent) -> None:
        """Raises InvalidRequest, and what writing a file raises."""
        if form_event[0] == "begin":
            name, filename = form_event[1]
            if filename is None:
                self._field = (name, bytearray())
            else:
                self._begin(name, filename)
        elif form_event[0] == "data" and self._field:
            self._field[1].extend(form_event[1])
            if len(self._field[1]) > MAX_FIELD:
                raise InvalidRequest(f"{self._field[0][:64]!a} is too long")
        elif form_event[0] == "data":
            await self._put(form_event[1])
        elif form_event[0] == "end" and self._field:
            self._end_field(*self._field)
            self._field = None
        elif form_event[0] == "end" and self._writing:
            await self._put(_END)
            await self._writing
            self._writing = None

    def _end_field(self, name: str, value: bytearray) -> None:
        if name != "path":
            raise InvalidRequest(f"no field {name[:64]!a} here: there are path, file and files")
        if self.paths:
            raise InvalidRequest("path must come before the files")
        self._folder = bytes(value).decode("utf-8", "replace") or "."
        self._place(self._folder)

    def _begin(self, name: str, filename: bytes) -> None:
        if name not in ("file", "files", "files[]"):
            raise InvalidRequest(f"no file {name[:64]!a} here: name it `file` or `files`")
        if len(self.paths) == MAX_FILES:
            raise InvalidRequest(f"one form can have {MAX_FILES} files")
        text = filename.decode("utf-8", "replace").replace("\\", "/")
        base = posixpath.basename(text)
        if base in ("", ".", "..") or "\0" in base:
            raise InvalidRequest("a file needs a name")
        path = self._place(posixpath.join(self._folder, base))
        self.paths.append(path)
        self._queue = asyncio.Queue(2)
        write = op.WriteFile(self._session, path, self._pieces(self._queue))
        self._writing = asyncio.create_task(self._request.perform(write))

    @staticmethod
    async def _pieces(queue: asyncio.Queue[bytes]) -> AsyncGenerator[bytes, None]:
        while piece := await queue.get():
            yield piece

    async def _put(self, piece: bytes) -> None:
        """Pass data to the task that writes the file; raise its error if it failed."""
        assert self._writing
        putting = asyncio.ensure_future(self._queue.put(piece))
        try:
            await asyncio.wait({putting, self._writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not putting.done():
                putting.cancel()
        if self._writing.done():
            self._writing.result()

    async def leave(self) -> None:
        if self._writing:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)


def _too_large(limit: int) -> HTTPError:
    return HTTPError(413, f"a form can have {limit} bytes here; larger files: PUT …/files/content")
