"""The router: finds the route of a path. Templates are those of `operations.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import unquote

from hutch import operations as op
from hutch.errors import NotFound

from .request import HTTPError

T = TypeVar("T")  # the handler of a route

# Patterns as JSON schemas have them: without anchors, and without what only Python knows.
SESSION_PATTERN = "[0-9a-f]{8}-[0-9a-f]{3,4}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
WORKSPACE_PATTERN = "[a-z0-9][a-z0-9-]{0,62}[a-z0-9]"


@dataclass(frozen=True)
class Route(Generic[T]):
    template: str
    act: T
    is_public: bool = False  # no key is needed
    rest: bool = False  # the last parameter is the rest of the path, not decoded


@dataclass
class Node(Generic[T]):
    literals: dict[str, Node[T]] = field(default_factory=dict)
    parameter: Node[T] | None = None
    routes: dict[str, tuple[Route[T], tuple[str, ...]]] = field(default_factory=dict)


class Router(Generic[T]):
    def __init__(self) -> None:
        self._root: Node[T] = Node()

    def add(self, verb: str, route: Route[T]) -> None:
        node, names = self._root, []
        for part in route.template.split("/")[1:]:
            if part.startswith("{"):
                names.append(part[1:-1])
                node.parameter = node.parameter or Node()
                node = node.parameter
            else:
                node = node.literals.setdefault(part, Node())
        assert verb not in node.routes, f"two routes for {verb} {route.template}"
        node.routes[verb] = (route, tuple(names))

    def find(self, verb: str, path: str) -> tuple[Route[T], dict[str, str]]:
        """The route of a path, and its parameters.

        Raises NotFound, or HTTPError 405 if the path takes other methods only.
        """
        # A slash in a parameter is written %2F, so the path is split before it is decoded.
        parts = path.split("/")[1:]
        match = _walk(self._root, parts, 0, ())
        if match is None:
            raise NotFound("no such path: /openapi.json lists what there is")
        node, values = match
        entry = node.routes.get(verb) or node.routes.get("*")
        if entry is None and verb == "HEAD":
            entry = node.routes.get("GET")
        if entry is None:
            allowed = ", ".join(sorted(node.routes))
            raise HTTPError(
                405,
                f"this path takes {allowed}, not {verb}",
                headers=[(b"allow", allowed.encode())],
            )
        route, names = entry
        if route.rest:
            depth = route.template.count("/")
            values = (*values[: len(names) - 1], "/".join(parts[depth - 1 :]))
        parameters = {
            name: value if route.rest and name == names[-1] else _decoded(value)
            for name, value in zip(names, values, strict=True)
        }
        return route, parameters


def _walk(
    node: Node[T], parts: list[str], at: int, values: tuple[str, ...]
) -> tuple[Node[T], tuple[str, ...]] | None:
    if at == len(parts):
        return (node, values) if node.routes else None
    part = parts[at]
    if part in node.literals and (match := _walk(node.literals[part], parts, at + 1, values)):
        return match
    if node.parameter is None:
        return None
    if match := _walk(node.parameter, parts, at + 1, (*values, part)):
        return match
    if any(route.rest for route, _ in node.parameter.routes.values()):
        return node.parameter, (*values, part)
    return None


def _decoded(text: str) -> str:
    return unquote(text, errors="surrogateescape") if "%" in text else text


def templates(name: str, cls: type[op.Operation[object]]) -> Iterator[tuple[str, str]]:
    """(template, name) of each route of an operation.

    File operations of a session are also available for a workspace.
    """
    yield cls.route, name
    if cls.route.startswith("/v1/sessions/{session}/files"):
        other = cls.route.replace("/sessions/{session}/", "/workspaces/{workspace}/")
        yield other, f"{name}OfWorkspace"
