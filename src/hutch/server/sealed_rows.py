"""How the environment of a session stands in the store: sealed, and only while it may be needed.

The digest of a request, by which a repeated one is known, is keyed: it depends on the environment.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hutch.engine.sealing import DIGEST_MARK, KEY_FILE, Sealer, Unreadable
from hutch.errors import IncompatibleBox
from hutch.types import ENDED

log = logging.getLogger("hutch")
# What the JSON of a request contains if its environment is neither empty nor sealed.
PLAIN = '"env":{"'
# What a file says of itself once no row of it has a plain environment or an unkeyed digest.
SEALED = 0x48555432


def stored_request(request: Mapping[str, Any], sealer: Sealer, *, ended: bool) -> dict[str, Any]:
    """A request as it is written. Of a session that has ended, no box is made again."""
    env = request.get("env")
    if ended:
        env = {}
    elif isinstance(env, Mapping) and env:
        env = sealer.seal(msgspec.json.encode(env)).decode()
    return {**request, "env": env or {}}


def environment_in(request: Mapping[str, Any], sealer: Sealer) -> dict[str, str]:
    """Raises IncompatibleBox if the key that it was sealed with is gone."""
    env = request.get("env") or {}
    if not isinstance(env, str):
        return dict(env)
    try:
        return msgspec.json.decode(sealer.unseal(env.encode()), type=dict[str, str])
    except (Unreadable, msgspec.DecodeError):
        raise IncompatibleBox(
            f"its environment cannot be read: it was sealed with another {KEY_FILE} than the one "
            "in the data folder"
        ) from None


def seal_old_rows(db: sqlite3.Connection, path: Path, sealer: Sealer) -> None:
    """Rows that were written before environments were sealed and digests keyed; and copies of
    such databases.

    What fails is logged, and tried again when the server is started the next time.
    """
    if db.execute("PRAGMA application_id").fetchone() == (SEALED,):
        return
    is_clean = _scrub(db, sealer)
    for copy in path.parent.glob(f"{path.name}.v*.bak"):
        # Nobody wakes a session from a copy with a key that it does not know: it has none.
        try:
            with contextlib.closing(sqlite3.connect(copy)) as old:
                is_clean &= _scrub(old, None)
        except (sqlite3.Error, msgspec.DecodeError) as exc:
            is_clean = False
            log.warning("cannot remove environments of sessions from %s: %s", copy, exc)
    if is_clean:
        db.execute(f"PRAGMA application_id = {SEALED}")


def _scrub(db: sqlite3.Connection, sealer: Sealer | None) -> bool:
    """Whether nothing of a plain environment or an unkeyed digest is in the file any more."""
    found = db.execute(
        "SELECT number, status, request FROM sessions WHERE instr(request, ?)", (PLAIN,)
    ).fetchall()
    changed = []
    for number, status, text in found:
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
    # With secure_delete, what a page no longer has is overwritten; VACUUM writes the whole file
    # anew, for pages that were freed before; and the log has the old pages until it is truncated.
    # All this also if no row is to be changed: an earlier try may have ended after the update.
    db.execute("PRAGMA secure_delete = ON")
    db.executemany("UPDATE sessions SET request = ? WHERE number = ?", changed)
    db.executemany("UPDATE sessions SET digest = ? WHERE number = ?", digests)
    db.commit()
    db.execute("VACUUM")
    is_busy: int = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    if is_busy:
        log.warning("another process has the database open: its log has old environments still")
    return not is_busy
