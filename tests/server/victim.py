"""A service that is told what to do on stdin, and can be made to die at a given step.

Steps are the calls to the backend, its boxes, and the store: what happens between two of them
cannot be interrupted by a crash in a way that anybody could see.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hutch import operations as op
from hutch import serving
from hutch.backends.namespaces import NamespaceBox, NamespacesBackend
from hutch.engine import hibernate
from hutch.images.held_images import HeldImages
from hutch.server.keys import OPERATOR, Caller
from hutch.server.rules import Rules
from hutch.server.service import Service
from hutch.server.store import Store
from hutch.types import plain

ADMIN = Caller(OPERATOR, "admin")
STEPS = {
    NamespacesBackend: ("start",),
    NamespaceBox: ("connect", "kill", "outlive"),
    Store: ("insert", "update"),
    hibernate.Saved: ("write_down", "remove"),
}


def die_at(step: int) -> None:
    """Before and after each call counts as a step; at this one, there is no more."""
    numbers = itertools.count()

    def pass_by() -> None:
        if next(numbers) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(method: Any) -> Any:
        async def slow(*arguments: Any, **more: Any) -> Any:
            pass_by()
            answer = await method(*arguments, **more)
            pass_by()
            return answer

        def fast(*arguments: Any, **more: Any) -> Any:
            pass_by()
            answer = method(*arguments, **more)
            pass_by()
            return answer

        return slow if asyncio.iscoroutinefunction(method) else fast

    for cls, names in STEPS.items():
        for name in names:
            setattr(cls, name, watched(getattr(cls, name)))


async def answer(made: Service, body: dict[str, Any]) -> Any:
    name = body.pop("do")
    if name == "die_at":
        die_at(body["step"])
        return True
    if name == "all_at_once":
        each = (made.perform(op.OpenSession(), ADMIN) for _ in range(body["count"]))
        return [plain(info) for info in await asyncio.gather(*each)]
    if name == "size_pool":
        await made.perform(serving.SizePool("host", body["size"]), ADMIN)
        while (await made.perform(serving.GetPool(), ADMIN))[0].ready < body["size"]:
            await asyncio.sleep(0.01)
        return True
    operation = op.TABLE[name](**body)
    given = await made.perform(operation, ADMIN)
    return plain(given) if given is not None else True


async def main(arguments: dict[str, Any]) -> None:
    folder = Path(arguments["folder"])
    backend = NamespacesBackend(lasting=str(folder / "run"))
    rules = Rules(pool=arguments.get("pool", {}))
    made = await Service.open(folder, backend, HeldImages(), rules)
    print(json.dumps(asdict(made.adoption)), flush=True)
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            said = await answer(made, json.loads(line))
        except Exception as exc:
            said = {"failed": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(said), flush=True)


asyncio.run(main(json.loads(sys.argv[1])))
