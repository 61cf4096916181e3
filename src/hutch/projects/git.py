"""Packages in git repositories: which repository, which revision, and whether we fetch it.

The text that names one is untrusted, and its parts become words of a command line. So each part is
checked against a strict pattern, and only HTTPS is allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from hutch.images.git import HOSTS, find_git
from hutch.lines import is_single_line

from .reading import line, shortened

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_PATH = re.compile(r"(/[A-Za-z0-9_~%+.][A-Za-z0-9_~%+.-]*)+/?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+@-]{0,199}")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .+-]*(/[A-Za-z0-9_.][A-Za-z0-9_ .+-]*){0,20}")
_WHEEL = "put a wheel (.whl) of it into the project"


@dataclass(frozen=True)
class GitSource:
    """Where the source of a package is. Every part was checked."""

    url: str
    revision: str = ""  # a branch, a tag or a commit; by default, the default branch
    folder: str = ""  # the folder of the repository that has the package


@dataclass(frozen=True)
class GitPackage:
    """A package that is built from a git repository."""

    name: str
    source: GitSource
    extras: tuple[str, ...] = ()
    marker: str = ""


@dataclass(frozen=True)
class NotFetched:
    """A source that is refused, and why."""

    reason: str


def from_url(text: str) -> GitSource | NotFetched:
    """As pip has it: git+https://host/path@revision#subdirectory=folder."""
    text, _, fragment = text.removeprefix("git+").partition("#")
    head, at, revision = text.rpartition("@")
    if not at or head.count("/") < 3:  # an @ before the path belongs to user@host
        head, revision = text, ""
    options = parse_qs(fragment)
    return checked(text, head, unquote(revision), options.get("subdirectory", [""])[-1])


def from_table(table: Mapping[str, object], where: str) -> GitSource | NotFetched:
    """As uv, Poetry and Pipenv have it in their tables. Raises InvalidRequest."""
    names = ("rev", "tag", "branch", "ref")
    revision = next((line(table[name], where) for name in names if table.get(name)), "")
    url = line(table.get("git"), where)
    return checked(url, url, revision, line(table.get("subdirectory"), where))


def from_uv_lock(text: str) -> GitSource | NotFetched:
    """https://host/path?subdirectory=folder&rev=asked#commit"""
    address, _, commit = text.partition("#")
    url, _, query = address.partition("?")
    return checked(address, url, commit, parse_qs(query).get("subdirectory", [""])[-1], locked=True)


def checked(
    shown: str, url: str, revision: str, folder: str, *, locked: bool = False
) -> GitSource | NotFetched:
    """`shown`: what people wrote. `locked`: it has to name a commit."""
    at = shortened(shown)
    if not is_single_line(url + revision + folder):
        return NotFetched("its address has invalid characters")
    try:
        parts = urlsplit(url.removeprefix("git+"))
        host, port, password = parts.hostname or "", parts.port, parts.password
    except ValueError:
        return NotFetched(f"{at} is not a valid address")
    if parts.scheme != "https":
        return NotFetched(f"it comes from {at}, and only https repositories are fetched: {_WHEEL}")
    if password:
        return NotFetched(
            f"the address {at} has a password in it, and credentials are not used: {_WHEEL}"
        )
    if not _HOST.fullmatch(host) or not _PATH.fullmatch(parts.path) or parts.query:
        return NotFetched(f"{at} is not the address of a repository")
    if revision and (not _REVISION.fullmatch(revision) or re.search(r"\.\.|@\{|//", revision)):
        return NotFetched(f"{shortened(revision)!r} is not a revision of {at}")
    if locked and not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", revision):
        return NotFetched(f"the lock file names no commit of {at}")
    folder = folder.strip("/")
    if folder and (not _FOLDER.fullmatch(folder) or ".." in folder.split("/")):
        return NotFetched(f"{shortened(folder)!r} is not a folder of {at}")
    allowed = os.environ.get(HOSTS)
    where = f"{host}:{port}" if port not in (None, 443) else host
    if allowed is not None and where not in re.split(r"[\s,]+", allowed.lower()):
        return NotFetched(f"it comes from {at}, and {HOSTS} does not name {where}")
    if find_git() is None:
        return NotFetched(f"it comes from {at}, and there is no git on this machine: install git")
    return GitSource(f"https://{where}{parts.path.rstrip('/')}", revision, folder)
