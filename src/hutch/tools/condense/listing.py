"""Files by name: what all entries have in common is said once, folders before their names."""

from __future__ import annotations

import re
from collections import Counter

from .family import CommandLine, Family, Shown
from .paths import grouped
from .sift import is_like, like

_LONG = re.compile(
    r"([-dlbcpsD][-rwxsStTl]{9}[.+@]?) +(\d+) +(\S+) +(\S+) +(\d[\d,.]*[KMGTPkB]?|\d+, +\d+) +"
    r"([A-Z][a-z]{2} +\d+ +(?:\d\d:\d\d|\d{4})|\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d\.\d+ [+-]\d{4})?)"
    r" (.*)$"
)
_BRANCH = re.compile(r"^((?:[│|] {3}|[│|]\xa0\xa0 | {4})*)(?:[├└|`][─-]{2}\s)(.*)$")


def _ls(call: CommandLine, lines: list[str]) -> Shown:
    """`ls -l`: rights, links and owners that most have are said once; columns are squeezed."""
    entries = [like(_LONG, line) for line in lines]
    found = [entry for entry in entries if entry]
    if len(found) < 4:
        return list(lines)
    (usual, times), *_ = Counter(_who(entry) for entry in found).most_common(1)
    (day, days), *_ = Counter(_squeezed(entry[6]) for entry in found).most_common(1)
    said = [usual] if times > 2 else []
    said += [day] if days > 2 and days * 2 > len(found) else []
    if not said:
        return list(lines)
    shown: Shown = [f"[unless told otherwise: {', '.join(said)}]"]
    for line, entry in zip(lines, entries, strict=True):
        if not entry:
            shown.append(line)
            continue
        who, when = _who(entry), _squeezed(entry[6])
        parts = [who] if who not in said else []
        parts += [entry[5]] + ([when] if when not in said else []) + [entry[7]]
        shown.append(" ".join(parts))
    return shown


def _who(entry: re.Match[str]) -> str:
    return f"{entry[1]} {entry[2]} {entry[3]} {entry[4]}"


def _squeezed(text: str) -> str:
    return re.sub(" +", " ", text)


def _tree(call: CommandLine, lines: list[str]) -> Shown:
    """Lines drawn between names as spaces before them: one for each folder they are in."""
    shown: Shown = []
    branches = 0
    for line in lines:
        found = like(_BRANCH, line)
        branches += bool(found)
        shown.append(" " * (len(found[1]) // 4 + 1) + found[2] if found else line)
    return shown if branches > 3 else list(lines)


def _find(call: CommandLine, lines: list[str]) -> Shown:
    named = [line for line in lines if line and not line.startswith("find: ")]
    others = [line for line in lines if line and line.startswith("find: ")]
    return [*others, *grouped(named)]


def _prints_paths(call: CommandLine) -> bool:
    return not call.has(
        "-exec", "-execdir", "-ok", "-printf", "-fprintf", "-ls", "-print0", "-x", "-X", "--exec",
        "-l", "--list-details", "-delete",
    )  # fmt: skip


def _looks_like_tree(lines: list[str]) -> bool:
    return sum(is_like(_BRANCH, line) for line in lines[:40]) > 10


LISTING = (
    Family("ls", ("ls", "ll", "exa", "eza", "lsd"), _ls, is_content=True),
    Family("tree", ("tree",), _tree, looks_like=_looks_like_tree, is_content=True),
    Family("find", ("find", "fd", "fdfind", "locate"), _find, _prints_paths, is_content=True),
)
