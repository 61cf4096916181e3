"""Values as JSON has them, and back.

`plain` and `dump` make JSON; `load` and `reader` read it. A reader is made once per type, and
whatever it cannot read is an InvalidRequest that names the field, what was given and what is
allowed.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import types
import typing
from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from math import isfinite
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from hutch.errors import InvalidRequest
from hutch.types import Chunk, Result

Read = Callable[[Any, str], Any]  # what JSON has, and the field's name → what Python has

_WHOLE = re.compile(r"-?[0-9]{1,19}")
_ENCODE = msgspec.json.Encoder().encode
_DECODE = msgspec.json.Decoder().decode


# --- values to JSON ---------------------------------------------------------------------


def plain(value: Any, name: str) -> Any:
    """A value as JSON can carry it."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is float:
        if not isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number, not {value}")
        return _time_of(value) if name.endswith("_at") else value
    if isinstance(value, Result):
        return plain_result(value)
    if isinstance(value, Chunk):
        return _plain_chunk(value)
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name), f.name) for f in fields_of(type(value))}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key: _plain_free(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item, "") for item in value]
    if isinstance(value, AsyncIterable):
        raise InvalidRequest(f"{name} must be bytes here: HTTP cannot send and answer at once")
    if isinstance(value, (int, float)):
        return value
    raise InvalidRequest(f"{name} must be something that JSON has, not {kind.__name__}")


def _plain_free(value: Any) -> Any:
    """What somebody put into a mapping: its names are theirs, so none is taken for a time."""
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain_free(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain_free(item) for item in value]
    return plain(value, "")


def plain_result(r: Result) -> dict[str, Any]:
    """By hand: this is what every command is answered with."""
    said: dict[str, Any] = {
        "exit_code": r.exit_code, "stdout": r.stdout, "stderr": r.stderr, "output": r.output,
        "cwd": r.cwd, "timed_out": r.timed_out, "truncated": r.truncated,
        "total_bytes": r.total_bytes, "duration_ms": r.duration_ms, "restarted": r.restarted,
        "oom": r.oom, "kept": r.kept, "woke": plain(r.woke, "woke"),
    }  # fmt: skip
    for name, text, data in (
        ("stdout_bytes", r.stdout, r.stdout_bytes),
        ("stderr_bytes", r.stderr, r.stderr_bytes),
    ):
        if data != _own(text):
            said[name] = base64.b64encode(data).decode()
    return said


def _plain_chunk(chunk: Chunk) -> dict[str, Any]:
    try:
        return {"stream": chunk.stream, "text": chunk.data.decode()}
    except UnicodeDecodeError:
        return {"stream": chunk.stream, "base64": base64.b64encode(chunk.data).decode()}


def _own(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _time_of(seconds: float) -> str:
    try:
        when = datetime.fromtimestamp(round(seconds, 3), UTC)
    except (OverflowError, ValueError, OSError):
        raise InvalidRequest(f"{seconds} seconds since 1970 is no time") from None
    return when.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def dump(value: Any) -> bytes:
    try:
        return _ENCODE(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def quoted(value: Any) -> str:
    return quote(str(value).encode("utf-8", "surrogateescape"), safe="")


def in_query(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value}")
    return str(value)


# --- JSON to values ---------------------------------------------------------------------


def load(data: bytes) -> Any:
    """Any JSON. InvalidRequest says where it is none."""
    try:
        return _DECODE(data)
    except RecursionError:
        raise InvalidRequest("this JSON is nested too deeply") from None
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"JSON is UTF-8, and byte {exc.start} of a text is not") from None
    except msgspec.DecodeError as exc:
        if b"\\ud" in data or b"\\uD" in data:  # half of a pair of characters: a file's name
            return _load_slowly(data)
        raise InvalidRequest(f"this is no JSON: {exc}") from None


def _load_slowly(data: bytes) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no number in JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except RecursionError:
        raise InvalidRequest("this JSON is nested too deeply") from None
    except ValueError as exc:
        raise InvalidRequest(f"this is no JSON: {exc}") from None


def _object_of(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise InvalidRequest(f"the body has a key twice: {short(counts.most_common(1)[0][0])}")


# msgspec keeps the last of two, and cannot be told otherwise. Numbers are not looked at, so they
# are not converted either: `bool` is the cheapest function that takes a text.
_DOUBLED = json.JSONDecoder(object_pairs_hook=_object_of, parse_int=bool, parse_float=bool)


def refuse_doubled_keys(data: bytes) -> None:
    """InvalidRequest if any object of this JSON, which `load` has read, has a key twice."""
    try:
        _DOUBLED.decode(data.decode())
    except RecursionError:
        raise InvalidRequest("this JSON is nested too deeply") from None


def clean(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise wrong(name, "text", text)
    if not text.isascii():
        try:
            text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as exc:
            where = f"{name} has half of a pair of characters (a lone surrogate) at {exc.start}"
            raise InvalidRequest(where) from None
    return text


def from_query(hint: Any, text: str) -> Any:
    """A text as its field's type would have it in JSON; one that does not fit is left alone."""
    kind = next(choice for choice in _choices(hint) if choice is not type(None))
    if kind is int and _WHOLE.fullmatch(text):
        return int(text)
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text, text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _choices(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


@cache
def reader(hint: Any, name: str, *, strict: bool) -> Read:
    """What turns JSON into a value of this type. `name` tells times from other numbers."""
    choices = _choices(hint)
    if len(choices) > 1:
        return _union_reader(choices, name, strict)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return lambda value, name: value
    if hint is None or hint is type(None):
        return _read_nothing
    if hint is float and name.endswith("_at"):
        return _read_time
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Literal:
        return _literal_reader(arguments)
    if hint is Result:
        return _result_reader(strict)
    if hint is Chunk:
        return _read_chunk
    if is_dataclass(hint):
        return _record_reader(typing.cast(type, hint), strict)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_reader(hint)
    if origin in (tuple, list):
        return _sequence_reader(origin, arguments, strict)
    if origin in (dict, Mapping):
        return _mapping_reader(arguments[1], strict)
    raise TypeError(f"{name} has a type that HTTP cannot carry: {hint}")


def _union_reader(choices: tuple[Any, ...], name: str, strict: bool) -> Read:
    carried = [c for c in choices if typing.get_origin(c) not in (AsyncIterable, Iterable)]
    optional = type(None) in carried
    rest = [choice for choice in carried if choice is not type(None)]
    if len(rest) != 1:  # the items of a stream, which come as events with a name
        raise TypeError(f"{name} could be one of several things: {choices}")
    read = reader(rest[0], name, strict=strict)
    if not optional:
        return read
    return lambda value, name: None if value is None else read(value, name)


def _record_reader(cls: type, strict: bool) -> Read:
    hints = typing.get_type_hints(cls)
    known = {f.name: reader(hints[f.name], f.name, strict=strict) for f in fields_of(cls)}
    required = [f.name for f in fields_of(cls) if default_of(f) is MISSING]

    def read(value: Any, name: str) -> Any:
        if not isinstance(value, dict):
            raise wrong(name, "a JSON object", value)
        given = {}
        for key, item in value.items():
            if key in known:
                given[key] = known[key](item, f"{name}.{key}")
            elif strict:
                raise unknown(key, tuple(known), name)
        for key in required:
            if key not in given:
                raise InvalidRequest(f"{name}.{key} must be given")
        return cls(**given)

    return read


def _result_reader(strict: bool) -> Read:
    read = _record_reader(Result, strict)

    def fill(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            for stream in ("stdout", "stderr"):
                if f"{stream}_bytes" not in value and isinstance(value.get(stream), str):
                    own = base64.b64encode(_own(value[stream])).decode()
                    value = {**value, f"{stream}_bytes": own}
        return read(value, name)

    return fill


def _read_chunk(value: Any, name: str) -> Chunk:
    if not isinstance(value, dict) or value.get("stream") not in ("stdout", "stderr"):
        raise wrong(name, "a chunk of stdout or stderr", value)
    if "base64" in value:
        return Chunk(_read_bytes(value["base64"], f"{name}.base64"), value["stream"])
    return Chunk(_own(clean(value.get("text"), f"{name}.text")), value["stream"])


def _sequence_reader(origin: Any, arguments: tuple[Any, ...], strict: bool) -> Read:
    if origin is tuple and arguments[-1] is not Ellipsis:
        each = [reader(argument, "", strict=strict) for argument in arguments]

        def read_exactly(value: Any, name: str) -> Any:
            if not isinstance(value, list) or len(value) != len(each):
                raise wrong(name, f"a list of {len(each)}", value)
            pairs = enumerate(zip(each, value, strict=True))
            return tuple(read(item, f"{name}[{i}]") for i, (read, item) in pairs)

        return read_exactly
    read = reader(arguments[0], "", strict=strict)

    def read_all(value: Any, name: str) -> Any:
        if not isinstance(value, list):
            raise wrong(name, "a list", value)
        return origin(read(item, f"{name}[{i}]") for i, item in enumerate(value))

    return read_all


def _mapping_reader(of: Any, strict: bool) -> Read:
    read = reader(of, "", strict=strict)

    def read_all(value: Any, name: str) -> Any:
        if not isinstance(value, dict):
            raise wrong(name, "a JSON object", value)
        return {clean(key, name): read(item, f"{name}.{key}") for key, item in value.items()}

    return read_all


def _literal_reader(allowed: tuple[Any, ...]) -> Read:
    words = " or ".join(repr(word) for word in allowed)

    def read(value: Any, name: str) -> Any:
        if not isinstance(value, str) or value not in allowed:
            raise wrong(name, words, value)
        return value

    return read


def _enum_reader(cls: type[Enum]) -> Read:
    words = _literal_reader(tuple(member.value for member in cls))
    return lambda value, name: cls(words(value, name))


def _read_int(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, "a whole number", value)
    if not -(1 << 63) <= value < 1 << 63:
        raise InvalidRequest(f"{name} must be less than 2**63, not {short(value)}")
    return value


def _read_float(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong(name, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not isfinite(number):
        raise wrong(name, "a finite number", value)
    return number


def _read_bool(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def _read_bytes(value: Any, name: str) -> bytes:
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            pass
    raise wrong(name, "base64", value)


def _read_time(value: Any, name: str) -> float:
    if isinstance(value, str):
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    raise wrong(name, "a time like 2026-01-02T03:04:05.678Z", value)


def _read_nothing(value: Any, name: str) -> None:
    if value is not None:
        raise wrong(name, "null", value)


_SCALARS: dict[Any, Read] = {
    str: clean, int: _read_int, float: _read_float, bool: _read_bool, bytes: _read_bytes,
}  # fmt: skip


def wrong(name: str, wanted: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {wanted}, not {short(value)}")


def short(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()[:100]
    except (UnicodeEncodeError, RecursionError, TypeError):
        return ascii(value)[:100]


def unknown(name: str, known: tuple[str, ...], where: str) -> InvalidRequest:
    allowed = f"it may have {', '.join(known)}" if known else "it has none here"
    return InvalidRequest(f"{where} has a field {short(name)} that is not known: {allowed}")


def fields_of(cls: type) -> tuple[Field[Any], ...]:
    return fields(cls)


def default_of(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
