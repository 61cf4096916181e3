"""Two real connections and the cable between them."""

from __future__ import annotations

from hutch import wire


class Pair:
    """Every event that is sent is checked on arrival."""

    def __init__(self) -> None:
        self.host, self.guest = wire.Connection(wire.HOST), wire.Connection(wire.GUEST)
        self.send(self.host, wire.Hello(wire.VERSION))
        self.send(self.guest, wire.Hello(wire.VERSION))

    def send(self, sender: wire.Connection, event: wire.Event) -> bytes:
        receiver = self.guest if sender is self.host else self.host
        data = sender.send(event)
        assert receiver.receive(data) == [event]
        return data

    def open(self, request: object | None = None) -> int:
        stream = self.host.next_stream()
        self.send(self.host, wire.Open(stream, request or wire.Exec(["true"])))
        return stream


def greeted(role: str) -> wire.Connection:
    """A connection to which the peer has said hello, and nothing else."""
    connection = wire.Connection(role)
    peer = wire.Connection(wire.GUEST if role == wire.HOST else wire.HOST)
    connection.send(wire.Hello(wire.VERSION))
    connection.receive(peer.send(wire.Hello(wire.VERSION)))
    return connection


def asking(*requests: object) -> wire.Connection:
    """A host that has asked for these, and waits for its answers on streams 1, 2, 3..."""
    host = greeted(wire.HOST)
    for number, request in enumerate(requests, 1):
        host.send(wire.Open(number, request))
    return host
