"""The outputs of one session that can still be read, by name."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from hutch.errors import NotFound
from hutch.types import Piece

from .lasting import LastingOutput
from .output import Output

KEPT_OUTPUTS = 64  # of commands that have ended; older ones are forgotten
_FILE = re.compile(r"([op])([1-9][0-9]{0,8})(\.index)?")


class Outputs:
    """`o1`, `o2` and so on are of commands; a program's has its own name. On one command's worth
    of disk.
    """

    def __init__(self, folder: Path, limit: int, lasting: bool = False) -> None:
        """`lasting`: the folder is this session's alone, and is found again by the next process."""
        self.folder, self._limit, self._lasting = folder, limit, lasting
        self._outputs: dict[str, Output] = {}
        self._numbers = itertools.count(1)

    def recover(self) -> int:
        """Find what another process left. The highest number in any name of it."""
        numbers = {"o": 0, "p": 0}
        found = [match for path in self.folder.iterdir() if (match := _FILE.fullmatch(path.name))]
        for match in sorted(found, key=lambda match: int(match[2])):
            kind, number = match[1], int(match[2])
            id = f"{kind}{number}"
            numbers[kind] = max(numbers[kind], number)
            if id not in self._outputs:
                output = self._outputs[id] = LastingOutput(id, self.folder / id, self._limit)
                output.settle()
        self._numbers = itertools.count(numbers["o"] + 1)
        return numbers["p"]

    def new(self) -> Output:
        """Of a command."""
        id = f"o{next(self._numbers)}"
        output = self._outputs[id] = Output(id, self._path(id), self._limit)
        return output

    def of_program(self, id: str) -> Output:
        """The one it has, or a new one."""
        if id not in self._outputs:
            kind = LastingOutput if self._lasting else Output
            self._outputs[id] = kind(id, self._path(id), self._limit)
        self._outputs[id].ended = False
        return self._outputs[id]

    def _path(self, id: str) -> Path:
        # Boxes that do not outlive this process share a folder, and each counts from 1.
        return self.folder / (id if self._lasting else f"{id}-{os.urandom(8).hex()}")

    def read(self, id: str, offset: int, length: int) -> Piece:
        output = self._outputs.get(id)
        if output is None:
            raise NotFound(f"no output {id!r} is kept for this box")
        return output.read(offset, length)

    def finish(self, output: Output) -> None:
        """No more will come of it, and its Result has been made."""
        output.end()
        if not output.both.truncated:
            self.drop(output)  # its Result has all of it
        ended = [o for o in self._outputs.values() if o.ended]
        for old in ended[:-KEPT_OUTPUTS]:
            self.drop(old)
        # One command's worth of disk for all of them together: the newest is kept whole.
        total = 0
        for old in reversed(ended[-KEPT_OUTPUTS:]):
            total += old.total
            if total > self._limit and old is not ended[-1]:
                self.drop(old)

    def drop(self, output: Output) -> None:
        output.close()
        self._outputs.pop(output.id, None)

    def leave(self) -> None:
        """Keep nothing open; what is on disk stays there, for `recover`."""
        for output in self._outputs.values():
            output.leave()

    def close(self) -> None:
        for output in list(self._outputs.values()):
            self.drop(output)
