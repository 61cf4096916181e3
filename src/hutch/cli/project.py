"""`hutch run --project`: run a project in a box, with its dependencies installed."""

from __future__ import annotations

import argparse
import asyncio
import os
import posixpath
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from hutch import factory
from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import BackendUnavailable, CallerError, InvalidRequest, NoSpace, NotFound
from hutch.images import store
from hutch.images.install import RECORD
from hutch.projects import node, python
from hutch.projects.builds import Builder, BuildFailed, NoBox
from hutch.projects.needs import Needs, read_needs
from hutch.projects.package_cache import PackageCache
from hutch.projects.reading import InstallNote
from hutch.projects.results import WORKSPACE, Fetched, Fetcher, checked
from hutch.projects.runtimes import Runtimes, ask, content, content_of, own_runtimes, paths
from hutch.projects.saved import SavedBox, saved_box
from hutch.projects.tree import Snapshot, TreeEntry, is_rebuilt, pack, scan, size_of
from hutch.types import BoxInfo, MiB, Mount

from .boxes import box_for, dismiss
from .place import use_its_images
from .program import Launcher
from .screen import complain

HOME = "/home/user"
PYTHON_PLACE, NODE_PLACE = "/opt/packages", "/node_modules"
# Where nothing can be mounted, the packages are copied here.
PYTHON_COPY, NODE_COPY = "/var/tmp/packages", "/var/tmp/project/node_modules"
COPIES = {PYTHON_PLACE: PYTHON_COPY, NODE_PLACE: NODE_COPY}
# For all dependencies together: each build has a timeout of its own, but may need further builds.
INSTALL_TIMEOUT = 2 * 3600  # seconds
MOST_NOTES = 20  # on the terminal
SLACK = 64 * MiB  # for names and other metadata, beside the content of a box's disk


@dataclass
class Installed:
    """Folders of installed packages on this machine, by their path in the box."""

    folders: dict[str, Path] = field(default_factory=dict)
    notes: list[InstallNote] = field(default_factory=list)

    def mounts(self) -> tuple[Mount, ...]:
        return tuple(
            Mount(os.path.realpath(path), place, True) for place, path in self.folders.items()
        )


@dataclass
class ProjectBox:
    """A box with a project in it."""

    transport: AsyncTransport
    info: BoxInfo
    env: dict[str, str]
    top: Path
    files: tuple[str, ...] = ()
    notes: tuple[InstallNote, ...] = ()
    copied: int = 0
    fetched: Fetched | None = None

    def report(self) -> dict[str, object]:
        out = self.fetched or Fetched()
        missed = [
            {"package": note.package, "reason": note.reason} for note in self.notes if note.package
        ]
        remarks = [note.reason for note in self.notes if not note.package]
        return {
            "path": str(self.top),
            "copied": self.copied,
            "out": out.files,
            "missing": out.missing,
            "refused": out.refused,
            "needs": self.files,
            "not_installed": missed,
            "notes": remarks,
        }


def check(args: argparse.Namespace) -> None:
    """Check that the options fit together. Raises InvalidRequest."""
    args.top = Path(os.path.realpath(args.project))
    if args.top.is_file():
        raise InvalidRequest(f"--project {args.project} is a file; give the project's folder")
    if not args.top.is_dir():
        raise InvalidRequest(f"--project {args.project}: no such folder")
    if args.copy and args.in_place:
        raise InvalidRequest("--copy and --mount exclude each other")
    if args.workspace:
        raise InvalidRequest("--workspace and --project are both at /workspace: choose one")
    if args.in_place and args.out:
        raise InvalidRequest(
            "--out is not needed with --mount: the box writes into the project itself"
        )
    if args.in_place and _is_elsewhere(args):
        raise InvalidRequest("--mount: a server cannot see folders of this machine; use --copy")
    if args.in_place and _backend(args.backend) == "docker":
        _refuse_roots_folder(args)
    args.out = [checked(word) for word in args.out]


def _refuse_roots_folder(args: argparse.Namespace) -> None:
    """Refused here, because the advice of the backend's own error does not fit a project."""
    if args.top.stat().st_uid == 0 and "user" not in args.relax:
        raise InvalidRequest(
            f"--mount: {args.top} belongs to root, but a container does not run as root: use "
            "--copy, give the folder to a user (chown -R UID), or run as root (--user root --relax "
            "user)"
        )


def _backend(name: str) -> str:
    return name or factory.default()


def _is_elsewhere(args: argparse.Namespace) -> bool:
    return bool(args.url or os.environ.get("HUTCH_URL"))


# --- reset -------------------------------------------------------------------------------


def reset(args: argparse.Namespace, launcher: Launcher) -> bool:
    """Remove the saved box of a project. Returns whether there was one."""
    dismiss(launcher)
    use_its_images()
    with saved_box(args.top) as kept:
        return kept.remove()


def _kind(args: argparse.Namespace, operation: op.OpenSession) -> str:
    """The options that a later run must repeat to use the same saved box."""
    where = f"--backend {_backend(operation.backend)}"
    if _is_elsewhere(args):
        where = f"--url {args.url or os.environ['HUTCH_URL']}"
    return f"{where} --image {operation.image}" if operation.image else where


def _must_be(kind: str, kept: SavedBox) -> None:
    """A saved box fits only the same kind of box: programs, links and owners differ."""
    if kept.state.kind not in ("", kind):
        raise InvalidRequest(
            f"the saved box of this project was made with {kept.state.kind}, not with "
            f"{kind}: use the same options, or start over with --reset"
        )
    kept.state.kind = kind


# --- a run -------------------------------------------------------------------------------


@asynccontextmanager
async def open_project(
    args: argparse.Namespace, operation: op.OpenSession, launcher: Launcher
) -> AsyncIterator[ProjectBox]:
    """A box with the project in it. Results are copied back if the `with` ends without an error."""
    with ExitStack() as stack:
        try:
            use_its_images()
            cache = stack.enter_context(closing(PackageCache()))
            saved = None
            if args.persistent or args.reset:
                saved = stack.enter_context(saved_box(args.top))
                if args.reset:
                    saved.remove()
                _must_be(_kind(args, operation), saved)
            needs = read_needs(args.top, args.extra)
            _tell_notes(needs.notes)
            tree = {} if args.in_place else _scan(args, operation, needs)
        except BaseException:
            dismiss(launcher)
            raise
        opened = _here(args, operation, launcher, needs, cache)
        if _is_elsewhere(args):
            dismiss(launcher)
            opened = _there(args, operation, needs, cache)
        async with opened as (transport, info, installed):
            saved = saved if args.persistent else None
            if saved:
                await _restore(transport, info, saved, _parts(args))
            copied = 0
            if not args.in_place:
                sent = saved.state.sent if saved else {}
                copied = await _send(transport, info, args.top, tree, sent)
            env = await _env(transport, info, needs, installed)
            notes = (*needs.notes, *installed.notes)
            result = ProjectBox(transport, info, env, args.top, needs.files, notes, copied)
            yield result
            if args.out:
                limit = info.limits.disk_size + SLACK
                result.fetched = await Fetcher(transport, info.id, args.top, limit).fetch(args.out)
                _tell(_troubles(result.fetched))
            if saved:
                await _save(transport, info, saved, tree, _parts(args))


@asynccontextmanager
async def _here(
    args: argparse.Namespace,
    operation: op.OpenSession,
    launcher: Launcher,
    needs: Needs,
    cache: PackageCache,
) -> AsyncIterator[tuple[AsyncTransport, BoxInfo, Installed]]:
    """A new box on this machine, with the installed packages mounted in it."""
    try:
        if args.in_place:
            mount = Mount(str(args.top), WORKSPACE)
            operation = replace(operation, mounts=(mount, *operation.mounts))
        ours = _backend(operation.backend) == "namespaces"
        if ours and needs.python and not operation.image:
            operation = replace(operation, image="python")
        runtimes = _known(operation.image, needs) if ours else None
        known = _known_content(operation.image) if runtimes and needs.python else None
        builder = Builder(cache, _kind(args, operation), known)
        installed = Installed()
        is_done = not (needs.python or needs.node)
        if runtimes:
            try:
                installed = await _install(needs, runtimes, operation.image, cache, builder)
                is_done = True
            except NoBox:
                pass
    except BaseException:
        dismiss(launcher)
        raise
    whole = replace(operation, mounts=(*operation.mounts, *installed.mounts()))
    async with box_for(args, whole, launcher) as (transport, info):
        if not is_done:
            # Mounts are fixed when a box is made. So the first box only shows which interpreters
            # it has, and packages are built in boxes like it.
            builder.use(transport, operation, await content(transport, info))
            runtimes = runtimes or await ask(transport, info.id)
            installed = await _install(needs, runtimes, info.image, cache, builder)
            info = await _with_mounts(transport, operation, info, installed)
        yield transport, info, installed


async def _with_mounts(
    transport: AsyncTransport, operation: op.OpenSession, first: BoxInfo, installed: Installed
) -> BoxInfo:
    """Replace the first box by one with these folders mounted."""
    if not installed.folders:
        return first
    whole = replace(operation, mounts=(*operation.mounts, *installed.mounts()))
    try:
        info = await transport.perform(whole)
    except InvalidRequest:
        # A remote engine sees no folders of this machine.
        await _copy_installed(transport, first, installed)
        return first
    await transport.perform(op.CloseSession(first.id))
    return info


def _known(image: str, needs: Needs) -> Runtimes | None:
    """The interpreters of an image, if they are known without asking a box."""
    if image in ("", "host"):
        return None if needs.python else own_runtimes()
    return None if store.look_up(image) is None else own_runtimes()


def _known_content(image: str) -> str | None:
    """`content` of an image of packages, without a box; None if it is not built."""
    try:
        return content_of((store.resolve(image).folder / RECORD).read_bytes())
    except (NotFound, OSError):
        return None


@asynccontextmanager
async def _there(
    args: argparse.Namespace, operation: op.OpenSession, needs: Needs, cache: PackageCache
) -> AsyncIterator[tuple[AsyncTransport, BoxInfo, Installed]]:
    """A session on a server, with a copy of the installed packages in it."""
    from . import server

    async with server.open_session(args.url, operation) as (transport, info):
        installed = Installed()
        if needs.python or needs.node:
            runtimes = await ask(transport, info.id)
            builder = Builder(cache, _kind(args, operation))
            builder.use(transport, operation, await content(transport, info))
            installed = await _install(needs, runtimes, info.image, cache, builder)
            await _copy_installed(transport, info, installed)
        yield transport, info, installed


# --- what it needs -----------------------------------------------------------------------


async def _install(
    needs: Needs, runtimes: Runtimes, image: str, cache: PackageCache, builder: Builder
) -> Installed:
    """Install what the project needs. Raises NoBox if a package must be built in a box first."""
    deadline = asyncio.timeout(INSTALL_TIMEOUT)
    try:
        async with deadline:
            return await _install_all(needs, runtimes, image, cache, builder)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise BackendUnavailable(
            f"installing what the project needs took longer than {INSTALL_TIMEOUT // 60} minutes, "
            "and was stopped"
        ) from None


async def _install_all(
    needs: Needs, runtimes: Runtimes, image: str, cache: PackageCache, builder: Builder
) -> Installed:
    installed = Installed()
    notes = installed.notes
    if needs.python and runtimes.python:
        interpreter = runtimes.python
        wheels, more = python.select(needs.python, interpreter)
        notes += more
        try:
            wheels = await builder.build(wheels, interpreter)
        except BuildFailed as exc:
            _tell([f"build: {line}" for line in exc.output])
            raise
        if wheels.packages:
            name = f"python-{python.key_of(wheels, interpreter)}"
            folder, more = await cache.have(
                name, lambda *how: python.install(wheels, interpreter, PYTHON_PLACE, *how)
            )
            notes += more
            installed.folders[PYTHON_PLACE] = folder
    elif needs.python:
        notes.append(InstallNote(f"the Python packages are not installed: {image} has no python3"))
    if needs.node and runtimes.node:
        wanted, target = needs.node, runtimes.node
        name = f"node-{node.key_of(wanted, target)}"
        folder, more = await cache.have(name, lambda *how: node.install(wanted, target, *how))
        notes += more
        installed.folders[NODE_PLACE] = folder / "node_modules"
    elif needs.node:
        notes.append(
            InstallNote(f"the packages of package.json are not installed: {image} has no node")
        )
    _tell_notes(notes)
    return installed


async def _copy_installed(transport: AsyncTransport, info: BoxInfo, installed: Installed) -> None:
    """Copy packages into a box that takes no mounts; they are not saved with the box."""
    for place, folder in list(installed.folders.items()):
        copy = COPIES[place]
        files = scan(folder)
        _must_fit("what the project needs", size_of(files), info.limits.disk_size)
        await transport.perform(op.MakeDir(info.id, copy))
        await transport.perform(op.UnpackFolder(info.id, pack(folder, files.items()), copy))
        installed.folders[copy] = installed.folders.pop(place)
    if NODE_COPY in installed.folders:
        # Node looks for packages in the folders above a module only.
        link = TreeEntry("link", 0, 0, 0o777, NODE_COPY)
        tar = pack(Path("/"), [(posixpath.basename(NODE_COPY), link)])
        await transport.perform(op.UnpackFolder(info.id, tar, WORKSPACE))


async def _env(
    transport: AsyncTransport, info: BoxInfo, needs: Needs, installed: Installed
) -> dict[str, str]:
    """PATH and PYTHONPATH of the command, so that it finds the packages."""
    if not (installed.folders or needs.modules):
        return {}
    programs, modules = await paths(transport, info.id)
    sources = [posixpath.normpath(posixpath.join(WORKSPACE, path)) for path in needs.modules]
    bins = []
    for place in installed.folders:
        if place in (PYTHON_PLACE, PYTHON_COPY):
            sources.append(place)
            bins.append(f"{place}/bin")
        else:
            bins.append(f"{place}/.bin")
    env = {"PATH": ":".join([*bins, programs])} if bins else {}
    if sources:
        env["PYTHONPATH"] = ":".join(filter(None, [*sources, modules]))
    return env


# --- the copy ----------------------------------------------------------------------------


def _scan(args: argparse.Namespace, operation: op.OpenSession, needs: Needs) -> Snapshot:
    has_node = needs.node is not None
    tree = scan(args.top, without=lambda name, at: is_rebuilt(name, at, node=has_node))
    _must_fit("the project", size_of(tree), operation.limits.disk_size)
    return tree


def _must_fit(what: str, size: int, disk: int) -> None:
    if size > disk:
        raise InvalidRequest(
            f"{what} needs {-(-size // MiB)} MiB, but the box's disk has {disk // MiB} MiB: give "
            "it more (--memory 4g --disk 2g), or mount the folder (--mount)"
        )


async def _send(
    transport: AsyncTransport, info: BoxInfo, top: Path, tree: Snapshot, sent: Snapshot
) -> int:
    """Bring the box's copy up to date. Returns how many files were sent.

    Files that changed in the project since the last run are sent again, and removed ones removed.
    Everything else in the box stays as it is.
    """
    stale = [
        path for path in reversed(sent) if path not in tree or tree[path].kind != sent[path].kind
    ]
    for path in stale:
        try:
            gone = path in tree  # something of another kind takes its place
            await transport.perform(op.RemoveFile(info.id, f"{WORKSPACE}/{path}", recursive=gone))
        except CallerError:
            continue  # it is gone already, or it is a folder with other files in it
    changed: list[tuple[str, TreeEntry]] = [
        (path, seen) for path, seen in tree.items() if seen.differs(sent.get(path))
    ]
    if not changed:
        return 0
    try:
        written = await transport.perform(op.UnpackFolder(info.id, pack(top, changed), WORKSPACE))
    except NoSpace:
        raise NoSpace(
            "the project does not fit on the box's disk: give it more "
            "(--memory 4g --disk 2g), or mount the folder (--mount)"
        ) from None
    files = sum(seen.kind != "dir" for _, seen in changed)
    if written < files:
        complain(f"{files - written} files of the project could not be written in the box")
    return written


def _parts(args: argparse.Namespace) -> tuple[str, ...]:
    """The folders of a box that are saved. A mounted one is not."""
    return (HOME,) if args.in_place else (HOME, WORKSPACE)


async def _restore(
    transport: AsyncTransport, info: BoxInfo, kept: SavedBox, parts: tuple[str, ...]
) -> None:
    for part in parts:
        data = kept.read(part)
        if data is None:
            continue
        try:
            await transport.perform(op.UnpackFolder(info.id, data, part))
        except NoSpace:
            raise NoSpace(
                "the saved box of the project does not fit on this disk: give it more "
                "(--memory 4g --disk 2g), or remove it (--reset)"
            ) from None


async def _save(
    transport: AsyncTransport, info: BoxInfo, kept: SavedBox, tree: Snapshot, parts: tuple[str, ...]
) -> None:
    written = dict(kept.state.parts)
    for part in parts:
        async with aclosing(await transport.stream(op.PackFolder(info.id, part))) as stream:
            written[part] = await kept.write(part, stream, info.limits.disk_size + SLACK)
    sent = tree if WORKSPACE in parts else kept.state.sent
    kept.commit(replace(kept.state, sent=sent, parts=written))


def _troubles(fetched: Fetched) -> list[str]:
    troubles = [f"--out {word}: no such file in the box" for word in fetched.missing]
    troubles += [f"--out: not copied: {why}" for why in fetched.refused]
    if fetched.skipped:
        troubles.append(f"--out: skipped {fetched.skipped} links or special files")
    return troubles


def _tell(notes: list[str] | tuple[str, ...]) -> None:
    for note in notes:
        complain(note)


def _tell_notes(notes: Sequence[InstallNote]) -> None:
    _tell([str(note) for note in notes[:MOST_NOTES]])
    if len(notes) > MOST_NOTES:
        complain(f"and {len(notes) - MOST_NOTES} more; --json lists all of them")
