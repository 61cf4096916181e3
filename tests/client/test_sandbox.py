"""A box from outside: made, used, closed."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time

import pytest

from docker_of_tests import GRADE, for_a_box
from hutch import (
    AsyncSandbox,
    BackendUnavailable,
    BoxLost,
    HutchError,
    InvalidRequest,
    Mount,
    NotFound,
    Sandbox,
    factory,
)

pytestmark = pytest.mark.usefixtures("shared_box")  # which skips where there can be none


def python(code: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a program that uses Hutch, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip
    # A step of the loop took long: the first imports what belongs to a backend.
    done.stderr = re.sub(r"^Executing <.*> took [\d.]+ seconds\n", "", done.stderr, flags=re.M)
    return done


# --- making -----------------------------------------------------------------------------


def test_every_option_does_something(tmp_path):
    (tmp_path / "ws").mkdir()
    for_a_box(tmp_path / "ws")
    (tmp_path / "ro").mkdir()
    (tmp_path / "ro/f").write_text("shown")
    with Sandbox.create(
        image="host", memory="256m", cpus=0.5, pids=64, disk="32m", env={"A": "1 2"},
        workdir="/tmp/deep/er", user="user", workspace=str(tmp_path / "ws"),
        mounts=[f"{tmp_path}/ro:/data/ro:ro", Mount(f"{tmp_path}/ws", "/data/rw")],
        network="none", min_isolation="ns",
    ) as box:  # fmt: skip
        info = box.info
        assert (info.limits.memory, info.limits.cpus, info.limits.pids) == (256 << 20, 0.5, 64)
        assert (info.limits.disk, info.workdir, info.user) == (32 << 20, "/tmp/deep/er", "user")
        assert (info.image, info.backend, info.isolation) == ("host", factory.default(), GRADE)
        assert abs(info.created_at - time.time()) < 600
        assert box.commands.run("echo $A; pwd; id -un; cat /data/ro/f").stdout == (
            "1 2\n/tmp/deep/er\nuser\nshown"
        )
        assert box.commands.run("echo x > /data/ro/g").exit_code != 0
        box.commands.run("echo made > /workspace/f; echo too > /data/rw/g", check=True)
    assert (tmp_path / "ws/f").read_text() == "made\n"
    assert (tmp_path / "ws/g").read_text() == "too\n"
    assert (tmp_path / "ws/f").stat().st_uid == (tmp_path / "ws").stat().st_uid


@pytest.mark.parametrize(
    "size, expected",
    [
        ("64m", 64 << 20),
        ("0.5 GiB", 512 << 20),
        ("65536k", 64 << 20),
        (67108864, 64 << 20),
        ("67108864", 64 << 20),
        ("64MB", 64 << 20),
    ],
)
def test_sizes_can_be_written_in_many_ways(size, expected):
    with Sandbox.create(memory=size) as box:
        assert box.info.limits.memory == expected


BAD = [
    (dict(memory="lots"), InvalidRequest, "memory must be a number of bytes or text like '512m'"),
    (dict(memory=-1), InvalidRequest, "memory must be more than 0"),
    (dict(memory=1), InvalidRequest, "at least 16 MiB"),
    (dict(memory=1.5), InvalidRequest, "memory"),
    (dict(memory=True), InvalidRequest, "memory"),
    (dict(memory=None), InvalidRequest, "memory"),
    (dict(memory="9" * 400), InvalidRequest, "memory"),
    (dict(disk="2g"), InvalidRequest, "must fit"),
    (dict(disk="-5m"), InvalidRequest, "disk"),
    (dict(cpus=0), InvalidRequest, "cpus"),
    (dict(cpus=float("nan")), InvalidRequest, "cpus"),
    (dict(cpus="2"), InvalidRequest, "cpus"),
    (dict(pids=1), InvalidRequest, "pids"),
    (dict(pids=2.5), InvalidRequest, "pids"),
    (dict(image="no-such-image"), NotFound, "no-such-image"),
    (dict(image=""), HutchError, "image"),
    (dict(image="a\0b"), InvalidRequest, "NUL"),
    (dict(image=5), InvalidRequest, "image must be a name or a hutch.Image"),
    (dict(env={"A=B": "x"}), InvalidRequest, "environment variable"),
    (dict(env={"": "x"}), InvalidRequest, "environment variable"),
    (dict(env={"A": "x\0"}), InvalidRequest, "NUL"),
    (dict(env={"A": 5}), InvalidRequest, "must be text"),
    (dict(env={"A": "\ud800"}), InvalidRequest, "surrogate"),
    (dict(env="A=1"), InvalidRequest, "environment"),
    (dict(workdir="relative"), InvalidRequest, "absolute"),
    (dict(workdir=""), InvalidRequest, "cannot be empty"),
    (dict(workdir=5), InvalidRequest, "must be text"),
    (dict(workdir="/a\0b"), InvalidRequest, "NUL"),
    (dict(user="no such user"), InvalidRequest, "no such user"),
    (dict(user=""), InvalidRequest, "user"),
    (dict(user=1000), InvalidRequest, "user"),
    (dict(network="host"), InvalidRequest, "network"),
    (dict(mounts="/a:/b"), InvalidRequest, "list"),
    (dict(mounts=["/a"]), InvalidRequest, "HOST:BOX"),
    (dict(mounts=["/tmp:/x:sometimes"]), InvalidRequest, "HOST:BOX"),
    (dict(mounts=["/no/such/thing:/x"]), InvalidRequest, "no such file"),
    (dict(mounts=[5]), InvalidRequest, "HOST:BOX"),
    (dict(mounts=5), InvalidRequest, "list"),
    (dict(mounts=["/tmp:relative"]), InvalidRequest, "plain path"),
    (dict(mounts=["/tmp:/"]), InvalidRequest, "/"),
    (dict(mounts=["/tmp:/proc"]), InvalidRequest, "/proc"),
    (dict(mounts=["/tmp:/a/../../b"]), InvalidRequest, "plain path"),
    (dict(mounts=["/tmp:/x\0y"]), InvalidRequest, "plain path"),
    (dict(workspace="/no/such/folder"), InvalidRequest, "not a folder"),
    (dict(workspace="/etc/passwd"), InvalidRequest, "not a folder"),
    (dict(workspace=5), InvalidRequest, "workspace"),
    (dict(min_isolation="total"), InvalidRequest, "there are none, lsm, ns, gvisor, vm"),
    (dict(min_isolation=5), InvalidRequest, "there are"),
    (dict(min_isolation="vm"), BackendUnavailable, "'vm' was requested"),
    (dict(min_isolation="gvisor"), BackendUnavailable, "gives 'ns'"),
]  # fmt: skip


@pytest.mark.parametrize("options, error, message", BAD, ids=lambda o: str(o)[:40])
def test_a_box_that_cannot_be_is_refused_with_a_reason(options, error, message):
    before = [info.id for info in Sandbox.list()]
    with pytest.raises(error, match=message):
        Sandbox.create(**options)
    assert [info.id for info in Sandbox.list()] == before


@pytest.mark.parametrize(("args", "options"), [((), {}), (("python",), {}), ((), {"image": "x"})])
def test_who_calls_the_class_as_in_other_sdks_is_told_what_to_call(args, options):
    for kind in (Sandbox, AsyncSandbox):
        with pytest.raises(TypeError, match=rf"^start a box with {kind.__name__}\.create\(\), or"):
            kind(*args, **options)


def test_a_path_object_is_as_good_as_a_text(tmp_path):
    (tmp_path / "f").write_text("x")
    with Sandbox.create(workspace=for_a_box(tmp_path)) as box:
        assert box.files.read("f") == "x"


# --- lifetime ---------------------------------------------------------------------------


def test_leaving_the_with_closes_the_box():
    with Sandbox.create() as box:
        assert box.id in [info.id for info in Sandbox.list()]
        assert box.id in repr(box) and box.info.image in repr(box)
    assert box.id not in [info.id for info in Sandbox.list()]


def test_a_box_can_be_closed_twice_and_killed_after():
    box = Sandbox.create()
    box.close()
    box.close()
    box.kill()


def test_an_exception_in_the_with_closes_the_box_and_passes():
    with pytest.raises(ZeroDivisionError), Sandbox.create() as box:
        raise ZeroDivisionError
    with pytest.raises(BoxLost):
        box.commands.run("true")


def test_a_closed_box_is_lost_for_every_method(tmp_path):
    box = Sandbox.create()
    handle = box.commands.run("sleep 1000", background=True)
    terminal = box.pty.open("sleep 1000")
    shell = box.shell.open()
    stream = box.shell.stream("sleep 1000")
    box.close()
    (tmp_path / "f").write_text("")
    for use in (
        lambda: box.shell.run("true"), lambda: shell.run("true"), lambda: box.shell.open(),
        lambda: box.commands.run("true"), lambda: box.commands.run("true", background=True),
        lambda: box.commands.list(), lambda: box.stats(), lambda: box.read_output("o1"),
        lambda: handle.wait(), lambda: handle.stdout(), lambda: handle.send_stdin("x"),
        lambda: handle.kill(), lambda: terminal.resize(10, 10), lambda: next(iter(stream)),
        lambda: box.files.read("x"), lambda: box.files.write("x", "y"), lambda: box.files.list(),
        lambda: box.files.watch(), lambda: box.files.upload(tmp_path / "f", "x"),
        lambda: box.pty.open(), lambda: shell.close(),
    ):  # fmt: skip
        with pytest.raises(BoxLost, match="closed"):
            use()


def test_whoever_waits_when_a_box_is_closed_is_told():
    async def main() -> None:
        box = await AsyncSandbox.create()
        handle = await box.commands.run("sleep 1000", background=True)
        changes = await box.files.watch()
        waiting = [
            asyncio.create_task(box.shell.run("sleep 1000")),
            asyncio.create_task(box.commands.run("sleep 1000")),
            asyncio.create_task(handle.wait()),
            asyncio.create_task(handle.wait(on_stdout=print)),
            asyncio.create_task(anext(changes)),
        ]
        await box.commands.run("true")
        await box.close()
        for outcome in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30):
            assert isinstance(outcome, BoxLost), repr(outcome)

    asyncio.run(main())


def test_a_box_tells_what_it_uses(shared_box):
    shared_box.commands.run("sleep 1000", background=True)
    stats = shared_box.stats()
    assert stats.pids is None or stats.pids >= 1
    assert stats.memory is None or stats.memory > 0


def test_boxes_are_apart():
    with Sandbox.create() as one, Sandbox.create() as two:
        one.files.write("/tmp/f", "x")
        one.shell.run("export A=1")
        assert not two.files.exists("/tmp/f")
        assert two.shell.run("echo $A").stdout == "\n"
        one.close()
        assert two.commands.run("echo alive").stdout == "alive\n"


# --- the process around it --------------------------------------------------------------


def test_importing_hutch_loads_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules); import hutch; "
        "print(*sorted(name for name in set(sys.modules) - before))"
    )
    done = python(code)
    loaded = done.stdout.split()
    assert not done.stderr and "hutch" in loaded
    heavy = {"asyncio", "json", "socket", "subprocess", "dataclasses", "ctypes", "threading"}
    assert not heavy & {*loaded}, heavy & {*loaded}


def test_every_public_name_can_be_imported():
    import hutch

    for name in hutch.__all__:
        assert getattr(hutch, name).__name__ == name and name in dir(hutch)
    with pytest.raises(AttributeError, match="no attribute 'Sandbocks'"):
        hutch.Sandbocks  # noqa: B018


def test_a_loop_can_be_run_twice_in_one_process():
    async def use() -> str:
        async with await AsyncSandbox.create() as box:
            return (await box.commands.run("echo hi")).stdout

    assert [asyncio.run(use()), asyncio.run(use())] == ["hi\n", "hi\n"]


def test_a_box_that_nobody_closed_ends_with_its_loop():
    async def forget() -> tuple[AsyncSandbox, str]:
        box = await AsyncSandbox.create()
        return box, (await box.commands.run("hostname")).stdout

    async def use(box: AsyncSandbox) -> None:
        with pytest.raises(BoxLost):
            await box.commands.run("true")
        assert await AsyncSandbox.list() == []

    box, _ = asyncio.run(forget())
    asyncio.run(use(box))
    code = """
import asyncio, os
from hutch import AsyncSandbox
async def forget():
    box = await AsyncSandbox.create()
    await box.commands.run("sleep 1000", background=True)
asyncio.run(forget())
try:
    print("child left:", os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child left")
"""
    done = python(code)
    assert (done.stdout, done.stderr) == ("no child left\n", "")


def test_a_program_that_forgets_to_close_its_box_ends_quietly():
    done = python(
        "from hutch import Sandbox; box = Sandbox.create(); print(box.shell.run('echo x').stdout)"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("x\n\n", "", 0)


def test_a_fork_of_the_program_neither_uses_nor_ends_its_boxes():
    code = """
import os, sys
from hutch import BoxLost, Sandbox
box = Sandbox.create()
box.shell.run("A=kept")
child = os.fork()
if not child:
    try:
        box.shell.run("true")
    except BoxLost as exc:
        print("child:", exc, flush=True)
    with Sandbox.create() as own:
        print("child:", own.shell.run("echo own box").stdout, end="", flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("parent:", box.shell.run("echo $A").stdout, end="")
box.close()
"""
    done = python(code)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "child: this box belongs to the process that made it, and this is a fork of it",
        "child: own box",
        "parent: kept",
    ]


def test_boxes_of_several_threads_and_loops_do_not_meet():
    code = """
import asyncio, threading
from hutch import AsyncSandbox, Sandbox
async def one(n):
    async with await AsyncSandbox.create() as box:
        for _ in range(5):
            assert (await box.shell.run(f"echo {n}")).stdout == f"{n}\\n"
def sync(n):
    with Sandbox.create() as box:
        for _ in range(5):
            assert box.shell.run(f"echo {n}").stdout == f"{n}\\n"
threads = [threading.Thread(target=asyncio.run, args=(one(n),)) for n in range(3)]
threads += [threading.Thread(target=sync, args=(n,)) for n in range(3)]
for t in threads: t.start()
for t in threads: t.join()
print("done")
"""
    done = python(code)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_sandbox_cannot_be_had_from_the_package_behind_it():
    code = "from hutch.client._sync import Sandbox; Sandbox.create()"
    assert "import Sandbox and AsyncSandbox from `hutch`" in python(code).stderr


def test_the_environment_of_the_program_does_not_reach_the_box():
    code = "from hutch import Sandbox\nwith Sandbox.create() as b: print(b.shell.run('env').stdout)"
    done = python(code, env={**os.environ, "SECRET_OF_MINE": "x"})
    assert "SECRET_OF_MINE" not in done.stdout and "PATH=" in done.stdout


def test_a_box_that_is_not_of_this_process_is_looked_for_at_a_server_next():
    with pytest.raises(BoxLost, match="give url= or set HUTCH_URL"):
        Sandbox.connect("00000000-000")


def test_the_folder_of_a_server_is_not_mounted(tmp_path, monkeypatch):
    """A box could have the uid of its owner there, and use the server's socket."""
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "home/data"))
    (tmp_path / "home/data/run").mkdir(parents=True)
    (tmp_path / "home/project").mkdir()
    for folder in ("home", "home/data", "home/data/run", "."):
        with pytest.raises(InvalidRequest, match="the data of a Hutch server is in it"):
            Sandbox.create(workspace=tmp_path / folder)
    (project := tmp_path / "home/project").chmod(0o777)
    if os.geteuid() == 0:
        os.chown(project, 1000, 1000)  # a container refuses a folder of root
    Sandbox.create(workspace=project).close()
