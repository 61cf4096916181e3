"""Advice for a command that failed because a box has no network."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

MOST_PACKAGES = 5  # named in an example
NOT_FOUND = 127  # the exit code of a shell that has no such program
NO_HOST = {"curl": (6, 7), "wget": (4,)}  # exit codes: with -s and -q they print nothing

_PACKAGES = re.compile(r"\b(?:pip[0-9.]*|uv)\s+(?:pip\s+)?(?:install|add)\b([^;&|\n]*)")
_INSTALLS = re.compile(r"\b(?:pip[0-9.]*|uv|npm|yarn|pnpm)\s+(?:pip\s+)?(?:install|add|sync|ci)\b")
_TOOL = re.compile(
    r"(?<![\w./-])(?:\S*/)?(pip[0-9.]*|uvx?|npm|npx|yarn|pnpm|git|curl|wget|apt|apt-get)(?=\s)"
)
_FAILED = re.compile(
    "externally-managed-environment|No matching distribution found|Could not find a version|"
    "Failed to establish a new connection|[Nn]ame resolution|dns error|"
    "[Cc]ould not resolve host|unable to resolve host|Temporary failure resolving|"
    "Network is unreachable|EAI_AGAIN|ENOTFOUND|"
    "dpkg frontend lock|Unable to locate package|apt/lists"
)
_LOOPBACK = re.compile(r"\b(?:localhost|127\.0\.0\.1)\b|\[::1\]")
_INSTALL = "`hutch run --project .` installs what a project asks for"
_FETCH = "Fetch it outside, and show the box the folder: --workspace DIR or -v DIR:/data"
_INSTEAD = {
    "npm": _INSTALL, "npx": _INSTALL, "yarn": _INSTALL, "pnpm": _INSTALL,
    "git": _FETCH, "curl": _FETCH, "wget": _FETCH,
    "apt": "An image can have the program: hutch image pull IMAGE, then hutch run --image IMAGE",
}  # fmt: skip


def network_advice(command: Sequence[str], exit_code: int, output: str) -> str:
    """One line of advice, or an empty string if the command failed for another reason."""
    text = " ".join(command)
    tool = _TOOL.search(text)
    if not tool:
        return ""
    name = "apt" if tool[1] == "apt-get" else tool[1]
    has_no_host = exit_code in NO_HOST.get(name, ()) and not _LOOPBACK.search(text)
    has_no_installer = exit_code == NOT_FOUND and _INSTALLS.search(text)
    if not has_no_host and not has_no_installer and not _FAILED.search(output):
        return ""
    instead = _INSTEAD.get(name) or _instead_of_pip(text)
    network = "with network: --backend docker --relax network"
    return f"a box has no network for {name}. {instead}; {network}"


def _instead_of_pip(text: str) -> str:
    found = _PACKAGES.search(text)
    words = [word for word in found[1].split() if not word.startswith("-")] if found else []
    packages = shlex.join(words[:MOST_PACKAGES]) or "PACKAGE"
    return (
        f"{_INSTALL}; for other packages: hutch image build mine --packages {packages}, then "
        "hutch run --image mine"
    )
