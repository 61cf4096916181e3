"""The keeper: what stands between the agent and each program it executes.

    agent ── keeper ── program ── whatever it starts
              └─────── ...and what that leaves behind

A keeper is a fork of the agent and a subreaper (prctl(2)): a grandchild that calls setsid() or
whose parent exits becomes the keeper's child, never the agent's. So the tree below a keeper is
exactly what its program started. It keeps one program at a time, says how that ended, waits
until nothing is left below it, and is then free for the next: a fork of the agent costs more
than all the rest of starting a program.

Nothing here touches the event loop it was forked from, and nothing here ever returns.
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
from typing import Any, NoReturn

from .agent import GuestConfig

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 4, 8, 15, 36

# What a program may be instead of an executed file: by name, a function that never returns.
# It is given its job.
Calls = dict[str, Callable[[dict[str, Any]], NoReturn]]
USER_CODE = ("kernel",)  # forked without a keeper, and stripped of every capability

# A job is its size, then JSON; its descriptors come along.
SIZE, FD = struct.Struct("=I"), struct.Struct("=i")
MAX_FDS = 16

# In containers, whom the kernel kills when memory runs out: programs first, then keepers and kept
# shells, then the guest. A fork is charged for memory, so it may be what makes memory run out. The
# guest is as expendable as a keeper while it forks one, and must not be as expendable as a program.
OOM_PROGRAM, OOM_KEEPER, OOM_GUEST = 1000, 500, 0

# The word of a keeper: what, and a number.
WORD = struct.Struct("=ci")
FORKED, RUNS, ENDED, FREE = b"p", b"r", b"x", b"f"
NO_FOLDER, FAILED = b"d", b"e"
NOT_KILLED = os.CLD_KILLED, 0x7F

# What the agent ignores, so that user code of the same uid cannot end it. A keeper takes these
# signals and does nothing: unlike what is ignored, that is not passed on to a program.
DEAF_TO = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGTSTP, signal.SIGTTIN,
    signal.SIGTTOU, signal.SIGIO, signal.SIGPWR,
)  # fmt: skip


# The signals that glibc keeps for its threads. Its posix_spawn leaves them ignored in what it
# starts, as one of our own ancestors may have been, and its sigaction does not touch them.
_SIGNALS_OF_LIBC = (32, 33)
_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}


def restore_signals_of_libc() -> None:
    """Have programs start with every signal at its default, these included."""
    number = _RT_SIGACTION.get(os.uname().machine)
    if number is None:
        return
    default = ctypes.create_string_buffer(64)  # struct sigaction: SIG_DFL, no flags, no mask
    for name in _SIGNALS_OF_LIBC:
        _libc.syscall(ctypes.c_long(number), ctypes.c_long(name), default, None, ctypes.c_long(8))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def keep(
    agent: socket.socket, config: GuestConfig, open_files: tuple[int, int], calls: Calls
) -> NoReturn:
    """A keeper's whole life: one job after the other, until the agent hangs up."""
    try:
        _leave_agent()
        _prctl(PR_SET_NAME, b"hutch-keeper", 0, 0, 0)
        # Nothing of the agent's may stay open here: least of all its socket to the host.
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
                _keep_one(agent, *job, config, groups, open_files, calls)
    finally:
        os._exit(0)


def become_unkept(
    say: int,
    job: dict[str, Any],
    fds: list[int],
    config: GuestConfig,
    open_files: tuple[int, int],
    calls: Calls,
) -> NoReturn:
    """The life of a fork that has no keeper: it is a subreaper itself, and so keeps its own tree.

    What it leaves behind when it ends is the agent's.
    """
    try:
        _leave_agent()
    except BaseException:
        os._exit(127)
    _become(say, job, fds, config, list(config.cgroups), open_files, calls)


def _leave_agent() -> None:
    gc.disable()  # a collection would touch, and so copy, every page of the agent
    signal.set_wakeup_fd(-1)
    adopt_orphans()
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for number in DEAF_TO:
        signal.signal(number, lambda number, frame: None)
    os.umask(0o022)


def _next(agent: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    room = socket.CMSG_SPACE(MAX_FDS * FD.size)
    data, rights, _, _ = agent.recvmsg(1 << 16, room, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    (size,) = SIZE.unpack_from(data)
    while len(data) < SIZE.size + size:
        if not (more := agent.recv(1 << 20)):
            return None
        data += more
    fds = [fd for _, _, some in rights for (fd,) in FD.iter_unpack(some)]
    return json.loads(data[SIZE.size :]), fds


def _keep_one(
    agent: socket.socket,
    job: dict[str, Any],
    fds: list[int],
    config: GuestConfig,
    groups: list[int],
    open_files: tuple[int, int],
    calls: Calls,
) -> None:
    try:
        hear, say = os.pipe()
        program = os.fork()
    except OSError as exc:
        # Perhaps only this keeper may not: where it shares its uid with user code, that can
        # take any right from it. So the next program gets another.
        agent.send(WORD.pack(FAILED, exc.errno or errno.EAGAIN))
        os._exit(1)
    if not program:
        # Said by the program itself, for it may be quicker to kill its keeper than that to speak.
        agent.send(WORD.pack(FORKED, os.getpid()))
        _become(say, job, fds, config, groups, open_files, calls)
    for fd in (say, *fds):
        os.close(fd)
    failure = os.read(hear, WORD.size)  # nothing if exec went well: that closed the other end
    os.close(hear)
    if config.oom >= 0 and not failure:
        _offer_to_oom_killer(program)
    agent.send(failure or WORD.pack(RUNS, 0))
    _wait_for_all(program, agent)
    agent.send(WORD.pack(FREE, 0))


def _wait_for_all(program: int, agent: socket.socket) -> None:
    while True:
        try:
            # Look first, say it, and only then collect: were we killed in between, the agent
            # would inherit what is not collected, with its true status.
            seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        except ChildProcessError:
            return
        assert seen
        # gVisor says of one that was stopped that a signal killed it which does not exist.
        how = seen.si_code, seen.si_status
        stopped = how[0] in (os.CLD_STOPPED, os.CLD_TRAPPED) or how == NOT_KILLED
        if seen.si_pid == program and not stopped:
            sign = 1 if seen.si_code == os.CLD_EXITED else -1
            agent.send(WORD.pack(ENDED, sign * seen.si_status))
        os.waitpid(seen.si_pid, os.WUNTRACED | os.WNOHANG)  # it may have been continued since
        if seen.si_pid == program and stopped:
            # Nobody is at a terminal to type `fg`: a stopped program would wait for ever.
            os.kill(program, signal.SIGCONT)


def _become(
    say: int,
    job: dict[str, Any],
    fds: list[int],
    config: GuestConfig,
    groups: list[int],
    open_files: tuple[int, int],
    calls: Calls,
) -> NoReturn:
    """The last steps before exec, or the call in its place, in the order of SECURITY.md."""
    what = FAILED
    try:
        for group in groups:
            os.write(group, b"0")
        os.setsid()
        # First out of the way of all that is wanted, then to where it is wanted.
        say = fcntl.fcntl(say, fcntl.F_DUPFD_CLOEXEC, 300)
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 300) for fd in fds]
        executable = {copies.pop()} if job["executable"] else set()
        for copy, wanted in zip(copies, job["fds"], strict=True):
            os.dup2(copy, wanted)
        close_all_but({*job["fds"], say, *executable})
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
        if not job["call"]:
            for fd in executable:
                with contextlib.suppress(PermissionError):  # a policy of the host's forbids it
                    os.execve(fd, job["argv"], job["env"])
            os.execvpe(job["argv"][0], job["argv"], job["env"])
        _do_what_exec_does(job["argv"][0], job["call"] in USER_CODE)
        if config.oom >= 0 and job["call"] in USER_CODE:
            _offer_to_oom_killer(os.getpid())
        if job["call"] in USER_CODE and config.may_switch_user and _has_capabilities():
            raise OSError(errno.EPERM, "it would keep capabilities of the guest's")
        os.close(say)
    except (OSError, ValueError) as exc:
        os.write(say, WORD.pack(what, getattr(exc, "errno", None) or errno.EINVAL))
        os._exit(127)
    except BaseException:
        os._exit(127)
    try:
        calls[job["call"]](job)
    finally:
        os._exit(127)


def _offer_to_oom_killer(pid: int) -> None:
    """Where programs share a memory limit with the guest: have this one be killed before it."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"%d" % OOM_PROGRAM)
    except OSError:
        pass  # it has ended, or is a kept shell, which nobody may look into


def _lose_capabilities() -> None:
    """As exec would for any user but root: capset(2) is not for us to call.

    The kernel takes the capabilities of who was root and is not any more.
    """
    _prctl(PR_SET_KEEPCAPS, 0, 0, 0, 0)
    os.setresuid(0, 0, 0)


def _has_capabilities() -> bool:
    header, held = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    return bool(_libc.capget(header, held) or any(held.raw))


def _do_what_exec_does(name: str, is_users: bool) -> None:
    """For a process that goes on with the memory it has. What is ours stays closed to others."""
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_DFL)
    _prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    if is_users:
        _prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # or its own /proc/self would not be its own


def close_all_but(wanted: set[int]) -> None:
    low = 0
    for fd in sorted(wanted):
        if fd > low:  # closerange(0, 0) closes everything
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 20)
