"""A tool is declared as a function that takes a ToolContext and returns an Answer.

Its signature is its JSON Schema, and its docstring is the description that the model reads.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from hutch.client._async import AsyncSandbox
from hutch.client._async_code import Functions
from hutch.errors import InvalidRequest


@dataclass(frozen=True)
class Picture:
    """An image that a tool shows to the model."""

    data: bytes
    mime: str  # "image/png"


@dataclass(frozen=True)
class Answer:
    """What the model gets. An error that it can correct itself is an answer, not an exception."""

    text: str
    exit_code: int = 0  # of the command; 1 if the tool itself failed
    failed: bool = False  # the tool failed: `text` says why, and what to do next
    pictures: tuple[Picture, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)  # for programs; JSON-compatible


class ToolContext:
    """A box, and what its tools remember between calls.

    Tools await nothing but the box, so that they also work without an event loop: a `Toolbox` steps
    through them with `run_without_loop`.
    """

    def __init__(
        self,
        box: AsyncSandbox,
        *,
        condense: bool = True,
        functions: Functions | None = None,
    ) -> None:
        self.box = box
        self.functions = functions  # of this process, which code in Python can call
        self.condense = condense  # shorten the output of commands
        self.apart = False  # put stdout and stderr, each by itself, into the details of answers
        self.hidden: dict[str, tuple[str, str]] = {}  # id of an output -> its family and program
        self.seen: dict[str, str] = {}  # path of a file -> its digest when it was last read


Function = Callable[..., Awaitable[Answer]]
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_WANTED: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@dataclass(frozen=True)
class Tool:
    """A function that an agent can call, and its description for a model."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON Schema of an object
    function: Function  # (ctx, **arguments)
    only_reads: bool  # it changes nothing in the box

    def named(self, values: tuple[object, ...], arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call in Python, by name. Raises TypeError as Python does."""
        names = list(self.parameters["properties"])
        if len(values) > len(names):
            raise TypeError(f"{self.name} takes {', '.join(names)}, and was given {len(values)}")
        placed = dict(zip(names, values, strict=False))
        if twice := placed.keys() & arguments.keys():
            raise TypeError(f"{self.name} was given {min(twice)!r} twice")
        return placed | arguments

    def checked(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """The arguments, converted for the function. Raises InvalidRequest if they are wrong."""
        known = self.parameters["properties"]
        if unknown := sorted(set(arguments) - set(known)):
            raise InvalidRequest(
                f"{self.name} has no parameter {unknown[0]!r}; it has {', '.join(known)}"
            )
        given = {name: value for name, value in arguments.items() if value is not None}
        for name in self.parameters.get("required", ()):
            if name not in given:
                raise InvalidRequest(f"{self.name} needs {name!r}: {known[name]['description']}")
        return {name: self._value(name, known[name], value) for name, value in given.items()}

    def _value(self, name: str, schema: dict[str, Any], value: object) -> object:
        kind = schema["type"]
        if kind in ("integer", "number") and isinstance(value, str):  # some models quote numbers
            try:
                value = int(value) if kind == "integer" else float(value)
            except ValueError:
                raise InvalidRequest(f"{name!r} is a number, not {value!r}") from None
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, _WANTED[kind]) or (kind != "boolean" and isinstance(value, bool)):
            raise InvalidRequest(f"{name!r} is a {kind}, not {type(value).__name__}")
        if isinstance(value, str):
            try:
                value.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError as exc:
                raise InvalidRequest(f"{name!r} has half a character at {exc.start}") from None
        if "enum" in schema and value not in schema["enum"]:
            raise InvalidRequest(f"{name!r} is one of {', '.join(schema['enum'])}, not {value!r}")
        return value


def tool(function: Function, *, only_reads: bool = False) -> Tool:
    """The tool that a function declares. Each parameter after the context is Annotated."""
    hints = typing.get_type_hints(function, include_extras=True)
    properties, required = {}, []
    parameters = list(inspect.signature(function).parameters.values())[1:]
    for parameter in parameters:
        properties[parameter.name] = _schema(hints[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif parameter.default is not None:
            properties[parameter.name]["default"] = parameter.default
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    schema["additionalProperties"] = False
    description = inspect.cleandoc(function.__doc__ or "")
    return Tool(function.__name__, description, schema, function, only_reads)


def _schema(hint: object) -> dict[str, Any]:
    assert typing.get_origin(hint) is Annotated, f"{hint} has no description"
    kind, description = typing.get_args(hint)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):  # `str | None`: optional
        (kind,) = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is Literal:
        return {"type": "string", "enum": list(typing.get_args(kind)), "description": description}
    return {"type": _KINDS[kind], "description": description}
