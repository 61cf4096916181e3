"""Unpack a tar, or a tar.gz, into the working directory.

The tar is not trusted. It is unpacked in a fork of the guest with the rights of the user of the
box. Names that lead out of the directory and special files are skipped and reported on stderr. An
invalid tar ends the work. The answer goes to stdout: a line of JSON.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from .agent import RequestError
from .archive import tell
from .tar import BLOCK, FIFO, FILE, FOLDER, HARD, LINK, PAX, RECORD

MAX_EXTRA = 1 << 20  # bytes of a pax header, or of a long name
PAX_GLOBAL, LONG_NAME, LONG_LINK = b"g", b"L", b"K"
FILES = (FILE, b"\0", b"7")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GZIP = b"\x1f\x8b"


class InvalidTar(Exception):
    """The data is not a valid tar."""


def untar(job: dict[str, Any]) -> NoReturn:
    """Unpack the tar on stdin, and write the answer to stdout."""
    with open(0, "rb", buffering=0, closefd=False) as source:
        reader = TarReader(source)
        answer: dict[str, Any] = {}
        try:
            reader.run()
            answer["files"] = reader.made
        except InvalidTar as exc:
            message = f"not a tar, or a broken one: {exc}{_what_stays(reader.made)}"
            answer |= {"code": "invalid_request", "message": message}
        except OSError as exc:
            message = f"{exc.strerror or exc}{_what_stays(reader.made)}"
            answer |= {"code": "no_space", "message": message}
        while source.read(BLOCK):  # read everything, so that the sender can finish
            continue
    tell(reader.lost)
    os.write(1, json.dumps(answer).encode())
    os._exit(0)


def _what_stays(made: int) -> str:
    """Unpacked files stay: those that they replaced are gone already."""
    if not made:
        return ""
    return f" (files that were unpacked before that, and stay: {made})"


def answer_of(stdout: bytes) -> dict[str, Any]:
    """The answer to the host, from what `untar` wrote to stdout. Raises RequestError."""
    if not stdout:
        raise RequestError("internal", "the process that unpacked the tar was killed")
    answer: dict[str, Any] = json.loads(stdout)
    if "code" in answer:
        raise RequestError(answer["code"], answer["message"])
    return answer


@dataclass
class TarMember:
    name: str
    kind: bytes
    mode: int
    size: int
    mtime: float
    target: str
    owner: bytes = b""  # its uid and gid, as the header has them
    extra: dict[str, bytes] = field(default_factory=dict)  # what its pax header says


class TarSource(Protocol):
    """Where the bytes of a tar come from."""

    def read(self, size: int) -> bytes:
        """This many bytes, or none at all at the end."""

    def exactly(self, size: int) -> bytes: ...

    def some(self, at_most: int) -> bytes: ...


def members(source: TarSource) -> Iterator[TarMember]:
    """The members of a tar. Read the content of each before you take the next."""
    always: dict[str, bytes] = {}
    extra: dict[str, bytes] = {}
    while (head := source.read(RECORD)) and head.strip(b"\0"):
        member, kind = _member(head), head[156:157]
        if kind in (PAX, PAX_GLOBAL, LONG_NAME, LONG_LINK):
            if member.size > MAX_EXTRA:
                raise InvalidTar(f"a header of {member.size} bytes")
            body = source.exactly(member.size + -member.size % RECORD)[: member.size]
            if kind == PAX_GLOBAL:
                always |= _pax(body)
            else:
                key = {LONG_NAME: "path", LONG_LINK: "linkpath"}.get(kind)
                extra |= {key: body.rstrip(b"\0")} if key else _pax(body)
            continue
        _amend(member, always | extra)
        extra = {}
        yield member
    if not head:
        raise InvalidTar("it ended early")


class TarReader:
    def __init__(self, source: Any) -> None:
        self._source = TarStream(source)
        self._folders: list[tuple[str, int, float]] = []
        self.made = 0
        self.lost: list[tuple[str, str]] = []

    def run(self) -> None:
        for member in members(self._source):
            rest = TarContent(self._source, member.size)
            try:
                self._make(member, rest)
            except OSError as exc:
                if exc.errno in FULL:
                    raise
                self.lost.append((member.name, exc.strerror or str(exc)))
            rest.skip()
        for path, mode, mtime in reversed(self._folders):  # inner ones first
            try:
                os.chmod(path, mode)
                os.utime(path, (mtime, mtime))
            except OSError:
                continue  # an existing folder of another user

    def _make(self, member: TarMember, content: TarContent) -> None:
        path = _inside(member.name)
        if member.kind == FOLDER or (member.kind in FILES and member.name.endswith("/")):
            os.makedirs(path, exist_ok=True)
            if path != ".":
                self._folders.append((path, member.mode & 0o777, member.mtime))
            return
        if path == ".":
            raise OSError(0, "it has no name")
        if member.kind not in (*FILES, HARD, LINK, FIFO):
            raise OSError(0, f"skipped: kind {member.kind.decode('latin-1')!r}, no file or folder")
        target = _inside(member.target) if member.kind == HARD else member.target
        if "\0" in target:
            raise OSError(0, "skipped: it links to what is not a name")
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if target != path and os.path.lexists(path):
            os.unlink(path)
        if member.kind == HARD:
            if target != path:
                os.link(target, path, follow_symlinks=False)
        elif member.kind == LINK:
            os.symlink(target, path)
        elif member.kind == FIFO:
            os.mkfifo(path, member.mode & 0o777)
        else:
            _make_file(path, member, content)
        self.made += 1


class TarStream:
    """The bytes of a tar, whether they come as they are or through gzip."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._held = b""
        self._gzip: Any = None
        start = self._more()
        while len(start) < 2 and (more := self._more()):
            start += more
        if start.startswith(GZIP):
            self._gzip = zlib.decompressobj(31)
            self._packed = start
        else:
            self._held = start

    def _more(self) -> bytes:
        data: bytes = self._source.read(BLOCK)
        return data

    def read(self, size: int) -> bytes:
        """This many bytes, or none at all at the end."""
        pieces, have = [self._held], len(self._held)
        while have < size and (data := self._next()):
            pieces.append(data)
            have += len(data)
        whole = b"".join(pieces)
        if 0 < len(whole) < size:
            raise InvalidTar("it ended early")
        self._held = whole[size:]
        return whole[:size]

    def exactly(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) < size:
            raise InvalidTar("it ended early")
        return data

    def some(self, at_most: int) -> bytes:
        data = self._held or self._next()
        if not data:
            raise InvalidTar("it ended early")
        self._held = data[at_most:]
        return data[:at_most]

    def _next(self) -> bytes:
        if self._gzip is None:
            return self._more()
        while True:
            # Never more than a block at a time: a little gzip can be a lot of tar.
            if not self._packed:
                self._packed = self._more()
            if self._gzip.eof and self._packed:
                self._gzip = zlib.decompressobj(31)  # one gzip may follow another
            try:
                data: bytes = self._gzip.decompress(self._packed, BLOCK)
            except zlib.error as exc:
                raise InvalidTar(f"its compression: {exc}") from None
            ended = not self._packed
            self._packed = self._gzip.unused_data or self._gzip.unconsumed_tail
            if data or ended:
                return data


class TarContent:
    """What a member holds: a part of the stream, and its padding."""

    def __init__(self, source: TarSource, size: int) -> None:
        self._source = source
        self.left, self._padding = size, -size % RECORD

    def read(self) -> bytes:
        if not self.left:
            return b""
        data = self._source.some(min(self.left, BLOCK))
        self.left -= len(data)
        return data

    def skip(self) -> None:
        while self.read():
            continue
        if self._padding:
            self._source.exactly(self._padding)


def _make_file(path: str, member: TarMember, content: TarContent) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb", 0) as file:
        while data := content.read():
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        os.fchmod(fd, member.mode & 0o777)
        os.utime(fd, (member.mtime, member.mtime))


def _inside(name: str) -> str:
    """A name below the current folder, from the name in a tar."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise OSError(0, "skipped: it leads out of the folder")
    if "\0" in name:
        raise OSError(0, "skipped: not a name")
    return "/".join(parts) or "."


def _member(head: bytes) -> TarMember:
    said, real = number(head[148:156]), sum(head[:148]) + sum(head[156:]) + 8 * 32
    if said != real:
        raise InvalidTar("a header whose checksum is wrong")
    name, prefix = _text(head[:100]), b""
    if head[257:263] == b"ustar\0":
        prefix = head[345:500].partition(b"\0")[0]
    return TarMember(
        name=_text(prefix) + "/" + name if prefix else name,
        kind=head[156:157],
        mode=number(head[100:108]) & 0o1777,
        size=number(head[124:136]),
        mtime=number(head[136:148]),
        target=_text(head[157:257]),
        owner=head[108:124],
    )


def _text(field: bytes) -> str:
    return os.fsdecode(field.partition(b"\0")[0])


def number(field: bytes) -> int:
    """Octal digits; or, where those were too few, a binary number with its first bit set."""
    if field[0] & 0x80:
        found = int.from_bytes(bytes((field[0] & 0x7F,)) + field[1:], "big")
    else:
        digits = field.strip(b" \0").partition(b"\0")[0]
        try:
            found = int(digits or b"0", 8)
        except ValueError:
            raise InvalidTar("text in a header where a number belongs") from None
    if not 0 <= found < 1 << 62:
        raise InvalidTar("a header with an impossible number")
    return found


def _pax(body: bytes) -> dict[str, bytes]:
    found = {}
    while body:
        digits, _, _ = body.partition(b" ")
        size = int(digits) if digits.isdigit() and len(digits) < 10 else 0
        key, equals, value = body[len(digits) + 1 : size].partition(b"=")
        if not equals or not value.endswith(b"\n") or size > len(body):
            raise InvalidTar("invalid pax header")
        found[key.decode("utf-8", "replace")] = value[:-1]
        body = body[size:]
    return found


def _amend(member: TarMember, extra: dict[str, bytes]) -> None:
    """What did not fit into a header, or what has to be said of all of them."""
    if not extra:
        return
    member.extra = extra
    if "path" in extra:
        member.name = os.fsdecode(extra["path"])
    if "linkpath" in extra:
        member.target = os.fsdecode(extra["linkpath"])
    try:
        if "size" in extra:
            member.size = int(extra["size"])
        if "mtime" in extra:
            member.mtime = float(extra["mtime"])
    except ValueError:
        raise InvalidTar("invalid number in a pax header") from None
    if not (0 <= member.size < 1 << 62 and -(2.0**40) < member.mtime < 2.0**40):
        raise InvalidTar("a pax header with an impossible number")
