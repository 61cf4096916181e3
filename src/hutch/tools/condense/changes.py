"""Unified diffs, from git or diff: each file's header in one line, and what was changed whole.

What a machine wrote (lock files, snapshots, minified code) is counted only; of a very long diff,
unchanged lines go, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from .family import Call, Family, Hidden, Shown, count

LONG = 8 * 1024  # characters; then lines far from any change are hidden
_NEAR = 1  # lines around a change that are shown in a long one
_MACHINE_MADE = re.compile(
    r"(?:^|/)(?:package-lock\.json|npm-shrinkwrap\.json|yarn\.lock|pnpm-lock\.yaml|bun\.lockb?"
    r"|Cargo\.lock|poetry\.lock|uv\.lock|Pipfile\.lock|pdm\.lock|composer\.lock|Gemfile\.lock"
    r"|go\.sum|flake\.lock)$|\.min\.(?:js|css)$|\.(?:snap|map|svg|ipynb)$"
)
_FEW = 40  # lines of such a file that are shown all the same
_INDEX = re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d+))?$")
_GIT = re.compile(r"diff --git a/(.*) b/(.*)$")


@dataclass
class _File:
    header: list[str]
    body: list[str] = field(default_factory=list)


def shorten(call: Call, lines: list[str]) -> Shown:
    before, files = _files(lines)
    if not files:
        return list(lines)
    is_long = sum(map(len, lines)) > LONG
    shown: Shown = list(before)
    unchanged = 0
    for file in files:
        name = _name(file.header)
        shown += _header(file.header)
        if _MACHINE_MADE.search(name) and len(file.body) > _FEW:
            added = sum(line.startswith("+") for line in file.body)
            removed = sum(line.startswith("-") for line in file.body)
            what = f"machine-made {name.rpartition('/')[2]} (+{added} -{removed})"
            shown.append(Hidden(sum(map(count, file.body)), what))
        elif is_long:
            near = _near_changes(file.body)
            unchanged += len(file.body) - len(near)
            shown += near
        else:
            shown += file.body
    if unchanged:
        shown.append(Hidden(unchanged, "unchanged context"))
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
    name, ids, rest = found[1], "", []
    for line in header[1:]:
        index = _INDEX.match(line)
        if index:
            mode = f" {index[3]}" if index[3] else ""
            ids = f" ({index[1]}..{index[2]}{mode})"
        elif line not in (f"--- a/{name}", f"+++ b/{name}"):
            rest.append(line)
    return [f"=== {name}{ids}", *rest]


def _near_changes(body: list[str]) -> list[str]:
    near: set[int] = set()
    for at, line in enumerate(body):
        if line[:1] in ("+", "-", "\\") or line.startswith("@@"):
            reach = 0 if line.startswith("@@") else _NEAR
            near.update(range(at - reach, at + reach + 1))
        elif line[:1] != " ":  # no part of a diff: who knows what it is
            near.add(at)
    return [line for at, line in enumerate(body) if at in near]


def _is_unified(call: Call) -> bool:
    return not call.has("-y", "--side-by-side", "-q", "--brief")


DIFF = Family("diff", ("diff", "colordiff", "interdiff"), shorten, _is_unified, looks_like, True)
