"""Package managers: results and warnings, without the packages that were fetched."""

from __future__ import annotations

import re

from .family import CommandLine, Family, Shown
from .sift import is_like, squeezed, table, without, without_until_it_fails

_PIP_NOISE = re.compile(
    r"\s*(?:Collecting |Downloading |Downloaded |Using cached |Requirement already satisfied"
    r"|Obtaining |Preparing metadata|Getting requirements|Installing build dep|Building wheel"
    r"|Created wheel|Stored in directory|Building |Built |Attempting uninstall|Found existing"
    r"|Uninstalling |Successfully uninstalled|Installing collected packages|Looking in "
    r"|Resolving dependencies|Installing backend|Checking if build backend|Cached "
    r"|Downloading link|Using Python |Audited |Preparing packages|Resolved \d"
    r"|[-\\|/] |\[notice\])|.*[━█╸]{3}"
)
_NPM_NOISE = re.compile(
    r"(?:npm (?:notice|http|timing|info|sill|verb)\b|npm warn deprecated|npm WARN deprecated"
    r"|\d+ packages? (?:is|are) looking for funding|\s+run `npm fund`"
    r"|Progress: resolved|Packages: [+-]|[+-]+$|\s*[╭│╰]|\[\d/\d\] |info "
    r"|warning (?=.* > ).*deprecated"
    r"|\s*WARN\s+deprecated |\s*WARN\s+\d+ deprecated|├─ |└─ |yarn install v|➤ YN0013|➤ YN0019)"
)
_UV_CHANGE = re.compile(r"\s*[+~-] [^\s=]+==[^\s=]+$")
_TREE = re.compile(r"[│├└ ][│├└─┬ ]*")
_HAS_TREE = re.compile(r"[├└]─")
_UNWANTED = re.compile(r"\s*(?:(?=\S*@)\S+ deduped|UNMET OPTIONAL DEPENDENCY .*)$")


def shorten_pip(call: CommandLine, lines: list[str]) -> Shown:
    shown = _without(call, lines, _PIP_NOISE, "packages fetched")
    return squeezed(_changes_in_one_line(shown))


def shorten_npm(call: CommandLine, lines: list[str]) -> Shown:
    return squeezed(_without(call, lines, _NPM_NOISE, "packages fetched, notices"))


def shorten_list(call: CommandLine, lines: list[str]) -> Shown:
    """`pip list`: names and versions, a few to a line."""
    rows = [line for line in lines if line.strip() and not line.startswith("-----")]
    cells = table(rows)
    if call.failed or cells is None or any(len(row.split()) != 2 for row in cells):
        return list(lines)
    header, *packages = (" ".join(row.split()) for row in cells)
    return [f"{header}:", *_filled(packages)]


def shorten_tree(call: CommandLine, lines: list[str]) -> Shown:
    """`npm ls`: depth as spaces, and each package only where it is installed."""
    if not any(map(_HAS_TREE.search, lines)):
        return list(lines)
    plain = [_plain_branch(line) for line in lines]
    return without(
        plain, lambda line: is_like(_UNWANTED, line), "packages told elsewhere, or optional"
    )


def _plain_branch(line: str) -> str:
    branch = _TREE.match(line)
    return " " * (branch.end() // 2) + line[branch.end() :] if branch else line


def _without(call: CommandLine, lines: list[str], noise: re.Pattern[str], what: str) -> Shown:
    def boring(line: str) -> bool:
        return is_like(noise, line)

    if call.failed:
        return without_until_it_fails(lines, boring, what)
    return without(lines, boring, what)


def _changes_in_one_line(lines: Shown) -> Shown:
    """uv's `+ name==version`, several to a line."""
    shown: Shown = []
    run: list[str] = []
    for line in [*lines, ""]:
        if isinstance(line, str) and is_like(_UV_CHANGE, line):
            run.append(line.strip())
            continue
        shown += _filled(run)
        run = []
        shown.append(line)
    return shown[:-1]


def _filled(words: list[str], width: int = 100) -> list[str]:
    filled: list[str] = []
    for word in words:
        if filled and len(filled[-1]) + len(word) < width:
            filled[-1] += f", {word}"
        else:
            filled.append(word)
    return filled


_NPM = ("npm", "pnpm", "yarn", "bun")
_NPM_INSTALLS = frozenset({
    "install", "i", "ci", "add", "update", "up", "upgrade", "remove", "rm", "uninstall", "dedupe",
    "audit", "import", "clean-install",
})  # fmt: skip
_PIP_INSTALLS = frozenset({"install", "uninstall", "download", "wheel", "sync", "add", "remove"})


def _pip_words(call: CommandLine) -> list[str]:
    words = [word for word in call.argv[1:] if not word.startswith("-")]
    return words[1:] if words[:1] == ["pip"] else words


def _is_npm_install(call: CommandLine) -> bool:
    bare = call.program in ("yarn", "pnpm") and not call.action
    return call.action in _NPM_INSTALLS or bare


INSTALLS = (
    Family(
        "pip install",
        ("pip", "pip3", "uv", "poetry", "pipenv", "pdm"),
        shorten_pip,
        matches=lambda call: not _PIP_INSTALLS.isdisjoint(_pip_words(call)[:1]),
    ),
    Family(
        "pip list",
        ("pip", "pip3", "uv"),
        shorten_list,
        matches=lambda call: _pip_words(call)[:1] == ["list"] and not call.has("--format"),
    ),
    Family("npm install", _NPM, shorten_npm, matches=_is_npm_install),
    Family(
        "npm ls",
        _NPM,
        shorten_tree,
        matches=lambda call: call.action in ("ls", "list", "ll", "why") and not call.has("--json"),
    ),
)
