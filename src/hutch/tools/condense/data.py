"""JSON without white space, arrays of objects as tables with their keys once; environments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from . import generic
from .family import Again, CommandLine, Family, Gap, Hidden, Shown

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


def shorten(call: CommandLine, lines: list[str]) -> Shown:
    """Shorten JSON; before it there may be headers and curl's progress meter."""
    kept, hidden = _without_meter(lines)
    start = next((at for at, line in enumerate(kept) if line[:1] in ("{", "[")), None)
    document = None if start is None else _parsed(kept[start:])
    if document is None:
        return [*hidden, *generic.shorten(kept)] if hidden else list(lines)
    try:
        return [*hidden, *kept[:start], *_shown(document, "\n".join(kept[start:]))]
    except RecursionError:
        return list(lines)


@dataclass(frozen=True)
class _Json:
    values: list[object]
    is_exact: bool  # `json.dumps` of the values gives the same numbers and keys


def _parsed(lines: list[str]) -> _Json | None:
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


def _shown(document: _Json, text: str) -> Shown:
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


def _looks_like(lines: list[str]) -> bool:
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
        shorten,
        looks_like=_looks_like,
        is_content=True,
    ),
    Family("curl", ("curl", "wget"), shorten),
    Family("env", ("env", "printenv", "set"), _env, is_content=True),
)
