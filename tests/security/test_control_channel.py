"""Between host and guest: what user code can say there (nothing), and what a bad guest can."""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import hutch
from hutch import wire
from hutch.backends import linux
from hutch.backends.base import SocketStream
from hutch.engine.link import Link
from hutch.errors import BoxLost, GuestMisbehaved

from .hosts import LAST_WORDS_FILE, FarThing, Operator, alive, stop, wait_until

SOURCE = Path(hutch.__file__).parent

# A whole End frame for every stream there might be, on every descriptor there might be.
FORGE = """
import os, struct, glob
said = b'{"result":{"exit_code":0,"timed_out":false,"cwd":"/forged","restarted":false}}'
frames = b"".join(struct.pack("!IBI", len(said), 6, n) + said for n in range(1, 64))
own = [fd for fd in range(3, 1024)]
parents = glob.glob("/proc/[0-9]*/fd/*")
for place in own + parents:
    try:
        fd = place if isinstance(place, int) else os.open(place, os.O_WRONLY | os.O_NONBLOCK)
        if isinstance(place, int) or os.readlink(place).startswith("socket:"):
            os.write(fd, frames)
            print("wrote to", place)
    except OSError:
        pass
raise SystemExit(3)
"""


def test_user_code_cannot_forge_an_answer_of_the_guest(box: FarThing) -> None:
    result = box.commands.run(["python3", "-c", FORGE])
    assert (result.exit_code, result.stdout) == (3, "")
    box.files.write("/tmp/forge.py", FORGE)
    in_a_shell = box.shell.run("python3 /tmp/forge.py")
    assert (in_a_shell.exit_code, in_a_shell.stdout, in_a_shell.cwd) == (3, "", "/workspace")


@pytest.mark.parametrize(
    "trick",
    [
        r"printf '0\0/forged\0\0'; (exit 4)",
        r"for fd in $(ls /proc/self/fd); do printf '0\0/forged\0\0' >&$fd; done; (exit 4)",
        "exec 1>&- 2>&-; (exit 4)",
        "(sleep 0.3; echo late) & (exit 4)",
        "head -c 100000 /dev/urandom; (exit 4)",
        "echo __END__ 0; echo $'\\x1e0\\x1e'; false; (exit 4)",
    ],
)  # fmt: skip
def test_an_exit_code_cannot_be_forged_by_output(box: FarThing, trick: str) -> None:
    shown = box.shell.run(trick)
    assert (shown.exit_code, shown.cwd) == (4, "/workspace")
    assert box.commands.run(["bash", "-c", trick]).exit_code == 4
    assert box.shell.run("echo fine").stdout.endswith("fine\n")


def test_an_answer_too_long_to_send_is_not_silence(box: FarThing) -> None:
    fill = "PWD=/$(head -c 400000 /dev/zero | tr '\\0' x)"
    box.shell.run(fill)
    assert box.shell.run("echo here").stdout == "here\n"


@pytest.mark.parametrize("plant", ["mkfifo", "ln -s /proc/self/maps", "mkdir", "ln -s /dev/zero"])
def test_what_lies_where_a_shell_leaves_its_last_words_harms_nobody(
    box: FarThing, plant: str
) -> None:
    box.shell.run(f"words={LAST_WORDS_FILE}; {plant} $words", check=True)
    ended = box.shell.run("[ -e $words ] || [ -L $words ] && kill -9 $$")
    assert ended.exit_code == 137
    after = box.shell.run("pwd; env", timeout=30)
    assert (after.restarted, after.stdout.splitlines()[0]) == (True, "/workspace")
    assert "r-xp" not in after.stdout


def test_a_dead_guest_is_a_lost_box_and_never_a_result(operator: Operator) -> None:
    with operator.box() as box:
        handle = box.commands.run(["sleep", "1000"], background=True)
        guest = operator.guests()[-1]
        stop(guest)
        for act in (handle.wait, lambda: box.commands.run("echo ok"), lambda: box.shell.run("ls"),
                    lambda: box.files.read("x")):  # fmt: skip
            with pytest.raises(BoxLost):
                act()
        # The launcher hears of it when the kernel has taken down all of the box.
        assert wait_until(lambda: is_lost(box.stats), 60)


def is_lost(act: Callable[[], object]) -> bool:
    try:
        act()
    except BoxLost:
        return True
    return False


def test_a_guest_that_is_stopped_does_not_stop_the_others(operator: Operator) -> None:
    with operator.box() as frozen, operator.box() as other:
        stop(operator.guests()[-2], signal.SIGSTOP)
        try:
            assert other.commands.run("echo ok").stdout == "ok\n"
            with operator.box() as third:
                assert third.commands.run("echo ok").stdout == "ok\n"
        finally:
            frozen.close()


# C06, C07: nothing that user code can write is ever run by the guest.

PLANT = """
import os, site, sys
evil = "open('/tmp/evil-ran', 'a').write(__name__ + chr(10))"
places = ["/workspace", "/tmp", "/home/user", "/var/tmp", "/dev/shm", os.getcwd(),
          site.getusersitepackages()]
names = ["sitecustomize.py", "usercustomize.py", "resource.py", "socket.py", "json.py", "pwd.py",
         "encodings/__init__.py", "encodings/idna.py", "hutch/__init__.py", "evil.pth"]
for place in places:
    for name in names:
        path = os.path.join(place, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("import os; " + evil if name.endswith("pth") else evil)
for name in (".bashrc", ".profile", ".bash_profile", ".bash_logout", ".pythonrc"):
    with open("/home/user/" + name, "w") as file:
        file.write("echo shell >> /tmp/evil-ran")
"""


def test_nothing_that_user_code_plants_is_run_by_the_guest_or_before_a_command(
    box: FarThing,
) -> None:
    assert box.commands.run(["python3", "-I", "-c", PLANT]).exit_code == 0
    box.shell.run(
        "export LD_PRELOAD=/tmp/evil.so PYTHONPATH=/tmp BASH_ENV=~/.bashrc ENV=~/.profile"
    )
    box.shell.run("rm -f /tmp/evil-ran; kill -9 $$")
    box.commands.run(["true"])
    box.commands.run(["cat"], stdin="x")
    box.pty.open(["true"]).wait(timeout=30)
    box.files.write("/tmp/ü\udcff", "x")
    for act in (lambda: box.files.list("/", depth=2), lambda: box.files.search("root", "/etc"),
                lambda: box.files.glob("**/*.py"), lambda: box.files.stat("/tmp")):  # fmt: skip
        act()
    assert not box.files.exists("/tmp/evil-ran")


def test_user_code_cannot_replace_the_programs_of_its_box(box: FarThing) -> None:
    swap = (
        "for p in /bin/sh /usr/bin/python3 /etc/ld.so.preload /lib/x /.hutch/bash; do : > $p; done"
    )
    assert box.shell.run(swap).stderr.count("/") >= 5
    assert box.commands.run(["/bin/sh", "-c", "echo ok"]).stdout == "ok\n"


# C08: a guest that has been taken over. The parser itself is attacked in tests/wire.


def misbehave(act: Callable[[socket.socket], None]) -> Exception | None:
    """What the host's side of a link says about a guest that says hello and then does this."""

    async def host() -> Exception | None:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.send(wire.Connection(wire.GUEST).send(wire.Hello(wire.VERSION)))
            link = await Link.open(SocketStream(ours))
            await asyncio.to_thread(act, theirs)
            deadline = time.monotonic() + 60
            while link.failure is None and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            failure = link.failure
            await link.close()
        return failure

    return asyncio.run(host())


def test_a_guest_cannot_pass_descriptors_to_the_host() -> None:
    def send_descriptors(sock: socket.socket) -> None:
        fds = array.array("i", [0] * 200)
        # A frame that is never finished, so that all of it is read and nothing is refused.
        sock.sendmsg([struct.pack("!IBI", 1000, 7, 1)],
                     [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])  # fmt: skip
        assert wait_until(lambda: _unread(sock) == 0, 60)
        counted.append(len(os.listdir("/proc/self/fd")))
        sock.close()

    counted: list[int] = []
    before = len(os.listdir("/proc/self/fd"))
    misbehave(send_descriptors)
    assert counted[0] < before + 20


def _unread(sock: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!IBI", 0xFFFFFFFF, 3, 1),
        struct.pack("!IBI", 10, 6, 1) + b"[" * 10,
        struct.pack("!IBI", 4, 9, 1) + b"\x80\x04N.",
        struct.pack("!IBI", 2, 2, 7) + b"{}",
        b"\xff" * 4096,
    ],
    ids=["four gigabytes", "brackets", "a pickle", "a request", "noise"],
)
def test_a_guest_that_breaks_the_protocol_is_cut_off(data: bytes) -> None:
    assert isinstance(misbehave(lambda sock: sock.sendall(data) and None), GuestMisbehaved)


def test_a_box_whose_guest_broke_the_protocol_is_gone(operator: Operator) -> None:
    if os.geteuid():
        pytest.skip("only root may speak in the guest's place")
    with operator.box() as box:
        guest = operator.guests()[-1]
        stop(guest, signal.SIGSTOP)  # it does not notice that it was hung up on
        speak_as(guest, struct.pack("!IBI", 0xFFFFFFFF, 3, 1))
        with pytest.raises((GuestMisbehaved, BoxLost)):
            box.commands.run("true")
        assert wait_until(lambda: not alive(guest), 60)


def speak_as(pid: int, data: bytes) -> None:
    """Write to every socket of a process, as if it did."""
    libc, process = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    getfd = ctypes.c_long(linux.NUMBERS["pidfd_getfd"])
    for number in range(64):
        fd = libc.syscall(getfd, process, number, 0)
        if fd >= 0 and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            with socket.socket(fileno=fd) as sock, contextlib.suppress(OSError):
                sock.send(data, socket.MSG_DONTWAIT)
        elif fd >= 0:
            os.close(fd)
    os.close(process)
