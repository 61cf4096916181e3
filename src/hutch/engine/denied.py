"""System calls that the filter of a box refused, as its guest counts them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DENIED = 256  # entries that a guest is believed
_MAX_NAME = 64  # characters


@dataclass(frozen=True)
class Denied:
    """How often one program was refused one system call, since its box was made or woke."""

    program: str  # as it calls itself
    call: str
    count: int
    first_at: float
    last_at: float

    @classmethod
    def read(cls, said: object) -> Denied | None:
        """From what a guest said, which is not to be trusted. None if it makes no sense."""
        if not isinstance(said, dict):
            return None
        program, call, count = (said.get(name) for name in ("program", "call", "count"))
        first, last = said.get("first"), said.get("last")
        if not (isinstance(program, str) and isinstance(call, str) and type(count) is int):
            return None
        if not (isinstance(first, float) and isinstance(last, float)) or count < 1:
            return None
        return cls(_shown(program), _shown(call), min(count, 1 << 53), first, last)


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_NAME])
