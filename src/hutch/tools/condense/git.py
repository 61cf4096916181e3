"""git, and diffs of any program.

A status without the advice, a line per commit, no progress. Of a diff, each file's header is one
line, changed lines are all shown, and of unchanged ones one on each side. What a machine wrote
(lock files, snapshots, minified code) and the lines of deleted files are only counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from .family import CommandLine, Family, Hidden, Shown, count
from .sift import grouped, is_like, like, without

# --- diffs ------------------------------------------------------------------------------

_NEAR = 1  # lines around a change that are shown
_MACHINE_MADE = re.compile(
    r"(?:^|/)(?:package-lock\.json|npm-shrinkwrap\.json|yarn\.lock|pnpm-lock\.yaml|bun\.lockb?"
    r"|Cargo\.lock|poetry\.lock|uv\.lock|Pipfile\.lock|pdm\.lock|composer\.lock|Gemfile\.lock"
    r"|go\.sum|flake\.lock)$|\.min\.(?:js|css)$|\.(?:snap|map|svg|ipynb)$"
)
_FEW_LINES = 40  # lines of such a file that are shown all the same
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@(.*)$")
_INDEX = re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d+))?$")
_GIT = re.compile(r"diff --git a/(.*) b/(.*)$")


@dataclass
class _File:
    header: list[str]
    body: list[str] = field(default_factory=list)


def shorten_diff(call: CommandLine, lines: list[str]) -> Shown:
    before, files = _split_files(lines)
    if not files:
        return list(lines)
    shown: Shown = list(before)
    unchanged = 0
    for file in files:
        name = _name_of(file.header)
        header = _header(file.header)
        shown += header
        is_deleted = any(line.startswith(("deleted file", "+++ /dev/null")) for line in file.header)
        if is_deleted or (_MACHINE_MADE.search(name) and len(file.body) > _FEW_LINES):
            added = sum(line.startswith("+") for line in file.body)
            removed = sum(line.startswith("-") for line in file.body)
            kind = "deleted" if is_deleted else "machine-made"
            what = f"{kind} {name.rpartition('/')[2]} (+{added} -{removed})"
            shown.append(Hidden(sum(map(count, file.body)), what))
        else:
            near, hidden = _near_changes(file.body)
            unchanged += hidden + len(file.header) - len(header)
            shown += near
    if unchanged:
        shown.append(Hidden(unchanged, "unchanged context and headers"))
    return shown


def _looks_like_diff(lines: list[str]) -> bool:
    return any(line.startswith("diff --git a/") for line in lines[:40]) or any(
        line.startswith("--- ") and after.startswith("+++ ") for line, after in pairwise(lines[:41])
    )


def _split_files(lines: list[str]) -> tuple[list[str], list[_File]]:
    before: list[str] = []
    files: list[_File] = []
    in_header = False
    for at, line in enumerate(lines):
        starts = line.startswith("diff ") or (
            line.startswith("--- ")
            and not in_header
            and at + 1 < len(lines)
            and lines[at + 1].startswith("+++ ")
        )
        if starts:
            files.append(_File([line]))
            in_header = True
        elif not files:
            before.append(line)
        elif in_header and not line.startswith("@@"):
            files[-1].header.append(line)
        else:
            in_header = False
            files[-1].body.append(line)
    return before, files


def _name_of(header: list[str]) -> str:
    found = _GIT.match(header[0])
    if found:
        return found[2]
    last = next((line for line in header if line.startswith("+++ ")), header[0])
    return last[4:].split("\t")[0]


def _header(header: list[str]) -> list[str]:
    """The header in one line: `diff --git`, `---` and `+++` repeat the same name."""
    names = _GIT.match(header[0])
    if not names or names[1] != names[2]:
        return header
    name = names[1]
    repeats = (f"--- a/{name}", f"+++ b/{name}", "--- /dev/null", "+++ /dev/null")
    rest = [line for line in header[1:] if line not in repeats and not _INDEX.match(line)]
    return [f"=== {name}", *rest]


def _near_changes(body: list[str]) -> tuple[list[str], int]:
    """Changed lines and their neighbours, and how many others are left out.

    There is an `@@` wherever lines are left out, so that every line's number can be worked out.
    """
    near: set[int] = set()
    for at, line in enumerate(body):
        if line[:1] in ("+", "-", "\\"):
            near.update(range(at - _NEAR, at + _NEAR + 1))
        elif line[:1] != " ":  # not part of a diff, so it is kept
            near.add(at)
    shown: list[str] = []
    hidden = old = new = 0
    title = ""
    is_next = False  # the line above is shown
    for at, line in enumerate(body):
        if hunk := like(_HUNK, line):
            old, new, title, is_next = int(hunk[1]), int(hunk[2]), hunk[3], False
            continue
        if at not in near:
            hidden += count(line)
        elif not is_next and (old or new):
            shown.append(f"@@ -{old} +{new} @@{title}")
            title = ""
        if at in near:
            shown.append(line)
        is_next = at in near
        old += line[:1] in (" ", "-")
        new += line[:1] in (" ", "+")
    return shown, hidden


def _is_unified(call: CommandLine) -> bool:
    return not call.has("-y", "--side-by-side", "-q", "--brief")


# --- git --------------------------------------------------------------------------------

_ADVICE = re.compile(r"\s+\((?:use|commit|all conflicts|fix conflicts) .*\)$")
_SECTIONS = {
    "Changes to be committed:": "staged:",
    "Changes not staged for commit:": "not staged:",
    "Untracked files:": "untracked:",
    "Unmerged paths:": "unmerged:",
    "Ignored files:": "ignored:",
}
_LETTERS = {
    "modified": "M",
    "new file": "A",
    "deleted": "D",
    "renamed": "R",
    "copied": "C",
    "typechange": "T",
    "both modified": "UU",
    "both added": "AA",
    "deleted by us": "DU",
    "deleted by them": "UD",
    "added by us": "AU",
    "added by them": "UA",
    "both deleted": "DD",
}
_ENTRY = re.compile(r"\t(?:([a-z ]+):\s+)?(.*)$")
_PROGRESS = re.compile(
    r"(?:remote: )?(?:Enumerating|Counting|Compressing|Writing|Receiving|Unpacking) objects:"
    r"|(?:remote: )?Resolving deltas:|Delta compression using|(?:remote: )?Total \d+ \(delta"
    r"|Updating files:|Filtering content:|remote: *$"
)
_COMMIT = re.compile(r"commit ([0-9a-f]{7,64})(?: \((.*)\))?$")
_FIELD = re.compile(r"(Merge|Author|Date|AuthorDate|Commit|CommitDate): +(.*)$")
_BAR = re.compile(r" *(\d+) (\+*)(-*)$")
_LONG_LOG = 6 * 1024  # characters; then only the first lines of messages are shown
_BLAMED = re.compile(r"\^?[0-9a-f]{7,40} ")
_SINCE = re.compile(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}(?= +(\d+)\))")
_FEW = 3  # commits that are shown with full hash and time
HASH = 9  # digits of a commit's hash
_AS_ABOVE = "days and authors as above"


def _status(call: CommandLine, lines: list[str]) -> Shown:
    if not any(line in _SECTIONS for line in lines):
        return list(lines)
    shown: list[str] = []
    paths: list[str] = []  # of files without a word like `modified:`

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

    Of many commits, author and day are shown only where they change.
    """
    commits = sum(is_like(_COMMIT, line) for line in lines)
    if not lines or not is_like(_COMMIT, lines[0]):
        return list(lines)
    is_short = commits > _FEW
    is_long = sum(map(len, lines)) > _LONG_LOG
    shown: Shown = []
    known: dict[str, str] = {}  # author -> the address shown last; "" -> day and author shown last
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
    """A line of `--stat`, with numbers in place of the bar of plus and minus signs.

    `~+60-40` for a bar that stands for more lines than it has signs: only its proportions are true.
    """
    name, _, bar = line.rpartition(" | ")
    found = like(_BAR, bar)
    if not found or not name.startswith(" "):
        return line
    changed, signs = int(found[1]), len(found[2] + found[3])
    added = round(changed * len(found[2]) / signs) if signs else 0
    parts = [f"+{added}" if found[2] else "", f"-{changed - added}" if found[3] else ""]
    about = "~" if changed > signs and all(parts) else ""
    return f" {name.strip()} | {changed} {about}{''.join(parts)}".rstrip()


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
        shown += [*_log(call, part[:diff]), *shorten_diff(call, part[diff:])]
    return shown


def _moved(call: CommandLine, lines: list[str]) -> Shown:
    """push, pull, fetch, clone, commit: everything but the progress."""
    return without(lines, lambda line: is_like(_PROGRESS, line), "progress")


def _blame(call: CommandLine, lines: list[str]) -> Shown:
    """Commit and author once for consecutive lines that share them."""
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
    "push",
    "pull",
    "fetch",
    "clone",
    "commit",
    "add",
    "merge",
    "rebase",
    "checkout",
    "switch",
    "submodule",
    "stash",
)
GIT = (
    Family("git status", ("git",), _status, _is("status"), _looks_like_status, True),
    Family("git diff", ("git",), shorten_diff, _is("diff"), is_content=True),
    Family("git show", ("git",), _show, _is("show"), is_content=True),
    Family("git log", ("git",), _log, _is("log", unless=_OTHER), is_content=True),
    Family("git log -p", ("git",), _show, _is("log"), is_content=True),
    Family("git blame", ("git",), _blame, _is("blame", "annotate"), is_content=True),
    Family("git ls-files", ("git",), _files, _is("ls-files", "ls-tree"), is_content=True),
    Family("git push", ("git",), _moved, _MOVES),
)
DIFF = Family(
    "diff", ("diff", "colordiff", "interdiff"), shorten_diff, _is_unified, _looks_like_diff, True
)
