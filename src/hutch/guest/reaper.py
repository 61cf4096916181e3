"""Subreapers: the processes between the agent and each program it starts.

    agent ── subreaper ── program ── its children
                 └─────── orphans of these

A subreaper is a fork of the agent with PR_SET_CHILD_SUBREAPER (prctl(2)): a grandchild that calls
setsid() or whose parent exits becomes its child, never the agent's. So the tree below a subreaper
is exactly what its program started. It runs one program at a time, reports how that ended, waits
until nothing is left below it, and is then reused for the next one: forking the agent costs more
than the rest of starting a program.

Code here runs in forks. It never touches the event loop of the agent, and never returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import struct
import termios
from collections.abc import Callable
from typing import NoReturn, TypedDict

from .agent import GuestConfig

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 4, 8, 15, 36


class ProgramJob(TypedDict):
    """A program to start, as the agent sends it to a subreaper: JSON, and descriptors beside it."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    uid: int
    gid: int
    fds: list[int]  # the numbers that the descriptors get in the program
    tty: bool  # whether descriptor 0 becomes its controlling terminal
    call: str | None  # a function of ours to run instead of a program
    executable: bool  # whether one more descriptor follows: the file to execute


# By name: functions that a fork runs instead of executing a program. They never return.
Calls = dict[str, Callable[[ProgramJob], NoReturn]]
USER_CODE = ("kernel",)  # forked without a subreaper, and stripped of every capability

# A job is its size, then JSON; its descriptors come along.
SIZE, FD = struct.Struct("=I"), struct.Struct("=i")
MAX_FDS = 16

# In containers, the order in which the OOM killer chooses: programs first, then subreapers and kept
# shells, then the guest. A fork is charged for memory, so forking itself may run out of it. While
# it forks a subreaper, the guest has the score of one, which must be below that of a program.
OOM_PROGRAM, OOM_SUBREAPER, OOM_GUEST = 1000, 500, 0

# A message from a subreaper: what happened, and a number.
WORD = struct.Struct("=ci")
FORKED, RUNS, ENDED, FREE = b"p", b"r", b"x", b"f"
NO_FOLDER, FAILED = b"d", b"e"
NOT_KILLED = os.CLD_KILLED, 0x7F

# Signals that the agent ignores, so that user code of the same uid cannot end it. A subreaper has
# empty handlers for them instead: unlike SIG_IGN, those are not inherited by a program.
DEAF_TO = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGIO,
    signal.SIGPWR,
)


# The signals that glibc reserves for its threads. Its posix_spawn leaves them ignored in the child,
# so we may have inherited that, and its sigaction refuses to change them.
_SIGNALS_OF_LIBC = (32, 33)
_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}


def restore_signals_of_libc() -> None:
    """Let programs start with every signal at its default, these included."""
    number = _RT_SIGACTION.get(os.uname().machine)
    if number is None:
        return
    default = ctypes.create_string_buffer(64)  # struct sigaction: SIG_DFL, no flags, no mask
    for name in _SIGNALS_OF_LIBC:
        _libc.syscall(ctypes.c_long(number), ctypes.c_long(name), default, None, ctypes.c_long(8))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_subreaper(
    agent: socket.socket, config: GuestConfig, open_files: tuple[int, int], calls: Calls
) -> NoReturn:
    """Run a subreaper: one job after the other, until the agent hangs up."""
    try:
        _leave_agent()
        _prctl(PR_SET_NAME, b"hutch-subreaper", 0, 0, 0)
        # No descriptor of the agent may stay open here, least of all its socket to the host.
        null = os.open("/dev/null", os.O_RDWR)
        channel, *groups = (
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (agent.fileno(), *config.cgroups)
        )
        for standard in range(3):
            os.dup2(null, standard)
        close_all_but({0, 1, 2, channel, *groups})
        with socket.socket(fileno=channel) as agent:
            agent.setblocking(True)
            while job := _next(agent):
                _run_job(agent, *job, config, groups, open_files, calls)
    finally:
        os._exit(0)


def become_program(
    writer: int,
    job: ProgramJob,
    fds: list[int],
    config: GuestConfig,
    open_files: tuple[int, int],
    calls: Calls,
) -> NoReturn:
    """Run a job in a fork without a subreaper: the fork is its own.

    A failure to start goes to the pipe `writer`. Orphans of the fork become the agent's children
    when it ends.
    """
    try:
        _leave_agent()
    except BaseException:
        os._exit(127)
    _become(writer, job, fds, config, list(config.cgroups), open_files, calls)


def _leave_agent() -> None:
    """Undo in a fork what belongs to the agent."""
    gc.disable()  # a collection would touch, and so copy, every page of the agent
    signal.set_wakeup_fd(-1)
    adopt_orphans()
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for number in DEAF_TO:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # see contained.py
    os.umask(0o022)


def _next(agent: socket.socket) -> tuple[ProgramJob, list[int]] | None:
    """The next job and its descriptors. None if the agent has hung up."""
    room = socket.CMSG_SPACE(MAX_FDS * FD.size)
    data, rights, _, _ = agent.recvmsg(1 << 16, room, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    (size,) = SIZE.unpack_from(data)
    while len(data) < SIZE.size + size:
        if not (more := agent.recv(1 << 20)):
            return None
        data += more
    fds = [fd for _, _, packed in rights for (fd,) in FD.iter_unpack(packed)]
    return json.loads(data[SIZE.size :]), fds


def _run_job(
    agent: socket.socket,
    job: ProgramJob,
    fds: list[int],
    config: GuestConfig,
    groups: list[int],
    open_files: tuple[int, int],
    calls: Calls,
) -> None:
    try:
        reader, writer = os.pipe()
        program = os.fork()
    except OSError as exc:
        # It may be only this subreaper that cannot fork: user code of the same uid can lower its
        # limits. So the next program gets another one.
        agent.send(WORD.pack(FAILED, exc.errno or errno.EAGAIN))
        os._exit(1)
    if not program:
        # Sent by the program itself: it could kill its subreaper before that reports the pid.
        agent.send(WORD.pack(FORKED, os.getpid()))
        _become(writer, job, fds, config, groups, open_files, calls)
    for fd in (writer, *fds):
        os.close(fd)
    failure = os.read(reader, WORD.size)  # empty after a successful exec, which closed the pipe
    os.close(reader)
    if config.oom >= 0 and not failure:
        _offer_to_oom_killer(program)
    agent.send(failure or WORD.pack(RUNS, 0))
    _wait_for_all(program, agent)
    agent.send(WORD.pack(FREE, 0))


def _wait_for_all(program: int, agent: socket.socket) -> None:
    while True:
        try:
            # Look, report, and only then reap: if we are killed in between, the agent inherits
            # the zombie with its true status.
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        except ChildProcessError:
            return
        assert child
        # gVisor reports a stopped child as killed by a signal that does not exist.
        how = child.si_code, child.si_status
        stopped = how[0] in (os.CLD_STOPPED, os.CLD_TRAPPED) or how == NOT_KILLED
        if child.si_pid == program and not stopped:
            sign = 1 if child.si_code == os.CLD_EXITED else -1
            agent.send(WORD.pack(ENDED, sign * child.si_status))
        os.waitpid(child.si_pid, os.WUNTRACED | os.WNOHANG)  # it may have been continued since
        if child.si_pid == program and stopped:
            # There is no terminal to type `fg` at: a stopped program would wait forever.
            os.kill(program, signal.SIGCONT)


def _become(
    writer: int,
    job: ProgramJob,
    fds: list[int],
    config: GuestConfig,
    groups: list[int],
    open_files: tuple[int, int],
    calls: Calls,
) -> NoReturn:
    """The last steps before exec, or before a call. SECURITY.md gives their order."""
    what = FAILED
    try:
        for group in groups:
            os.write(group, b"0")
        os.setsid()
        # In two steps, first above all wanted numbers: a number may be that of another descriptor.
        writer = fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, 300)
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 300) for fd in fds]
        executable = {copies.pop()} if job["executable"] else set()
        for copy, wanted in zip(copies, job["fds"], strict=True):
            os.dup2(copy, wanted)
        close_all_but({*job["fds"], writer, *executable})
        if job["tty"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if config.may_switch_user:
            os.setgroups([])
            os.setresgid(job["gid"], job["gid"], job["gid"])
            if job["call"] in USER_CODE:
                _lose_capabilities()
            os.setresuid(job["uid"], job["uid"], job["uid"])
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        for name, value in config.limits:
            resource.setrlimit(name, (value, value))
        what = NO_FOLDER
        os.chdir(job["cwd"])
        what = FAILED
        call = job["call"]
        if not call:
            for fd in executable:
                with contextlib.suppress(PermissionError):  # forbidden by a policy of the host
                    os.execve(fd, job["argv"], job["env"])
            os.execvpe(job["argv"][0], job["argv"], job["env"])
        _do_what_exec_does(job["argv"][0], call in USER_CODE)
        if config.oom >= 0 and call in USER_CODE:
            _offer_to_oom_killer(os.getpid())
        if call in USER_CODE and config.may_switch_user and _has_capabilities():
            raise OSError(errno.EPERM, "the fork would keep capabilities of the guest")
        os.close(writer)
    except (OSError, ValueError) as exc:
        os.write(writer, WORD.pack(what, getattr(exc, "errno", None) or errno.EINVAL))
        os._exit(127)
    except BaseException:
        os._exit(127)
    try:
        calls[call](job)
    finally:
        os._exit(127)


def _offer_to_oom_killer(pid: int) -> None:
    """Let a program be killed before the guest, with which it shares a memory limit."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"%d" % OOM_PROGRAM)
    except OSError:
        pass  # it has ended, or is a kept shell, whose files in /proc are closed


def _lose_capabilities() -> None:
    """Drop all capabilities without capset(2), as exec does for any user but root.

    The kernel clears the capabilities of a process that stops being root.
    """
    _prctl(PR_SET_KEEPCAPS, 0, 0, 0, 0)
    os.setresuid(0, 0, 0)


def _has_capabilities() -> bool:
    header, held = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    return bool(_libc.capget(header, held) or any(held.raw))


def _do_what_exec_does(name: str, is_users: bool) -> None:
    """Do for a fork what exec would do. Only user code becomes dumpable again."""
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_DFL)
    _prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    if is_users:
        _prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise its own /proc/self belongs to root


def close_all_but(wanted: set[int]) -> None:
    """Close all descriptors except these."""
    low = 0
    for fd in sorted(wanted):
        if fd > low:  # closerange(0, 0) closes everything
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 20)
