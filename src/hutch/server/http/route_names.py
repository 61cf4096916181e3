"""Names that come over HTTP, and where an operation is found by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar, cast

from hutch import operations as op
from hutch import serving

T = TypeVar("T")

# As JSON schemas have patterns: without anchors, and with nothing that only Python knows.
SESSION = "[0-9a-f]{8}-[0-9a-f]{3,4}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
WORKSPACE = "[a-z0-9][a-z0-9-]{0,62}[a-z0-9]"

# Sandkasten's workspaces once were volumes of Docker, and were called so. Clients may still do it.
_ONCE = "sandkasten-ws-"


def own_name(workspace: str) -> str:
    """The name of a workspace, without what Sandkasten once put before it."""
    return workspace.removeprefix(_ONCE)


def with_own_name(operation: op.Operation[T]) -> op.Operation[T]:
    """The same, if it names a workspace in its body or query."""
    renamed: op.Operation[object] = operation
    match operation:
        case op.OpenSession(workspace_id=str(name)) | op.ListSessions(workspace_id=str(name)):
            renamed = replace(operation, workspace_id=own_name(name))
        case serving.MakeWorkspace(id=name):
            renamed = replace(operation, id=own_name(name))
    return cast(op.Operation[T], renamed)


def templates(name: str, cls: type[op.Operation[object]]) -> Iterator[tuple[str, str]]:
    """(route, name): what is done to files of a session is also done to those of a workspace."""
    yield cls.route, name
    if cls.route.startswith("/v1/sessions/{session}/files"):
        other = cls.route.replace("/sessions/{session}/", "/workspaces/{workspace}/")
        yield other, f"{name}OfWorkspace"
