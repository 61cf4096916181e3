"""What a create asks a server for: completed, compared, and read again from the store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from hutch import operations as op
from hutch.errors import Conflict, IncompatibleBox, InvalidRequest
from hutch.types import Limits, Mount

from .store import Record, Store


def request_of(record: Record, store: Store) -> op.OpenSession:
    """The request of a session.

    IncompatibleBox if only a newer version understands it, or its environment was sealed with
    another key.
    """
    body = _known(op.OpenSession, record.request)
    body["env"] = store.environment_of(record)
    body["limits"] = Limits(**_known(Limits, body["limits"]))
    body["mounts"] = tuple(Mount(**_known(Mount, mount)) for mount in body["mounts"])
    for name in ("packages", "preload", "relax"):
        body[name] = tuple(body.get(name, ()))
    return op.OpenSession(**body)


def _known(kind: type[op.OpenSession | Limits | Mount], body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that we know. Those that came later must be empty: then they ask for nothing."""
    known = {field.name for field in fields(kind)}
    if unknown := sorted(name for name, value in body.items() if value and name not in known):
        raise IncompatibleBox(f"it was opened with {', '.join(unknown)}, which is not known here")
    return {name: value for name, value in body.items() if name in known}


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
