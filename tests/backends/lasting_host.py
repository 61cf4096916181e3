"""A host of lasting boxes in a process of its own, for tests that kill it.

Reads one Python expression a line and answers each with a line of JSON.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import sys
from typing import Any

from hutch import wire
from hutch.backends.base import Box, Spec
from hutch.backends.namespaces import NamespacesBackend
from hutch.engine.link import Link
from hutch.errors import HutchError

links: dict[str, Link] = {}


async def start(id: str, outlive: float | None = None) -> str:
    box = await backend.start(Spec(), id)
    if outlive is not None:
        await box.outlive(outlive)
    return await keep(box)


async def adopt(id: str) -> str:
    return await keep(await backend.adopt(id))


async def keep(box: Box) -> str:
    links[box.id] = await Link.open(await box.connect())
    return box.id


async def shell(id: str, script: str) -> str:
    out = b""
    async with links[id].call(wire.ShellCommand("main", script)) as call:
        async for event in call:
            if isinstance(event, wire.Data):
                out += event.data
    return out.decode()


async def main() -> None:
    names: dict[str, Any] = {**globals(), "backend": backend}
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            code = compile(line.strip(), "", "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            value = eval(code, names)
            answer = {"value": await value if inspect.isawaitable(value) else value}
        except HutchError as exc:
            answer = {"error": type(exc).__name__, "message": str(exc)}
        print(json.dumps(answer, default=repr), flush=True)


backend = NamespacesBackend(lasting=sys.argv[1])
asyncio.run(main())
