"""Where images are kept: folders of packages, named by content, and names that people give them.

    images/env/<key>/           an environment, finished; it never changes
    images/env/<key>.lock       who uses it, and who is about to build or remove it
    images/env/<key>.building-* an environment in the making
    images/names/<name>.json    what a name stands for

The lock tells all. Whoever builds or removes has it alone, until the programs they start have
ended; whoever uses the folder shares it. The kernel lets go of it for those who die, so there is
nothing to repair: what lies half-built and is not locked has no owner any more.
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
POLL = 0.1  # seconds between two looks at an image that another process builds
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_RESERVED = {"host"}  # not made of packages: the /usr of this machine


@dataclass(frozen=True)
class ImageEntry:
    """One line of a list of images. An environment that has no name is one, too."""

    name: str | None
    packages: tuple[str, ...]
    built: bool
    bytes: int
    kind: str = "packages"  # or "oci": from elsewhere
    digest: str | None = None  # of what is from elsewhere


def find(image: str | Image) -> Image:
    """The image of that name. Raises NotFound."""
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
    """The nearest of the known names, as the next words of a message; or nothing."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" (did you mean {near[0]!r}?)" if near else ""


def look_up(name: str) -> Image | None:
    """The image of that name, if there is one that is made of packages."""
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
    """How to use an image that is built. Raises NotFound if there is none, or it is not built."""
    found = find(image)
    folder = _environments() / found.key
    if not folder.is_dir():
        what = f"image {found.name!r}" if found.name else "this image"
        raise NotFound(f"{what} is not built yet: hutch image build {found.name or 'NAME'}")
    place = folder / SITE_PACKAGES
    return BuiltImage(folder, place, found.preload, interpreter_in_box(), base_prefix(), VERSION)


def build(image: str | Image, progress: Report | None = None) -> BuiltImage:
    """Build an image, at once if it is there; and keep its name, if it has one.

    Many processes may do so together: one builds, the others wait for it. However a build ends,
    there is either the whole environment or none, and the name stands for what it stood for
    before. An exception raised by `progress` stops the build. Raises NotFound, InvalidRequest if
    the packages cannot be had, and BackendUnavailable if this machine cannot get or keep them.
    """
    found = find(image)
    if found.name:
        _check_name(found.name)
        if found != BUILT_IN.get(found.name, found):
            raise InvalidRequest(f"{found.name!r} is built in; choose another name for yours")
    report = progress or _ignore
    folder = _environments() / found.key
    if not folder.is_dir():
        make_folder(folder.parent)
    while not folder.is_dir():
        with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
            if held is None:
                report(Progress("waiting"))
                time.sleep(POLL)  # not in `flock`: no Ctrl-C ends that in another thread
                continue
            if not folder.is_dir():
                _build(found, folder, held, report)
    if found.name and found.name not in BUILT_IN:
        _keep_name(found)
    return resolve(found)


def hold(ready: BuiltImage) -> int:
    """A descriptor that keeps the environment from being removed until it is closed.

    It is closed by the end of the process at the latest, and of those that inherit it. Raises
    NotFound if the environment has just been removed.
    """
    try:
        held = lock(ready.folder, fcntl.LOCK_SH)
        if ready.folder.is_dir():
            return held
        os.close(held)
    except FileNotFoundError:
        pass  # and all others with it
    raise NotFound("this image has just been removed; build it again")


def remove(name: str) -> bool:
    """Forget a name, and remove its environment if no other name stands for the same.

    Of an image that Hutch has built in, only the environment is removed. Raises NotFound, and
    Conflict if a box uses it; then nothing is changed. Whether there was anything to remove.
    """
    image = find(name)
    others = [other for other in names() if other != name and find(other).key == image.key]
    removed = not others and _remove_environment(image.key, of=name)
    if name not in BUILT_IN:
        _record_of(name).unlink(missing_ok=True)
        return True
    return removed


def prune() -> list[ImageEntry]:
    """Remove all environments that no name stands for and no box uses. Those that were removed."""
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
    """All images by name, built or not, and then environments without a name."""
    return [entry for entry, _ in _listed()]


# --- names -------------------------------------------------------------------------------


def names() -> list[str]:
    """Of images made of packages: those that are built in, and those of this machine."""
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
            pass  # boxes of before may go on; `prune` finds it when they are gone


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
            remove_in_background(folder)  # somebody pressed Ctrl-C
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
    """Raises BackendUnavailable."""
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
    """Remove what builders left that were killed: theirs are the locks that can be had."""
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
        # First under another name, at once: a folder with the right name is always whole.
        doomed = folder.with_name(key + BUILDING + "removed")
        remove_tree(doomed)
        folder.rename(doomed)
        remove_tree(doomed)
    return True


def _ignore(progress: Progress) -> None:
    pass
