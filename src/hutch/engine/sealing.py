"""Environments of sessions, unreadable without a key that is in a file of its own.

An environment often has secrets in it, and has to outlive the server: a session that sleeps gets
it again when it wakes. The key is in the data folder, beside the database, and readable by the
server's user only. So a copy of the database alone, a backup of it, or a page of it that SQLite
left on the disk tells nothing; who can read the whole data folder can read the environments too.

A digest of what may have secrets in it is keyed, with a key that is derived from the same file:
without it nobody can try guesses against the digest.

The cipher is AES-256-GCM of `cryptography`, with a random nonce for every text. It is loaded with
the first key, so an engine without a store does without it.
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
SIZE = 32  # bytes of a key
NONCE = 12  # bytes
MARK = b"hutch-sealed-1:"  # what sealed text begins with
DIGEST_MARK = "hmac-sha256:"  # what a keyed digest begins with


class Unreadable(Exception):
    """It was sealed with another key, or it was changed."""


class Sealer:
    """`Sealer.open(folder)` has the key of that folder."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._digest_key = hmac.digest(key, b"hutch keyed digest", hashlib.sha256)

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
        return MARK + (nonce + self._cipher.encrypt(nonce, text, MARK)).hex().encode()

    def digest(self, text: str) -> str:
        """The same for the same text, and of no use to anybody without the key."""
        return DIGEST_MARK + hmac.new(self._digest_key, text.encode(), hashlib.sha256).hexdigest()

    def unseal(self, sealed: bytes) -> bytes:
        """Raises Unreadable."""
        from cryptography.exceptions import InvalidTag

        if not is_sealed(sealed):
            raise Unreadable
        try:
            body = bytes.fromhex(sealed.removeprefix(MARK).decode())
            return self._cipher.decrypt(body[:NONCE], body[NONCE:], MARK)
        except (ValueError, InvalidTag):
            raise Unreadable from None


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
        _sync_folder(path.parent)  # what is encrypted with it must not outlive its name
    finally:
        os.close(descriptor)
        part.unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
