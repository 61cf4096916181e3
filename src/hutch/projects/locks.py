"""A lock of Python packages: exactly these versions, and what they depend on.

Which packages of a lock are installed depends on the interpreter: the graph is followed from what
the project asks for, and markers decide at each step. The result is a list of names, versions and
hashes that uv installs without resolving anything.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from hutch.errors import InvalidRequest
from hutch.images.requirements import LONGEST, parse_line, parse_requirement

from .git import GitPackage, GitSource, NotFetched
from .reading import InstallNote, package_name

MOST = 50_000  # packages of a lock, and dependencies between them
HASH = re.compile(r"sha(256:[0-9a-f]{64}|384:[0-9a-f]{96}|512:[0-9a-f]{128})")

_EXTRA = re.compile(r"""\bextra\s*(==|!=)\s*["']([^"']*)["']""")
_TRUE, _FALSE = "python_version > '0'", "python_version < '0'"


@dataclass(frozen=True)
class Dependency:
    """A dependency on one package of the lock, if the marker holds."""

    name: str
    marker: str = ""
    extras: tuple[str, ...] = ()
    version: str = ""  # exactly this one
    allowed: SpecifierSet = field(default_factory=SpecifierSet)


@dataclass
class Locked:
    """A package in one version. Without a line and a source it is not fetched; `why` says why."""

    name: str
    version: str = ""
    line: str = ""
    source: GitSource | None = None
    why: str = ""
    markers: tuple[str, ...] = ()  # one must hold, where a lock has several versions of it
    needs: list[Dependency] = field(default_factory=list)
    extras: dict[str, list[Dependency]] = field(default_factory=dict)

    def take(self, source: GitSource | NotFetched) -> None:
        if isinstance(source, GitSource):
            self.source = source
        else:
            self.why = source.reason


@dataclass(frozen=True)
class Selected:
    """The packages of a lock for one interpreter."""

    lines: tuple[str, ...]
    git: tuple[GitPackage, ...]
    notes: tuple[InstallNote, ...]

    @property
    def hashed(self) -> bool:
        return all(" --hash=" in line for line in self.lines)


@dataclass
class Lock:
    file: str
    update: str  # the command that brings it up to date
    roots: list[Dependency] = field(default_factory=list)
    packages: dict[str, list[Locked]] = field(default_factory=dict)
    extras: frozenset[str] = frozenset()  # that hold in markers
    indexes: set[str] = field(default_factory=set)  # that it names
    folders: list[str] = field(default_factory=list)  # of the project, with source of packages
    _size: int = 0

    def add(self, package: Locked) -> None:
        self._size += 1 + len(package.needs) + sum(map(len, package.extras.values()))
        if self._size > MOST:
            raise InvalidRequest(f"{self.file} has too many packages and dependencies")
        self.packages.setdefault(package.name, []).append(package)

    def select(
        self, environment: Mapping[str, str], declared: Iterable[Dependency] = ()
    ) -> Selected:
        """The packages for an interpreter with these markers. Raises InvalidRequest.

        Notes say what was left out, and where the lock differs from what the project declares.
        """
        holds = _Markers(self.file, environment, self.extras)
        lines, git, notes = dict[str, None](), dict[GitPackage, None](), dict[InstallNote, None]()
        seen: set[tuple[int, str]] = set()
        queue = deque(self.roots)
        while queue:
            dependency = queue.popleft()
            if not holds(dependency.marker):
                continue
            package = self._find(dependency, holds)
            if package is None:
                notes[self._missing(dependency)] = None
                continue
            for extra in ("", *dependency.extras):
                if (id(package), extra) not in seen:
                    seen.add((id(package), extra))
                    queue.extend(package.extras.get(extra, ()) if extra else package.needs)
            if package.why:
                notes[InstallNote(package.why, f"{package.name} {package.version}".strip())] = None
            elif package.line:
                lines[package.line] = None
            elif package.source:
                git[GitPackage(package.name, package.source)] = None
        for dependency in (*self.roots, *declared):
            if holds(dependency.marker) and (note := self._difference(dependency, holds)):
                notes[note] = None
        return Selected(tuple(sorted(lines)), tuple(git), tuple(notes))

    def _difference(self, wanted: Dependency, holds: _Markers) -> InstallNote | None:
        package = self._find(wanted, holds)
        if package is None:
            return self._missing(wanted)
        if not package.version or wanted.allowed.contains(package.version, prereleases=True):
            return None
        return InstallNote(
            f"{self.file} looks out of date: it has {package.name} {package.version}, which is "
            f"used, and the project asks for {wanted.name}{wanted.allowed}: `{self.update}`"
        )

    def _missing(self, wanted: Dependency) -> InstallNote:
        why = f"{self.file} does not have it: bring it up to date with `{self.update}`"
        return InstallNote(why, wanted.name)

    def _find(self, dependency: Dependency, holds: _Markers) -> Locked | None:
        candidates = self.packages.get(dependency.name, [])
        if dependency.version:
            candidates = [
                package for package in candidates if package.version == dependency.version
            ]
        if len(candidates) > 1:
            matching = [
                package
                for package in candidates
                if package.version
                and dependency.allowed.contains(package.version, prereleases=True)
            ]
            candidates = matching or candidates
        if len(candidates) > 1:
            matching = [
                package
                for package in candidates
                if not package.markers or any(map(holds, package.markers))
            ]
            candidates = matching or candidates
        return candidates[0] if candidates else None


class _Markers:
    """Whether a marker holds, for one interpreter."""

    def __init__(self, file: str, environment: Mapping[str, str], extras: frozenset[str]) -> None:
        self._file, self._environment, self._extras = file, dict(environment), extras
        self._known = {"": True}

    def __call__(self, text: str) -> bool:
        if text not in self._known:
            self._known[text] = self._evaluate(text)
        return self._known[text]

    def _evaluate(self, text: str) -> bool:
        try:
            if len(text) > LONGEST:
                raise InvalidMarker(text[:LONGEST])
            # A marker is evaluated with one extra, but a lock has a set of them.
            marker = Marker(with_extras(str(Marker(text)), self._extras))
            return marker.evaluate(self._environment)
        except (
            InvalidMarker,
            UndefinedComparison,
            UndefinedEnvironmentName,
            InvalidVersion,
            RecursionError,
        ):
            raise InvalidRequest(f"{self._file}: a marker is malformed: {text!r:.200}") from None


def with_extras(marker: str, extras: Collection[str]) -> str:
    """The marker with its conditions on `extra` evaluated: these are chosen, and no others."""

    def decided(found: re.Match[str]) -> str:
        return _TRUE if (found[2] in extras) is (found[1] == "==") else _FALSE

    return _EXTRA.sub(decided, marker)


def locked_line(file: str, name: str, version: str, hashes: Iterable[object]) -> str:
    """The line for uv for a package of the index. Raises InvalidRequest."""
    requirement = parse_requirement(f"{name}=={version}", wheels=False)
    given = list(hashes)
    options = hash_options(file, name, given)
    if given and not options:
        kinds = ", ".join(sorted({str(each).partition(":")[0] for each in given}))
        raise InvalidRequest(f"{file}: the hashes of {name} ({kinds:.60}) are too weak to be used")
    return parse_line(" ".join([requirement, *options]))


def hash_options(file: str, name: str, hashes: Iterable[object]) -> list[str]:
    """Hashes that uv knows, as options; older kinds are left out. Raises InvalidRequest."""
    known = dict[str, None]()
    for each in hashes:
        if not isinstance(each, str) or not re.fullmatch(r"[a-z0-9]+:[0-9a-f]+", each):
            raise InvalidRequest(f"{file}: a hash of {name} is malformed: {each!r:.100}")
        if HASH.fullmatch(each):
            known[f"--hash={each}"] = None
    return list(known)


def checked_version(value: object, where: str) -> str:
    try:
        if not isinstance(value, str) or len(value) > 200:
            raise InvalidVersion
        return str(Version(value))
    except InvalidVersion:
        raise InvalidRequest(f"{where}: {value!r:.100} is not a version") from None


def dependency(text: str) -> Dependency:
    """From a requirement in normalized form."""
    from packaging.requirements import Requirement

    parsed = Requirement(re.split(r" --hash=", text)[0])
    return Dependency(
        package_name(parsed.name, "requirement"),
        str(parsed.marker or ""),
        tuple(sorted(map(str, parsed.extras))),
        allowed=parsed.specifier if parsed.url is None else SpecifierSet(),
    )
