"""Encryption of session environments at rest, with a key in a file of the data folder.

An environment often has secrets in it, and has to outlive the server: a sleeping session gets it
back when it wakes. The key file is beside the database, and readable by the server's user only. So
a copy of the database alone, or a page of it that SQLite left on the disk, reveals nothing. A
reader of the whole data folder can read the environments, too.

Digests of what may contain secrets are keyed, with a key that is derived from the same file, so
that guesses cannot be tried against them.

The cipher is AES-256-GCM of `cryptography`, with a random nonce for every text. It is imported with
the first key, so an engine without a store does not need it.
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
    """Seals and unseals with the key of one folder: `Sealer.open(folder)`."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._digest_key = hmac.digest(key, b"hutch keyed digest", hashlib.sha256)

    @classmethod
    def open(cls, folder: Path) -> Sealer:
        """Read the key of a folder, or make one. Raises ServerUnavailable if neither works."""
        path = folder / KEY_FILE
        try:
            with contextlib.suppress(FileExistsError):
                _make_key(path)
            key = path.read_bytes()
        except OSError as exc:
            raise ServerUnavailable(f"{path} cannot be read or made: {exc.strerror}") from None
        if len(key) != SIZE:
            raise ServerUnavailable(
                f"{path} is damaged: restore a copy of it, or remove it. Without it, sleeping "
                "sessions that have an environment cannot wake"
            )
        return cls(key)

    def seal(self, text: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE)
        return MARK + (nonce + self._cipher.encrypt(nonce, text, MARK)).hex().encode()

    def digest(self, text: str) -> str:
        """A keyed digest of a text."""
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
    """Write a file and link it to its name, so that it is never incomplete.

    Raises FileExistsError.
    """
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
