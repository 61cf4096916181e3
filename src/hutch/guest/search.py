"""Search for files by name (globs, .gitignore) and for lines by regular expression.

All of it runs in a child of the agent, like folders.py.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata  # noqa: F401  `re` needs it for \N{...}, and a box forbids later imports
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

from hutch import wire

from .agent import RequestError
from .folders import UNLIMITED, EntryBody, open_regular, walk

LINE_LIMIT = 64 * 1024  # bytes of a line that are searched
MATCH_LIMIT = 4096  # characters of a matching line
# Characters of a context line: so the largest allowed context, in the widest characters, fits into
# one frame with its match.
CONTEXT_LIMIT = 300

# Names of languages, and the endings of their files. Any other type is an ending itself.
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


def glob(base: str, pattern: str, request: wire.Glob) -> Iterator[dict[str, object]]:
    match = compile_glob(pattern)
    plain = [choice.split("/") for choice in expand(pattern)]
    depth = UNLIMITED if any("**" in parts for parts in plain) else max(map(len, plain))
    start = len(base.rstrip("/")) + 1
    entries = (
        entry
        for entry in walk(base, depth, Gitignore(base) if request.gitignore else None)
        if match.fullmatch(entry["path"], start) and request.kind in (None, entry["kind"])
    )
    ordered = sorted(entries, key=lambda e: -e["modified"]) if request.newest else entries
    for entry in ordered:
        yield {"path": entry["path"]}


def search(base: str, request: wire.Search) -> Iterator[dict[str, object]]:
    try:
        wanted = re.compile(request.pattern, re.IGNORECASE if request.ignore_case else 0)
    except (re.error, RecursionError, OverflowError) as exc:
        raise RequestError("invalid_request", f"invalid regular expression: {exc}") from None
    named = compile_glob(request.glob) if request.glob else None
    endings = _endings(request.type) if request.type else None
    left = request.limit
    for path, relative in _files(base, request.gitignore):
        name = os.path.basename(path)
        if named and not (named.fullmatch(relative) or named.fullmatch(name)):
            continue
        if endings and not name.lower().endswith(endings):
            continue
        for match in _matching_lines(path, wanted, request.context, left):
            yield {"path": path, **match}
            left -= 1
        if left <= 0:
            return


def _endings(type_: str) -> tuple[str, ...]:
    plain = type_.lower().lstrip(".")
    endings = tuple(f".{ending}" for ending in TYPES.get(plain, plain).split(","))
    return (*endings, "dockerfile") if plain == "docker" else endings


def _files(base: str, gitignore: bool) -> Iterator[tuple[str, str]]:
    if not stat.S_ISDIR(os.stat(base).st_mode):
        os.close(open_regular(base)[0])  # raises if it cannot be read
        yield base, os.path.basename(base)
        return
    start = len(base.rstrip("/")) + 1
    for entry in walk(base, leave_out=Gitignore(base) if gitignore else None):
        if entry["kind"] == "file":
            yield entry["path"], entry["path"][start:]


def _matching_lines(
    path: str, wanted: re.Pattern[str], context: int, most: int
) -> Iterator[dict[str, object]]:
    before: deque[str] = deque(maxlen=context)
    waiting: deque[dict[str, Any]] = deque()  # matches that lack lines after them
    for number, text in _lines(path):
        for match in waiting:
            match["after"].append(text[:CONTEXT_LIMIT])
        if most > 0 and wanted.search(text):
            most -= 1
            line = {"line": number, "text": text[:MATCH_LIMIT]}
            waiting.append({**line, "before": list(before), "after": []})
        before.append(text[:CONTEXT_LIMIT])
        while waiting and len(waiting[0]["after"]) == context:
            yield waiting.popleft()
        if most <= 0 and not waiting:
            return
    yield from waiting


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a file; none if it cannot be read or is binary."""
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


MAX_RULES_FILE = 1024 * 1024  # bytes that are read of a .gitignore
MAX_RULE = 4096  # characters; longer paths cannot be opened


@dataclass(frozen=True)
class IgnoreRule:
    regex: re.Pattern[str]
    negated: bool  # `!`: a match is not ignored after all
    folders_only: bool
    anchored: bool  # it matches the path below the folder of its file, not only a name


@dataclass(frozen=True)
class IgnoreRules:
    """The rules of one .gitignore, linked to those of the folders above it."""

    folder: str
    own: tuple[IgnoreRule, ...]  # the last first
    above: IgnoreRules | None

    def ignores(self, full: str, is_folder: bool) -> bool:
        rules: IgnoreRules | None = self
        while rules:
            start = len(rules.folder.rstrip("/")) + 1
            last = full.rfind("/") + 1
            for rule in rules.own:
                if rule.folders_only and not is_folder:
                    continue
                if rule.regex.fullmatch(full, start if rule.anchored else last):
                    return not rule.negated
            rules = rules.above
        return False


class Gitignore:
    """Tells whether git ignores an entry, when called for a walk from `base`, parents first.

    The last rule that matches decides, and the rules of a folder come after those of the folders
    above it. Nothing in an ignored folder can be included again, so a walk may skip such folders.
    Rules also apply where there is no repository.
    """

    def __init__(self, base: str) -> None:
        top = base
        while top != "/" and not os.path.lexists(os.path.join(top, ".git")):
            top = os.path.dirname(top)
        below = [part for part in base[len(top) :].split("/") if part]
        self._rules = {top: _read_rules(top, None)}
        for part in below:
            inner = os.path.join(top, part)
            self._rules[inner] = _read_rules(inner, self._rules[top])
            top = inner

    def __call__(self, entry: EntryBody) -> bool:
        full = entry["path"]
        folder, name = os.path.split(full)
        if name == ".git":
            return True
        is_folder = entry["kind"] == "dir"
        rules = self._rules[folder]
        if rules and rules.ignores(full, is_folder):
            return True
        if is_folder:
            own = os.path.lexists(os.path.join(full, ".git"))  # a nested repository
            self._rules[full] = _read_rules(full, None if own else rules)
        return False


def _read_rules(folder: str, above: IgnoreRules | None) -> IgnoreRules | None:
    names = (".git/info/exclude", ".gitignore") if above is None else (".gitignore",)
    for name in names:
        if rules := _parse_rules(_rules_text(os.path.join(folder, name))):
            above = IgnoreRules(folder, rules, above)
    return above


def _rules_text(file: str) -> str:
    try:
        fd, _ = open_regular(file)
    except (OSError, RequestError):
        return ""
    with os.fdopen(fd, "rb") as opened:
        return os.fsdecode(opened.read(MAX_RULES_FILE))


def _parse_rules(text: str) -> tuple[IgnoreRule, ...]:
    """The rules of a .gitignore, the last first."""
    lines = text.removeprefix("\ufeff").split("\n")
    rules = (_rule(line.removesuffix("\r")) for line in reversed(lines))
    return tuple(rule for rule in rules if rule)


def _rule(line: str) -> IgnoreRule | None:
    if line.startswith("#") or len(line) > MAX_RULE:
        return None
    negated = line.startswith("!")
    pattern = _strip_spaces(line[negated:])
    folders_only = pattern.endswith("/")
    pattern = pattern.rstrip("/") if folders_only else pattern
    if not pattern.strip("/"):
        return None
    regex = re.compile(path_regex(pattern, escapes=True), re.DOTALL)
    return IgnoreRule(regex, negated, folders_only, anchored="/" in pattern)


def _strip_spaces(pattern: str) -> str:
    """Strip trailing spaces, except one after a backslash."""
    bare = pattern.rstrip(" ")
    escaped = (len(bare) - len(bare.rstrip("\\"))) % 2
    return bare + " " if escaped and len(bare) < len(pattern) else bare


MAX_BRACES = 256  # patterns that one pattern with braces may expand to


def is_magic(part: str) -> bool:
    return any(char in part for char in "*?[{")


def compile_glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob for paths relative to some folder.

    `*` and `?` stay within a name, `[a-z]` and `[!a-z]` are one character of it, `**` as a whole
    component is any number of folders, also none, and `{a,b}` is either. A leading dot is not
    special. Raises RequestError if braces expand to too many patterns.
    """
    return re.compile("|".join(path_regex(plain) for plain in expand(pattern)), re.DOTALL)


def expand(pattern: str) -> list[str]:
    """Expand the braces of a pattern."""
    done: list[str] = []
    todo = [(pattern, 0)]
    while todo:
        text, start = todo.pop()
        braces = _braces(text, start)
        if not braces:
            done.append(text)
            continue
        at, end, choices = braces
        for choice in reversed(choices):
            todo.append((text[:at] + choice + text[end:], at))
        if len(done) + len(todo) > MAX_BRACES:
            raise RequestError(
                "invalid_request", f"the braces expand to more than {MAX_BRACES} patterns"
            )
    return done


def _braces(text: str, start: int) -> tuple[int, int, list[str]] | None:
    """The place and the choices of the first braces with a comma. Others are literal."""
    while (at := text.find("{", start)) >= 0:
        depth, choices, begin = 0, [], at + 1
        for here in range(at, len(text)):
            char = text[here]
            depth += (char == "{") - (char == "}")
            if depth == 0 or (char == "," and depth == 1):
                choices.append(text[begin:here])
                begin = here + 1
            if depth == 0:
                if len(choices) > 1:
                    return at, here + 1, choices
                break
        start = at + 1
    return None


def path_regex(pattern: str, *, escapes: bool = False) -> str:
    """The regular expression of a pattern without braces."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    out = []
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        if part != "**":
            out.append(_name_regex(part, escapes=escapes) + ("" if last else "/"))
        elif last:
            out.append(".+")
        elif at == 0 or parts[at - 1] != "**":  # two in a row are the same as one
            out.append("(?:[^/]+/)*")
    return "".join(out)


def _name_regex(part: str, *, escapes: bool = False) -> str:
    """The regular expression of one component.

    After a `*`, the first match of the text up to the next `*` is as good as any other. So there is
    no backtracking (`(?>`), and no pattern is slow.

    `escapes`, as in git: a backslash makes the next character literal, and `[^a]` is `[!a]`.
    """
    no = ("!", "^") if escapes else ("!",)
    fixed, at = [""], 0
    while at < len(part):
        char = part[at]
        at += 1
        if char == "*":
            if fixed[-1] or len(fixed) == 1:
                fixed.append("")
        elif char == "?":
            fixed[-1] += "[^/]"
        elif char == "[" and (end := part.find("]", at + 1 + part.startswith(no, at))) > 0:
            fixed[-1] += _one_of(part[at:end], no)
            at = end + 1
        elif char == "\\" and escapes and at < len(part):
            fixed[-1] += re.escape(part[at])
            at += 1
        else:
            fixed[-1] += re.escape(char)
    if len(fixed) == 1:
        return fixed[0]
    first, *middle, last = fixed
    return first + "".join(f"(?>[^/]*?{piece})" for piece in middle) + f"[^/]*{last}"


def _one_of(inside: str, no: tuple[str, ...]) -> str:
    """The text between brackets as a character class that never matches a slash."""
    negated = inside.startswith(no)
    chars = inside[1:] if negated else inside
    out, at = "", 0
    while at < len(chars):
        low, high = chars[at], chars[at]
        if chars[at + 1 : at + 2] == "-" and at + 2 < len(chars):
            high = chars[at + 2]
            at += 2
        at += 1
        if low <= high:
            out += f"{re.escape(low)}-{re.escape(high)}"
    if not out:
        return "[^/]" if negated else "(?!)"
    return f"(?!/)[{'^' if negated else ''}{out}]"
