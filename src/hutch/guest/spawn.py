"""Programs: started, watched, and killed with everything they started.

A subreaper starts a program (see reaper.py) and reports on a socket how it ended. A preloaded
kernel has none: it is a fork of the agent and its own subreaper, and the agent waits for it. Its
orphans become the agent's children and are killed. If user code kills a subreaper (possible only
if box and agent share one uid), the program becomes the agent's child, and its status comes
from waitpid.

A program ends when its process ends. Pipes that a background child still holds are read and
discarded, so that the child neither blocks nor dies of SIGPIPE.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hutch import wire

from . import reaper as words
from .agent import GuestConfig, RequestError, Responder
from .procfs import (
    Moment,
    Row,
    below,
    children_of,
    helpers,
    kill_all,
    reads_stderr,
    row_of,
    send,
    table,
)
from .reaper import (
    DEAF_TO,
    FD,
    OOM_GUEST,
    OOM_SUBREAPER,
    SIZE,
    USER_CODE,
    WORD,
    Calls,
    ProgramJob,
    adopt_orphans,
    become_program,
    restore_signals_of_libc,
    run_subreaper,
)

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Idle subreapers: how many, and for how long. Forking the agent is most of the cost of starting a
# program, but an idle subreaper costs a box megabytes.
SPARE_SUBREAPERS = 2
SPARE_SECONDS = 5
KILL_PATIENCE = 10  # seconds for the kernel to end a tree that was killed


class ChildWatcher:
    """Reaps every child of this process, and calls back for those that are watched."""

    def __init__(self) -> None:
        self._waiting: dict[int, Callable[[int], None]] = {}
        self._batch: dict[int, int] = {}
        adopt_orphans()  # a guest need not be pid 1
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def watch(self, pid: int, ended: Callable[[int], None]) -> None:
        """Call `ended` with the wait status of a child; with SIGKILL if there is no such child."""
        if pid in self._batch:
            ended(self._batch[pid])
            return
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            ended(signal.SIGKILL)
        else:
            self._waiting[pid] = ended

    def awaits(self, pid: int) -> bool:
        return pid in self._waiting

    def _reap(self) -> None:
        # Reap all, then call back: an orphan whose subreaper is in the same batch is watched by the
        # callback of its subreaper. Statuses that nothing watches are dropped with the batch.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                break
            if not pid:
                break
            if os.WIFSTOPPED(status):
                # In a box with one uid, user code can stop a subreaper.
                send(pid, signal.SIGCONT)
                continue
            self._batch[pid] = status
        for pid, status in list(self._batch.items()):
            if ended := self._waiting.pop(pid, None):
                ended(status)
        self._batch.clear()


@dataclass(frozen=True)
class ProgramUser:
    uid: int
    gid: int
    home: str
    name: str


def identify(user: str, config: GuestConfig) -> ProgramUser:
    """Look up a user of this box: a name in its /etc/passwd, or a number.

    Raises RequestError if there is no such user, or programs may not run as that user.
    """
    rows = _passwd()
    if user == config.user and not config.may_switch_user:
        # The only user of the box, whatever the image calls it.
        known = next((row for row in rows if int(row[2]) == os.getuid()), None)
        name = known[0] if known and _is_number(user) else user
        return ProgramUser(os.getuid(), os.getgid(), known[5] if known else "/", name)
    for fields in rows:
        if user in (fields[0], fields[2]):
            identity = ProgramUser(int(fields[2]), int(fields[3]), fields[5], fields[0])
            break
    else:
        number = int(user) if _is_number(user) else -1
        if not 0 <= number < 65534 and number != os.getuid():
            raise RequestError("invalid_request", f"no user {user!r} in this box")
        identity = ProgramUser(int(user), int(user), "/", user)
    if identity.uid == os.getuid() and config.may_switch_user:
        raise RequestError("invalid_request", f"user {user!r} is reserved for the guest")
    if not config.may_switch_user and identity.uid != os.getuid():
        raise RequestError(
            "invalid_request",
            f"this box has one user, {config.user!r}: running as {user!r} needs a range of user "
            "ids, which the namespaces backend has when it is run by root",
        )
    return identity


def _passwd() -> list[list[str]]:
    """The valid lines of /etc/passwd. Not through NSS, which would load code of the image."""
    try:
        # Non-blocking: in a custom image it may be a FIFO.
        fd = os.open("/etc/passwd", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, errors="replace") as file:
            lines = file.read(256 * 1024).splitlines()
    except (FileNotFoundError, PermissionError):
        return []
    rows = [line.split(":") for line in lines]
    return [row for row in rows if len(row) == 7 and all(map(_is_number, row[2:4]))]


def _is_number(text: str) -> bool:
    """Whether it is a user id. Not -1, which tells setresuid to change nothing."""
    return text.isascii() and text.isdigit() and len(text) < 11 and int(text) < 1 << 31


@dataclass(eq=False)
class Program:
    """A started program. `exit_code` is None while it runs."""

    argv: list[str]
    subreaper: Subreaper | None  # None: it never had one (a forked kernel), or that is gone
    pid: int = 0
    exit_code: int | None = None  # as in a shell: 128+n for signal n
    signal: int = 0  # the one that ended it
    started: float = field(default_factory=time.time)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # ended, and all that it started
    when_ended: Callable[[], None] | None = None
    left_behind: Callable[[], list[Row]] | None = None  # lists the orphans of a forked kernel

    def finish(self, code: int) -> None:
        """Set how it ended: the exit code, or -n for signal n."""
        if self.exit_code is None:
            self.exit_code, self.signal = (code, 0) if code >= 0 else (128 - code, -code)
            self.ended.set()
            if self.when_ended:
                self.when_ended()

    def tree(self) -> list[Row]:
        """Itself and its live descendants."""
        if self.subreaper:
            return below(self.subreaper.pid)
        if self.exit_code is None:
            own = row_of(self.pid)
            return ([own] if own else []) + below(self.pid)
        return self.left_behind() if self.left_behind else []

    def children(self, since: Moment) -> list[Row]:
        return [row for row in self.tree() if row.pid != self.pid and since.before(row)]

    def keep_moving(self, since: Moment | None = None) -> None:
        """Continue processes that stopped, and hang up on those that wait for a key forever.

        At a terminal, a user would do both. `since`: only processes that started after that.
        """
        if self.subreaper:
            send(self.subreaper.pid, signal.SIGCONT)
        for row in self.tree():
            if since is None or since.before(row):
                if row.state == "T":
                    send(row.pid, signal.SIGCONT)
                elif row.state == "S" and reads_stderr(row.pid):
                    send(row.pid, signal.SIGHUP)


class Programs:
    """Starts programs in this box as its user."""

    def __init__(self, config: GuestConfig, children: ChildWatcher, calls: Calls) -> None:
        self.config = config
        self.children = children
        self._calls = calls
        self.env: dict[str, str] = {}  # for every program, from the host
        self._spare: dict[Subreaper, asyncio.TimerHandle] = {}
        self._burials: set[asyncio.Future[None]] = set()
        self._unreadable: dict[str, int | None] = {}  # by path: a descriptor
        gc.freeze()  # pages that the collector of a fork never touches are never copied
        # Background children hold pipes of ours open, so we need as many descriptors as we can get.
        # Programs get the original limit.
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._open_files[1], self._open_files[1]))

    def __repr__(self) -> str:
        return f"<Programs, {len(self._spare)} subreapers free>"

    async def set_env(self, request: wire.SetEnv, responder: Responder) -> dict[str, object]:
        self.env = request.env
        return {}

    async def start(
        self,
        argv: list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        fds: dict[int, int],
        tty: bool = False,
        call: str | None = None,
        executable: int | None = None,
    ) -> Program:
        """Start a program. Returns once it runs. Raises RequestError or OSError if it cannot.

        `fds` maps descriptors of the program to ours. With a `call`, a fork runs that function of
        `calls` instead of executing a file. With an `executable`, that descriptor is executed, and
        argv[0] is only the name of the program.
        """
        if not argv or not argv[0]:
            raise RequestError("invalid_request", "an empty command")
        who = identify(user or self.config.user, self.config)
        path = self.config.env.get("PATH") or DEFAULT_PATH
        full_env = {
            "HOME": who.home,
            "USER": who.name,
            "LOGNAME": who.name,
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",  # so that output before a timeout is not lost
            "TERM": "xterm-256color" if tty else "dumb",
            "SHELL": "/bin/sh",
            **self.config.env,
            "PATH": f"{path}:{self.config.aliases}",
            **self.env,
            **(env or {}),
        }
        job: ProgramJob = {
            "argv": argv,
            "cwd": os.path.join(self.config.workdir, cwd or ""),
            "env": full_env,
            "uid": who.uid,
            "gid": who.gid,
            "fds": list(fds),
            "tty": tty,
            "call": call,
            "executable": executable is not None,
        }
        passed = [*fds.values(), *([] if executable is None else [executable])]
        if call in USER_CODE:
            return await self._fork_program(job, passed)
        subreaper = self._take_spare() or self._fork()
        program = Program(argv, subreaper)
        try:
            await subreaper.begin(program, job, passed)
        except BaseException:
            await asyncio.shield(self.kill(program))
            raise
        return program

    def unreadable(self, path: str) -> int | None:
        """A descriptor of an unreadable copy of a program (see below), or None. Cached."""
        if path not in self._unreadable:
            self._unreadable[path] = unreadable_copy(path)
        return self._unreadable[path]

    async def kill(self, program: Program) -> None:
        """End a program and everything it started. Returns when all of it is gone."""
        deadline = time.monotonic() + KILL_PATIENCE
        while not (program.gone.is_set() and program.ended.is_set()):
            if time.monotonic() > deadline:
                return  # stuck in the kernel: it ends with the box
            if program.subreaper:
                # User code of the same uid may have stopped it.
                send(program.subreaper.pid, signal.SIGCONT)
            kill_all(program.tree)
            event = program.ended if program.gone.is_set() else program.gone
            try:
                async with asyncio.timeout(0.05):
                    await event.wait()
            except TimeoutError:
                continue

    # --- a program that is a fork of ours ---------------------------------------------------

    async def _fork_program(self, job: ProgramJob, fds: list[int]) -> Program:
        """Fork without a subreaper in between: two forks of a large process would be slow."""
        reader, writer = os.pipe()
        try:
            with self._expendable():
                pid = os.fork()
            if not pid:
                become_program(writer, job, fds, self.config, self._open_files, self._calls)
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        program = Program(job["argv"], None, pid)
        program.left_behind = self._orphans
        self.children.watch(pid, lambda status: self._program_ended(program, status))
        try:
            failure = await _last_of(reader)
        except BaseException:
            await asyncio.shield(self.kill(program))
            raise
        if failure:
            await program.gone.wait()
            what, number = WORD.unpack(failure)
            raise _failure(what, number, job["argv"][0])
        return program

    def _program_ended(self, program: Program, status: int) -> None:
        program.finish(os.waitstatus_to_exitcode(status))
        self._burials.add(burial := asyncio.ensure_future(self._bury(program)))
        burial.add_done_callback(self._burials.discard)

    async def _bury(self, program: Program) -> None:
        """Kill the orphans of a program, which became our children."""
        deadline = time.monotonic() + KILL_PATIENCE
        while self._orphans() and time.monotonic() < deadline:
            kill_all(self._orphans)
            await asyncio.sleep(0.002)
        program.gone.set()

    def _orphans(self) -> list[Row]:
        """Our children that are not watched, and their descendants."""
        me = os.getpid()
        pids = children_of(me)
        if pids is None:
            pids = [row.pid for row in table() if row.parent == me]
        orphans = [row for pid in pids if not self.children.awaits(pid) and (row := row_of(pid))]
        return orphans + [row for orphan in orphans for row in below(orphan.pid)]

    # --- subreapers -------------------------------------------------------------------------

    def _fork(self) -> Subreaper:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                with self._expendable():
                    pid = os.fork()
                if not pid:
                    run_subreaper(theirs, self.config, self._open_files, self._calls)
        except OSError:
            ours.close()
            raise
        subreaper = Subreaper(pid, ours, self._release)
        helpers.add(pid)
        self.children.watch(pid, lambda status: self._subreaper_ended(subreaper))
        return subreaper

    @contextlib.contextmanager
    def _expendable(self) -> Iterator[None]:
        """Let a fork be killed before the agent when memory runs out.

        It inherits our oom_score_adj, which we raise for the moment of the fork. It cannot set its
        own: a process that is not dumpable cannot write to its files in /proc.
        """
        if self.config.oom < 0:
            yield
            return
        me = os.getpid()
        os.pwrite(self.config.oom, b"%d" % OOM_SUBREAPER, 0)
        try:
            yield
        finally:
            if os.getpid() == me:
                os.pwrite(self.config.oom, b"%d" % OOM_GUEST, 0)

    def _take_spare(self) -> Subreaper | None:
        while self._spare:
            subreaper, timer = self._spare.popitem()
            timer.cancel()
            if subreaper.is_up:
                return subreaper
        return None

    def _release(self, subreaper: Subreaper) -> None:
        if len(self._spare) < SPARE_SUBREAPERS:
            loop = asyncio.get_running_loop()
            self._spare[subreaper] = loop.call_later(SPARE_SECONDS, self._dismiss, subreaper)
        else:
            subreaper.hang_up()

    def _dismiss(self, subreaper: Subreaper) -> None:
        if timer := self._spare.pop(subreaper, None):
            timer.cancel()
        subreaper.hang_up()

    def _subreaper_ended(self, subreaper: Subreaper) -> None:
        subreaper.read()  # messages that it sent before it ended
        self._dismiss(subreaper)
        helpers.discard(subreaper.pid)
        program, subreaper.program = subreaper.program, None
        if program is None:
            return
        program.subreaper = None
        program.gone.set()
        if not program.pid:
            program.finish(-signal.SIGKILL)
        elif program.exit_code is None:
            # Its subreaper is gone: the program is our own child now.
            finish = program.finish
            self.children.watch(program.pid, lambda st: finish(os.waitstatus_to_exitcode(st)))


class Subreaper:
    """The agent's end of a subreaper: sends it jobs, and reads its messages."""

    def __init__(self, pid: int, sock: socket.socket, release: Callable[[Subreaper], None]) -> None:
        self.pid, self._sock, self._release = pid, sock, release
        self.program: Program | None = None
        self._loop = asyncio.get_running_loop()
        self._runs: asyncio.Future[None] | None = None  # being started; None before and after
        sock.setblocking(False)
        self._loop.add_reader(sock, self.read)

    async def begin(self, program: Program, job: ProgramJob, fds: list[int]) -> None:
        """Start a job. Returns once it runs; even if cancelled, the whole job is sent.

        Raises RequestError or OSError if the program cannot be started.
        """
        runs: asyncio.Future[None] = self._loop.create_future()
        self.program, self._runs = program, runs
        body = json.dumps(job).encode()
        data = SIZE.pack(len(body)) + body
        try:
            rights = b"".join(FD.pack(fd) for fd in fds)
            try:
                sent = self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except ConnectionError:
                sent = len(data)
                self.read()  # it was killed: this sets the exception of `runs`
            if sent < len(data):
                # A subreaper with half a job could neither be used again nor be told to exit.
                rest = self._loop.create_task(self._send(data[sent:]))
                await asyncio.shield(rest)
            await runs
        finally:
            if self._runs is runs:  # and not already that of the next program
                self._runs = None

    async def _send(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._sock, data)
        except OSError:
            pass  # it hung up: `read` notices

    @property
    def is_up(self) -> bool:
        return self._sock.fileno() >= 0

    def read(self) -> None:
        while self.is_up:
            try:
                data = self._sock.recv(WORD.size * 64)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            for what, number in WORD.iter_unpack(data):
                self._hear(what, number)
            if not data:
                self.hang_up()

    def hang_up(self) -> None:
        if self.is_up:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            # If it was killed while it waited for exec, the program is our own child now, and its
            # status tells how it ended.
            forked = self.program is not None and self.program.pid
            text = (
                "the program was killed while it was being started: the box is probably out of "
                "memory, which its files count towards"
            )
            self._settle(None if forked else RequestError("internal", text))

    def _hear(self, what: bytes, number: int) -> None:
        program = self.program
        if program is None:
            return
        if what == words.FORKED:
            program.pid = number
        elif what == words.RUNS:
            self._settle(None)
        elif what == words.ENDED:
            program.finish(number)
        elif what == words.FREE:
            self.program = program.subreaper = None
            program.finish(-signal.SIGKILL)
            program.gone.set()
            self._release(self)
        else:
            self._settle(_failure(what, number, program.argv[0]))

    def _settle(self, failure: Exception | None) -> None:
        if self._runs and not self._runs.done():
            if failure:
                self._runs.set_exception(failure)
            else:
                self._runs.set_result(None)


async def _last_of(pipe: int) -> bytes:
    """The message on a pipe; empty if all writers closed it without one."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(pipe, ready.set)
    try:
        await ready.wait()
        return os.read(pipe, WORD.size)
    finally:
        loop.remove_reader(pipe)
        os.close(pipe)


def _failure(what: bytes, number: int, name: str) -> Exception:
    missing = number in (errno.ENOENT, errno.ENOTDIR)
    if what == words.NO_FOLDER:
        if missing:
            return RequestError("not_found", "no such working directory in the box")
        return OSError(number, os.strerror(number), "the working directory")
    if missing:
        return RequestError("not_found", f"no such program in the box: {name}")
    return OSError(number, os.strerror(number), name)


def ignore_signals() -> None:
    """Ignore signals of user code. SIGKILL and SIGSTOP do not reach pid 1 from inside."""
    restore_signals_of_libc()
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)


# A copy of a program that can be executed but not read.
#
# Linux protects a process that runs a file which its user may not read: no other process of that
# user can open its memory or its descriptors in /proc. It is the effect of PR_SET_DUMPABLE=0 (see
# prctl(2)), but from the first instruction on: exec would reset the flag. What the process executes
# later is not protected, unless that is unreadable too.
#
# A shell needs this: its children have its uid, and one that could write to its memory could decide
# what every later command returns. A memfd has no name, so user code cannot change the mode of the
# copy back: the only ways to it are our descriptor and /proc/PID/exe, and both are closed to it.


MAX_SIZE = 32 * 1024 * 1024  # a shell has 1 MB; an image's may be anything
_ELF = b"\x7fELF"
_MFD_EXEC = 0x10  # since Linux 6.3; with vm.memfd_noexec=1, a memfd without it is not executable


def unreadable_copy(path: str) -> int | None:
    """A descriptor of an unreadable copy of a program, to execute.

    None if that is impossible: for a script (its interpreter has to read it), a file that we cannot
    read either, and on a machine that forbids executing a memfd. Raises OSError if it only failed
    this time, so that nothing a box does can make its shell run unprotected.
    """
    try:
        # Non-blocking: in a custom image it may be a FIFO.
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (PermissionError, FileNotFoundError):
        return None
    try:
        info = os.fstat(source)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_SIZE:
            return None
        if os.pread(source, len(_ELF), 0) != _ELF:
            return None
        return _copy(source, info.st_size, os.path.basename(path))
    except PermissionError:  # vm.memfd_noexec
        return None
    finally:
        os.close(source)


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_EXEC)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _copy(source: int, size: int, name: str) -> int:
    writable = _memfd(name)
    try:
        done = 0
        while done < size:
            sent = os.sendfile(writable, source, done, size - done)
            if not sent:
                raise OSError(errno.EIO, "the file shrank while it was copied")
            done += sent
        os.fchmod(writable, 0o111)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, seals)
        # The kernel executes nothing that is open for writing (ETXTBSY).
        return os.open(f"/proc/self/fd/{writable}", os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(writable)
