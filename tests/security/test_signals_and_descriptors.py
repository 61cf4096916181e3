"""What a program in a box starts with, and what it can do to the processes around it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hutch.errors import HutchError

from .findings import probe
from .hosts import FarThing, Operator


def test_a_box_survives_every_signal_to_its_guest(box: FarThing) -> None:
    box.commands.run("for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; sleep 0.2")
    assert box.commands.run("echo alive").stdout == "alive\n"


def test_only_a_box_of_an_ordinary_user_may_signal_its_guest_at_all(
    box: FarThing, operator: Operator
) -> None:
    result = box.commands.run("kill -0 1")
    assert (result.exit_code == 0) is (not operator.ranged)


def test_a_box_survives_the_death_of_everything_it_may_kill(box: FarThing) -> None:
    box.shell.run("sleep 1000 & kill -9 -1")
    box.commands.run(["python3", "-c", "import os; os.kill(-1, 9)"])
    assert box.commands.run("echo alive").stdout == "alive\n"
    assert box.shell.run("echo alive").stdout == "alive\n"


@pytest.mark.parametrize("signals", ["1 2 3 10 12 13 14 15 20", "6 11", "17 18 19", "9", "34 64"])
def test_an_exit_code_is_true_whatever_was_sent_to_the_keeper(box: FarThing, signals: str) -> None:
    script = f"for s in {signals}; do kill -$s $PPID 2>/dev/null; done; sleep 0.1; exit 7"
    assert box.commands.run(["sh", "-c", script], timeout=30).exit_code == 7
    assert box.commands.run("echo alive").stdout == "alive\n"


LIST = "import os; print(*[fd for fd in range(300) if os.path.lexists(f'/proc/self/fd/{fd}')])"
# In a program, in a child of a child, and in what a shell turns into.
THRICE = "python3 /tmp/list.py; sh -c 'python3 /tmp/list.py; :'; exec python3 /tmp/list.py"


def test_a_first_program_a_child_and_its_successor_have_three_descriptors(box: FarThing) -> None:
    box.files.write("/tmp/list.py", LIST)
    assert box.commands.run(["sh", "-c", THRICE]).stdout == "0 1 2\n" * 3
    assert box.shell.run(f"({THRICE})").stdout == "0 1 2\n" * 3


def test_a_program_on_a_terminal_has_three_descriptors_and_a_terminal_of_the_box(
    box: FarThing,
) -> None:
    box.files.write("/tmp/list.py", LIST)
    terminal = box.pty.open(["sh", "-c", "python3 /tmp/list.py; tty; echo $(ls /dev/pts)"])
    seen = terminal.wait(timeout=30).output.replace("\r", "").splitlines()
    assert seen == ["0 1 2", "/dev/pts/0", "0 ptmx"]


@pytest.mark.parametrize("folder", ["/proc/self/fd/{n}", "/proc/1/cwd", "/proc/1/root", "/proc/1"])
def test_a_working_directory_cannot_lead_out_of_a_box(
    box: FarThing, canary: dict[str, Any], folder: str
) -> None:
    # CVE-2024-21626: runc kept a descriptor of the host's file system open here.
    climb = "../" * 20 + canary["file"].lstrip("/")
    for number in range(3, 40) if "{n}" in folder else [0]:
        try:
            result = box.commands.run(["cat", climb], cwd=folder.format(n=number))
        except HutchError:
            continue
        assert canary["token"] not in result.output


def test_a_program_starts_with_default_signals_umask_and_priority(box: FarThing) -> None:
    # An operator ignores USR1 and what libc keeps for itself, and blocks TERM: see hosts.py.
    script = "grep -E '^Sig(Blk|Ign)' /proc/self/status; umask; nice"
    _, blocked, _, ignored, *rest = box.commands.run(["sh", "-c", script]).stdout.split()
    assert (int(blocked, 16), int(ignored, 16)) == (0, 0)
    assert rest == ["0022", str(os.getpriority(os.PRIO_PROCESS, 0))]


def test_a_program_starts_with_hard_limits_and_no_timer(box: FarThing) -> None:
    script = (
        "import resource as r, signal, ctypes; death = ctypes.c_int();"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(death));"
        "print([r.getrlimit(n)[1] for n in (r.RLIMIT_CORE, r.RLIMIT_NOFILE, r.RLIMIT_RTPRIO)],"
        "signal.getitimer(0), death.value)"
    )
    assert box.commands.run(["python3", "-c", script]).stdout == "[1, 4096, 0] (0.0, 0.0) 0\n"


def test_root_in_a_box_can_do_no_more_than_anyone_else_in_it(
    operator: Operator, canary: dict[str, Any]
) -> None:
    if not operator.ranged:
        with pytest.raises(HutchError, match=r"one user|relax"):
            operator.box(user="root")
        return
    with operator.box(user="root", mounts=[f"{canary['gift']}:/srv/gift:ro"]) as box:
        assert box.commands.run("id -u").stdout == "0\n"
        found = probe(box, canary)
    assert found.open("F01", "F02", "F03", "F05", "F06", "F08", "F09", "F10", "F13", "F15") == {}
    assert found.open("K01", "K03", "K09", "P01", "P02", "P03", "P12", "N01", "N02") == {}
