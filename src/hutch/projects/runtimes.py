"""Finds out which interpreters a box has, by running them. Their answers are untrusted."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from contextlib import aclosing
from dataclasses import dataclass

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import CallerError, InvalidRequest, NotFound
from hutch.images.environment import ENVIRONMENT
from hutch.images.install import RECORD
from hutch.types import BoxInfo

from .node import NodePlatform
from .python import Interpreter

TIMEOUT = 60  # seconds; an interpreter that does not answer counts as missing
LARGEST = 4 << 20  # bytes of a record of an image
USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_ASK_PYTHON = """
import json, os, platform, sys
name, version = platform.libc_ver()
print(json.dumps(["%d.%d" % sys.version_info[:2], platform.machine(), name, version]))
"""
_ASK_NODE = (
    "const r = process.report ? process.report.getReport().header : {};"
    "console.log(JSON.stringify([process.arch, r.glibcVersionRuntime ? 'glibc' : 'musl']))"
)
_ASK_PATHS = 'printf "%s\\n%s" "$PATH" "$PYTHONPATH"'

# What wheels can ask for, newest first: the versions of glibc that uv has names for.
_GLIBC = (40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17)


@dataclass(frozen=True)
class Runtimes:
    """The interpreters of a box; None if it has none."""

    python: Interpreter | None
    node: NodePlatform | None


def own_runtimes() -> Runtimes:
    """The interpreters of boxes with this machine's /usr and the Python that runs Hutch."""
    cpu = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    libc = "glibc" if platform.libc_ver()[0] == "glibc" else "musl"
    return Runtimes(Interpreter(), NodePlatform(cpu, libc))


async def ask(transport: AsyncTransport, session: str) -> Runtimes:
    """The interpreters of a running box."""
    python = await _answer(transport, session, ("python3", "-I", "-c", _ASK_PYTHON))
    node = await _answer(transport, session, ("node", "-e", _ASK_NODE))
    return Runtimes(_python(python), _node(node))


def content_of(record: bytes) -> str:
    """The identity of an image of packages, from its record file."""
    return hashlib.sha256(record).hexdigest()


async def content(transport: AsyncTransport, info: BoxInfo) -> str:
    """The identity of the content of a box's image: a name may come to mean another image."""
    if info.digest:
        return info.digest
    for path in (f"{ENVIRONMENT}/{RECORD}", "/usr/lib/os-release"):
        data = bytearray()
        try:
            read = op.ReadFile(info.id, path)
            async with aclosing(await transport.stream(read)) as stream:
                async for piece in stream:
                    data += piece
                    if len(data) > LARGEST:
                        raise InvalidRequest(f"{path} in {info.image} is too large")
        except NotFound:
            continue
        return content_of(bytes(data))
    return ""


async def paths(transport: AsyncTransport, session: str) -> tuple[str, str]:
    """PATH and PYTHONPATH of programs in this box."""
    output = await _output(transport, session, ("/bin/sh", "-c", _ASK_PATHS))
    path, _, modules = (output or "").partition("\n")
    return path or USUAL_PATH, modules


async def _answer(transport: AsyncTransport, session: str, argv: tuple[str, ...]) -> list[str]:
    output = await _output(transport, session, argv)
    try:
        answer = json.loads(output or "[]")
    except ValueError:
        return []
    is_valid = isinstance(answer, list) and all(isinstance(item, str) for item in answer)
    return answer if is_valid else []


async def _output(transport: AsyncTransport, session: str, argv: tuple[str, ...]) -> str | None:
    """The stdout of a program; None if it does not exist or failed."""
    program = op.RunProgram(session, argv, cwd="/", timeout=TIMEOUT)
    try:
        result = await transport.perform(program)
    except CallerError:
        return None
    return result.stdout if result.exit_code == 0 else None


def _python(answer: list[str]) -> Interpreter | None:
    if len(answer) != 4 or not re.fullmatch(r"3\.[0-9]{1,2}", answer[0]):
        return None
    version, machine, libc, libc_version = answer
    if machine not in ("x86_64", "aarch64"):
        return None
    if libc != "glibc":
        return Interpreter(version, f"{machine}-unknown-linux-musl")
    match = re.fullmatch(r"2\.([0-9]{1,3})", libc_version)
    newest = int(match[1]) if match else 17
    minor = next((known for known in _GLIBC if known <= newest), 17)
    return Interpreter(version, f"{machine}-manylinux_2_{minor}")


def _node(answer: list[str]) -> NodePlatform | None:
    if len(answer) != 2 or answer[0] not in ("x64", "arm64") or answer[1] not in ("glibc", "musl"):
        return None
    return NodePlatform(*answer)
