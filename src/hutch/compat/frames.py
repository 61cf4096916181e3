"""KernelLite's protocol: a length in four bytes, big-endian, then JSON. One question, one answer.

This is the whole of it, for both ends. What arrives may be anything; it is parsed or refused
with BadMessage, and nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

# Code and output are far below this. A length above it is noise, or somebody who wants our memory.
MAX_MESSAGE = 64 * 1024 * 1024
HEAD = 4


class BadMessage(ValueError):
    """What came is not a message. The text says why."""


def pack(message: Mapping[str, object]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def length_of(head: bytes) -> int:
    """How many bytes follow these four."""
    length: int = struct.unpack("!I", head)[0]
    if length > MAX_MESSAGE:
        raise BadMessage(f"a message of {length} bytes: at most {MAX_MESSAGE} are taken")
    return length


def unpack(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise BadMessage(f"not JSON: {exc}") from None
