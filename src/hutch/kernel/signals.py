"""Signals: heard in a cell, harmless between cells, and never in the middle of a frame.

A signal handler of user code may raise between any two of our own instructions. In a cell, that is
the error of the cell. Outside a cell, it is only printed to stderr.
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

from .pretty import said

# What a program may handle, and what programs do handle.
HANDLED = (
    _signal.SIGINT, _signal.SIGALRM, _signal.SIGVTALRM, _signal.SIGPROF, _signal.SIGUSR1,
    _signal.SIGUSR2, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGCHLD,
)  # fmt: skip


def listen() -> None:
    """A cell begins: an interrupt is a KeyboardInterrupt, and handlers may raise."""
    for number in HANDLED:
        handler = _signal.getsignal(number)
        if type(handler) is _Harmless:
            _signal.signal(number, handler.handler)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def deafen() -> None:
    """A cell is over: an interrupt is nothing, and no handler raises. Nor does this."""
    while True:
        try:
            # Not SIG_IGN: what a thread starts between cells would inherit that.
            _signal.signal(_signal.SIGINT, _ignore)
            for number in HANDLED:
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not _ignore and type(handler) is not _Harmless:
                    _signal.signal(number, _Harmless(handler))
            return
        except BaseException:
            continue  # it was on its way already


@contextmanager
def undisturbed() -> Iterator[None]:
    """For the length of a `with`, no handler runs. Those that should have, run after."""
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
    """A handler that is called, and whose errors are told, once, and forgotten."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self._told = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except BaseException as exc:
            if not self._told:
                self._told = True  # before anything else: it may be called again at any moment
                _tell(f"{said(exc)} (in a signal handler, while no cell ran)\n")


def _tell(line: str) -> None:
    try:
        os.write(2, line.encode("utf-8", "replace"))
    except OSError:
        pass  # stderr is whatever the user made of it


def _ignore(number: int, frame: FrameType | None) -> None:
    pass
