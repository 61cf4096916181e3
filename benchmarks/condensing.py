"""How long it takes to make a megabyte of output shorter."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from hutch.tools.condense import Condenser

from .measure import Contender, Promise, milliseconds

if TYPE_CHECKING:
    from .peers import Peers
    from .scenarios import Size

MB = 1_000_000
PIECE = 64 * 1024  # as it comes from a box


PROMISE = 30  # milliseconds


@contextlib.contextmanager
def a_megabyte(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    log = _filled(
        f"2024-01-02 12:00:{n % 60:02} INFO worker-{n} handled /api/items/{n} in {n * 37 % 97} ms\n"
        for n in range(MB)
    )
    others = {
        "pytest -v": _filled(
            f"tests/test_{n % 90}.py::test_part_{n} PASSED [{n % 100}%]\n" for n in range(MB)
        ),
        "./run # source code": _filled(
            line + "\n" for n in range(MB) for line in inspect.getsource(inspect).splitlines()
        ),
        "./run # an unknown program": _filled(
            f"{'  ' * (n * 7 % 9)}part {n * 7919 % 1009}: {'x' * (n % 40)};\n" for n in range(MB)
        ),
        "./run # very short lines": _filled(f"{n % 100_000}\n" for n in range(MB)),
        "./run # binary": random.Random(1).randbytes(MB),
    }
    yield [
        Contender("a log", partial(_timed, "./serve", log), size.turns, promise=Promise(PROMISE)),
        *(
            Contender(
                command.rpartition("# ")[2], partial(_timed, command, data), size.turns,
                promise=Promise(PROMISE, of_value=True),
            )
            for command, data in others.items()
        ),
    ]  # fmt: skip


def _filled(lines: Iterator[str]) -> bytes:
    data = bytearray()
    for line in lines:
        data += line.encode()
        if len(data) >= MB:
            break
    return bytes(data[:MB])


def _timed(command: str, data: bytes) -> float:
    return milliseconds(partial(_condense, command, data))


def _condense(command: str, data: bytes) -> None:
    condenser = Condenser(command)
    for at in range(0, len(data), PIECE):
        condenser.feed(data[at : at + PIECE])
    condenser.finish(0, recall="o1")
