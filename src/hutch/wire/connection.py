"""The state machine of the protocol: who may send what, and when.

Three rules keep a hostile guest harmless here:

1. Only the host opens streams. A guest can answer, never ask.
2. Data of either side, and Notes of the guest, need Credit from the other. Each frame costs
   OVERHEAD on top of its payload, so that a million one-byte frames cannot pile up where a
   megabyte was meant. Notes of the host need no Credit: a signal must reach a program that reads
   no input. Credit only gives back what was read, so no window grows beyond its first size.
3. Once a stream has ended, the guest may not mention it again. The host may: what it sent
   before it saw the End is still in flight, and is ignored.

Versions: a guest says in its Hello which ones it speaks, from `oldest` to `version`. The host
answers with the newest that both speak. A change that adds a request, or a field with a default
value to one, gets the next VERSION and a line in `events.SINCE`, and older hosts and guests can
still talk to newer ones. Any other change sets OLDEST to the new VERSION, and they cannot.

A stream that is done is forgotten: its number is below the next one, and it has no state. After an
error of the peer, nothing more is read from it.
"""

from __future__ import annotations

from .events import (
    Cancel,
    Credit,
    Data,
    End,
    Eof,
    Event,
    Fail,
    Hello,
    Note,
    Open,
    from_frame,
    to_frame,
)
from .frames import (
    FrameBuffer,
    LocalProtocolError,
    OtherVersion,
    ProtocolError,
    RemoteProtocolError,
    encode,
)

VERSION = 1
OLDEST = 1  # the oldest version that is still spoken
HOST, GUEST = "host", "guest"
IDLE, OPEN, CANCELLED, DONE = "idle", "open", "cancelled", "done"

# 16 reads of a full pipe. A guest that runs `yes` stops after this much unread output.
WINDOW = 1024 * 1024
OVERHEAD = 64
MAX_STREAM = (1 << 32) - 1

# state -> (sender, event) -> next state. What is not here is an error.
TRANSITIONS: dict[str, dict[tuple[str, type[Event]], str]] = {
    IDLE: {(HOST, Open): OPEN},
    OPEN: {
        (HOST, Data): OPEN,
        (HOST, Eof): OPEN,
        (HOST, Note): OPEN,
        (HOST, Credit): OPEN,
        (HOST, Cancel): CANCELLED,
        (GUEST, Data): OPEN,
        (GUEST, Note): OPEN,
        (GUEST, Credit): OPEN,
        (GUEST, End): DONE,
        (GUEST, Fail): DONE,
    },
    CANCELLED: {
        (HOST, Credit): CANCELLED,
        (GUEST, Data): CANCELLED,
        (GUEST, Note): CANCELLED,
        (GUEST, Credit): CANCELLED,
        (GUEST, End): DONE,
        (GUEST, Fail): DONE,
    },
    DONE: {
        (HOST, Data): DONE,
        (HOST, Eof): DONE,
        (HOST, Note): DONE,
        (HOST, Credit): DONE,
        (HOST, Cancel): DONE,
    },
}


class Connection:
    """One end of the protocol. `send` gives bytes to write; `receive` takes bytes read."""

    def __init__(self, role: str) -> None:
        if role not in (HOST, GUEST):
            raise ValueError(f"expected HOST or GUEST, not {role!r}")
        self.role = role
        self.peer = GUEST if role == HOST else HOST
        self.version = VERSION  # the agreed one, once the peer has said Hello
        self._frames = FrameBuffer()
        self._states: dict[int, str] = {}
        self._windows: dict[tuple[str, int], int] = {}
        self._greeted = {HOST: False, GUEST: False}
        self._last_opened = 0
        self._refused: RemoteProtocolError | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.role}, {len(self._states)} streams open>"

    def next_stream(self) -> int:
        """The number for the next Open. Raises LocalProtocolError if all numbers are used up."""
        if self._last_opened >= MAX_STREAM:
            raise LocalProtocolError("this connection has used up its stream numbers")
        return self._last_opened + 1

    def room(self, stream: int) -> int:
        """Bytes this side may still send in one frame on this stream."""
        return max(0, self._windows.get((self.role, stream), 0) - OVERHEAD - 1)

    def owed(self, stream: int) -> int:
        """What this side sent on this stream and got no Credit for yet."""
        return WINDOW - self._windows.get((self.role, stream), WINDOW)

    def is_open(self, stream: int) -> bool:
        return stream in self._states

    def hello(self) -> Hello:
        """The first event to send. A host sends it after it has received the guest's."""
        if self.role == GUEST:
            return Hello(VERSION, oldest=None if OLDEST == VERSION else OLDEST)
        return Hello(self.version)

    def send(self, event: Event) -> bytes:
        """The bytes of an event. Raises LocalProtocolError if it may not be sent, or not now."""
        frame = to_frame(event, self.version)
        data = encode(frame)  # first, so that an event too large to send changes nothing
        self._apply(self.role, event, len(frame.payload), LocalProtocolError)
        return data

    def receive(self, data: bytes) -> list[Event]:
        """The events that `data` completes.

        Raises RemoteProtocolError if the peer broke the protocol; every later call raises the same.
        """
        if self._refused:
            raise self._refused
        events = []
        try:
            for frame in self._frames.feed(data):
                event = from_frame(frame)
                self._apply(self.peer, event, len(frame.payload), RemoteProtocolError)
                events.append(event)
        except RemoteProtocolError as exc:
            self._refused = exc
            self._frames = FrameBuffer()  # free what it sent
            raise
        return events

    def _apply(self, who: str, event: Event, size: int, error: type[ProtocolError]) -> None:
        if isinstance(event, Hello):
            if self._greeted[who] or event.stream:
                raise error(f"{who} said Hello twice, or on a stream")
            if who == self.peer:
                self.version = _common(who, event)
            self._greeted[who] = True
            return
        if not self._greeted[who]:
            raise error(f"{who} sent {type(event).__name__} before Hello")
        stream = event.stream
        state = self._states.get(stream) or (DONE if stream <= self._last_opened else IDLE)
        after = TRANSITIONS[state].get((who, type(event)))
        if after is None:
            raise error(f"{who} sent {type(event).__name__} on a stream that is {state}")
        if state is DONE:
            return
        if isinstance(event, Data) or (isinstance(event, Note) and who == GUEST):
            left = self._windows[who, stream] - size - OVERHEAD
            if left < 0:
                raise error(f"{who} overran its window on stream {stream}")
            self._windows[who, stream] = left
        elif isinstance(event, Credit):
            taker = GUEST if who == HOST else HOST
            window = self._windows[taker, stream] + event.amount
            if event.amount < 0 or window > WINDOW:
                raise error(f"{who} gave a credit of {event.amount!r:.20} on stream {stream}")
            self._windows[taker, stream] = window
        elif isinstance(event, Open):
            if stream != self._last_opened + 1:
                raise error(f"{who} opened stream {stream} after {self._last_opened}")
            self._last_opened = stream
            self._windows[HOST, stream] = self._windows[GUEST, stream] = WINDOW
        if after is DONE:
            del self._states[stream], self._windows[HOST, stream], self._windows[GUEST, stream]
        else:
            self._states[stream] = after


def _common(peer: str, hello: Hello) -> int:
    """The newest version that both sides speak. Raises OtherVersion if they share none."""
    newest, oldest = hello.version, hello.version
    if peer == GUEST and hello.oldest is not None:
        oldest = hello.oldest
    chosen = min(newest, VERSION)
    if not max(oldest, OLDEST) <= chosen:
        ours = f"{VERSION}" if OLDEST == VERSION else f"{OLDEST} to {VERSION}"
        raise OtherVersion(f"{peer} speaks version {newest!r:.20}, we speak {ours}")
    return chosen


def cost(event: Data | Note) -> int:
    """What an event took from its sender's window, and its reader gives back as Credit."""
    # A Note's size is the one it had on the wire. Encoded again by us it may be three times as
    # long, and Credit for more than was spent would be an error.
    size = len(event.data) + 1 if isinstance(event, Data) else event.size
    return size + OVERHEAD
