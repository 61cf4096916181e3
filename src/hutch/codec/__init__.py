"""How operations, answers and errors travel over HTTP: both ends use this, so they agree.

An operation becomes a request by its verb and route. What the route has no place for goes into
the query (GET, DELETE, and whatever has a body of raw bytes) or into a JSON object. A field that
is empty by default, and is empty, is left out. In JSON, `bytes` are base64, and a field whose
name ends in `_at` is RFC 3339 in UTC; in Python it is seconds since 1970.

Requests are read strictly: an unknown field is an error that names it. Answers are read leniently:
a newer server may send fields that we do not know.

Names of files need not be UTF-8. Python represents invalid bytes as U+DC80 to U+DCFF; so does JSON
here, as escapes. In a path or query they are percent-encoded bytes.
"""

from __future__ import annotations

import re
import typing
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TypeVar, cast

import msgspec

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
from hutch.serving import WORKSPACE_FILES
from hutch.types import BoxInfo, Call, CellResult, Change, Chunk, Execution, Result

from .values import (
    answer_of,
    clean,
    default_of,
    dump,
    find_problem,
    in_query,
    load,
    plain,
    quoted,
    refuse_doubled_keys,
    require_finite,
    short,
    strict_type,
    struct_of,
    unknown,
)

__all__ = [
    "EVENTS",
    "Data",
    "EncodedRequest",
    "Form",
    "answer_from_json",
    "answer_to_json",
    "dump",
    "error_from_json",
    "error_to_json",
    "event_of",
    "form_of",
    "from_json",
    "item_from",
    "load",
    "load_object",
    "operation_of",
    "request_of",
    "to_json",
]

T = TypeVar("T")
ItemT = TypeVar("ItemT")
OperationT = TypeVar("OperationT", bound=Operation[object])
Data = bytes | Iterable[bytes] | AsyncIterable[bytes]

_PARAMETER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class EncodedRequest:
    """An operation as an HTTP request. It has at most one of `body` and `stream`."""

    verb: str
    path: str
    query: dict[str, str]
    body: bytes | None = None  # a JSON object
    stream: Data | None = None  # raw


@dataclass(frozen=True)
class Form:
    """Where each field of an operation goes."""

    parameters: tuple[str, ...]  # in the route
    query: Mapping[str, object]  # names and types
    required: frozenset[str]  # in the query
    defaults: Mapping[str, object]
    body: type[msgspec.Struct] | None  # a JSON object
    decode: Callable[[bytes], msgspec.Struct]
    records: Mapping[str, object]  # the fields of the body with dataclasses in them
    data: str | None  # the raw body
    whole: bool  # the handler takes the raw body in one piece


_FORMS: dict[str, Form] = {}


def form_of(cls: type[Operation[object]]) -> Form:
    """Where each field of this operation goes."""
    form = _FORMS.get(cls.__name__)
    if form is None:
        form = _FORMS[cls.__name__] = _make_form(cls)
    return form


def _make_form(cls: type[Operation[object]]) -> Form:
    assert is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}
    parameters = tuple(_PARAMETER.findall(cls.route))
    data = "data" if "data" in known else None
    rest = {n: f for n, f in known.items() if n not in parameters and n != data}
    is_json = cls.verb not in ("GET", "DELETE") and data is None and rest
    members = {name: (hints[name], field) for name, field in rest.items()}
    body = struct_of(f"{cls.__name__}Request", members) if is_json else None
    query = {} if is_json else rest
    strict = {name: strict_type(hints[name]) for name in rest}
    return Form(
        parameters=parameters,
        query={name: strict[name] for name in query},
        required=frozenset(n for n, f in query.items() if default_of(f) is MISSING),
        defaults={n: default_of(f) for n, f in known.items()},
        body=body,
        decode=msgspec.json.Decoder(body or msgspec.Struct).decode,
        records={n: hints[n] for n in rest if _has_record(hints[n])},
        data=data,
        whole=data is not None and hints[data] is bytes,
    )


def _has_record(hint: object) -> bool:
    return any(is_dataclass(part) for part in (hint, *typing.get_args(hint)))


def request_of(operation: Operation[object]) -> EncodedRequest:
    """The request for an operation.

    Raises InvalidRequest if a field has the wrong type, as the engine would, or if HTTP cannot
    carry it.
    """
    cls = type(operation)
    form = form_of(cls)
    route = cls.route
    values = {name: clean(getattr(operation, name), name) for name in form.parameters}
    owner = ""
    if "/files" in route and values.get("session", "").startswith(WORKSPACE_FILES):
        route = route.replace("/sessions/", "/workspaces/")
        owner, _, values["session"] = (
            values["session"].removeprefix(WORKSPACE_FILES).rpartition("/")
        )
    path = _PARAMETER.sub(lambda match: quoted(values[match[1]]), route)
    query = {"owner": owner} if owner else {}
    for name, hint in form.query.items():
        value = getattr(operation, name)
        if value or value != form.defaults[name]:
            checked = value if type(value) is hint else _convert(value, hint, name)
            if checked is not None:
                query[name] = in_query(name, checked)
    if form.data:
        data = getattr(operation, form.data)
        if data is None:
            raise InvalidRequest("data must be bytes or an iterable of bytes, not NoneType")
        return EncodedRequest(cls.verb, path, query, stream=data)
    if form.body is None:
        return EncodedRequest(cls.verb, path, query)
    body = {
        name: value
        for name in form.body.__struct_fields__
        if (value := getattr(operation, name)) or value != form.defaults[name]
    }
    _convert(body, form.body, "")
    for name, value in body.items():
        require_finite(name, value)
    return EncodedRequest(cls.verb, path, query, body=dump(body))


def _convert(value: object, hint: object, name: str) -> object:
    try:
        converted: object = msgspec.convert(value, hint, from_attributes=True)
    except msgspec.ValidationError as exc:
        raise find_problem(hint, value, name) or InvalidRequest(str(exc)) from None
    return converted


def operation_of(
    cls: type[OperationT],
    path: Mapping[str, str],
    query: Mapping[str, str],
    body: bytes | None,
    data: Data | None = None,
) -> OperationT:
    """The operation that a request is for. Raises InvalidRequest, which says what is wrong."""
    form = form_of(cls)
    values: dict[str, object] = {}
    for name in form.parameters:
        if name in path:
            values[name] = clean(path[name], name)
        else:  # a route to the files of a workspace
            owner = clean(query["owner"], "owner") + "/" if query.get("owner") else ""
            values[name] = WORKSPACE_FILES + owner + clean(path["workspace"], "workspace")
            query = {name: text for name, text in query.items() if name != "owner"}
    for name, text in query.items():
        if name not in form.query:
            raise unknown(name, tuple(form.query), "the query")
        values[name] = _from_query(text, form.query[name], name)
    if form.body:
        values |= _from_body(body or b"{}", form, form.body)
    elif body and not form.data:
        raise InvalidRequest("this takes no body")
    if form.data:
        values[form.data] = data if data is not None else body or b""
    if missing := form.required - values.keys():
        raise InvalidRequest(f"{' and '.join(sorted(missing))} must be given")
    return cls(**values)


def _from_query(text: str, hint: object, name: str) -> object:
    try:
        value: object = msgspec.convert(clean(text, name), hint, strict=False)
    except msgspec.ValidationError as exc:
        raise find_problem(hint, text, name) or InvalidRequest(f"{name}: {exc}") from None
    require_finite(name, value)
    return value


def _from_body(body: bytes, form: Form, struct: type[msgspec.Struct]) -> dict[str, object]:
    request: object
    try:
        request = form.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # It is wrong, or has surrogates, which msgspec does not read.
        fields = load_object(body)
        if problem := find_problem(struct, fields, ""):
            raise problem from None
        request = _convert(fields, struct, "")
    else:
        refuse_doubled_keys(body)
    values = {name: getattr(request, name) for name in struct.__struct_fields__}
    for name, hint in form.records.items():
        values[name] = msgspec.convert(values[name], hint, from_attributes=True)
    return values


def load_object(body: bytes | None) -> dict[str, object]:
    """The JSON object in a request; empty if there is no body.

    Raises InvalidRequest if any object in it has a key twice: a proxy or a filter in front of us
    might have looked at the other one.
    """
    value = load(body) if body else {}
    if body:
        refuse_doubled_keys(body)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {short(value)}")
    return value


# --- answers ----------------------------------------------------------------------------


def answer_to_json(operation: Operation[T], value: T) -> bytes:
    """The body that answers an operation."""
    if isinstance(operation, serving.ListWorkspaces):
        return dump({"workspaces": plain(value)})
    return to_json(value)


def answer_from_json(operation: Operation[T], data: bytes) -> T:
    """What an operation was answered with. Raises InvalidRequest if it is something else."""
    hint = cast(type[T], operation.answer)  # a class variable cannot be declared to be of type T
    if isinstance(operation, serving.ListWorkspaces):
        value = load(data)
        return answer_of(hint, value.get("workspaces") if isinstance(value, dict) else value)
    return from_json(hint, data)


_SCALARS = frozenset((bool, int, str, float))


def to_json(value: object) -> bytes:
    """An answer, or one item of a stream, as a JSON object or list. Scalars are wrapped in one."""
    if value is None:
        return b'{"ok":true}'
    if type(value) in _SCALARS:
        return dump({"value": value})
    return dump(plain(value))


def from_json(hint: type[T], data: bytes) -> T:
    """What `to_json` made of a value of this type. Raises InvalidRequest if it is something else.

    The type can also be None, or a union with it.
    """
    value = load(data)
    is_optional = hint in (None, type(None)) or type(None) in typing.get_args(hint)
    if is_optional and value == {"ok": True}:
        return cast(T, None)
    if hint in _SCALARS:
        value = value.get("value") if isinstance(value, dict) else None
    return answer_of(hint, value)


# --- streams ----------------------------------------------------------------------------

EVENTS: dict[type, str] = {
    Chunk: "chunk",
    CellResult: "result",
    Call: "call",
    Result: "done",
    Execution: "done",
    Change: "change",
    serving.JournalEntry: "entry",
    serving.AuditEntry: "audit",
    serving.BuildProgress: "progress",
    serving.LogRecord: "log",
    BoxInfo: "session",
    type(None): "ready",
}
_ITEMS = {event: cls for cls, event in EVENTS.items() if event != "done"}


def event_of(item: object) -> str:
    """The name of the event that carries an item of a stream."""
    return EVENTS[type(item)]


def item_from(operation: StreamOperation[ItemT, T], event: str, data: bytes) -> ItemT | HutchError:
    """The item that an event carries; for an `error` event, the error, which is not raised.

    Raises InvalidRequest for an event that is unknown or malformed.
    """
    if event == "error":
        return error_from_json(500, data)
    if event == "done" and operation.answer is not None:
        return from_json(cast(type[ItemT], operation.answer), data)
    if event not in _ITEMS:
        raise InvalidRequest(f"unknown event {event!r:.50}: this client is too old, update it")
    return cast(ItemT, from_json(_ITEMS[event], data))


# --- errors -----------------------------------------------------------------------------

_CODES = {"timed_out": "COMMAND_TIMEOUT", "internal": "INTERNAL_ERROR"}
_BY_STATUS: dict[int, type[HutchError]] = {
    400: InvalidRequest, 401: Unauthorized, 403: NotPermitted, 404: NotFound, 409: Conflict,
    413: InvalidRequest, 415: InvalidRequest, 421: InvalidRequest, 429: QuotaReached,
    502: ServerUnavailable, 503: NoCapacity, 504: ServerUnavailable,
}  # fmt: skip


def error_to_json(
    exc: HutchError, error_code: str | None = None, details: Mapping[str, object] | None = None
) -> bytes:
    """The body for an error. `error_code` and `details` are Sandkasten's; `code` is our own."""
    body: dict[str, object] = {
        "error_code": error_code or _CODES.get(exc.code) or exc.code.upper(),
        "message": str(exc),
        "code": exc.code,
    }
    more = dict(details or {})
    for name in ("result", "execution"):
        if hasattr(exc, name):
            more[name] = plain(getattr(exc, name))
    if more:
        body["details"] = more
    return dump(body)


def error_from_json(status: int, data: bytes) -> HutchError:
    """The error in a server's answer. If a proxy answered, the error that its status stands for."""
    try:
        body = load(data)
    except InvalidRequest:
        body = None
    if not isinstance(body, dict) or "code" not in body or "message" not in body:
        text = data[:500].decode("utf-8", "replace").strip()
        cls = _BY_STATUS.get(status, HutchError)
        return cls(f"status {status}" + (f": {text}" if text else ""))
    code, message, details = body["code"], str(body["message"]), body.get("details")
    cls = BY_CODE.get(code, HutchError) if isinstance(code, str) else HutchError
    if not issubclass(cls, (CommandFailed, TimedOut)):
        return cls(message)
    if not isinstance(details, dict):
        return cls(message)
    result = answer_of(Result, details["result"], "result") if "result" in details else None
    if "execution" not in details:
        return cls(message, result)
    return cls(message, result, answer_of(Execution, details["execution"], "execution"))
