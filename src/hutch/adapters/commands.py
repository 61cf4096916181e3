"""What adapters have in common when they run a command: any shell, any length, not any output."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hutch.types import Chunk, Result

if TYPE_CHECKING:  # Inspect loads this in each of its processes
    from hutch.client._async import AsyncSandbox

# Linux takes 128 KiB for one argument, and a box 257 KiB for a command with all that belongs to it.
LONGEST = 100_000
_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_BASH = 'if [ -x /bin/bash ]; then exec /bin/bash -c "$1"; fi; exec /bin/sh -c "$1"'


def in_bash(line: str) -> list[str]:
    """Models write for bash; where there is none, another shell has to do."""
    return ["/bin/sh", "-c", _BASH, "sh", line]


async def fitted(box: AsyncSandbox, argv: Sequence[str]) -> list[str]:
    """The same command; a long one reads itself from a file, which it removes first of all.

    That a program is given one argument of more than 128 KiB is beyond Linux: exit code 126. The
    script of a shell may have any length.
    """
    if sum(len(part.encode("utf-8", "surrogateescape")) for part in argv) <= LONGEST:
        return list(argv)
    file = f"/tmp/.hutch-script-{secrets.token_hex(8)}"
    at = _script_of(argv)
    script = argv[at] if at else f"exec {shlex.join(argv)}"
    content = f"rm -f {file} 2>/dev/null\n{script}\n"  # who is not its owner cannot remove it
    await box.files.write(file, content.encode("utf-8", "surrogateescape"))
    return [*argv[:at], f". {file}", *argv[at + 1 :]] if at else ["/bin/sh", file]


def _script_of(argv: Sequence[str]) -> int:
    """Where the script is in `bash --login -c SCRIPT`; 0 if this is no such thing."""
    if argv[0].rpartition("/")[2] not in _SHELLS:
        return 0
    for at, word in enumerate(argv[1:-1], 1):
        if re.fullmatch(r"-[a-z]*c", word):
            return at + 1
        if not word.startswith("-"):
            break
    return 0


@dataclass
class Collected:
    """What a command printed, as bytes, and how it ended."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    result: Result | None = None  # none if it printed too much, and was killed for that


async def collected(
    box: AsyncSandbox, argv: str | Sequence[str], limit: int, **options: Any
) -> Collected:
    """Run a command that may print `limit` bytes to each of stdout and stderr.

    `options` are those of `box.commands.stream`. Whoever stops waiting kills it, too.
    """
    found = Collected()
    async with await box.commands.stream(argv, **options) as stream:
        async for item in stream:
            if not isinstance(item, Chunk):
                found.result = item
                return found
            kept = found.stderr if item.stream == "stderr" else found.stdout
            kept += item.data
            if len(kept) > limit:
                return found
    raise AssertionError("a command ended without a result")
