"""Requests to open a session, as they are stored.

The environment of a session is stored sealed, and only while its box may be made again. The digest
of a request, which recognizes a repeated one, depends on the environment, and is keyed.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from hutch import operations as op
from hutch.engine.sealing import DIGEST_MARK, KEY_FILE, Sealer, Unreadable
from hutch.errors import IncompatibleBox
from hutch.types import ENDED, Limits, Mount

log = logging.getLogger("hutch")

# In the JSON of a request whose environment is neither empty nor sealed.
PLAIN_ENV = '"env":{"'
# `application_id` of a file in which every environment is sealed and every digest keyed.
SEALED = 0x48555432


def request_of(stored: Mapping[str, object], sealer: Sealer) -> op.OpenSession:
    """The request that a stored session was opened with.

    Raises IncompatibleBox if only a newer version understands it, or if its environment was sealed
    with another key.
    """
    body = _known(op.OpenSession, stored)
    body["env"] = environment_in(stored, sealer)
    body["limits"] = Limits(**_known(Limits, body["limits"]))
    body["mounts"] = tuple(Mount(**_known(Mount, mount)) for mount in body["mounts"])
    for name in ("packages", "preload", "relax"):
        body[name] = tuple(body.get(name, ()))
    return op.OpenSession(**body)


def _known(kind: type[op.OpenSession | Limits | Mount], body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows. Newer ones must be empty, which means the default."""
    known = {field.name for field in fields(kind)}
    if unknown := sorted(name for name, value in body.items() if value and name not in known):
        raise IncompatibleBox(f"it was opened with {', '.join(unknown)}, which is not known here")
    return {name: value for name, value in body.items() if name in known}


def stored_request(
    request: Mapping[str, object], sealer: Sealer, *, ended: bool
) -> dict[str, object]:
    """A request as it is written. After the end of a session its environment is not needed."""
    env = request.get("env")
    if ended:
        env = {}
    elif isinstance(env, Mapping) and env:
        env = sealer.seal(msgspec.json.encode(env)).decode()
    return {**request, "env": env or {}}


def environment_in(request: Mapping[str, object], sealer: Sealer) -> dict[str, str]:
    """The environment in a stored request. Raises IncompatibleBox if its key is gone."""
    env = request.get("env") or {}
    if isinstance(env, Mapping):
        return dict(env)
    assert isinstance(env, str)
    try:
        return msgspec.json.decode(sealer.unseal(env.encode()), type=dict[str, str])
    except (Unreadable, msgspec.DecodeError):
        raise IncompatibleBox(
            f"its environment cannot be read: it was sealed with another key than {KEY_FILE} in "
            "the data folder"
        ) from None


def seal_old_rows(db: sqlite3.Connection, path: Path, sealer: Sealer) -> None:
    """Seal rows, here and in copies of the file, that were written before there was a key.

    Failures are logged, and tried again at the next start.
    """
    if db.execute("PRAGMA application_id").fetchone() == (SEALED,):
        return
    is_clean = _scrub(db, sealer)
    for copy in path.parent.glob(f"{path.name}.v*.bak"):
        # A copy gets no sealed environments: its version of Hutch could not read them.
        try:
            with contextlib.closing(sqlite3.connect(copy)) as old:
                is_clean &= _scrub(old, None)
        except (sqlite3.Error, msgspec.DecodeError) as exc:
            is_clean = False
            log.warning("cannot remove environments of sessions from %s: %s", copy, exc)
    if is_clean:
        db.execute(f"PRAGMA application_id = {SEALED}")


def _scrub(db: sqlite3.Connection, sealer: Sealer | None) -> bool:
    """Whether no plain environment and no unkeyed digest is left in the file."""
    plain = db.execute(
        "SELECT number, status, request FROM sessions WHERE instr(request, ?)", (PLAIN_ENV,)
    ).fetchall()
    changed = []
    for number, status, text in plain:
        request = msgspec.json.decode(text)
        if isinstance(request.get("env"), dict) and request["env"]:
            if sealer is None:
                request["env"] = {}
            else:
                request = stored_request(request, sealer, ended=status in ENDED)
            changed.append((msgspec.json.encode(request).decode(), number))
    unkeyed = db.execute(
        "SELECT number, digest FROM sessions WHERE digest IS NOT NULL AND NOT instr(digest, ?)",
        (DIGEST_MARK,),
    ).fetchall()
    digests = [(sealer.digest(digest) if sealer else None, number) for number, digest in unkeyed]
    # secure_delete overwrites what is deleted; VACUUM rewrites the whole file, for pages that were
    # freed before; and the log has the old pages until it is truncated. All of this also if no row
    # changes: an earlier attempt may have ended after the update.
    db.execute("PRAGMA secure_delete = ON")
    db.executemany("UPDATE sessions SET request = ? WHERE number = ?", changed)
    db.executemany("UPDATE sessions SET digest = ? WHERE number = ?", digests)
    db.commit()
    db.execute("VACUUM")
    is_busy: int = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    if is_busy:
        log.warning("another process has the database open: its log still has plain environments")
    return not is_busy
