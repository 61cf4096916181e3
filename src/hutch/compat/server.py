"""A KernelLite server: one box, one kernel, and a socket that anybody with the right may ask.

Every connection has a task, so that none can keep another waiting; cells take turns. A cell runs
as long as somebody waits for it: a client that goes away interrupts its cell, and the variables
stay. When the kernel dies, or the box, the next cell gets a new one and its answer says so.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from hutch.client._async import AsyncSandbox
from hutch.errors import BoxError, CallerError, HutchError

from .answers import Answer, broken, code_of, failed, timeout_of, to_answer
from .frames import BadMessage, pack, unpack
from .sockets import hangup, receive, say
from .unix_listener import Log, UnixListener

MakeBox = Callable[[], Awaitable[AsyncSandbox]]

PATIENCE = 30.0  # seconds for a client to send all of its request, or to take all of its answer
MAX_CLIENTS = 256
PREPARE_TIMEOUT = 120.0
END_TIMEOUT = 5.0  # a cell is killed sooner; past that, the launcher ends the box when we end
NONE = ("", 0)  # no kernel: it died as soon as it was there

# What KernelLite's users find without importing it; `load` and `save` are in every kernel. An
# image need not have all of it, and a file of the user's may be called like one of these.
PREPARE = "\n".join(
    f"try:\n    import {module} as {name}\nexcept Exception:\n    pass"
    for module, name in [
        ("pandas", "pd"), ("numpy", "np"), ("pyarrow", "pa"), ("pyarrow.parquet", "pq"),
    ]
)  # fmt: skip


class KernelLiteServer:
    """Answers at a socket until it is asked to shut down, or cancelled.

    `timeout` is for cells that come without one, and the most that others can have.
    """

    def __init__(
        self, listener: UnixListener, make_box: MakeBox, log: Log, timeout: float | None
    ) -> None:
        self._listener, self._make_box, self._log, self._timeout = listener, make_box, log, timeout
        self._box: AsyncSandbox | None = None
        self._prepared: tuple[str, int] | None = None  # the kernel that has `pd` etc.
        self._restarted = False  # and nobody was told yet
        self._turn = asyncio.Lock()
        self._clients: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    async def serve(self, ready: Callable[[], object]) -> None:
        """`ready` is called when it can be asked. When this returns, box and socket are gone."""
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
                pass  # gone, or does not read: nobody to tell
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
                self._listener.remove()  # who has the answer finds no socket
                return {"status": "[OK] shutdown"}
        return {"status": "[ERROR] bad_op"}

    async def _while_there(
        self, client: socket.socket, work: Coroutine[Any, Any, Answer]
    ) -> Answer | None:
        """The answer; or None when the client has gone, and what it asked for is stopped."""
        task: asyncio.Task[Answer] = asyncio.create_task(work)
        with hangup(client) as gone:
            try:
                await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not task.done():
                    await _cancel(task)
        return task.result() if task.done() and not task.cancelled() else None

    # --- cells ---------------------------------------------------------------------------

    async def _exec(self, request: dict[str, Any]) -> Answer:
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
        """See to it that there is a kernel with everything in it."""
        if self._box is None:
            self._box = await self._make_box()
            self._restarted |= self._prepared is not None
        elif await self._kernel() == self._prepared:
            return
        execution = await self._box.run_code(PREPARE, timeout=PREPARE_TIMEOUT)
        self._restarted |= execution.restarted
        self._prepared = await self._kernel() or NONE

    async def _kernel(self) -> tuple[str, int] | None:
        """The kernel that is there. It may have died since the last cell, by its own threads."""
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
            pass  # it is gone, or goes with us


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=END_TIMEOUT)
