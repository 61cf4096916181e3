"""Boxes that outlive who made them: until they are due, and not for a moment longer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hutch
from hutch.backends import builds, namespaces
from hutch.backends.base import Spec
from hutch.backends.linux.folders import open_folder
from hutch.backends.namespaces import NamespacesBackend, rendezvous
from hutch.errors import BackendUnavailable, BoxLost, IncompatibleBox
from security.hosts import NOBODY, WHO, alive, below, identity, interpreter, possible, stop
from security.hosts import wait_until as until

SOON = 10  # seconds; it takes milliseconds, and a machine may be very busy
PATIENCE = 60


def own_socket() -> str:
    """The name of the socket of a launcher of this build."""
    return rendezvous.name_of(builds.installed(), rendezvous.SOCKET)


def launcher_of(folder: str) -> int:
    """The pid of the process that listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        found = [*Path(folder).glob("launcher*.sock"), Path(folder, "none")]
        sock.connect(str(found[0]))
        given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", given)[0]
        return pid


class Host:
    """A process that has boxes, as root or as an ordinary user."""

    def __init__(self, who: str, source: str, folder: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [interpreter(who), f"{source}/lasting_host.py", folder],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True, **identity(who),
        )  # fmt: skip

    def do(self, expression: str) -> Any:
        self.tell(expression)
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], PATIENCE)[0], f"no answer: {expression}"
        answer = json.loads(self.process.stdout.readline() or '{"error": "the host died"}')
        if "error" in answer:
            raise Refused(answer["error"], answer.get("message"))
        return answer["value"]

    def tell(self, expression: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(OSError):
                pipe.close()


class Refused(Exception):
    """What the host says went wrong: the name of the error, and its message."""


class Stage:
    """A folder for a launcher, and the hosts that come to it."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.top = tempfile.mkdtemp(prefix=f"lasting-{os.getpid()}-")
        self.source, self.folder = f"{self.top}/src", f"{self.top}/data"
        package = Path(hutch.__file__).parent
        shutil.copytree(package, f"{self.source}/hutch",
                        ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
        shutil.copy(Path(__file__).parent / "lasting_host.py", self.source)
        os.chmod(self.top, 0o755)
        os.mkdir(self.folder, 0o700)
        if identity(who):
            os.chown(self.folder, NOBODY, NOBODY)
        self._hosts: list[Host] = []
        self.launchers: set[int] = set()

    def host(self) -> Host:
        self._hosts.append(Host(self.who, self.source, self.folder))
        return self._hosts[-1]

    def launcher(self) -> int:
        pid = launcher_of(self.folder)
        self.launchers.add(pid)
        return pid

    def left(self) -> list[str]:
        """What is still there of all that there was."""
        # A host that was killed leaves its copy of the code, and the next one removes it.
        found = [name for name in os.listdir(self.folder) if not name.startswith(builds.PREFIX)]
        mounts = Path("/proc/mounts").read_text().splitlines()
        found += [line for line in mounts if self.top in line]
        for launcher in self.launchers:
            found += [f"process {pid}" for pid in (launcher, *below(launcher)) if alive(pid)]
            for folder, names, _ in os.walk("/sys/fs/cgroup"):
                found += [f"{folder}/{n}" for n in names if n.startswith(f"hutch-{launcher}-")]
        return found

    def close(self) -> None:
        for host in self._hosts:
            host.kill()
        with contextlib.suppress(OSError):
            stop(self.launcher(), signal.SIGTERM)
        try:
            assert until(lambda: not self.left(), SOON), self.left()
        finally:
            shutil.rmtree(self.top)


@pytest.fixture(params=list(WHO), ids=list(WHO.values()))
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    possible(request.param)
    made = Stage(request.param)
    try:
        yield made
    finally:
        made.close()


def test_a_box_outlives_a_host_that_is_killed_and_the_next_one_goes_on(stage: Stage) -> None:
    first = stage.host()
    first.do("await start('kept', 600)")
    first.do("await shell('kept', 'cd /tmp; A=1; sleep 1000 &')")
    first.do("await shell('kept', 'sleep 0.1')")
    launcher = stage.launcher()
    first.kill()
    second = stage.host()
    assert second.do("await backend.list()") == ["kept"]
    second.do("await adopt('kept')")
    assert second.do("await shell('kept', 'echo $A $PWD $(jobs -p | wc -l)')") == "1 /tmp 1\n"
    assert stage.launcher() == launcher
    second.do("await backend.close()")
    assert until(lambda: not stage.left(), SOON), stage.left()


def test_a_box_goes_when_it_is_due_and_the_launcher_with_the_last_one(stage: Stage) -> None:
    host = stage.host()
    host.do("await start('short', 1)")
    host.do("await start('shorter', 0.1)")
    stage.launcher()
    host.kill()
    assert until(lambda: not stage.left(), SOON), stage.left()


def test_a_box_that_is_due_stays_while_somebody_looks_after_it(stage: Stage) -> None:
    host = stage.host()
    host.do("await start('kept', 0.01)")
    host.do("await start('other', 600)")
    assert host.do("await shell('kept', 'sleep 0.1; echo here')") == "here\n"
    host.kill()
    second = stage.host()
    assert second.do("await backend.list()") == ["other"]


def test_a_box_may_be_given_more_time_or_less(stage: Stage) -> None:
    host = stage.host()
    for name in ("more", "less"):
        host.do(f"await start('{name}', 60)")
    host.do("await (await backend.adopt('more')).outlive(600)")
    host.do("await (await backend.adopt('less')).outlive(0)")
    host.kill()
    assert stage.host().do("await backend.list()") == ["more"]


def test_a_box_that_nobody_gave_time_goes_with_its_host(stage: Stage) -> None:
    host = stage.host()
    host.do("await start('kept', 600)")
    host.do("await start('lent')")
    host.kill()
    second = stage.host()
    assert second.do("await backend.list()") == ["kept"]
    with pytest.raises(Refused, match="BoxLost"):
        second.do("await adopt('lent')")
    assert second.do("await start('lent', 600)") == "lent"  # the name is free again


def test_a_host_killed_while_it_makes_boxes_leaves_none_of_them(stage: Stage) -> None:
    host = stage.host()
    host.do("await start('kept', 600)")
    host.tell("await asyncio.gather(*(backend.start(Spec()) for _ in range(20)))")
    assert until(lambda: len(below(stage.launcher())) > 5, SOON)
    host.kill()
    second = stage.host()
    assert second.do("await backend.list()") == ["kept"]
    groups = [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names]
    mine = {name for name in groups if name.startswith(f"hutch-{stage.launcher()}-")}
    assert mine <= {f"hutch-{stage.launcher()}-kept"}


def test_a_launcher_that_is_killed_takes_its_boxes_and_is_replaced(stage: Stage) -> None:
    host = stage.host()
    host.do("await start('lost', 600)")
    launcher = stage.launcher()
    stop(launcher)
    with pytest.raises(Refused, match="BoxLost"):
        host.do("await shell('lost', 'true')")
    with pytest.raises(Refused, match="BoxLost"):
        host.do("await backend.adopt('lost')")
    assert host.do("await start('lost', 600)") == "lost"
    assert host.do("await shell('lost', 'echo new')") == "new\n"
    assert stage.launcher() != launcher


def test_a_launcher_and_a_host_that_are_killed_are_followed_by_others(stage: Stage) -> None:
    host = stage.host()
    host.do("await start('lost', 600)")
    launcher = stage.launcher()
    host.process.kill()
    stop(launcher)
    second = stage.host()
    assert second.do("await backend.list()") == []
    assert second.do("await start('lost', 600)") == "lost"


def test_a_launcher_that_is_asked_to_end_takes_everything_along(stage: Stage) -> None:
    host = stage.host()
    host.do("await start('one', 600)")
    launcher = stage.launcher()
    stop(launcher, signal.SIGTERM)
    assert until(lambda: not stage.left(), SOON), stage.left()
    with pytest.raises(Refused, match="BoxLost"):
        host.do("await shell('one', 'true')")


def test_a_launcher_whose_folder_was_emptied_ends_once_it_is_alone(stage: Stage) -> None:
    host = stage.host()
    host.do("await start('lost', 600)")
    stage.launcher()
    shutil.rmtree(stage.folder)
    host.kill()
    os.mkdir(stage.folder, 0o700)
    assert until(lambda: not stage.left(), SOON), stage.left()


def test_of_two_hosts_the_newer_has_the_boxes_and_the_older_is_told(stage: Stage) -> None:
    older, newer = stage.host(), stage.host()
    older.do("await start('kept', 600)")
    older.do("await start('lent')")
    assert newer.do("await backend.list()") == ["kept"]
    with pytest.raises(Refused, match="another process has taken the boxes over"):
        older.do("await start('more')")
    assert newer.do("await start('more')") == "more"


def test_hosts_that_come_at_once_find_one_launcher(stage: Stage) -> None:
    hosts = [stage.host() for _ in range(3)]
    for host in hosts:
        host.do("1")
    for number, host in enumerate(hosts):
        host.tell(f"await start('b{number}', 600)")
    assert all(select.select([host.process.stdout], [], [], PATIENCE)[0] for host in hosts)
    last = stage.host()
    answered = [json.loads(host.process.stdout.readline()) for host in hosts]
    assert {"value"} <= {key for answer in answered for key in answer}, answered
    last.do("await backend.list()")
    stage.launcher()


def test_a_launcher_has_nothing_of_its_host(stage: Stage) -> None:
    host = stage.host()
    host.do("await start('kept', 600)")
    launcher = stage.launcher()
    assert os.getsid(launcher) != os.getsid(host.process.pid)
    assert launcher not in below(host.process.pid)
    assert Path("/proc", str(launcher), "environ").read_bytes() == b""
    assert os.readlink(f"/proc/{launcher}/cwd") == "/"
    assert not [name for name in opened_by(launcher) if name.startswith("pipe:")]


def test_the_listener_is_closed_to_what_runs_in_a_box(stage: Stage) -> None:
    host = stage.host()
    host.do("await start('box', 600)")
    host.do("await shell('box', 'sleep 4321 & sleep 0.1')")
    inside = below(stage.launcher())
    program = next(pid for pid, name in inside.items() if name == "sleep")
    assert not sockets(program)
    guest = next(pid for pid, name in inside.items() if name == "hutch-guest")
    if os.geteuid() == 0:
        assert len(sockets(guest)) >= 2  # its host's, and the listener: they are not seen otherwise
    theirs = {sock for pid in inside if pid != guest for sock in sockets(pid)}
    assert len(sockets(guest) - theirs) >= 2 or os.geteuid() != 0


def opened_by(pid: int) -> set[str]:
    """What it has open; some of it may be closed just now."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in Path("/proc", str(pid), "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(fd))
    return found


def sockets(pid: int) -> set[str]:
    return {name for name in opened_by(pid) if name.startswith("socket:")}


# --- who may come to the folder -------------------------------------------------------------


def refusal(folder: Path) -> str:
    async def body() -> str:
        backend = NamespacesBackend(lasting=str(folder))
        try:
            await backend.start(Spec())
        except BackendUnavailable as exc:
            return str(exc)
        finally:
            await backend.leave()
        return ""

    return asyncio.run(body())


def test_a_folder_that_is_a_link_or_open_to_others_is_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    assert "not a link" in refusal(tmp_path / "link")
    assert "not a link" in refusal(Path(f"{tmp_path}/link/"))
    real.chmod(0o750)
    assert "chmod go=" in refusal(real)
    assert not list(real.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_folder_or_socket_of_somebody_else_s_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(folder / own_socket()))
        sock.listen()
        (folder / own_socket()).chmod(0o600)
        os.chown(folder / own_socket(), NOBODY, NOBODY)
        assert "another user" in refusal(folder)
    os.chown(folder, NOBODY, NOBODY)
    assert "another user" in refusal(folder)


def test_a_socket_that_is_a_link_a_file_or_open_to_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    spot = folder / own_socket()
    spot.symlink_to(tmp_path / "elsewhere")
    assert "not a socket" in refusal(folder)
    spot.unlink()
    spot.touch(0o600)
    assert "not a socket" in refusal(folder)
    spot.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(spot))
        sock.listen()
        spot.chmod(0o666)
        assert "open to other users" in refusal(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_launcher_hears_nobody_but_its_own_user(tmp_path: Path) -> None:
    async def body() -> None:
        backend = NamespacesBackend(lasting=str(tmp_path / "data"))
        try:
            box = await backend.start(Spec())
            # As if its folder were open, which it is not.
            for path in (tmp_path / "data", *(tmp_path / "data").parents):
                if path != Path("/"):
                    before[path] = path.stat().st_mode
                    path.chmod(path.stat().st_mode | 0o055)
            (tmp_path / "data" / own_socket()).chmod(0o666)
            said = await asyncio.to_thread(
                subprocess.run, [interpreter("user"), "-c", stranger, str(tmp_path / "data")],
                capture_output=True, text=True, check=False, **identity("user"),
            )  # fmt: skip
            assert said.stdout == "b''\n", said
            assert await box.stats()  # it is alive
        finally:
            for path, mode in before.items():
                path.chmod(mode)
            (tmp_path / "data" / own_socket()).chmod(0o600)
            await backend.close()

    before: dict[Path, int] = {}
    stranger = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.chdir(sys.argv[1])
sock.connect(next(name for name in os.listdir() if name.endswith(".sock")))
try:
    sock.send(b'{"request": 1, "do": "end"}')
    print(sock.recv(100))
except OSError:
    print(b"")
"""
    asyncio.run(body())


# --- versions -------------------------------------------------------------------------------


def test_a_launcher_of_another_version_says_so_and_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        first = NamespacesBackend(lasting=str(tmp_path / "data"))
        box = await first.start(Spec())
        await box.outlive(600)
        await first.leave()
        monkeypatch.setattr(rendezvous, "PROTOCOL", 99)
        second = NamespacesBackend(lasting=str(tmp_path / "data"))
        assert await second.list() == [box.id]
        with pytest.raises(IncompatibleBox, match=hutch.__version__):
            await second.adopt(box.id)
        await second.end()
        assert not list((tmp_path / "data").iterdir())
        assert await second.list() == []
        await second.close()

    asyncio.run(body())


@pytest.mark.parametrize("word", [b"", b"{", b'{"do": "start"}', b"[1]", b'{"do": "hello"}'])
def test_a_launcher_is_not_confused_by_what_is_no_greeting(tmp_path: Path, word: bytes) -> None:
    async def body() -> None:
        backend = NamespacesBackend(lasting=str(tmp_path / "data"))
        box = await backend.start(Spec())
        folder = open_folder(str(tmp_path / "data"))
        sock = rendezvous.dial(folder, builds.installed())
        os.close(folder)
        assert sock
        with sock:
            sock.send(word)
            sock.setblocking(True)
            sock.settimeout(SOON)
            said = sock.recv(1000)
            assert said == b"" or b"protocol" in said
        assert await backend.list() == [box.id]
        await backend.close()

    asyncio.run(body())


def test_what_a_killed_launcher_of_another_build_left_is_removed(tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path / "data"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(tmp_path / "data" / rendezvous.name_of("old", rendezvous.SOCKET)))
    for path in (tmp_path / "data").iterdir():
        path.chmod(0o600)
    (tmp_path / "data" / rendezvous.name_of("old", rendezvous.LOG)).touch(0o600)
    lock = tmp_path / "data" / rendezvous.name_of("old", rendezvous.LOCK)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a launcher that does not listen yet
        assert rendezvous.dial(folder, "old") is None and rendezvous.builds_in(folder) == ["old"]
    assert rendezvous.dial(folder, "old") is None
    assert not list((tmp_path / "data").iterdir())
    os.close(folder)


def test_a_box_that_could_not_be_killed_can_be_killed_later(tmp_path: Path) -> None:
    async def body() -> None:
        backend = NamespacesBackend(lasting=str(tmp_path / "data"))
        os.close(open_folder(str(tmp_path / "data")))
        path = tmp_path / "data" / rendezvous.name_of("old", rendezvous.SOCKET)
        path.touch(0o600)  # no socket, so it cannot be told whether the launcher is there
        backend._set_home("box", "old")
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match="not a socket"):
                await backend.kill("box")
        path.unlink()
        await backend.kill("box")
        assert not backend._homes
        await backend.close()

    asyncio.run(body())


# --- many -----------------------------------------------------------------------------------


def test_a_hundred_boxes_are_adopted_at_once(tmp_path: Path) -> None:
    async def body() -> None:
        backend = NamespacesBackend(lasting=str(tmp_path / "data"))
        boxes = await asyncio.gather(*(backend.start(Spec()) for _ in range(100)))
        await asyncio.gather(*(box.outlive(600) for box in boxes))
        await backend.leave()
        after = NamespacesBackend(lasting=str(tmp_path / "data"))
        try:
            names = await after.list()
            adopted = await asyncio.gather(*(after.adopt(name) for name in names))
            streams = await asyncio.gather(*(box.connect() for box in adopted))
            assert len(adopted) == 100
            for stream in streams:
                stream.close()
        finally:
            await after.close()

    asyncio.run(body())


def test_a_guest_that_takes_no_connections_is_lost_and_holds_nobody_up(tmp_path: Path) -> None:
    async def body() -> None:
        backend = NamespacesBackend(lasting=str(tmp_path / "data"))
        try:
            box, other = await backend.start(Spec()), await backend.start(Spec())
            stream = await box.connect()
            found = below(launcher_of(str(tmp_path / "data"))).items()
            guest = next(pid for pid, name in found if name == "hutch-guest")
            os.kill(guest, signal.SIGSTOP)
            streams = []
            with pytest.raises(BoxLost, match="hangs"):
                for _ in range(200):
                    streams.append(await box.connect())
            assert await other.stats()
            for each in (stream, *streams):
                each.close()
            await box.kill()
        finally:
            await backend.close()

    asyncio.run(body())


@pytest.mark.parametrize("step", ["take", "sweep", "release"])
def test_others_go_on_while_the_code_of_launchers_is_copied_or_removed(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, told = getattr(builds, step), []

    async def go() -> None:
        loop = asyncio.get_running_loop()

        def slow(*args: Any, **more: Any) -> Any:
            others = threading.Event()
            loop.call_soon_threadsafe(others.set)
            told.append(others.wait(20))
            return real(*args, **more)

        monkeypatch.setattr(builds, step, slow)
        backend = NamespacesBackend(lasting=str(tmp_path / "data"))
        await backend.keep_files()
        await backend.close()

    asyncio.run(go())
    assert told and all(told), "it was waited for in the loop that everybody shares"
    assert not [*(tmp_path / "data").glob("code-*")]


def test_a_loop_that_ends_while_a_launcher_starts_leaves_no_socket_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def slow(pid: int) -> None:
        reached.set()
        go_on.wait(PATIENCE)

    async def go() -> None:
        backend = NamespacesBackend(lasting=str(tmp_path / "data"))
        starting = asyncio.create_task(backend.start(Spec()))
        assert await asyncio.to_thread(reached.wait, PATIENCE)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert others > {starting}, "what a start has begun goes on in a task of its own"
        for task in others:
            task.cancel()  # as a loop does that ends
        await asyncio.gather(*others, return_exceptions=True)
        go_on.set()
        with theirs:
            theirs.settimeout(PATIENCE)
            assert theirs.recv(1) == b""
        await backend.close()

    monkeypatch.setattr(namespaces, "reap", slow)
    monkeypatch.setattr(namespaces, "spawn_lasting_launcher", lambda *_: (0, ours.detach()))
    asyncio.run(go())


def test_who_is_cancelled_while_the_code_is_copied_holds_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reached, go_on = builds.take, threading.Event(), threading.Event()

    def slow(folder: int) -> builds.Build:
        reached.set()
        go_on.wait(PATIENCE)
        return real(folder)

    async def go() -> None:
        backend = NamespacesBackend(lasting=str(tmp_path / "data"))
        with monkeypatch.context() as patch:
            patch.setattr(builds, "take", slow)
            keeping = asyncio.create_task(backend.keep_files())
            assert await asyncio.to_thread(reached.wait, PATIENCE)
            keeping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await keeping
            go_on.set()
        await backend.keep_files()  # it can be asked for again
        await backend.close()

    asyncio.run(go())  # returns when all threads are done
    folder = open_folder(str(tmp_path / "data"))
    builds.sweep(folder)
    os.close(folder)
    assert not [*(tmp_path / "data").glob("code-*")]
