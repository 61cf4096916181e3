"""Lock files of Python projects: uv.lock, poetry.lock, Pipfile.lock and pylock.toml.

They are untrusted. Names, versions, markers, hashes and git commits are taken, each
checked; other URLs are not: packages come from the user's index, and hashes prove that
they are the locked ones.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from packaging.specifiers import SpecifierSet

from hutch.errors import InvalidRequest
from hutch.images.requirements import parse_line, parse_requirement
from hutch.lines import is_single_line

from .git import GitSource, NotFetched, checked, from_uv_lock
from .locks import (
    Dependency,
    Lock,
    Locked,
    checked_version,
    hash_options,
    locked_line,
    with_extras,
)
from .reading import (
    ProjectFiles,
    items,
    line,
    package_name,
    plain_name,
    shortened,
    table,
    tables,
    texts,
)
from .versions import specifier

FROM_SOURCE = (
    "it has to be built from source, which is not done: make a wheel of it (`pip wheel --no-deps`) "
    "and name the path of that in its place"
)
ELSEWHERE = "it comes from an address, and only packages of your index are fetched"
NO_FOLDER = "its source is outside of the project"
NOT_READ = ("pdm.lock",)


@dataclass(frozen=True)
class LockRequest:
    """What a lock file is read for: the project, and the extras the user chose."""

    files: ProjectFiles
    declared: list[Dependency]  # by pyproject.toml or Pipfile, for the same extras
    extras: list[str]  # extras and groups, of --extra
    groups: list[str]  # that are installed without being named

    @property
    def names(self) -> list[str]:
        """Of all groups, and extras, that are wanted; each once."""
        return list(dict.fromkeys([*self.groups, *map(plain_name, self.extras)]))


Reader = Callable[[str, LockRequest], Lock]


# --- uv.lock -----------------------------------------------------------------------------


def read_uv(file: str, request: LockRequest) -> Lock:
    about = request.files.toml(file) or {}
    if about.get("version") != 1:
        raise InvalidRequest(
            f"{file} has version {about.get('version')!r:.20}; only 1 is supported"
        )
    lock = Lock(file, "uv lock")
    local: list[Locked] = []
    for entry in tables(about.get("package"), f"{file}: package"):
        package = _uv_package(lock, request.files, entry)
        lock.add(package)
        folder = _uv_folder(entry)
        if folder == ".":
            _uv_root(lock, package, entry, request)
        elif folder is not None:
            local.append(package)
    if not lock.roots and local:  # a workspace without a project at its top: all its members
        lock.roots = [Dependency(each.name) for each in local]
    manifest = table(about.get("manifest"), f"{file}: manifest")
    groups = table(manifest.get("dependency-groups"), f"{file}: dependency-groups")
    for group in request.names:
        for each in tables(groups.get(group), f"{file}: {group}"):
            lock.roots.append(_uv_dependency(file, each))
    return lock


def _uv_root(lock: Lock, package: Locked, entry: dict[str, object], request: LockRequest) -> None:
    where = f"{lock.file}: {package.name}"
    groups = {
        name: [_uv_dependency(lock.file, each) for each in tables(value, where)]
        for name, value in table(entry.get("dev-dependencies"), where).items()
    }
    wanted = tuple(map(plain_name, request.extras))
    lock.roots += [Dependency(package.name, extras=wanted)]
    for group in request.names:
        lock.roots += groups.get(group, [])
    # tool.uv.conflicts: markers say which of two extras or groups is chosen.
    own = f"{len(package.name)}-{package.name}"
    lock.extras |= {f"{kind}-{own}-{name}" for name in request.names for kind in ("extra", "group")}


def _uv_package(lock: Lock, files: ProjectFiles, entry: dict[str, object]) -> Locked:
    name = package_name(entry.get("name"), lock.file)
    where = f"{lock.file}: {name}"
    version = entry.get("version")
    package = Locked(name, checked_version(version, where) if version is not None else "")
    package.markers = tuple(texts(entry.get("resolution-markers"), where))
    package.needs = [
        _uv_dependency(lock.file, each) for each in tables(entry.get("dependencies"), where)
    ]
    package.extras = {
        plain_name(extra): [_uv_dependency(lock.file, each) for each in tables(value, where)]
        for extra, value in table(entry.get("optional-dependencies"), where).items()
    }
    source = table(entry.get("source"), where)
    wheels = list(tables(entry.get("wheels"), where))
    hashes = [wheel["hash"] for wheel in wheels if "hash" in wheel]
    if "registry" in source:
        _note_index(lock, line(source["registry"], where))
        if wheels:
            package.line = locked_line(lock.file, name, package.version, hashes)
        else:
            package.why = FROM_SOURCE
    elif "git" in source:
        package.take(from_uv_lock(line(source["git"], where)))
    elif "path" in source and str(source["path"]).endswith(".whl"):
        path = local_wheel(files, line(source["path"], where), "")
        package.line = _wheel_line(lock.file, name, path, hashes)
    elif "path" in source or "url" in source:
        package.why = FROM_SOURCE if "path" in source else ELSEWHERE
    elif (folder := _uv_folder(entry)) is None:
        package.why = "its source is of an unknown kind"
    else:
        package.why = _local_folder(lock, files, folder)
    return package


def _uv_folder(entry: dict[str, object]) -> str | None:
    source = entry.get("source")
    for kind in ("virtual", "editable", "directory"):
        place = source.get(kind) if isinstance(source, dict) else None
        if isinstance(place, str):
            return posixpath.normpath(place)
    return None


def _uv_dependency(file: str, entry: dict[str, object]) -> Dependency:
    name = package_name(entry.get("name"), file)
    where = f"{file}: {name}"
    version = entry.get("version")
    extras = entry.get("extra", entry.get("extras"))
    extras = [extras] if isinstance(extras, str) else extras
    return Dependency(
        name,
        line(entry.get("marker"), where),
        tuple(map(plain_name, texts(extras, where))),
        checked_version(version, where) if version is not None else "",
    )


# --- poetry.lock -------------------------------------------------------------------------


def read_poetry(file: str, request: LockRequest) -> Lock:
    about = request.files.toml(file) or {}
    metadata = table(about.get("metadata"), f"{file}: metadata")
    kind = metadata.get("lock-version")
    if not isinstance(kind, str) or not re.fullmatch(r"[12]\.\d+", kind):
        raise InvalidRequest(f"{file} has lock-version {kind!r:.20}; only 1 and 2 are supported")
    older = table(metadata.get("files"), f"{file}: metadata.files")
    extras = frozenset(map(plain_name, request.extras))
    lock = Lock(file, "poetry lock", list(request.declared), extras=extras)
    for entry in tables(about.get("package"), f"{file}: package"):
        lock.add(_poetry_package(lock, request.files, entry, older))
    return lock


def _poetry_package(
    lock: Lock, files: ProjectFiles, entry: dict[str, object], older: dict[str, object]
) -> Locked:
    name = package_name(entry.get("name"), lock.file)
    where = f"{lock.file}: {name}"
    package = Locked(name, checked_version(entry.get("version"), where))
    marker = entry.get("markers")
    package.markers = (line(marker, where),) if isinstance(marker, str) else ()
    offered = {
        extra: {plain_name(re.split(r"[^\w.-]", each.strip())[0]) for each in texts(value, where)}
        for extra, value in table(entry.get("extras"), where).items()
    }
    for key, value in table(entry.get("dependencies"), where).items():
        for each in value if isinstance(value, list) else [value]:
            dependency, optional = _poetry_dependency(lock.file, key, each)
            if not optional:
                package.needs.append(dependency)
            for extra, names in offered.items():
                if optional and dependency.name in names:
                    # Its marker says `extra == "NAME"`: of this package, not of the project.
                    marker = with_extras(dependency.marker, {extra, plain_name(extra)})
                    of_extra = package.extras.setdefault(plain_name(extra), [])
                    of_extra.append(replace(dependency, marker=marker))
    source = table(entry.get("source"), where)
    artifacts = list(tables(entry.get("files", older.get(str(entry.get("name")))), where))
    wheels = [each for each in artifacts if str(each.get("file")).endswith(".whl")]
    place = line(source.get("url"), where)
    match source.get("type"):
        case None | "legacy":
            _note_index(lock, place)
            if wheels or not artifacts:
                hashes = [each.get("hash") for each in wheels]
                package.line = locked_line(lock.file, name, package.version, hashes)
            else:
                package.why = FROM_SOURCE
        case "git":
            package.take(_locked(place, source, "resolved_reference", where))
        case "file" if place.endswith(".whl"):
            path = local_wheel(files, place, "")
            package.line = _wheel_line(lock.file, name, path, [each.get("hash") for each in wheels])
        case "directory":
            package.why = _local_folder(lock, files, place)
        case "url":
            package.why = ELSEWHERE
        case _:
            package.why = FROM_SOURCE
    return package


def _poetry_dependency(file: str, key: object, value: object) -> tuple[Dependency, bool]:
    name = package_name(key, file)
    where = f"{file}: {name}"
    about = {"version": value} if isinstance(value, str) else table(value, where)
    version = specifier(line(about.get("version"), where) or "*")
    return Dependency(
        name,
        line(about.get("markers"), where),
        tuple(map(plain_name, texts(about.get("extras"), where))),
        allowed=SpecifierSet(version or ""),
    ), about.get("optional") is True


# --- Pipfile.lock ------------------------------------------------------------------------


def read_pipfile_lock(file: str, request: LockRequest) -> Lock:
    about = request.files.json(file) or {}
    lock = Lock(file, "pipenv lock")
    in_pipfile = {each.name for each in request.declared}
    for section in ("default", "develop", *request.extras):
        for key, value in table(about.get(section), f"{file}: {section}").items():
            name = package_name(key, file)
            if name in lock.packages:  # it is in two sections, in one version
                continue
            entry = table(value, f"{file}: {name}")
            marker = line(entry.get("markers"), f"{file}: {name}")
            if entry.get("version") == "*" and entry.keys().isdisjoint(("git", "path", "file")):
                # So pipenv writes what its own interpreter did not need; it leaves the marker out.
                # If the Pipfile has it, its marker there decides whether it is missing.
                if name not in in_pipfile:
                    lock.roots.append(Dependency(name, marker))
                continue
            lock.add(_pipfile_package(lock, request.files, name, entry))
            lock.roots.append(Dependency(name, marker))
    meta = table(about.get("_meta"), f"{file}: _meta")
    for source in tables(meta.get("sources"), f"{file}: sources"):
        _note_index(lock, line(source.get("url"), f"{file}: sources"))
    return lock


def _pipfile_package(
    lock: Lock, files: ProjectFiles, name: str, entry: dict[str, object]
) -> Locked:
    where = f"{lock.file}: {name}"
    package = Locked(name)
    if "git" in entry:
        place = line(entry["git"], where)
        package.take(_locked(place, entry, "ref", where))
    elif place := line(entry.get("path", entry.get("file")), where):
        if place.endswith(".whl") and "://" not in place:
            path = local_wheel(files, place, "")
            package.line = _wheel_line(lock.file, name, path, items(entry.get("hashes"), where))
        else:
            package.why = ELSEWHERE if "://" in place else _local_folder(lock, files, place)
    else:
        version = line(entry.get("version"), where)
        if not version.startswith("=="):
            raise InvalidRequest(
                f"{where} has no version: bring it up to date with `{lock.update}`"
            )
        package.version = checked_version(version.removeprefix("=="), where)
        hashes = items(entry.get("hashes"), where)
        package.line = locked_line(lock.file, name, package.version, hashes)
    return package


# --- pylock.toml -------------------------------------------------------------------------


def read_pylock(file: str, request: LockRequest) -> Lock:
    about = request.files.toml(file) or {}
    if not re.fullmatch(r"1\.\d+", str(about.get("lock-version"))):
        raise InvalidRequest(
            f"{file} has lock-version {about.get('lock-version')!r:.20}; only 1.0 is supported"
        )
    lock = Lock(file, "uv export --format pylock.toml --output-file pylock.toml")
    extras = set(map(plain_name, request.extras))
    offered = texts(about.get("extras"), file) + texts(about.get("dependency-groups"), file)
    if unknown := extras - set(map(plain_name, offered)):
        raise InvalidRequest(f"--extra {min(unknown)}: {file} has no extra or group of that name")
    groups = extras | set(map(plain_name, texts(about.get("default-groups"), file)))
    for entry in tables(about.get("packages"), f"{file}: packages"):
        package = _pylock_package(lock, request.files, entry)
        marker = line(entry.get("marker"), f"{file}: {package.name}")
        marker = _with_groups(marker, groups, extras)
        package.markers = (marker,) if marker else ()
        lock.add(package)
        lock.roots.append(Dependency(package.name, marker, version=package.version))
    return lock


def _with_groups(marker: str, groups: set[str], extras: set[str]) -> str:
    """The marker of a lock, with its conditions on groups and extras evaluated."""

    def decided(match: re.Match[str]) -> str:
        chosen = groups if match["of"] == "dependency_groups" else extras
        is_so = (plain_name(match["name"]) in chosen) is not bool(match["no"])
        return f"python_version {'>' if is_so else '<'} '0'"

    return re.sub(
        r"""["'](?P<name>[\w.-]+)["'] (?P<no>not )?in (?P<of>extras|dependency_groups)""",
        decided,
        marker,
    )


def _pylock_package(lock: Lock, files: ProjectFiles, entry: dict[str, object]) -> Locked:
    name = package_name(entry.get("name"), lock.file)
    where = f"{lock.file}: {name}"
    version = entry.get("version")
    package = Locked(name, checked_version(version, where) if version is not None else "")
    wheels = list(tables(entry.get("wheels"), where))
    vcs, folder = table(entry.get("vcs"), where), table(entry.get("directory"), where)
    if wheels and package.version:
        _note_index(lock, line(entry.get("index"), where))
        hashes = [
            f"{kind}:{each}"
            for wheel in wheels
            for kind, each in table(wheel.get("hashes"), where).items()
        ]
        package.line = locked_line(lock.file, name, package.version, hashes)
    elif vcs:
        place = line(vcs.get("url", vcs.get("path")), where)
        if vcs.get("type") == "git":
            package.take(_locked(place, vcs, "commit-id", where))
        else:
            package.why = ELSEWHERE
    elif folder:
        package.why = _local_folder(lock, files, line(folder.get("path"), where))
    else:
        package.why = ELSEWHERE if "archive" in entry else FROM_SOURCE
    return package


# --- what they share ---------------------------------------------------------------------


def local_wheel(files: ProjectFiles, place: str, beside: str) -> str:
    """The path of a wheel in the project. Raises InvalidRequest."""
    inner = posixpath.normpath(posixpath.join(beside, place))
    path = (files.top / inner).resolve()
    if not path.is_relative_to(files.top) or not path.is_file():
        raise InvalidRequest(f"there is no wheel {shortened(place)} in the project")
    return str(path)


def _locked(
    place: str, entry: dict[str, object], commit: str, where: str
) -> GitSource | NotFetched:
    """The git source of a lock's entry. `commit` is the name of the field with the commit."""
    revision, folder = line(entry.get(commit), where), line(entry.get("subdirectory"), where)
    return checked(place, place, revision, folder, locked=True)


def _local_folder(lock: Lock, files: ProjectFiles, place: str) -> str:
    """Add the folder of a package in the project. Returns why not, if that is impossible."""
    folder = posixpath.normpath(place)
    if not place or not folder_inside(files, folder):
        return NO_FOLDER
    lock.folders.append(folder)
    return ""


def folder_inside(files: ProjectFiles, folder: str) -> bool:
    if folder.startswith(("/", "..")) or not is_single_line(folder):
        return False
    path = (files.top / folder).resolve()
    return path.is_dir() and path.is_relative_to(files.top)


def _wheel_line(file: str, name: str, path: str, hashes: Iterable[object]) -> str:
    requirement = parse_requirement(path)
    if requirement.partition(" @ ")[0] != name:
        raise InvalidRequest(f"{file}: {posixpath.basename(path)} is not a wheel of {name}")
    return parse_line(" ".join([requirement, *hash_options(file, name, hashes)]))


def _note_index(lock: Lock, url: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    if parts.hostname and len(lock.indexes) < 10:
        lock.indexes.add(f"{parts.scheme}://{parts.hostname}{parts.path}")


READERS: dict[str, Reader] = {
    "uv.lock": read_uv,
    "pylock.toml": read_pylock,
    "poetry.lock": read_poetry,
    "Pipfile.lock": read_pipfile_lock,
}
