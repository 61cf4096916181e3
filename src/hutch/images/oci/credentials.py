"""Who we are at a registry: what `docker login` has written down.

Only what is in the file itself. Credential helpers are programs of somebody's, and none is run.
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hutch.errors import InvalidRequest

from .reference import DEFAULT_HOST

# Names that the file has for the host that needs no name.
_OTHER_NAMES = {"index.docker.io": DEFAULT_HOST, "registry-1.docker.io": DEFAULT_HOST}


@dataclass(frozen=True)
class Credentials:
    basic: str = ""  # as a header has it: base64 of user:password
    hint: str = ""  # why there are none, if that can be said


def credentials_of(host: str) -> Credentials:
    """Raises InvalidRequest for a file that cannot be read."""
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return Credentials()
    except (OSError, ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{path} cannot be read: {exc}") from None
    for key, entry in _table(found, "auths").items():
        if _host(key) == host and isinstance(entry, dict) and (basic := _basic(entry)):
            return Credentials(basic)
    if host in map(_host, _table(found, "credHelpers")) or _table(found).get("credsStore"):
        return Credentials(
            hint=f"{path} leaves passwords to a credential helper, a program which hutch does not "
            "run: put this one into `auths`"
        )
    return Credentials()


def _table(found: Any, key: str | None = None) -> dict[str, Any]:
    inner = found.get(key) if key and isinstance(found, dict) else found
    return inner if isinstance(inner, dict) else {}


def _host(key: str) -> str:
    host = key.partition("://")[2] or key
    host = host.partition("/")[0]
    return _OTHER_NAMES.get(host, host)


def _basic(entry: dict[str, Any]) -> str:
    auth, user, password = (entry.get(key) for key in ("auth", "username", "password"))
    if not auth and user and password:
        auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    try:
        plain = base64.b64decode(str(auth or ""), validate=True)
    except ValueError:
        return ""
    return str(auth) if b":" in plain else ""
