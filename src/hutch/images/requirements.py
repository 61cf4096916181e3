"""Requirements of Python packages: parsed, checked, and serialized again.

uv never gets text from a caller. A requirement is parsed with `packaging`, and uv gets the parsed
value in our own spelling: a name, extras, versions, a marker, the URL of a wheel.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from hutch.errors import InvalidRequest
from hutch.lines import is_single_line, single_line

HASHED = "#sha256="
LONGEST = 10_000  # characters; a marker of a few MB would keep the parser busy for minutes

_WHEEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._]*[A-Za-z0-9])?(-[^-/]+){4,5}\.whl")
_DIGEST = re.compile(r"sha256=[0-9a-f]{64}")
_VERSION = re.compile(r"[A-Za-z0-9.!+_*-]+")
_HASH = re.compile(r"--hash=sha(256:[0-9a-f]{64}|384:[0-9a-f]{96}|512:[0-9a-f]{128})")


def parse_requirement(text: str, *, wheels: bool = True) -> str:
    """Normalize a requirement, so that `Pandas >= 2` and `pandas>=2` are the same.

    It is a requirement as for pip, or the path or URL of a wheel. With `wheels=False`, paths and
    URLs are refused before anything is read. Raises InvalidRequest if it is malformed or refused,
    or the wheel cannot be read.
    """
    text = text.strip()
    single_line(text, "a package is a single line")
    if len(text) > LONGEST:
        raise InvalidRequest(f"a package has {len(text)} characters, and may have {LONGEST}")
    if text.startswith("-"):
        raise InvalidRequest(f"packages are names, not options: {text!r}")
    is_path = text.startswith(("/", "./", "../", "~"))
    if not wheels and text.endswith(".whl"):
        raise InvalidRequest(
            f"{text!r:.200} names a place, and only names and versions may be used"
        )
    if text.endswith(".whl") and (is_path or "@" not in text):
        return _local_wheel(Path(text))
    if is_path or "://" in text.partition("@")[0]:
        raise InvalidRequest(f"a package is a name or a wheel, and {text!r} is not a wheel (.whl)")
    try:
        parsed = Requirement(text)
        if parsed.url is not None and not wheels:
            raise InvalidRequest(
                f"{text!r:.200} names a place, and only names and versions may be used"
            )
        if parsed.url is not None:
            parsed.url = _checked_url(parsed.url)
        # After `===`, any text is a version, even one that another parser takes for a path.
        if not all(_VERSION.fullmatch(one.version) for one in parsed.specifier) or "\\" in text:
            raise InvalidRequest(f"{text!r:.200} has an invalid version, or a backslash")
        spelled = _spelled(parsed)
        # Markers contain strings with escapes: the result must be one line, and must parse to the
        # same value.
        single_line(spelled, "a package is a single line")
        same = _spelled(Requirement(spelled)) == spelled
    except (InvalidRequirement, RecursionError):
        same = False
    if not same:
        raise InvalidRequest(f"no package can be called {text!r:.200}; write it like: pandas>=2.1")
    # uv expands variables in URLs and in files, and its environment may contain a password.
    if "$" in spelled:
        raise InvalidRequest(f"variables are not allowed in a package: {text!r:.200}")
    return spelled


def parse_line(text: str) -> str:
    """Parse a line that Hutch wrote: a requirement and its hashes.

    Raises InvalidRequest if it is malformed.
    """
    requirement, *hashes = re.split(r" (?=--hash=)", text)
    if not all(map(_HASH.fullmatch, hashes)):
        raise InvalidRequest(f"a hash is malformed: {text!r:.200}")
    return " ".join([parse_requirement(requirement, wheels=" @ " in requirement), *hashes])


def requirements_file(lines: Iterable[str]) -> str:
    """The content of a requirements file. Each line is parsed again, as a last check.

    Raises InvalidRequest if a line is malformed.
    """
    return "".join(f"{single_line(parse_line(line), 'requirements')}\n" for line in lines)


def local_wheels(requirements: Iterable[str]) -> list[str]:
    """The paths of requirements that are wheels on this machine."""
    # Markers are cut off first: a string in one may look like a URL.
    found = [line.partition(" ; ")[0].partition(" @ file://")[2] for line in requirements]
    return [unquote(re.split(r"#| ", place)[0]) for place in found if place]


def _spelled(parsed: Requirement) -> str:
    name = canonicalize_name(parsed.name)
    extras = ",".join(sorted(map(canonicalize_name, parsed.extras)))
    versions = ",".join(sorted(map(str, parsed.specifier)))
    if parsed.url is not None:
        versions = f" @ {parsed.url}"
    marker = f" ; {parsed.marker}" if parsed.marker else ""
    return f"{name}[{extras}]{versions}{marker}" if extras else f"{name}{versions}{marker}"


def _checked_url(url: str) -> str:
    """Check the URL of a wheel, and rebuild it from its parts. Raises InvalidRequest.

    uv parses URLs as browsers do: there, `http:/u:p@host/` and `http:\\\\host/` have a host, and
    for `urlsplit` they have none. So URLs that are not written in full are refused.
    """
    if not is_single_line(url) or "\\" in url:
        raise InvalidRequest(f"{url!r:.200} is not a valid URL")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as exc:
        raise InvalidRequest(f"{url!r:.200} is not a valid URL: {exc}") from None
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest(f"{url!r:.200} is a file of another machine")
        path = Path(unquote(parts.path))
        if not path.is_absolute():
            raise InvalidRequest(f"{url!r:.200} is not an absolute path")
        # With a hash, the requirement keeps it, even if the file has changed since.
        if _DIGEST.fullmatch(parts.fragment):
            return f"{_wheel_path(path).as_uri()}#{parts.fragment}"
        return _local_wheel(path).partition(" @ ")[2]
    if parts.scheme not in ("http", "https") or not parts.path.endswith(".whl"):
        raise InvalidRequest(
            f"{url!r} is not a wheel (.whl): packages are never built from source on this machine"
        )
    if "@" in parts.netloc:
        raise InvalidRequest("the URL of a package must not contain a password: put it into .netrc")
    if not host:
        raise InvalidRequest(f"{url!r:.200} names no host: write it like https://host/name.whl")
    return urlunsplit(parts)


def _wheel_path(path: Path) -> Path:
    single_line(str(path), "the path of a wheel")
    path = Path(os.path.abspath(path.expanduser()))
    if not _WHEEL.fullmatch(path.name):
        raise InvalidRequest(f"{path.name!r} is not the name of a wheel: NAME-VERSION-TAGS.whl")
    return path


def _local_wheel(path: Path) -> str:
    path = _wheel_path(path)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise InvalidRequest(f"{path} cannot be read: {exc.strerror}") from None
    name = canonicalize_name(path.name.partition("-")[0])
    return f"{name} @ {path.as_uri()}{HASHED}{digest}"
