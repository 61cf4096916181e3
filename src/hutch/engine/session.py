"""One agent's work: a box, the link to its guest, and what was started in it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from hutch import operations as op
from hutch import wire
from hutch.backends.base import Box
from hutch.errors import BoxLost, Conflict, GuestMisbehaved, InvalidRequest, NotFound, TimedOut
from hutch.types import BoxInfo, Chunk, Piece, Process, Result, Stats

from .check import (
    argv_of,
    command_of,
    env_of,
    name_of,
    path_of,
    said,
    seconds_of,
    user_of,
    whole_of,
)
from .code import Code
from .files import Files
from .link import Call, Link
from .output import Output, Outputs
from .patience import GRACE, heard

KEPT_PROCESSES = 64


class Session:
    def __init__(
        self,
        info: BoxInfo,
        box: Box,
        link: Link,
        outputs: Outputs,
        idle: wire.SetIdle,
        numbers: Iterator[int],
    ) -> None:
        """`outputs` and `numbers` go on where those of the box before this one ended."""
        self.info = info
        self._box, self._link, self._outputs = box, link, outputs
        self.shells: dict[str, str | None] = {}  # that were used and not closed: whose they are
        self.files = Files(link)
        self.code = Code(link, box, outputs, idle, numbers)
        self._jobs: dict[str, Job] = {}
        self._numbers = numbers
        self.closed = False
        self._watch = asyncio.create_task(self._end_with_link())

    def __repr__(self) -> str:
        return f"<Session {self.info.id} {'closed' if self.closed else 'open'}>"

    async def close(self) -> None:
        """When this returns the box is gone."""
        self.closed = True
        self._watch.cancel()
        for job in self._jobs.values():
            job.stop()
        await self._link.close()
        await self._box.kill()

    async def _end_with_link(self) -> None:
        """A guest that hung up, or broke the protocol, takes its box with it."""
        await self._link.over.wait()
        await self._box.kill()

    @property
    def link(self) -> Link:
        return self._link

    @property
    def running(self) -> list[Job]:
        """Programs in the background that have not ended."""
        return [job for job in self._jobs.values() if not job.is_over]

    async def stats(self) -> Stats:
        return await self._box.stats()

    # --- commands -------------------------------------------------------------------

    async def run_shell(self, o: op.RunShell) -> AsyncIterator[Chunk | Result]:
        self.shells.setdefault(name_of(o.shell), None)
        request = wire.Shell(name_of(o.shell), command_of(o.command), seconds_of(o.timeout))
        return self._run(request, None, o.timeout)

    async def run_program(self, o: op.RunProgram) -> AsyncIterator[Chunk | Result]:
        request = wire.Exec(
            argv_of(o.argv), cwd=_cwd(o.cwd), env=env_of(o.env), user=user_of(o.user),
            stdin=o.stdin is not None, timeout=seconds_of(o.timeout),
        )  # fmt: skip
        return self._run(request, o.stdin, o.timeout)

    async def _run(
        self, request: Any, stdin: Any, timeout: float | None
    ) -> AsyncGenerator[Chunk | Result, None]:
        began = time.monotonic()
        kills = self._box.oom_kills()
        output = self._outputs.new()
        feeding: asyncio.Task[None] | None = None
        try:
            async with self._link.call(request) as call:
                if stdin is not None:
                    feeding = asyncio.ensure_future(call.feed(stdin))
                async for event in heard(call, self._box, timeout):
                    if isinstance(event, wire.Data):
                        yield output.take(event)
                if feeding and feeding.done() and (failure := feeding.exception()):
                    raise failure
                code = said(call.result, "exit_code", int)
                oom = self._box.oom_kills() > kills
                yield make_result(output, code, began, call.result, oom=oom)
        finally:
            if feeding:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
            self._outputs.finish(output)

    async def read_output(self, o: op.ReadOutput) -> Piece:
        offset, length = whole_of("offset", o.offset), whole_of("length", o.length)
        return self._outputs.read(o.output, offset, min(length, 16 << 20))

    # --- shells ---------------------------------------------------------------------

    async def open_shell(self, o: op.OpenShell) -> str:
        name = f"shell-{next(self._numbers)}" if o.shell is None else name_of(o.shell)
        request = wire.OpenShell(name, _cwd(o.cwd), env_of(o.env), user_of(o.user))
        await self._link.ask(request)
        self.shells[name] = o.user
        return name

    async def close_shell(self, o: op.CloseShell) -> None:
        await self._link.ask(wire.CloseShell(name_of(o.shell)))
        self.shells.pop(o.shell, None)

    # --- programs that go on by themselves --------------------------------------------

    async def start_program(self, o: op.StartProgram) -> Process:
        request = wire.Exec(
            argv_of(o.argv), cwd=_cwd(o.cwd), env=env_of(o.env), user=user_of(o.user), stdin=True,
            timeout=seconds_of(o.timeout), tty=_size(o.terminal),
        )  # fmt: skip
        id = f"p{next(self._numbers)}"
        output = self._outputs.new()
        job = Job(id, tuple(o.argv), self._link.call(request), output, o.terminal is not None)
        try:
            await job.start()
        except BaseException:
            self._outputs.drop(output)
            raise
        self._jobs[id] = job
        for old in [j for j in self._jobs.values() if j.is_over][:-KEPT_PROCESSES]:
            del self._jobs[old.id]
        return job.process

    async def list_programs(self) -> list[Process]:
        return [job.process for job in self._jobs.values()]

    def job(self, id: str) -> Job:
        try:
            return self._jobs[id]
        except KeyError:
            raise NotFound(f"no process {id!r} in this box") from None


class Follower:
    """What one reader of a program's output has not read yet."""

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()
        self.stirred = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return len(self.chunks) >= 16

    async def wait(self) -> None:
        self.stirred.clear()
        await self.stirred.wait()


class Job:
    """A program that nobody waits for: its output is collected as it comes."""

    def __init__(
        self, id: str, argv: tuple[str, ...], call: Call, output: Output, terminal: bool
    ) -> None:
        self.id, self.output = id, output
        self._argv, self._call, self._terminal = argv, call, terminal
        self._pid = 0
        self._began = time.monotonic()
        self._started_at = time.time()
        self._task: asyncio.Task[None] | None = None
        self._followers: set[Follower] = set()
        self._input_closed = self._dying = False
        self._over = asyncio.Event()
        self.result: Result | None = None
        self._failure: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def process(self) -> Process:
        code = self.result.exit_code if self.result else None
        return Process(self.id, self._pid, self._argv, self._started_at, self._terminal, code)

    async def start(self) -> None:
        """Returns when the program runs; raises what kept it from running."""
        try:
            first = await anext(self._call)
            if not isinstance(first, wire.Note):
                raise GuestMisbehaved("the guest did not say what it started")
            self._pid = said(first.body, "pid", int)
        except StopAsyncIteration:
            raise GuestMisbehaved("the guest did not say what it started") from None
        except BaseException:
            self._call.close()
            raise
        self._task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        try:
            async for event in self._call:
                if isinstance(event, wire.Data):
                    chunk = self.output.take(event)
                    for follower in list(self._followers):
                        # A slow follower slows the program, not the host; but one that does
                        # not follow at all cannot keep it from being killed.
                        while follower.is_full and follower in self._followers and not self._dying:
                            await follower.wait()
                        follower.chunks.append(chunk)
                        follower.stirred.set()
            answer = self._call.result
            code = said(answer, "exit_code", int)
            self.result = make_result(self.output, code, self._began, answer)
        except asyncio.CancelledError:
            self._failure = BoxLost("the box was closed")
            raise
        except Exception as exc:
            self._failure = exc
        finally:
            self.output.ended = True
            self._call.close()
            self._over.set()
            for follower in self._followers:
                follower.stirred.set()

    def so_far(self) -> Result:
        """The result if there is one; else, with exit_code -1, what there is of it."""
        if self._failure:
            raise self._failure
        return self.result or make_result(self.output, -1, self._began, {})

    async def wait(self) -> Result:
        await self._over.wait()
        if self._failure:
            raise self._failure
        assert self.result
        return self.result

    async def follow(self, timeout: float | None) -> AsyncIterator[Chunk | Result]:
        return self._follow(seconds_of(timeout))

    async def _follow(self, timeout: float | None) -> AsyncGenerator[Chunk | Result, None]:
        follower = Follower()
        for past in (
            Chunk(self.output.stdout.data(), "stdout"), Chunk(self.output.stderr.data(), "stderr")
        ):  # fmt: skip
            if past.data:
                follower.chunks.append(past)
        self._followers.add(follower)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while follower.chunks or not self._over.is_set():
                if follower.chunks:
                    chunk = follower.chunks.popleft()
                    follower.stirred.set()
                    yield chunk
                    continue
                try:
                    left = None if deadline is None else max(0, deadline - time.monotonic())
                    await asyncio.wait_for(follower.wait(), left)
                except TimeoutError:
                    message = f"still running after {timeout} s"
                    raise TimedOut(message, self.so_far()) from None
            yield await self.wait()
        finally:
            self._followers.discard(follower)
            follower.stirred.set()

    async def send(self, data: bytes) -> None:
        if self._input_closed:
            raise Conflict(f"the input of {self.id} was closed")
        await self._call.send(data)

    async def end_input(self) -> None:
        if self._terminal:
            await self._call.send(b"\x04")  # ^D: a terminal has no end, only the word for it
        elif not self._input_closed:
            self._input_closed = True
            self._call.end_input()

    def signal(self, number: int) -> None:
        if not 1 <= whole_of("a signal", number) <= 64:
            raise InvalidRequest(f"not a signal: {number}")
        self._call.tell(signal=number)

    async def kill(self) -> None:
        """Everything it started is dead when this returns."""
        self._dying = True
        for follower in self._followers:
            follower.stirred.set()
        self._call.tell(signal=9, tree=True)
        try:
            await asyncio.wait_for(self._over.wait(), GRACE)
        except TimeoutError:
            raise BoxLost("the guest ignored a kill: close this box") from None

    def resize(self, columns: int, rows: int) -> None:
        self._call.tell(size=_size((columns, rows)))

    def stop(self) -> None:
        if self._task:
            self._task.cancel()


def make_result(
    output: Output, code: int, began: float, answer: dict[str, Any], *, oom: bool = False
) -> Result:
    truncated = output.both.truncated
    hint = f"; read_output('{output.id}', offset) reads them" if truncated else ""
    stdout, stderr = output.stdout.data(hint), output.stderr.data(hint)
    both = output.both.data(hint)
    cwd = answer.get("cwd")
    return Result(
        exit_code=code,
        stdout=stdout.decode("utf-8", "replace"),
        stderr=stderr.decode("utf-8", "replace"),
        output=both.decode("utf-8", "replace"),
        cwd=cwd if isinstance(cwd, str) else None,
        timed_out=answer.get("timed_out") is True,
        truncated=truncated,
        total_bytes=output.both.total,
        duration_ms=int((time.monotonic() - began) * 1000),
        restarted=answer.get("restarted") is True,
        oom=oom,
        kept=output.id if truncated else None,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
    )


def _cwd(cwd: str | None) -> str | None:
    return None if cwd is None else path_of(cwd)


def _size(size: tuple[int, int] | None) -> list[int] | None:
    if size is None:
        return None
    if not all(isinstance(n, int) and 1 <= n <= 10_000 for n in size):
        raise InvalidRequest(f"not a terminal size: {size!r}")
    return list(size)
