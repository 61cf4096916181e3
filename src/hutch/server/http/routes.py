"""Which route a path means. Templates are those of `operations.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import unquote

from hutch.errors import NotFound

from .request import HTTPError

T = TypeVar("T")  # what is done at a route


@dataclass(frozen=True)
class Route(Generic[T]):
    template: str
    act: T
    is_public: bool = False  # nobody needs a key
    rest: bool = False  # the last parameter takes the rest of the path, as it is


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
        """A slash in a parameter is written %2F, so the path is split before it is decoded."""
        parts = path.split("/")[1:]
        found = _walk(self._root, parts, 0, ())
        if found is None:
            raise NotFound("there is nothing at this path; /openapi.json lists what there is")
        node, values = found
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
            values = (*values[: len(names) - 1], "/".join(parts[_depth(route) - 1 :]))
        found_values = {
            name: value if route.rest and name == names[-1] else _decoded(value)
            for name, value in zip(names, values, strict=True)
        }
        return route, found_values


def _depth(route: Route[T]) -> int:
    return route.template.count("/")


def _walk(
    node: Node[T], parts: list[str], at: int, values: tuple[str, ...]
) -> tuple[Node[T], tuple[str, ...]] | None:
    if at == len(parts):
        return (node, values) if node.routes else None
    part = parts[at]
    if part in node.literals and (found := _walk(node.literals[part], parts, at + 1, values)):
        return found
    if node.parameter is None:
        return None
    if found := _walk(node.parameter, parts, at + 1, (*values, part)):
        return found
    if any(route.rest for route, _ in node.parameter.routes.values()):
        return node.parameter, (*values, part)
    return None


def _decoded(text: str) -> str:
    return unquote(text, errors="surrogateescape") if "%" in text else text
