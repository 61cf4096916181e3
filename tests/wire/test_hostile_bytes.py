"""Whatever a guest sends, the host parses it or refuses it, and never anything else."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pair import Pair, asking

from hutch import wire
from hutch.wire.events import KINDS
from hutch.wire.frames import HEADER, MAX_PAYLOAD

REQUESTS = (wire.Exec(["cat"], stdin=True), wire.List("."), wire.Watch("."))


def valid() -> bytes:
    """A conversation in which everything a guest can say is said."""
    pair = Pair()
    for request in REQUESTS:
        pair.open(request)
    said = (
        wire.Note(1, {"pid": 3}), wire.Data(1, b"hello"), wire.Data(1, b"oh", wire.STDERR),
        wire.Credit(1, 0), wire.Note(2, {"path": "a\udcff", "kind": "file"}),
        wire.End(1, {"exit_code": 0}), wire.Fail(3, "not_found", "no such folder"),
        wire.End(2, {}),
    )  # fmt: skip
    return b"".join(pair.send(pair.guest, event) for event in said)


VALID = valid()
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
names = st.sampled_from(
    ["op", "stream", "version", "amount", "result", "code", "message", "body", "argv"]
)
payloads = st.one_of(
    st.binary(max_size=64),
    st.dictionaries(names, json_values, max_size=4).map(lambda body: json.dumps(body).encode()),
    json_values.map(lambda value: json.dumps(value).encode()),
)
frames = st.builds(
    lambda kind, stream, payload, lie: (
        HEADER.pack(max(0, len(payload) + lie), kind, stream) + payload
    ),
    st.sampled_from([*KINDS, 0, 10, 255]),
    st.sampled_from([0, 1, 2, 3, 4, 2**31, 2**32 - 1]),
    payloads,
    st.sampled_from([0, 0, 0, 0, -1, 1, MAX_PAYLOAD]),
)


@st.composite
def mutated(draw) -> bytes:
    """A valid conversation, after someone has been at it."""
    data = bytearray(VALID)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "drop", "insert", "repeat", "cut"])):
            case "flip":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "drop":
                del data[at : at + draw(st.integers(1, 16))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=16) | frames)
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case "cut":
                del data[at:]
    return bytes(data)


def check(data: bytes, step: int) -> None:
    host, refused = asking(*REQUESTS), None
    for at in range(0, len(data), step):
        try:
            heard = host.receive(data[at : at + step])
            assert not refused, "it was listened to after it was refused"
            assert all(isinstance(event, wire.Event) for event in heard)
            assert not any(isinstance(event, wire.Open | wire.Cancel) for event in heard)
        except wire.RemoteProtocolError as exc:
            refused = exc
        kept = sum(len(piece) for piece in host._frames._pieces)
        assert kept < HEADER.size + MAX_PAYLOAD and len(host._states) <= len(REQUESTS)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 300))
def test_any_bytes_are_parsed_or_refused(data, step):
    check(data, step)


@settings(max_examples=300, deadline=None)
@given(st.lists(frames, max_size=12).map(b"".join), st.integers(1, 600))
def test_any_frames_are_parsed_or_refused(data, step):
    check(data, step)


@settings(max_examples=500, deadline=None)
@given(mutated(), st.integers(1, 600))
def test_a_mutated_conversation_is_parsed_or_refused(data, step):
    check(data, step)


@settings(max_examples=100, deadline=None)
@given(mutated(), st.integers(1, 600))
def test_how_bytes_are_cut_into_reads_changes_nothing(data, step):
    def heard(step: int) -> tuple[list[wire.Event], str]:
        host, events = asking(*REQUESTS), []
        for at in range(0, len(data), step):
            try:
                events += host.receive(data[at : at + step])
            except wire.RemoteProtocolError as exc:
                return events, str(exc)
        return events, ""

    whole, pieces = heard(max(1, len(data))), heard(step)
    assert whole[1] == pieces[1]
    if not whole[1]:
        assert whole[0] == pieces[0]


def test_the_fuzz_target_holds_for_what_it_starts_from():
    target = runpy.run_path(str(Path(__file__).parents[2] / "fuzz" / "wire.py"))
    for seed in target["seeds"]():
        target["one_input"](seed)
        target["one_input"](seed[:-1])
        target["one_input"](b"\xff" + seed)


def test_a_valid_conversation_is_heard_whole():
    assert len(asking(*REQUESTS).receive(VALID)) == 8
    with pytest.raises(wire.RemoteProtocolError):
        asking(*REQUESTS).receive(VALID + VALID)
