"""A box that uses up everything it has hurts itself only.

After each attack the same box answers, a second one runs, and nothing is left on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hutch.errors import HutchError, InvalidRequest, LimitReached

from .hosts import FarThing, Operator, wait_until


@contextlib.contextmanager
def attacked(operator: Operator, **limits: Any) -> Iterator[FarThing]:
    """A small box to attack, and what must hold afterwards."""
    with operator.box(**({"memory": "64m", "pids": 32} | limits)) as box:
        yield box  # (an attack that raises has failed, and the rest does not matter)
        after = box.commands.run(["echo", "ok"], timeout=30)
        assert after.stdout == "ok\n", after
        with operator.box() as second:
            assert second.shell.run("echo ok").stdout == "ok\n"
    assert wait_until(lambda: not operator.remains(), 10), operator.remains()


def python(box: FarThing, script: str, **options: Any) -> Any:
    return box.commands.run(["python3", "-c", script], **({"timeout": 60} | options))


def resident(pid: int) -> int:
    """Megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) // 1024


def test_a_fork_bomb_stops_at_the_limit(operator: Operator) -> None:
    with attacked(operator) as box:
        box.commands.run(["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 0.5"], timeout=3)
        count = "import os; print(sum(n.isdigit() for n in os.listdir('/proc')))"
        # 32, beside the guest, a few subreapers and the one that counts.
        assert int(python(box, count).stdout) < 45


def test_a_program_that_takes_too_much_memory_is_ended(operator: Operator) -> None:
    with attacked(operator) as box:
        result = python(box, "kept = [bytearray(8 << 20) for _ in range(100)]")
        if operator.bounded:
            assert (result.exit_code, result.oom) == (137, True)
        else:
            assert "MemoryError" in result.stderr


def test_many_programs_that_take_too_much_together_are_ended(operator: Operator) -> None:
    greedy = "for i in $(seq 12); do python3 -c 'x = b\"x\" * (10 << 20); input()' & done; wait"
    # Megabytes of all programs, without what they share.
    total = "cat /proc/[0-9]*/statm | awk '{n += $2 - $3} END {print n * 4 / 1024}'"
    with attacked(operator) as box:
        handle = box.commands.run(["bash", "-c", f"{greedy} </dev/zero"], background=True)
        time.sleep(1)
        # What counts may be ended for its memory, too; then it says nothing.
        assert wait_until(lambda: float(box.commands.run(total).stdout or "inf") < 100, 120)
        handle.kill()


def test_memory_in_files_is_bounded_before_memory_is(operator: Operator) -> None:
    with attacked(operator) as box:
        result = box.commands.run("dd if=/dev/zero of=/dev/shm/x bs=1M")
        assert "No space left on device" in result.stderr
        assert (result.exit_code, result.oom) == (1, False)


def test_the_disk_is_bounded(operator: Operator) -> None:
    with attacked(operator, disk="16m") as box:
        fill = "for i in 1 2 3; do dd if=/dev/zero of=/workspace/$i bs=1M count=8 2>&1; done"
        assert "No space left on device" in box.shell.run(fill).stdout
        assert box.shell.run("truncate -s 1E /tmp/x || fallocate -l 1T /tmp/x").exit_code != 0
        used = "import os; s = os.statvfs('/workspace'); print(s.f_blocks * s.f_frsize >> 20)"
        assert python(box, used).stdout == "16\n"
        box.shell.run("rm /workspace/*", check=True)
        box.files.write("/workspace/room-again", "x")


def test_a_full_disk_is_an_error_for_the_host_too(operator: Operator) -> None:
    with attacked(operator, disk="4m") as box:
        box.shell.run("dd if=/dev/zero of=/workspace/x bs=1M")
        with pytest.raises(LimitReached):
            box.files.write("/workspace/more", "x" * (1 << 20))
        assert [entry.name for entry in box.files.list("/workspace")] == ["x"]


def test_the_number_of_files_is_bounded(operator: Operator) -> None:
    with attacked(operator, disk="4m") as box:
        fill = "i=0; while : > f$i; do i=$((i+1)); done; echo $i; rm -rf /workspace/*; : > again"
        result = box.shell.run(fill)
        assert "No space left on device" in result.stderr
        assert 10_000 < int(result.stdout) < 20_000


OPEN_ALL = """
import errno, os, socket
for make in (lambda: os.eventfd(0), socket.socketpair, os.pipe, lambda: os.open("/", 0)):
    kept = []
    try:
        while True:
            kept.append(make())
    except OSError as exc:
        print(errno.errorcode[exc.errno], len(kept) <= 4096)
    for one in kept:
        for fd in (one,) if isinstance(one, int) else one:
            fd.close() if hasattr(fd, "close") else os.close(fd)
"""


def test_open_files_are_bounded(operator: Operator) -> None:
    def open_on_the_host() -> int:
        return int(Path("/proc/sys/fs/file-nr").read_text().split()[0])

    before = open_on_the_host()
    with attacked(operator) as box:
        assert python(box, OPEN_ALL).stdout == "EMFILE True\n" * 4
    assert wait_until(lambda: open_on_the_host() < before + 2000, 60)


@pytest.mark.parametrize(
    "flood",
    [
        "yes",
        "cat /dev/zero",
        "python3 -c 'import os\nwhile True: os.write(1, b\"x\")'",
        "while :; do echo out; echo err >&2; done",
    ],
    ids=["lines", "no line at all", "single bytes", "both streams"],
)
def test_a_flood_of_output_is_cut_and_the_host_stays_small(operator: Operator, flood: str) -> None:
    with attacked(operator) as box:
        before = resident(operator.pid)
        result = box.commands.run(["bash", "-c", flood], timeout=3)
        assert (result.timed_out, result.exit_code) == (True, 124)
        assert result.total_bytes > 10_000
        assert len(result.output) < 4 << 20
        assert resident(operator.pid) < before + 64


def test_output_that_nobody_reads_blocks_its_program_and_nobody_else(operator: Operator) -> None:
    with attacked(operator) as box:
        guest = operator.guests()[-1]
        operator.python(f"stream = kept[{box._number}].commands.stream(['yes']); next(stream)\n"
                        "kept.append(stream)")  # fmt: skip
        before, sizes = resident(guest), []
        for _ in range(5):
            assert box.commands.run("echo still here").stdout == "still here\n"
            time.sleep(0.1)
            sizes.append(resident(guest))
        assert max(sizes) < before + 32
        operator.python("kept.pop().close()")
        assert wait_until(lambda: box.commands.run("pgrep -c yes").stdout == "0\n", 120)


SPIN = """
import os, threading, time
began = time.monotonic()
end = began + 1
def spin():
    while time.monotonic() < end: pass
for _ in range(3):
    if not os.fork():
        [threading.Thread(target=spin).start() for _ in range(6)]; spin(); os._exit(0)
for _ in range(3): os.wait()
used = os.times()
print(used.children_user + used.children_system, time.monotonic() - began)
"""


def test_a_busy_box_gets_its_share_of_the_processor_and_no_more(operator: Operator) -> None:
    with attacked(operator, cpus=0.5) as box:
        used, elapsed = map(float, python(box, SPIN).stdout.split())
        if operator.bounded:
            assert used < elapsed / 2 + 0.5  # its half, and what a period may overdraw


def test_a_box_cannot_raise_its_priority(box: FarThing) -> None:
    script = (
        "import os\n"
        "for rise in (lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),\n"
        "             lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),\n"
        "             lambda: os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(0, 0) - 1)):\n"
        "    try: print('raised', rise())\n"
        "    except PermissionError: print('refused')\n"
    )
    lowered = "import os; os.nice(5)\n"  # anyone may be less urgent, and never more again
    assert python(box, lowered + script).stdout == "refused\n" * 3


BOMB = """
import os
while True:
    try:
        os.fork() or os.setsid()
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "stubborn",
    [
        "trap '' TERM INT HUP; sleep 1000 & wait; sleep 1000",
        "setsid -f sleep 1000; setsid sleep 1000 & exec sleep 1000",
        "kill -STOP $$; sleep 1000",
        "(sleep 1000 & sleep 1000 & disown -a) & (exec -a harmless sleep 1000); wait",
        "python3 /tmp/bomb.py",
    ],
    ids=["deaf", "in sessions of their own", "stopped", "orphans", "a bomb of sessions"],
)
def test_nothing_outlives_a_timeout(operator: Operator, stubborn: str) -> None:
    with attacked(operator, memory="1g") as box:
        box.files.write("/tmp/bomb.py", BOMB)
        result = box.commands.run(["bash", "-c", stubborn], timeout=0.5)
        assert (result.timed_out, result.exit_code) == (True, 124)
        left = "cat /proc/[0-9]*/comm | grep -vE '^(hutch-.*|sh|cat|grep)$'"
        assert box.commands.run(left).stdout == ""


DEEP = """
import os
for _ in range(3000):
    os.mkdir("d" * 255); os.chdir("d" * 255)
"""


def test_a_tree_deeper_than_any_stack_can_be_removed(operator: Operator) -> None:
    with attacked(operator, disk="32m") as box:
        made = python(box, DEEP)
        assert made.exit_code == 0, made.stderr
        box.shell.run("mkdir -p locked/in; touch locked/in/file; chmod 000 locked/in locked")
        for name in ("d" * 255, "locked"):
            box.files.remove(name, recursive=True)
        assert box.files.list("/workspace") == []
        python(box, DEEP)  # this one is left for the end of the box


def test_too_much_environment_is_refused(operator: Operator) -> None:
    with pytest.raises(InvalidRequest):
        operator.box(env={"BIG": "x" * 10_000_000})
    with attacked(operator) as box, pytest.raises(HutchError):
        box.commands.run(["true"], env={f"V{n}": "x" * 100_000 for n in range(100)})


def test_too_many_arguments_are_refused(operator: Operator) -> None:
    with attacked(operator) as box:
        with pytest.raises(HutchError):
            box.commands.run(["true"] + ["x" * 100] * 200_000)
        with pytest.raises(HutchError):
            box.commands.run(["true", "x" * 200_000])  # longer than Linux lets one be


def test_input_that_a_program_does_not_read_harms_nobody(operator: Operator) -> None:
    with attacked(operator) as box:
        before = resident(operator.pid)
        for argv in (["true"], ["sleep", "0.3"], ["head", "-c", "1"]):
            code = f"answer = kept[{box._number}].commands.run({argv}, stdin=b'x' * (64 << 20))"
            assert operator.python(f"{code}.exit_code") == 0
        assert resident(operator.pid) < before + 200


def test_boxes_together_do_not_use_up_what_root_has(operator: Operator) -> None:
    """The kernel counts inotify instances, 128 for each user of the machine."""
    if operator.who == "user":
        pytest.skip("boxes of an ordinary user draw from his own share")
    take = "import ctypes; [ctypes.CDLL(None).inotify_init1(0) for _ in range(64)]; input('taken')"
    with contextlib.ExitStack() as boxes:
        for _ in range(5):
            box = boxes.enter_context(operator.box())
            handle = box.commands.run(["python3", "-c", take], background=True)
            assert wait_until(lambda handle=handle: handle.stdout() == "taken", 60)
        mine = ctypes.CDLL(None, use_errno=True).inotify_init1(0)
        assert mine >= 0, os.strerror(ctypes.get_errno())
        os.close(mine)


def test_a_starved_box_still_answers(operator: Operator) -> None:
    hold = (
        "import os, time\n"
        "kept = [os.eventfd(0) for _ in range(4000)]\n"
        "data = bytearray(b'x') * (8 << 20)\n"
        "try:\n"
        "    while os.fork(): pass\n"
        "except OSError: pass\n"
        "time.sleep(30)\n"
    )
    with attacked(operator) as box:
        box.shell.run("dd if=/dev/zero of=/tmp/full bs=1M")
        handle = box.commands.run(["python3", "-c", hold], background=True)
        time.sleep(0.3)
        assert box.commands.run(["true"], timeout=30).exit_code == 0
        assert box.files.exists("/tmp/full")
        handle.kill()
        box.files.remove("/tmp/full")
