"""How bytes become frames, and which never do."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from pair import Pair, asking

from hutch import wire
from hutch.wire.events import KINDS, from_frame
from hutch.wire.frames import HEADER, MAX_PAYLOAD, Frame, FrameBuffer, encode

ANSWER = [
    wire.Note(1, {"pid": 3}),
    wire.Data(1, b"x" * 70_000),
    wire.Data(1, b"", wire.STDERR),
    wire.End(1, {"exit_code": 0}),
]


def spoken() -> bytes:
    pair = Pair()
    pair.open()
    return b"".join(pair.send(pair.guest, event) for event in ANSWER)


@pytest.mark.parametrize("step", [1, 2, 7, 9, 64, 4096, 65536])
def test_pieces_of_any_size_give_the_same_events(step):
    script, host = spoken(), asking(wire.Exec(["a"]))
    heard = []
    for at in range(0, len(script), step):
        heard += host.receive(script[at : at + step])
    assert heard == ANSWER


def test_many_frames_in_one_read_all_arrive():
    frame = encode(Frame(3, 1, b"\x01hello"))
    assert list(FrameBuffer().feed(frame * 1000)) == [Frame(3, 1, b"\x01hello")] * 1000


def test_nothing_is_nothing():
    buffer = FrameBuffer()
    for _ in range(1000):
        assert not list(buffer.feed(b""))
    assert list(buffer.feed(encode(Frame(1, 0, b"")))) == [Frame(1, 0, b"")]


def test_the_largest_frame_passes_and_one_byte_more_does_not():
    largest = Frame(3, 1, b"x" * MAX_PAYLOAD)
    assert list(FrameBuffer().feed(encode(largest))) == [largest]
    with pytest.raises(wire.LocalProtocolError, match="limit"):
        encode(Frame(3, 1, b"x" * (MAX_PAYLOAD + 1)))


@pytest.mark.parametrize("size", [MAX_PAYLOAD + 1, 1 << 31, (1 << 32) - 1])
def test_a_huge_frame_is_refused_before_it_is_buffered(size):
    with pytest.raises(wire.RemoteProtocolError, match=f"announced {size} bytes"):
        asking(wire.Exec(["a"])).receive(HEADER.pack(size, 3, 1))


def test_a_frame_that_trickles_in_costs_no_more_than_one_that_does_not():
    buffer = FrameBuffer()
    list(buffer.feed(HEADER.pack(MAX_PAYLOAD, 3, 1)))
    tracemalloc.start()
    try:
        for at in range(0, MAX_PAYLOAD - 2, 2):
            assert not list(buffer.feed(at.to_bytes(4, "big")[2:]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MAX_PAYLOAD


@pytest.mark.parametrize(
    "frame",
    [
        Frame(0, 1, b"{}"),
        Frame(255, 1, b"{}"),
        Frame(3, 1, b""),  # Data without a channel
        Frame(4, 1, b""),
        Frame(4, 1, b"\xff\xfe"),
        Frame(4, 1, b"[]"),
        Frame(4, 1, b"1"),
        Frame(4, 1, b"null"),
        Frame(4, 1, b"{}"),
        Frame(4, 1, b'{"amount":1.5}'),
        Frame(4, 1, b'{"amount":true}'),
        Frame(4, 1, b'{"amount":NaN}'),
        Frame(4, 1, b'{"amount":1,"more":2}'),
        Frame(4, 1, b'{"amount":' + b"9" * 5000 + b"}"),
        Frame(6, 1, b'{"result":[]}'),
        Frame(6, 1, b'{"result":' + b"[" * 100_000),
        Frame(6, 1, b'{"result":' + b'{"a":' * 40_000),
        Frame(7, 1, b'{"code":1,"message":""}'),
        Frame(8, 1, b'{"x":1}'),
        Frame(9, 1, b'{"body":"x"}'),
        Frame(2, 1, b"{}"),
        Frame(2, 1, b'{"op":"eval","code":"1"}'),
        Frame(2, 1, b'{"op":["exec"]}'),
        Frame(2, 1, b'{"op":"exec"}'),
        Frame(2, 1, b'{"op":"exec","argv":[],"shell":true}'),
        Frame(2, 1, b"[1]"),
    ],
    ids=lambda frame: f"{frame.kind}-{frame.payload[:24].decode('latin-1')}",
)
def test_a_malformed_frame_is_refused(frame):
    with pytest.raises(wire.RemoteProtocolError, match=r"malformed|unknown"):
        from_frame(frame)


def test_no_frame_names_code_of_ours():
    for kind in KINDS:
        for name in ("os.system", "hutch.errors.BoxLost", "builtins.eval"):
            payload = json.dumps({"op": name, "kind": name, "__class__": name}).encode()
            if KINDS[kind] is wire.Data:
                continue  # bytes are only bytes
            with pytest.raises(wire.RemoteProtocolError):
                from_frame(Frame(kind, 1, payload))
