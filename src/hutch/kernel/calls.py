"""Functions of the host: called here, run in the process that uses the box.

A call is a frame, and so is its reply, while the cell runs. Any number of threads and tasks may
call at once. There is no thread for the replies: one of the waiting threads reads them for all, and
event loops read those that are awaited.

After its cell, the name of a function is removed, and calling a reference to it raises HostError.
In a later cell that has a function of the same name, the reference works again.
"""

from __future__ import annotations

import builtins
import fcntl
import json
import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

from .channel import LOWEST_FD, Channel
from .signals import undisturbed

if TYPE_CHECKING:
    import asyncio

# The limits of the host (see wire/cells.py).
MAX_CALL = (4 << 20) - 64  # bytes of JSON, with room for the number of the call
AT_ONCE = 32  # calls that wait for a reply; others are queued here
MAX_DEPTH, MAX_PARTS = 32, 1_000_000  # of one call
_MISSING: object = object()


class HostError(Exception):
    """An exception of a function of the host. Subclasses have the name of the host's class."""


class HostFunction:
    """A function that calls the host. Arguments and results are JSON."""

    def __init__(self, name: str, awaitable: bool = False) -> None:
        self.__name__ = self.__qualname__ = name
        self.__doc__ = "A function of the program that runs this box."
        self._awaitable = awaitable

    def __repr__(self) -> str:
        return f"<function {self.__name__} of the host>"

    def __reduce__(self) -> tuple[Any, ...]:
        return HostFunction, (self.__name__, self._awaitable)

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        calls = HostCalls.current
        if calls is None:
            raise HostError(f"{self.__name__} cannot be called here: no cell runs that has it")
        if self._awaitable:
            return calls.later(self.__name__, args, kwargs)
        return calls.call(self.__name__, args, kwargs)


class _Slot:
    """A waiter for one reply: a thread, or a task of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop
        self.future = loop.create_future() if loop else None
        self.gate = threading.Lock()  # of a thread: released when it has something to do
        self.gate.acquire()
        self.reply: Any = None

    def stir(self) -> None:
        if self.gate.locked():
            self.gate.release()

    def settle(self, reply: Any) -> None:
        self.reply = reply
        if self.loop is None:
            self.stir()
            return
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the loop is closed, so nothing waits

    def _wake(self) -> None:
        if self.future and not self.future.done():
            self.future.set_result(None)

    def value(self) -> object:
        error = self.reply["error"]
        if error is not None:
            _raise(error["name"], error["value"])
        return self.reply["value"]


class HostCalls:
    """The calls of the running cell."""

    current: HostCalls | None = None  # None: no cell runs, or it has no functions

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._last = 0
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()
        # By name: our function, and the variable that it hides.
        self._hidden: dict[str, tuple[HostFunction, Any]] = {}
        self._slots: dict[int, _Slot] = {}
        self._out: set[int] = set()  # sent and not answered, even if nothing waits for it any more
        self._queue: deque[tuple[int, bytes]] = deque()
        self._listener: _Slot | None = None
        self._watched: dict[asyncio.AbstractEventLoop, int] = {}  # how many calls wait in each
        pair = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # wakes the listener
        self._bell, self._ring = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST_FD) for fd in pair)
        for fd in pair:
            os.close(fd)
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)

    # --- a cell -----------------------------------------------------------------------

    def begin(self, names: list[str], awaitable: bool, namespace: dict[str, object]) -> None:
        self._names = frozenset(names)
        for name in names:
            function = HostFunction(name, awaitable)
            self._hidden[name] = function, namespace.get(name, _MISSING)
            namespace[name] = function
        HostCalls.current = self

    def end(self, namespace: dict[str, object]) -> None:
        """Forbid further calls. Those that still wait raise HostError."""
        HostCalls.current = None
        with undisturbed(), self._lock:
            self._names = frozenset()
            self._queue.clear()
            self._out.clear()
            slots, self._slots = list(self._slots.values()), {}
            for slot in slots:
                slot.settle({"error": {"name": "HostError", "value": "its cell is over"}})
            if self._listener:
                os.write(self._ring, b"!")
        for name, (function, before) in self._hidden.items():
            if namespace.get(name) is not function:
                continue  # the cell has assigned the name
            if before is _MISSING:
                del namespace[name]
            else:
                namespace[name] = before
        self._hidden.clear()

    # --- a call -----------------------------------------------------------------------

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        slot = _Slot()
        number = self._send(slot, name, args, kwargs)
        try:
            while slot.reply is None:
                self._wait(slot)
        finally:
            self._leave(number, slot)
        return slot.value()

    async def later(self, name: str, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        import asyncio  # slow to load, but code that awaits has loaded it

        loop = asyncio.get_running_loop()
        slot = _Slot(loop)
        assert slot.future
        self._watch(loop)
        number = 0
        try:
            number = self._send(slot, name, args, kwargs)
            await slot.future
        finally:
            self._leave(number, slot)
            self._unwatch(loop)
        return slot.value()

    def _send(self, slot: _Slot, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if os.getpid() != self._channel.pid:
            raise HostError(f"{name} can be called by the cell, not by a process that it started")
        body = _encoded(name, args, kwargs)
        with undisturbed(), self._lock:
            if name not in self._names:
                raise HostError(f"{name} cannot be called any more: the cell that had it is over")
            self._last += 1  # under the lock, as the guest expects numbers in order
            number = self._last
            self._slots[number] = slot
            self._queue.append((number, b'{"id":%d,' % number + body[1:]))
            self._send_some()
        return number

    def _send_some(self) -> None:
        while self._queue and len(self._out) < AT_ONCE:
            number, payload = self._queue.popleft()
            if number in self._slots:
                self._out.add(number)
                self._channel.call(payload)

    # --- its reply --------------------------------------------------------------------

    def _wait(self, slot: _Slot) -> None:
        """Wait until something has arrived. An interrupt may end it anywhere."""
        with undisturbed(), self._lock:
            if slot.reply is None and self._listener is None:
                self._listener = slot
        if self._listener is not slot:
            slot.gate.acquire()  # another thread reads, and wakes us
            return
        self._poll.poll()
        with undisturbed():
            self._take()

    def _leave(self, number: int, slot: _Slot) -> None:
        """Remove a waiter. If it was the listener, another thread becomes it."""
        with undisturbed(), self._lock:
            self._slots.pop(number, None)
            if self._listener is slot:
                self._listener = None
                _empty(self._bell)
            if self._listener is None:
                for other in self._slots.values():
                    if other.loop is None and other.reply is None:
                        other.stir()
                        break

    def _take(self) -> None:
        with self._lock:
            for reply in self._channel.replies():
                self._out.discard(reply["id"])
                if slot := self._slots.pop(reply["id"], None):
                    slot.settle(reply)
                    if slot is self._listener:
                        os.write(self._ring, b"!")  # an event loop may have read it
            self._send_some()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watched[loop] = self._watched.get(loop, 0) + 1
        if self._watched[loop] == 1:
            loop.add_reader(self._channel.fileno(), self._readable)

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watched[loop] -= 1
        if not self._watched[loop]:
            del self._watched[loop]
            if not loop.is_closed():
                loop.remove_reader(self._channel.fileno())

    def _readable(self) -> None:
        with undisturbed():
            self._take()


def _encoded(name: str, args: tuple[Any, ...], kwargs: dict[str, object]) -> bytes:
    body = {"name": name, "args": args, "kwargs": kwargs}
    try:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        message = f"{name} takes what JSON has (text, numbers, lists, dicts, None): {exc}"
        raise TypeError(message) from None
    payload = text.encode("utf-8", "replace")
    if len(payload) > MAX_CALL:
        raise ValueError(
            f"the arguments of {name} are {len(payload)} bytes of JSON, and may have {MAX_CALL}: "
            "write them to a file, and pass its path"
        )
    if _is_deep([args, kwargs]) or payload.count(b"[") + payload.count(b"{") > MAX_PARTS:
        raise ValueError(f"the arguments of {name} are nested too deeply, or have too many parts")
    return payload


def _is_deep(level: list[Any]) -> bool:
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [part for parts in inner for part in parts if isinstance(part, (dict, list, tuple))]
    return True


def _empty(fd: int) -> None:
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        pass


def _raise(name: str, message: str) -> NoReturn:
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            error = known(message)
        except TypeError:  # its constructor needs more than a message
            pass
        else:
            raise error
    if name == HostError.__name__ or not name.isidentifier():
        raise HostError(message)
    raise type(name, (HostError,), {"__module__": "host"})(message)
