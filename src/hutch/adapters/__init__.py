"""Hutch in agent frameworks: one module each, which imports its framework and no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import hutch
from hutch.errors import InvalidRequest
from hutch.extras import install_command


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of a framework: an ImportError says which extra to install."""
    try:
        yield
    except ImportError as exc:
        message = f"{exc}: this part of hutch needs `{install_command(extra)}`"
        raise ImportError(message, name=exc.name) from exc


def checked(order: dict[str, Any], box: object = None) -> dict[str, Any]:
    """The order, if `create` takes all of it. Raises InvalidRequest, before any tool is called."""
    known = signature(hutch.AsyncSandbox.create).parameters
    if unknown := [name for name in order if name not in known]:
        raise InvalidRequest(f"there is no option {unknown[0]!r}; a box has {', '.join(known)}")
    if box is not None and order:
        raise InvalidRequest(f"{', '.join(order)}: the box is there already")
    return order


def order_of(config: Any, *others: str) -> dict[str, Any]:
    """The fields of a pydantic model, without `others`, as an order for `Sandbox.create`."""
    given = {name: getattr(config, name) for name in type(config).model_fields}
    return {
        name: value for name, value in given.items() if value is not None and name not in others
    }
