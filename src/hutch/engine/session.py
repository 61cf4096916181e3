"""A session that is awake: its box, the link to its guest, and what was started in it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass

from hutch import operations as op
from hutch import wire
from hutch.backends.base import Box
from hutch.errors import (
    BoxLost,
    GuestMisbehaved,
    HutchError,
    InvalidRequest,
    LimitReached,
    NotFound,
)
from hutch.types import (
    CHANGE_KINDS,
    FILE_KINDS,
    BoxInfo,
    Change,
    Chunk,
    Entry,
    Match,
    Piece,
    Port,
    Process,
    Result,
    Stats,
)

from .check import (
    argv_of,
    command_of,
    env_of,
    guest_field,
    name_of,
    path_of,
    seconds_of,
    text_of,
    user_of,
    whole_of,
)
from .code import CodeRunner
from .job import BackgroundJob, size_of
from .link import GuestCall, Link, with_deadline
from .links import Links, connect_again
from .measure import measure, was_oom_killed
from .output import make_result
from .outputs import Outputs
from .survey import BoxSurvey, survey

KEPT_PROCESSES = 64
PIECE = 1 << 20  # bytes of an output in one answer: they stay in memory for a slow reader


class Numbers:
    """Numbers for the names of programs, shells and contexts: each is given once."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        self.last += 1
        return self.last


class Session:
    def __init__(
        self,
        info: BoxInfo,
        box: Box,
        link: Link,
        outputs: Outputs,
        idle: wire.SetIdle,
        numbers: Numbers,
    ) -> None:
        """`outputs` and `numbers` continue those of the session's last box."""
        self.info = info
        self._box, self._outputs = box, outputs
        self.links = links = Links(box, link)
        self.shells: dict[str, str | None] = {}  # that are open, and their users
        self.files = BoxFiles(links)
        self.code = CodeRunner(links, box, outputs, idle, numbers)
        self._jobs: dict[str, BackgroundJob] = {}
        self._numbers = numbers
        self._undoing: set[asyncio.Task[None]] = set()
        self.closed = False
        self._watch = asyncio.create_task(self._end_with_link())

    def __repr__(self) -> str:
        return f"<Session {self.info.id} {'closed' if self.closed else 'open'}>"

    async def adopt(self) -> None:
        """Continue with a box that another process started."""
        self._take_over(await survey(self.link))
        await self._prune()

    async def reconnect(self) -> None:
        """Get another link after the last one broke.

        Tries until it is known whether the box lives. Raises BoxLost if it does not or if its guest
        hangs, GuestMisbehaved and IncompatibleBox.
        """
        await self.link.close()
        link, report = await connect_again(self._box)
        self.links.replace(link)
        for job in self._jobs.values():
            job.go_on_with(link)
        # What was started while the link broke, so that nobody was told.
        self._take_over(report)

    def _take_over(self, report: BoxSurvey) -> None:
        self.shells.update(report.shells)
        self.code.opened.update(report.contexts)
        for surveyed in sorted(report.jobs, key=lambda job: job.number):
            if surveyed.id in self._jobs:
                continue
            job = BackgroundJob(
                surveyed.id, surveyed.argv, self.links, self._outputs, surveyed.terminal
            )
            self._jobs[surveyed.id] = job
            self._numbers.last = max(self._numbers.last, surveyed.number)
            job.go_on(surveyed)
        for name in (*report.shells, *report.contexts):
            self._numbers.last = max(self._numbers.last, _number_in(name))

    async def close(self) -> None:
        """Kill the box. It is gone when this returns."""
        await self._hang_up()
        await self._box.kill()
        self._box.root = None
        for job in self._jobs.values():
            job.end()

    async def leave(self, why: HutchError | None = None) -> None:
        """Close the link, and keep the box, for another process to `adopt`.

        `why`: the error for requests that are under way.
        """
        await self._hang_up(why)
        self._box.root = None
        self._outputs.leave()

    async def _hang_up(self, why: HutchError | None = None) -> None:
        self.closed = True
        self.links.end(why or BoxLost("the box was closed"))
        tasks = (self._watch, *self._undoing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(
            *tasks, *(job.stop() for job in self._jobs.values()), return_exceptions=True
        )
        await self.link.close()

    async def _end_with_link(self) -> None:
        """Kill the box once its link is over and no other will follow."""
        link = self.link
        while True:
            await link.over.wait()
            if link.failure and (link.is_abandoned or not self.links.may_follow):
                self.links.end(link.failure)
            if link.is_abandoned:
                return
            try:
                link = await self.links.after(link)
            except HutchError:
                break
        with contextlib.suppress(HutchError):  # `close` tries again
            await self._box.kill()

    @property
    def box(self) -> Box:
        return self._box

    @property
    def link(self) -> Link:
        return self.links.current

    @property
    def running(self) -> list[BackgroundJob]:
        """Programs in the background that have not ended."""
        return [job for job in self._jobs.values() if not job.is_over]

    async def stats(self) -> Stats:
        return await measure(self._box, self.link)

    # --- commands -------------------------------------------------------------------

    async def run_shell(self, o: op.RunShell) -> AsyncGenerator[Chunk | Result, None]:
        if name_of(o.shell) == "main":  # it is opened with its first command
            self.shells.setdefault("main", None)
        command = command_of(o.command)
        data = command.encode("utf-8", "surrogateescape")
        if len(data) <= wire.SHORT:
            return self._run(wire.ShellCommand(o.shell, command, seconds_of(o.timeout)), None, o)
        return self._run(wire.ShellCommand(o.shell, None, seconds_of(o.timeout)), data, o)

    async def run_program(self, o: op.RunProgram) -> AsyncGenerator[Chunk | Result, None]:
        request = wire.Exec(
            argv_of(o.argv),
            cwd=_cwd(o.cwd),
            env=env_of(o.env),
            user=user_of(o.user),
            stdin=o.stdin is not None,
            timeout=seconds_of(o.timeout),
        )
        return self._run(request, o.stdin, o)

    async def _run(
        self,
        request: wire.ShellCommand | wire.Exec,
        stdin: bytes | AsyncIterable[bytes] | None,
        o: op.RunShell | op.RunProgram,
    ) -> AsyncGenerator[Chunk | Result, None]:
        began = time.monotonic()
        kills = self._box.oom_kills()
        output = self._outputs.new(o.keep)
        feeding: asyncio.Task[None] | None = None
        try:
            async with self.link.call(request) as call:
                if stdin is not None:
                    feeding = asyncio.ensure_future(call.feed(stdin))
                async for event in with_deadline(call, self._box, o.timeout):
                    if isinstance(event, wire.Data):
                        yield output.take(event)
                if feeding and feeding.done() and (failure := feeding.exception()):
                    raise failure
                code = guest_field(call.result, "exit_code", int)
                oom = was_oom_killed(self._box, kills, call.result)
                seconds = time.monotonic() - began
                yield make_result(output, code, seconds, call.result, oom=oom)
        finally:
            if feeding:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
            self._outputs.finish(output)

    async def read_output(self, o: op.ReadOutput) -> Piece:
        offset, length = whole_of("offset", o.offset), whole_of("length", o.length)
        await asyncio.sleep(0)  # reading a long output must not block other requests
        return self._outputs.read(o.output, offset, min(length, PIECE))

    async def read_logs(self, o: op.ReadLogs) -> Piece:
        offset, length = whole_of("offset", o.offset), whole_of("length", o.length)
        return self.job(o.process).output.read(offset, min(length, PIECE))

    # --- shells ---------------------------------------------------------------------

    async def open_shell(self, o: op.OpenShell) -> str:
        name = f"shell-{next(self._numbers)}" if o.shell is None else name_of(o.shell)
        request = wire.StartShell(name, _cwd(o.cwd), env_of(o.env), user_of(o.user))
        await self.link.ask(request)
        self.shells[name] = o.user
        return name

    async def close_shell(self, o: op.CloseShell) -> None:
        await self.link.ask(wire.EndShell(name_of(o.shell)))
        self.shells.pop(o.shell, None)

    # --- ports ------------------------------------------------------------------------

    async def list_ports(self) -> list[Port]:
        """The ports that programs listen on. Raises GuestMisbehaved."""
        ports = guest_field(await self.link.ask(wire.Ports()), "ports", list)
        try:
            return [Port(_port(port), str(address)[:64]) for port, address in ports]
        except (TypeError, ValueError, InvalidRequest):
            raise GuestMisbehaved(f"malformed ports from guest: {ports!r:.100}") from None

    async def dial(self, port: int) -> Tunnel:
        """A TCP connection to a port in the box.

        Raises NotFound if nothing listens there, and InvalidRequest if it is not a port.
        """
        return await Tunnel.open(self.link, _port(port))

    # --- all files at once ------------------------------------------------------------

    async def pack_folder(self, o: op.PackFolder) -> AsyncGenerator[bytes, None]:
        return self.tar(o.path)

    async def tar(self, path: str | None = None) -> AsyncGenerator[bytes, None]:
        """A tar of a folder; by default, of the working directory.

        Raises BoxLost if the process that packs it is killed.
        """
        async with self.link.call(wire.Tar(_cwd(path))) as call:
            async for event in call:
                if isinstance(event, wire.Data) and event.channel == wire.STDOUT:
                    yield event.data
            if guest_field(call.result, "exit_code", int) != 0:
                raise BoxLost("not all files could be read: the packing process was killed")

    async def untar(
        self, data: bytes | Iterable[bytes] | AsyncIterable[bytes], path: str | None = None
    ) -> int:
        """Unpack a tar, or a tar.gz, into a folder. Returns how many files it made."""
        async with self.link.call(wire.Untar(_cwd(path))) as call:
            feeding = asyncio.create_task(call.feed(data))
            try:
                async for _ in call:
                    pass
                if feeding.done() and (failure := feeding.exception()):
                    raise failure
            except asyncio.CancelledError:
                # Otherwise the guest would go on writing for a moment after this has ended.
                feeding.cancel()
                await call.stop()
                raise
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
            return guest_field(call.result, "files", int)

    # --- programs in the background ---------------------------------------------------

    async def start_program(self, o: op.StartProgram) -> Process:
        id = f"p{next(self._numbers)}"
        request = wire.Start(
            id,
            argv_of(o.argv),
            cwd=_cwd(o.cwd),
            env=env_of(o.env),
            user=user_of(o.user),
            timeout=seconds_of(o.timeout),
            tty=o.terminal and size_of(o.terminal),
        )
        job = BackgroundJob(id, tuple(o.argv), self.links, self._outputs, o.terminal is not None)
        starting = asyncio.create_task(job.start(request))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._undoing.add(task := asyncio.create_task(self._undo(job, starting)))
            task.add_done_callback(self._undoing.discard)
            raise
        except BaseException:
            self._outputs.drop(job.output)
            raise
        self._jobs[id] = job
        await self._prune()
        return job.process

    async def _undo(self, job: BackgroundJob, starting: asyncio.Task[None]) -> None:
        """The caller was cancelled. If the program has started since, end it."""
        with contextlib.suppress(HutchError):
            await starting
            await job.kill()
            await job.forget()
        self._outputs.drop(job.output)

    async def _prune(self) -> None:
        ended = [job for job in self._jobs.values() if job.is_over][:-KEPT_PROCESSES]
        # All of them before the first await: other calls may start programs, and prune, after it.
        for old in ended:
            del self._jobs[old.id]
            self._outputs.forget(old.output)
        for old in ended:
            await old.forget()

    async def list_programs(self) -> list[Process]:
        return [job.process for job in self._jobs.values()]

    def job(self, id: str) -> BackgroundJob:
        """Raises NotFound."""
        try:
            return self._jobs[id]
        except KeyError:
            raise NotFound(f"no process {id!r} in this box") from None


def _cwd(cwd: str | None) -> str | None:
    return None if cwd is None else path_of(cwd)


def _port(port: int) -> int:
    if whole_of("a port", port, least=1) > 65535:
        raise InvalidRequest(f"not a port: {port}")
    return port


def _number_in(name: str) -> int:
    """The number in a generated name, such as `shell-7`; 0 for other names."""
    match = re.fullmatch(r"(?:shell|context)-([1-9][0-9]{0,8})", name)
    return int(match[1]) if match else 0


MAX_DENIED = 256  # entries from one guest
_MAX_NAME = 64  # characters


@dataclass(frozen=True)
class Denied:
    """How often one program was refused one system call, since its box was started."""

    program: str  # the name that it gives itself
    call: str
    count: int
    first_at: float
    last_at: float

    @classmethod
    def read(cls, body: object) -> Denied | None:
        """From a guest's message, which is not trusted. None if it is malformed."""
        if not isinstance(body, dict):
            return None
        program, call, count = (body.get(name) for name in ("program", "call", "count"))
        first, last = body.get("first"), body.get("last")
        if not (isinstance(program, str) and isinstance(call, str) and type(count) is int):
            return None
        if not (isinstance(first, float) and isinstance(last, float)) or count < 1:
            return None
        return cls(_printable(program), _printable(call), min(count, 1 << 53), first, last)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_NAME])


class Tunnel:
    """A TCP connection to a port in a box, as a stream of bytes. It stays open until closed."""

    def __init__(self, call: GuestCall) -> None:
        self._call = call
        self._held = b""
        self._at_end = False

    @classmethod
    async def open(cls, link: Link, port: int) -> Tunnel:
        """Raises NotFound if nothing listens there, and GuestMisbehaved."""
        call = link.call(wire.Connect(port))
        try:
            if not isinstance(await anext(call, None), wire.Note):
                raise GuestMisbehaved("the guest did not confirm the connection")
        except BaseException:
            call.close()
            raise
        return cls(call)

    async def read(self, at_most: int) -> bytes:
        """At least one byte, or b"" once the other side has ended."""
        while not self._held and not self._at_end:
            event = await anext(self._call, None)
            if isinstance(event, wire.Data):
                self._held = event.data
            elif event is None or event.body.get("eof"):
                self._at_end = True
        data, self._held = self._held[:at_most], self._held[at_most:]
        return data

    async def write(self, data: bytes) -> None:
        """Returns when the data was sent. Data after the end of the connection is dropped."""
        await self._call.send(data)

    def end(self) -> None:
        """Half-close: no more will be written, but it can still be read."""
        self._call.end_input()

    def close(self) -> None:
        self._call.close()


# Bytes of one answer on the wire: some 250,000 files. Keeps a guest from filling the host's memory.
NOTES_LIMIT = 64 * 1024 * 1024
MAX_CONTEXT = 20  # lines: with what they are cut to (guest/search.py), they fit into a frame


class BoxFiles:
    """File operations of one box. Requests are validated, and so are the guest's answers."""

    def __init__(self, links: Links) -> None:
        self._links = links

    @property
    def _link(self) -> Link:
        return self._links.current

    async def read(self, o: op.ReadFile) -> AsyncGenerator[bytes, None]:
        length = None if o.length is None else whole_of("length", o.length)
        limit = None if o.limit is None else whole_of("limit", o.limit)
        request = wire.Read(path_of(o.path), whole_of("offset", o.offset), length, limit)
        pieces = _pieces(self._link.call(request), limit)
        await anext(pieces)  # so that errors are raised here, not by the first read
        return pieces

    async def write(self, o: op.WriteFile) -> int:
        if o.mode is not None and not 0 <= whole_of("mode", o.mode) <= 0o1777:
            raise InvalidRequest(f"not a mode for a file in a box: {o.mode:#o}")
        expect = None if o.expect is None else text_of("what is expected", o.expect)
        request = wire.Write(path_of(o.path), o.mode, bool(o.append), expect)
        async with self._link.call(request) as call:
            feeding = asyncio.ensure_future(call.feed(o.data))
            try:
                async for _ in call:
                    pass
            finally:
                feeding.cancel()
                failures = await asyncio.gather(feeding, return_exceptions=True)
            for failure in failures:
                if isinstance(failure, Exception):
                    raise failure
            return guest_field(call.result, "written", int)

    async def edit(self, o: op.EditFile) -> int:
        old = text_of("the old text", o.old, nul=True)
        new = text_of("the new text", o.new, nul=True)
        answer = await self._link.ask(wire.Edit(path_of(o.path), old, new, bool(o.replace_all)))
        return guest_field(answer, "replaced", int)

    async def stat(self, o: op.StatFile) -> Entry:
        return _entry(await self._link.ask(wire.Stat(path_of(o.path))))

    async def make_dir(self, o: op.MakeDir) -> bool:
        return guest_field(await self._link.ask(wire.Mkdir(path_of(o.path))), "created", bool)

    async def move(self, o: op.MoveFile) -> None:
        await self._link.ask(wire.Move(path_of(o.path), path_of(o.to), bool(o.overwrite)))

    async def remove(self, o: op.RemoveFile) -> None:
        await self._link.ask(wire.Remove(path_of(o.path), bool(o.recursive)))

    async def search(self, o: op.SearchFiles) -> list[Match]:
        request = wire.Search(
            path_of(o.path),
            text_of("a pattern", o.pattern),
            None if o.glob is None else text_of("a glob", o.glob),
            bool(o.ignore_case),
            whole_of("limit", o.limit, least=1),
            None if o.type is None else text_of("a type", o.type),
            _lines_around(o.context),
            bool(o.gitignore),
            seconds_of(o.timeout),
        )
        return [_match(note) async for note in self._notes(request)]

    async def glob(self, o: op.GlobFiles) -> list[str]:
        if o.kind is not None and o.kind not in FILE_KINDS:
            raise InvalidRequest(f"a kind is one of {', '.join(FILE_KINDS)}, not {o.kind!r}")
        request = wire.Glob(
            path_of(o.path),
            text_of("a pattern", o.pattern),
            o.kind,
            bool(o.gitignore),
            bool(o.newest),
        )
        paths = [guest_field(note, "path", str) async for note in self._notes(request)]
        return paths if o.newest else sorted(paths)

    async def diff(self, o: op.DiffFiles) -> str:
        request = wire.Diff(path_of(o.a), path_of(o.b), _lines_around(o.context))
        return "".join([guest_field(note, "text", str) async for note in self._notes(request)])

    async def list(self, o: op.ListFiles) -> list[Entry]:
        request = wire.List(path_of(o.path), whole_of("depth", o.depth, least=1))
        return [_entry(note) async for note in self._notes(request)]

    async def watch(self, o: op.WatchFiles) -> AsyncGenerator[Change | None, None]:
        return _changes(self._link.call(wire.Watch(path_of(o.path), bool(o.recursive))))

    async def _notes(self, request: wire.GuestRequest) -> AsyncIterator[dict[str, object]]:
        size = 0
        async with self._link.call(request) as call:
            async for event in call:
                size += wire.cost(event)
                if size > NOTES_LIMIT:
                    raise LimitReached("too much for one answer: request a smaller part")
                if isinstance(event, wire.Note):
                    for note in guest_field(event.body, "found", list):
                        if not isinstance(note, dict):
                            raise GuestMisbehaved(f"malformed file from guest: {note!r:.100}")
                        yield note


async def _pieces(call: GuestCall, limit: int | None) -> AsyncGenerator[bytes, None]:
    """First an empty piece, once the guest has begun to answer; then the content."""
    async with call:
        event = await anext(call, None)
        yield b""
        size = 0
        while event is not None:
            if isinstance(event, wire.Data):
                size += len(event.data)
                if limit is not None and size > limit:
                    raise GuestMisbehaved(f"the guest sent more than {limit} bytes")
                yield event.data
            event = await anext(call, None)


async def _changes(call: GuestCall) -> AsyncGenerator[Change | None, None]:
    async with call:
        async for event in call:
            if isinstance(event, wire.Note):
                if event.body.get("ready"):
                    yield None
                else:
                    kind: object = guest_field(event.body, "kind", str)
                    if kind not in CHANGE_KINDS:
                        raise GuestMisbehaved(f"malformed change from guest: {kind!r:.100}")
                    yield Change(guest_field(event.body, "path", str), kind)


def _lines_around(value: object) -> int:
    if (lines := whole_of("context", value)) > MAX_CONTEXT:
        raise InvalidRequest(f"context is at most {MAX_CONTEXT} lines, not {lines}")
    return lines


def _match(note: dict[str, object]) -> Match:
    before, after = guest_field(note, "before", list), guest_field(note, "after", list)
    if not all(isinstance(line, str) for line in (*before, *after)):
        raise GuestMisbehaved("malformed match from guest")
    return Match(
        guest_field(note, "path", str),
        guest_field(note, "line", int),
        guest_field(note, "text", str),
        tuple(before),
        tuple(after),
    )


def _entry(note: dict[str, object]) -> Entry:
    modified, target = note.get("modified"), note.get("target")
    kind: object = guest_field(note, "kind", str)
    if (
        kind not in FILE_KINDS
        or not isinstance(modified, (int, float))
        or not abs(modified) < 1 << 62  # neither NaN nor larger than a float
        or not isinstance(target, (str, type(None)))
    ):
        raise GuestMisbehaved("malformed file from guest")
    return Entry(
        path=guest_field(note, "path", str),
        kind=kind,
        size=guest_field(note, "size", int),
        mode=guest_field(note, "mode", int),
        modified=float(modified),
        uid=guest_field(note, "uid", int),
        gid=guest_field(note, "gid", int),
        target=target,
    )
