"""KernelLite's protocol: a length in four bytes, big-endian, then JSON. One request, one answer.

This is all of it, for both ends. Whatever arrives is either parsed or refused with BadMessage.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

# Code and output are far below this. A length above it is garbage, or an attack on our memory.
MAX_MESSAGE = 64 * 1024 * 1024
HEAD = 4


class BadMessage(ValueError):
    """Not a valid message. The text says why."""


def pack(message: Mapping[str, object]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def length_of(head: bytes) -> int:
    """The length of the body that follows these four bytes. Raises BadMessage if it is too long."""
    length: int = struct.unpack("!I", head)[0]
    if length > MAX_MESSAGE:
        raise BadMessage(f"a message of {length} bytes: at most {MAX_MESSAGE} are taken")
    return length


def unpack(body: bytes) -> object:
    """The JSON of a body. Raises BadMessage if it is invalid."""
    try:
        message: object = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise BadMessage(f"not JSON: {exc}") from None
    return message
