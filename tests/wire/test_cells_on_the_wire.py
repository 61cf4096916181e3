"""Messages about cells: whole, in pieces, and made up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hostile_bytes import json_values

from hutch import wire
from hutch.wire.cells import MAX_DEPTH, MAX_PARTS

RESULT = {"mime": {"text/plain": "2"}, "main": True, "data": None, "chart": None, "files": {}}
VARIABLE = {
    "name": "x", "type": "int", "shape": [2, 3], "length": 2, "bytes": 28, "preview": "1",
    "asleep": False,
}  # fmt: skip
ANSWERS = {
    "start": {"python": "3.11.2"},
    "run": {"count": 1, "error": {"name": "E", "value": "v", "traceback": "t"}},
    "variables": {"variables": [VARIABLE]},
    "sleep": {"slept": ["df"], "bytes": 5, "awake": [["x", "is small"]]},
    "save": {"kept": ["x"], "lost": [["f", "an open file"]]},
    "load": {"kept": ["x"], "lost": [], "count": 4},
}


def test_a_message_waits_for_its_last_byte():
    data = wire.to_message("result", {"text": "é"})
    messages = wire.Messages()
    for at in range(len(data) - 1):
        assert list(messages.feed(data[at : at + 1])) == []
    assert list(messages.feed(data[-1:] + data)) == [{"result": {"text": "é"}}] * 2


def test_a_message_that_is_no_object_breaks_the_protocol():
    with pytest.raises(wire.RemoteProtocolError, match="malformed message"):
        list(wire.Messages().feed(wire.LENGTH.pack(2) + b"[]"))


@pytest.mark.parametrize(
    ("do", "wrong"),
    [
        ("run", []),
        ("run", {"count": 1}),
        ("run", {"count": -1, "error": None}),
        ("run", {"count": 1, "error": {"name": "E"}}),
        ("variables", {"variables": [VARIABLE | {"shape": ["2"]}]}),
        ("sleep", {"slept": [1], "bytes": 5, "awake": []}),
        ("sleep", {"slept": [], "bytes": 5, "awake": ["x"]}),
        ("save", {"kept": [], "lost": [["f", 1]]}),
        ("save", {"kept": [], "lost": [], "size": -1}),
        ("result", RESULT | {"mime": {"text/plain": 2}}),
        ("result", RESULT | {"files": dict.fromkeys(map(str, range(65)), "")}),
    ],
)
def test_what_a_kernel_may_not_say_is_refused(do, wrong):
    with pytest.raises(ValueError):
        wire.check_result(wrong) if do == "result" else wire.check_answer(do, wrong)


def test_what_only_newer_kernels_say_is_passed_on_if_it_has_the_right_type():
    said = ANSWERS["save"] | {"size": 7, "checksum": "seven"}
    assert wire.check_answer("save", said) == ANSWERS["save"] | {"size": 7}
    assert wire.check_answer("variables", {"variables": [VARIABLE | {"shape": None}]})


@given(st.integers(1, 40))
def test_messages_arrive_whole_in_whatever_pieces(step):
    sent = [{"result": {"text": "é\ud800"}}, {"answer": {}}, {"result": {"n": [1, 2.5, None]}}]
    data = b"".join(wire.to_message(*message.popitem()) for message in map(dict, sent))
    messages, heard = wire.Messages(), []
    for at in range(0, len(data), step):
        heard += messages.feed(data[at : at + step])
    assert heard == sent


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 60))
def test_any_bytes_are_messages_or_refused(data, step):
    messages = wire.Messages()
    try:
        for at in range(0, len(data), step):
            assert all(isinstance(each, dict) for each in messages.feed(data[at : at + step]))
    except wire.RemoteProtocolError:
        pass


def test_a_message_cannot_be_too_large_to_hold():
    with pytest.raises(wire.RemoteProtocolError, match="limit"):
        list(wire.Messages().feed(wire.LENGTH.pack(wire.MAX_MESSAGE + 1)))


@pytest.mark.parametrize(
    "text",
    [b"[]", b"3", b"", b"{", b'{"a":1}{', b"\xff", b'{"a":' + b"[" * 100_000, b"9" * 5000,
     b"[" * (MAX_PARTS + 1)],
)  # fmt: skip
def test_what_is_no_object_is_refused(text):
    with pytest.raises(ValueError):
        wire.parse(text)


def test_what_is_no_number_becomes_null():
    assert wire.parse(b'{"a": NaN, "b": [-Infinity]}') == {"a": None, "b": [None]}


@pytest.mark.parametrize("do", ANSWERS)
def test_an_answer_keeps_what_it_should_have_and_nothing_else(do):
    assert wire.check_answer(do, ANSWERS[do] | {"more": 1}) == ANSWERS[do]


@pytest.mark.parametrize("do", [do for do in ANSWERS if do != "run"])
def test_anything_may_fail(do):
    error = {"name": "E", "value": "v", "traceback": "t"}
    assert wire.check_answer(do, {"count": 1, "error": error})["error"] == error


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*ANSWERS, "result"]), st.data())
def test_whatever_a_kernel_says_is_checked_or_refused(do, data):
    good = RESULT if do == "result" else ANSWERS[do]
    name = data.draw(st.sampled_from([*good, "error"]))
    body = good | {name: data.draw(json_values)}
    try:
        checked = wire.check_result(body) if do == "result" else wire.check_answer(do, body)
    except ValueError:
        return
    json.dumps(checked)
    assert checked.keys() <= body.keys()


def test_a_result_is_never_deep():
    deep: object = []
    for _ in range(MAX_DEPTH - 3):
        deep = [deep]
    assert wire.check_result(RESULT | {"data": {"rows": deep}})
    with pytest.raises(ValueError, match="deep"):
        wire.check_result(RESULT | {"data": {"rows": [[[[deep]]]]}})
