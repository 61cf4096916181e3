"""One engine for each backend in use. Callers need not know which one made a box."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from hutch import operations as op
from hutch.operations import Handlers, Operation, SessionOperation, StreamOperation
from hutch.types import BoxInfo

from .engine import Engine

T = TypeVar("T")
ItemT = TypeVar("ItemT")


class Engines:
    def __init__(self, make: Callable[[str], Engine], default: str) -> None:
        """`make` returns the engine of a backend, by name; called when it is first needed."""
        self._make, self._default = make, default
        self._made: dict[str, Engine] = {}

    async def perform(self, operation: Operation[T]) -> T:
        """As `Engine.perform`."""
        if operation in _HANDLERS:
            return await _HANDLERS.find(operation)(self, operation)
        return await self._for(operation).perform(operation)

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncGenerator[ItemT, None]:
        """As `Engine.stream`."""
        return await self._for(operation).stream(operation)

    def _for(self, operation: Operation[object]) -> Engine:
        name = self._default
        if isinstance(operation, SessionOperation):
            for engine in self._made.values():
                if engine.knows(operation.session):
                    return engine
        elif isinstance(operation, op.OpenSession):
            name = operation.backend or name
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    async def _list(self, o: op.ListSessions) -> list[BoxInfo]:
        infos: list[BoxInfo] = []
        for engine in list(self._made.values()):  # another may be made during the await
            infos += await engine.perform(o)
        return sorted(infos, key=lambda info: info.created_at, reverse=True)[: o.limit]

    async def close(self) -> None:
        try:
            while self._made:  # also those that are made during an await
                name = next(iter(self._made))
                await self._made[name].close()
                self._made.pop(name, None)
        finally:
            self._made.clear()


_HANDLERS = Handlers(op.ListSessions.by(Engines, Engines._list))
