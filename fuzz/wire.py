"""Fuzz the host's side of the wire: it parses or raises RemoteProtocolError, nothing else.

    pip install atheris                                  # has wheels for Python 3.11
    mkdir -p corpus && python fuzz/wire.py -max_total_time=60 corpus

The first byte of an input says in what pieces the rest is read.
"""

from __future__ import annotations

from collections.abc import Iterator

try:
    import atheris
except ImportError:  # the target itself is still checked by tests/wire
    atheris = None

if atheris:
    with atheris.instrument_imports(include=["hutch.wire"]):
        from hutch import wire
        from hutch.wire.frames import HEADER, MAX_PAYLOAD
else:
    from hutch import wire
    from hutch.wire.frames import HEADER, MAX_PAYLOAD

REQUESTS = (wire.Exec(["cat"], stdin=True), wire.List("."), wire.Watch("."))


def asking() -> wire.Connection:
    """A host that has been greeted and has asked for three things."""
    host = wire.Connection(wire.HOST)
    host.send(wire.Hello(wire.VERSION))
    host.receive(wire.Connection(wire.GUEST).send(wire.Hello(wire.VERSION)))
    for number, request in enumerate(REQUESTS, 1):
        host.send(wire.Open(number, request))
    return host


def one_input(data: bytes) -> None:
    if not data:
        return
    step, data = data[0] or len(data), data[1:]
    host = asking()
    for at in range(0, len(data), step):
        try:
            heard = host.receive(data[at : at + step])
        except wire.RemoteProtocolError:
            heard = []
        for event in heard:
            assert isinstance(event, wire.Event), event
            assert not isinstance(event, wire.Open | wire.Cancel | wire.Eof), event
            if isinstance(event, wire.Data | wire.Note):
                assert 0 < wire.cost(event) <= MAX_PAYLOAD + 64
        kept = sum(len(piece) for piece in host._frames._pieces)
        assert kept < HEADER.size + MAX_PAYLOAD, kept
        assert len(host._states) <= len(REQUESTS)


def seeds() -> Iterator[bytes]:
    """Valid conversations to start from, read whole and in small pieces."""
    host, guest = asking(), wire.Connection(wire.GUEST)
    guest.send(wire.Hello(wire.VERSION))
    guest.receive(wire.Connection(wire.HOST).send(wire.Hello(wire.VERSION)))
    asked = wire.Connection(wire.HOST)
    asked.send(wire.Hello(wire.VERSION))
    for number, request in enumerate(REQUESTS, 1):
        guest.receive(asked.send(wire.Open(number, request)))
    said = [
        wire.Note(1, {"pid": 3}), wire.Data(1, b"hello"), wire.Data(1, b"oh", wire.STDERR),
        wire.Credit(1, 0), wire.Note(2, {"path": "a", "kind": "file"}),
        wire.End(1, {"exit_code": 0}), wire.Fail(3, "not_found", "no such folder"),
        wire.End(2, {}),
    ]  # fmt: skip
    data = b"".join(guest.send(event) for event in said)
    assert len(host.receive(data)) == len(said)
    for step in (0, 1, 9, 50):
        yield bytes([step]) + data


if __name__ == "__main__":
    from _main import main

    main(one_input, seeds())
