"""What git would not look at: the rules of every .gitignore on the way to a file.

The last rule that fits decides, and the rules of a folder come after those of the folders above it.
What is in a folder that is ignored cannot be asked for again; so a walk that leaves such a folder
out has it right. They hold where there is no repository, too: the rules are there to be read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from .agent import RequestError
from .folders import open_regular
from .patterns import path

SIZE = 1024 * 1024  # of a file of rules that is read
LENGTH = 4096  # of a rule; no path that is longer could be opened


@dataclass(frozen=True)
class Rule:
    fits: re.Pattern[str]
    again: bool  # `!`: what it fits is not ignored after all
    folders_only: bool
    whole: bool  # it is about the path from the folder of its file on, and not about a name


@dataclass(frozen=True)
class Rules:
    """The rules of one file, and those that are above."""

    folder: str
    own: tuple[Rule, ...]  # the last first
    above: Rules | None

    def ignores(self, full: str, is_folder: bool) -> bool:
        rules: Rules | None = self
        while rules:
            start = len(rules.folder.rstrip("/")) + 1
            last = full.rfind("/") + 1
            for rule in rules.own:
                if rule.folders_only and not is_folder:
                    continue
                if rule.fits.fullmatch(full, start if rule.whole else last):
                    return not rule.again
            rules = rules.above
        return False


class Ignored:
    """Asked about entries of a walk from `base` down, parents before children."""

    def __init__(self, base: str) -> None:
        top = base
        while top != "/" and not os.path.lexists(os.path.join(top, ".git")):
            top = os.path.dirname(top)
        below = [part for part in base[len(top) :].split("/") if part]
        self._rules = {top: _read(top, None)}
        for part in below:
            inner = os.path.join(top, part)
            self._rules[inner] = _read(inner, self._rules[top])
            top = inner

    def __call__(self, entry: dict[str, Any]) -> bool:
        full: str = entry["path"]
        folder, name = os.path.split(full)
        if name == ".git":
            return True
        is_folder = entry["kind"] == "dir"
        rules = self._rules[folder]
        if rules and rules.ignores(full, is_folder):
            return True
        if is_folder:
            own = os.path.lexists(os.path.join(full, ".git"))  # a repository in another
            self._rules[full] = _read(full, None if own else rules)
        return False


def _read(folder: str, above: Rules | None) -> Rules | None:
    names = (".git/info/exclude", ".gitignore") if above is None else (".gitignore",)
    for name in names:
        if found := parse(_content(os.path.join(folder, name))):
            above = Rules(folder, found, above)
    return above


def _content(file: str) -> str:
    try:
        fd, _ = open_regular(file)
    except (OSError, RequestError):
        return ""
    with os.fdopen(fd, "rb") as opened:
        return os.fsdecode(opened.read(SIZE))


def parse(text: str) -> tuple[Rule, ...]:
    """The rules of a .gitignore, the last first."""
    lines = text.removeprefix("\ufeff").split("\n")
    found = (_rule(line.removesuffix("\r")) for line in reversed(lines))
    return tuple(rule for rule in found if rule)


def _rule(line: str) -> Rule | None:
    if line.startswith("#") or len(line) > LENGTH:
        return None
    again = line.startswith("!")
    pattern = _without_spaces(line[again:])
    folders_only = pattern.endswith("/")
    pattern = pattern.rstrip("/") if folders_only else pattern
    if not pattern.strip("/"):
        return None
    return Rule(re.compile(path(pattern, escapes=True), re.DOTALL), again, folders_only,
                "/" in pattern)  # fmt: skip


def _without_spaces(pattern: str) -> str:
    """Those at its end, but one that stands after a backslash."""
    bare = pattern.rstrip(" ")
    escaped = (len(bare) - len(bare.rstrip("\\"))) % 2
    return bare + " " if escaped and len(bare) < len(pattern) else bare
