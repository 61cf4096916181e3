"""Events out of bytes, however these are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch import ServerUnavailable
from hutch.client import http
from hutch.client.http import Events

STREAM = (
    b": hello\n\nevent: chunk\ndata: {\"text\": \"\xc3\xa4\"}\n\n"
    b"event: done\r\ndata: one\r\ndata: two\r\nid: 5\r\nretry: 1\r\n\r\n: beat\n\n"
    b"data:bare\n\nevent: nothing\n\ndata: \xff\xfe\n\n"
)  # fmt: skip
FOUND = [("chunk", b'{"text": "\xc3\xa4"}'), ("done", b"one\ntwo"), ("message", b"bare"),
         ("message", b"\xff\xfe")]  # fmt: skip


def test_names_data_and_comments_are_told_apart():
    assert list(Events().feed(STREAM)) == FOUND


@given(st.lists(st.integers(0, len(STREAM))))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts):
    events, edges = Events(), sorted({0, len(STREAM), *cuts})
    pieces = [STREAM[a:b] for a, b in pairwise(edges)]
    assert [event for piece in pieces for event in events.feed(piece)] == FOUND


@given(st.binary())
def test_whatever_comes_is_taken_or_left(data):
    for name, value in Events().feed(data):
        assert isinstance(name, str) and isinstance(value, bytes)


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 50, b"data: xxxxxxxx\n" * 5, b"x" * 60])
def test_an_event_without_end_is_refused(piece, monkeypatch):
    monkeypatch.setattr(http, "MAX_EVENT", 1000)
    events = Events()
    with pytest.raises(ServerUnavailable, match="an event of more than 1000 bytes"):
        for _ in range(100):
            list(events.feed(piece))
