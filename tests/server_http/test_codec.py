"""What travels over HTTP arrives as it was sent."""

from __future__ import annotations

import types
import typing
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Literal
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hutch import codec, serving
from hutch import operations as op
from hutch.codec import (
    answer_from_json,
    answer_to_json,
    error_from_json,
    error_to_json,
    event_of,
    from_json,
    item_from,
    operation_of,
    request_of,
    to_json,
)
from hutch.errors import BY_CODE, CommandFailed, HutchError, InvalidRequest, TimedOut
from hutch.types import Chunk, Execution, Limits, Mount, Result

assert serving  # its operations are in the table, too
TABLE = list(op.TABLE.values())
NAMES = [cls.__name__ for cls in TABLE]

# Names of files that are not UTF-8 have these.
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\udc80\udcff\udcc3"))
PLAIN = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=5,
)


def values_of(hint: Any, name: str) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(
            [values_of(a, name) for a in arguments
             if typing.get_origin(a) not in (AsyncIterable, Iterable)]
        )  # fmt: skip
    if hint is None or hint is type(None):
        return st.none()
    if hint in (Any, object):
        return JSON
    if hint is float and name.endswith("_at"):
        return st.integers(0, 4_000_000_000_000).map(lambda ms: ms / 1000)
    if hint is str:
        return TEXT if name in ("path", "to", "command", "target") else PLAIN
    if hint is Limits:
        return st.builds(
            Limits,
            memory=st.integers(Limits.MIN_MEMORY, Limits.MAX_MEMORY),
            cpus=st.floats(0.01, 4096),
        )
    if is_dataclass(hint):
        return records(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*[values_of(a, "") for a in arguments])
    if origin in (tuple, list):
        return st.lists(values_of(arguments[0], ""), max_size=3).map(origin)
    if origin in (dict, Mapping):
        return st.dictionaries(PLAIN, values_of(arguments[1], ""), max_size=3)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint is int:
        return st.integers(-(2**63), 2**63 - 1)
    return {bool: st.booleans(), bytes: st.binary()}[hint]


def records(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: values_of(hints[f.name], f.name) for f in fields(cls)})


def carried(request: codec.EncodedRequest, cls: type[op.Operation]) -> op.Operation:
    """What the other end makes of a request."""
    route = cls.route
    if request.path.startswith("/v1/workspaces/") and "/sessions/{session}/" in route:
        route = route.replace("/sessions/{session}/", "/workspaces/{workspace}/")
    path = {
        part[1:-1]: unquote(value, errors="surrogateescape")
        for part, value in zip(route.split("/"), request.path.split("/"), strict=True)
        if part.startswith("{")
    }
    return operation_of(cls, path, request.query, request.body, request.stream)


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_arrives_as_it_was_sent(name: str) -> None:
    cls = op.TABLE[name]

    @settings(max_examples=60, deadline=None)
    @given(records(cls))
    def check(operation: op.Operation[Any]) -> None:
        request = request_of(operation)
        assert request.verb == cls.verb
        assert carried(request, cls) == operation

    check()


@pytest.mark.parametrize("name", [cls.__name__ for cls in TABLE if not cls.streams])
def test_every_answer_arrives_as_it_was_given(name: str) -> None:
    cls = op.TABLE[name]

    @settings(max_examples=60, deadline=None)
    @given(records(cls), values_of(cls.answer, "answer"))
    def check(operation: op.Operation[Any], answer: Any) -> None:
        assert answer_from_json(operation, answer_to_json(operation, answer)) == answer

    check()


STREAMS = [cls for cls in TABLE if cls.streams and cls.items is not bytes]


@pytest.mark.parametrize("cls", STREAMS)
def test_every_item_of_a_stream_arrives_as_it_was_sent(cls: Any) -> None:
    items = st.one_of(
        *(values_of(kind, "item") for kind in (typing.get_args(cls.items) or (cls.items,)))
    )

    @settings(max_examples=60, deadline=None)
    @given(records(cls), items)
    def check(operation: Any, item: Any) -> None:
        assert item_from(operation, event_of(item), to_json(item)) == item

    check()


@pytest.mark.parametrize("code", BY_CODE)
def test_every_error_arrives_as_what_it_was(code: str) -> None:
    was = BY_CODE[code]("what to do")
    came = error_from_json(was.status, error_to_json(was))
    assert (type(came), str(came)) == (type(was), "what to do")


@pytest.mark.parametrize("cls", [CommandFailed, TimedOut])
def test_an_error_carries_what_was_done_until_then(cls: type[Any]) -> None:
    result = Result(3, "a", "b", "ab", stdout_bytes=b"a", stderr_bytes=b"\xff")
    came: Any = error_from_json(400, error_to_json(cls("no", result)))
    assert came.result == result
    came = error_from_json(400, error_to_json(cls("no", execution=Execution(died="killed"))))
    assert came.execution.died == "killed"


def test_the_files_of_a_workspace_have_routes_of_their_own() -> None:
    request = request_of(op.StatFile("workspace/data", "a b"))
    assert request.path == "/v1/workspaces/data/files/stat"
    assert request.query == {"path": "a b"}
    assert carried(request, op.StatFile) == op.StatFile("workspace/data", "a b")


def test_a_name_with_a_slash_stays_one_part_of_the_path() -> None:
    request = request_of(op.CloseShell("abc", "../x?y#z"))
    assert request.path == "/v1/sessions/abc/shells/..%2Fx%3Fy%23z"


def test_output_that_is_text_is_sent_once_and_as_text() -> None:
    assert to_json(Chunk(b"h\xc3\xa9", "stdout")) == '{"stream":"stdout","text":"hé"}'.encode()
    assert b"base64" in to_json(Chunk(b"\xc3", "stderr"))
    result = Result(0, "hé", "", "hé", stdout_bytes="hé".encode())
    assert b"stdout_bytes" not in to_json(result)


def test_times_are_rfc_3339_in_json_and_seconds_in_python() -> None:
    made = to_json(serving.Workspace("w", created_at=1_767_323_045.678))
    assert b'"created_at":"2026-01-02T03:04:05.678Z"' in made
    assert from_json(serving.Workspace, made).created_at == 1_767_323_045.678


WRONG: list[tuple[type[op.Operation], dict[str, str], bytes | None, str]] = [
    (op.RunShell, {}, b"{}", "command must be given"),
    (op.RunShell, {}, b'{"command":1}', "command must be text, not 1"),
    (op.RunShell, {}, b'{"command":"x","cmd":"y"}', 'unknown field "cmd": it may have command'),
    (op.RunShell, {}, b'{"command":"x","timeout":"5"}', 'timeout must be a number, not "5"'),
    (op.RunShell, {}, b'{"command":"x","timeout":NaN}', "invalid JSON"),
    (op.RunShell, {}, b'{"command":"x","timeout":1e999}', "invalid JSON"),
    (op.RunShell, {}, b'{"command":"\\ud800x"}', "lone surrogate"),
    (op.RunShell, {}, b'{"command":"\\udc00x","timeout":NaN}', "invalid JSON"),
    (op.RunShell, {}, b'{"command":"\\udc80","timeout":1e400}', "invalid JSON"),
    (op.RunShell, {}, b'{"command":"\xff"}', "UTF-8"),
    (op.RunShell, {}, b"[" * 100_000, "nested too deeply"),
    (op.RunShell, {}, b'"\\ud800",' + b"[" * 100_000, "invalid JSON"),
    (op.RunShell, {}, b"[]", "must be a JSON object"),
    (op.RunShell, {"timeout": "1"}, b'{"command":"x"}', "the query"),
    (op.OpenSession, {}, b'{"limits":{"memory":1}}', "16 MiB"),
    (op.OpenSession, {}, b'{"limits":{"ram":1}}', 'unknown field "ram"'),
    (op.OpenSession, {}, b'{"limits":{"memory":9999999999999999999999}}', "2**63"),
    (op.OpenSession, {}, b'{"min_isolation":"much"}', "'none' or 'lsm'"),
    (op.OpenSession, {}, b'{"mounts":[{"source":"/"}]}', "mounts[0].target must be given"),
    (op.OpenSession, {}, b'{"packages":"numpy"}', "packages must be a list"),
    (op.OpenSession, {}, b'{"warm":1}', "warm must be true or false"),
    (op.ListSessions, {"limit": "ten"}, None, "limit must be a whole number"),
    (op.ListSessions, {"limit": "1" * 30}, None, "limit must be a whole number"),
    (op.ListSessions, {"limit": str(2**63)}, None, "below 2**63"),
    (op.ListSessions, {"x": "1"}, None, "the query has an unknown field"),
    (op.WaitProgram, {"ended": "maybe"}, None, "ended must be true or false"),
    (op.WaitProgram, {"timeout": "nan"}, None, "a finite number"),
    (op.OpenSession, {}, b'{"env":{"A":1}}', "env.A must be text, not 1"),
    (op.OpenSession, {}, b'{"relax":["all"]}', "relax[0] must be 'user' or"),
    (op.OpenSession, {}, b'{"mounts":[{"source":"/","target":"/a","rw":1}]}', "mounts[0] has a"),
    (op.StartProgram, {}, b'{"argv":["a"],"terminal":[80]}', "terminal must be a list of 2"),
    (op.RunProgram, {}, b'{"argv":["a"],"stdin":"%"}', "stdin must be base64"),
    (op.AnswerCall, {}, b'{"error":{"name":"X"}}', "error.value must be given"),
    (op.ListFiles, {}, b"{}", "no body"),
    (op.FollowProgram, {"timeout": "inf"}, None, "a finite number"),
]


@pytest.mark.parametrize(("cls", "query", "body", "said"), WRONG)
def test_a_wrong_request_is_told_what_is_wrong(
    cls: type[op.Operation], query: dict[str, str], body: bytes | None, said: str
) -> None:
    path = dict.fromkeys(["session", "shell", "process", "call"], "x")
    with pytest.raises(InvalidRequest) as caught:
        operation_of(cls, path, query, body)
    assert said in str(caught.value)


def test_what_json_cannot_carry_is_refused_before_it_is_sent() -> None:
    for wrong in (
        op.RunShell("s", "x", timeout=float("nan")),
        op.FollowProgram("s", "p", timeout=float("inf")),
    ):
        with pytest.raises(InvalidRequest, match="finite"):
            request_of(wrong)


def test_a_field_of_the_wrong_type_is_refused_before_it_is_sent() -> None:
    wrong: list[tuple[Any, str]] = [
        (op.CloseShell("s", 5), "shell must be text, not 5"),  # type: ignore[arg-type]
        (op.StatFile("s", b"x"), "path must be text"),  # type: ignore[arg-type]
        (op.StatFile("s", None), "path must be text, not null"),  # type: ignore[arg-type]
        (op.RunShell("s", 5), "command must be text, not 5"),  # type: ignore[arg-type]
        (op.OpenShell("s", env={"A": 1}), "env.A must be text"),  # type: ignore[dict-item]
        (op.OpenSession(mounts=(Mount("/", 5),)), r"mounts\[0\].target"),  # type: ignore[arg-type]
    ]
    for operation, message in wrong:
        with pytest.raises(InvalidRequest, match=message):
            request_of(operation)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_from_anywhere_are_an_answer_or_an_invalid_request(data: bytes) -> None:
    for read in (
        lambda: from_json(Result, data),
        lambda: item_from(op.RunShell("s", "ls"), "chunk", data),
        lambda: operation_of(op.RunShell, {"session": "s", "shell": "m"}, {}, data),
    ):
        try:
            read()
        except InvalidRequest:
            pass
    assert isinstance(error_from_json(502, data), HutchError)


@pytest.mark.parametrize(
    "body",
    [
        b'{"command": "true", "command": "false"}',
        b'{"command": "true", "\\u0063ommand": "false"}',
        b'{"command": "true", "env": {"A": "1", "A": "2"}}',
        b'{"command": "\\udc80", "command": "false"}',
        b'{"argv": [{"a": 1, "a": 1}]}',
    ],
)
def test_a_key_that_is_there_twice_is_refused_by_its_name(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r'has a key twice: "(command|A|a)"'):
        codec.load_object(body)


def test_the_same_key_in_two_objects_is_fine() -> None:
    assert codec.load_object(b'{"a": {"a": 1}, "b": [{"a": 2.5}, {"a": 1e3}]}')["b"][1] == {
        "a": 1e3
    }
