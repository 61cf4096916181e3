"""git: what changed, without the advice; history a line per commit; no progress."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

from . import changes
from .family import CommandLine, Family, Hidden, Shown
from .paths import grouped
from .sift import is_like, like, without

_ADVICE = re.compile(r"\s+\((?:use|commit|all conflicts|fix conflicts) .*\)$")
_SECTIONS = {
    "Changes to be committed:": "staged:",
    "Changes not staged for commit:": "not staged:",
    "Untracked files:": "untracked:",
    "Unmerged paths:": "unmerged:",
    "Ignored files:": "ignored:",
}
_LETTERS = {
    "modified": "M", "new file": "A", "deleted": "D", "renamed": "R", "copied": "C",
    "typechange": "T", "both modified": "UU", "both added": "AA", "deleted by us": "DU",
    "deleted by them": "UD", "added by us": "AU", "added by them": "UA", "both deleted": "DD",
}  # fmt: skip
_ENTRY = re.compile(r"\t(?:([a-z ]+):\s+)?(.*)$")
_PROGRESS = re.compile(
    r"(?:remote: )?(?:Enumerating|Counting|Compressing|Writing|Receiving|Unpacking) objects:"
    r"|(?:remote: )?Resolving deltas:|Delta compression using|(?:remote: )?Total \d+ \(delta"
    r"|Updating files:|Filtering content:|remote: *$"
)
_COMMIT = re.compile(r"commit ([0-9a-f]{7,64})(?: \((.*)\))?$")
_FIELD = re.compile(r"(Merge|Author|Date|AuthorDate|Commit|CommitDate): +(.*)$")
_BAR = re.compile(r" *(\d+) ([+-]+)$")
_LONG_LOG = 6 * 1024  # characters; then only the first lines of messages are shown
_BLAMED = re.compile(r"\^?[0-9a-f]{7,40} ")
_SINCE = re.compile(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}(?= +(\d+)\))")
_FEW = 3  # commits that are told to the letter
HASH = 9  # letters of a commit's name
_AS_ABOVE = "days and authors as above"


def _status(call: CommandLine, lines: list[str]) -> Shown:
    if not any(line in _SECTIONS for line in lines):
        return list(lines)
    shown: list[str] = []
    paths: list[str] = []  # of files without a word about what happened to them

    def flush() -> None:
        shown.extend(f" {path}" for path in grouped(paths))
        paths.clear()

    for line in lines:
        entry = like(_ENTRY, line)
        if entry and not entry[1]:
            paths.append(entry[2])
            continue
        flush()
        if entry:
            shown.append(f" {_LETTERS.get(entry[1], entry[1] + ':')} {entry[2]}")
        elif line in _SECTIONS:
            shown.append(_SECTIONS[line])
        elif line.strip() and not is_like(_ADVICE, line):
            shown.append(line.partition(" (use ")[0] if line.endswith(")") else line)
    flush()
    return list(shown)


def _log(call: CommandLine, lines: list[str]) -> Shown:
    """`12345678 2024-01-02 12:00 Ann <ann@x>: Subject`, then the rest of the message.

    Of many commits, who and the day are said where they change.
    """
    commits = sum(is_like(_COMMIT, line) for line in lines)
    if not lines or not is_like(_COMMIT, lines[0]):
        return list(lines)
    is_short = commits > _FEW
    is_long = sum(map(len, lines)) > _LONG_LOG
    shown: Shown = []
    known: dict[str, str] = {}  # the address that was told last, by author; "": day and author
    hidden = at = 0
    while at < len(lines):
        commit = like(_COMMIT, lines[at])
        if not commit:
            if lines[at]:
                shown.append(_stat(lines[at]))
            at += 1
            continue
        at += 1
        fields: dict[str, str] = {}
        while at < len(lines) and (named := like(_FIELD, lines[at])):
            fields[named[1]] = named[2]
            at += 1
        message: list[str] = []
        while at < len(lines) and (not lines[at].strip() or lines[at].startswith("    ")):
            message.append(lines[at][4:].rstrip())
            at += 1
        text = [line for line in message if line]
        shown.append(_commit(commit, fields, text[:1], known, is_short))
        rest = text[1:]
        if is_long and rest:
            hidden += len(rest)
        else:
            shown += [f"  {line}" for line in rest]
    if hidden:
        shown.append(Hidden(hidden, "commit messages"))
    return [Hidden(commits, f"full hashes and times, {_AS_ABOVE}"), *shown] if is_short else shown


def _commit(
    commit: re.Match[str],
    fields: dict[str, str],
    subject: list[str],
    known: dict[str, str],
    is_short: bool,
) -> str:
    author = fields.get("Author", "")
    who, _, address = author.partition(" <")
    if known.get(who) == address:
        author = who
    known[who] = address
    other = "".join(
        f" {name}={value}" for name, value in fields.items() if name not in ("Author", "Date")
    )
    refs = f" ({commit[2]})" if commit[2] else ""
    when = _when(fields.get("Date", ""), is_short)
    name = commit[1][:HASH] if is_short else commit[1]
    day = f"{when[:10]} {who} {address}"
    if is_short and day == known.get(""):
        return " ".join([name + refs + other, f"{when[11:]}:", *subject])
    known[""] = day
    return " ".join(filter(None, [name + refs + other, when, f"{author}:", *subject]))


def _stat(line: str) -> str:
    """A bar of plus and minus signs as their numbers; no blanks before the others."""
    name, _, bar = line.rpartition(" | ")
    found = like(_BAR, bar)
    if not found or not name.startswith(" "):
        return line
    counts = "".join(f"{sign}{found[2].count(sign)}" for sign in "+-" if sign in found[2])
    return f" {name.strip()} | {found[1]} {counts}"


def _when(date: str, is_short: bool) -> str:
    try:
        when = datetime.strptime(date.strip(), "%a %b %d %H:%M:%S %Y %z")
    except ValueError:
        return date.strip()
    return when.strftime("%Y-%m-%d %H:%M" if is_short else "%Y-%m-%d %H:%M:%S %z")


def _show(call: CommandLine, lines: list[str]) -> Shown:
    """Commits, each with its diff."""
    starts = [at for at, line in enumerate(lines) if is_like(_COMMIT, line)]
    shown: Shown = []
    for start, end in zip([0, *starts], [*starts, len(lines)], strict=True):
        part = lines[start:end]
        diff = next((at for at, line in enumerate(part) if line.startswith("diff ")), len(part))
        shown += [*_log(call, part[:diff]), *changes.shorten(call, part[diff:])]
    return shown


def _moved(call: CommandLine, lines: list[str]) -> Shown:
    """push, pull, fetch, clone, commit: all but the progress."""
    return without(lines, lambda line: is_like(_PROGRESS, line), "progress")


def _blame(call: CommandLine, lines: list[str]) -> Shown:
    """Who and when once for all lines in a row that have it."""
    shown: list[str] = []
    last = ""
    for line in lines:
        found = _SINCE.search(line) if is_like(_BLAMED, line) else None
        if not found or "(" not in line[: found.start()]:
            return list(lines)
        who = re.sub(r" +", " ", f"{line[: found.end()]})")
        if who != last:
            shown.append(who)
            last = who
        shown.append(line[found.end() :].lstrip(" ").replace(")", "", 1))
    return list(shown)


def _files(call: CommandLine, lines: list[str]) -> Shown:
    return list(grouped(lines))


def _is(*actions: str, unless: tuple[str, ...] = ()) -> Callable[[CommandLine], bool]:
    return lambda call: call.action in actions and not call.has(*unless)


def _looks_like_status(lines: list[str]) -> bool:
    some = lines[:60]
    return any(line in _SECTIONS for line in some) and any(
        line.startswith(("On branch ", "HEAD detached")) for line in some
    )


_PATCH = ("-p", "-u", "--patch")
_OTHER = (*_PATCH, "--name-only", "--name-status", "--graph")
_MOVES = _is(
    "push", "pull", "fetch", "clone", "commit", "add", "merge", "rebase", "checkout", "switch",
    "submodule", "stash",
)  # fmt: skip
GIT = (
    Family("git status", ("git",), _status, _is("status"), _looks_like_status, True),
    Family("git diff", ("git",), changes.shorten, _is("diff"), is_content=True),
    Family("git show", ("git",), _show, _is("show"), is_content=True),
    Family("git log", ("git",), _log, _is("log", unless=_OTHER), is_content=True),
    Family("git log -p", ("git",), _show, _is("log"), is_content=True),
    Family("git blame", ("git",), _blame, _is("blame", "annotate"), is_content=True),
    Family("git ls-files", ("git",), _files, _is("ls-files", "ls-tree"), is_content=True),
    Family("git push", ("git",), _moved, _MOVES),
)
