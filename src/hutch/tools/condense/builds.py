"""Compilers, build tools and package managers: diagnostics and results, without what went well."""

from __future__ import annotations

import re

from .family import CommandLine, Family, Hidden, Shown, count
from .frames import frameless, traces
from .sift import (
    gathered,
    is_like,
    like,
    looks_like_failure,
    squeezed,
    table,
    without,
    without_until_it_fails,
)

SOME = 8  # lines of a kind; with more, the output is recognised by them
_COMPILERS = r"(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|ar|ranlib|ld|libtool|nasm|javac|rustc)"
_COMMAND = re.compile(
    rf"\s*(?:[\w./-]*/)?(?:[\w]+-linux-gnu-)?{_COMPILERS}(?:-[\d.]+)? +\S"
    r"|\s*(?:/bin/(?:ba)?sh \S*libtool|libtool:|install -[cm]|mkdir -p|rm -f|ln -s|mv -f|echo )"
    r"|\s*(?:CC|CXX|CCLD|CXXLD|AR|AS|LD|GEN|RANLIB|OBJCOPY|HOSTCC)(?: \[M\])?\s+\S"
    r"|\[ *\d+(?:%|/\d+)\] (?!Built target)\S"
    r"|g?make(?:\[\d+\])?: (?:Entering|Leaving) directory"
    r"|\s*(?:Scanning dependencies|Consolidate compiler generated)"
)
_CONFIGURING = re.compile(
    r"-- (?:Looking for|Check(?:ing)? |Detecting|Performing Test|Found |The \w+ compiler)"
    r"|checking (?:for|whether|if|how|that|the|build|host) |config\.status: creating"
)
_DIAGNOSTIC = re.compile(r"\S[^:\n]*:\d+|\S+: (?:In |At )|In file included|.*: (?:error|warning)")
_LINT = re.compile(
    r"\s+= note: `(?:#\[\w+\((.+?)\)\]|-[WD] .+)` (?:\(part of .*\) |implied by .*)?"
    r"(?:on by default)?$"
    r"|\s+= help: for further information visit https://rust-lang\.github\.io/\S*#(\w+)$"
)
_RUST_ADVICE = re.compile(
    r"(?:Some errors have detailed explanations|For more information about (?:an|this) error"
    r"|note: run with `RUST_BACKTRACE|note: Some details are omitted, run with `RUST_BACKTRACE)"
    r"|\s+= help: to override `"
)
_CARGO_NOISE = re.compile(
    r"\s*(?:Compiling|Checking|Downloaded|Downloading|Blocking|Locking|Updating|Adding|Fresh"
    r"|Unpacking|Documenting|Vendoring|Scraping|Removing|Packaging) [\w`\d]"
)


def shorten_make(call: CommandLine, lines: list[str]) -> Shown:
    boring = {at for at in range(len(lines)) if _went_well(lines, at)}
    if call.failed:
        # The last command is the one that failed; it may have printed nothing.
        boring -= {max(boring, default=-1)}
    places = iter(range(len(lines)))
    kept = without(lines, lambda line: next(places) in boring, "commands and checks that went well")
    return gathered(frameless(kept))


def _went_well(lines: list[str], at: int) -> bool:
    line = lines[at]
    if is_like(_CONFIGURING, line):
        return not looks_like_failure(line)
    if not is_like(_COMMAND, line) or _is_diagnostic(lines, at + 1):
        return False
    return not looks_like_failure(line)


def _is_diagnostic(lines: list[str], at: int) -> bool:
    """Whether this line is a diagnostic of the command before it, which then stays."""
    if at >= len(lines) or is_like(_COMMAND, lines[at]):
        return False
    return is_like(_DIAGNOSTIC, lines[at])


def is_make(lines: list[str]) -> bool:
    known = sum(is_like(_COMMAND, line) or is_like(_CONFIGURING, line) for line in lines)
    return known > SOME and known * 2 > len(lines)


def shorten_cargo(call: CommandLine, lines: list[str]) -> Shown:
    shown = without(lines, lambda line: is_like(_CARGO_NOISE, line), "crates that were built")
    return gathered(diagnostics(shown))


def diagnostics(lines: Shown) -> Shown:
    """What rustc prints, without source and advice; a note that is repeated is shown once."""
    seen: set[str] = set()
    hidden = 0
    shown: Shown = []
    for line in frameless(lines):
        if isinstance(line, Hidden):
            shown.append(line)
            continue
        is_known = line.strip() in seen
        if lint := like(_LINT, line):  # a link to its page, or why it is enabled
            line = f"  = {lint[1] or f'clippy::{lint[2]}'}"
            is_known = not (lint[1] or lint[2]) or shown[-1:] == [line]
        elif line.lstrip().startswith("= "):
            seen.add(line.strip())
        if is_known or is_like(_RUST_ADVICE, line):
            hidden += 1
        else:
            shown.append(line)
    return [*shown, Hidden(hidden, "advice, and notes that are above")] if hidden else shown


_MAVEN_NOISE = re.compile(
    r"\[INFO\] (?:\s*$|-{3,}|Scanning for|Building |Using |Copying |skip|Nothing to|Compiling \d"
    r"|Recompiling|Changes detected|Running |\s*T E S T S|Results:|Finished at|Total time|from )"
    r"|\[(?:INFO|ERROR|WARNING)\]\s*$|\[ERROR\] (?:-> \[Help|To see the full|Re-run Maven"
    r"|For more information about|\[Help \d|Please refer to)"
    r"|> Task :\S+(?: (?:UP-TO-DATE|NO-SOURCE|FROM-CACHE))?$|> (?:Run with --|Get more help)"
    r"|\* Try:$|Deprecated Gradle features|You can use '--warning-mode|For more on this, please"
)


def shorten_maven(call: CommandLine, lines: list[str]) -> Shown:
    """Without phases and advice; an error that is repeated at the end is shown once."""
    shown: Shown = []
    seen: set[str] = set()
    hidden = 0
    for line in lines:
        if is_like(_MAVEN_NOISE, line) or (line.startswith("[ERROR] ") and line in seen):
            hidden += count(line)
        else:
            seen.add(line)
            shown.append(line)
    if hidden:
        shown.append(Hidden(hidden, "phases, advice and repeats"))
    return gathered(traces(shown))


def is_maven(lines: list[str]) -> bool:
    return sum(line.startswith(("[INFO] ", "[ERROR] ", "> Task :")) for line in lines) > SOME


_CARGO_BUILDS = frozenset({
    "build", "b", "check", "c", "clippy", "run", "r", "doc", "install", "bench", "fetch", "rustc",
    "fix", "package", "publish", "update", "add",
})  # fmt: skip

BUILDS = (
    Family(
        "maven", ("mvn", "mvnw", "gradle", "gradlew"), shorten_maven, looks_like=is_maven,
        has_failures=True,
    ),
    Family(
        "cargo build", ("cargo",), shorten_cargo,
        matches=lambda call: call.action in _CARGO_BUILDS and not call.has("--message-format"),
        has_failures=True,
    ),
    Family(
        "make",
        ("make", "gmake", "cmake", "ninja", "configure", "gcc", "g++", "cc", "c++", "clang",
         "clang++", "ctest", "meson", "autoreconf", "bear"),
        shorten_make,
        looks_like=is_make,
        has_failures=True,
    ),
)  # fmt: skip


# --- package managers ---------------------------------------------------------------


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
