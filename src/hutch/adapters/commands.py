"""What adapters share to run a command: in bash if there is one, of any length, bounded output."""

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

# Linux allows 128 KiB for one argument, and a box 257 KiB for a command with its environment.
LONGEST = 100_000
_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_BASH = 'if [ -x /bin/bash ]; then exec /bin/bash -c "$1"; fi; exec /bin/sh -c "$1"'


def in_bash(line: str) -> list[str]:
    """Run a line in bash, for which models write; in an image without it, in sh."""
    return ["/bin/sh", "-c", _BASH, "sh", line]


async def fitted(box: AsyncSandbox, argv: Sequence[str]) -> list[str]:
    """The same command; a long one becomes a script in a file, which removes itself first.

    The script of a shell may have any length. For another program, Linux limits one argument to
    128 KiB; more is exit code 126.
    """
    if sum(len(part.encode("utf-8", "surrogateescape")) for part in argv) <= LONGEST:
        return list(argv)
    file = f"/tmp/.hutch-script-{secrets.token_hex(8)}"
    at = _script_of(argv)
    script = argv[at] if at else f"exec {shlex.join(argv)}"
    content = f"rm -f {file} 2>/dev/null\n{script}\n"  # only its owner can remove it
    await box.files.write(file, content.encode("utf-8", "surrogateescape"))
    return [*argv[:at], f". {file}", *argv[at + 1 :]] if at else ["/bin/sh", file]


def _script_of(argv: Sequence[str]) -> int:
    """The index of the script in `bash --login -c SCRIPT`; 0 if this is another command."""
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
    result: Result | None = None  # None if it was killed because it printed too much


async def collected(
    box: AsyncSandbox, argv: str | Sequence[str], limit: int, **options: Any
) -> Collected:
    """Run a command that may print `limit` bytes to each of stdout and stderr.

    `options` are those of `box.commands.stream`. Cancelling kills the command, too.
    """
    output = Collected()
    async with await box.commands.stream(argv, **options) as stream:
        async for item in stream:
            if not isinstance(item, Chunk):
                output.result = item
                return output
            kept = output.stderr if item.stream == "stderr" else output.stdout
            kept += item.data
            if len(kept) > limit:
                return output
    raise AssertionError("a command ended without a result")
