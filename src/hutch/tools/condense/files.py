"""Files: their names, matches in them, and their contents.

A listing says once what all its entries have in common, and a folder once for all its names. A
search names each file once, above its matches; of very many matches, it shows some of each file.
Contents are shown as they are: only what is very long is cut.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby

from .family import CommandLine, Family, Gap, Hidden, Shown, count
from .sift import grouped, is_like, like

# --- names ------------------------------------------------------------------------------

_LONG = re.compile(
    r"([-dlbcpsD][-rwxsStTl]{9}[.+@]?) +(\d+) +(\S+) +(\S+) +(\d[\d,.]*[KMGTPkB]?|\d+, +\d+) +"
    r"([A-Z][a-z]{2} +\d+ +(?:\d\d:\d\d|\d{4})|\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d\.\d+ [+-]\d{4})?)"
    r" (.*)$"
)
_BRANCH = re.compile(r"^((?:[│|] {3}|[│|]\xa0\xa0 | {4})*)(?:[├└|`][─-]{2}\s)(.*)$")


def _ls(call: CommandLine, lines: list[str]) -> Shown:
    """`ls -l`: the most common mode, links and owner are shown once; columns lose their padding."""
    entries = [like(_LONG, line) for line in lines]
    parsed = [entry for entry in entries if entry]
    if len(parsed) < 4:
        return list(lines)
    (usual, times), *_ = Counter(_who(entry) for entry in parsed).most_common(1)
    (day, days), *_ = Counter(_squeezed(entry[6]) for entry in parsed).most_common(1)
    common = [usual] if times > 2 else []
    common += [day] if days > 2 and days * 2 > len(parsed) else []
    if not common:
        return list(lines)
    shown: Shown = [f"[unless told otherwise: {', '.join(common)}]"]
    for line, entry in zip(lines, entries, strict=True):
        if not entry:
            shown.append(line)
            continue
        who, when = _who(entry), _squeezed(entry[6])
        parts = [who] if who not in common else []
        parts += [entry[5]] + ([when] if when not in common else []) + [entry[7]]
        shown.append(" ".join(parts))
    return shown


def _who(entry: re.Match[str]) -> str:
    return f"{entry[1]} {entry[2]} {entry[3]} {entry[4]}"


def _squeezed(text: str) -> str:
    return re.sub(" +", " ", text)


def _tree(call: CommandLine, lines: list[str]) -> Shown:
    """Indentation in place of drawn branches: one space for each folder."""
    shown: Shown = []
    branches = 0
    for line in lines:
        branch = like(_BRANCH, line)
        branches += bool(branch)
        shown.append(" " * (len(branch[1]) // 4 + 1) + branch[2] if branch else line)
    return shown if branches > 3 else list(lines)


def _find(call: CommandLine, lines: list[str]) -> Shown:
    named = [line for line in lines if line and not line.startswith("find: ")]
    others = [line for line in lines if line and line.startswith("find: ")]
    return [*others, *grouped(named)]


def _prints_paths(call: CommandLine) -> bool:
    return not call.has(
        "-exec",
        "-execdir",
        "-ok",
        "-printf",
        "-fprintf",
        "-ls",
        "-print0",
        "-x",
        "-X",
        "--exec",
        "-l",
        "--list-details",
        "-delete",
    )


def _looks_like_tree(lines: list[str]) -> bool:
    return sum(is_like(_BRANCH, line) for line in lines[:40]) > 10


# --- matches ----------------------------------------------------------------------------

_ROOM = 12 * 1024  # characters; then of each file only so many matches are shown
_PER_FILE = 5
_LONG_LINE = 400  # characters; a longer line is cut
_MATCH = re.compile(r"([^\s:][^:\n]{0,400}?)([:-])(\d+)\2(.*)$", re.DOTALL)
_UNNUMBERED = re.compile(r"([\w./@+-]+):(.*)$", re.DOTALL)
_IN_A_PATH = re.compile(r"[\w@+-][./]")


def _grep(call: CommandLine, lines: list[str]) -> Shown:
    if call.has("-l", "-L", "--files", "--files-with-matches", "--files-without-match"):
        return list(grouped(lines))
    pattern = _MATCH if any(is_like(_MATCH, line) for line in lines) else _UNNUMBERED
    found = [_split(pattern, line) for line in lines]
    named = sum(file is not None for file, _ in found)
    if named < 3 or named * 2 < len(lines):
        return _clipped(list(lines))
    is_long = sum(map(len, lines)) > _ROOM
    shown: Shown = []
    for file, group in groupby(found, lambda pair: pair[0]):
        texts = [text for _, text in group]
        if file is None:
            shown += [text for text in texts if text != "--" or pattern is not _MATCH]
            continue
        if len(texts) == 1:
            shown.append(f"{file}:{texts[0]}")
            continue
        shown.append(f"{file}:")
        if is_long and len(texts) > _PER_FILE + 1:
            shown += [*texts[:_PER_FILE], Hidden(len(texts) - _PER_FILE, f"matches in {file}")]
        else:
            shown += texts
    return _clipped(shown)


def _split(pattern: re.Pattern[str], line: str) -> tuple[str | None, str]:
    found = like(pattern, line)
    if not found or isinstance(line, Gap):
        return None, line
    if pattern is _UNNUMBERED:
        return (found[1], found[2]) if _IN_A_PATH.search(found[1]) else (None, line)
    return found[1], f"{found[3]}{found[2]}{found[4]}"


def _clipped(shown: Shown) -> Shown:
    """Only the beginning of very long lines: `recall` has the rest."""
    clipped: Shown = []
    for line in shown:
        if isinstance(line, str) and len(line) > _LONG_LINE and count(line) == 1:
            clipped += [line[:_LONG_LINE], Hidden(0, characters=len(line) - _LONG_LINE)]
        else:
            clipped.append(line)
    return clipped


# --- contents ---------------------------------------------------------------------------


def _as_it_is(call: CommandLine, lines: list[str]) -> Shown:
    return list(lines)


FILES = (
    Family("ls", ("ls", "ll", "exa", "eza", "lsd"), _ls, is_content=True),
    Family("tree", ("tree",), _tree, looks_like=_looks_like_tree, is_content=True),
    Family("find", ("find", "fd", "fdfind", "locate"), _find, _prints_paths, is_content=True),
    Family(
        "grep",
        ("grep", "egrep", "fgrep", "rg", "ag", "ack", "ugrep", "zgrep"),
        _grep,
        is_content=True,
    ),
)
CONTENTS = Family(
    "file",
    ("cat", "head", "tail", "sed", "bat", "nl", "less", "more", "awk", "xxd", "od"),
    _as_it_is,
    is_content=True,
)
