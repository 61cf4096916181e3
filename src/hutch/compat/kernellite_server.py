"""A KernelLite server: one box, one kernel, and a Unix socket for its clients.

Every connection has a task, so no client can keep another waiting; cells take turns. A cell runs
only while its client waits for it: if the client disconnects, the cell is interrupted, and the
variables stay. When the kernel or the box dies, the next cell gets a new one, and its answer says
so.
"""

from __future__ import annotations

import asyncio
import json
import math
import select
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hutch.client._async import AsyncSandbox
from hutch.errors import BoxError, CallerError, HutchError
from hutch.types import CellResult, Execution

from .kernellite_socket import HEAD, BadMessage, Log, UnixListener, length_of, pack, unpack

MakeBox = Callable[[], Awaitable[AsyncSandbox]]
Answer = dict[str, object]

MAX_SHOWN = 1024 * 1024  # characters of what a cell displays, besides what it prints
STARTED = "EVENT:" + json.dumps({"type": "session_started"})
PATIENCE = 30.0  # seconds for a client to send all of its request, or to take all of its answer
MAX_CLIENTS = 256
PREPARE_TIMEOUT = 120.0
END_TIMEOUT = 5.0  # a cell is killed sooner; past that, the launcher ends the box when we end
NONE = ("", 0)  # no kernel: it died as soon as it was there

# Names that KernelLite's users have without an import; `load` and `save` are in every kernel. Any
# exception is ignored: an image may lack a package, and a file of the user's may shadow one.
PREPARE = "\n".join(
    f"try:\n    import {module} as {name}\nexcept Exception:\n    pass"
    for module, name in [
        ("pandas", "pd"),
        ("numpy", "np"),
        ("pyarrow", "pa"),
        ("pyarrow.parquet", "pq"),
    ]
)


class KernelLiteServer:
    """Serves clients at a socket until a client asks it to shut down, or it is cancelled.

    `timeout` is the default for cells that name none, and the maximum for those that do.
    """

    def __init__(
        self, listener: UnixListener, make_box: MakeBox, log: Log, timeout: float | None
    ) -> None:
        self._listener, self._make_box, self._log, self._timeout = listener, make_box, log, timeout
        self._box: AsyncSandbox | None = None
        self._prepared: tuple[str, int] | None = None  # the kernel that has `pd` etc.
        self._restarted = False  # and no answer has said so yet
        self._turn = asyncio.Lock()
        self._clients: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    async def serve(self, ready: Callable[[], object]) -> None:
        """Call `ready` once clients can connect. When this returns, box and socket are gone.

        Raises HutchError if the box cannot be started, or the socket cannot be made.
        """
        try:
            await self._prepare()
            with self._listener.publish() as listener:
                accepting = asyncio.create_task(self._accept(listener))
                self._log.write("[BOOT] sandbox daemon started")
                try:
                    ready()
                    await self._over.wait()
                finally:
                    self._listener.remove()
                    await _cancel(accepting, *self._clients)
        except HutchError as exc:
            self._log.write(f"[ERROR] {exc.code}: {exc}")
            raise
        finally:
            await self._drop_box()
            self._log.write("[STOP] sandbox daemon ended")

    # --- connections ---------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as exc:  # no descriptors left: others will be closed
                self._log.write(f"[WARN] accept: {exc}")
                await asyncio.sleep(0.1)
                continue
            client.setblocking(False)
            task = asyncio.create_task(self._attend(client))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)

    async def _attend(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        answer: Answer | None = None
        with client:
            try:
                answer = await self._answer(client)
                if answer:
                    async with asyncio.timeout(PATIENCE):
                        await loop.sock_sendall(client, pack(answer))
            except asyncio.CancelledError:
                say(client, broken("the server was shut down"))
                raise
            except (OSError, TimeoutError):
                pass  # the client is gone, or does not read
            except Exception as exc:
                self._log.write(f"[ERROR] {type(exc).__name__}: {exc}")
                say(client, broken(f"{type(exc).__name__}: {exc}"))
        if answer and answer["status"] == "[OK] shutdown":
            self._over.set()

    async def _answer(self, client: socket.socket) -> Answer | None:
        if len(self._clients) > MAX_CLIENTS:
            return broken(f"{MAX_CLIENTS} clients are being served: try again later")
        try:
            async with asyncio.timeout(PATIENCE):
                request = unpack(await receive(client))
        except BadMessage as exc:
            return broken(str(exc))
        except TimeoutError:
            return broken(f"the request did not arrive within {PATIENCE:g} s")
        if not request:
            return {"status": "[ERROR] empty"}
        if not isinstance(request, dict):
            return broken('a request is a JSON object: {"op": "exec", "code": ...}')
        match request.get("op"):
            case "exec":
                return await self._while_there(client, self._exec(request))
            case "ping":
                return {"status": "[OK] pong"}
            case "interrupt":
                if self._box:
                    await self._box.interrupt()
                return {"status": "[OK] interrupt"}
            case "shutdown":
                self._listener.remove()  # before the answer: after it, there is no socket
                return {"status": "[OK] shutdown"}
        return {"status": "[ERROR] bad_op"}

    async def _while_there(
        self, client: socket.socket, work: Coroutine[Any, Any, Answer]
    ) -> Answer | None:
        """The answer; or None if the client disconnected, which stops the work."""
        task: asyncio.Task[Answer] = asyncio.create_task(work)
        with hangup(client) as gone:
            try:
                await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not task.done():
                    await _cancel(task)
        return task.result() if task.done() and not task.cancelled() else None

    # --- cells ---------------------------------------------------------------------------

    async def _exec(self, request: dict[str, object]) -> Answer:
        try:
            code, setup = code_of(request, "code"), code_of(request, "setup")
            timeout = timeout_of(request.get("timeout"), self._timeout)
        except ValueError as exc:
            return failed(str(exc))
        deadline = time.monotonic() + timeout
        try:
            async with asyncio.timeout(None if math.isinf(timeout) else timeout):
                await self._turn.acquire()
        except TimeoutError:
            return failed(f"other cells ran for the whole {timeout:g} s: nothing was run")
        try:
            await self._prepare()
            return await self._run(setup, code, deadline)
        except CallerError as exc:
            return failed(str(exc))
        except HutchError as exc:
            self._log.write(f"[ERROR] {exc.code}: {exc}")
            if isinstance(exc, BoxError):
                await self._drop_box()
            return broken(f"{exc.code}: {exc}")
        finally:
            self._turn.release()

    async def _run(self, setup: str, code: str, deadline: float) -> Answer:
        assert self._box
        for cell in (setup, code) if setup else (code,):
            left = max(0.05, deadline - time.monotonic())
            execution = await self._box.run_code(cell, timeout=None if math.isinf(left) else left)
            self._restarted |= execution.restarted
            if not execution.ok:
                break
        if execution.died:
            self._log.write(f"[WARN] the kernel died: {execution.died}")
            self._prepared = NONE
        restarted, self._restarted = self._restarted, False
        return to_answer(execution, restarted)

    async def _prepare(self) -> None:
        """Make sure that there is a kernel, with the usual imports."""
        if self._box is None:
            self._box = await self._make_box()
            self._restarted |= self._prepared is not None
        elif await self._kernel() == self._prepared:
            return
        execution = await self._box.run_code(PREPARE, timeout=PREPARE_TIMEOUT)
        self._restarted |= execution.restarted
        self._prepared = await self._kernel() or NONE

    async def _kernel(self) -> tuple[str, int] | None:
        """The running kernel. It may have died since the last cell, through its own threads."""
        assert self._box
        for context in await self._box.list_code_contexts():
            if context.id == "main" and context.pid is not None:
                return self._box.id, context.pid
        return None

    async def _drop_box(self) -> None:
        box, self._box = self._box, None
        try:
            async with asyncio.timeout(END_TIMEOUT):
                if box:
                    await box.close()
        except (HutchError, TimeoutError):
            pass  # it is gone, or ends with this process


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=END_TIMEOUT)


# --- connections -------------------------------------------------------------------------


async def receive(client: socket.socket) -> bytes:
    """The body of a request; "{}" for an empty one, as KernelLite has it.

    Raises BadMessage if it is too long, or if the client stops in the middle of it.
    """
    head = await _exactly(client, HEAD)
    if not head:
        return b"{}"
    length = length_of(head) if len(head) == HEAD else HEAD
    body = await _exactly(client, length) if len(head) == HEAD else head
    if len(body) < length or len(head) < HEAD:
        raise BadMessage(f"the request broke off after {len(body)} of {length} bytes")
    return body or b"{}"


async def _exactly(client: socket.socket, size: int) -> bytes:
    """Exactly this many bytes, or fewer if the stream ends."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        piece = await loop.sock_recv(client, min(size - len(data), 1 << 20))
        if not piece:
            break
        data += piece
    return bytes(data)


@contextmanager
def hangup(client: socket.socket) -> Iterator[asyncio.Future[None]]:
    """A future that is done when the other end has closed the connection.

    Not when it has only shut down its sending side: such a client still waits for its answer. An
    epoll that is registered for no events still reports a hang-up, and nothing that is sent.
    """
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    with select.epoll() as watch:
        watch.register(client, 0)
        loop.add_reader(watch, _settle, gone)
        try:
            yield gone
        finally:
            loop.remove_reader(watch)
            gone.cancel()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def say(client: socket.socket, answer: Mapping[str, object]) -> None:
    """Send an answer without waiting. Best effort: it is short, and never raises OSError."""
    try:
        client.send(pack(answer))
    except OSError:
        pass


# --- requests and answers ----------------------------------------------------------------


def to_answer(execution: Execution, restarted: bool) -> Answer:
    """What a cell did, as KernelLite answers it; plus three fields that it does not have."""
    error = execution.error
    left = error is not None and error.name == "SystemExit" and error.value in ("", "0", "None")
    answer: Answer = {
        "status": "[OK] exec" if execution.ok or left else "[ERROR] exec",
        "stdout": (f"{STARTED}\n" if restarted else "") + _stdout(execution),
        "stderr": execution.logs.stderr + ("" if left else _trouble(execution)),
    }
    told = {"restarted": restarted, "timed_out": execution.timed_out, "died": execution.died}
    return answer | {name: value for name, value in told.items() if value}


def _stdout(execution: Execution) -> str:
    printed = execution.logs.stdout
    shown = "".join(f"{_text(result)}\n" for result in execution.results)
    if len(shown) > MAX_SHOWN:
        half = MAX_SHOWN // 2
        left_out = len(shown) - MAX_SHOWN
        shown = f"{shown[:half]}\n[... {left_out} characters not shown ...]\n{shown[-half:]}"
    return printed + ("\n" if shown and printed and not printed.endswith("\n") else "") + shown


def _text(result: CellResult) -> str:
    if result.text is not None:
        return result.text
    return " ".join(f"[{kind}: {path}]" for kind, path in result.files.items()) or "[no text]"


def _trouble(execution: Execution) -> str:
    parts = []
    if execution.error:
        error = execution.error
        parts.append(error.traceback or f"{error.name}: {error.value}")
    if execution.timed_out:
        fate = "killed" if execution.died else "interrupted"
        parts.append(
            f"TimeoutError: the cell ran for {execution.duration_ms / 1000:.1f} s and was {fate}"
        )
    if execution.died:
        parts.append(
            f"The kernel died ({execution.died}) and its variables with it. The next "
            "cell gets a new one."
        )
    return "".join(f"\n{part.rstrip()}\n" for part in parts)


def failed(why: str) -> Answer:
    return {"status": "[ERROR] exec", "stdout": "", "stderr": f"\n{why}\n"}


def broken(why: str) -> Answer:
    return {"status": "[ERROR] server", "stdout": "", "stderr": why}


def code_of(request: dict[str, object], name: str) -> str:
    code = request.get(name, "")
    if not isinstance(code, str):
        raise ValueError(f"{name} must be text, not {type(code).__name__}")
    code.encode()  # a lone surrogate is a ValueError, too
    return code


def timeout_of(asked: object, most: float | None) -> float:
    limit = math.inf if most is None else most
    if asked is None:
        return limit
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not 0 < asked < 1e9:
        raise ValueError(f"timeout must be a number of seconds above 0, not {asked!r:.100}")
    return min(asked, limit)
