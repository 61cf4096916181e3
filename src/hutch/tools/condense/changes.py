"""Unified diffs, from git or diff: each file's header in one line, and what was changed whole.

Of what did not change, a line on each side is shown. What a machine wrote (lock files, snapshots,
minified code) and what was in files that are deleted is counted only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from .family import CommandLine, Family, Hidden, Shown, count
from .sift import like

_NEAR = 1  # lines around a change that are shown
_MACHINE_MADE = re.compile(
    r"(?:^|/)(?:package-lock\.json|npm-shrinkwrap\.json|yarn\.lock|pnpm-lock\.yaml|bun\.lockb?"
    r"|Cargo\.lock|poetry\.lock|uv\.lock|Pipfile\.lock|pdm\.lock|composer\.lock|Gemfile\.lock"
    r"|go\.sum|flake\.lock)$|\.min\.(?:js|css)$|\.(?:snap|map|svg|ipynb)$"
)
_FEW = 40  # lines of such a file that are shown all the same
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@(.*)$")
_INDEX = re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d+))?$")
_GIT = re.compile(r"diff --git a/(.*) b/(.*)$")


@dataclass
class _File:
    header: list[str]
    body: list[str] = field(default_factory=list)


def shorten(call: CommandLine, lines: list[str]) -> Shown:
    before, files = _files(lines)
    if not files:
        return list(lines)
    shown: Shown = list(before)
    unchanged = 0
    for file in files:
        name = _name(file.header)
        header = _header(file.header)
        shown += header
        is_deleted = any(line.startswith(("deleted file", "+++ /dev/null")) for line in file.header)
        if is_deleted or (_MACHINE_MADE.search(name) and len(file.body) > _FEW):
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


def looks_like(lines: list[str]) -> bool:
    return any(line.startswith("diff --git a/") for line in lines[:40]) or any(
        line.startswith("--- ") and after.startswith("+++ ") for line, after in pairwise(lines[:41])
    )


def _files(lines: list[str]) -> tuple[list[str], list[_File]]:
    before: list[str] = []
    files: list[_File] = []
    in_header = False
    for at, line in enumerate(lines):
        starts = line.startswith("diff ") or (
            line.startswith("--- ") and not in_header
            and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")
        )  # fmt: skip
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


def _name(header: list[str]) -> str:
    found = _GIT.match(header[0])
    if found:
        return found[2]
    last = next((line for line in header if line.startswith("+++ ")), header[0])
    return last[4:].split("\t")[0]


def _header(header: list[str]) -> list[str]:
    """`diff --git`, `index`, `---` and `+++` say the same name four times."""
    found = _GIT.match(header[0])
    if not found or found[1] != found[2]:
        return header
    name = found[1]
    said = (f"--- a/{name}", f"+++ b/{name}", "--- /dev/null", "+++ /dev/null")
    rest = [line for line in header[1:] if line not in said and not _INDEX.match(line)]
    return [f"=== {name}", *rest]


def _near_changes(body: list[str]) -> tuple[list[str], int]:
    """With `@@` wherever lines are left out, so that each line's number can be told; how many."""
    near: set[int] = set()
    for at, line in enumerate(body):
        if line[:1] in ("+", "-", "\\"):
            near.update(range(at - _NEAR, at + _NEAR + 1))
        elif line[:1] != " ":  # no part of a diff: who knows what it is
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


DIFF = Family("diff", ("diff", "colordiff", "interdiff"), shorten, _is_unified, looks_like, True)
