"""Calls are written by user code: each is whole and well-formed, or refused."""

from __future__ import annotations

import json

import pytest

from hutch import wire

CALL = {"id": 1, "name": "search", "args": ["é", None], "kwargs": {"k": 3}}


def payload(**changed: object) -> bytes:
    return json.dumps({**CALL, **changed}).encode()


def test_a_call_is_read_as_it_was_written():
    assert wire.parse_call(payload()) == CALL


@pytest.mark.parametrize(
    "bytes_",
    [
        b"", b"[]", b"null", b"{", b"\xff", payload(id=0), payload(id=True), payload(id="1"),
        payload(name=7), payload(name="x" * 201), payload(args={}), payload(kwargs=[]),
        payload(more=1), payload(args=["\ud800"]), payload(kwargs={"\udc80": 1}),
        payload(args=["x" * (4 << 20)]), b'{"id": 1, "name": "a"}',
        payload(args=json.loads("[" * 40 + "]" * 40)), b'{"id":1,"name":"a","args":' + b"[" * 99999,
    ],
)  # fmt: skip
def test_what_is_no_call_is_a_value_error(bytes_):
    with pytest.raises(ValueError):
        wire.parse_call(bytes_)


def test_a_message_longer_than_a_call_may_be_is_refused_by_its_length():
    with pytest.raises(wire.RemoteProtocolError, match="limit"):
        list(wire.Messages(wire.MAX_CALL).feed(wire.LENGTH.pack(wire.MAX_CALL + 1)))


def test_a_reply_has_a_value_or_an_error():
    assert json.loads(wire.to_reply(1, [1], None)) == {"id": 1, "value": [1], "error": None}
    error = {"name": "ValueError", "value": "no"}
    assert json.loads(wire.to_reply(1, 5, ("ValueError", "no"))) == {
        "id": 1, "value": None, "error": error,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError)):
        wire.to_reply(1, float("nan"), None)
