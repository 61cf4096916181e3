"""A family of commands: the programs it knows, and how their output is shortened.

A family gets lines without their newlines, free of colours and redrawn progress. It returns lines,
and a `Hidden` in place of those that it leaves out, so that every hidden line is counted. What it
does not recognise, it returns unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class CommandLine:
    """The program whose output this is, without environment, redirections and wrappers.

    `FOO=1 sudo timeout 10 python -m pytest -q 2>&1` is ("pytest", "-q").
    """

    argv: tuple[str, ...]
    exit_code: int | None  # of the whole command line; None: it was killed

    @property
    def program(self) -> str:
        return self.argv[0] if self.argv else ""

    @property
    def action(self) -> str:
        """The first word that is not an option: `status` in `git -c a=b status`, or ""."""
        takes_value = False
        for word in self.argv[1:]:
            if takes_value:
                takes_value = False
            elif not word.startswith("-"):
                return word
            else:
                takes_value = word in _WITH_VALUE
        return ""

    def has(self, *options: str) -> bool:
        """Whether one of these options is given; `--json=x` counts as `--json`."""
        return any(word.split("=", 1)[0] in options for word in self.argv[1:])

    @property
    def failed(self) -> bool:
        return self.exit_code != 0


# Options before the action that take the word after them, of the programs that have actions.
_WITH_VALUE = frozenset({
    "-C", "-c", "--git-dir", "--work-tree", "--namespace", "-n", "--context", "-H", "--host",
    "--prefix", "--cwd", "--dir", "--manifest-path", "--project", "--directory", "--config",
})  # fmt: skip


@dataclass(frozen=True)
class Hidden:
    """Lines that are not shown: `[118 lines of passed tests hidden: recall("k7f3")]`."""

    lines: int
    what: str = ""  # "passed tests"; comes after "lines of"
    characters: int = 0  # instead of lines: how many are hidden in the middle of one line


class Gap(str):
    """Stands for lines in the middle of a very long output that are not in memory any more."""

    lines: int
    what: str


class Again(str):
    """Stands for repeats of the line before it. Its text says how many."""

    times: int


Shown = list[str | Hidden]
Shorten = Callable[[CommandLine, list[str]], Shown]


@dataclass(frozen=True)
class Family:
    """Commands whose outputs look alike."""

    name: str  # "git status": what `hutch gain` lists
    programs: tuple[str, ...]  # their base names
    shorten: Shorten
    matches: Callable[[CommandLine], bool] | None = None  # which calls of these programs; None: all
    # Recognises the output itself: for `make test` or a chain, where no program's name decides.
    looks_like: Callable[[list[str]], bool] | None = None
    # The output is what was asked for (files, matches, a diff), not a report of how something went:
    # a word like "error" in it is just a word.
    is_content: bool = False
    # The output reports failures, and the family itself makes sure that they stay.
    has_failures: bool = False

    def knows(self, call: CommandLine) -> bool:
        return call.program in self.programs and (self.matches is None or self.matches(call))


def count(line: str | Hidden) -> int:
    """How many lines of the output it stands for."""
    if type(line) is str:  # most lines are, and this check is the fastest
        return 1
    if isinstance(line, Gap | Hidden):
        return line.lines
    return line.times if isinstance(line, Again) else 1
