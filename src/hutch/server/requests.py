"""Requests to open a session: defaults filled in, validated and compared."""

from __future__ import annotations

import hashlib
import os
from dataclasses import fields, replace
from pathlib import Path

from hutch import operations as op
from hutch.engine.box_request import own_name
from hutch.engine.sealing import Sealer
from hutch.errors import Conflict, InvalidRequest, NoImage
from hutch.types import Limits, Mount, show_size

from .rules import Rules
from .times import show_duration


def image_of(o: op.OpenSession, rules: Rules, default_image: str) -> str:
    return own_name(o.image or rules.default_image or default_image, default_image)


def ttl_too_long(rules: Rules) -> str:
    most = f"{rules.max_ttl:.0f} ({show_duration(rules.max_ttl)})"
    return f"ttl_seconds can be at most {most} here (setting max_ttl_seconds)"


def completed(
    o: op.OpenSession, rules: Rules, default_image: str, data_folder: Path
) -> op.OpenSession:
    """The request with defaults filled in.

    Raises NoImage for an image that is not allowed, and InvalidRequest for anything else.
    """
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
    """Raises InvalidRequest if it is not an idempotency key."""
    if not 1 <= len(key) <= 255 or not key.isprintable():
        raise InvalidRequest("an idempotency key has 1 to 255 printable characters")
    return key


def check_digest(before: str | None, now: str) -> None:
    """Raises Conflict if a request is not the one that its key was used for before."""
    if before != now:
        raise Conflict("this idempotency key was used for another request before")


def digest_of(o: op.OpenSession, sealer: Sealer) -> str:
    """A digest to recognize the request. Keyed: its environment may have guessable secrets."""
    plain = hashlib.sha256(repr(o).encode("utf-8", "surrogatepass")).hexdigest()
    return sealer.digest(plain)  # as `store` does with those of earlier versions


def real(path: str) -> str:
    """A path without links. Raises InvalidRequest if no file can have it."""
    try:
        return os.path.realpath(path)
    except ValueError:  # a NUL in it
        raise InvalidRequest(f"cannot mount {path!r}: not a valid path") from None


def is_below(path: str, folder: str) -> bool:
    folder = os.path.realpath(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")
