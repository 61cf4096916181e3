"""Installs Python packages for the interpreter of a box, into a folder mounted there."""

from __future__ import annotations

import hashlib
import re
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.markers import Marker, default_environment
from packaging.specifiers import SpecifierSet

from hutch.errors import InvalidRequest
from hutch.images.environment import VERSION
from hutch.images.git import COMMIT
from hutch.images.install import compile_modules, errors_of_packages, is_script, make_readable
from hutch.images.installer import walk_tree
from hutch.images.requirements import HASHED, local_wheels, requirements_file
from hutch.images.uv import NoWheel, Report, pip_install
from hutch.images.wheels import read_wheel

from .git import GitPackage
from .lock_files import ELSEWHERE, FROM_SOURCE
from .needs import PythonNeeds
from .reading import InstallNote, plain_name

FORMAT = 2  # of the folder; with a new number, all are installed again


@dataclass(frozen=True)
class Interpreter:
    """The interpreter to install for. Without a platform, the one that runs Hutch."""

    version: str = VERSION
    platform: str = ""  # as uv calls it

    def markers(self) -> dict[str, str]:
        """The values that markers of requirements are compared with."""
        known = {name: str(value) for name, value in default_environment().items()}
        if not self.platform:
            return known
        # Like uv: for another interpreter, the first release of its version is assumed.
        full = f"{self.version}.0"
        return known | {
            "python_version": self.version,
            "python_full_version": full,
            "implementation_version": full,
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_machine": self.platform.partition("-")[0],
            "platform_release": "",
            "platform_version": "",
        }


@dataclass(frozen=True)
class Wheels:
    """What to install for one interpreter: lines of requirements files, and how to read them."""

    packages: tuple[str, ...]
    bounds: tuple[str, ...] = ()
    exact: bool = False  # without their dependencies
    hashed: bool = False  # each must have a hash
    indexes: tuple[str, ...] = ()  # that a lock names
    # Packages from elsewhere are not installed, even if another package needs them: on the
    # index, anyone may own the name.
    left_out: tuple[str, ...] = ()
    git: tuple[GitPackage, ...] = ()  # to be built first; see `with_built`
    overrides: tuple[str, ...] = ()  # replace what packages require of these

    def with_built(self, asked: Iterable[str], others: Iterable[str]) -> Wheels:
        """These, and local wheels that were built from git, with their hashes.

        `others` are dependencies of the `asked` ones.
        """
        asked, others = list(asked), list(others)
        built = {_name(line) for line in (*asked, *others)}
        lines = list(asked)
        if self.hashed:
            lines = [f"{line} --hash=sha256:{line.partition(HASHED)[2]}" for line in asked]
        return replace(
            self,
            packages=(*self.packages, *lines),
            left_out=tuple(name for name in self.left_out if name not in built),
            overrides=() if self.exact else (*asked, *others),
            git=(),
        )


def select(needs: PythonNeeds, python: Interpreter) -> tuple[Wheels, list[InstallNote]]:
    """The part of the project's needs that applies to this interpreter. Raises InvalidRequest."""
    markers = python.markers()
    full = markers["python_full_version"]
    notes = []
    for file, allowed in needs.pythons:
        if not any(SpecifierSet(one).contains(full, prereleases=True) for one in allowed):
            asked = " or ".join(allowed)
            notes.append(
                InstallNote(f"{file} requires Python {asked}, but the box has {python.version}")
            )
    if needs.lock is None:
        git = tuple(each for each in needs.git if holds(each.marker, markers))
        if needs.hashed and (loose := [each for each in git if not _is_pinned(each)]):
            raise InvalidRequest(
                f"{loose[0].name} names no commit of its repository, but each package must be "
                "exact (--require-hashes)"
            )
        return Wheels(
            needs.packages, needs.bounds, hashed=needs.hashed, left_out=needs.left_out, git=git
        ), notes
    selected = needs.lock.select(markers, needs.declared)
    wheels = Wheels(
        selected.lines,
        exact=True,
        hashed=selected.hashed,
        indexes=tuple(sorted(needs.lock.indexes)),
        git=selected.git,
    )
    return wheels, [*notes, *selected.notes]


def holds(marker: str, markers: dict[str, str]) -> bool:
    """Whether a marker holds. Raises InvalidRequest."""
    try:
        return not marker or Marker(marker).evaluate(markers)
    except (ValueError, RecursionError):  # all errors of `packaging` are a ValueError
        raise InvalidRequest(f"a marker is malformed: {marker!r:.200}") from None


def _is_pinned(package: GitPackage) -> bool:
    return COMMIT.fullmatch(package.source.revision) is not None


def key_of(wheels: Wheels, python: Interpreter) -> str:
    """The name of the cached folder for these."""
    about = [f"python {FORMAT}", python.version, python.platform or " ".join(sys.version.split())]
    about += [f"{wheels.exact} {wheels.hashed}", *wheels.packages, "", *wheels.bounds]
    about += ["", *wheels.left_out, "", *wheels.overrides]
    return hashlib.sha256("\0".join(about).encode()).hexdigest()[:32]


def install(
    wheels: Wheels, python: Interpreter, inside: str, folder: Path, lock: int, report: Report
) -> list[InstallNote]:
    """Install into an empty `folder`, which boxes have at `inside`, and compile its modules.

    Returns and raises what `install_only` does.
    """
    notes = install_only(wheels, python, folder, lock, report)
    if python.version == VERSION:
        compile_modules(folder, inside, lock, report)
        make_readable(folder)
    return notes


def install_only(
    wheels: Wheels, python: Interpreter, folder: Path, lock: int, report: Report
) -> list[InstallNote]:
    """Install into `folder`, an empty folder.

    Returns notes on packages that were left out because they have no wheel. Raises what
    `pip_install` raises.
    """
    notes = []
    while wheels.packages:
        try:
            _install(wheels, python, folder, lock, report)
            break
        except NoWheel as exc:
            rest = tuple(line for line in wheels.packages if _name(line) != plain_name(exc.package))
            if rest == wheels.packages:  # another package depends on it
                raise
            why = FROM_SOURCE if exc.source else f"{exc}: name the path of one in its place"
            notes.append(InstallNote(why, exc.package))
            wheels = replace(wheels, packages=rest)
    with errors_of_packages():
        for name in ("-r.txt", "-c.txt", "--override.txt", ".lock"):
            (folder / name).unlink(missing_ok=True)
        _take_out_links(folder)
        _mend_scripts(folder / "bin")
    make_readable(folder)
    return notes


def _install(wheels: Wheels, python: Interpreter, folder: Path, lock: int, report: Report) -> None:
    words = ["--target", str(folder)]
    if wheels.exact:
        words.append("--no-deps")
    if wheels.hashed:
        words.append("--require-hashes")
    if python.platform:
        words += ["--python-version", python.version, "--python-platform", python.platform]
    overrides = [f"{name} ; python_version < '0'" for name in wheels.left_out]
    overrides += wheels.overrides
    files = [("-r", wheels.packages), ("-c", wheels.bounds)]
    files += [("--override", tuple(overrides))] if overrides else []
    for option, lines in files:
        file = folder / f"{option}.txt"
        file.write_text(requirements_file(lines), encoding="utf-8", newline="")
        words += [option, str(file)]
    shown = local_wheels((*wheels.packages, *wheels.bounds, *wheels.overrides))
    if not wheels.exact:
        for wheel in map(Path, shown):
            _check_needs(wheel, lock, report)
    try:
        pip_install(words, folder, lock, report, python.version, shown)
    except NoWheel:
        raise
    except InvalidRequest as exc:
        if len(wheels.indexes) < 2:
            raise
        named = ", ".join(wheels.indexes)
        raise InvalidRequest(
            f"{exc} (the lock file names several indexes, {named}: set UV_DEFAULT_INDEX and "
            "UV_INDEX to use them)"
        ) from None


def _check_needs(wheel: Path, lock: int, report: Report) -> None:
    """Raises InvalidRequest if a wheel would have uv fetch something from an address.

    Markers are ignored: uv might evaluate one differently. Addresses of git repositories are
    harmless, since uv has no git here.
    """
    for need in read_wheel(wheel, lock, report).direct:
        if not str(need.url).startswith("git+"):
            raise InvalidRequest(f"{wheel.name} needs {need.name}, but {ELSEWHERE}")


def _name(line: str) -> str:
    found = re.match(r"[a-z0-9-]+", line)
    return found[0] if found else ""


def _take_out_links(folder: Path) -> None:
    """Remove links: no wheel should have any. Raises OSError if a folder cannot be read."""
    for path, status in walk_tree(folder):
        if stat.S_ISLNK(status.st_mode):
            (folder / path).unlink()


def _mend_scripts(place: Path) -> None:
    """Make scripts use the box's interpreter instead of this machine's."""
    for script in filter(is_script, place.glob("*")):
        text = script.read_bytes()
        # The second form is for a path that is too long for a first line.
        body = re.sub(rb"\A#!(/bin/sh\n'''exec' [^\n]*\n' '''|[^\n]*python[^\n]*)\n", b"", text)
        if body != text:
            script.write_bytes(b"#!/usr/bin/env python3\n" + body)
