"""The saved box of a project (`--persistent`): its files, in a folder of this machine.

    projects/boxes/<name>/state.json    the state, replaced atomically
    projects/boxes/<name>/<part>-*.tar  the folders of the box, as a box packed them
    projects/boxes/<name>.lock          held by the run that uses it

Only a box ever reads what a box packed. An interrupted run leaves everything as it was
before; the next run removes unfinished files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hutch.errors import BackendUnavailable, Conflict, LimitReached
from hutch.images.locks import locked
from hutch.images.store import data_dir

from .tree import Snapshot, TreeEntry

PIECE = 1 << 20
STATE = "state.json"


def name_of(top: Path) -> str:
    """The name of a project's box, unique for each folder."""
    words = re.sub(r"[^a-z0-9]+", "-", top.name.lower()).strip("-")[:32]
    digest = hashlib.sha256(os.fsencode(top)).hexdigest()[:16]
    return f"{words}-{digest}" if words else digest


@dataclass
class SavedState:
    """The state of a saved box."""

    kind: str = ""  # what makes it, and of which image, as options say it
    sent: Snapshot = field(default_factory=dict)  # of the project, when it was last copied
    parts: dict[str, str] = field(default_factory=dict)  # folders of the box, and files with them


class SavedBox:
    """The saved box of one project, locked for this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.state = self._load()
        self._sweep()

    def _load(self) -> SavedState:
        try:
            body = json.loads((self._folder / STATE).read_bytes())
            sent = {path: TreeEntry(**seen) for path, seen in body.pop("sent").items()}
            return SavedState(sent=sent, **body)
        except (OSError, ValueError, TypeError, KeyError):
            return SavedState()

    def read(self, part: str) -> Iterator[bytes] | None:
        """The saved content of a folder of the box."""
        name = self.state.parts.get(part)
        return None if name is None else _pieces(self._folder / name)

    async def write(self, part: str, data: AsyncIterator[bytes], limit: int) -> str:
        """Save a folder of the box. Returns the name of the file, for `SavedState.parts`."""
        prefix = re.sub(r"[^a-z]+", "-", part).strip("-")
        handle, path = tempfile.mkstemp(".tar", prefix + "-", self._folder)
        with open(handle, "wb") as file:
            async for piece in data:
                limit -= len(piece)
                if limit < 0:
                    raise LimitReached(f"{part} of the box is too large to be saved")
                file.write(piece)
        return os.path.basename(path)

    def commit(self, state: SavedState) -> None:
        """Make this the state of the saved box, atomically."""
        body = asdict(state)
        with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
            json.dump(body, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self._folder / STATE)
        self.state = state
        self._sweep()

    def remove(self) -> bool:
        """Remove the saved box. Returns whether there was one."""
        there = (self._folder / STATE).exists()
        shutil.rmtree(self._folder)
        self._folder.mkdir(mode=0o700)
        self.state = SavedState()
        return there

    def _sweep(self) -> None:
        known = {STATE, *self.state.parts.values()}
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink()


@contextmanager
def saved_box(top: Path) -> Iterator[SavedBox]:
    """The saved box of this project. Raises Conflict if another run uses it."""
    folder = data_dir() / "projects/boxes" / name_of(top)
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.parent.chmod(0o700)
            held = stack.enter_context(locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB))
            if held is None:
                raise Conflict(
                    "another run is using the saved box of this project: wait until it has ended"
                )
            folder.mkdir(mode=0o700, exist_ok=True)
            saved = SavedBox(folder)
        except OSError as exc:
            raise BackendUnavailable(
                f"{folder} cannot be used ({exc.strerror}); set HUTCH_DATA_DIR"
            ) from exc
        try:
            yield saved
        finally:
            if not saved.state.parts:
                shutil.rmtree(folder, ignore_errors=True)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(PIECE):
            yield data
