"""grep and its kin: the file once, its matches below it; of very many, some of each file."""

from __future__ import annotations

import re
from itertools import groupby

from .family import CommandLine, Family, Gap, Hidden, Shown, count
from .paths import grouped
from .sift import is_like, like

ROOM = 12 * 1024  # characters; then of each file only so many matches are shown
_EACH = 5
_LONG = 400  # characters of a line, which is then shown in part
_MATCH = re.compile(r"([^\s:][^:\n]{0,400}?)([:-])(\d+)\2(.*)$", re.DOTALL)
_UNNUMBERED = re.compile(r"([\w./@+-]+):(.*)$", re.DOTALL)
_IN_A_PATH = re.compile(r"[\w@+-][./]")


def shorten(call: CommandLine, lines: list[str]) -> Shown:
    if call.has("-l", "-L", "--files", "--files-with-matches", "--files-without-match"):
        return list(grouped(lines))
    pattern = _MATCH if any(is_like(_MATCH, line) for line in lines) else _UNNUMBERED
    found = [_split(pattern, line) for line in lines]
    named = sum(file is not None for file, _ in found)
    if named < 3 or named * 2 < len(lines):
        return _clipped(list(lines))
    is_long = sum(map(len, lines)) > ROOM
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
        if is_long and len(texts) > _EACH + 1:
            shown += [*texts[:_EACH], Hidden(len(texts) - _EACH, f"matches in {file}")]
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
    """Of a line as long as a file, where it begins: the match is a recall away."""
    clipped: Shown = []
    for line in shown:
        if isinstance(line, str) and len(line) > _LONG and count(line) == 1:
            clipped += [line[:_LONG], Hidden(0, characters=len(line) - _LONG)]
        else:
            clipped.append(line)
    return clipped


SEARCH = (
    Family("grep", ("grep", "egrep", "fgrep", "rg", "ag", "ack", "ugrep", "zgrep"), shorten,
           is_content=True),
)  # fmt: skip
