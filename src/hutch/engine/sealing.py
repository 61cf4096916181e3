"""Environments of sessions, unreadable without a key that is in a file of its own.

An environment often has secrets in it, and has to outlive the server: a session that sleeps gets
it again when it wakes. The key is in the data folder, beside the database, and readable by the
server's user only. So a copy of the database alone, a backup of it, or a page of it that SQLite
left on the disk tells nothing; who can read the whole data folder can read the environments too.

Python's standard library has no cipher. This is a stream cipher made of a keyed XOF (SHAKE-256 of
key and nonce), and HMAC-SHA-256 over the result; every text has a nonce of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from hutch.errors import ServerUnavailable

KEY_FILE = "secret.key"
SIZE = 32  # bytes of a key, and of a tag
NONCE = 16
MARK = b"hutch-sealed-1:"  # what sealed text begins with


class Unreadable(Exception):
    """It was sealed with another key, or it was changed."""


class Sealer:
    """`Sealer.open(folder)` has the key of that folder."""

    def __init__(self, key: bytes) -> None:
        self._for_text = hmac.digest(key, b"text", "sha256")
        self._for_tag = hmac.digest(key, b"tag", "sha256")

    @classmethod
    def open(cls, folder: Path) -> Sealer:
        """The key is made if there is none. ServerUnavailable if it cannot be read or made."""
        path = folder / KEY_FILE
        try:
            with contextlib.suppress(FileExistsError):
                _make_key(path)
            key = path.read_bytes()
        except OSError as exc:
            raise ServerUnavailable(f"{path} cannot be read or made: {exc.strerror}") from None
        if len(key) != SIZE:
            raise ServerUnavailable(
                f"{path} is damaged: put a copy of it back, or remove it: sessions that sleep and "
                "have an environment cannot wake then"
            )
        return cls(key)

    def seal(self, text: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE)
        hidden = self._mixed(nonce, text)
        return MARK + (self._tag(nonce + hidden) + nonce + hidden).hex().encode()

    def unseal(self, sealed: bytes) -> bytes:
        """Raises Unreadable."""
        try:
            body = bytes.fromhex(sealed.removeprefix(MARK).decode())
        except ValueError:
            raise Unreadable from None
        tag, rest = body[:SIZE], body[SIZE:]
        if not is_sealed(sealed) or not hmac.compare_digest(tag, self._tag(rest)):
            raise Unreadable
        return self._mixed(rest[:NONCE], rest[NONCE:])

    def _tag(self, data: bytes) -> bytes:
        return hmac.digest(self._for_tag, data, "sha256")

    def _mixed(self, nonce: bytes, text: bytes) -> bytes:
        stream = hashlib.shake_256(self._for_text + nonce).digest(len(text))
        number = int.from_bytes(text, "big") ^ int.from_bytes(stream, "big")
        return number.to_bytes(len(text), "big")


def is_sealed(text: bytes) -> bool:
    return text.startswith(MARK)


def _make_key(path: Path) -> None:
    """Whole or not at all: a link to a file that was written before. FileExistsError if it is."""
    if path.exists():
        raise FileExistsError
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(SIZE))
        os.fsync(descriptor)
        os.link(part, path)
    finally:
        os.close(descriptor)
        part.unlink()
