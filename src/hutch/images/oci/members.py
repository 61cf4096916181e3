"""What is in a tar, by name and place: nothing is unpacked.

Such a tar holds an image, and few members; or it is a root file system, with a million of them,
and then nobody needs their names. So not more are remembered than an image could have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from hutch.errors import InvalidRequest

BLOCK = 512
MAX_EXTRA = 64 * 1024  # bytes of a long name, or of what pax says about a member
MAX_KNOWN = 10_000
MAX_LINKS = 8

_FILES, _LINKS = (b"0", b"\0", b"7"), (b"1", b"2")
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"


class Region:
    """Part of a file, read without moving anybody else's place in it."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._fd = file.fileno()
        self._at, self._end = offset, offset + size
        self.offset, self.size = offset, size

    def read(self, size: int) -> bytes:
        data = os.pread(self._fd, min(size, self._end - self._at), self._at)
        self._at += len(data)
        return data


@dataclass(frozen=True)
class Member:
    name: str
    offset: int
    size: int
    target: str = ""  # of a link


def known_members(file: BinaryIO) -> dict[str, Member]:
    """By name, without dots and slashes around it. Raises InvalidRequest for what is no tar."""
    found: dict[str, Member] = {}
    for member in _members(file):
        name = _clean(member.name)
        if len(found) < MAX_KNOWN and name.count("/") < 4:
            found[name] = member
    return found


def find(members: dict[str, Member], name: str) -> Member | None:
    """The file of that name, through links: layers that are equal are there only once."""
    name = _clean(name)
    for _ in range(MAX_LINKS):
        member = members.get(name)
        if member is None or not member.target:
            return member
        name = _clean(os.path.join(os.path.dirname(name), member.target))
    return None


def _clean(name: str) -> str:
    return os.path.normpath(f"/{name}").lstrip("/")


def _members(file: BinaryIO) -> Iterator[Member]:
    end = os.fstat(file.fileno()).st_size
    place, name, target, size = 0, "", "", -1
    while place < end:
        header = os.pread(file.fileno(), BLOCK, place)
        if not header.strip(b"\0"):
            return
        if len(header) < BLOCK or not _adds_up(header):
            raise InvalidRequest("this is no tar, or a broken one")
        kind = header[156:157]
        length = size if size >= 0 and kind in _FILES else _number(header[124:136])
        data, place = place + BLOCK, place + BLOCK + -(-length // BLOCK) * BLOCK
        if data + length > end:
            raise InvalidRequest("this tar breaks off in the middle")
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
            if length > MAX_EXTRA and kind != _PAX_GLOBAL:
                raise InvalidRequest("this tar says more about a file than can be")
            extra = b"" if kind == _PAX_GLOBAL else os.pread(file.fileno(), length, data)
            if kind == _LONG_NAME:
                name = _text(extra)
            elif kind == _LONG_LINK:
                target = _text(extra)
            elif kind == _PAX:
                said = _pax(extra)
                name, target = said.get("path", name), said.get("linkpath", target)
                size = _decimal(said["size"]) if "size" in said else size
            continue
        if kind in _FILES:
            yield Member(name or _name(header), data, length)
        elif kind in _LINKS:
            where = target or _text(header[157:257])
            # A hard link counts from the top, which is where a leading slash leads.
            yield Member(name or _name(header), data, 0, where if kind == b"2" else f"/{where}")
        name, target, size = "", "", -1


def _adds_up(header: bytes) -> bool:
    total = sum(header[:148]) + sum(header[156:]) + 8 * 32
    try:
        return _number(header[148:156]) == total
    except InvalidRequest:
        return False


def _name(header: bytes) -> str:
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{_text(header[:100])}" if prefix else _text(header[:100])


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # too large for octal digits
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else _broken()
    digits = field.strip(b"\0 ")
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        return _broken()


def _decimal(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else _broken()


def _broken() -> int:
    raise InvalidRequest("this tar has a number that is none")


def _pax(data: bytes) -> dict[str, str]:
    found = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not len(length) < int(length[:9]) <= len(data):
            raise InvalidRequest("this tar has a broken pax header")
        record, data = data[len(length) + 1 : int(length)], data[int(length) :]
        key, _, value = record.removesuffix(b"\n").partition(b"=")
        found[key.decode(errors="replace")] = value.decode(errors="surrogateescape")
    return found
