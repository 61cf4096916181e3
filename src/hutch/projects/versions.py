"""Converts version constraints of Poetry, Pipenv and conda to pip's syntax."""

from __future__ import annotations

import re

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

_OPERATOR_SPACE = re.compile(r"([\^~=<>!])\s+")
_ONE = re.compile(r"(\^|~=|~|===|==|!=|>=|<=|>|<|=|)(.*)")
_WILDCARD = re.compile(r"(\d+(?:\.\d+)*)(?:\.[*xX])+")
_LONGEST = 1000  # characters


def alternatives(text: str) -> list[str] | None:
    """The constraints of a Poetry version, any of which must hold, as pip writes them.

    None if it cannot be parsed. An empty constraint always holds.
    """
    if len(text) > _LONGEST:
        return None
    found = [_constraint(each) for each in re.split(r"\s*\|\|?\s*", text.strip())]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return [""] if "" in known else known


def specifier(text: str) -> str | None:
    """A Poetry version as one specifier of pip; None if it cannot be written as one."""
    found = alternatives(text)
    return found[0] if found and len(found) == 1 else None


def python_marker(text: str) -> str | None:
    """A Poetry version of Python as a marker; empty if any will do, None if it cannot be parsed."""
    found = alternatives(text)
    if found is None:
        return None
    parts = [
        " and ".join(
            f"python_full_version {each.operator} '{each.version}'" for each in SpecifierSet(one)
        )
        for one in found
    ]
    return "" if "" in parts else " or ".join(f"({part})" for part in parts)


def conda_specifier(text: str) -> str | None:
    """The version of a conda package as pip writes it; None if it cannot be written so.

    `1.2` and `=1.2` stand for 1.2 and all that begins with 1.2., `==1.2` for 1.2 alone.
    """
    text = _OPERATOR_SPACE.sub(r"\1", text.strip())
    if text in ("", "*"):
        return ""
    if re.fullmatch(r"=?\d+(\.\d+)*(\.?\*)?", text):
        return f"=={text.lstrip('=').rstrip('*').rstrip('.')}.*"
    exact = re.fullmatch(r"=?(\d[\w.!+]*)=[\w.*]+", text)  # VERSION=BUILD
    if exact:
        return _checked(f"=={exact[1]}")
    return None if "|" in text or "^" in text or "(" in text else _checked(text)


def _constraint(text: str) -> str | None:
    text = _OPERATOR_SPACE.sub(r"\1", text.strip())
    parts = [_one(word) for word in re.split(r"[,\s]+", text) if word]
    if not parts or any(part is None for part in parts):
        return None
    return _checked(",".join(part for part in parts if part))


def _one(word: str) -> str | None:
    if word in ("*", "x", "X"):
        return ""
    found = _ONE.fullmatch(word)
    if not found:
        return None
    operator, version = found[1], found[2]
    wildcard = _WILDCARD.fullmatch(version)
    if wildcard:
        kind = {"": "==", "=": "==", "==": "==", "!=": "!="}.get(operator)
        return f"{kind}{wildcard[1]}.*" if kind else None
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    release = parsed.release
    if operator == "^":
        nonzero = (at for at, number in enumerate(release) if number)
        return _between(parsed, min(next(nonzero, len(release) - 1), 2))
    if operator == "~":
        return _between(parsed, min(1, len(release) - 1))
    return f"{operator if operator not in ('', '=') else '=='}{parsed}"


def _between(version: Version, changed: int) -> str:
    """From this version to the first one with a larger number in this place."""
    numbers = (*version.release[:changed], version.release[changed] + 1)
    epoch = f"{version.epoch}!" if version.epoch else ""
    return f">={version},<{epoch}{'.'.join(map(str, numbers))}"


def _checked(text: str) -> str | None:
    try:
        return str(SpecifierSet(text))
    except InvalidSpecifier:
        return None
