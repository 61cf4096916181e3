"""Values as JSON, and back.

msgspec encodes, decodes and checks. This module adds what it cannot do:

- A field whose name ends in `_at` is seconds since 1970 in Python and RFC 3339 in JSON.
- A Result or a Chunk is sent as text where its bytes are that text, and as base64 otherwise.
- A request with an unknown field is refused, even in a nested record.
- A request that is refused gets a message that names the field and says what is allowed.
- A key that is in an object twice is refused, and text may have surrogates for invalid bytes.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections import Counter
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from math import isfinite
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import quote

import msgspec

from hutch.errors import InvalidRequest
from hutch.types import Chunk, Result

T = TypeVar("T")

# Numbers end up in SQLite, in file offsets and in C: none of them takes more than 64 bits.
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_TIME = Annotated[datetime, msgspec.Meta(tz=True)]


# --- values to JSON ---------------------------------------------------------------------


def _no_form(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise InvalidRequest(f"{type(value).__name__} cannot be sent as JSON")


_ENCODE = msgspec.json.Encoder(enc_hook=_no_form).encode
_DECODE = msgspec.json.Decoder().decode


def dump(value: object) -> bytes:
    """A value as JSON. NaN and infinity become null."""
    try:
        return _ENCODE(value)
    except UnicodeEncodeError:
        # msgspec writes UTF-8, which has no surrogates; `json` writes them as escapes. But `json`
        # also writes NaN, which is not valid JSON: reading it back once turns that into null.
        text = json.dumps(msgspec.to_builtins(value, enc_hook=_no_form))
        return json.dumps(json.loads(text, parse_constant=lambda _: None)).encode()


def plain(value: object) -> object:
    """An answer, or an item of a stream, as `dump` should encode it."""
    if isinstance(value, Result):
        return _plain_result(value)
    if isinstance(value, Chunk):
        return _plain_chunk(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    kind: type = type(value)
    if times := _times_of(kind):
        record = vars(value).copy()
        for name in times:
            if record[name] is not None:
                record[name] = _format_time(record[name])
        return record
    return value


def _plain_result(result: Result) -> dict[str, object]:
    record = vars(result).copy()
    if result.stdout_bytes == _encoded(result.stdout):
        del record["stdout_bytes"]
    if result.stderr_bytes == _encoded(result.stderr):
        del record["stderr_bytes"]
    return record


def _plain_chunk(chunk: Chunk) -> dict[str, object]:
    try:
        return {"stream": chunk.stream, "text": chunk.data.decode()}
    except UnicodeDecodeError:
        return {"stream": chunk.stream, "base64": chunk.data}


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@cache
def _times_of(cls: type) -> tuple[str, ...]:
    """The fields of a record that are times."""
    names = [field.name for field in fields(cls)] if is_dataclass(cls) else []
    return tuple(name for name in names if name.endswith("_at"))


def _format_time(seconds: float) -> str:
    try:
        when = datetime.fromtimestamp(round(seconds, 3), UTC)
    except (OverflowError, ValueError, OSError):
        raise InvalidRequest(f"{seconds} seconds since 1970 is out of range") from None
    return when.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def quoted(value: str) -> str:
    return quote(value.encode("utf-8", "surrogateescape"), safe="")


def in_query(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    require_finite(name, value)
    return clean(str(value), name)


def require_finite(name: str, value: object) -> None:
    """Raises InvalidRequest for NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value}")


# --- JSON to values ---------------------------------------------------------------------


def load(data: bytes) -> object:
    """Any JSON. Raises InvalidRequest, which says where it is malformed."""
    try:
        value: object = _DECODE(data)
    except RecursionError:
        raise InvalidRequest("this JSON is nested too deeply") from None
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"JSON must be UTF-8: byte {exc.start} of a string is not") from None
    except msgspec.DecodeError as exc:
        if b"\\ud" in data or b"\\uD" in data:  # a surrogate: the name of a file
            return _load_slowly(data)
        raise InvalidRequest(f"invalid JSON: {exc}") from None
    return value


def _load_slowly(data: bytes) -> object:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not a number in JSON")

    def read_float(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{digits} is too large for a number")
        return value

    try:
        value: object = json.loads(data, parse_constant=refuse, parse_float=read_float)
    except RecursionError:
        raise InvalidRequest("this JSON is nested too deeply") from None
    except ValueError as exc:
        raise InvalidRequest(f"invalid JSON: {exc}") from None
    return value


def _object_of(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise InvalidRequest(f"the body has a key twice: {short(counts.most_common(1)[0][0])}")


# msgspec keeps the last of two, and cannot be told otherwise. Numbers are not looked at, so they
# are not converted either: `bool` is the cheapest function that takes a text.
_DOUBLED = json.JSONDecoder(object_pairs_hook=_object_of, parse_int=bool, parse_float=bool)


def refuse_doubled_keys(data: bytes) -> None:
    """Raises InvalidRequest if any object of this JSON, which must be valid, has a key twice."""
    try:
        _DOUBLED.decode(data.decode())
    except RecursionError:
        raise InvalidRequest("this JSON is nested too deeply") from None


def answer_of(hint: type[T], value: object, name: str = "the answer") -> T:
    """The value that `plain` was given. Unknown fields are ignored: a newer server may send more.

    Raises InvalidRequest if it is not of this type.
    """
    try:
        return msgspec.convert(_prepared(hint, value), hint)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        wanted = getattr(hint, "__name__", hint)
        raise InvalidRequest(f"{name} is not a valid {wanted}: {exc}") from None


def _prepared(hint: object, value: object) -> object:
    """JSON as msgspec can convert it to this type: the opposite of `plain`."""
    if isinstance(value, list) and typing.get_origin(hint) is list:
        return [_prepared(typing.get_args(hint)[0], item) for item in value]
    if not isinstance(value, dict):
        return value
    if hint is Result:
        for stream in ("stdout", "stderr"):
            if isinstance(text := value.get(stream), str):
                value.setdefault(f"{stream}_bytes", _encoded(text))
    elif hint is Chunk and isinstance(text := value.get("text"), str):
        value["data"] = _encoded(text)
    elif hint is Chunk:
        value["data"] = value.get("base64")
    else:
        for name in _times_of(hint):
            if value.get(name) is not None:
                value[name] = msgspec.convert(value[name], _TIME).timestamp()
    return value


# --- requests ---------------------------------------------------------------------------


def strict_type(hint: object) -> object:
    """A type as msgspec should check it in a request.

    Records become structs that allow no unknown field: msgspec ignores those of dataclasses.
    Streams of bytes cannot be in JSON and are left out.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is int:
        return Int64
    if hint is object:
        return Any
    if is_dataclass(hint):
        return _strict_record(cast(type, hint))
    if origin in (typing.Union, types.UnionType):
        carried = [a for a in arguments if typing.get_origin(a) not in (AsyncIterable, Iterable)]
        return typing.Union[tuple(strict_type(argument) for argument in carried)]  # noqa: UP007
    if origin in (tuple, list, Mapping):
        return origin[tuple(a if a is ... else strict_type(a) for a in arguments)]
    return hint


@cache
def _strict_record(cls: type) -> type[msgspec.Struct]:
    hints = typing.get_type_hints(cls)
    members = {field.name: (hints[field.name], field) for field in fields(cls)}
    return struct_of(f"{cls.__name__}Input", members, cls.__doc__)


def struct_of(
    name: str, members: Mapping[str, tuple[object, Field[object]]], doc: str | None = None
) -> type[msgspec.Struct]:
    """A struct with these fields, that allows no others."""
    return msgspec.defstruct(
        name,
        [(n, strict_type(hint), _struct_default(field)) for n, (hint, field) in members.items()],
        forbid_unknown_fields=True,
        kw_only=True,
        namespace={"__doc__": doc},
    )


def _struct_default(field: Field[object]) -> object:
    if field.default_factory is not MISSING:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.NODEFAULT if field.default is MISSING else field.default


def default_of(field: Field[object]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def find_problem(hint: object, value: object, name: str) -> InvalidRequest | None:
    """What is wrong with a value that should be of this strict type; None if nothing is.

    Call it when msgspec has refused the value: its own messages leave out the value, and the key
    of a mapping. `name` is empty for the whole body of a request.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    members: list[tuple[object, object, str]]
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        members = [(next(a for a in arguments if a is not type(None)), value, name)]
    elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        fields = {field.name: field for field in msgspec.structs.fields(hint)}
        if is_dataclass(value):  # before it is sent
            value = {key: getattr(value, key) for key in fields}
        if not isinstance(value, dict):
            return wrong(name or "the body", "a JSON object", value)
        prefix = f"{name}." if name else ""
        for key in value:
            if key not in fields:
                return unknown(key, tuple(fields), name or "the body")
        if missing := [prefix + n for n, f in fields.items() if f.required and n not in value]:
            return InvalidRequest(f"{' and '.join(missing)} must be given")
        members = [(fields[key].type, item, prefix + key) for key, item in value.items()]
    elif origin is Mapping:
        if not isinstance(value, Mapping):
            return wrong(name, "a JSON object", value)
        members = [(str, key, name) for key in value]
        members += [(arguments[1], item, f"{name}.{key}") for key, item in value.items()]
    elif origin in (tuple, list):
        is_fixed = arguments[-1] is not ...
        if not isinstance(value, (list, tuple)) or (is_fixed and len(value) != len(arguments)):
            return wrong(name, f"a list of {len(arguments)}" if is_fixed else "a list", value)
        hints = arguments if is_fixed else (arguments[0],) * len(value)
        members = [(hints[i], item, f"{name}[{i}]") for i, item in enumerate(value)]
    else:
        return _scalar_problem(hint, value, name)
    problems = (find_problem(*member) for member in members)
    return next((problem for problem in problems if problem), None)


_WORDS: dict[object, str] = {
    str: "text",
    Int64: "a whole number below 2**63",
    float: "a number",
    bool: "true or false",
    bytes: "base64",
}


def _scalar_problem(hint: object, value: object, name: str) -> InvalidRequest | None:
    try:
        if hint is str:
            clean(value, name)
        msgspec.convert(value, hint)
    except InvalidRequest as exc:
        return exc
    except (msgspec.ValidationError, UnicodeEncodeError):
        if isinstance(value, AsyncIterable):
            return InvalidRequest(f"{name} must be bytes here: HTTP cannot send and answer at once")
        allowed = _WORDS.get(hint) or " or ".join(map(repr, typing.get_args(hint)))
        return wrong(name, allowed, value)
    return None


def clean(text: object, name: str) -> str:
    """Text whose surrogates all stand for bytes. Raises InvalidRequest for others."""
    if not isinstance(text, str):
        raise wrong(name, "text", text)
    if not text.isascii():
        try:
            text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as exc:
            where = f"{name} has a lone surrogate at position {exc.start}"
            raise InvalidRequest(where) from None
    return text


def wrong(name: str, wanted: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {wanted}, not {short(value)}")


def short(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()[:100]
    except (UnicodeEncodeError, RecursionError, TypeError):
        return ascii(value)[:100]


def unknown(name: str, known: tuple[str, ...], where: str) -> InvalidRequest:
    allowed = f"it may have {', '.join(known)}" if known else "it takes no fields"
    return InvalidRequest(f"{where} has an unknown field {short(name)}: {allowed}")
