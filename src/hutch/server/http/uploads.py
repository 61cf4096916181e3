"""Files in a form, written to a box while they arrive: none is ever whole in our memory."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncGenerator, Callable
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from hutch import operations as op
from hutch.errors import InvalidRequest

from .request import HTTPError, Request

MAX_FILES = 100
MAX_FIELD = 4096  # bytes, of what is no file
_END = b""


class FormParser:
    """What a form is made of: `feed` takes bytes and gives what they began, held and ended."""

    def __init__(self, boundary: bytes) -> None:
        self._events: list[tuple[str, Any]] = []
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

    def feed(self, data: bytes) -> list[tuple[str, Any]]:
        try:
            self._parser.write(data)
        except FormParserError as exc:
            raise InvalidRequest(f"this is no form: {exc}") from None
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
            raise InvalidRequest("a part of this form has too long a head")

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
    """Write the files of a form below its `path`, which comes first. Answers where they are."""
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
            for what, value in parts.feed(piece):
                is_over = is_over or what == "over"
                await form.take(what, value)
        if not is_over:
            raise InvalidRequest("this form has no end")
    finally:
        await form.leave()
    if not form.paths:
        raise InvalidRequest("there is no file in this form: name it `file` or `files`")
    return form.paths


class UploadForm:
    """What becomes of the parts of one form."""

    def __init__(self, request: Request, session: str, place: Callable[[object], str]) -> None:
        self._request, self._session, self._place = request, session, place
        self._folder = "."
        self.paths: list[str] = []
        self._field: tuple[str, bytearray] | None = None
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(2)
        self._writing: asyncio.Task[Any] | None = None

    async def take(self, what: str, value: Any) -> None:
        if what == "begin":
            name, filename = value
            if filename is None:
                self._field = (name, bytearray())
            else:
                self._begin(name, filename)
        elif what == "data" and self._field:
            self._field[1].extend(value)
            if len(self._field[1]) > MAX_FIELD:
                raise InvalidRequest(f"{self._field[0][:64]!a} is too long")
        elif what == "data":
            await self._put(value)
        elif what == "end" and self._field:
            self._end_field(*self._field)
            self._field = None
        elif what == "end" and self._writing:
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
        """Hand it to whoever writes, or, if they failed, say how."""
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
