"""Files found by their names, and lines by what is in them.

All of it runs in a child of the agent, as what is in `folders.py` does.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata  # noqa: F401  `re` wants it for \N{...}, and in a box it is too late to load it
from collections import deque
from collections.abc import Iterator
from io import BufferedReader
from typing import Any

from hutch import wire

from .agent import RequestError
from .folders import EVER_DEEPER, open_regular, walk
from .gitignore import Ignored
from .patterns import compile_glob, expand

LINE_LIMIT = 64 * 1024  # of a line that is searched; longer ones are searched in part
SHOWN_LIMIT = 4096  # of a line that is found
# Of a line beside one. As many as can be asked for, of the widest characters, and the line that is
# found fit into a frame.
BESIDE_LIMIT = 300

# What people call a language, and its files. Any other type is an ending itself.
TYPES = {
    "py": "py,pyi,pyw", "python": "py,pyi,pyw",
    "js": "js,jsx,mjs,cjs", "javascript": "js,jsx,mjs,cjs",
    "ts": "ts,tsx,mts,cts", "typescript": "ts,tsx,mts,cts",
    "rust": "rs", "golang": "go", "ruby": "rb", "kotlin": "kt,kts", "csharp": "cs",
    "c": "c,h", "cpp": "cpp,cc,cxx,hpp,hh,hxx,h", "c++": "cpp,cc,cxx,hpp,hh,hxx,h",
    "sh": "sh,bash,zsh", "shell": "sh,bash,zsh", "html": "html,htm", "css": "css,scss,sass,less",
    "md": "md,mdx,markdown", "markdown": "md,mdx,markdown", "yaml": "yaml,yml", "yml": "yaml,yml",
    "txt": "txt,text", "docker": "dockerfile",
}  # fmt: skip


def glob(base: str, pattern: str, request: wire.Glob) -> Iterator[dict[str, Any]]:
    match = compile_glob(pattern)
    plain = [one.split("/") for one in expand(pattern)]
    depth = EVER_DEEPER if any("**" in parts for parts in plain) else max(map(len, plain))
    start = len(base.rstrip("/")) + 1
    found = (
        entry
        for entry in walk(base, depth, Ignored(base) if request.gitignore else None)
        if match.fullmatch(entry["path"], start) and request.kind in (None, entry["kind"])
    )
    ordered = sorted(found, key=lambda e: -e["modified"]) if request.newest else found
    for entry in ordered:
        yield {"path": entry["path"]}


def search(base: str, request: wire.Search) -> Iterator[dict[str, Any]]:
    try:
        wanted = re.compile(request.pattern, re.IGNORECASE if request.ignore_case else 0)
    except (re.error, RecursionError, OverflowError) as exc:
        raise RequestError("invalid_request", f"not a regular expression: {exc}") from None
    named = compile_glob(request.glob) if request.glob else None
    endings = _endings(request.type) if request.type else None
    left = request.limit
    for path, relative in _files(base, request.gitignore):
        name = os.path.basename(path)
        if named and not (named.fullmatch(relative) or named.fullmatch(name)):
            continue
        if endings and not name.lower().endswith(endings):
            continue
        for found in _matching_lines(path, wanted, request.context, left):
            yield {"path": path, **found}
            left -= 1
        if left <= 0:
            return


def _endings(type_: str) -> tuple[str, ...]:
    plain = type_.lower().lstrip(".")
    endings = tuple(f".{ending}" for ending in TYPES.get(plain, plain).split(","))
    return (*endings, "dockerfile") if plain == "docker" else endings


def _files(base: str, gitignore: bool) -> Iterator[tuple[str, str]]:
    if not stat.S_ISDIR(os.stat(base).st_mode):
        os.close(open_regular(base)[0])  # one file, asked for by name: say why it cannot be read
        yield base, os.path.basename(base)
        return
    start = len(base.rstrip("/")) + 1
    for found in walk(base, leave_out=Ignored(base) if gitignore else None):
        if found["kind"] == "file":
            yield found["path"], found["path"][start:]


def _matching_lines(
    path: str, wanted: re.Pattern[str], context: int, most: int
) -> Iterator[dict[str, Any]]:
    before: deque[str] = deque(maxlen=context)
    waiting: deque[dict[str, Any]] = deque()  # for the lines after them
    for number, text in _lines(path):
        for found in waiting:
            found["after"].append(text[:BESIDE_LIMIT])
        if most > 0 and wanted.search(text):
            most -= 1
            waiting.append({"line": number, "text": text[:SHOWN_LIMIT],
                            "before": list(before), "after": []})  # fmt: skip
        before.append(text[:BESIDE_LIMIT])
        while waiting and len(waiting[0]["after"]) == context:
            yield waiting.popleft()
        if most <= 0 and not waiting:
            return
    yield from waiting


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Those of a file that can be read, and is text."""
    try:
        fd, _ = open_regular(path)
    except (OSError, RequestError):
        return
    with os.fdopen(fd, "rb") as file:
        try:
            yield from _lines_of(file)
        except OSError:
            return  # some files of /proc can be opened, but not read


def _lines_of(file: BufferedReader) -> Iterator[tuple[int, str]]:
    if b"\0" in file.peek(1024)[:1024]:
        return  # binary
    number = 0
    while line := file.readline(LINE_LIMIT):
        number += 1
        yield number, os.fsdecode(line.rstrip(b"\r\n"))
        while len(line) == LINE_LIMIT and not line.endswith(b"\n"):
            line = file.readline(LINE_LIMIT)
