"""Boxes end with the process that made them, however that ends, and leave nothing behind."""

from __future__ import annotations

import random
import time

import pytest

from hutch.errors import BackendUnavailable, BoxLost, HutchError

from .hosts import FarThing, Operator, Traces, alive, below, stop, wait_until
from .hosts import operator as operated

# The promise is two seconds; a machine that runs many tests at once gets some more.
SOON = 60


def busy(mine: Operator) -> Traces:
    """Two boxes, with all that a box can have on the host."""
    for _ in range(2):
        box = mine.box()
        box.shell.run("setsid sleep 1000 & sleep 1000 & cd /tmp")
        box.commands.run(["sh", "-c", "trap '' TERM; sleep 1000"], background=True)
        box.commands.run("head -c 3000000 /dev/zero")  # too much to keep in memory: a file
    traces = mine.traces()
    assert len([line for line in traces.left() if line.startswith("process")]) >= 10
    return traces


ENDS = {
    "returning": "",
    "exiting": "import sys; kept[0].commands.run('true'); sys.exit(3)",
    "crashing": "import os; os._exit(3)",
    "aborting": "import os; os.abort()",
    "being hung up": "import os; os.kill(os.getpid(), 1)",
    "segfaulting": "import ctypes; ctypes.string_at(0)",
}


@pytest.mark.parametrize("end", ENDS)
def test_boxes_go_with_their_process(who: str, end: str) -> None:
    with operated(who) as mine:
        traces = busy(mine)
        if ENDS[end]:
            mine.tell({"python": ENDS[end]})
        else:
            assert mine.process.stdin
            mine.process.stdin.close()
        assert wait_until(lambda: mine.process.poll() is not None, 60)
        assert traces.are_gone(SOON), traces.left()


def test_boxes_go_with_a_process_that_is_killed(who: str) -> None:
    with operated(who) as mine:
        traces = busy(mine)
        mine.kill()
        assert traces.are_gone(SOON), traces.left()


def test_boxes_go_even_if_children_of_their_process_live_on(who: str) -> None:
    fork = """
import os, time
answer = []
for _ in range(3):
    pid = os.fork()  # it has a copy of everything: the control socket, those to the boxes
    if not pid:
        time.sleep(600); os._exit(0)
    answer.append(pid)
"""
    with operated(who) as mine:
        traces = busy(mine)
        orphans = mine.python(fork)
        mine.process.kill()
        mine.process.wait()
        try:
            assert traces.are_gone(SOON), traces.left()
            assert all(alive(pid) for pid in orphans)
        finally:
            for pid in orphans:
                stop(pid)


def test_boxes_go_with_the_launcher_and_say_so(who: str) -> None:
    with operated(who) as mine:
        box = mine.box()
        running = box.commands.run(["sleep", "1000"], background=True)
        traces = mine.traces()
        stop(mine.find("hutch-launcher"))
        with pytest.raises(BoxLost):
            running.wait()
        with pytest.raises(BoxLost):
            box.shell.run("true")
    assert is_swept_by_the_next_launcher(traces), traces.left()


def is_swept_by_the_next_launcher(traces: Traces) -> bool:
    """Nothing else can remove what a launcher that was killed had on the host."""
    if not wait_until(lambda: not [x for x in traces.left() if x.startswith("process")], SOON):
        return False
    next_one = Operator(traces.who, folder=traces.folder)
    try:
        with next_one.box() as box:
            assert box.commands.run("echo ok").stdout == "ok\n"
    finally:
        next_one.close()
    return traces.are_gone(SOON)


def test_what_is_left_when_all_are_killed_is_gone_with_the_next_launcher(who: str) -> None:
    with operated(who) as mine:
        traces = busy(mine)
        stop(mine.find("hutch-launcher"))
        mine.kill()
    assert is_swept_by_the_next_launcher(traces), traces.left()


def test_a_process_killed_while_it_makes_boxes_leaves_nothing(who: str) -> None:
    make = "while True: kept.append(Sandbox.create())"
    for _ in range(4):
        with operated(who) as mine:
            mine.box()
            mine.tell({"python": make})
            time.sleep(random.uniform(0.0, 0.3))
            traces = mine.traces()
            more = list(mine.below())  # since then
            mine.kill()
            assert traces.are_gone(SOON), traces.left()
            assert wait_until(lambda pids=more: not any(alive(pid) for pid in pids), SOON)


def test_a_zygote_killed_while_boxes_are_made_costs_only_those(who: str) -> None:
    make = """
import threading, time
end = time.monotonic() + 1.5
answer = {"made": 0, "refused": 0}
while time.monotonic() < end or answer["made"] < 4 and answer["refused"] < 1000:
    try:
        with Sandbox.create() as box: box.commands.run("true")
        answer["made"] += 1
    except Exception as exc:
        answer["refused"] += 1
        answer[type(exc).__name__] = str(exc)
"""
    with operated(who) as mine:
        mine.box().close()
        mine.tell({"python": make})
        for _ in range(3):
            time.sleep(0.3)
            stop(mine.find("hutch-zygote"))
        answer = mine.hear()
        assert answer["made"] > 3
        assert set(answer) <= {"made", "refused", "BoxLost", "StartFailed"}, answer
        with mine.box() as box:
            assert box.commands.run("echo ok").stdout == "ok\n"


def test_a_closed_box_is_gone_when_close_returns(operator: Operator) -> None:
    box = operator.box()
    box.shell.run("setsid sleep 1000 & (trap '' TERM; sleep 1000) & true")
    box.commands.run(["bash", "-c", "while :; do :; done"], background=True)
    guest = operator.guests()[-1]
    inside = [guest, *below(guest)]
    assert len(inside) > 5
    box.close()
    assert [pid for pid in inside if alive(pid)] == []
    box.close()
    for act in (lambda: box.commands.run("true"), lambda: box.files.read("x"), box.stats):
        with pytest.raises(BoxLost):
            act()


def test_a_box_that_could_not_start_leaves_nothing(operator: Operator) -> None:
    operator.box().close()
    before = operator.traces()
    for options in ({"workdir": "/nowhere\0"}, {"image": "none"}, {"user": "hutch"},
                    {"mounts": ["/nowhere:/srv/x"]}, {"mounts": ["/tmp:/proc/x"]}):  # fmt: skip
        with pytest.raises(HutchError):
            operator.box(**options)
    assert wait_until(lambda: len(operator.below()) == 2, SOON), operator.below()
    assert not [line for line in before.left() if "hutch-" in line and "cgroup" in line]


def test_a_dead_launcher_is_an_error_for_the_operator_and_not_a_hang(who: str) -> None:
    with operated(who) as mine:
        mine.box()
        traces = mine.traces()
        stop(mine.find("hutch-launcher"))
        try:
            box: FarThing | None = mine.box()
        except BackendUnavailable:
            box = None  # it says so
        if box:
            assert box.commands.run("echo ok").stdout == "ok\n"  # or makes a new one
    assert is_swept_by_the_next_launcher(traces), traces.left()
