"""Signal handlers: run in a cell, harmless between cells, never in the middle of a frame.

A signal handler of user code may raise between any two of our own instructions. In a cell, that is
the error of the cell. Between cells, it is only printed to stderr.
"""

from __future__ import annotations

# `signal` wraps this in enums, which costs more than all the rest of sending a frame.
import _signal  # type: ignore[import-not-found]
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .pretty import error_text

# The signals that programs commonly handle.
HANDLED = (
    _signal.SIGINT,
    _signal.SIGALRM,
    _signal.SIGVTALRM,
    _signal.SIGPROF,
    _signal.SIGUSR1,
    _signal.SIGUSR2,
    _signal.SIGTERM,
    _signal.SIGHUP,
    _signal.SIGCHLD,
)


def accept_signals() -> None:
    """At the start of a cell: an interrupt raises KeyboardInterrupt, and handlers may raise."""
    for number in HANDLED:
        handler = _signal.getsignal(number)
        if type(handler) is _Harmless:
            _signal.signal(number, handler.handler)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def ignore_signals() -> None:
    """After a cell: interrupts are ignored, and handlers cannot raise. Never raises."""
    while True:
        try:
            # Not SIG_IGN: programs that a thread starts between cells would inherit that.
            _signal.signal(_signal.SIGINT, _ignore)
            for number in HANDLED:
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not _ignore and type(handler) is not _Harmless:
                    _signal.signal(number, _Harmless(handler))
            return
        except BaseException:
            continue  # a handler raised before it was wrapped


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside the `with`, no signal handler runs. Those of signals that came run after it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    late: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}
    for number in HANDLED:
        if callable(_signal.getsignal(number)):
            handlers[number] = _signal.signal(number, lambda *what: late.append(what))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
    for number, frame in late:
        handlers[number](number, frame)


class _Harmless:
    """Calls a handler, and prints its first error instead of raising it."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self._reported = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except BaseException as exc:
            if not self._reported:
                self._reported = True  # first, as it may be called again at any moment
                _print(f"{error_text(exc)} (in a signal handler, while no cell ran)\n")


def _print(line: str) -> None:
    try:
        os.write(2, line.encode("utf-8", "replace"))
    except OSError:
        pass  # user code may have closed it


def _ignore(number: int, frame: FrameType | None) -> None:
    pass
