"""A kernel process and its cells: requests and answers, and how a cell is stopped.

A kernel runs user code, so every frame on its channel is checked before it is passed on, and a
kernel that sends an invalid frame is killed. A request may be sent before earlier ones are
answered. Answers come in order, and a kernel that is going to sleep stops that for the next
request. A frame is

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
from dataclasses import dataclass, field

from hutch import wire

from .agent import READ_SIZE, RequestError, Responder
from .pipes import Later, OutputPipe, Relay
from .procfs import Moment, kill_all, send
from .spawn import Program, Programs, identify

FRAME = struct.Struct("!Ic")
REQUEST, NOTE, DATA, END, ANSWER = b"R", b"N", b"D", b"E", b"A"
CALL, REPLY = b"C", b"P"
MAX_FRAME = 16 * 1024 * 1024 + 64 * 1024
CHANNEL, SWAP = 3, 4  # descriptors of a kernel

START_PATIENCE = 15  # seconds
GRACE = 2.0  # seconds from the first interrupt to the kill
STEP, AGAIN = 0.1, 0.5  # seconds between two checks whether it has stopped, and two attempts
LAST_MOMENT = 1.0  # seconds for the process to end after its channel

# Without the current folder on the path: no file of the user may be imported in place of ours.
BEGIN = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({lib!r}); "
    "from hutch_kernel.main import main; main({channel})"
)

# Called for each frame before an answer, with its kind and payload.
FrameHandler = Callable[[bytes, bytes], Later]


class KernelRequest:
    """A request, and in the end its answer: None if the kernel ended without one."""

    def __init__(self, do: str, on_frame: FrameHandler | None) -> None:
        self.do, self.on_frame = do, on_frame
        self.answer: wire.KernelAnswer | None = None
        self.payload = b""  # the answer as it was sent
        self._settled = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._settled.is_set()

    async def over(self, timeout: float | None = None) -> bool:
        """Wait for the answer. False if it did not come in time."""
        try:
            async with asyncio.timeout(timeout):
                await self._settled.wait()
        except TimeoutError:
            pass
        return self.is_over

    def settle(self, answer: wire.KernelAnswer | None, payload: bytes = b"") -> None:
        self.answer, self.payload = answer, payload
        self._settled.set()


class KernelProcess:
    """A kernel process, and our ends of its channel and pipes."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._loop = asyncio.get_running_loop()
        self._requests: deque[KernelRequest] = deque()
        self._held = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._drained = asyncio.Event()
        self._later: asyncio.Task[None] | None = None  # no frame is read until it is done
        self._end: asyncio.Task[None] | None = None
        self.program = Program(["python3"], None)  # until it is started
        self.over = False
        self.why = ""  # the reason for its end, if that is not its exit status
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

    async def start(self, cwd: str, env: dict[str, str], start: dict[str, object]) -> None:
        """Start it. Returns when it has answered. Raises RequestError if it cannot be started."""
        config = self._programs.config
        # A fork drops its capabilities by switching from root to another user.
        fork = config.kernel is not None and identify(config.user, config).uid != 0
        python = config.kernel["executable"] if config.kernel else "python3"
        begin = BEGIN.format(lib=config.lib, channel=CHANNEL)
        null = os.open("/dev/null", os.O_RDONLY)
        fds = {0: null, 1: self.out.writer, 2: self.err.writer, CHANNEL: self._theirs.fileno()}
        if start["swap"]:
            fds[SWAP] = config.swap
        try:
            self.program = await self._programs.start(
                ["python3"] if fork else [python, "-c", begin],
                cwd=cwd,
                env=env,
                fds=fds,
                call="kernel" if fork else None,
            )
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
        request = self.ask("start", None, **(config.kernel or {}), **start)
        if not await request.over(START_PATIENCE):
            await self.end("did not answer")
            await request.over()
        answer = request.answer
        error = answer.get("error") if answer else None
        if error or not answer:
            stderr = (self.err.read() or b"").decode("utf-8", "replace").strip()[-500:]
            why = error["value"][:500] if error else f"{self.fate}; {stderr}"
            raise RequestError("internal", f"cannot start a kernel: {why}")

    # --- writing ----------------------------------------------------------------------

    def ask(self, do: str, on_frame: FrameHandler | None = None, **body: object) -> KernelRequest:
        """Send a request. Raises RequestError if it is too long."""
        text = json.dumps({"do": do, **body}, ensure_ascii=False)
        payload = text.encode("utf-8", "surrogatepass")
        if len(payload) > MAX_FRAME:
            raise RequestError("invalid_request", "the cell is too long: at most 16 MiB as JSON")
        request = KernelRequest(do, on_frame)
        if self.over:
            request.settle(None)
        else:
            self._requests.append(request)
            self._write(REQUEST, payload)
        return request

    @property
    def last_request(self) -> KernelRequest | None:
        """The last request that is not answered yet."""
        return self._requests[-1] if self._requests else None

    async def feed(self, data: bytes) -> None:
        """Send data for a request. Returns when there is room for more."""
        self._write(DATA, data)
        while self._unsent and not self.over:
            self._drained.clear()
            await self._drained.wait()

    def end_feed(self) -> None:
        self._write(END, b"")

    def reply(self, payload: bytes) -> None:
        """Pass on the host's reply to a call."""
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
            self._unsent.clear()  # the kernel ended: `_read` notices
        self._loop.remove_writer(self._fd)
        self._drained.set()

    # --- reading ----------------------------------------------------------------------

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
        """Handle complete frames, until one has to wait."""
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
            self.mute()  # the host cannot be reached any more
        if self._listens:
            self._loop.add_reader(self._fd, self._read)
            self._handle_all()

    def _next(self) -> tuple[bytes, bytes] | None:
        if len(self._held) < FRAME.size:
            return None
        size, kind = FRAME.unpack_from(self._held)
        if size > MAX_FRAME:
            raise ValueError("frame too large")
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
            # Without a request, it is from a thread that outlived its cell: drop it.
            return request.on_frame(kind, payload) if request and request.on_frame else None
        if request is None:
            raise ValueError("unexpected answer")
        if kind == ANSWER:
            answer = wire.check_answer(request.do, wire.parse(payload))
            self._requests.popleft()
            request.settle(answer, payload)
            return None
        if kind not in (DATA, END, CALL):
            raise ValueError("unknown frame kind")
        return request.on_frame(kind, payload) if request.on_frame else None

    def read_pending(self) -> Later:
        """Handle everything that it has sent so far."""
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
        # A child of the kernel may hold the other end forever. What was sent can still be read.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def _hang_up(self, why: str) -> None:
        if self._listens:
            self._listens = False
            self.why = self.why or why
            self._loop.remove_reader(self._fd)
            self._end = self._loop.create_task(self._see_out())

    async def _see_out(self) -> None:
        """The process has ended or broke its channel: kill its tree, and settle its requests."""
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

    # --- stopping ---------------------------------------------------------------------

    def interrupt(self, since: Moment, *, hard: bool = False) -> None:
        """Ctrl-C for the running cell and what it started, not for children of earlier cells."""
        if self.program.exit_code is not None:
            return
        if hard:
            kill_all(lambda: self.program.children(since))
            send(self.program.pid, signal.SIGINT)
            return
        # The kernel first: code that waits for a program must get the interrupt, not only see that
        # the program ended.
        started = self.program.children(since)
        send(self.program.pid, signal.SIGINT)
        for row in started:
            send(row.pid, signal.SIGINT)

    async def stop(
        self, request: KernelRequest, since: Moment, responder: Responder | None
    ) -> bool:
        """Interrupt the running request, and kill the kernel if it goes on. True if killed."""
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
            # While the host does not read, its answer cannot arrive even if it has stopped.
            if responder is None or not responder.is_held_back:
                waited += STEP
        return False

    async def end(self, why: str) -> None:
        """Kill it and everything it started. `why` is part of `fate`."""
        self.why = self.why or why
        if self._listens or self._end:
            await self._programs.kill(self.program)

    async def release(self) -> None:
        """Release its sockets and pipes. It has ended, or was never started."""
        if self._end:
            await asyncio.wait((self._end,))
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._theirs.close()
        self.out.abandon()
        self.err.abandon()


WAKE_PATIENCE = 15  # seconds for a kernel to answer an earlier request, such as going to sleep
NUDGE_PAUSES = (0.5, 1.0, 2.0, 5.0)  # seconds between two searches for stopped processes
MORE_RESULTS = {
    "mime": {"text/plain": "[... more results not sent]"},
    "main": False,
    "data": None,
    "chart": None,
    "files": {},
}


@dataclass(frozen=True)
class Functions:
    """The functions of the host that a cell may call."""

    names: list[str] = field(default_factory=list)
    awaitable: bool = False


class Cell:
    """A running cell: passes its output and results to the host, and can stop it."""

    def __init__(self, process: KernelProcess, responder: Responder, functions: Functions) -> None:
        self._process, self._responder = process, responder
        self._functions = functions
        self._calls: set[int] = set()  # calls that wait for a reply
        self._last_call = 0
        outputs = {wire.STDOUT: process.out, wire.STDERR: process.err}
        self._relay = Relay(responder, outputs, process.read_pending)
        self._since = Moment.now()
        self._sent = self._results = 0
        self._interrupted = False
        self.count = 0
        self.fate: dict[str, object] = {}

    async def run(self, code: str, deadline: float | None) -> None:
        """Returns when the cell has ended and the host has all of its output."""
        process, responder = self._process, self._responder
        before = process.last_request
        offered = {"functions": self._functions.names, "awaitable": self._functions.awaitable}
        request = process.ask("run", self._on_frame, code=code, **offered)
        nudge = Nudge(process, self._since)
        timed_out = killed = False
        try:
            async with self._relay:
                if before:  # the kernel is going to sleep, and takes a moment to stop that
                    began = asyncio.get_running_loop().time()
                    await before.over(WAKE_PATIENCE)
                    if deadline is not None:
                        deadline += asyncio.get_running_loop().time() - began
                if not await request.over(_left(deadline)):
                    timed_out = True
                    killed = await process.stop(request, self._since, responder)
                self._relay.stop()
                await self._relay.finished()
                answer = request.answer
                if answer and len(request.payload) > wire.SHORT:
                    await send_all(responder, _message(request.payload), wire.RESULTS)
        except BaseException:
            # Cancelled: the next cell must not get output of this one.
            process.mute()
            await asyncio.shield(process.stop(request, self._since, None))
            process.out.drop()
            process.err.drop()
            raise
        finally:
            nudge.cancel()
        self.fate = fate_of(timed_out, killed, self._interrupted)
        self.fate["dropped"] = self._has_enough  # results
        if answer is None:
            self.fate["died"] = process.fate
            return
        self.count = answer["count"]
        if len(request.payload) <= wire.SHORT:
            self.fate["answer"] = answer

    def abandon(self) -> None:
        """Drop what the host has not read yet."""
        self._relay.abandon()
        self._process.mute()

    def interrupt(self) -> None:
        self._interrupted = True
        self._process.interrupt(self._since)

    @property
    def _has_enough(self) -> bool:
        return self._sent > wire.MAX_CELL_RESULTS or self._results >= wire.MAX_RESULTS

    def answer(self, number: int, reply: bytes) -> bool:
        """Reply to a call. False if no such call waits for a reply."""
        if number not in self._calls:
            return False
        self._calls.discard(number)
        self._process.reply(reply)
        return True

    def _on_frame(self, kind: bytes, payload: bytes) -> Later:
        if kind == NOTE:
            return self._show(payload)
        return self._ask(payload) if kind == CALL else None

    def _ask(self, payload: bytes) -> Later:
        number = wire.parse_call(payload)["id"]
        if not self._functions.names or len(self._calls) >= wire.MAX_CALLS:
            raise ValueError("call not allowed")
        if number <= self._last_call:
            raise ValueError("call number used before")
        self._last_call = number
        self._calls.add(number)
        message = wire.LENGTH.pack(len(payload)) + payload
        if self._responder.send_now(message, wire.CALLS):
            return None
        return send_all(self._responder, message, wire.CALLS)

    def _show(self, payload: bytes) -> Later:
        if self._has_enough:
            return None
        self._sent += len(payload)
        self._results += 1
        if self._has_enough:
            message = wire.to_message("result", MORE_RESULTS)
        else:
            message = wire.LENGTH.pack(len(payload)) + payload
        # Output that was printed before a result must be sent before it. The kernel waits until
        # that output is read, so what is in the pipe now was printed after the result.
        if self._relay.is_caught_up() and self._responder.send_now(message, wire.RESULTS):
            return None
        return self._show_later(message)

    async def _show_later(self, message: bytes) -> None:
        await self._relay.caught_up()
        await send_all(self._responder, message, wire.RESULTS)


class Nudge:
    """While a cell runs, continues stopped processes: there is no terminal to type `fg` at."""

    def __init__(self, process: KernelProcess, since: Moment) -> None:
        self._program, self._since = process.program, since
        self._loop = asyncio.get_running_loop()
        self._times = 0
        self._timer = self._loop.call_later(NUDGE_PAUSES[0], self._act)

    def _act(self) -> None:
        self._program.keep_moving(self._since)
        self._times += 1
        pause = NUDGE_PAUSES[min(self._times, len(NUDGE_PAUSES) - 1)]
        self._timer = self._loop.call_later(pause, self._act)

    def cancel(self) -> None:
        self._timer.cancel()


def fate_of(timed_out: bool, killed: bool = False, interrupted: bool = False) -> dict[str, object]:
    return {
        "timed_out": timed_out,
        "killed": killed,
        "interrupted": interrupted,
        "died": None,
        "restarted": False,
        "answer": None,
    }


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())


def _message(answer: bytes) -> bytes:
    body = b'{"answer":' + answer + b"}"
    return wire.LENGTH.pack(len(body)) + body


async def send_all(responder: Responder, data: bytes, channel: int) -> None:
    for at in range(0, len(data), READ_SIZE):
        await responder.send(data[at : at + READ_SIZE], channel)
