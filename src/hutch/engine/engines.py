"""An engine for each backend that is asked for. Whoever uses a box need not know which made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hutch import operations as op
from hutch.types import BoxInfo

from .engine import Engine


class Engines:
    def __init__(self, make: Callable[[str], Engine], default: str) -> None:
        """`make` gives the engine of a backend, by name; one is made when it is first needed."""
        self._make, self._default = make, default
        self._made: dict[str, Engine] = {}

    async def perform(self, operation: op.Operation) -> Any:
        """As `Engine.perform`."""
        if isinstance(operation, op.ListSessions):
            return await self._list(operation)
        return await self._for(operation).perform(operation)

    def _for(self, operation: op.Operation) -> Engine:
        session = getattr(operation, "session", "")
        for engine in self._made.values():
            if engine.knows(session):
                return engine
        name = getattr(operation, "backend", "") or self._default
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    async def _list(self, o: op.ListSessions) -> list[BoxInfo]:
        found: list[BoxInfo] = []
        for engine in list(self._made.values()):  # another may be made while this one is asked
            found += await engine.perform(o)
        return sorted(found, key=lambda info: info.created_at, reverse=True)[: o.limit]

    async def close(self) -> None:
        try:
            while self._made:  # also those that are made meanwhile
                name = next(iter(self._made))
                await self._made[name].close()
                self._made.pop(name, None)
        finally:
            self._made.clear()
