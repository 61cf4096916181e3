"""A box that sleeps is gone, and the next call finds everything where it was."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docker_of_tests import for_a_box
from hutch import BoxLost, Conflict, HutchError, InvalidRequest, NoSpace, NotFound, Sandbox, wire
from hutch.engine import hibernate
from hutch.engine.lifecycle import pause_after
from hutch.engine.link import GuestCall, Link


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox.create(image="python") as made:
        yield made


def world_of(box: Sandbox) -> str:
    """What tells the processes of a box from all others of this machine."""
    mark = f"1000.{int.from_bytes(os.urandom(6), 'big')}"
    marked = box.commands.run(["sleep", mark], background=True)
    (world,) = {world for _, world, words in processes() if mark.encode() in words}
    marked.kill()
    return world


def processes() -> Iterator[tuple[int, str, list[bytes]]]:
    """The id, the pid namespace and the arguments of each."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            world, words = os.readlink(folder / "ns/pid"), (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        yield int(folder.name), world, words.split(b"\0")


def running(mark: str) -> list[int]:
    return [pid for pid, _, words in processes() if mark.encode() in words]


def lives(world: str) -> bool:
    return world in {each for _, each, _ in processes()}


def test_variables_functions_classes_and_imports_come_back(box: Sandbox) -> None:
    box.run_code(
        "import math\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Point:\n    x: int\n    y: int\n"
        "p = q = Point(1, 2)\nscale = 10\n"
        "def scaled(p): return Point(p.x * scale, p.y * scale)\n"
        "def counter():\n    n = 0\n    def more():\n        nonlocal n\n        n += 1\n"
        "        return n\n    return more\nmore = counter()\nmore()"
    ).check()
    box.hibernate()
    assert box.run_code("p is q and isinstance(p, Point)").text == "True"
    assert box.run_code("scaled(p)").text == "Point(x=10, y=20)"
    box.run_code("scale = 100").check()
    assert box.run_code("scaled(p)").text == "Point(x=100, y=200)", "it sees the same globals"
    assert box.run_code("more(), math.floor(2.5)").text == "(2, 2)"


def test_the_shell_stands_where_it_stood(box: Sandbox) -> None:
    box.shell.run("mkdir /tmp/a; cd /tmp/a; export E='x y'; plain='it''s'; list=(1 '2 3')")
    box.shell.run("greet() { echo \"hi $1 from $plain\"; }; alias say='echo said'")
    other = box.shell.open("other", cwd="/var/tmp")
    other.run("mine=1")
    box.hibernate()
    assert box.shell.run('pwd; echo "$E|$plain|${list[1]}"').stdout == "/tmp/a\nx y|its|2 3\n"
    assert box.shell.run("greet you; say so").stdout == "hi you from its\nsaid so\n"
    assert other.run("pwd; echo $mine").stdout == "/var/tmp\n1\n"


def test_a_shell_with_its_own_ideas_is_kept_too(box: Sandbox) -> None:
    box.shell.run("IFS=:; X=5; cd() { sleep 1000; }; jobs() { sleep 1000; }; set -o pipefail")
    box.shell.run("rm() { sleep 1000; }; alias printf='sleep 1000'; shopt -s nullglob")
    box.hibernate()
    assert box.shell.run('echo "$X|$IFS"; set -o | grep pipefail').stdout.split() == [
        "5|:", "pipefail", "on",
    ]  # fmt: skip
    assert box.shell.run("shopt nullglob; pwd").stdout.split() == ["nullglob", "on", "/workspace"]


def test_a_full_disk_sleeps_and_wakes(tmp_path: Path) -> None:
    with Sandbox.create(image="python", memory="128m") as box:
        box.shell.run("v=1; head -c 1000M /dev/zero > fill")
        report = box.hibernate()
        assert "files" in report.kept
        box.files.remove("fill")
        assert box.commands.run(["true"]).woke


def test_closing_does_not_wait_for_what_never_ends(box: Sandbox) -> None:
    box.run_code("class Endless:\n    def __reduce__(self):\n        while 1: pass\ne = Endless()")
    with ThreadPoolExecutor(1) as threads:
        sleeping = threads.submit(box.hibernate)
        time.sleep(1)
        box.close()
        assert not sleeping.done() or sleeping.exception()
        with pytest.raises(HutchError):
            sleeping.result()


def test_a_program_left_in_a_shell_keeps_a_box_awake() -> None:
    with Sandbox.create(image="python", idle=0.3, on_idle="hibernate") as box:
        box.shell.run("until [ -e /tmp/go ]; do sleep 0.1; done &")
        box.run_code("1")
        time.sleep(1.5)
        assert box.stats().pids != 0
        box.files.write("/tmp/go", "")
        until_asleep(box)


def test_files_come_back(box: Sandbox) -> None:
    box.files.write("notes.txt", "kept")
    box.files.write("/tmp/blob", os.urandom(2_000_000))
    blob = box.files.read("/tmp/blob", "bytes")
    box.commands.run(
        "chmod 750 notes.txt; ln -s notes.txt link; mkdir -p deep/er; touch -d @5 deep"
    )
    box.hibernate()
    assert box.files.read("notes.txt") == "kept"
    assert box.files.read("/tmp/blob", "bytes") == blob
    # Not by stat(1), which does not work in gVisor.
    box.run_code("import os").check()
    assert box.run_code("oct(os.stat('notes.txt').st_mode & 0o777)").text == "'0o750'"
    assert box.run_code("os.readlink('link'), os.stat('deep').st_mtime").text == (
        "('notes.txt', 5.0)"
    )


def test_a_mounted_workspace_is_left_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("before")
    with Sandbox.create(image="python", workspace=for_a_box(tmp_path)) as box:
        box.run_code("x = 1")
        report = box.hibernate()
        (tmp_path / "mine").write_text("changed since")
        assert box.files.read("mine") == "changed since"
        assert report.size < 100_000 and box.run_code("x").text == "1"


def test_what_cannot_be_kept_is_told_with_the_reason(box: Sandbox) -> None:
    box.run_code(
        "import socket, threading, time\ns = socket.socket()\nf = open('/tmp/log', 'w')\nok = 1\n"
        "g = (n for n in range(3))\nthreading.Thread(target=time.sleep, args=(99,)).start()"
    )
    handle = box.commands.run(["sleep", "99"], background=True)
    box.shell.run("sleep 98 &")
    lost = dict(box.hibernate().lost)
    assert "socket" in lost["s"] and "/tmp/log" in lost["f"] and "g" in lost
    assert any(what.startswith("thread") for what in lost)
    assert lost[f"process {handle.id}: sleep 99"] == "a running program cannot be kept"
    assert any("sleep 98" in what for what in lost)
    execution = box.run_code("ok")
    assert execution.text == "1" and execution.woke and "ok" in execution.woke.kept
    assert "s" in dict(execution.woke.lost)
    assert box.run_code("s").error.name == "NameError"  # type: ignore[union-attr]


def test_while_it_sleeps_there_is_no_process_and_it_uses_nothing() -> None:
    with Sandbox.create(image="python") as box:
        box.run_code("x = 1")
        world = world_of(box)
        assert lives(world)
        box.hibernate()
        assert not lives(world)
        assert box.stats().memory == 0 and box.stats().pids == 0
        states = [info.status for info in Sandbox.list() if info.id == box.id]
        assert states == ["asleep"], "neither stats nor a list wakes it"


def test_twice_is_as_good_as_once(box: Sandbox) -> None:
    box.run_code("def f(n): return n + base\nbase = 1")
    box.shell.run("v=1")
    for _ in range(3):
        box.hibernate()
        box.hibernate()  # it sleeps already: no error, and nothing new
        assert box.run_code("base += 1; f(10)").check()
        box.shell.run("v=$((v + 1))")
    assert box.run_code("base, f(10)").text == "(4, 14)"
    assert box.shell.run("echo $v").stdout == "4\n"
    assert box.run_code("1").execution_count == 6


def test_what_runs_is_not_put_to_sleep(box: Sandbox) -> None:
    stream = box.shell.stream("echo go; sleep 99")
    next(iter(stream))
    with pytest.raises(Conflict, match="runs in this box"):
        box.hibernate()
    stream.close()
    box.hibernate()
    assert box.shell.run("echo back").stdout == "back\n"


def test_waking_tells_what_came_back_and_only_once(box: Sandbox) -> None:
    box.run_code("x = 1")
    box.hibernate()
    result = box.commands.run(["true"])
    assert result.woke and "x" in result.woke.kept and "files" in result.woke.kept
    assert box.commands.run(["true"]).woke is None
    box.hibernate()
    report = box.wake()
    assert report and "x" in report.kept and box.wake() is None


def test_contexts_stay_apart(box: Sandbox) -> None:
    other = box.create_code_context("other")
    box.run_code("x = 'main'")
    box.run_code("x = 'other'", context=other)
    report = box.hibernate()
    assert "x" in report.kept and "other: x" in report.kept
    assert box.run_code("x").text == "'main'"
    assert box.run_code("x", context=other).text == "'other'"


def test_a_context_keeps_its_folder_and_environment(box: Sandbox) -> None:
    other = box.create_code_context("other", cwd="/tmp", env={"A": "1"})
    box.hibernate()
    assert box.run_code("import os; os.getcwd(), os.environ['A']", context=other).text == (
        "('/tmp', '1')"
    )
    assert [c.cwd for c in box.list_code_contexts() if c.id == "other"] == ["/tmp"]
    box.restart_code_context(other)
    assert box.run_code("import os; os.getcwd()", context=other).text == "'/tmp'"


def test_a_context_that_cannot_be_saved_in_time_keeps_the_box_awake(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hibernate, "CONTEXT_PATIENCE", 2)
    box.run_code("class Endless:\n    def __reduce__(self):\n        while 1: pass\ne = Endless()")
    box.run_code("x = 1")
    with pytest.raises(Conflict, match="'main' could not be saved: it took too long"):
        box.hibernate()
    execution = box.run_code("x, type(e).__name__")
    assert execution.text == "(1, 'Endless')" and not execution.woke
    box.run_code("del e")
    assert "x" in box.hibernate().kept


@pytest.mark.parametrize("image", ["host", "python"])
def test_a_kernel_that_fills_its_box_is_saved_or_left_as_it_was(image: str) -> None:
    with Sandbox.create(image=image, memory="192m") as box:
        # A few long texts: nothing of them is copied, however little room there is.
        box.run_code("long = [('%06d' % i) * 170_000 for i in range(120)]").check()
        assert "long" in box.hibernate().kept
        assert box.run_code("len(long), sum(map(len, long))").text == "(120, 122400000)"
        # Many short ones: to look at them is to copy the pages that they are on.
        box.run_code("del long; many = ['%040d' % i for i in range(1_200_000)]").check()
        with pytest.raises(Conflict, match="too little free memory"):
            box.hibernate()
        execution = box.run_code("len(many), sum(map(len, many))")
        assert execution.text == "(1200000, 48000000)"
        assert not execution.woke and not execution.restarted


def test_an_idle_box_that_cannot_be_saved_stays_awake_and_is_not_tried_at_once(
    tmp_path: Path,
) -> None:
    with Sandbox.create(image="python", idle=0.3, on_idle="hibernate") as box:
        box.run_code(
            "import os\nclass Dies:\n    def __reduce__(self):\n"
            "        open('/tmp/tries', 'a').write('x'); os.kill(os.getpid(), 9)\nd = Dies(); x = 1"
        ).check()
        deadline = time.monotonic() + 120
        while "tries" not in [entry.name for entry in box.files.list("/tmp")]:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        time.sleep(2)
        assert box.stats().pids != 0
        execution = box.run_code("x, open('/tmp/tries').read()")
        assert execution.text == "(1, 'x')" and not execution.woke


def test_the_pause_after_a_failure_doubles_up_to_an_hour_however_often_it_fails() -> None:
    pauses = [pause_after(failures) for failures in (0, 1, 2, 3, 7, 100, 100_000)]
    assert pauses == [0, 60, 120, 240, 3600, 3600, 3600]


def test_a_state_that_cannot_be_loaded_is_kept_and_tried_again(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.run_code("x = 1")
    box.files.write("notes.txt", "kept")
    box.hibernate()
    with monkeypatch.context() as patch:
        patch.setattr(hibernate, "CONTEXT_PATIENCE", 0)
        with pytest.raises(Conflict, match="still saved, and the next call tries again"):
            box.run_code("x")
    assert box.run_code("x").text == "1"
    box.hibernate()
    monkeypatch.setattr(hibernate, "CONTEXT_PATIENCE", 0)
    for _ in range(2):
        with pytest.raises(Conflict, match="tries again"):
            box.files.read("notes.txt")
    # It is not kept from its files for ever.
    result = box.commands.run(["cat", "notes.txt"])
    assert result.stdout == "kept" and result.woke
    assert "all variables of context main" in dict(result.woke.lost)


def test_a_kernel_that_never_has_enough_of_its_state_keeps_the_box_asleep(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = hibernate._send

    async def send_and_ask_again(link: Any, request: Any, path: Path) -> Any:
        answer, told = await send(link, request, path)
        return {**answer, "again": isinstance(request, wire.LoadKernel)}, told

    box.run_code("x = 1")
    box.hibernate()
    with monkeypatch.context() as patch:
        patch.setattr(hibernate, "_send", send_and_ask_again)
        with pytest.raises(Conflict, match="after 8 passes"):
            box.run_code("x")
    assert box.run_code("x").text == "1"


def test_looking_at_variables_keeps_nobody_awake() -> None:
    with Sandbox.create(image="python", idle=1, on_idle="hibernate") as box:
        box.run_code("x = 1")
        deadline = time.monotonic() + 120
        while box.stats().pids:
            assert time.monotonic() < deadline, "it did not go to sleep"
            with contextlib.suppress(Conflict):  # it sleeps already
                assert [variable.name for variable in box.variables()] == ["x"]
            time.sleep(0.1)
        with pytest.raises(Conflict, match="listing its variables does not wake it"):
            box.variables()
        assert not box.stats().pids
        assert box.run_code("x").woke
        assert [variable.name for variable in box.variables()] == ["x"]


def test_a_hibernation_that_fails_leaves_the_box_as_it_was(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.run_code("x = 1")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hibernate.os, "open", full)
        with pytest.raises(NoSpace):
            box.hibernate()
    assert box.run_code("x").text == "1" and box.run_code("x").woke is None
    box.hibernate()
    assert box.run_code("x").text == "1"


def saved_files() -> Path:
    folder = Path(os.environ.get("TMPDIR") or "/tmp")
    (path,) = folder.glob(f"hutch-{os.getpid()}-*/asleep-*-files")
    return path


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), place)


def test_a_saved_box_that_was_damaged_stays_saved(box: Sandbox) -> None:
    box.files.write("notes.txt", os.urandom(100_000))
    notes = box.files.read("notes.txt", "bytes")
    box.hibernate()
    flip(saved_files(), 50_000)
    with pytest.raises(HutchError, match="damaged: the SHA-256"):  # before a box reads any of it
        box.files.read("notes.txt")
    flip(saved_files(), 50_000)  # as it was
    assert box.files.read("notes.txt", "bytes") == notes


def test_what_was_saved_stays_on_disk_while_some_of_it_is_missing(box: Sandbox) -> None:
    box.run_code(
        "def refuse(): raise ValueError('not here')\nclass Refuses:\n"
        "    def __reduce__(self): return refuse, ()\nr = Refuses(); x = 1"
    ).check()
    assert "r" in box.hibernate().kept
    saved = saved_files()
    execution = box.run_code("x")
    assert execution.woke and "r" in dict(execution.woke.lost)
    assert saved_files() == saved
    box.hibernate()
    assert saved_files() != saved, "the next one takes its place"
    assert box.run_code("x").text == "1"
    assert not [*saved.parent.glob("asleep-*")]


def test_a_disk_that_keeps_something_else_leaves_the_box_awake(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.run_code("x = 1")
    box.files.write("notes.txt", "kept")
    real = hibernate._append

    def corrupt(path: Path, data: bytearray) -> None:
        if path.name.endswith("-files") and data:
            data[0] ^= 1
        real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(hibernate, "_append", corrupt)
        with pytest.raises(HutchError, match="damaged"):
            box.hibernate()
    assert box.files.read("notes.txt") == "kept"
    execution = box.run_code("x")
    assert execution.text == "1" and execution.woke is None, "it was never asleep"


@pytest.mark.parametrize("request_type", [wire.SaveKernel, wire.Pack])
def test_what_changes_on_its_way_to_the_disk_leaves_the_box_awake(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch, request_type: type
) -> None:
    box.run_code("x = b'1' * 100_000")
    real = Link.call

    def damaged(link: Link, request: Any) -> GuestCall:
        call = real(link, request)
        deliver = call.deliver

        def flip_one(event: wire.Event) -> None:
            if isinstance(event, wire.Data) and event.channel == wire.STDOUT:
                event = replace(event, data=bytes([event.data[0] ^ 1]) + event.data[1:])
            deliver(event)

        if isinstance(request, request_type):
            monkeypatch.setattr(call, "deliver", flip_one)
        return call

    with monkeypatch.context() as patch:
        patch.setattr(Link, "call", damaged)
        with pytest.raises(HutchError, match=r"not what the kernel sent|saved with errors"):
            box.hibernate()
    execution = box.run_code("len(x)")
    assert execution.text == "100000" and execution.woke is None, "it was never asleep"


def test_what_was_saved_is_read_back_once(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    box.run_code("x = b'1' * 10_000_000")
    box.files.write("notes.txt", os.urandom(10_000_000))
    real, opened = Path.open, []

    def counted(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        opened.extend([path.name] if path.name.startswith("asleep-") and "r" in mode else [])
        return real(path, mode, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", counted)
        box.hibernate()
    assert len(opened) == len({*opened}) == 2
    assert box.run_code("len(x)").text == "10000000"


def test_a_box_that_kills_its_own_packing_stays_awake(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = box.run_code("import os; x = 1; os.getpid()").text
    assert kernel
    box.files.write("big", os.urandom(20_000_000))
    box.files.write(
        "killer.py",
        "import os, signal, sys\nfrom contextlib import suppress\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "known = set(os.listdir('/proc'))\nprint('ready', flush=True)\n"
        "signal.sigwait({signal.SIGUSR1})\n"
        "for pid in set(os.listdir('/proc')) - known:\n"
        "  with suppress(OSError, ValueError):\n"
        "    stat = open(f'/proc/{pid}/stat').read()\n"
        "    if stat.rpartition(')')[2].split()[1] != sys.argv[1]:\n"
        "      os.kill(int(pid), 9)\n",
    )
    mark = os.urandom(8).hex()
    killer = box.commands.run(["python3", "killer.py", kernel, mark], background=True)
    with killer.stream() as said:
        next(iter(said))
    real = hibernate._append

    def kill(path: Path, data: bytearray) -> None:
        """While this waits, the packing waits, too: its output is not read."""
        deadline = time.monotonic() + 60
        while path.name.endswith("-files") and (pids := running(mark)):
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)
            assert time.monotonic() < deadline, "the packing was not killed"
            time.sleep(0.05)
        real(path, data)

    monkeypatch.setattr(hibernate, "_append", kill)
    with pytest.raises(HutchError, match=r"packing them was killed|killed while it was being"):
        box.hibernate()
    monkeypatch.undo()
    assert box.run_code("x").text == "1"
    assert box.files.stat("big").size == 20_000_000


def test_two_calls_at_once_wake_a_box_once(box: Sandbox) -> None:
    box.run_code("x = 1")
    box.hibernate()
    with ThreadPoolExecutor(4) as threads:
        texts = [f.result().text for f in [threads.submit(box.run_code, "x") for _ in range(4)]]
    assert texts == ["1"] * 4


def test_the_environment_of_the_box_is_there_after_it() -> None:
    with Sandbox.create(image="python", env={"TOKEN": "t0"}, workdir="/tmp/app") as box:
        box.hibernate()
        result = box.commands.run("echo $TOKEN; pwd")
        assert result.stdout == "t0\n/tmp/app\n"


def test_outputs_from_before_can_still_be_read(box: Sandbox) -> None:
    result = box.commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
    assert result.truncated and result.kept
    box.hibernate()
    assert box.read_output(result.kept, 1_500_000, 10).data == b"x" * 10


def test_ids_are_not_used_again_after_it(box: Sandbox) -> None:
    before = box.commands.run(["sleep", "99"], background=True)
    box.hibernate()
    after = box.commands.run(["sleep", "99"], background=True)
    assert before.id != after.id


def test_an_idle_box_goes_to_sleep_by_itself_and_work_is_not_idle() -> None:
    with Sandbox.create(image="python", idle=3, on_idle="hibernate") as box:
        box.run_code("x = 1")
        busy = box.run_code("import time; time.sleep(5); x")
        assert busy.text == "1" and not busy.woke, "a cell that runs is use"
        until_asleep(box)
        execution = box.run_code("x")
        assert execution.text == "1" and execution.woke


def until_asleep(box: Sandbox) -> None:
    deadline = time.monotonic() + 120
    while box.stats().pids != 0:  # which does not count as use, and wakes nothing
        assert time.monotonic() < deadline, "it did not go to sleep"
        time.sleep(0.05)


def test_a_program_in_the_background_keeps_a_box_awake() -> None:
    with Sandbox.create(image="python", idle=0.3, on_idle="hibernate") as box:
        wait = "until [ -e /tmp/go ]; do sleep 0.1; done"
        handle = box.commands.run(["sh", "-c", wait], background=True)
        time.sleep(1)
        assert box.stats().pids != 0
        box.files.write("/tmp/go", "")
        assert handle.wait().exit_code == 0
        until_asleep(box)


def test_an_idle_box_can_be_closed_instead() -> None:
    with Sandbox.create(idle=0.3) as box:
        deadline = time.monotonic() + 120
        while box.id in [info.id for info in Sandbox.list()]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(BoxLost):
            box.commands.run(["true"])


def test_what_is_kept_is_removed_with_the_box(box: Sandbox) -> None:
    folder = Path(os.environ.get("TMPDIR") or "/tmp")
    box.run_code("x = 1")
    box.hibernate()
    assert [*folder.glob(f"hutch-{os.getpid()}-*/asleep-*")]
    box.close()
    assert not [*folder.glob(f"hutch-{os.getpid()}-*/asleep-*")]
    with pytest.raises(BoxLost):
        box.run_code("x")


@pytest.mark.parametrize(
    "wrong", [{"idle": -1}, {"idle": "soon"}, {"on_idle": "dream"}, {"on_idle": "hibernate"}]
)
def test_a_wish_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Sandbox.create(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", ["_write", "_read"])
def test_others_go_on_while_the_disk_is_slow(
    box: Sandbox, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.run_code("data = b'x' * 10_000_000").check()
    if step == "_read":
        box.hibernate()
    real = getattr(hibernate, step)
    reached, go_on, told = threading.Event(), threading.Event(), []

    def slow(*args: Any) -> Any:
        reached.set()
        told.append(go_on.wait(20))
        return real(*args)

    with Sandbox.create() as other, ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(hibernate, step, slow)
        doing = threads.submit(box.hibernate if step == "_write" else lambda: box.run_code("1"))
        assert reached.wait(60)
        assert other.shell.run("echo on").stdout == "on\n"
        go_on.set()
        doing.result(60)
    assert all(told), "it was waited for in the loop that everybody shares"
    assert box.run_code("len(data)").text == "10000000"


def test_a_shell_that_is_not_there_keeps_nobody_from_sleeping() -> None:
    with Sandbox.create() as box:
        shell = box.shell.open("once")
        shell.close()
        with pytest.raises(NotFound):
            shell.run("ls")
        assert "files" in box.hibernate().kept


def test_a_watch_keeps_nobody_awake() -> None:
    with Sandbox.create() as box, box.files.watch("/workspace") as watch:
        assert "files" in box.hibernate().kept
        with pytest.raises(BoxLost):
            next(watch)
