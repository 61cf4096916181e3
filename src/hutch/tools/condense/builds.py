"""Compilers and what calls them: each diagnostic word for word, not each command that ran well."""

from __future__ import annotations

import re

from .failures import looks_like_failure
from .family import Call, Family, Hidden, Shown
from .sift import is_like, squeezed, without

SOME = 8  # lines of a kind that leave no doubt
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
_CARGO_NOISE = re.compile(
    r"\s*(?:Compiling|Checking|Downloaded|Downloading|Blocking|Locking|Updating|Adding|Fresh"
    r"|Unpacking|Documenting|Vendoring|Scraping|Removing|Packaging) [\w`\d]"
)


def shorten_make(call: Call, lines: list[str]) -> Shown:
    boring = {at for at in range(len(lines)) if _went_well(lines, at)}
    if call.failed:
        # The last command is the one that failed: it may have said nothing else.
        boring -= {max(boring, default=-1)}
    places = iter(range(len(lines)))
    return squeezed(
        without(lines, lambda line: next(places) in boring, "commands and checks that went well")
    )


def _went_well(lines: list[str], at: int) -> bool:
    line = lines[at]
    if is_like(_CONFIGURING, line):
        return not looks_like_failure(line)
    if not is_like(_COMMAND, line) or _is_diagnostic(lines, at + 1):
        return False
    return not looks_like_failure(line)


def _is_diagnostic(lines: list[str], at: int) -> bool:
    """What follows a command is about it: then the command stays."""
    if at >= len(lines) or is_like(_COMMAND, lines[at]):
        return False
    return is_like(_DIAGNOSTIC, lines[at])


def is_make(lines: list[str]) -> bool:
    known = sum(is_like(_COMMAND, line) or is_like(_CONFIGURING, line) for line in lines)
    return known > SOME and known * 2 > len(lines)


def shorten_cargo(call: Call, lines: list[str]) -> Shown:
    shown = without(lines, lambda line: is_like(_CARGO_NOISE, line), "crates that were built")
    return squeezed(notes_once(shown))


def notes_once(lines: Shown) -> Shown:
    """`= note: see <https://…>` says the same each time."""
    seen: set[str] = set()
    hidden = 0
    shown: Shown = []
    for line in lines:
        if isinstance(line, Hidden) or not line.lstrip().startswith(
            ("= note: see <", "= help: for further")
        ):
            shown.append(line)
        elif line.strip() in seen:
            hidden += 1
        else:
            seen.add(line.strip())
            shown.append(line)
    return [*shown, Hidden(hidden, "notes that are above")] if hidden else shown


_CARGO_BUILDS = frozenset({
    "build", "b", "check", "c", "clippy", "run", "r", "doc", "install", "bench", "fetch", "rustc",
    "fix", "package", "publish", "update", "add",
})  # fmt: skip

BUILDS = (
    Family(
        "cargo build", ("cargo",), shorten_cargo,
        matches=lambda call: call.action in _CARGO_BUILDS and not call.has("--message-format"),
    ),
    Family(
        "make",
        ("make", "gmake", "cmake", "ninja", "configure", "gcc", "g++", "cc", "c++", "clang",
         "clang++", "ctest", "meson", "autoreconf", "bear"),
        shorten_make,
        looks_like=is_make,
    ),
)  # fmt: skip
