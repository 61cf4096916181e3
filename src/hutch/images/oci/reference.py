"""What an image is called, as Docker has it: `alpine`, `node:22-slim`, `host:5000/a/b@sha256:...`.

A name without a host means the same here as everywhere else. The normal form has all that may be
left out; it is what images are kept under.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hutch.errors import InvalidRequest

# Names without a host are of this one, and its API is elsewhere: every client has to know that.
DEFAULT_HOST = "docker.io"
_DEFAULT_API = "registry-1.docker.io"
_DEFAULT_FOLDER = "library/"
_DEFAULT_TAG = "latest"
MAX_LENGTH = 200  # of the normal form, so that it can be the name of a file
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
    tag: str  # empty where there is a digest, which says more
    digest: str

    def __str__(self) -> str:
        return f"{self.host}/{self.path}{self._end()}"

    @property
    def familiar(self) -> str:
        """As people write it."""
        if self.host != DEFAULT_HOST:
            return str(self)
        return self.path.removeprefix(_DEFAULT_FOLDER) + self._end()

    @property
    def api(self) -> str:
        """The host, with its port, that has it."""
        return _DEFAULT_API if self.host == DEFAULT_HOST else self.host

    def _end(self) -> str:
        return f"@{self.digest}" if self.digest else f":{self.tag}"


def parse(text: str) -> Reference:
    """Raises InvalidRequest for whatever is not exactly a name."""
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
        raise _wrong(text, "what is before the first / is no host")
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
    """Whether it is one that we can check."""
    return isinstance(text, str) and bool(_DIGEST.fullmatch(text))


def is_local(host: str) -> bool:
    """Whether it is this machine, to which one may speak without encryption."""
    return bool(_LOCAL.fullmatch(host))


def _wrong(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{text!r} cannot be the name of an image: {why}")
