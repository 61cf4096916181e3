# Generated from _async_pool.py by scripts/unasync. Change that file, and run the script.
"""Connections to one server: each request takes one that is free, or makes one.

httpcore has a pool for many servers and with limits. For each request it looks at every
connection, and for each of these at every other: a hundred calls at once are seconds of work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpcore

Make = Callable[[], httpcore.HTTPConnection]


class Lines:
    def __init__(self, make: Make) -> None:
        self._make = make
        self._free: list[httpcore.HTTPConnection] = []
        self._all: set[httpcore.HTTPConnection] = set()

    def send(self, request: httpcore.Request) -> httpcore.Response:
        """When the response is closed, its connection is free for the next one, or closed."""
        line = self._take()
        self._all.add(line)
        try:
            response = line.handle_request(request)
        except BaseException:
            self._all.discard(line)
            line.close()
            raise
        response.stream = Body(response.stream, lambda: self._give_back(line))
        return response

    def _take(self) -> httpcore.HTTPConnection:
        """The one that was used last: the others grow old, and are closed."""
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                line = self._free.pop()
                if line.is_idle() and not line.has_expired():
                    return line
                self._all.discard(line)
                line.close()
        return self._make()

    def _give_back(self, line: httpcore.HTTPConnection) -> None:
        if line.is_idle():
            self._free.append(line)
        else:
            self._all.discard(line)

    def close(self) -> None:
        self._free.clear()
        with contextlib.suppress(KeyError):
            while True:
                self._all.pop().close()


class Body:
    """The body of a response; `freed` is called when it is closed."""

    def __init__(self, body: Any, freed: Callable[[], None]) -> None:
        self._body, self._freed = body, freed
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        return self._body.__iter__()  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._body.close()
        finally:
            self._freed()
