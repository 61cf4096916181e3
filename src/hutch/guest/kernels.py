"""Contexts: one kernel process each, which keeps its variables from cell to cell.

Cells of a context queue and run one at a time. A cell that runs too long is interrupted, and its
kernel is killed only if that does not help. If a kernel ends during a cell, the answer says so. The
next cell gets a new kernel, and its answer says that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hutch import wire

from .agent import NAME, RequestError, Responder
from .kernel import DATA, SWAP, Cell, Functions, KernelProcess, KernelRequest, fate_of, send_all
from .pipes import Later
from .spawn import Programs

MAX_CONTEXTS = 32
MAX_ENV = 16 * 1024  # characters of a context's variables: a survey sends them in one frame
PATIENCE = {"variables": 20.0, "sleep": 300.0, "save": 130.0, "load": 100.0}  # seconds
# A kernel saves in a child process, which it ends itself after this many seconds.
SAVE_PATIENCE = 100.0
MAX_LIST, MAX_WORD = 1024, 500  # names in a report, and characters of one
FAREWELL = 2  # seconds for the host to read the last output of a cell that was ended
# The answers of a context without a kernel.
NOTHING: dict[str, wire.KernelAnswer] = {
    "variables": {"variables": []},
    "sleep": {"slept": [], "bytes": 0, "awake": []},
    "save": {"kept": [], "lost": []},
}


@dataclass
class Idle:
    """After how many seconds kernels sleep, and which of their data is large enough."""

    seconds: float | None = None
    frame_bytes: int = 0
    array_bytes: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        return {"frame_bytes": self.frame_bytes, "array_bytes": self.array_bytes}


class KernelContext:
    """A named kernel, restarted if it ends."""

    def __init__(
        self, name: str, programs: Programs, idle: Idle, cwd: str, env: dict[str, str], slot: int
    ) -> None:
        self.name, self.cwd, self.slot = name, cwd, slot
        self._programs, self._idle, self._env = programs, idle, env
        self._turn = asyncio.Lock()
        self._process: KernelProcess | None = None  # None: the next cell starts one
        self._cell: Cell | None = None
        self._count = 0
        self._lost = self._closed = False
        self._bedtime: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "busy" if self._turn.locked() else "free"
        return f"<KernelContext {self.name}, {state}>"

    @property
    def pid(self) -> int | None:
        return self._process.program.pid if self._process and not self._process.over else None

    @property
    def entry(self) -> dict[str, object]:
        return {
            "context": self.name,
            "cwd": self.cwd,
            "busy": self._turn.locked(),
            "count": self._count,
            "pid": self.pid,
        }

    async def run(
        self, code: str, timeout: float | None, responder: Responder, functions: Functions
    ) -> dict[str, object]:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            text = f"context {self.name!r} was busy with another cell all the time\n"
            await responder.send(text.encode(), wire.STDERR)
            return fate_of(timed_out=True)
        try:
            began = loop.time()
            process, restarted = await self._start()
            if deadline is not None:  # the start of a kernel does not count
                deadline += loop.time() - began
            cell = self._cell = Cell(process, responder, functions)
            await cell.run(code, deadline)
            self._count = cell.count
            return {**cell.fate, "restarted": restarted}
        finally:
            self._cell = None
            self._rest()

    def answer(self, number: int, reply: bytes) -> bool:
        """Reply to a call of the running cell. False if it does not wait for this reply."""
        return self._cell is not None and self._cell.answer(number, reply)

    def interrupt(self) -> bool:
        if self._cell is None:
            return False
        self._cell.interrupt()
        return True

    async def tell(self, do: str, responder: Responder) -> wire.KernelAnswer:
        """Send the kernel a request between two cells. Raises RequestError if it fails."""

        def pass_on(kind: bytes, payload: bytes) -> Later:
            return send_all(responder, payload, wire.STDOUT) if kind == DATA else None

        async with self._turn:
            if self._process is None:
                return NOTHING[do]
            # None: it is going to sleep, which this may interrupt. So it sleeps again later.
            bedtime = self._bedtime.when() if self._bedtime else None
            process, _ = await self._start()
            details: dict[str, float] = {}
            if do == "sleep":
                details.update(self._idle.sizes)
            elif do == "save":
                details["patience"] = SAVE_PATIENCE
            request = process.ask(do, pass_on, **details)
            try:
                return await _answer(process, request, PATIENCE[do])
            except BaseException:
                if do == "save" and not request.is_over:
                    process.end_feed()  # ends the child that saves
                raise
            finally:
                # Looking at the variables is not use of the kernel.
                self._lie_down(bedtime if do == "variables" else None)

    async def load(self, responder: Responder) -> wire.KernelAnswer:
        async with self._turn:
            process, _ = await self._start()
            request = process.ask("load")
            try:
                async for data in responder.incoming():
                    await process.feed(data)
                process.end_feed()
                answer = await _answer(process, request, PATIENCE["load"])
            except BaseException:
                # It has part of the data and waits for the rest.
                await asyncio.shield(process.end("was interrupted while it was loaded"))
                raise
            self._count = answer["count"]
            self._lie_down()
            return answer

    async def open(self) -> dict[str, object]:
        """Returns when the kernel runs."""
        async with self._turn:
            await self._start()
        return self.entry

    async def restart(self) -> dict[str, object]:
        async with self._last_cell("was restarted"):
            await self._bury()
            self._lost, self._count = False, 0
            await self._start()
        return self.entry

    async def close(self) -> None:
        """End the kernel and everything it started. A cell that runs is its last."""
        self._closed = True
        async with self._last_cell("was removed"):
            await self._bury()

    @asynccontextmanager
    async def _last_cell(self, why: str) -> AsyncIterator[None]:
        """End the kernel, and with it a running cell; then take the turn."""
        if self._process:
            await self._process.end(why)
        try:
            async with asyncio.timeout(FAREWELL):
                await self._turn.acquire()
        except TimeoutError:
            # The host does not read the output of that cell, perhaps because it waits for us.
            if self._cell:
                self._cell.abandon()
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    async def _start(self) -> tuple[KernelProcess, bool]:
        """The kernel, started if none runs. True if it replaces one that was lost.

        Raises RequestError if the context was removed or the kernel does not start.
        """
        self._stay_up()
        if self._closed:
            raise RequestError("not_found", f"context {self.name!r} was removed")
        if self._process and self._process.over:
            await self._bury()
        if self._process:
            return self._process, False
        cwd = self.cwd if os.path.isdir(self.cwd) else "/"
        process = self._process = KernelProcess(self._programs)
        try:
            await process.start(cwd, self._env, self._start_request(cwd))
        except RequestError as exc:
            await self._bury()
            if exc.code == "not_found":
                message = "this image has no python3, which run_code needs: use one that has it"
                raise RequestError(exc.code, message) from None
            raise
        except BaseException:
            await asyncio.shield(self._bury())
            raise
        restarted, self._lost = self._lost, False
        return process, restarted

    def _start_request(self, cwd: str) -> dict[str, object]:
        config = self._programs.config
        swap = None
        if config.swap >= 0 and self.slot < config.swap_slots:
            swap = {"fd": SWAP, "offset": self.slot * config.swap_size, "size": config.swap_size}
        return {"context": self.name, "cwd": cwd, "swap": swap}

    async def _bury(self) -> None:
        process, self._process = self._process, None
        if process:
            self._lost = True
            await process.end("was ended")
            await process.release()

    def _rest(self) -> None:
        self._turn.release()
        self._lie_down()

    def _lie_down(self, when: float | None = None) -> None:
        """Schedule sleep: at `when`, or else after the idle time from now."""
        self._stay_up()
        if self._idle.seconds is not None and self._process and not self._process.over:
            loop = asyncio.get_running_loop()
            when = loop.time() + self._idle.seconds if when is None else when
            self._bedtime = loop.call_at(when, self._sleep)

    def _stay_up(self) -> None:
        if self._bedtime:
            self._bedtime.cancel()
            self._bedtime = None

    def _sleep(self) -> None:
        self._bedtime = None
        # The answer is not awaited. The next request interrupts it, after the piece in progress.
        if self._process and not self._turn.locked():
            self._process.ask("sleep", None, **self._idle.sizes)


async def _answer(
    process: KernelProcess, request: KernelRequest, patience: float
) -> wire.KernelAnswer:
    try:
        # After that long, user code blocks the kernel where no interrupt reaches it.
        if not await request.over(patience):
            await process.end(f"did not answer for {patience:g} seconds, and was killed")
            await request.over()
    except BaseException:
        process.mute()
        raise
    answer = request.answer
    if answer is None:
        raise RequestError("conflict", f"the kernel ended before it could answer: {process.fate}")
    if error := answer.get("error"):
        if error["name"] == "NotSaved":
            raise RequestError("conflict", error["value"][:500])
        raise RequestError(
            "conflict", f"the kernel failed: {error['name']}: {error['value'][:500]}"
        )
    return answer


class Kernels:
    """The contexts of this box, by name. `main` is made when it is first used."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._contexts: dict[str, KernelContext] = {}
        self._opened: dict[str, wire.StartKernel] = {}  # the requests of those that were opened
        self._idle = Idle()

    async def run(self, request: wire.RunCell, responder: Responder) -> dict[str, object]:
        context = self._find(request.context)
        code = request.code
        if code is None:
            data = b"".join([piece async for piece in responder.incoming()])
            code = data.decode("utf-8", "surrogatepass")
        functions = Functions(request.functions, request.awaitable)
        return await context.run(code, request.timeout, responder, functions)

    async def answer(self, request: wire.ReplyToCall, responder: Responder) -> dict[str, object]:
        if request.reply is None:
            reply = b"".join([piece async for piece in responder.incoming()])
        else:
            reply = request.reply.encode("utf-8", "replace")
        if not self._find(request.context).answer(request.call, reply):
            raise RequestError("not_found", f"no call {request.call} waits for an answer")
        return {}

    def pids(self) -> list[int]:
        return [context.pid for context in self._contexts.values() if context.pid]

    def entries(self) -> list[dict[str, object]]:
        """The contexts that were opened, and how."""
        return [
            {"name": name, "cwd": request.cwd, "env": request.env}
            for name, request in self._opened.items()
        ]

    async def interrupt(self, request: wire.Interrupt, responder: Responder) -> dict[str, object]:
        return {"interrupted": self._find(request.context).interrupt()}

    async def open(self, request: wire.StartKernel, responder: Responder) -> dict[str, object]:
        if not NAME.fullmatch(request.context):
            text = f"invalid context name {request.context!r}: use letters, digits, - and _"
            raise RequestError("invalid_request", text)
        if request.context in self._contexts:
            raise RequestError("conflict", f"there is a context {request.context!r} already")
        if sum(len(name) + len(value) for name, value in request.env.items()) > MAX_ENV:
            raise RequestError("invalid_request", f"a context's env may have {MAX_ENV} characters")
        context = self._make(request)
        try:
            if not os.path.isdir(context.cwd):
                raise RequestError("not_found", f"no such folder in the box: {request.cwd}")
            entry = await context.open()
        except BaseException:
            del self._contexts[request.context]
            raise
        self._opened[request.context] = request
        return entry

    async def list(self, request: wire.ListKernels, responder: Responder) -> dict[str, object]:
        return {"contexts": [context.entry for context in self._contexts.values()]}

    async def restart(self, request: wire.RestartKernel, responder: Responder) -> dict[str, object]:
        return await self._find(request.context).restart()

    async def close(self, request: wire.EndKernel, responder: Responder) -> dict[str, object]:
        context = self._contexts.pop(request.context, None)
        self._opened.pop(request.context, None)
        if context is None:
            raise _unknown(request.context)
        await asyncio.shield(context.close())
        return {}

    async def set_idle(self, request: wire.SetIdle, responder: Responder) -> dict[str, object]:
        self._idle.seconds = request.seconds
        self._idle.frame_bytes = request.frame_bytes
        self._idle.array_bytes = request.array_bytes
        return {}

    async def variables(self, request: wire.Variables, responder: Responder) -> dict[str, object]:
        answer = await self._find(request.context).tell("variables", responder)
        await send_all(responder, wire.to_message("answer", answer), wire.RESULTS)
        return {}

    async def sleep(self, request: wire.SleepKernel, responder: Responder) -> dict[str, object]:
        return _short(await self._find(request.context).tell("sleep", responder))

    async def save(self, request: wire.SaveKernel, responder: Responder) -> dict[str, object]:
        return _short(await self._find(request.context).tell("save", responder))

    async def load(self, request: wire.LoadKernel, responder: Responder) -> dict[str, object]:
        return _short(await self._find(request.context).load(responder))

    def _find(self, name: str) -> KernelContext:
        if name in self._contexts:
            return self._contexts[name]
        if name != "main":
            raise _unknown(name)
        return self._make(wire.StartKernel("main"))

    def _make(self, request: wire.StartKernel) -> KernelContext:
        if len(self._contexts) >= MAX_CONTEXTS:
            raise RequestError(
                "limit_reached", f"a box can have {MAX_CONTEXTS} contexts: remove one"
            )
        cwd = os.path.join(self._programs.config.workdir, request.cwd or "")
        cwd = cwd.rstrip("/") or "/"
        taken = {context.slot for context in self._contexts.values()}
        slot = next(n for n in itertools.count() if n not in taken)
        context = KernelContext(request.context, self._programs, self._idle, cwd, request.env, slot)
        self._contexts[request.context] = context
        return context


def _short(whole: wire.KernelAnswer) -> dict[str, object]:
    """Cut the lists of an answer so that it fits into one frame."""
    answer: dict[str, object] = {**whole}
    most = MAX_LIST
    while len(json.dumps(answer)) > wire.MAX_PAYLOAD // 2:
        answer = {
            name: [_clip(item) for item in value[:most]] if isinstance(value, list) else value
            for name, value in answer.items()
        }
        most //= 2
    return answer


def _clip(item: str | list[str]) -> str | list[str]:
    return item[:MAX_WORD] if isinstance(item, str) else [text[:MAX_WORD] for text in item]


def _unknown(name: str) -> RequestError:
    return RequestError("not_found", f"no context {name!r} in this box: create it first")
