"""Names of files, matches in them, their contents, and data: JSON and environments.

A listing says once what all its entries have in common, and a folder once for all its names. A
search names each file once, above its matches; of very many matches, it shows some of each file.
Contents are shown as they are: only what is very long is cut. JSON loses its white space, and an
array of objects becomes a table with its keys once.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from . import generic
from .family import Again, CommandLine, Family, Gap, Hidden, Shown, count
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


# --- data ---------------------------------------------------------------------------


_MANY = 500  # JSON documents in one output; with more, it is left alone
_ROWS = 3  # objects with the same keys that make a table
_WIDE = 600  # characters; a longer value is shown in parts
_DEEP = 12  # levels of parts within parts
_INDENT = re.compile(r"\n\s*")
_VALUE = 300  # characters of an environment variable
# The repeats are bounded, like the columns of a meter: unbounded ones would backtrack for long.
_DRAWN = re.compile(r"[ \d.kMG]{1,80}(?:[-\d]{1,4}:[-\d:]{1,9} {1,4}){3}[\d.kMG]{1,12}(?=[^\s\d])")
_METER = re.compile(
    r"  % Total    % Received|\s+Dload  Upload"
    r"|[ \d.]{1,20}[kMG]?\s{1,12}\d{1,20} {1,20}[\d.]{1,20}[kMG]? "
)


def _json(call: CommandLine, lines: list[str]) -> Shown:
    """Shorten JSON; before it there may be headers and curl's progress meter."""
    kept, hidden = _without_meter(lines)
    start = next((at for at, line in enumerate(kept) if line[:1] in ("{", "[")), None)
    document = None if start is None else _documents(kept[start:])
    if document is None:
        return [*hidden, *generic.shorten(kept)] if hidden else list(lines)
    try:
        return [*hidden, *kept[:start], *_rendered(document, "\n".join(kept[start:]))]
    except RecursionError:
        return list(lines)


@dataclass(frozen=True)
class _Json:
    values: list[object]
    is_exact: bool  # `json.dumps` of the values gives the same numbers and keys


def _documents(lines: list[str]) -> _Json | None:
    if any(isinstance(line, Gap | Again) for line in lines):
        return None
    oddities: list[str] = []

    def number(text: str) -> float:
        value = float(text)
        if repr(value) != text:  # 1.10 would be shown as 1.1
            oddities.append(text)
        return value

    def table(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) != len(pairs):
            oddities.append("a key twice")
        return members

    text = "\n".join(lines).strip()
    decoder = json.JSONDecoder(parse_float=number, object_pairs_hook=table)
    values = []
    try:
        while text:  # many programs print several documents, one after the other
            value, end = decoder.raw_decode(text)
            values.append(value)
            text = text[end:].lstrip()
            if len(values) > _MANY:
                return None
    except (ValueError, RecursionError):
        return None
    return _Json(values, not oddities) if values else None


def _rendered(document: _Json, text: str) -> Shown:
    if not document.is_exact or len(text) <= 2 * _WIDE:
        # Strings in JSON contain no line breaks, so these are all between values.
        return [_INDENT.sub(" ", text)]
    first, *rest = document.values
    if not rest and isinstance(first, list) and (table := _table(first)):
        return list(table)
    return [line for value in document.values for line in _parts(value, "", _DEEP)]


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _table(rows: list[object]) -> list[str]:
    """The keys once, then the values of each object in a line; empty if it is no table."""
    objects = [row for row in rows if isinstance(row, dict)]
    if len(rows) < _ROWS or len(objects) < len(rows):
        return []
    keys = list(objects[0])
    if not keys or any(list(row) != keys for row in objects):
        return []
    header = f"[{len(rows)} objects, a line each, with the values of: {', '.join(keys)}]"
    return [header, *(_dump(list(row.values()))[1:-1] for row in objects)]


def _parts(value: object, path: str, depth: int) -> list[str]:
    """One line for each part: small values whole, large ones in parts of their own."""
    line = _dump(value)
    if len(line) <= _WIDE or not depth or not value or not isinstance(value, dict | list):
        return [f"{path}: {line}" if path else line]
    if isinstance(value, list) and (table := _table(value)):
        return [f"{path}: {table[0]}", *table[1:]]
    if isinstance(value, list) and not any(isinstance(part, dict | list) for part in value):
        return _packed(value, path)
    lines: list[str] = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        name = f"[{key}]" if isinstance(key, int) else f".{key}"
        lines += _parts(part, path + name, depth - 1)
    return lines


def _packed(values: list[object], path: str) -> list[str]:
    """Several values to a line; each line starts with the index of its first value."""
    lines: list[str] = []
    words: list[str] = []
    size = 0
    for place, value in enumerate(values):
        words.append(_dump(value))
        size += len(words[-1])
        if size > _WIDE or place == len(values) - 1:
            lines.append(f"{path}[{place + 1 - len(words)}...]: {','.join(words)}")
            words, size = [], 0
    return lines


def _without_meter(lines: list[str]) -> tuple[list[str], Shown]:
    if not any(line.startswith("  % Total    % Received") for line in lines):
        return lines, []
    # The last line of the meter may have no newline: then the answer follows in the same line.
    kept = []
    for line in lines:
        if found := _DRAWN.match(line):
            kept.append(line[found.end() :])
        elif not _METER.match(line):
            kept.append(line)
    return kept, [Hidden(len(lines) - len(kept), "progress")]


def _looks_like_json(lines: list[str]) -> bool:
    first = next((line for line in lines if line.strip()), "")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return first[:1] in ("{", "[") and last[-1:] in ("}", "]")  # if it is not JSON, nothing changes


def _env(call: CommandLine, lines: list[str]) -> Shown:
    shown: Shown = []
    for line in lines:
        if len(line) > _VALUE and "=" in line:
            shown += [line[:_VALUE], Hidden(0, characters=len(line) - _VALUE)]
        else:
            shown.append(line)
    return shown


DATA = (
    Family(
        "json",
        ("jq", "json.tool", "yq", "gh", "http", "xh", "aws", "az", "gcloud"),
        _json,
        looks_like=_looks_like_json,
        is_content=True,
    ),
    Family("curl", ("curl", "wget"), _json),
    Family("env", ("env", "printenv", "set"), _env, is_content=True),
)
