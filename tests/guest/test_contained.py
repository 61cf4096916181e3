"""The guest as the first process of a container, in what an engine would have made for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hutch import wire
from hutch.backends.linux import seccomp
from hutch.backends.namespaces import SocketStream
from hutch.engine.link import Link
from hutch.errors import BoxLost
from hutch.guest.relay import HELLO, NAME, RELAY
from hutch.images.bundle import Bundle, build

MISSING = (
    "needs root, to make namespaces"
    if os.getuid()
    else "needs unshare, nsenter and setpriv: apt-get install util-linux"
    if not all(map(shutil.which, ("unshare", "nsenter", "setpriv")))
    else ""
)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

UID = 0x20000001
UNSHARE = ["unshare", "--pid", "--mount", "--net", "--ipc", "--fork"]
# What a program needs to have no rights: this is how an engine starts the first one.
ENTER = (
    "mount -t proc proc /proc && mount -t tmpfs -o mode=1777 none /run || exit 99; "
    f"exec setpriv --reuid={UID} --regid={UID} --clear-groups --bounding-set=-all "
    '--inh-caps=-all -- "$@"'
)
SECONDS = 60


@pytest.fixture(scope="module")
def shelf() -> Iterator[Path]:
    """Where the users of boxes can read, unlike the folders of pytest."""
    with tempfile.TemporaryDirectory(prefix="hutch-bundles-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def bundle(shelf: Path) -> Bundle:
    return build(shelf, {"filter": seccomp.build()})


@pytest.fixture
def ground() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hutch-contained-") as folder:
        os.chmod(folder, 0o755)
        os.mkdir(f"{folder}/work")
        os.chown(f"{folder}/work", UID, UID)
        yield Path(folder)


class Contained:
    """A container of sorts, and the host's side of it."""

    def __init__(self, bundle: Bundle, ground: Path, **orders: Any) -> None:
        self.bundle, self._ground = bundle, ground
        self._links: list[Link] = []
        self.listener: socket.socket | None = None
        self.spare: socket.socket | None = None
        wanted: dict[str, Any] = {
            "workdir": f"{ground}/work", "user": "user", "env": {"HOME": "/home/user"},
            "inherit": None, "rooms": [], "private": "/run/hutch",
            "limits": {"NPROC": 200, "NOFILE": 512}, "meeting": f"{ground}/sock",
            "filter": True, "gain": False, "owners": {}, "foreign": False, **orders,
        }  # fmt: skip
        argv = bundle.command("hutch.guest.contained", json.dumps(wanted), at=str(bundle.path))
        self.process = subprocess.Popen(
            [*UNSHARE, "sh", "-c", ENTER, "sh", *argv],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(os.environ) if "inherit" in orders else {"PATH": os.environ["PATH"]},
        )  # fmt: skip

    # --- meeting --------------------------------------------------------------------------------

    def listen(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f"{self._ground}/sock")
        os.chmod(f"{self._ground}/sock", 0o666)
        self.listener.listen(16)
        self.listener.setblocking(False)

    def leave(self) -> None:
        """As a host that dies: all of it ends at once."""
        if self.listener:
            self.listener.close()
            os.unlink(f"{self._ground}/sock")
            self.listener = None
        if self.spare:
            self.spare.close()
            self.spare = None

    async def met(self) -> socket.socket:
        assert self.listener
        sock, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        return sock

    async def connect(self) -> Link:
        """The spare becomes a link, and the next spare comes."""
        spare = self.spare or await self.met()
        spare.send(b"c")
        self._links.append(link := await Link.open(SocketStream(spare)))
        self.spare = await self.met()
        return link

    # --- relay ----------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Of its first process, as we see it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while self.process.poll() is None:
            if found := children.read_text():
                return int(found)
        raise ProcessLookupError

    def enter(self, user: int, *argv: str) -> list[str]:
        """The argv that has the engine run something in there, as this user."""
        nsenter = ["nsenter", "-t", str(self.pid), "-p", "-n", "-i", "-m"]
        as_user = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return [*nsenter, "setpriv", *as_user, "--bounding-set=-all", "--inh-caps=-all", *argv]

    def relay_argv(self) -> list[str]:
        return self.enter(
            RELAY, *self.bundle.command("hutch.guest.relay", at=str(self.bundle.path))
        )

    async def close(self) -> None:
        for link in self._links:
            await link.close()
        self.leave()
        self.kill()
        self.process.communicate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def relayed(box: Contained) -> AsyncIterator[Link]:
    """A link through the standard streams of a relay."""
    relay = await asyncio.create_subprocess_exec(
        *box.relay_argv(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert relay.stdin and relay.stdout

    class Stream:
        async def read(self, size: int) -> bytes:
            assert relay.stdout
            return await relay.stdout.read(size)

        async def write(self, data: bytes) -> None:
            assert relay.stdin
            relay.stdin.write(data)
            await relay.stdin.drain()

        def close(self) -> None:
            assert relay.stdin
            relay.stdin.close()

    await Stream().write(b"c")
    link = await Link.open(Stream())
    try:
        yield link
    finally:
        await link.close()
        # Its input has ended: so does the link, and so does it.
        assert await relay.wait() == 0


def with_box(
    bundle: Bundle, ground: Path, work: Callable[[Contained], Awaitable[None]], **orders: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(SECONDS):
            box = Contained(bundle, ground, **orders)
            try:
                if box.listener is None and orders.get("meeting", "") is not None:
                    box.listen()
                await work(box)
            finally:
                await box.close()

    asyncio.run(main())


async def run(link: Link, request: Any) -> tuple[dict[str, Any], str]:
    printed = b""
    async with link.call(request) as call:
        async for event in call:
            if isinstance(event, wire.Data):
                printed += event.data
        return call.result, printed.decode()


async def say(link: Link, *argv: str) -> str:
    return (await run(link, wire.Exec(list(argv))))[1]


async def gone(box: Contained) -> int:
    return await asyncio.to_thread(box.process.wait, SECONDS)


# --- what is done before anybody is answered ------------------------------------------------------


def test_a_program_runs_as_the_boxs_user_without_rights(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        status = dict(
            line.split(":\t", 1)
            for line in (await say(link, "cat", "/proc/self/status")).splitlines()
        )
        assert status["Uid"].split() == [str(UID)] * 4
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        limits = await say(link, "cat", "/proc/self/limits")
        assert "Max processes             200                  200" in limits
        assert "Max open files            512                  512" in limits
        assert await say(link, "sh", "-c", "echo $HOME $USER $PWD") == (
            f"/home/user user {ground}/work\n"
        )

    with_box(bundle, ground, work)


def test_a_program_has_none_of_the_guests_descriptors(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        found = await say(link, "sh", "-c", "ls -l /proc/$$/fd; ls -l /proc/$PPID/fd 2>&1")
        assert "socket" not in found and "oom" not in found and "denied" in found

    with_box(bundle, ground, work)


def test_programs_are_killed_for_memory_before_the_guest(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        own = Path(f"/proc/{box.pid}/oom_score_adj")
        assert own.read_text() == "0\n"
        for _ in range(3):  # its subreaper sees to it once it runs
            wait = "until grep -q ^1000 /proc/self/oom_score_adj; do :; done; echo first"
            assert await say(link, "sh", "-c", wait) == "first\n"
        _, printed = await run(link, wire.ShellCommand("main", "cat /proc/self/oom_score_adj"))
        assert printed in ("500\n", "1000\n")
        assert own.read_text() == "0\n"

    with_box(bundle, ground, work)


def test_a_program_can_neither_end_the_guest_nor_look_into_it(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        for number in (1, 2, 3, 6, 9, 10, 11, 14, 15, 19, 20, 34, 64):
            await run(link, wire.Exec(["sh", "-c", f"kill -{number} 1"]))
        await run(link, wire.Exec(["sh", "-c", "kill -9 -1"]))
        for name in ("mem", "environ", "fd", "maps", "exe"):
            result, _ = await run(link, wire.Exec(["sh", "-c", f"ls /proc/1/{name}/ >&2"]))
            assert result["exit_code"] != 0
        assert await say(link, "echo", "alive") == "alive\n"

    with_box(bundle, ground, work)


def test_it_exits_at_once_when_its_engine_says_so(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        await say(link, "sh", "-c", "trap '' TERM; setsid sleep 1000 & echo runs")
        os.kill(box.pid, signal.SIGTERM)
        assert await gone(box) == 0

    with_box(bundle, ground, work)


# As kill(1) does not: a sender may invent its own process id, if it also says that it is a queue.
FORGE = """
import ctypes, struct
info = struct.pack("=iiiiiI104x", 15, 0, -1, 0, 0, 0)
print(ctypes.CDLL(None).syscall(129, 1, 15, info))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_a_program_that_poses_as_its_engine_does_not_end_it(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        python = bundle.command("", at=str(bundle.path))[:-2]
        assert await say(link, *python, "-c", FORGE) == "0\n"
        assert await say(link, "echo", "alive") == "alive\n"

    with_box(bundle, ground, work, filter=False)


def test_a_program_can_be_told_to_end(bundle: Bundle, ground: Path) -> None:
    """The guest blocks that signal for itself only."""

    async def work(box: Contained) -> None:
        link = await box.connect()
        masks = "grep -E '^Sig(Blk|Ign)' /proc/self/status"
        for _, printed in (
            await run(link, wire.Exec(["sh", "-c", masks])),
            await run(link, wire.ShellCommand("main", masks)),
        ):
            values = [int(line.split()[1], 16) for line in printed.splitlines()]
            assert len(values) == 2 and not any(v >> (signal.SIGTERM - 1) & 1 for v in values)

    with_box(bundle, ground, work)


def test_programs_get_the_variables_of_the_image_where_only_the_engine_knows_them(
    bundle: Bundle, ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("OF_IMAGE", "1"), ("LD_PRELOAD", ""), ("HOSTNAME", "pod"),
        ("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("KUBERNETES_PORT_443_TCP_PORT", "443"),
        ("HOME", "/root"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)

    async def work(box: Contained) -> None:
        found = (await say(await box.connect(), "env")).splitlines()
        assert "OF_IMAGE=1" in found and "HOME=/home/user" in found
        others = ("LD_PRELOAD", "HOSTNAME", "KUBERNETES_")
        assert not [line for line in found if line.startswith(others)]

    with_box(bundle, ground, work, inherit=["LD_", "HOSTNAME", "KUBERNETES_"])


def test_the_last_folder_on_the_path_has_a_python_for_images_with_python3(
    bundle: Bundle, ground: Path
) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        last = (await say(link, "sh", "-c", "echo ${PATH##*:}")).strip()
        assert (await say(link, "readlink", f"{last}/python")) == "/usr/bin/python3\n"

    with_box(bundle, ground, work)


def test_what_loses_its_parent_is_not_left_a_zombie(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        await run(link, wire.Exec(["sh", "-c", "for n in 1 2 3; do (setsid sleep 0.1 &) ; done"]))
        while (await link.ask(wire.Activity()))["programs"]:
            await asyncio.sleep(0.05)
        assert " Z" not in await say(link, "sh", "-c", "cat /proc/[0-9]*/stat")

    with_box(bundle, ground, work)


@pytest.mark.parametrize(
    ("orders", "line"),
    [
        ({"limits": {"NOTHING": 1}}, "orders: "),
        ({"private": "/proc/hutch"}, "private folder: No such file or directory"),
        ({"owners": {"/": 12345}}, "volume: / belongs to user 0, and that of the server to 12345"),
    ],
)
def test_a_step_that_fails_ends_it_with_one_line_that_names_it(
    bundle: Bundle, ground: Path, orders: dict[str, Any], line: str
) -> None:
    async def work(box: Contained) -> None:
        assert await gone(box) == 1
        said = box.process.communicate()[1]
        assert (
            said.startswith(f"hutch: the guest could not start: {line}") and said.count("\n") == 1
        )

    with_box(bundle, ground, work, **orders)


def test_without_its_filter_it_does_not_start(shelf: Path, ground: Path) -> None:
    async def work(box: Contained) -> None:
        assert await gone(box) == 1
        assert ": seccomp: Invalid argument\n" in box.process.communicate()[1]

    with_box(build(shelf, {"filter": b"no filter"}), ground, work)


def test_on_a_kernel_that_is_not_linux_it_does_without(shelf: Path, ground: Path) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        for target in ("1", "-1"):  # of which gVisor would kill the guest
            _, said = await run(link, wire.Exec(["sh", "-c", f"kill -9 {target}"]))
            assert "not permitted" in said
        assert await say(link, "sh", "-c", "sleep 100 & kill -9 $! && echo gone") == "gone\n"

    with_box(build(shelf, {"filter": b"no filter"}), ground, work, foreign=True)


def test_without_a_filter_programs_may_gain_rights_if_that_was_asked_for(
    bundle: Bundle, ground: Path
) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        status = await say(link, "cat", "/proc/self/status")
        assert "NoNewPrivs:\t0\n" in status and "Seccomp:\t0\n" in status

    with_box(bundle, ground, work, filter=False, gain=True)


# --- hosts that come and go -----------------------------------------------------------------------


def test_the_next_link_takes_the_place_of_the_one_before(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        first = await box.connect()
        await run(first, wire.ShellCommand("main", "a=kept; cd /tmp"))
        running = first.call(wire.Exec(["sleep", "1000"]))
        await anext(running)
        second = await box.connect()
        with pytest.raises(BoxLost):
            async for _ in running:
                pass
        assert (await run(second, wire.ShellCommand("main", "echo $a $PWD")))[1] == "kept /tmp\n"

    with_box(bundle, ground, work)


def test_a_host_that_died_is_followed_by_the_next(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        await run(link, wire.ShellCommand("main", "a=kept"))
        await link.close()
        box.leave()
        box.listen()
        assert (await run(await box.connect(), wire.ShellCommand("main", "echo $a")))[1] == "kept\n"

    with_box(bundle, ground, work)


@pytest.mark.parametrize("words", [b"x", b"\0", b"f12", b"fx\n", b"f\n", b"f1.2.3\n", b"f" * 99])
def test_nonsense_is_hung_up_on_and_a_new_spare_comes(
    bundle: Bundle, ground: Path, words: bytes
) -> None:
    async def work(box: Contained) -> None:
        loop = asyncio.get_running_loop()
        spare = await box.met()
        spare.send(words)
        if words == b"f12":
            spare.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # it had not read all of it
            assert await loop.sock_recv(spare, 1) == b""
        spare.close()
        assert await say(await box.connect(), "echo", "served") == "served\n"

    with_box(bundle, ground, work)


def test_what_follows_the_word_is_the_links(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        spare = await box.met()
        spare.send(b"f5\nf7.25\n")
        box.spare = spare
        assert await say(await box.connect(), "echo", "served") == "served\n"

    with_box(bundle, ground, work)


def test_many_links_leave_no_descriptor_behind(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        async def count() -> int:
            return len(os.listdir(f"/proc/{box.pid}/fd"))

        link = await box.connect()
        await say(link, "true")
        link = await box.connect()
        await say(link, "true")
        before = await count()
        for n in range(60):
            if n % 3 == 0:
                await link.close()
            if n % 3 == 1 and box.spare:
                box.spare.close()
                box.spare = None
            link = await box.connect()
            await say(link, "true")
        while await count() > before:
            await asyncio.sleep(0.05)

    with_box(bundle, ground, work)


def test_without_a_host_it_ends_by_itself_and_takes_everything_along(
    bundle: Bundle, ground: Path
) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        pid = int(await say(link, "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"))
        assert pid > 1
        first, began = box.pid, time.monotonic()
        await link.close()
        box.leave()
        assert await gone(box) == 0
        assert time.monotonic() - began > 3  # it had waited for another one
        assert not Path(f"/proc/{first}").exists()

    with_box(bundle, ground, work)


def test_it_may_do_without_a_host_for_as_long_as_it_was_told(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        link = await box.connect()
        assert box.spare
        box.spare.send(b"f9\n")
        await say(link, "true")
        began = time.monotonic()
        await link.close()
        box.leave()
        assert await gone(box) == 0
        assert time.monotonic() - began > 7

    with_box(bundle, ground, work)


# --- relays ---------------------------------------------------------------------------------------


def test_a_relay_brings_the_host_to_the_guest(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        async with relayed(box) as link:
            await run(link, wire.ShellCommand("main", "a=kept"))
            assert (await link.ask(wire.Activity()))["programs"] == 0  # a relay is not one of them
        async with relayed(box) as link:
            assert (await run(link, wire.ShellCommand("main", "echo $a")))[1] == "kept\n"

    with_box(bundle, ground, work, meeting=None)


def test_much_goes_through_a_relay_both_ways_unchanged(bundle: Bundle, ground: Path) -> None:
    sent = os.urandom(1 << 20) * 24

    async def work(box: Contained) -> None:
        async with relayed(box) as link:
            received = bytearray()
            async with link.call(wire.Exec(["cat"], stdin=True)) as call:

                async def give() -> None:
                    await call.send(sent)
                    call.end_input()

                giving = asyncio.create_task(give())
                async for event in call:
                    if isinstance(event, wire.Data):
                        received += event.data
                await giving
            assert received == sent

    with_box(bundle, ground, work, meeting=None)


def test_a_program_of_the_box_is_no_relay(bundle: Bundle, ground: Path) -> None:
    code = (
        "import socket; s = socket.socket(socket.AF_UNIX)\n"
        f"s.connect({NAME!r}); s.send({HELLO + b'c'!r})\n"
        "try: print(s.recv(1))\n"
        "except ConnectionResetError: print(b'')"
    )

    async def work(box: Contained) -> None:
        *start, _, _ = box.bundle.command("a_module", at=str(box.bundle.path))
        async with relayed(box) as link:
            assert await say(link, *start, "-c", code) == "b''\n"
        inside = box.enter(UID, *start, "-c", code)
        ran = await asyncio.to_thread(subprocess.run, inside, capture_output=True, check=True)
        assert ran.stdout == b"b''\n"

    with_box(bundle, ground, work, meeting=None)


def test_programs_that_dial_and_say_nothing_do_not_keep_a_relay_out(
    bundle: Bundle, ground: Path
) -> None:
    code = (
        "import socket, time\nheld = []\n"
        "for n in range(100):\n"
        f" s = socket.socket(socket.AF_UNIX); s.connect({NAME!r}); held.append(s)\n"
        "print('held', flush=True); time.sleep(1000)"
    )

    async def work(box: Contained) -> None:
        *start, _, _ = box.bundle.command("a_module", at=str(box.bundle.path))
        async with relayed(box) as link:
            running = link.call(wire.Exec([*start, "-c", code]))
            async for event in running:
                if isinstance(event, wire.Data):
                    break
            async with relayed(box) as another:
                assert await say(another, "echo", "served") == "served\n"

    with_box(bundle, ground, work, meeting=None)


def test_a_relay_ends_with_the_guest(bundle: Bundle, ground: Path) -> None:
    async def work(box: Contained) -> None:
        relay = subprocess.Popen(
            box.relay_argv(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert relay.stdin and relay.stdout
        relay.stdin.write(b"c")
        assert await asyncio.to_thread(relay.stdout.read, 1)
        box.kill()
        assert await asyncio.to_thread(relay.wait, SECONDS) != 1
        relay.stdin.close()
        relay.stdout.close()

    with_box(bundle, ground, work, meeting=None)
