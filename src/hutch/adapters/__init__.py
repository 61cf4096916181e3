"""Hutch in agent frameworks: one module each, which imports its framework and no other.

Here is what they share. `boxes` has more, for frameworks that call from sync and async code.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import hutch
from hutch.errors import InvalidRequest
from hutch.extras import install_command
from hutch.types import Chunk, Result

if TYPE_CHECKING:  # Inspect loads this in each of its processes
    from hutch.client._async import AsyncSandbox

# Linux allows 128 KiB for one argument, and a box 257 KiB for a command with its environment.
LONGEST = 100_000
_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_BASH = 'if [ -x /bin/bash ]; then exec /bin/bash -c "$1"; fi; exec /bin/sh -c "$1"'


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of a framework: an ImportError says which extra to install."""
    try:
        yield
    except ImportError as exc:
        message = f"{exc}: this part of hutch needs `{install_command(extra)}`"
        raise ImportError(message, name=exc.name) from exc


def checked(order: dict[str, Any], box: object = None) -> dict[str, Any]:
    """The order, if `create` takes all of it. Raises InvalidRequest, before any tool is called."""
    known = signature(hutch.AsyncSandbox.create).parameters
    if unknown := [name for name in order if name not in known]:
        raise InvalidRequest(f"there is no option {unknown[0]!r}; a box has {', '.join(known)}")
    if box is not None and order:
        raise InvalidRequest(f"{', '.join(order)}: the box is there already")
    return order


def order_of(config: Any, *others: str) -> dict[str, Any]:
    """The fields of a pydantic model, without `others`, as an order for `Sandbox.create`."""
    given = {name: getattr(config, name) for name in type(config).model_fields}
    return {
        name: value for name, value in given.items() if value is not None and name not in others
    }


# --- commands ----------------------------------------------------------------------------


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
