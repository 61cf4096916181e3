"""The outputs of one session that can still be read by name."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from hutch.errors import NotFound
from hutch.types import Piece

from .output import Output, PersistentOutput

KEPT_OUTPUTS = 128  # that have ended; older ones are forgotten
ENDS = 16 * 1024  # bytes; a journal has the beginning and the end of what is longer
SHORT = 1000  # bytes; short outputs are counted separately, and never evict a long one
LAST_NAMES = "names"  # a file with the last names that were given, for those that are gone
LETTERS = "bcdfghjkmnpqrstvwxz"  # without vowels, so that they form no words
_NAME = re.compile(r"([op])([1-9][0-9]{0,8})([a-z]{4})?")


class Outputs:
    """`o1fkzt`, `o2fkzt`… are outputs of commands; a program's has the name of the program: `p1`.

    The letters are different in each box, so that a name from another box is not found. Outputs
    that have ended share the disk space of one command: the newest is kept whole, and as many
    before it as fit.
    """

    def __init__(self, folder: Path, limit: int, persistent: bool = False) -> None:
        """`persistent`: the folder is for this session only, and the next process reads it.

        Such a session has a journal, whose reader wants the whole of what is longer than `ENDS`.
        """
        self.folder, self._limit, self._persistent = folder, limit, persistent
        self._outputs: dict[str, Output] = {}
        self._ended: dict[str, int] = {}  # in the order of that, with the bytes each has on disk
        self._last = {"o": 0, "p": 0}  # the highest numbers that were given
        self._letters = {"o": "".join(secrets.choice(LETTERS) for _ in range(4)), "p": ""}

    def recover(self) -> int:
        """Find what another process left. Returns the highest number in a program's name."""
        with contextlib.suppress(FileNotFoundError):
            for name in (self.folder / LAST_NAMES).read_text().split():
                self._note(name)
        modified: dict[str, int] = {}  # by name
        for path in self.folder.iterdir():
            id = path.name.removesuffix(".index")
            if _NAME.fullmatch(id):
                modified[id] = max(modified.get(id, 0), path.stat().st_mtime_ns)
        for id in sorted(modified, key=lambda id: modified[id]):
            self._note(id)
            output = self._outputs[id] = PersistentOutput(id, self.folder / id, self._limit)
            output.settle()
            self._ended[id] = output.on_disk
        return self._last["p"]

    def new(self, keep: bool = False) -> Output:
        """The output of a new command. `keep`: it can be read even if its Result has all of it."""
        id = f"o{self._last['o'] + 1}{self._letters['o']}"
        self._note(id)
        keep_above = 0 if keep else ENDS if self._persistent else None
        output = self._outputs[id] = Output(id, self._path(id), self._limit, keep_above)
        return output

    def of_program(self, id: str) -> Output:
        """The output of a program, made if it is new."""
        self._note(id)
        if id not in self._outputs:
            kind = PersistentOutput if self._persistent else Output
            self._outputs[id] = kind(id, self._path(id), self._limit)
        return self._outputs[id]

    def resume(self, output: Output) -> None:
        """More will come of a program."""
        output.ended = False
        self._ended.pop(output.id, None)

    def _path(self, id: str) -> Path:
        # Boxes that end with this process share a folder, and each counts programs from 1.
        return self.folder / (id if self._persistent else f"{id}-{os.urandom(8).hex()}")

    def _note(self, id: str) -> None:
        """Remember that this name was given."""
        if name := _NAME.fullmatch(id):
            self._last[name[1]] = max(self._last[name[1]], int(name[2]))
            self._letters[name[1]] = name[3] or self._letters[name[1]]

    def _was_given(self, id: str) -> bool:
        name = _NAME.fullmatch(id)
        if not name or (name[3] or "") != self._letters[name[1]]:
            return False
        return int(name[2]) <= self._last[name[1]]

    def read(self, id: str, offset: int, length: int) -> Piece:
        """Part of an output. Raises NotFound, which says whether it was ever there."""
        output = self._outputs.get(id)
        if output and not output.is_dropped:
            return output.read(offset, length)
        if not self._was_given(id):
            raise NotFound(
                f"there was no output {id!r} in this box; if it was in another, name that one"
            )
        room = f"the newest {self._limit / (1 << 20):g} MiB of this box"
        limit = room if output else f"the last {KEPT_OUTPUTS}, in {room},"
        raise NotFound(f"output {id!r} is not kept any more: {limit} are")

    def finish(self, output: Output) -> None:
        """A command has ended, and its Result was made."""
        output.end()
        if output.both.truncated or output.stays:
            self._ended[output.id] = output.on_disk
            self._sweep()
        else:
            self.drop(output)  # its Result has all of it

    def settle(self, output: Output) -> None:
        """A program has ended."""
        output.settle()
        if self._outputs.get(output.id) is output and output.id not in self._ended:
            self._ended[output.id] = output.on_disk
            if output.on_disk:
                self._sweep()

    def _sweep(self) -> None:
        """Make room for the one that has just ended."""
        total = 0
        counts = {True: 0, False: 0}  # short ones, and others
        for id in list(reversed(self._ended)):
            size = self._ended[id]
            is_newest, total = not total, total + size
            is_short = self._outputs[id].total <= SHORT
            counts[is_short] += 1
            if counts[is_short] > KEPT_OUTPUTS:
                self.forget(self._outputs[id])
            elif size and total > self._limit and not is_newest:
                self._outputs[id].empty()
                self._ended[id] = 0
                self._write_names()

    def forget(self, output: Output) -> None:
        """Drop one whose name a caller may know: it is never given again."""
        self.drop(output)
        self._write_names()

    def _write_names(self) -> None:
        if self._persistent:
            names = " ".join(f"{kind}{n}{self._letters[kind]}" for kind, n in self._last.items())
            with contextlib.suppress(OSError):  # a full disk: it is written the next time
                (self.folder / LAST_NAMES).write_text(names)

    def drop(self, output: Output) -> None:
        output.close()
        if self._outputs.get(output.id) is output:
            del self._outputs[output.id]
            self._ended.pop(output.id, None)

    def leave(self) -> None:
        """Close all descriptors; the files stay for `recover`."""
        for output in self._outputs.values():
            output.leave()

    def close(self) -> None:
        for output in list(self._outputs.values()):
            self.drop(output)
        if self._persistent:
            (self.folder / LAST_NAMES).unlink(missing_ok=True)
