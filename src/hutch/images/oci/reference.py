"""Names of images, as in Docker: `alpine`, `node:22-slim`, `host:5000/a/b@sha256:...`.

A name without a host means the same as in Docker. The normal form contains every part that may be
left out; images are stored under it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hutch.docker_logins import DEFAULT_HOST
from hutch.errors import InvalidRequest

# The API of the default host is on another host, which every client has to know.
_DEFAULT_API = "registry-1.docker.io"
_DEFAULT_FOLDER = "library/"
_DEFAULT_TAG = "latest"
MAX_LENGTH = 200  # of the normal form, which becomes a file name
TOO_LONG = f"the name of an image has up to {MAX_LENGTH} characters, with its host and its tag"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{{1,5}})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LOCAL = re.compile(r"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]+)?")


@dataclass(frozen=True)
class Reference:
    host: str
    path: str
    tag: str  # empty if there is a digest, which is more precise
    digest: str

    def __str__(self) -> str:
        return f"{self.host}/{self.path}{self._end()}"

    @property
    def familiar(self) -> str:
        """The short form that users write."""
        if self.host != DEFAULT_HOST:
            return str(self)
        return self.path.removeprefix(_DEFAULT_FOLDER) + self._end()

    @property
    def api(self) -> str:
        """The host of the registry's API, with its port."""
        return _DEFAULT_API if self.host == DEFAULT_HOST else self.host

    def _end(self) -> str:
        return f"@{self.digest}" if self.digest else f":{self.tag}"


def parse(text: str) -> Reference:
    """Parse a name. Raises InvalidRequest if it is malformed or too long."""
    if len(text) > MAX_LENGTH:
        raise InvalidRequest(TOO_LONG)
    rest, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise _wrong(text, "after @ comes sha256: and 64 hexadecimal digits")
    first, slash, others = rest.partition("/")
    if slash and (set(first) & set(".:[") or first == "localhost"):
        host, rest = first, others
    else:
        host = DEFAULT_HOST
    rest, colon, tag = rest.partition(":")
    if not _HOST.fullmatch(host):
        raise _wrong(text, "the part before the first / is not a host")
    if not _PATH.fullmatch(rest):
        raise _wrong(text, "a-z, 0-9 and, between them, ._-/ can be in it, as in node:22-slim")
    if colon and not _TAG.fullmatch(tag):
        raise _wrong(text, "a tag has letters, digits and _.- and up to 128 of them")
    if host == DEFAULT_HOST and "/" not in rest:
        rest = _DEFAULT_FOLDER + rest
    found = Reference(host, rest, "" if digest else tag or _DEFAULT_TAG, digest)
    if len(str(found)) > MAX_LENGTH:
        raise InvalidRequest(TOO_LONG)
    return found


def is_digest(text: object) -> bool:
    """Whether it is a digest of a supported kind: sha256."""
    return isinstance(text, str) and bool(_DIGEST.fullmatch(text))


def is_local(host: str) -> bool:
    """Whether a host, with or without a port, is this machine, which needs no encryption."""
    return bool(_LOCAL.fullmatch(host))


def _wrong(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{text!r} cannot be the name of an image: {why}")
