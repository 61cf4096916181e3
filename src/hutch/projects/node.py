"""Node packages: reads package.json and its lock file, and runs npm to install them.

npm sees a folder with names, versions and hashes only: no settings of the project,
no scripts, and no URLs of the lock file. Scripts of packages never run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hutch.errors import BackendUnavailable, HutchError, InvalidRequest
from hutch.images.install import errors_of_packages, make_readable
from hutch.images.installer import cache_for, check_links, confinement, outside_usr, started
from hutch.images.uv import Progress, Report
from hutch.lines import single_line

from .reading import InstallNote, shortened

LARGEST_LIST = 64 << 20  # bytes of npm's list of what it installed
FORMAT = 1  # of the folder; with a new number, all are installed again
LOCKS = ("npm-shrinkwrap.json", "package-lock.json")  # npm takes the first
OTHER_LOCKS = ("yarn.lock", "pnpm-lock.yaml", "bun.lock", "bun.lockb")
WANTED = ("dependencies", "devDependencies", "optionalDependencies", "peerDependencies")
KEPT = ("version", "integrity", "dependencies", "optionalDependencies", "peerDependencies",
        "peerDependenciesMeta", "dev", "optional", "devOptional", "peer", "os", "cpu", "libc",
        "engines", "bin", "inBundle", "bundleDependencies", "hasInstallScript", "license",
        "name")  # fmt: skip
PASSED_ON = re.compile(
    r"PATH|HOME|LANG|(npm_config|NPM_CONFIG)_(registry|REGISTRY|cache|CACHE|.*_proxy|.*proxy"
    r"|cafile|CAFILE|ca|userconfig|USERCONFIG|strict_ssl|//.*|@.*)|NODE_EXTRA_CA_CERTS"
    r"|SSL_CERT_(FILE|DIR)|(HTTPS?|ALL|NO)_PROXY|(https?|all|no)_proxy"
)
_NAME = re.compile(r"(@[a-z0-9~-][a-z0-9._~-]*/)?[A-Za-z0-9~_-][A-Za-z0-9._~-]*")
_RANGE = re.compile(r"(npm:(@[\w.~-]+/)?[\w.~-]+@?)?[\w.^~<>=|*+ -]*", re.ASCII)
_FILE = re.compile(r"\s*\..*|.*\.(tgz|tar|tar\.gz)\s*", re.IGNORECASE)  # npm takes it for a path
_VERSION = re.compile(r"\d+\.\d+\.\d+([-+][\w.+-]+)?", re.ASCII)
_HASH = r"sha[0-9]+-[A-Za-z0-9+/=]+(\?[!-~]*)?"
_HASHES = re.compile(rf"{_HASH}( +{_HASH})*")
_PROGRAM = re.compile(r"(@[\w.~-]+/)?[\w.+~-]+", re.ASCII)
_PLACE = re.compile(rf"(node_modules/{_NAME.pattern})(/node_modules/{_NAME.pattern})*")
_FETCHED = re.compile(r"npm http fetch GET (\d+) \S+/((?:@|%40)?[\w.%~-]+?)(?:\.tgz)? ")


@dataclass(frozen=True)
class NodeNeeds:
    package: bytes  # a package.json
    lock: bytes | None = None  # a package-lock.json


@dataclass(frozen=True)
class NodePlatform:
    """Which builds of a package a box can use, as npm names them."""

    cpu: str = "x64"
    libc: str = "glibc"


@dataclass(frozen=True)
class NodeRead:
    """The dependencies of a Node project, and the files they were read from."""

    needs: NodeNeeds | None = None
    files: tuple[str, ...] = ()
    notes: tuple[InstallNote, ...] = ()


def read_node(read: Callable[[str], bytes | None]) -> NodeRead:
    """The dependencies in package.json and its lock file. Raises InvalidRequest."""
    data = read("package.json")
    about = {} if data is None else _object("package.json", data)
    notes: list[InstallNote] = []
    sections = {key: _of_registry(about, key, notes) for key in WANTED if about.get(key)}
    if not any(sections.get(key) for key in WANTED[:3]):
        return NodeRead(notes=tuple(notes))
    if about.get("workspaces"):
        why = "package.json has workspaces, which are not installed: use --mount"
        return NodeRead(notes=(InstallNote(why),))
    package: dict[str, object] = {
        "name": "project",
        "version": "0.0.0",
        "private": True,
        **sections,
    }
    if isinstance(overrides := about.get("overrides"), dict):
        package["overrides"] = _overrides(overrides)
    lock_file = next(((name, data) for name in LOCKS if (data := read(name)) is not None), None)
    lock = None if lock_file is None else _clean_lock(*lock_file, package, notes)
    others = [name for name in OTHER_LOCKS if read(name) is not None]
    files = ("package.json",) if lock_file is None else ("package.json", lock_file[0])
    for name in others:
        why = (
            "versions are the newest that package.json allows. To pin them, make a lock file that "
            "is read: `npm install --package-lock-only`"
        )
        if lock_file:
            why = f"versions are those of {lock_file[0]}"
        notes.append(InstallNote(f"{name} is not read: {why}"))
    needs = NodeNeeds(_dump(package), None if lock is None else _dump(lock))
    return NodeRead(needs, files, tuple(dict.fromkeys(notes)))


def _of_registry(about: dict[str, object], key: str, notes: list[InstallNote]) -> dict[str, str]:
    """The packages of package.json that come from the registry."""
    packages = about[key]
    if isinstance(packages, dict):
        elsewhere = {
            name: version
            for name, version in packages.items()
            if isinstance(version, str) and not _is_range(version)
        }
        for name, version in elsewhere.items():
            single_line(version, "package.json")
            notes.append(_elsewhere(_name("package.json", name), version))
        packages = {name: version for name, version in packages.items() if name not in elsewhere}
    return _ranges("package.json", {key: packages}, key)


def _elsewhere(name: str, place: str) -> InstallNote:
    return InstallNote(
        f"it comes from {shortened(place)!r}, and only packages of the registry are fetched", name
    )


def _object(name: str, data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{name} cannot be read: {exc}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{name} must be an object")
    return found


def _ranges(file: str, about: dict[str, object], key: str) -> dict[str, str]:
    found = about[key]
    if not isinstance(found, dict):
        raise InvalidRequest(f"{file}: {key} must be an object, not {found!r:.60}")
    return {_name(file, name): _range(file, name, asked) for name, asked in found.items()}


def _name(file: str, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{file}: invalid package name {name!r:.200}")
    return name


def _range(file: str, name: str, asked: object) -> str:
    if not isinstance(asked, str) or not _is_range(asked):
        raise InvalidRequest(
            f"{file}: {name} is {asked!r:.200}: only packages of the registry are fetched, "
            "by name and version"
        )
    return asked


def _is_range(asked: str) -> bool:
    return bool(_RANGE.fullmatch(asked)) and not _is_file(asked)


def _is_file(asked: str) -> bool:
    version = asked.rpartition("@")[2].removeprefix("npm:")
    return any(_FILE.fullmatch(each) for each in (asked, version))


def _overrides(given: dict[str, object], depth: int = 0) -> dict[str, object]:
    if depth > 20:
        raise InvalidRequest("package.json: overrides are nested too deeply")
    clean: dict[str, object] = {}
    for key, value in given.items():
        name, at, version = key[1:].partition("@")
        if key != "." and not _NAME.fullmatch(key[:1] + name):
            raise InvalidRequest(f"package.json: invalid package name {key!r:.200}")
        if at:
            _range("package.json", key, version)
        if isinstance(value, dict):
            clean[key] = _overrides(value, depth + 1)
        elif isinstance(value, str) and value.startswith("$") and _NAME.fullmatch(value[1:]):
            clean[key] = value
        else:
            clean[key] = _range("package.json", key, value)
    return clean


def _clean_lock(
    name: str, data: bytes, package: dict[str, object], notes: list[InstallNote]
) -> dict[str, object]:
    """The lock file without its URLs: it pins versions and hashes of contents."""
    lock = _object(name, data)
    packages = lock.get("packages")
    if not isinstance(packages, dict):
        raise InvalidRequest(
            f"{name} has an old format: run `npm install` of npm 7 or later to convert it"
        )
    clean: dict[str, object] = {"": package}
    for place, entry in packages.items():
        if not isinstance(entry, dict):
            raise InvalidRequest(f"{name}: {place!r:.200} must be an object, not {entry!r:.60}")
        resolved = entry.get("resolved", "https:")
        if place == "" or (not place.startswith("node_modules/") and not entry.get("link")):
            continue  # the project itself, and the targets of links
        if not _PLACE.fullmatch(place) or not isinstance(resolved, str):
            raise InvalidRequest(f"{name}: {place!r:.200} is not a valid path of a package")
        if entry.get("link") or not resolved.startswith(("https:", "http:")):
            notes.append(
                _elsewhere(place.rpartition("node_modules/")[2], single_line(resolved, name))
            )
            continue
        clean[place] = _clean_entry(name, place, entry)
    return {
        "name": "project",
        "version": "0.0.0",
        "lockfileVersion": 3,
        "requires": True,
        "packages": clean,
    }


def _clean_entry(file: str, place: str, entry: dict[str, object]) -> dict[str, object]:
    clean = {key: entry[key] for key in KEPT if key in entry}
    for key in WANTED:
        if key in clean:
            clean[key] = _ranges(file, clean, key)
    if "name" in clean:
        _name(file, clean["name"])
    for key, form in (("version", _VERSION), ("integrity", _HASHES)):
        value = clean.get(key)
        if value is not None and not (isinstance(value, str) and form.fullmatch(value)):
            raise InvalidRequest(
                f"{file}: {place!r:.200} does not come from the registry: its {key} is "
                f"{value!r:.200}"
            )
    _check_texts(f"{file}: {place}", clean)
    bins = clean.get("bin", {})
    for name in bins if isinstance(bins, dict) else ():
        if not _PROGRAM.fullmatch(name):
            raise InvalidRequest(f"{file}: {place!r:.200} has a program called {name!r:.200}")
    for path in bins.values() if isinstance(bins, dict) else [bins]:
        if not isinstance(path, str) or path.startswith("/") or ".." in path.split("/"):
            raise InvalidRequest(f"{file}: {place!r:.200} has a program at {path!r:.200}")
    return clean


def _check_texts(where: str, value: object) -> None:
    """Check that every string in a value is a single line. Raises InvalidRequest."""
    if isinstance(value, str):
        single_line(value, where)
    elif isinstance(value, list):
        for each in value:
            _check_texts(where, each)
    elif isinstance(value, dict):
        for key, each in value.items():
            single_line(key, where)
            _check_texts(where, each)


def _dump(value: dict[str, object]) -> bytes:
    return json.dumps(value, indent=1).encode()


# --- npm ---------------------------------------------------------------------------------


def key_of(needs: NodeNeeds, platform: NodePlatform) -> str:
    """The name of the cached folder for these."""
    about = [
        b"node %d" % FORMAT,
        platform.cpu.encode(),
        platform.libc.encode(),
        needs.package,
        needs.lock or b"",
    ]
    return hashlib.sha256(b"\0".join(about)).hexdigest()[:32]


def install(
    needs: NodeNeeds, platform: NodePlatform, folder: Path, lock: int, report: Report
) -> list[InstallNote]:
    """Install `node_modules` into `folder`, an empty folder.

    Returns notes. Raises InvalidRequest if the packages cannot be installed, and BackendUnavailable
    if the cause is this machine or its network.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise BackendUnavailable(
            "the project has a package.json, but npm is not installed on this machine: "
            "install npm, or put a node_modules into the project and use --mount"
        )
    (folder / "package.json").write_bytes(needs.package)
    if needs.lock:
        (folder / "package-lock.json").write_bytes(needs.lock)
    words = ["ci"] if needs.lock else ["install", "--no-package-lock"]
    options = [
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--no-update-notifier",
        "--no-color",
        "--no-progress",
        "--loglevel=http",
        "--include=dev",
        "--include=optional",
        "--os=linux",
        f"--cpu={platform.cpu}",
        f"--libc={platform.libc}",
    ]
    output = []
    progress = Progress("downloading")
    report(progress)
    env = _variables()
    chosen = env.pop("NPM_CONFIG_CACHE", None)
    env["npm_config_cache"] = cache = cache_for("npm", env.get("npm_config_cache") or chosen)
    seen = confinement(env, [folder, cache], _node_folders(npm), measured=[folder])
    with started([npm, *words, *options], env, lock, seen, str(folder)) as (process, lines):
        for line in lines:
            output += [line] if line else []
            if fetched := _FETCHED.match(line):
                progress = Progress("downloading", fetched[2])
            report(progress)
    if process.returncode:
        raise _explained(output, process.returncode)
    check_links(folder)
    with errors_of_packages():
        (folder / "node_modules").mkdir(exist_ok=True)
    notes = [InstallNote(text) for text in _unfinished(folder)]
    make_readable(folder)
    return notes


def _node_folders(npm: str) -> list[Path]:
    """The folders of Node and npm outside /usr; with nvm they are in a home folder."""
    programs = [Path(npm), *filter(None, [Path(shutil.which("node") or npm)])]
    shown = [*programs]
    for program in programs:
        real = program.resolve()
        # PREFIX/bin/node, and PREFIX/lib/node_modules/npm/bin/npm-cli.js
        shown.append(real.parent.parent if real.name != real.stem else real)
        shown.append(real)
    return outside_usr(shown)


def _variables() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    # A package may depend on a repository or a path of this machine: allow the registry only.
    return env | {
        "npm_config_git": "/nonexistent",
        "npm_config_allow_git": "none",
        "npm_config_allow_file": "none",
        "npm_config_allow_directory": "none",
        "npm_config_allow_remote": "none",
        "npm_config_globalconfig": "/nonexistent",
        "npm_config_replace_registry_host": "always",
    }


def _unfinished(folder: Path) -> Iterator[str]:
    """Packages whose install scripts were not run."""
    try:
        with (folder / "node_modules/.package-lock.json").open("rb") as file:
            packages = json.loads(file.read(LARGEST_LIST))["packages"]
        names = [
            place.rpartition("node_modules/")[2]
            for place, entry in packages.items()
            if entry.get("hasInstallScript")
        ]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return
    names = [name for name in names if _NAME.fullmatch(name)]
    if names:
        listed = ", ".join(sorted(set(names))[:10]) + (" and more" if len(names) > 10 else "")
        yield f"scripts that packages would run when installed are not run: {listed}"


_REASONS = [
    (r"404 +'?(?P<what>[^'\s]+)'? is not in", "there is no package {what}"),
    (r"404 Not Found - GET \S+/(?P<what>[^/\s]+)", "there is no package {what}"),
    (r"No matching version found for (?P<what>\S+?)\.?(\s|$)", "there is no {what}"),
    (
        r"EUSAGE.*?(?P<what>(Missing|Invalid): .*? lock file)",
        "package.json and its lock file differ ({what}): run `npm install` to update it",
    ),
    (
        r"EINTEGRITY.*?(?P<what>sha\d+-\S+)",
        "a package is not the one that the lock file names ({what})",
    ),
    (r"ERESOLVE.*?(?P<what>While resolving: \S+)", "these packages do not go together ({what})"),
]


def _explained(output: list[str], code: int) -> HutchError:
    errors = [
        re.sub(r"^npm (error|ERR!) ?", "", line)
        for line in output
        if line.startswith(("npm error", "npm ERR!"))
    ]
    text = " ".join(line for line in errors if "complete log" not in line)
    network = re.search(r"\b(ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT)\b", text)
    if network:
        return BackendUnavailable(f"npm cannot reach its registry ({network[1]})")
    for pattern, message in _REASONS:
        if match := re.search(pattern, text):
            return InvalidRequest(f"npm: {message.format(**match.groupdict())}")
    return BackendUnavailable(f"npm could not install the packages (exit code {code}): {text:.500}")
