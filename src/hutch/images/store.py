"""The store of images: environments, which are folders of packages, and the names for them.

    images/env/<key>/           a finished environment; it never changes
    images/env/<key>.lock       shared by its users, exclusive for those who build or remove it
    images/env/<key>.building-* an environment that is being built or removed
    images/names/<name>.json    the packages that a name stands for

A builder holds the lock until the programs it started have ended, even if it is killed itself. The
kernel releases the locks of processes that die, so nothing has to be repaired: a partial
environment that is not locked is stale.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from hutch.errors import BackendUnavailable, Conflict, InvalidRequest, NotFound

from .environment import BUILT_IN, VERSION, BuiltImage, Image, base_prefix, interpreter_in_box
from .install import RECORD, SITE_PACKAGES, Progress, Report, install
from .installer import data_dir as data_dir
from .installer import remove_in_background, remove_tree
from .locks import lock, locked
from .stopping import WorkStopped

BUILDING = ".building-"
POLL = 0.1  # seconds between two checks of an image that another process builds
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_RESERVED = {"host"}  # the /usr of this machine, not an image of packages


@dataclass(frozen=True)
class ImageEntry:
    """One entry of a list of images; also for an environment without a name."""

    name: str | None
    packages: tuple[str, ...]
    built: bool
    bytes: int
    kind: str = "packages"  # or "oci"
    digest: str | None = None  # of an OCI image


def find(image: str | Image) -> Image:
    """The image of that name; an Image is returned as it is.

    Raises NotFound, and InvalidRequest if it cannot be a name.
    """
    found = image if isinstance(image, Image) else look_up(image)
    if found is None:
        assert isinstance(image, str)
        _check_name(image)
        raise NotFound(
            f"there is no image {image!r}{did_you_mean(image, names())}; to make one: hutch image "
            f"build {image} --packages ..."
        )
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion to append to a message: the closest known name, or an empty string."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" (did you mean {near[0]!r}?)" if near else ""


def look_up(name: str) -> Image | None:
    """The image of packages with that name, if there is one."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not _NAME.fullmatch(name):
        return None
    try:
        record = json.loads(_record_of(name).read_text())
    except FileNotFoundError:
        return None
    return Image(tuple(record["packages"]), tuple(record["preload"]), name)


def resolve(image: str | Image) -> BuiltImage:
    """How to use an image that is built. Raises NotFound if it does not exist or is not built."""
    found = find(image)
    folder = _environments() / found.key
    if not folder.is_dir():
        what = f"image {found.name!r}" if found.name else "this image"
        raise NotFound(f"{what} is not built yet: hutch image build {found.name or 'NAME'}")
    place = folder / SITE_PACKAGES
    return BuiltImage(folder, place, found.preload, interpreter_in_box(), base_prefix(), VERSION)


def build(image: str | Image, progress: Report | None = None) -> BuiltImage:
    """Build an image unless it is built already, and record its name, if it has one.

    Several processes may call this at once: one builds, the others wait. If a build fails, no
    partial environment is left, and the name stands for what it stood for before. An exception
    raised by `progress` stops the build.

    Raises NotFound if there is no such image, InvalidRequest if the packages are not available,
    BackendUnavailable if this machine cannot download or store them, and NoSpace.
    """
    target = find(image)
    if target.name:
        _check_name(target.name)
        if target != BUILT_IN.get(target.name, target):
            raise InvalidRequest(f"{target.name!r} is built in; choose another name for yours")
    report = progress or _ignore
    folder = _environments() / target.key
    if not folder.is_dir():
        make_folder(folder.parent)
    while not folder.is_dir():
        with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
            if held is None:
                report(Progress("waiting"))
                time.sleep(POLL)  # not a blocking `flock`: a thread in one cannot be stopped
                continue
            if not folder.is_dir():
                _build(target, folder, held, report)
    if target.name and target.name not in BUILT_IN:
        _keep_name(target)
    return resolve(target)


def hold(ready: BuiltImage) -> int:
    """Keep the environment from being removed until the returned descriptor is closed.

    It is closed at the latest when this process, and those that inherit it, have ended. Raises
    NotFound if the environment has just been removed.
    """
    try:
        held = lock(ready.folder, fcntl.LOCK_SH)
        if ready.folder.is_dir():
            return held
        os.close(held)
    except FileNotFoundError:
        pass  # the folder of all environments was removed
    raise NotFound("this image has just been removed; build it again")


def remove(name: str) -> bool:
    """Remove a name, and its environment if no other name stands for the same packages.

    For a built-in image, only the environment is removed. Returns whether there was anything to
    remove. Raises NotFound if there is no such image, and Conflict if a box uses it; then nothing
    is changed.
    """
    image = find(name)
    others = [other for other in names() if other != name and find(other).key == image.key]
    removed = not others and _remove_environment(image.key, of=name)
    if name not in BUILT_IN:
        _record_of(name).unlink(missing_ok=True)
        return True
    return removed


def prune() -> list[ImageEntry]:
    """Remove all environments without a name that no box uses, and return them."""
    removed = []
    for entry, key in _listed():
        if entry.name is None:
            try:
                if _remove_environment(key, of="this environment"):
                    removed.append(entry)
            except Conflict:
                continue
    _sweep(remove=remove_tree)
    return removed


def entries() -> list[ImageEntry]:
    """All named images, built or not, and then the environments without a name."""
    return [entry for entry, _ in _listed()]


# --- names -------------------------------------------------------------------------------


def names() -> list[str]:
    """The names of images of packages: the built-in ones, then those on this machine."""
    return [*BUILT_IN, *sorted(path.stem for path in _record_of("x").parent.glob("*.json"))]


def _record_of(name: str) -> Path:
    _check_name(name)
    return data_dir() / "images/names" / f"{name}.json"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot be the name of an image: letters a-z, digits and -._ can, up to 63"
        )
    if name in _RESERVED:
        raise InvalidRequest(f"{name!r} is the image of this machine itself, and is never built")


def _keep_name(image: Image) -> None:
    assert image.name
    record = _record_of(image.name)
    before = find(image.name) if record.exists() else None
    if before == image:
        return
    make_folder(record.parent)
    with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False) as file:
        json.dump({"packages": image.packages, "preload": image.preload}, file, indent=2)
    os.chmod(file.name, 0o644)
    os.replace(file.name, record)
    if before and all(find(name).key != before.key for name in names()):
        try:
            _remove_environment(before.key, of=image.name)
        except Conflict:
            pass  # boxes still use it; `prune` removes it once they are closed


def _listed() -> Iterator[tuple[ImageEntry, str]]:
    named = {name: find(name) for name in names()}
    for name, image in named.items():
        built, size, _ = _about(image.key)
        yield ImageEntry(name, tuple(image.described()), built, size), image.key
    keys = {image.key for image in named.values()}
    for folder in sorted(_environments().glob("*/")):
        if folder.name not in keys and BUILDING not in folder.name:
            built, size, packages = _about(folder.name)
            yield ImageEntry(None, packages, built, size), folder.name


def _about(key: str) -> tuple[bool, int, tuple[str, ...]]:
    try:
        record = json.loads((_environments() / key / RECORD).read_text())
    except FileNotFoundError:
        return False, 0, ()
    return True, record["bytes"], tuple(record["packages"])


# --- environments ------------------------------------------------------------------------


def _environments() -> Path:
    return data_dir() / "images/env"


def _build(image: Image, finished: Path, lock: int, report: Report) -> None:
    _sweep(finished.name)
    folder = Path(tempfile.mkdtemp(prefix=finished.name + BUILDING, dir=finished.parent))
    try:
        install(image, folder, lock, report)
        folder.rename(finished)
    except BaseException as exc:
        if isinstance(exc, WorkStopped) or not isinstance(exc, Exception):
            remove_in_background(folder)  # after Ctrl-C, do not delay the end
        else:
            remove_tree(folder)
        if isinstance(exc, OSError):
            raise BackendUnavailable(
                f"the image could not be built in {finished.parent} ({exc.strerror}); "
                "set HUTCH_DATA_DIR"
            ) from exc
        raise
    report(Progress("done"))


def make_folder(folder: Path) -> None:
    """Make a folder that all users can read. Raises BackendUnavailable if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder, folder.parent):
            path.chmod(0o755)
    except OSError as exc:
        raise BackendUnavailable(
            f"images cannot be kept in {folder} ({exc.strerror}); set HUTCH_DATA_DIR"
        ) from None


def _sweep(
    mine: str | None = None, *, remove: Callable[[Path], None] = remove_in_background
) -> None:
    """Remove what killed builders left: their locks are free. `mine`: a key we have locked."""
    for stale in _environments().glob(f"*{BUILDING}*"):
        key = stale.name.partition(BUILDING)[0]
        if key == mine:
            remove(stale)
            continue
        with locked(_environments() / key, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
            if held is not None:
                remove(stale)


def _remove_environment(key: str, *, of: str) -> bool:
    folder = _environments() / key
    if not folder.is_dir():
        return False
    with locked(_environments() / key, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
        if held is None:
            raise Conflict(f"a box uses {of}, or it is being built; close that first")
        # Rename it first, which is atomic: a folder named by its key is always complete.
        doomed = folder.with_name(key + BUILDING + "removed")
        remove_tree(doomed)
        folder.rename(doomed)
        remove_tree(doomed)
    return True


def _ignore(progress: Progress) -> None:
    pass
