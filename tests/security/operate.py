"""Hutch in a process of its own, for tests that run it as another user, or kill it.

Reads one JSON request a line and answers each with a line. What is not plain (a box, a shell, a
program in the background) stays here, and its number goes back.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from typing import Any

from hutch import Sandbox
from hutch.errors import HutchError

kept: list[Any] = []


def pack(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        return [pack(item) for item in value]
    if dataclasses.is_dataclass(value):
        fields = {f.name: pack(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, "fields": fields}
    if isinstance(value, (str, int, float, bool, type(None), dict)):
        return value
    kept.append(value)
    return {"kept": len(kept) - 1, "id": getattr(value, "id", ""), "pid": getattr(value, "pid", 0)}


def perform(ask: dict[str, Any]) -> Any:
    if "python" in ask:
        names: dict[str, Any] = {"Sandbox": Sandbox, "kept": kept}
        exec(ask["python"], names)
        return names.get("answer")
    found: Any = Sandbox if ask["on"] is None else kept[ask["on"]]
    for name in ask["call"].split("."):
        found = getattr(found, name)
    return found(*ask["args"], **ask["options"])


for line in sys.stdin:
    try:
        answer = {"value": pack(perform(json.loads(line)))}
    except HutchError as exc:
        answer = {"error": exc.code, "message": str(exc)}
    except Exception as exc:
        answer = {"broken": repr(exc)}
    print(json.dumps(answer), flush=True)
