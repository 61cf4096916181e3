"""Tar streams, read and written: standard library only, for boxes and for the host.

Input may be hostile: every number is checked, no header makes us read more than `MAX_EXTRA` bytes
at once, and anything invalid raises InvalidTar. Names of members are passed on as they are: the
caller must check them before it uses them as paths.

Not tarfile: importing it would add 4 ms to the start of every box.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

BLOCK = 512  # headers and contents are padded to a multiple of this
CHUNK = 1 << 20  # bytes of content to read at once
MAX_EXTRA = 1 << 20  # bytes of the extra headers of one member: pax, long names
MAX_GLOBAL = 1 << 16  # bytes of all global pax headers of a tar
MAX_OCTAL = 8**11  # the first number that does not fit into a header field of 11 octal digits

FILE, HARD_LINK, SYMLINK, FOLDER, FIFO = b"0", b"1", b"2", b"5", b"6"
FILES = (FILE, b"\0", b"7")
PAX, PAX_GLOBAL, LONG_NAME, LONG_LINK = b"x", b"g", b"L", b"K"


class InvalidTar(Exception):
    """Not a tar, or a broken one."""


@dataclass
class TarMember:
    """A file, folder or link in a tar. `kind` is the type flag of its header."""

    name: str
    kind: bytes
    mode: int
    size: int
    mtime: float
    target: str
    owner: bytes = b""  # the uid and gid fields of the header: parse them with `number`
    extra: dict[str, bytes] = field(default_factory=dict)  # pax headers


class TarSource(Protocol):
    """A buffered file: returns fewer bytes than asked for only at its end."""

    def read(self, size: int, /) -> bytes: ...


class TarReader:
    """Iterates over the members of a tar; `read` returns the content of the last one.

    With `needs_end`, a tar without its final block of zeros is invalid. `skip` moves forward in a
    source that can seek. Iterating and `read` raise InvalidTar, and what the source raises.
    """

    def __init__(
        self,
        source: TarSource,
        *,
        needs_end: bool = True,
        skip: Callable[[int], None] | None = None,
    ) -> None:
        self._source, self._needs_end = source, needs_end
        self._skip = skip or self._read_over
        self._left = self._padding = 0  # of the content of the last member

    def __iter__(self) -> Iterator[TarMember]:
        always: dict[str, bytes] = {}
        extra: dict[str, bytes] = {}
        global_size = extra_size = 0  # summed up, as any number of headers may follow each other
        while head := self._next_header():
            member = _parse_header(head)
            self._left, self._padding = member.size, -member.size % BLOCK
            if member.kind == PAX_GLOBAL:
                if (global_size := global_size + member.size) > MAX_GLOBAL:
                    raise InvalidTar(f"more than {MAX_GLOBAL} bytes of global headers")
                always |= _parse_pax(self._extra(member.size))
                continue
            if member.kind in (PAX, LONG_NAME, LONG_LINK):
                if (extra_size := extra_size + member.size) > MAX_EXTRA:
                    raise InvalidTar(f"headers of {extra_size} bytes")
            else:
                extra_size = 0
            if member.kind == PAX:
                extra |= _parse_pax(self._extra(member.size))
            elif member.kind == LONG_NAME:
                extra["path"] = self._extra(member.size).rstrip(b"\0")
            elif member.kind == LONG_LINK:
                extra["linkpath"] = self._extra(member.size).rstrip(b"\0")
            else:
                _amend(member, always | extra if extra else always)
                self._left, self._padding = member.size, -member.size % BLOCK
                extra = {}
                yield member

    def read(self, size: int = CHUNK) -> bytes:
        """The next bytes of the member's content, at most `size`. Empty at its end."""
        if not self._left:
            return b""
        data = self._source.read(min(self._left, size))
        if not data:
            raise InvalidTar("it ended early")
        self._left -= len(data)
        return data

    def _next_header(self) -> bytes:
        """The next block after the content of the last member. Empty at the end of the tar."""
        if self._left or self._padding:
            self._skip(self._left + self._padding)
            self._left = self._padding = 0
        head = self._source.read(BLOCK)
        if len(head) < BLOCK and (head or self._needs_end):
            raise InvalidTar("it ended early")
        return head if head.strip(b"\0") else b""

    def _read_over(self, size: int) -> None:
        while size:
            data = self._source.read(min(size, CHUNK))
            if not data:
                raise InvalidTar("it ended early")
            size -= len(data)

    def _extra(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) < size:
            raise InvalidTar("it ended early")
        return data


def number(field: bytes) -> int:
    """Parse a number: octal digits, or binary with the first bit set if those were too few.

    Raises InvalidTar.
    """
    if field[0] & 0x80:
        value = int.from_bytes(bytes((field[0] & 0x7F,)) + field[1:], "big")
    else:
        digits = field.strip(b" \0").partition(b"\0")[0]
        try:
            value = int(digits or b"0", 8)
        except ValueError:
            raise InvalidTar("text in a header where a number belongs") from None
    if not 0 <= value < 1 << 62:
        raise InvalidTar("a header with an impossible number")
    return value


def _parse_header(head: bytes) -> TarMember:
    if number(head[148:156]) != _checksum(head):
        raise InvalidTar("a header whose checksum is wrong")
    name, prefix = _text(head[:100]), ""
    if head[257:263] == b"ustar\0":
        prefix = _text(head[345:500])
    return TarMember(
        name=f"{prefix}/{name}" if prefix else name,
        kind=head[156:157],
        mode=number(head[100:108]) & 0o1777,
        size=number(head[124:136]),
        mtime=number(head[136:148]),
        target=_text(head[157:257]),
        owner=head[108:124],
    )


def _checksum(head: bytes) -> int:
    """The sum of the bytes of a header, with spaces in place of the checksum itself."""
    return sum(head[:148]) + sum(head[156:]) + 8 * 32


def _text(field: bytes) -> str:
    return os.fsdecode(field.partition(b"\0")[0])


def _parse_pax(body: bytes) -> dict[str, bytes]:
    values = {}
    at = 0
    while at < len(body):
        # Only the digits are copied: copies of the rest would take quadratic time.
        digits = body[at : at + 10].partition(b" ")[0]
        size = int(digits) if digits.isdigit() and len(digits) < 10 else 0
        key, equals, value = body[at + len(digits) + 1 : at + size].partition(b"=")
        if not equals or not value.endswith(b"\n") or size > len(body) - at:
            raise InvalidTar("invalid pax header")
        values[key.decode("utf-8", "replace")] = value[:-1]
        at += size
    return values


def _amend(member: TarMember, extra: dict[str, bytes]) -> None:
    """Replace fields that did not fit into the header by those of pax headers."""
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
    # The comparison of mtime is also false for NaN.
    if not (0 <= member.size < 1 << 62 and -(2.0**40) < member.mtime < 2.0**40):
        raise InvalidTar("a pax header with an impossible number")


# --- writing ------------------------------------------------------------------------------


def header(
    path: str, kind: bytes, *, mode: int, mtime: float, size: int = 0, target: str = ""
) -> bytes:
    """The header of a member, after a pax header if it needs one.

    `size` bytes of content follow, padded with zeros to a multiple of BLOCK.
    """
    name, link = os.fsencode(path), os.fsencode(target)
    extra: dict[str, bytes] = {}
    if len(name) > 100 or not name.isascii():
        extra["path"] = name
    if len(link) > 100 or not link.isascii():
        extra["linkpath"] = link
    if size >= MAX_OCTAL:
        extra["size"] = b"%d" % size
    head = _block(name, kind, mode, size, int(mtime), link)
    if not extra:
        return head
    body = b"".join(_pax_line(key, value) for key, value in extra.items())
    return _block(b"pax", PAX, 0o644, len(body), 0, b"") + body + bytes(-len(body) % BLOCK) + head


def _pax_line(key: str, value: bytes) -> bytes:
    """`30 path=...`: its length comes first, and includes its own digits."""
    rest = b" %s=%s\n" % (key.encode(), value)
    size = len(rest)
    while (whole := len(str(size)) + len(rest)) != size:
        size = whole
    return b"%d%s" % (size, rest)


def _block(name: bytes, kind: bytes, mode: int, size: int, mtime: int, link: bytes) -> bytes:
    size, mtime = (size if size < MAX_OCTAL else 0), min(max(mtime, 0), MAX_OCTAL - 1)
    fields = (
        name[:100].ljust(100, b"\0"),
        b"%07o\0%07o\0%07o\0" % (mode, 0, 0),  # mode, uid, gid
        b"%011o\0%011o\0" % (size, mtime),
        b" " * 8,  # the checksum
        kind,
        link[:100].ljust(100, b"\0"),
        b"ustar\x0000",
    )
    head = b"".join(fields).ljust(BLOCK, b"\0")
    return head[:148] + b"%06o\0 " % _checksum(head) + head[156:]
