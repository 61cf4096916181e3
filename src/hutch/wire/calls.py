"""Calls: code in a box asks a function of the agent's process, on channel CALLS.

A call is a message like a result (see cells.py): user code wrote it, so guest and host both check
it. Values are JSON in both directions.
"""

from __future__ import annotations

import json
from typing import Any

from .cells import MiB, check_depth, parse

MAX_CALL = 4 * MiB  # bytes of the JSON of one call, or of its answer
MAX_CALLS = 32  # of one cell that wait for an answer at once; a kernel holds the others back
MAX_WORD = 200  # characters of a name
_CALL: dict[str, type] = {"id": int, "name": str, "args": list, "kwargs": dict}


def parse_call(payload: bytes) -> dict[str, Any]:
    """A call with the fields and types that it must have, or ValueError."""
    if len(payload) > MAX_CALL:
        raise ValueError("a call that is too long")
    return check_call(parse(payload))


def check_call(body: object) -> dict[str, Any]:
    """A call with the fields and types that it must have, or ValueError."""
    if not isinstance(body, dict) or body.keys() != _CALL.keys():
        raise ValueError("a call has other fields than these")
    for name, kind in _CALL.items():
        if type(body[name]) is not kind:
            raise ValueError(f"{name} of a call is {body[name]!r:.60}")
    if len(body["name"]) > MAX_WORD or body["id"] < 1:
        raise ValueError("a call without a proper name or number")
    check_depth(body["args"])
    check_depth(body["kwargs"])
    json.dumps(body, ensure_ascii=False).encode()  # half of a character pair is no text
    return body


def to_reply(call: int, value: Any, error: tuple[str, str] | None) -> bytes:
    """What a kernel is told: JSON, or ValueError or TypeError if the value has none."""
    told = {"name": error[0], "value": error[1]} if error else None
    body = {"id": call, "value": None if error else value, "error": told}
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace")
