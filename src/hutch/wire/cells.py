"""Messages of a kernel: results on channel RESULTS, and calls of host functions on channel CALLS.

A message is a length (four bytes), then JSON. A kernel runs user code, so the guest checks each
message before it passes it on: an invalid one ends the kernel, not the box. The host checks them
again, as it trusts no guest.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, cast

from .frames import RemoteProtocolError

LENGTH = struct.Struct("!I")
MiB = 1024 * 1024
MAX_MESSAGE = 16 * MiB + 65 * 1024  # the largest frame of a kernel, and its key
SHORT = 32 * 1024  # code or an answer up to this many characters fits into a request or End
MAX_CELL_RESULTS = 64 * MiB  # bytes of JSON of one cell's results; the rest is not sent
MAX_RESULTS = 10_000  # of one cell
MAX_FORMATS = 64
MAX_PARTS = 1_000_000  # lists and objects in one message
MAX_DEPTH = 32  # of nested JSON, so that no reader needs a deep stack

if TYPE_CHECKING:  # every guest imports this module; defining these would take it 0.4 ms

    class ErrorBody(TypedDict):
        name: str
        value: str
        traceback: str

    class ResultBody(TypedDict):
        """A result of a cell. `mime` and `files` are by format."""

        mime: dict[str, str]
        main: bool
        data: dict[str, object] | None
        chart: dict[str, object] | None
        files: dict[str, str]

    class VariableBody(TypedDict):
        name: str
        type: str
        shape: list[int] | None
        length: int | None
        bytes: int | None
        preview: str
        asleep: bool

    class KernelAnswer(TypedDict, total=False):
        """The answer to a request. Which fields it has depends on the request: see `_ANSWERS`."""

        error: ErrorBody | None
        python: str
        count: int
        variables: list[VariableBody]
        slept: list[str]
        awake: list[list[str]]
        kept: list[str]
        lost: list[list[str]]
        bytes: int
        size: int
        checksum: int
        again: bool

    class CallBody(TypedDict):
        """A call of a function of the host."""

        id: int
        name: str
        args: list[object]
        kwargs: dict[str, object]


_NONE = type(None)
_RESULT: dict[str, tuple[type, ...]] = {
    "mime": (dict,),
    "main": (bool,),
    "data": (dict, _NONE),
    "chart": (dict, _NONE),
    "files": (dict,),
}
_ERROR: dict[str, tuple[type, ...]] = {"name": (str,), "value": (str,), "traceback": (str,)}
_VARIABLE: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "type": (str,),
    "shape": (list, _NONE),
    "length": (int, _NONE),
    "bytes": (int, _NONE),
    "preview": (str,),
    "asleep": (bool,),
}
_FAILED: dict[str, tuple[type, ...]] = {"error": (dict,)}
_ANSWERS: dict[str, dict[str, tuple[type, ...]]] = {
    "start": {"python": (str,)},
    "run": {"count": (int,), "error": (dict, _NONE)},
    "variables": {"variables": (list,)},
    "sleep": {"slept": (list,), "bytes": (int,), "awake": (list,)},
    "save": {"kept": (list,), "lost": (list,)},
    "load": {"kept": (list,), "lost": (list,), "count": (int,)},
}
# Not all versions of a kernel send these.
_OPTIONAL: dict[str, dict[str, type]] = {
    "save": {"size": int, "checksum": int},  # of the data that came before the answer
    "load": {"again": bool},  # send the same data once more
}


def to_message(word: str, body: Mapping[str, object]) -> bytes:
    """A message with one field, `word`. Text in it may have lone surrogates."""
    text = json.dumps({word: body}, separators=(",", ":"), ensure_ascii=False)
    data = text.encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data


class Messages:
    """Splits a stream of bytes into messages."""

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self._limit = limit
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, object]]:
        """The messages that `data` completes. Raises RemoteProtocolError if one is invalid."""
        self._held += data
        while len(self._held) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._held)
            if size > self._limit:
                raise RemoteProtocolError(f"a message of {size} bytes, limit {self._limit}")
            end = LENGTH.size + size
            if len(self._held) < end:
                return
            payload = bytes(memoryview(self._held)[LENGTH.size : end])
            del self._held[:end]
            try:
                message = parse(payload)
            except ValueError as exc:
                raise RemoteProtocolError(f"malformed message: {exc}") from None
            yield message


def parse(payload: bytes) -> dict[str, object]:
    """Parse a JSON object; NaN and Infinity become null. Raises ValueError."""
    # Before parsing: an empty list takes two bytes here and 60 in memory.
    if payload.count(b"[") + payload.count(b"{") > MAX_PARTS:
        raise ValueError("too many lists and objects")
    try:
        text = payload.decode("utf-8", "surrogatepass")
        body = json.loads(text, parse_constant=lambda word: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(body, dict):
        raise ValueError("not an object")
    return body


def check_result(body: object) -> ResultBody:
    """Check the fields and types of a result. Raises ValueError."""
    result = cast("ResultBody", _fields("a result", body, _RESULT))
    for name, formats in (("mime", result["mime"]), ("files", result["files"])):
        if len(formats) > MAX_FORMATS or not all(type(text) is str for text in formats.values()):
            raise ValueError(f"{name} of a result: too many formats, or not text")
    check_depth(result["data"])
    check_depth(result["chart"])
    return result


def check_answer(do: str, body: object) -> KernelAnswer:
    """Check the answer of a kernel to the request `do`. Raises ValueError.

    An answer with an error needs no other fields, except that to "run".
    """
    failed = do != "run" and isinstance(body, dict) and body.get("error") is not None
    known = _fields("an answer", body, _FAILED if failed else _ANSWERS[do])
    if do in _OPTIONAL and isinstance(body, dict):
        for name, kind in _OPTIONAL[do].items():
            if type(body.get(name)) is kind:
                known[name] = body[name]
    answer = cast("KernelAnswer", known)
    if answer.get("error") is not None:
        answer["error"] = cast("ErrorBody", _fields("an error", answer["error"], _ERROR))
    if "variables" in answer:
        answer["variables"] = [_variable(item) for item in answer["variables"]]
    for name, names in (("slept", answer.get("slept", [])), ("kept", answer.get("kept", []))):
        if not _texts(names):
            raise ValueError(f"{name} is not a list of names")
    for name, pairs in (("awake", answer.get("awake", [])), ("lost", answer.get("lost", []))):
        if not all(type(pair) is list and len(pair) == 2 and _texts(pair) for pair in pairs):
            raise ValueError(f"{name} is not a list of pairs of text")
    numbers = (
        answer.get("count", 0),
        answer.get("bytes", 0),
        answer.get("size", 0),
        answer.get("checksum", 0),
    )
    if min(numbers) < 0:
        raise ValueError("negative number")
    return answer


def _variable(body: object) -> VariableBody:
    variable = cast("VariableBody", _fields("a variable", body, _VARIABLE))
    if not all(type(size) is int for size in variable["shape"] or ()):
        raise ValueError("the shape of a variable is not a list of integers")
    return variable


def _fields(what: str, body: object, expected: dict[str, tuple[type, ...]]) -> dict[str, object]:
    if not isinstance(body, dict):
        raise ValueError(f"{what} is not an object")
    for name, types in expected.items():
        if name not in body or type(body[name]) not in types:
            raise ValueError(f"{name} of {what} is {body.get(name)!r:.60}")
    return {name: body[name] for name in expected}


def _texts(words: Sequence[object]) -> bool:
    return all(type(word) is str for word in words)


def check_depth(value: object) -> None:
    """Check that JSON is nested at most MAX_DEPTH levels. Raises ValueError."""
    # Level by level, not by recursion: the depth is what is not trusted.
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [part for parts in inner for part in parts if isinstance(part, (dict, list))]
    raise ValueError("nested too deeply")


MAX_CALL = 4 * MiB  # bytes of the JSON of one call, or of its answer
MAX_CALLS = 32  # calls of one cell that may wait for a reply at once; a kernel queues the others
MAX_WORD = 200  # characters of a name
_CALL: dict[str, type] = {"id": int, "name": str, "args": list, "kwargs": dict}


def parse_call(payload: bytes) -> CallBody:
    """Parse and check a call. Raises ValueError."""
    if len(payload) > MAX_CALL:
        raise ValueError("call too long")
    return check_call(parse(payload))


def check_call(body: object) -> CallBody:
    """Check the fields and types of a call. Raises ValueError."""
    if not isinstance(body, dict) or body.keys() != _CALL.keys():
        raise ValueError("wrong fields in a call")
    for name, kind in _CALL.items():
        if type(body[name]) is not kind:
            raise ValueError(f"{name} of a call is {body[name]!r:.60}")
    if len(body["name"]) > MAX_WORD or body["id"] < 1:
        raise ValueError("a call with an invalid name or number")
    check_depth(body["args"])
    check_depth(body["kwargs"])
    json.dumps(body, ensure_ascii=False).encode()  # raises on lone surrogates
    return cast("CallBody", body)


def to_reply(call: int, value: object, error: tuple[str, str] | None) -> bytes:
    """The reply to a call, as JSON. Raises ValueError or TypeError if `value` is not JSON."""
    failure = {"name": error[0], "value": error[1]} if error else None
    body = {"id": call, "value": None if error else value, "error": failure}
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace")
