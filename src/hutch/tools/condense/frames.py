"""Source code that compilers, linters and runtimes print around a place.

The place and the message say what is wrong, and the source is in the file, so it is hidden. Labels
below it (`^^^ expected u8, found &str`) and suggested replacements stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .family import Hidden, Shown, count
from .sift import is_like, like

SOURCE = "source around these places"
FRAMES = "frames of libraries, source"
# `12 |     code`, `   | ^^^`, `> 12 | code` of jest, `  3| code` of vitest
_GUTTER = re.compile(r"(?:>|\s)*(?P<number>\d+|\.\.\.|\+\+\+|LL)?\s*\|(?P<text>$|[\s|_+].*$)")
_CHANGE = re.compile(r"(?:\d+ +| +|LL )(?P<sign>[-+~])(?: (?P<text>.*))?$")
_MARKS = re.compile(r"[\s|_^~+=-]*")
_PLACE = re.compile(r"\s*(?:-->|:::) \S|\S[^:\n]{0,300}:\d+|\s+at \S|\s*❯ ")
_POINTED_AT = re.compile(r"(?=[\s\d])(?!\s*(?:-->|:::|at|❯) )")
_POINTS = re.compile(r"\s*(?:\d+\s*)?[\^~][\s\^~]*$")


def frameless(lines: Iterable[str | Hidden]) -> Shown:
    """The lines without source code; a marker at the end counts it."""
    rest = list(lines)
    shown: Shown = []
    labels: list[str] = []
    hidden = 0
    is_help = is_after_place = is_change = False
    for at, line in enumerate(rest):
        if isinstance(line, Hidden):
            shown.append(line)
            continue
        gutter = like(_GUTTER, line) if is_after_place or is_help else None
        change = like(_CHANGE, line) if is_change and not gutter else None
        if change:
            if change["sign"] == "-":
                hidden += count(line)
            else:
                shown.append(f"  {(change['text'] or '').strip()}")
            continue
        if gutter:
            text = gutter["text"]
            if gutter["number"] and is_help and not is_change:
                shown.append(f"  {text.strip()}")
                continue
            hidden += count(line)
            if not gutter["number"] and (marks := _MARKS.match(text)) and text[marks.end() :]:
                labels.append(text[marks.end() :].rstrip())
            continue
        if labels:
            shown.append(f"  {'; '.join(dict.fromkeys(labels))}")
            labels = []
        if is_after_place and is_like(_POINTS, line):
            hidden += count(line)
            if shown and isinstance(last := shown[-1], str) and is_like(_POINTED_AT, last):
                shown.pop()
                hidden += count(last)
            continue
        is_help = line.startswith(("help:", "  help:"))
        is_change = is_help and _has_changes(rest, at + 1)
        if line.strip():
            is_after_place = is_like(_PLACE, line) or (is_after_place and line.startswith(" "))
        shown.append(line)
    if labels:
        shown.append(f"  {'; '.join(dict.fromkeys(labels))}")
    return [*shown, Hidden(hidden, SOURCE)] if hidden else shown


def _has_changes(lines: Shown, at: int) -> bool:
    """Whether a suggestion begins here that marks the lines it changes; others are context."""
    for number, line in enumerate(lines[at:]):
        if isinstance(line, Hidden):
            return False
        if not like(_GUTTER, line):
            return number > 0 and is_like(_CHANGE, line)
    return False


# ------------------------------------------------------------------------------------ tracebacks

_FILE = re.compile(
    r'(?P<indent>\s*)File "(?P<path>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?$'
)
_LIBRARY = re.compile(r"/(?:lib|lib64)/python\d|/(?:site|dist)-packages/|<frozen |<string>$")
_FOREIGN = re.compile(
    r"\s+at (?:.*[( ])?(?:node:|internal/)|\s+at .*/node_modules/"  # Node
    r"|\s+at (?:java\.|jdk\.|sun\.|org\.junit\.|org\.apache\.(?:maven|surefire)\.)\S+\("  # Java
    r"|\s+❯ .*(?:node_modules/|node:)"
)
_SOME_FRAME = re.compile(r'^[ \t]*(?:File "|at |❯ |/)', re.MULTILINE)
# Of Rust, a frame of the standard library or of a crate from a registry, below its name.
_RUST_FRAME = re.compile(r"\s+at (?:/rustc/|\S*/rustlib/src/|\S*/\.cargo/registry/)\S+:\d+$")
_RUST_NAME = re.compile(r"\s+\d+: \S")
_GO_FRAME = re.compile(r"\t(?:/\S+)?/go/src/\S+\.go:\d+(?: \+0x[0-9a-f]+)?$")


def traces(lines: Iterable[str | Hidden]) -> Shown:
    """Python's tracebacks with one line per frame, and without source of libraries.

    The last frame of a traceback, where the error was raised, keeps its source. Of Node, Java, Go
    and Rust, frames inside the runtime and its libraries are hidden.
    """
    rest = list(lines)
    # Most outputs have no frames at all, and this check is fast.
    if not _SOME_FRAME.search("\n".join(line for line in rest if isinstance(line, str))):
        return rest
    shown: Shown = []
    hidden = at = 0
    while at < len(rest):
        line = rest[at]
        at += 1
        if isinstance(line, Hidden):
            shown.append(line)
            continue
        if frame := like(_FILE, line):
            end = at
            while end < len(rest) and _is_source(rest[end], frame["indent"]):
                end += 1
            source = [str(text).strip() for text in rest[at:end] if not _is_marks(text)]
            is_last = end >= len(rest) or not is_like(_FILE, str(rest[end]))
            at = end
            place = f"{frame['indent']}{frame['path']}:{frame['line']}"
            place += f" in {frame['name']}" if frame["name"] else ""
            if not source or (_LIBRARY.search(frame["path"]) and not is_last):
                hidden += len(source)
                shown.append(place)
            else:
                shown.append(f"{place}: {' '.join(source)}")
        elif is_like(_FOREIGN, line):
            hidden += count(line)
        elif shown and isinstance(name := shown[-1], str) and _is_of_library(name, line):
            shown.pop()
            hidden += 2
        else:
            shown.append(line)
    return [*shown, Hidden(hidden, FRAMES)] if hidden else shown


def _is_of_library(name: str, place: str) -> bool:
    if is_like(_RUST_FRAME, place):
        return is_like(_RUST_NAME, name)
    return is_like(_GO_FRAME, place)


def _is_marks(line: str | Hidden) -> bool:
    return isinstance(line, str) and is_like(_POINTS, line)


def _is_source(line: str | Hidden, indent: str) -> bool:
    return isinstance(line, str) and line.startswith(f"{indent}  ") and not is_like(_FILE, line)
