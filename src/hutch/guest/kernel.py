"""A kernel process: its requests and answers, and how it is stopped.

It runs user code, so every frame on its channel is checked before it is passed on, and a kernel
that sends an invalid frame is killed. Requests may be sent before earlier ones are answered.
Answers come in order, and a kernel that is going to sleep stops when the next request comes.

    length of payload (4) | kind (1) | payload
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from hutch import wire

from .agent import READ_SIZE, RequestError, Responder
from .pipes import Later, OutputPipe
from .spawn import Program, Programs, identify
from .tree import Moment, kill_all, send

FRAME = struct.Struct("!Ic")
REQUEST, NOTE, DATA, END, ANSWER = b"R", b"N", b"D", b"E", b"A"
CALL, REPLY = b"C", b"P"
MAX_FRAME = 16 * 1024 * 1024 + 64 * 1024
CHANNEL, SWAP = 3, 4  # descriptors of a kernel

START_PATIENCE = 15  # seconds
GRACE = 2.0  # seconds from the first interrupt to the kill
STEP, AGAIN = 0.1, 0.5  # how often we look whether it helped, and how often we try
LAST_MOMENT = 1.0  # seconds between the end of a channel and that of a process

# The current folder is not on the path yet: no file of the user's shall pass for one of ours.
BEGIN = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({lib!r}); "
    "from hutch_kernel.main import main; main({channel})"
)

# Takes the frames before an answer: a kind, and a payload.
FrameHandler = Callable[[bytes, bytes], Later]


class KernelRequest:
    """A request, and in the end its answer: None if the kernel ended instead."""

    def __init__(self, do: str, on_frame: FrameHandler | None) -> None:
        self.do, self.on_frame = do, on_frame
        self.answer: dict[str, Any] | None = None
        self.payload = b""  # of the answer, as it came
        self._settled = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._settled.is_set()

    async def over(self, timeout: float | None = None) -> bool:
        """Returns when it is answered, or not in time: which of both."""
        try:
            async with asyncio.timeout(timeout):
                await self._settled.wait()
        except TimeoutError:
            pass
        return self.is_over

    def settle(self, answer: dict[str, Any] | None, payload: bytes = b"") -> None:
        self.answer, self.payload = answer, payload
        self._settled.set()


class KernelProcess:
    """A kernel process, and our ends of what it reads and writes."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._loop = asyncio.get_running_loop()
        self._requests: deque[KernelRequest] = deque()
        self._held = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._drained = asyncio.Event()
        self._later: asyncio.Task[None] | None = None  # until when no more is heard
        self._end: asyncio.Task[None] | None = None
        self.program = Program(["python3"], None)  # until there is one
        self.over = False
        self.why = ""  # it ended, if that is not for its exit status to say
        with contextlib.ExitStack() as undo:
            self._sock, self._theirs = socket.socketpair()
            undo.callback(self._sock.close)
            undo.callback(self._theirs.close)
            self.out = OutputPipe()
            undo.callback(self.out.close)
            self.err = OutputPipe()
            undo.pop_all()
        self._fd = self._sock.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._listens = False

    async def start(self, cwd: str, env: dict[str, str], start: dict[str, Any]) -> None:
        """Returns when the kernel has answered for the first time."""
        config = self._programs.config
        # A fork loses its capabilities by ceasing to be root, which root itself never does.
        fork = config.kernel is not None and identify(config.user, config).uid != 0
        python = config.kernel["executable"] if config.kernel else "python3"
        begin = BEGIN.format(lib=config.lib, channel=CHANNEL)
        null = os.open("/dev/null", os.O_RDONLY)
        fds = {0: null, 1: self.out.writer, 2: self.err.writer, CHANNEL: self._theirs.fileno()}
        if start["swap"]:
            fds[SWAP] = config.swap
        try:
            self.program = await self._programs.start(
                ["python3"] if fork else [python, "-c", begin], cwd=cwd, env=env, fds=fds,
                call="kernel" if fork else None,
            )  # fmt: skip
        finally:
            os.close(null)
            self._theirs.close()
        self.out.started()
        self.err.started()
        self._sock.setblocking(False)
        self._listens = True
        self._loop.add_reader(self._fd, self._read)
        self.program.when_ended = self._stop_listening
        if self.program.exit_code is not None:
            self._stop_listening()
        request = self.ask("start", **(config.kernel or {}), **start)
        if not await request.over(START_PATIENCE):
            await self.end("it did not answer")
            await request.over()
        answer = request.answer
        if not answer or "error" in answer:
            said = (self.err.read() or b"").decode("utf-8", "replace").strip()[-500:]
            why = answer["error"]["value"][:500] if answer else f"{self.fate}; {said}"
            raise RequestError("internal", f"no kernel could be started: {why}")

    # --- what we say ------------------------------------------------------------------

    def ask(self, do: str, on_frame: FrameHandler | None = None, **body: Any) -> KernelRequest:
        text = json.dumps({"do": do, **body}, ensure_ascii=False)
        payload = text.encode("utf-8", "surrogatepass")
        if len(payload) > MAX_FRAME:
            raise RequestError(
                "invalid_request", "too long: a cell may have 16 MiB, written as JSON"
            )
        request = KernelRequest(do, on_frame)
        if self.over:
            request.settle(None)
        else:
            self._requests.append(request)
            self._write(REQUEST, payload)
        return request

    @property
    def last_request(self) -> KernelRequest | None:
        """What is still to be answered before anything new."""
        return self._requests[-1] if self._requests else None

    async def feed(self, data: bytes) -> None:
        """Data for a request that takes some. Returns when there is room for more."""
        self._write(DATA, data)
        while self._unsent and not self.over:
            self._drained.clear()
            await self._drained.wait()

    def end_feed(self) -> None:
        self._write(END, b"")

    def reply(self, payload: bytes) -> None:
        """What the host answers to a call."""
        if not self.over:
            self._write(REPLY, payload)

    def _write(self, kind: bytes, payload: bytes) -> None:
        self._unsent.append(memoryview(FRAME.pack(len(payload), kind) + payload))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent[0])
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._fd, self._flush)
            return
        except OSError:
            self._unsent.clear()  # it ended: the read side says so
        self._loop.remove_writer(self._fd)
        self._drained.set()

    # --- what it says -----------------------------------------------------------------

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._held += data
        self._handle_all()
        if not data:
            self._hang_up("")

    def _handle_all(self) -> None:
        """Pass on what is whole, up to where somebody must wait."""
        try:
            while self._listens and not self._later and (frame := self._next()):
                if later := self._handle(*frame):
                    self._loop.remove_reader(self._fd)
                    self._later = self._loop.create_task(later)
                    self._later.add_done_callback(self._go_on)
        except ValueError:
            self._hang_up("broke its channel")

    def _go_on(self, done: asyncio.Task[None]) -> None:
        self._later = None
        if not done.cancelled() and done.exception():
            self.mute()  # nobody can be told any more
        if self._listens:
            self._loop.add_reader(self._fd, self._read)
            self._handle_all()

    def _next(self) -> tuple[bytes, bytes] | None:
        if len(self._held) < FRAME.size:
            return None
        size, kind = FRAME.unpack_from(self._held)
        if size > MAX_FRAME:
            raise ValueError("a frame that is too large")
        end = FRAME.size + size
        if len(self._held) < end:
            return None
        payload = bytes(memoryview(self._held)[FRAME.size : end])
        del self._held[:end]
        return kind, payload

    def _handle(self, kind: bytes, payload: bytes) -> Later:
        request = self._requests[0] if self._requests else None
        if kind == NOTE:
            wire.check_result(wire.parse(payload).get("result"))
            # Outside a cell: a thread that outlived its cell displays something.
            return request.on_frame(kind, payload) if request and request.on_frame else None
        if request is None:
            raise ValueError("an answer that nobody asked for")
        if kind == ANSWER:
            answer = wire.check_answer(request.do, wire.parse(payload))
            self._requests.popleft()
            request.settle(answer, payload)
            return None
        if kind not in (DATA, END, CALL):
            raise ValueError("no kind of frame")
        return request.on_frame(kind, payload) if request.on_frame else None

    def read_pending(self) -> Later:
        """See that all that it has said by now is passed on."""
        while self._listens and not self._later and self._poll.poll(0):
            self._read()
        return self._wait_for_later() if self._later else None

    async def _wait_for_later(self) -> None:
        while self._later:
            await asyncio.wait((self._later,))

    def mute(self) -> None:
        """Drop everything but answers from now on."""
        for request in self._requests:
            request.on_frame = None
        if self._later:
            self._later.cancel()

    def _stop_listening(self) -> None:
        # A child may hold the other end for ever. What was said is still heard.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def _hang_up(self, why: str) -> None:
        if self._listens:
            self._listens = False
            self.why = self.why or why
            self._loop.remove_reader(self._fd)
            self._end = self._loop.create_task(self._see_out())

    async def _see_out(self) -> None:
        """The process has ended, or nobody can talk to it: it goes, with all it started."""
        if not self.why:
            try:
                async with asyncio.timeout(LAST_MOMENT):
                    await self.program.ended.wait()
            except TimeoutError:
                self.why = "broke its channel"
        await self._programs.kill(self.program)
        self.over = True
        self._drained.set()
        for request in self._requests:
            request.settle(None)
        self._requests.clear()

    @property
    def fate(self) -> str:
        """How it ended."""
        if self.why:
            return self.why
        number = self.program.signal
        if not number:
            return f"exited with code {self.program.exit_code}"
        with contextlib.suppress(ValueError):
            return f"killed by signal {number} ({signal.Signals(number).name})"
        return f"killed by signal {number}"

    # --- how it is stopped ------------------------------------------------------------

    def interrupt(self, since: Moment, *, hard: bool = False) -> None:
        """Ctrl-C for the cell that runs and for what it started, but not for earlier cells'."""
        if self.program.exit_code is not None:
            return
        if hard:
            kill_all(lambda: self.program.children(since))
            send(self.program.pid, signal.SIGINT)
            return
        # The kernel first: code that waits for a program must see the interrupt, not only that the
        # program ended.
        started = self.program.children(since)
        send(self.program.pid, signal.SIGINT)
        for row in started:
            send(row.pid, signal.SIGINT)

    async def stop(
        self, request: KernelRequest, since: Moment, responder: Responder | None
    ) -> bool:
        """Interrupt what runs; where that does not help, kill: whether it came to that."""
        waited, attempt = 0.0, 0
        while not request.is_over:
            if waited >= GRACE:
                await self.end("did not stop when it was interrupted, and was killed")
                await request.over()
                return True
            if waited >= attempt * AGAIN:
                self.interrupt(since, hard=attempt > 0)
                attempt += 1
            await request.over(STEP)
            # It may have obeyed long ago, and the host not have read what it said before that.
            if responder is None or not responder.is_held_back:
                waited += STEP
        return False

    async def end(self, why: str) -> None:
        """Kill it and all it started, for a reason that goes on record."""
        self.why = self.why or why
        if self._listens or self._end:
            await self._programs.kill(self.program)

    async def release(self) -> None:
        """Everything of it that is ours. It has ended, or was never started."""
        if self._end:
            await asyncio.wait((self._end,))
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._theirs.close()
        self.out.abandon()
        self.err.abandon()
