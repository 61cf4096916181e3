"""Linters and type checkers: every message once per file, with all its places."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from .family import CommandLine, Family, Hidden, Shown, count
from .frames import SOURCE, frameless
from .sift import is_like, like, squeezed

_FINDING = re.compile(
    r"(?P<path>[^\s:(|=*][^:(\n]{0,300}?)(?::(?P<at>\d+(?::\d+)?)|\((?P<pair>\d+,\d+)\))"
    r"(?::| -) *(?P<text>\S.*)$"
)
_FRAME = re.compile(r"\*{5,} Module |\s+= (?:help|note): |help: |note: This is an unsafe fix")
_ARROW = re.compile(r"\s*--> (\S+:\d+:\d+)$")
_STYLISH = re.compile(r"\s+(?P<at>\d+:\d+)\s+(?P<text>(?:error|warning)\s.*)$")
_PATH = re.compile(r"(?:/|\w:\\|\.{0,2}/)?[^\s:][^:]*\.\w{1,5}$")
_GAPS = re.compile(r" {2,}")
_RULE = re.compile(r"(?:error|warning|note)\b|[A-Z]{1,4}\d{3,5}\b")
SOME = 5  # findings; with more, the output is recognised by them
BETTER = 0.7  # grouped by message, rather than by file, only if that is this much shorter


@dataclass
class _Findings:
    before: list[str] = field(default_factory=list)
    # (path, text) -> places; texts may have several lines
    places: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    frames: int = 0
    number: int = 0


def shorten(call: CommandLine, lines: list[str]) -> Shown:
    bare = frameless(_joined(lines))
    findings = _findings([line for line in bare if isinstance(line, str)])
    findings.frames += sum(line.lines for line in bare if isinstance(line, Hidden))
    if findings.number < 2:
        return list(lines)
    grouped = min((list(_by_file(findings)), list(_by_message(findings))), key=_cost)
    shown: Shown = [*findings.before, *grouped]
    if findings.frames:
        shown.append(Hidden(findings.frames, SOURCE))
    return squeezed([*shown, *findings.after])


def _joined(lines: list[str]) -> list[str]:
    """`F401 message` and ` --> a.py:1:8` below it as one line, as other linters print it."""
    joined: list[str] = []
    for line in lines:
        arrow = like(_ARROW, line)
        if arrow and joined and joined[-1][:1].strip():
            joined[-1] = f"{arrow[1]}: {joined[-1]}"
        else:
            joined.append(line)
    return joined


def _findings(lines: list[str]) -> _Findings:
    found = _Findings()
    path, key = "", ("", "")
    is_help = False
    open_places: list[str] = []

    def close() -> None:
        nonlocal open_places
        if open_places:
            found.places.setdefault(key, []).extend(open_places)
            open_places = []

    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if is_help and line.startswith("  "):  # what it would be changed to
            found.frames += count(line)
            continue
        is_help = line.startswith("help: ")
        if match := like(_FINDING, line):
            close()
            key = (match["path"], match["text"])
            open_places = [(match["at"] or match["pair"]).replace(",", ":")]
        elif path and (match := like(_STYLISH, line)):
            close()
            key = (path, _GAPS.sub("  ", match["text"]))
            open_places = [match["at"]]
        elif is_like(_FRAME, line):
            found.frames += count(line)
            continue
        elif line.startswith("  ") and open_places:  # the message goes on
            key = (key[0], f"{key[1]}\n{line}")
            continue
        elif is_like(_PATH, line) and is_like(_STYLISH, after):
            close()
            path = line
            continue
        else:
            close()
            (found.after if found.number else found.before).append(line)
            continue
        found.number += 1
    close()
    return found


def _by_file(found: _Findings) -> Iterable[str]:
    files: dict[str, list[tuple[str, list[str]]]] = {}
    for (path, text), places in found.places.items():
        files.setdefault(path, []).append((text, places))
    for path, told in files.items():
        yield path
        for text, places in told:
            first, *rest = text.split("\n")
            yield f"  {' '.join(places)}: {first}"
            yield from ("  " + line for line in rest)


def _by_message(found: _Findings) -> Iterable[str]:
    messages: dict[str, list[tuple[str, list[str]]]] = {}
    for (path, text), places in found.places.items():
        messages.setdefault(text, []).append((path, places))
    for text, told in messages.items():
        yield from text.split("\n")
        for path, places in told:
            yield f"  {path}: {' '.join(places)}"


def _cost(lines: list[str]) -> float:
    """By file reads better, so the other way, which starts with no path, must be much shorter."""
    return sum(map(len, lines)) * (1 if lines and is_like(_PATH, lines[0]) else 1 / BETTER)


def is_check(lines: list[str]) -> bool:
    """Whether most lines have a place and a rule; matches of a search have no rules."""
    found = sum(is_like(_STYLISH, line) or _with_a_rule(line) for line in lines)
    return found > SOME and found * 2 > len(lines)


def _with_a_rule(line: str) -> bool:
    found = like(_FINDING, line)
    return bool(found and _RULE.match(found["text"]))


def _is_check(call: CommandLine) -> bool:
    if call.program == "go":
        return call.action == "vet"
    return call.program != "ruff" or call.action != "format"


CHECKS = (
    Family(
        "checks",
        ("ruff", "flake8", "pylint", "pycodestyle", "pyflakes", "mypy", "dmypy", "pyright",
         "basedpyright", "tsc", "vue-tsc", "eslint", "biome", "stylelint", "golangci-lint",
         "staticcheck", "shellcheck", "go"),
        shorten,
        matches=_is_check,
        looks_like=is_check,
        is_content=True,  # every message stays; around it is source, with words of its own
        has_failures=True,
    ),
)  # fmt: skip
