"""How operations, answers and errors travel over HTTP: both ends use this, so they agree.

An operation becomes a request by its verb and route. What the route has no place for goes into
the query (GET, DELETE, and whatever has a body of raw bytes) or into a JSON object. A field that
is nothing by default, and is nothing, is left out. In JSON, `bytes` are base64, and a field whose
name ends in `_at` is RFC 3339 in UTC; in Python it is seconds since 1970.

Requests are read strictly: a field that nobody knows is an error that names it. Answers are read
leniently: a newer server may say more than we know.

Names of files need not be UTF-8. Python shows the odd bytes as U+DC80 to U+DCFF; so does JSON
here, as escapes, and in a path or query they are those bytes.
"""

from __future__ import annotations

import re
import typing
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar, cast

from hutch import serving
from hutch.errors import (
    BY_CODE,
    CommandFailed,
    Conflict,
    HutchError,
    InvalidRequest,
    NoCapacity,
    NotFound,
    NotPermitted,
    QuotaReached,
    ServerUnavailable,
    TimedOut,
    Unauthorized,
)
from hutch.operations import Operation, StreamOperation
from hutch.types import Call, CellResult, Change, Chunk, Execution, Result

from .values import (
    Read,
    clean,
    default_of,
    dump,
    fields_of,
    from_query,
    in_query,
    load,
    plain,
    plain_result,
    quoted,
    reader,
    refuse_doubled_keys,
    short,
    unknown,
)

__all__ = [
    "EVENTS",
    "WORKSPACE",
    "Data",
    "EncodedRequest",
    "Form",
    "answer_from_json",
    "answer_to_json",
    "default_of",
    "dump",
    "error_from_json",
    "error_to_json",
    "event_of",
    "fields_of",
    "form_of",
    "from_json",
    "item_from",
    "load",
    "load_object",
    "operation_of",
    "plain",
    "request_of",
    "to_json",
]

T = TypeVar("T")
ItemT = TypeVar("ItemT")
OperationT = TypeVar("OperationT", bound=Operation[object])
Data = bytes | Iterable[bytes] | AsyncIterable[bytes]

WORKSPACE = "workspace/"  # a session's id that begins so means the files of a workspace
_PARAMETER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class EncodedRequest:
    """What an operation looks like over HTTP. At most one of `body` and `stream` is there."""

    verb: str
    path: str
    query: dict[str, str]
    body: bytes | None = None  # a JSON object
    stream: Data | None = None  # raw


@dataclass(frozen=True)
class Form:
    """Where each field of an operation goes."""

    parameters: tuple[str, ...]  # in the route
    query: tuple[str, ...]
    body: tuple[str, ...]
    data: str | None  # the raw body
    whole: bool  # the data is wanted in one piece
    required: frozenset[str]
    defaults: Mapping[str, Any]
    hints: Mapping[str, Any]
    readers: Mapping[str, Read]


_FORMS: dict[str, Form] = {}


def form_of(cls: type[Operation[object]]) -> Form:
    """Where each field of this operation goes."""
    known = _FORMS.get(cls.__name__)
    if known is None:
        known = _FORMS[cls.__name__] = _make_form(cls)
    return known


def _make_form(cls: type[Operation[object]]) -> Form:
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in fields_of(cls)}
    parameters = tuple(_PARAMETER.findall(cls.route))
    data = "data" if "data" in known else None
    rest = tuple(name for name in known if name not in parameters and name != data)
    by_query = cls.verb in ("GET", "DELETE") or data is not None
    return Form(
        parameters=parameters,
        query=rest if by_query else (),
        body=() if by_query else rest,
        data=data,
        whole=data is not None and hints[data] is bytes,
        required=frozenset(n for n, f in known.items() if default_of(f) is MISSING),
        defaults={n: default_of(f) for n, f in known.items()},
        hints=hints,
        readers={n: reader(hints[n], n, strict=True) for n in known if n != data},
    )


def request_of(operation: Operation[object]) -> EncodedRequest:
    """The request that asks for this. InvalidRequest if HTTP cannot carry what is in it."""
    cls = type(operation)
    form = form_of(cls)
    route = cls.route
    values = {name: getattr(operation, name) for name in form.parameters}
    if "/files" in route and str(values.get("session", "")).startswith(WORKSPACE):
        route = route.replace("/sessions/", "/workspaces/")
        values["session"] = values["session"].removeprefix(WORKSPACE)
    path = _PARAMETER.sub(lambda match: quoted(values[match[1]]), route)
    query = {
        name: in_query(name, value)
        for name in form.query
        if (value := getattr(operation, name)) is not None
        and (value or value != form.defaults[name])
    }
    if form.data:
        return EncodedRequest(cls.verb, path, query, stream=getattr(operation, form.data))
    if not form.body:
        return EncodedRequest(cls.verb, path, query)
    said = {
        name: plain(value, name)
        for name in form.body
        if (value := getattr(operation, name)) or value != form.defaults[name]
    }
    return EncodedRequest(cls.verb, path, query, body=dump(said))


def operation_of(
    cls: type[OperationT],
    path: Mapping[str, str],
    query: Mapping[str, str],
    body: bytes | None,
    data: Data | None = None,
) -> OperationT:
    """What a request asks for. InvalidRequest says what is wrong with it."""
    form = form_of(cls)
    given: dict[str, Any] = {}
    for name in form.parameters:
        if name in path:
            given[name] = clean(path[name], name)
        else:  # a route to the files of a workspace
            given[name] = WORKSPACE + clean(path["workspace"], "workspace")
    for name, text in query.items():
        if name not in form.query:
            raise unknown(name, form.query, "the query")
        given[name] = form.readers[name](from_query(form.hints[name], text), name)
    if form.body:
        said = load_object(body)
        for name, value in said.items():
            if name not in form.body:
                raise unknown(name, form.body, "the body")
            given[name] = form.readers[name](value, name)
    elif body and not form.data:
        raise InvalidRequest("this takes no body")
    if form.data:
        given[form.data] = data if data is not None else body or b""
    if missing := form.required - given.keys():
        raise InvalidRequest(f"{' and '.join(sorted(missing))} must be given")
    return cls(**given)


def load_object(body: bytes | None) -> dict[str, Any]:
    """The JSON object of a request; without a body it is empty. InvalidRequest if a key is in
    any object of it twice: a proxy or a filter before us might have looked at the other one."""
    said = load(body) if body else {}
    if body:
        refuse_doubled_keys(body)
    if not isinstance(said, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {short(said)}")
    return said


# --- answers ----------------------------------------------------------------------------


def answer_to_json(operation: Operation[T], value: T) -> bytes:
    """The body that answers an operation."""
    if isinstance(operation, serving.ListWorkspaces):
        return dump({"workspaces": plain(value, "")})
    return to_json(value)


def answer_from_json(operation: Operation[T], data: bytes) -> T:
    """What an operation was answered with."""
    if isinstance(operation, serving.ListWorkspaces):
        value = load(data)
        found = value.get("workspaces") if isinstance(value, dict) else value
        answer = reader(operation.answer, "workspaces", strict=False)(found, "workspaces")
    else:
        answer = from_json(operation.answer, data)
    return cast(T, answer)


def to_json(value: Any) -> bytes:
    """An answer, or one item of a stream. Values that JSON has no object for are put into one."""
    if isinstance(value, Result):
        return dump(plain_result(value))
    if value is None:
        return b'{"ok":true}'
    if isinstance(value, (bool, int, str, float)):
        return dump({"value": value})
    return dump(plain(value, ""))


def from_json(type_: Any, data: bytes) -> Any:
    """What `to_json` made of a value of this type. InvalidRequest if it is something else."""
    value = load(data)
    optional = type_ is None or type(None) in typing.get_args(type_)
    if optional and value == {"ok": True}:
        return None
    if type_ in (bool, int, str, float):
        value = value.get("value") if isinstance(value, dict) else None
    return reader(type_, "answer", strict=False)(value, "the answer")


# --- streams ----------------------------------------------------------------------------

EVENTS: dict[type, str] = {
    Chunk: "chunk", CellResult: "result", Call: "call", Result: "done", Execution: "done",
    Change: "change", serving.JournalEntry: "entry", serving.AuditEntry: "audit",
    serving.BuildProgress: "progress", type(None): "ready",
}  # fmt: skip
_ITEMS: dict[str, type | None] = {
    event: None if cls is type(None) else cls for cls, event in EVENTS.items() if event != "done"
}


def event_of(item: Any) -> str:
    """The name of the event that carries an item of a stream."""
    return EVENTS[type(item)]


def item_from(operation: StreamOperation[ItemT, T], event: str, data: bytes) -> ItemT | HutchError:
    """The item that an event carries; of an `error` event, the error, which is not raised."""
    if event == "error":
        return error_from_json(500, data)
    if event == "done" and operation.answer is not None:
        return cast(ItemT, from_json(operation.answer, data))
    if event not in _ITEMS:
        raise InvalidRequest(f"an event {event!r:.50} that this client does not know: update it")
    return cast(ItemT, from_json(_ITEMS[event], data))


# --- errors -----------------------------------------------------------------------------

_CODES = {"timed_out": "COMMAND_TIMEOUT", "internal": "INTERNAL_ERROR"}
_BY_STATUS: dict[int, type[HutchError]] = {
    400: InvalidRequest, 401: Unauthorized, 403: NotPermitted, 404: NotFound, 409: Conflict,
    413: InvalidRequest, 415: InvalidRequest, 421: InvalidRequest, 429: QuotaReached,
    502: ServerUnavailable, 503: NoCapacity, 504: ServerUnavailable,
}  # fmt: skip


def error_to_json(
    exc: HutchError, error_code: str | None = None, details: Mapping[str, Any] | None = None
) -> bytes:
    """`error_code` and `details` are for those who know Sandkasten's; `code` is our own."""
    body: dict[str, Any] = {
        "error_code": error_code or _CODES.get(exc.code) or exc.code.upper(),
        "message": str(exc),
        "code": exc.code,
    }
    more = dict(details or {})
    for name in ("result", "execution"):
        if hasattr(exc, name):
            more[name] = plain(getattr(exc, name), name)
    if more:
        body["details"] = more
    return dump(body)


def error_from_json(status: int, data: bytes) -> HutchError:
    """The error that a server answered with, or, if something else answered, one like it."""
    try:
        body = load(data)
        code, message = body["code"], str(body["message"])
        details = body.get("details")
        details = details if isinstance(details, dict) else {}
    except (InvalidRequest, KeyError, TypeError, IndexError, AttributeError):
        said = data[:500].decode("utf-8", "replace").strip()
        cls = _BY_STATUS.get(status, HutchError)
        return cls(f"status {status}" + (f": {said}" if said else ""))
    cls = BY_CODE.get(code, HutchError) if isinstance(code, str) else HutchError
    if not issubclass(cls, (CommandFailed, TimedOut)):
        return cls(message)
    kinds = {"result": Result, "execution": Execution}
    return cls(message, **{n: reader(t, n, strict=False)(details[n], n)
                           for n, t in kinds.items() if n in details})  # fmt: skip
