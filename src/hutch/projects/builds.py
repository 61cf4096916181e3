"""Wheels of packages that come from git repositories.

    a confined process fetches the source and what it is built with   (hutch.images.git, uv)
    a box without a network runs the build, which is other people's code
    a confined process reads the metadata of the wheel

Wheels are in the package cache, keyed by repository, commit, folder, interpreter and the content
of the image that they were built in.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import posixpath
import re
import sys
from collections.abc import Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from hutch import operations as op
from hutch.client.bridge import run_in_loop
from hutch.client.disk import Tree, errors_of_ours
from hutch.client.transport import AsyncTransport
from hutch.errors import BackendUnavailable, InvalidRequest, NoSpace, NotFound
from hutch.images import git
from hutch.images.install import make_readable
from hutch.images.installer import remove_tree
from hutch.images.progress import Display, Progress, Report, printable
from hutch.images.requirements import parse_requirement
from hutch.images.stopping import in_thread
from hutch.images.wheels import read_wheel
from hutch.types import BoxInfo, MiB, Result

from .git import GitPackage, NotFetched, from_url
from .lock_files import ELSEWHERE
from .package_cache import PackageCache
from .python import Interpreter, Wheels, holds, install_only
from .reading import InstallNote, ProjectFiles, line, plain_name, table, texts
from .results import WORKSPACE
from .runtimes import paths
from .tree import pack, scan

FORMAT = 2  # of the folder with a wheel; with a new number, all are built again
TIMEOUT = 1800  # seconds that a build may take
LARGEST_WHEEL = 512 * MiB
LARGEST_ANSWER = 64 << 10  # bytes of a list of requirements
LARGEST_SCRIPT = 1 << 20  # bytes of a setup.py that is looked at
MOST = 50  # packages from git that need each other
MOST_REQUIRES = 1000
MOST_OUTPUT = 12  # lines of a failed build to show
NEEDS = "needs.json"  # beside the wheel: what it asks for from elsewhere

PACKAGES, PROGRAM = "/var/tmp/packages", "/var/tmp/backend.py"
OUT, ANSWER = "/var/tmp/wheel", "/var/tmp/requires.json"

LEGACY = "setuptools.build_meta:__legacy__"  # of PEP 517, where a package names no backend
LEGACY_REQUIRES = ("setuptools>=40.8.0", "wheel")
_BACKEND = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?", re.ASCII)
# Tools that compute a version from tags and history.
_USES_HISTORY = re.compile(
    r"scm|vcs|\bpbr\b|versioningit|dunamai|versioneer|dynamic.versioning|git.versioning"
)
_NO_ROOM = "give it more (--memory 4g --disk 2g)"

T = TypeVar("T")


class NoBox(Exception):
    """Something has to be built, and there is no box for it yet."""


class BuildFailed(InvalidRequest):
    """The build of a package failed. `output` are the last lines that it printed."""

    def __init__(self, message: str, output: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class BuildSystem:
    """How a package is built, as its pyproject.toml says."""

    requires: tuple[str, ...]
    backend: str
    paths: tuple[str, ...]  # of the backend, if it is in the package itself
    folder: str  # of the repository
    uses_history: bool
    has_submodules: bool


class Builder:
    """Builds wheels of packages from git, unless they are in the cache."""

    def __init__(
        self, cache: PackageCache, kind: str, content: str | None = None, timeout: float = TIMEOUT
    ) -> None:
        """`kind`: of the boxes that the wheels are for.

        `content`: identifies the content of their image (see `runtimes.content`); None if only a
        box can tell.
        """
        self._cache, self._kind, self._content, self._timeout = cache, kind, content, timeout
        self._commits: dict[tuple[str, str], str] = {}
        self._boxes: tuple[AsyncTransport, op.OpenSession] | None = None

    def use(self, transport: AsyncTransport, like: op.OpenSession, content: str) -> None:
        """Build in boxes like this one, but with no network and nothing mounted."""
        self._content = content
        relax = tuple(name for name in like.relax if name != "network")
        operation = op.OpenSession(
            image=like.image,
            packages=like.packages,
            warm=False,
            limits=like.limits,
            min_isolation=like.min_isolation,
            backend=like.backend,
            runtime=like.runtime,
            relax=relax,
            ttl_seconds=2 * self._timeout + 600,  # on a server, if we are gone
        )
        self._boxes = transport, operation

    async def build(self, wheels: Wheels, python: Interpreter) -> Wheels:
        """The same, with built wheels instead of repositories.

        Raises NoBox, InvalidRequest, BackendUnavailable and NoSpace.
        """
        queue, built = list(wheels.git), dict[str, tuple[GitPackage, str]]()
        asked = {package.name for package in wheels.git}
        while queue:
            package = queue.pop(0)
            if package.name in built:
                first = built[package.name][0]
                if first.source != package.source:
                    raise InvalidRequest(f"{package.name} is asked for from two repositories")
                if set(package.extras) <= set(first.extras):
                    continue
                package = replace(package, extras=tuple(sorted({*first.extras, *package.extras})))
            if len(built) >= MOST:
                raise InvalidRequest(f"more than {MOST} packages come from repositories")
            folder = await self._have(package, python)
            wheel = next(folder.glob("*.whl"))
            extras = f"[{','.join(package.extras)}]" if package.extras else ""
            requirement = parse_requirement(str(wheel)).partition(" @ ")[2]
            built[package.name] = package, f"{package.name}{extras} @ {requirement}"
            if not wheels.exact:  # a lock has them all
                queue += _from_elsewhere(package, folder, python)
        lines = {name: requirement for name, (_, requirement) in sorted(built.items())}
        return wheels.with_built(
            [lines[name] for name in lines if name in asked],
            [lines[name] for name in lines if name not in asked],
        )

    async def _have(self, package: GitPackage, python: Interpreter) -> Path:
        """The folder with the wheel of a package."""
        if self._content is None:
            raise NoBox
        loop = asyncio.get_running_loop()
        url, revision = package.source.url, package.source.revision
        try:
            commit = await self._resolve(url, revision)
            about = (
                f"git wheel {FORMAT}",
                url,
                commit,
                package.source.folder,
                package.name,
                python.version,
                python.platform or " ".join(sys.version.split()),
                self._kind,
                self._content,
            )
            digest = hashlib.sha256("\0".join(about).encode()).hexdigest()

            def fill(work: Path, lock: int, report: Report) -> list[InstallNote]:
                if self._boxes is None:
                    raise NoBox
                job = _Job(package, commit, python, work, lock, report, loop)
                job.run(*self._boxes, self._timeout)
                return []

            folder, _ = await self._cache.have(f"wheel-{digest[:32]}", fill)
        except (InvalidRequest, BackendUnavailable, NoSpace) as exc:
            why = f"{package.name} cannot be installed from git: {exc}"
            if isinstance(exc, InvalidRequest):
                raise BuildFailed(why, getattr(exc, "output", ())) from None
            raise (NoSpace if isinstance(exc, NoSpace) else BackendUnavailable)(why) from None
        return folder

    async def _resolve(self, url: str, revision: str) -> str:
        if (url, revision) not in self._commits:

            def look(report: Report) -> str:
                return git.resolve(url, revision, report)

            with Display("project", is_patient=True) as display:
                self._commits[url, revision] = await in_thread(look, display)
        return self._commits[url, revision]


@dataclass
class _Job:
    """One build, in a thread. Work in the box is done by the event loop."""

    package: GitPackage
    commit: str
    python: Interpreter
    work: Path
    lock: int
    report: Report
    loop: asyncio.AbstractEventLoop

    def run(self, transport: AsyncTransport, operation: op.OpenSession, timeout: float) -> None:
        """Leave the wheel in the folder, and a list of its dependencies from elsewhere."""
        source, url = self.work / "source", self.package.source.url
        git.check_out(url, self.commit, source, self.lock, self._fetching)
        system = read_build_system(source, self.package.source.folder)
        if system.uses_history:
            git.fetch_history(url, source, self.lock, self._fetching)
        else:
            git.drop_history(source)
        requires = self._install(system.requires, "requires")
        box = _Box(transport, self._call(transport.perform(operation)), system, timeout)
        try:
            self._call(box.send(source, WORKSPACE))
            self._call(box.send(requires, PACKAGES))
            more = [need for need in self._call(box.ask()) if need not in system.requires]
            if more:
                # All of them together: the new ones may need other versions of the first.
                requires = self._install((*system.requires, *more), "more")
                self._call(box.send(requires, PACKAGES))
            wheel = self._call(box.build(self.package.name, self.work))
        finally:
            run_in_loop(self.loop, box.close())
        for name in ("source", "requires", "more"):
            remove_tree(self.work / name)
        needs = _direct_needs(self.package.name, wheel, self.lock, self.report)
        (self.work / NEEDS).write_text(json.dumps(needs))
        make_readable(self.work)

    def _install(self, requires: Iterable[str], name: str) -> Path:
        folder = self.work / name
        folder.mkdir()
        wheels = Wheels(tuple(sorted(requires)))
        for note in install_only(wheels, self.python, folder, self.lock, self.report):
            raise InvalidRequest(f"{note.package}, which it is built with, has no wheel")
        return folder

    def _named(self) -> str:
        return f"{self.package.name} at {self.commit[:12]}"

    def _fetching(self, progress: Progress) -> None:
        self.report(Progress("fetching", self._named()))

    def _call(self, work: Coroutine[object, object, T]) -> T:
        """Run it in the loop. `report` is called often: it raises if the build was cancelled."""
        progress = Progress("building", self._named())
        return run_in_loop(self.loop, work, check=lambda: self.report(progress), every=0.1)


# --- the box -----------------------------------------------------------------------------


class _Box:
    """A box with the source of a package in it."""

    def __init__(
        self, transport: AsyncTransport, info: BoxInfo, system: BuildSystem, timeout: float
    ) -> None:
        self._transport, self._id = transport, info.id
        self._system, self._timeout = system, timeout

    async def close(self) -> None:
        await self._transport.perform(op.CloseSession(self._id))

    async def send(self, folder: Path, place: str) -> None:
        files = scan(folder)
        try:
            await self._transport.perform(op.MakeDir(self._id, place))
            tar = pack(folder, files.items())
            await self._transport.perform(op.UnpackFolder(self._id, tar, place))
        except NoSpace:
            raise NoSpace(
                f"its source and what it is built with do not fit on the disk of a box: {_NO_ROOM}"
            ) from None

    async def ask(self) -> list[str]:
        """What else it is built with. Raises InvalidRequest."""
        program = Path(__file__).with_name("backend.py").read_bytes()
        await self._transport.perform(op.WriteFile(self._id, PROGRAM, program))
        await self._run("requires", ANSWER)
        data = await self._read(ANSWER, LARGEST_ANSWER)
        try:
            return [_build_requirement(need) for need in texts(json.loads(data), "a build backend")]
        except (ValueError, RecursionError):
            raise InvalidRequest("its build backend sent an invalid list of requirements") from None

    async def build(self, name: str, into: Path) -> Path:
        """Build a wheel, and take it out of the box. Raises InvalidRequest."""
        await self._transport.perform(op.MakeDir(self._id, OUT))
        await self._run("wheel", OUT)
        entries = await self._transport.perform(op.ListFiles(self._id, OUT))
        if len(entries) != 1 or entries[0].kind != "file":
            raise InvalidRequest(f"its build made {len(entries)} files, not one wheel")
        file = posixpath.basename(entries[0].path)
        _check_name(name, file)
        wheel = into / file
        wheel.write_bytes(await self._read(f"{OUT}/{file}", LARGEST_WHEEL))
        return wheel

    async def _read(self, path: str, most: int) -> bytes:
        data = bytearray()
        try:
            content = op.ReadFile(self._id, path)
            async with aclosing(await self._transport.stream(content)) as stream:
                async for piece in stream:
                    data += piece
                    if len(data) > most:
                        raise InvalidRequest(f"its build made more than {most // MiB} MiB")
        except NotFound:
            raise InvalidRequest("its build did not write its result") from None
        return bytes(data)

    async def _run(self, what: str, out: str) -> None:
        programs, _ = await paths(self._transport, self._id)
        env = {
            "PATH": f"{PACKAGES}/bin:{programs}",
            "PYTHONPATH": PACKAGES,
            "SOURCE_DATE_EPOCH": "315532800",  # 1980, the earliest time in a zip
            # Where boxes have several users, the source belongs to another one.
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }
        words = ("python3", PROGRAM, what, self._system.backend, out, *self._system.paths)
        where = posixpath.join(WORKSPACE, self._system.folder)
        program = op.RunProgram(self._id, words, where, env, timeout=self._timeout)
        # Streamed: a build may be silent for long, and heartbeats keep the connection open.
        async with aclosing(await self._transport.stream(program)) as stream:
            async for item in stream:
                if isinstance(item, Result) and not item.ok:
                    raise self._failed(item)

    def _failed(self, result: Result) -> BuildFailed:
        output = [printable(text)[:200] for text in result.output.splitlines() if text.strip()]
        why = f"its build failed with exit code {result.exit_code}"
        if result.timed_out:
            why = f"its build was stopped after {self._timeout:.0f} seconds"
        elif result.oom:
            why = f"its build took more memory than the box has: {_NO_ROOM}"
        elif "No space left on device" in result.output:
            why = f"its build filled the disk of the box: {_NO_ROOM}"
        elif self._system.has_submodules:
            why += " (the repository has submodules, which are not fetched)"
        return BuildFailed(why, tuple(output[-MOST_OUTPUT:]))


# --- the metadata of a package ------------------------------------------------------------


def read_build_system(top: Path, folder: str) -> BuildSystem:
    """How the package in this folder of a repository is built. Raises InvalidRequest."""
    with errors_of_ours(), Tree(top) as tree:
        files = ProjectFiles(tree, top)
        place = f"{folder}/" if folder else ""
        about = files.toml(f"{place}pyproject.toml")
        scripts = [files.read(place + name, LARGEST_SCRIPT) for name in ("setup.py", "setup.cfg")]
        if about is None and not any(script is not None for script in scripts):
            raise InvalidRequest(
                f"there is neither pyproject.toml nor setup.py in {folder or 'its top folder'}: "
                "#subdirectory=FOLDER names another"
            )
        sources = b"\n".join(filter(None, [files.read(f"{place}pyproject.toml"), *scripts]))
        has_submodules = files.read(".gitmodules", LARGEST_SCRIPT) is not None
    where = "its pyproject.toml: build-system"
    system = table((about or {}).get("build-system"), where)
    requires = texts(system.get("requires"), where) if system else LEGACY_REQUIRES
    backend = line(system.get("build-backend"), where) or LEGACY
    paths = texts(system.get("backend-path"), where)
    if not _BACKEND.fullmatch(backend):
        raise InvalidRequest(f"{where}: invalid build-backend {backend!r:.100}")
    if len(requires) > MOST_REQUIRES:
        raise InvalidRequest(f"{where}: more than {MOST_REQUIRES} packages to build it with")
    if not all(map(_is_inside, paths)):
        raise InvalidRequest(f"{where}: its backend-path leads out of it")
    if backend == LEGACY:
        requires = [*requires, *LEGACY_REQUIRES]
    return BuildSystem(
        tuple(dict.fromkeys(map(_build_requirement, requires))),
        backend,
        tuple(paths),
        folder,
        _USES_HISTORY.search(sources.decode(errors="replace")) is not None,
        has_submodules,
    )


def _is_inside(path: str) -> bool:
    return not posixpath.normpath(path).startswith(("/", "..", "-")) and "\0" not in path


def _build_requirement(text: str) -> str:
    try:
        return parse_requirement(text, wheels=False)
    except InvalidRequest as exc:
        raise InvalidRequest(f"what it is built with: {exc}") from None


def _check_name(name: str, file: str) -> Version:
    """The version in the name of a wheel of this package. Raises InvalidRequest."""
    try:
        built, version, _, _ = parse_wheel_filename(file)
    except InvalidWheelFilename:
        raise InvalidRequest(f"its build made {file!r:.200}, which is not a wheel") from None
    if built != canonicalize_name(name):
        raise InvalidRequest(
            f"its build made a wheel of {built}: ask for that ({built} @ git+…), if you mean it"
        )
    return version


def _direct_needs(name: str, wheel: Path, lock: int, report: Report) -> list[str]:
    """The dependencies of a wheel that are not from an index.

    Raises InvalidRequest unless it is a wheel of the package of this name.
    """
    try:
        about = read_wheel(wheel, lock, report)
    except InvalidRequest as exc:
        raise InvalidRequest(f"the wheel that its build made cannot be used: {exc}") from None
    if about.name != canonicalize_name(name) or about.version != _check_name(name, wheel.name):
        raise InvalidRequest(f"its build made {wheel.name}, which says that it is another package")
    return [str(need) for need in about.direct]


def _from_elsewhere(package: GitPackage, folder: Path, python: Interpreter) -> list[GitPackage]:
    """The packages that a wheel needs from repositories. Raises InvalidRequest for other places."""
    markers, packages = python.markers(), []
    for text in json.loads((folder / NEEDS).read_text()):
        need = Requirement(text)
        # Even if its marker does not hold: uv might evaluate it differently, and fetch it.
        if not (need.url or "").startswith("git+"):
            raise InvalidRequest(f"{package.name} needs {need.name}, but {ELSEWHERE}")
        marker = str(need.marker or "")
        if not any(holds(marker, markers | {"extra": extra}) for extra in ("", *package.extras)):
            continue
        source = from_url(need.url or "")
        if isinstance(source, NotFetched):
            raise InvalidRequest(f"{package.name} needs {need.name}, but {source.reason}")
        extras = tuple(sorted(map(plain_name, need.extras)))
        packages.append(GitPackage(plain_name(need.name), source, extras))
    return packages
