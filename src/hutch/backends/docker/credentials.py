"""Credentials for registries, as `docker login` stored them, for an engine that pulls for us."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from hutch.docker_logins import (
    DEFAULT_HOST,
    LEGACY_HOST,
    canonical_host,
    entries_of,
    leaves_to_helper,
)

from .address import config_folder, read_object

OFFICIAL = "library"  # the namespace of images with a single name, such as python


@dataclass(frozen=True)
class Login:
    auth: dict[str, str] | None = None  # in the format of the engine
    hint: str = ""  # why there are no credentials, if known


def host_of(reference: str) -> str:
    """The registry host in a reference."""
    first, has_more, _ = reference.partition("/")
    is_host = has_more and ("." in first or ":" in first or first == "localhost")
    return first if is_host else DEFAULT_HOST


def whole(reference: str) -> str:
    """The full reference of the same image, with its registry."""
    host = host_of(reference)
    path = reference.removeprefix(f"{host}/")
    if host == LEGACY_HOST:
        host = DEFAULT_HOST
    if host == DEFAULT_HOST and "/" not in path:
        path = f"{OFFICIAL}/{path}"
    return f"{host}/{path}"


def login_at(host: str, env: Mapping[str, str]) -> Login:
    """The credentials for a registry. Errors become a hint, as most images need no login."""
    path = config_folder(env) / "config.json"
    try:
        found = read_object(path)
    except FileNotFoundError:
        return Login()
    except (OSError, ValueError, RecursionError) as exc:
        return Login(hint=f"not logged in: cannot read {path}: {exc}")
    host = canonical_host(host)
    for entry in entries_of(found, host):
        if auth := _auth(entry):
            return Login({**auth, "serveraddress": host})
    if leaves_to_helper(found, host):
        return Login(
            hint=f"{path} leaves passwords to a credential helper, a program which hutch does not "
            f"run: `docker pull` does; or put the password for {host} into `auths`"
        )
    return Login()


def _auth(entry: Mapping[str, object]) -> dict[str, str]:
    """Empty if the entry has no usable credentials."""
    if token := entry.get("identitytoken"):
        return {"identitytoken": str(token)}
    user, password = entry.get("username"), entry.get("password")
    try:
        plain = base64.b64decode(str(entry.get("auth") or ""), validate=True).decode()
    except ValueError:
        plain = ""
    if ":" in plain:
        user, _, password = plain.partition(":")
    return {"username": str(user), "password": str(password)} if user and password else {}
