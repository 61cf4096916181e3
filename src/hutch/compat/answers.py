"""What is asked of a KernelLite server, checked; and what a cell did, as KernelLite tells it."""

from __future__ import annotations

import json
import math
from typing import Any

from hutch.types import CellResult, Execution

Answer = dict[str, object]

MAX_SHOWN = 1024 * 1024  # characters of what a cell displays, besides what it prints
STARTED = "EVENT:" + json.dumps({"type": "session_started"})


def to_answer(execution: Execution, restarted: bool) -> Answer:
    """What a cell did, the way KernelLite tells it; and what it did not tell."""
    error = execution.error
    left = error is not None and error.name == "SystemExit" and error.value in ("", "0", "None")
    answer: Answer = {
        "status": "[OK] exec" if execution.ok or left else "[ERROR] exec",
        "stdout": (f"{STARTED}\n" if restarted else "") + _stdout(execution),
        "stderr": execution.logs.stderr + ("" if left else _trouble(execution)),
    }
    told = {"restarted": restarted, "timed_out": execution.timed_out, "died": execution.died}
    return answer | {name: value for name, value in told.items() if value}


def _stdout(execution: Execution) -> str:
    printed = execution.logs.stdout
    shown = "".join(f"{_text(result)}\n" for result in execution.results)
    if len(shown) > MAX_SHOWN:
        half = MAX_SHOWN // 2
        left_out = len(shown) - MAX_SHOWN
        shown = f"{shown[:half]}\n[... {left_out} characters not shown ...]\n{shown[-half:]}"
    return printed + ("\n" if shown and printed and not printed.endswith("\n") else "") + shown


def _text(result: CellResult) -> str:
    if result.text is not None:
        return result.text
    return " ".join(f"[{kind}: {path}]" for kind, path in result.files.items()) or "[no text]"


def _trouble(execution: Execution) -> str:
    parts = []
    if execution.error:
        error = execution.error
        parts.append(error.traceback or f"{error.name}: {error.value}")
    if execution.timed_out:
        fate = "killed" if execution.died else "interrupted"
        parts.append(f"TimeoutError: the cell ran for {execution.duration_ms / 1000:.1f} s "
                     f"and was {fate}")  # fmt: skip
    if execution.died:
        parts.append(f"The kernel died ({execution.died}) and its variables with it. The next "
                     "cell gets a new one.")  # fmt: skip
    return "".join(f"\n{part.rstrip()}\n" for part in parts)


def failed(why: str) -> Answer:
    return {"status": "[ERROR] exec", "stdout": "", "stderr": f"\n{why}\n"}


def broken(why: str) -> Answer:
    return {"status": "[ERROR] server", "stdout": "", "stderr": why}


def code_of(request: dict[str, Any], name: str) -> str:
    code = request.get(name, "")
    if not isinstance(code, str):
        raise ValueError(f"{name} must be text, not {type(code).__name__}")
    code.encode()  # half a character is a ValueError, too
    return code


def timeout_of(asked: object, most: float | None) -> float:
    limit = math.inf if most is None else most
    if asked is None:
        return limit
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not 0 < asked < 1e9:
        raise ValueError(f"timeout must be a number of seconds above 0, not {asked!r:.100}")
    return min(asked, limit)
