"""Requests to open a session: defaults filled in, validated, compared, and as they are stored.

The environment of a session is stored sealed, and only while its box may be made again. The digest
of a request, which recognizes a repeated one, depends on the environment, and is keyed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from hutch import operations as op
from hutch.engine.box_request import own_name
from hutch.engine.sealing import DIGEST_MARK, KEY_FILE, Sealer, Unreadable
from hutch.errors import Conflict, IncompatibleBox, InvalidRequest, NoImage
from hutch.types import ENDED, Limits, Mount, show_size

from .rules import Rules
from .times import show_duration

log = logging.getLogger("hutch")


def image_of(o: op.OpenSession, rules: Rules, default_image: str) -> str:
    return own_name(o.image or rules.default_image or default_image, default_image)


def ttl_too_long(rules: Rules) -> str:
    most = f"{rules.max_ttl:.0f} ({show_duration(rules.max_ttl)})"
    return f"ttl_seconds can be at most {most} here (setting max_ttl_seconds)"


def completed(
    o: op.OpenSession, rules: Rules, default_image: str, data_folder: Path
) -> op.OpenSession:
    """The request with defaults filled in. Raises InvalidRequest for what is not allowed."""
    image = image_of(o, rules, default_image)
    allowed = {own_name(name, default_image) for name in rules.allowed_images}
    if allowed and (image not in allowed or o.packages):
        raise NoImage(f"image {image!r} is not allowed here: {', '.join(rules.allowed_images)}")
    ttl = rules.default_ttl if o.ttl_seconds is None or o.ttl_seconds <= 0 else o.ttl_seconds
    if ttl > rules.max_ttl:
        raise InvalidRequest(ttl_too_long(rules))
    limits = with_defaults(o.limits, rules.default_limits)
    for name in ("memory", "cpus", "pids", "disk_size", "open_files", "output"):
        if getattr(limits, name) > (most := getattr(rules.max_limits, name)):
            shown = show_size(most) if name in ("memory", "disk_size", "output") else most
            raise InvalidRequest(f"{name.removesuffix('_size')} can be at most {shown} here")
    mounts = tuple(replace(mount, source=real(mount.source)) for mount in o.mounts)
    check_mounts(mounts, rules, data_folder)
    if refused := [name for name in o.relax if name not in rules.relax]:
        raise InvalidRequest(
            f"{', '.join(refused)} may not be relaxed: the operator of this server allows "
            + (", ".join(rules.relax) or "none (setting `relax`)")
        )
    if rules.runtime and o.runtime not in ("", rules.runtime):
        raise InvalidRequest(f"runtime {o.runtime!r}: this server has {rules.runtime!r}")
    return replace(
        o,
        image=image,
        ttl_seconds=ttl,
        limits=limits,
        idle=rules.default_idle if o.idle is None else o.idle,
        mounts=mounts,
        runtime=o.runtime or rules.runtime,
    )


def check_mounts(mounts: tuple[Mount, ...], rules: Rules, data_folder: Path) -> None:
    """Raises InvalidRequest for a mount that is not allowed.

    Checked at every start: a box may have replaced a folder by a link, and the rules may have
    changed. Later replacements are caught by the backends, which follow no links.
    """
    data = os.path.realpath(data_folder)
    for source in (mount.source for mount in mounts):
        if real(source) != source:
            raise InvalidRequest(f"{source}: a link is on the way: it may not be mounted")
        if is_below(source, data) or is_below(data, source):
            raise InvalidRequest(f"{source} may not be mounted: the server lives there")
        if not any(is_below(source, allowed) for allowed in rules.mounts):
            raise InvalidRequest(
                f"{source} may not be mounted: the operator of this server allows "
                + (", ".join(rules.mounts) or "no folder of its host (setting `mounts`)")
            )


def with_defaults(asked: Limits, default: Limits) -> Limits:
    """The limits of a request; where it has Hutch's defaults, those of the operator."""
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


def digest_of(o: op.OpenSession, sealer: Sealer) -> str:
    """A digest to recognize the request. Keyed: its environment may have guessable secrets."""
    plain = hashlib.sha256(repr(o).encode("utf-8", "surrogatepass")).hexdigest()
    return sealer.digest(plain)  # as `store` does with those of earlier versions


def real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:  # a NUL in it
        raise InvalidRequest(f"cannot mount {path!r}: not a valid path") from None


def is_below(path: str, folder: str) -> bool:
    folder = os.path.realpath(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# --- as they are stored -------------------------------------------------------------------

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
