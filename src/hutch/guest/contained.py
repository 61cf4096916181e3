"""`python -m hutch.guest.contained ORDERS`: the guest as the first process of a container.

The container engine has set up root, namespaces, user and limits. The remaining steps are done
here, before any request is answered. If one fails, the container ends with a line that names it.
ORDERS is JSON, which every process of the box can read:

    workdir   working directory of programs
    user      name of the only user of the box, which the engine has started us as
    env       environment variables of programs, as the image has them
    inherit   null; or, where the engine does not tell the host which variables an image has,
              prefixes of names: programs also get all others that we were started with
    rooms     folders on the disk of the box
    owners    {} or, where the engine would make a folder that is missing, the user id that each
              folder of the host must have, by its path
    private   a folder to create for files of kept shells, on a writable file system
    limits    rlimits of programs, by name: {"NPROC": 256}
    meeting   path of the host's socket; null: the host connects by relay (see below)
    filter    whether to install our system call filter
    gain      whether set-user-ID files may gain privileges. Excludes `filter`, which requires
              no_new_privs
    foreign   whether the runtime has its own kernel, as gVisor has. Limits and filters that it
              does not support are skipped

Beside this package, the bundle holds `kernel/` with the code of kernels, and `filter`.
"""

from __future__ import annotations

from . import quick  # noqa: F401  it speeds up all other imports

# isort: split
import asyncio
import contextlib
import ctypes
import errno
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, NoReturn

from .agent import GuestConfig, Handlers, serve_all
from .groups import ControlGroups
from .main import serve_hosts
from .reaper import close_all_but
from .relay import HELLO, NAME, RELAY

# Resources that all containers of one uid share, limited as in the namespaces backend.
RLIMITS = {
    "CORE": 1,
    "MEMLOCK": 8 << 20,
    "MSGQUEUE": 0,
    "RTPRIO": 0,
    "NICE": 0,
    "SIGPENDING": 2048,
}

PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_NO_NEW_PRIVS = 4, 15, 38

_libc = ctypes.CDLL(None, use_errno=True)


def main(orders: str) -> NoReturn:
    step = "orders"
    # Until we can ask who sent it. A blocked signal is kept, even for process 1.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        settings = json.loads(orders)
        config = _config(settings)
        for name, act in _steps(settings, config):
            step = name
            act()
    except BaseException as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else repr(exc)
        os.write(2, f"hutch: the guest could not start: {step}: {reason}\n".encode()[:1000])
        os._exit(1)

    async def hosts(handlers: Handlers) -> None:
        _exit_when_told(settings["foreign"])
        await Acceptor(settings["meeting"]).serve(handlers)

    gc.enable()  # see quick.py
    serve_hosts(hosts, config, {})
    os._exit(0)


def _config(settings: dict[str, Any]) -> GuestConfig:
    limits = settings["limits"].items()
    return GuestConfig(
        workdir=settings["workdir"],
        user=settings["user"],
        env={**_inherited(settings["inherit"]), **settings["env"]},
        rooms=tuple(settings["rooms"]),
        private=settings["private"],
        limits=tuple((getattr(resource, f"RLIMIT_{name}"), value) for name, value in limits),
        loop=os.path.join(os.path.dirname(os.path.abspath(__file__)), "loop.sh"),
        lib=sys.prefix + "/kernel",
        aliases=sys.prefix + "/aliases",
        oom=_open_oom(),
        groups=ControlGroups(),
    )


def _inherited(others: list[str] | None) -> dict[str, str]:
    """The variables that we were started with, without those whose names begin like `others`."""
    if others is None:
        return {}
    return {n: value for n, value in os.environ.items() if not n.startswith(tuple(others))}


def _open_oom() -> int:
    try:
        return os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1  # it only affects which process is killed first


def _steps(settings: dict[str, Any], config: GuestConfig) -> list[tuple[str, Callable[[], None]]]:
    """The steps in order. Each relies on the ones before it."""
    return [
        ("bundle", _check_bundle),
        ("volume", lambda: _check_owners(settings["owners"])),
        ("private folder", lambda: os.makedirs(settings["private"], 0o700, exist_ok=True)),
        ("limits", lambda: _limit_ourselves(settings["foreign"])),
        ("name", lambda: _prctl(PR_SET_NAME, b"hutch-guest")),
        ("dumpable", lambda: _prctl(PR_SET_DUMPABLE, 0)),
        ("no new privileges", lambda: None if settings["gain"] else _prctl(PR_SET_NO_NEW_PRIVS, 1)),
        ("seccomp", lambda: _filter(settings["foreign"]) if settings["filter"] else None),
        ("signals", lambda: _forbid_signals() if settings["foreign"] else None),
        ("imports", _forbid_imports),
        ("descriptors", lambda: _leave_streams(config.oom)),
    ]


def _check_bundle() -> None:
    """Check that nothing is mounted over our code, through a symbolic link of the image."""
    with open("/proc/self/mountinfo", "rb") as file:
        mountpoints = [line.split()[4] for line in file]
    over = [path for path in mountpoints if path.startswith(os.fsencode(sys.prefix) + b"/")]
    if over:
        raise OSError(errno.EPERM, f"{os.fsdecode(over[0])} is hidden: the image has a link there")


def _check_owners(owners: dict[str, int]) -> None:
    for path, owner in owners.items():
        if (found := os.stat(path).st_uid) != owner:
            message = f"{path} belongs to user {found}, and that of the server to {owner}"
            raise OSError(errno.ENOENT, f"{message}: the claim is not what the server has there")


def _limit_ourselves(foreign: bool) -> None:
    for name, value in RLIMITS.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(number, (value, value))
        except ValueError:  # what Python raises for EPERM here
            if not foreign:
                raise
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _filter(foreign: bool) -> None:
    with open(sys.prefix + "/filter", "rb") as file:
        program = file.read()
    try:
        _install_filter(program)
    except OSError:
        if not foreign:
            raise


def _forbid_imports() -> None:
    """Everything is imported by now. A later import would run code of the image."""
    sys.meta_path.clear()
    sys.path.clear()


def _leave_streams(keep: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    close_all_but({0, 1, 2, keep} - {-1})


def _prctl(option: int, value: int | bytes) -> None:
    first = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    _check(_libc.prctl(option, first, *map(ctypes.c_ulong, (0, 0, 0))))


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter: operation, jump if, jump if not, value
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _FIRST_ARGUMENT = 0, 16  # offsets in struct seccomp_data
_ALLOW, _EPERM = 0x7FFF0000, 0x00050000 | errno.EPERM

_SET_MODE_FILTER, _TSYNC = 1, 1
_MACHINE = os.uname().machine
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SIGNALFD = {"x86_64": 289, "aarch64": 74}  # signalfd4
# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo
_SIGNALS = {"x86_64": (62, 200, 234, 129, 297), "aarch64": (129, 130, 131, 138, 240)}
_GUEST, _ALL_PROCESSES = 1, 0xFFFFFFFF


def _install_filter(program: bytes) -> None:
    """Install a seccomp(2) filter for this process and all its descendants. Raises OSError."""
    instructions = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions, and their address.
    count = len(program) // _INSTRUCTION.size
    header = struct.pack("@HP", count, ctypes.addressof(instructions))
    arguments = map(ctypes.c_ulong, (_SET_MODE_FILTER, _TSYNC))
    _check(_libc.syscall(ctypes.c_long(_SECCOMP[_MACHINE]), *arguments, header))


def _forbid_signals() -> None:
    """Forbid signals to process 1 and to all processes at once.

    Process 1 is the guest. Linux protects it; gVisor lets a program of the same user kill it.
    Raises OSError.
    """
    signals = _SIGNALS[_MACHINE]
    refused = (_GUEST, _ALL_PROCESSES)
    lines = [(_LOAD, 0, 0, _NUMBER)]
    for left, number in enumerate(reversed(signals)):
        # Jump to the second load, past the remaining comparisons and the first return.
        lines.insert(1, (_EQUALS, left + 1, 0, number))
    lines += [(_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for left, process in enumerate(reversed(refused)):
        lines.insert(len(signals) + 3, (_EQUALS, left + 1, 0, process))
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    _install_filter(b"".join(_INSTRUCTION.pack(*line) for line in lines))


_SIGNAL_INFO = struct.Struct("=IiiI112x")  # struct signalfd_siginfo: number, error, code, sender
_SENT_BY_KILL = 0  # SI_USER; with other codes, a program may write what it likes into the rest


def _exit_when_told(foreign: bool) -> None:
    """Exit at once on SIGTERM from outside of the box, as an engine sends before it kills.

    Programs of the box have our user, and may send it too: only a sender that has no process id
    here is outside. `foreign`: no program can send us a signal (see `_forbid_signals`).
    """
    mask = ctypes.c_uint64(1 << (signal.SIGTERM - 1))
    number = ctypes.c_long(_SIGNALFD[_MACHINE])
    size = ctypes.c_ulong(ctypes.sizeof(mask))
    fd = _libc.syscall(
        number, ctypes.c_long(-1), ctypes.byref(mask), size, ctypes.c_long(os.O_CLOEXEC)
    )
    _check(fd < 0)

    def read() -> None:
        _, _, code, sender = _SIGNAL_INFO.unpack(os.read(fd, _SIGNAL_INFO.size))
        if foreign or (code == _SENT_BY_KILL and not sender):
            os._exit(0)

    asyncio.get_running_loop().add_reader(fd, read)


# --- hosts --------------------------------------------------------------------------------------
#
# There are two ways to connect, and a box has one of them:
#
# * Rendezvous. The host listens on a socket in a folder that the box can see. The guest connects,
#   and always keeps one spare connection there. When that ends, it reconnects, ten times a second.
# * Relay. The guest listens on an abstract socket of its network namespace, and the container
#   engine starts `hutch.guest.relay` in the container for each connection of the host. A relay runs
#   under a user id that no program of the box can have, and proves that first.
#
# A connection holds the lease of the box while it is open. The host may send commands on it:
#
#   f, a number of seconds, newline   from now on, the box may live that long without a connection;
#                                     may be repeated
#   c                                 this becomes the connection for requests (see agent.py), in
#                                     place of the one before
#
# After anything else the guest hangs up.

FIRST = 60.0  # seconds to wait for the first connection
GRACE = 5.0  # seconds that a box always waits for the next connection
AGAIN = 0.1  # seconds between two attempts to reach a host
LOOK_AGAIN = 30.0  # seconds; timers stop while a machine is suspended, the boot clock does not
HELLO_PATIENCE = 5.0  # seconds for a relay to prove that it is one
MAX_UNPROVEN = 32  # connections; any program of the box can make them
MAX_SECONDS = 20  # digits

CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group


class Lease:
    """The connections that keep the box alive, and how long it may live without one."""

    def __init__(self) -> None:
        self._held = 0
        self._extended = 0.0  # the moment that a host has extended the lease to
        self._grace = _now() + FIRST
        self._released = asyncio.Event()

    def hold(self) -> None:
        self._held += 1

    def let_go(self) -> None:
        self._held -= 1
        self._grace = _now() + GRACE
        self._released.set()

    def extend(self, seconds: float) -> None:
        self._extended = _now() + seconds

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    async def over(self) -> None:
        """Returns when there was no connection for too long."""
        while self._held or (left := max(self._extended, self._grace) - _now()) > 0:
            self._released.clear()
            patience = None if self._held else min(left, LOOK_AGAIN)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._released.wait()


class Acceptor:
    """Serves hosts. `rendezvous` is the path of the host's socket; None: relays connect to us."""

    def __init__(self, rendezvous: str | None) -> None:
        self._rendezvous = rendezvous
        self._lease = Lease()
        self._links: asyncio.Queue[socket.socket | None] = asyncio.Queue()
        self._unproven: dict[asyncio.Task[None], None] = {}  # oldest first
        self._loop = asyncio.get_running_loop()

    async def serve(self, handlers: Handlers) -> None:
        """Answer hosts until there was no connection for too long."""
        await serve_all(self._connections(), handlers, self._lease.let_go)

    async def _connections(self) -> AsyncGenerator[socket.socket, None]:
        """Connections for requests. Each holds the lease."""
        tasks = [
            asyncio.create_task(
                self._connect(self._rendezvous) if self._rendezvous else self._listen()
            ),
            asyncio.create_task(self._wait_out()),
        ]
        try:
            while sock := await self._links.get():
                yield sock
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_out(self) -> None:
        await self._lease.over()
        self._links.put_nowait(None)

    # --- rendezvous -----------------------------------------------------------------------------

    async def _connect(self, path: str) -> None:
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.connect(path)
            except OSError:  # no listener, or its backlog is full
                sock.close()
            else:
                if await self._serve_connection(sock):
                    continue  # make the next spare connection at once
            await asyncio.sleep(AGAIN)

    # --- relays ---------------------------------------------------------------------------------

    async def _listen(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(NAME)
            listener.listen(64)
            listener.setblocking(False)
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        sock, _ = await self._loop.sock_accept(listener)
                    except OSError:  # out of descriptors, most likely
                        await asyncio.sleep(AGAIN)
                        continue
                    if len(self._unproven) >= MAX_UNPROVEN:
                        # A relay proves itself at once, so the oldest is not a relay.
                        next(iter(self._unproven)).cancel()
                    task = tasks.create_task(self._receive(sock))
                    self._unproven[task] = None
                    task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)

    async def _receive(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HELLO_PATIENCE):
                is_relay = await self._is_relay(sock)
        except (OSError, TimeoutError):
            is_relay = False
        except BaseException:
            sock.close()
            raise
        if not is_relay:
            sock.close()
            return
        if task := asyncio.current_task():
            self._forget(task)
        await self._serve_connection(sock)

    async def _is_relay(self, sock: socket.socket) -> bool:
        # Not SO_PEERCRED: gVisor answers with the credentials of the caller.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ready = asyncio.Event()
        self._loop.add_reader(sock, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(sock)
        data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        users = [
            CREDENTIALS.unpack(credentials)[1]
            for level, kind, credentials in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        return data == HELLO and users == [RELAY]

    # --- commands of a host ---------------------------------------------------------------------

    async def _serve_connection(self, sock: socket.socket) -> bool:
        """Serve a connection until it ends or becomes the link. True if it became the link."""
        with self._lease.held():
            try:
                is_link = await self._read_commands(sock)
            except OSError:
                is_link = False
            except BaseException:
                sock.close()
                raise
            if is_link:
                self._lease.hold()  # until the link has ended
                self._links.put_nowait(sock)
            else:
                sock.close()
        return is_link

    async def _read_commands(self, sock: socket.socket) -> bool:
        """Read commands, byte by byte: what follows the last one belongs to the agent."""
        while (what := await self._loop.sock_recv(sock, 1)) == b"f":
            number = b""
            while (digit := await self._loop.sock_recv(sock, 1)) != b"\n":
                number += digit
                if not (digit.isdigit() or digit == b".") or len(number) > MAX_SECONDS:
                    return False
            try:
                self._lease.extend(float(number))
            except ValueError:
                return False
        return what == b"c"


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    main(sys.argv[1])
