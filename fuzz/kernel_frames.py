"""Fuzz what a kernel, which is user code, sends: to the guest, and from there to the host.

    pip install atheris                                  # has wheels for Python 3.11
    mkdir -p corpus && python fuzz/kernel_frames.py -max_total_time=60 corpus

The guest passes on what is well-formed, and hangs up on a kernel that sends anything else. It
holds no more than one frame. The first byte of an input says in what pieces the rest is read, the
second what the kernel was asked. 255 as the second byte: the rest is a saved state, which a kernel
reads whole or refuses.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator

try:
    import atheris
except ImportError:  # the target itself is still run by tests/test_fuzzing.py
    atheris = None

if atheris:
    with atheris.instrument_imports(include=["hutch.wire", "hutch.guest.kernel", "hutch.kernel"]):
        from hutch import wire
        from hutch.guest.kernel import (
            ANSWER,
            CALL,
            DATA,
            END,
            FRAME,
            MAX_FRAME,
            NOTE,
            KernelProcess,
            KernelRequest,
        )
        from hutch.kernel import stream
else:
    from hutch import wire
    from hutch.guest.kernel import (
        ANSWER,
        CALL,
        DATA,
        END,
        FRAME,
        MAX_FRAME,
        NOTE,
        KernelProcess,
        KernelRequest,
    )
    from hutch.kernel import stream

REQUESTS = ("start", "run", "variables", "sleep", "save", "load")
STATE = 255
ERROR = {"name": "NameError", "value": "x", "traceback": "…"}
RESULT = {"mime": {"text/plain": "1"}, "main": True, "data": None, "chart": None, "files": {}}
ANSWERS: dict[str, list[dict[str, object]]] = {
    "start": [{"python": "3.11.7", "pid": 5}, {"error": ERROR}],
    "run": [{"count": 1, "error": None}, {"count": 2, "error": ERROR}],
    "variables": [{"variables": [{
        "name": "x", "type": "int", "shape": [2], "length": None, "bytes": 28, "preview": "1",
        "asleep": False,
    }]}],
    "sleep": [{"slept": ["a"], "bytes": 10, "awake": [["b", "too small"]]}],
    "save": [{"kept": ["a"], "lost": [["f", "an open file"]], "size": 9, "checksum": 7}],
    "load": [{"kept": [], "lost": [], "count": 3, "again": True}],
}  # fmt: skip


class HeldGuest(KernelProcess):
    """The guest's end of a channel, without a process or an event loop."""

    def __init__(self, do: str, hear: Callable[[bytes, bytes], None]) -> None:
        self.asked = KernelRequest(do, hear)
        self._requests = deque([self.asked])
        self._held = bytearray()
        self._later = None
        self._listens = True

    def _hang_up(self, why: str) -> None:
        assert why == "broke its channel"
        self._listens = False

    def receive(self, data: bytes) -> bool:
        """Whether it still listens."""
        self._held += data
        self._handle_all()
        return self._listens


def one_input(data: bytes) -> None:
    if len(data) < 2:
        return
    step, chosen, data = data[0] or len(data), data[1], data[2:]
    if chosen == STATE:
        read_state(data)
        return
    heard: list[tuple[bytes, bytes]] = []
    do = REQUESTS[chosen % len(REQUESTS)]
    guest = HeldGuest(do, lambda kind, payload: heard.append((kind, payload)))
    for at in range(0, len(data), step):
        if not guest.receive(data[at : at + step]):
            break
        assert len(guest._held) < FRAME.size + MAX_FRAME
        if len(guest._held) >= FRAME.size:  # nothing is awaited that may not be held
            assert FRAME.unpack_from(guest._held)[0] <= MAX_FRAME
    for kind, payload in heard:
        assert kind in (NOTE, DATA, END, CALL), kind
        if kind == NOTE:  # the guest passes it on, and the host checks it again
            (message,) = wire.Messages().feed(wire.LENGTH.pack(len(payload)) + payload)
            wire.check_result(message["result"])
    if guest.asked.answer is not None:
        json.dumps(guest.asked.answer)
        assert wire.check_answer(do, guest.asked.answer) == guest.asked.answer


def read_state(data: bytes) -> None:
    taken = 0

    def read(size: int) -> bytes:
        nonlocal taken
        some = data[taken : taken + size]
        taken += len(some)
        return some

    try:
        reader = stream.StateReader(read)
        while True:
            reader.read(1)
    except stream.BadState:
        pass


def seeds() -> Iterator[bytes]:
    for number, do in enumerate(REQUESTS):
        frames = [(NOTE, json.dumps({"result": RESULT}).encode()), (DATA, b"abc"), (END, b"")]
        frames += [(CALL, b'{"id":1,"name":"f","args":[],"kwargs":{}}')]
        for answer in ANSWERS[do]:
            parts = [*frames, (ANSWER, json.dumps(answer).encode())]
            sent = b"".join(FRAME.pack(len(payload), kind) + payload for kind, payload in parts)
            for step in (0, 1, 7):
                yield bytes([step, number]) + sent
    lacking = json.dumps({"result": {key: RESULT[key] for key in RESULT if key != "chart"}})
    yield bytes([0, 1]) + FRAME.pack(len(lacking), NOTE) + lacking.encode()
    yield bytes([0, 1]) + FRAME.pack(MAX_FRAME + 1, DATA) + b"abc"
    state = bytearray()
    header = {"numpy": False, "names": ["a"], "order": ["a"], "selves": [], "lost": []}
    writer = stream.StateWriter(state.extend, header)
    writer.write(b"pickle")
    writer.buffer(memoryview(b"x" * 100))
    writer.text("text" * 100)
    writer.finish()
    yield bytes([0, STATE]) + state[len(stream.MAGIC) :]


if __name__ == "__main__":
    from _main import main

    main(one_input, seeds())
