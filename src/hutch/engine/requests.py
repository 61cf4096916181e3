"""What a create asks a server for: completed, compared, and read again from the store."""

from __future__ import annotations

import hashlib
import os
from dataclasses import fields, replace

from hutch import operations as op
from hutch.errors import Conflict, InvalidRequest
from hutch.types import Limits, Mount

from .store import Record


def request_of(record: Record) -> op.OpenSession:
    body = dict(record.request)
    body["limits"] = Limits(**body["limits"])
    body["mounts"] = tuple(Mount(**mount) for mount in body["mounts"])
    for name in ("packages", "preload", "relax"):
        body[name] = tuple(body.get(name, ()))
    return op.OpenSession(**body)


def with_defaults(asked: Limits, default: Limits) -> Limits:
    """What is as Hutch itself would have it was not asked for: it is as the operator says."""
    own = Limits()
    names = [f.name for f in fields(Limits)]
    kept = {n: getattr(asked, n) for n in names if getattr(asked, n) != getattr(own, n)}
    return replace(default, **kept)


def checked_key(key: str) -> str:
    if not 1 <= len(key) <= 255 or not key.isprintable():
        raise InvalidRequest("an idempotency key has 1 to 255 printable characters")
    return key


def check_digest(before: str | None, now: str) -> None:
    if before != now:
        raise Conflict("this idempotency key was used for another request before")


def digest_of(o: op.OpenSession) -> str:
    return hashlib.sha256(repr(o).encode("utf-8", "surrogatepass")).hexdigest()


def real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:  # a NUL in it
        raise InvalidRequest(f"{path!r} is no path that could be mounted") from None


def is_below(path: str, folder: str) -> bool:
    folder = os.path.realpath(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")
