"""What `--json` prints: records with times that people and programs can read."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from typing import Any

from hutch.types import plain


def to_json(value: object) -> Any:
    """As `plain`, but times of records (`created_at`) are text: 2027-01-31T12:00:00.000Z."""
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if not hasattr(value, "__dataclass_fields__"):
        return plain(value)
    record = {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
    return {
        name: moment(it) if name.endswith("_at") and isinstance(it, float) else to_json(it)
        for name, it in record.items()
    }


def print_json(value: object) -> None:
    print(json.dumps(to_json(value), indent=2))


def moment(seconds: float) -> str:
    """RFC 3339 in UTC, to the millisecond, as the audit log has it."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{thousandths:03}Z"
