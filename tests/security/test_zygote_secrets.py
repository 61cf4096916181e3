"""The zygote is forked for every box: what it must not know, and what must not be the same."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from hutch.backends.namespaces import launch
from hutch.backends.namespaces.plan import BoxImage, plan
from hutch.errors import BoxLost
from hutch.types import Limits

from .hosts import Operator, alive, stop, wait_until
from .hosts import operator as operated


@pytest.fixture(autouse=True)
def _as_root() -> None:
    if os.geteuid():
        pytest.skip("only root may look into the processes of others")


def holds(pid: int, secret: str) -> bool:
    """Whether a text is anywhere in a process's memory."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            area, rights, *_ = line.split()
            if "r" not in rights or "[v" in line:
                continue
            begin, end = (int(number, 16) for number in area.split("-"))
            memory.seek(begin)
            try:
                if secret.encode() in memory.read(end - begin):
                    return True
            except OSError:
                continue
    return False


def test_a_secret_of_the_operator_is_in_no_process_that_a_box_descends_from(who: str) -> None:
    key = "sk-" + secrets.token_hex(16)
    with operated(who, OPENAI_API_KEY=key) as mine:
        in_memory = "key = __import__('os').environ['OPENAI_API_KEY'] * 2; kept.append(key)"
        mine.python(in_memory)
        with mine.box() as box:
            box.shell.run("true")
            box.commands.run("true")
            others = mine.below()
            assert {"hutch-launcher", "hutch-zygote"} <= set(others.values())
            assert holds(mine.pid, key)
            assert [name for pid, name in others.items() if holds(pid, key)] == []
            ours = [pid for pid, name in others.items() if name.startswith("hutch-")]
            assert [Path(f"/proc/{pid}/environ").read_bytes() for pid in ours] == [b""] * len(ours)


def test_a_box_s_environment_is_in_no_process_of_another_box(who: str) -> None:
    key = "sk-" + secrets.token_hex(16)
    with operated(who) as mine, mine.box(env={"LENT": key}) as first, mine.box() as second:
        first.shell.run("true")
        second.shell.run("true")
        zygote = mine.find("hutch-zygote")
        assert holds(mine.guests()[0], key)
        assert not holds(zygote, key)
        assert not holds(mine.guests()[1], key)


DRAW = """
import os, random, secrets, tempfile, uuid
print(random.random(), uuid.uuid4(), secrets.token_hex(), hash("text"), os.urandom(8).hex(),
      tempfile.mktemp(), uuid.UUID(open("/proc/sys/kernel/random/uuid").read().strip()), sep="\\n")
"""


def test_two_boxes_draw_different_random_numbers(operator: Operator) -> None:
    with operator.box() as first, operator.box() as second:
        drawn = [
            box.commands.run(["python3", "-c", DRAW]).stdout.split() for box in (first, second)
        ]
        assert len(drawn[0]) == 7
        assert [a for a, b in zip(*drawn, strict=True) if a == b] == []


def test_guests_draw_different_random_numbers(operator: Operator) -> None:
    def name_of_new_file() -> str:
        with operator.box() as box:
            watch = "import os\nwhile True: [print(n, flush=True) for n in os.listdir('/tmp')]"
            handle = box.commands.run(["python3", "-c", watch], background=True)
            while ".hutch-" not in handle.stdout():
                box.files.write("/tmp/x", "x" * 1000)
            return next(n for n in handle.stdout().split() if n.startswith(".hutch-"))

    assert name_of_new_file() != name_of_new_file()


def test_launcher_zygote_and_guests_have_one_thread_each(operator: Operator) -> None:
    with operator.box(), operator.box():
        for pid, name in operator.below().items():
            assert (name, len(os.listdir(f"/proc/{pid}/task"))) == (name, 1)


def test_the_death_of_the_zygote_costs_its_boxes_and_no_more(who: str) -> None:
    with operated(who) as mine:
        box = mine.box()
        running = box.commands.run(["sleep", "1000"], background=True)
        guests = mine.guests()
        stop(mine.find("hutch-zygote"))
        with pytest.raises(BoxLost):
            running.wait()
        with pytest.raises(BoxLost):
            box.commands.run("true")
        assert wait_until(lambda: not any(alive(pid) for pid in guests), 60)
        with mine.box() as after:
            assert after.commands.run("echo ok").stdout == "ok\n"


def test_user_code_comes_after_every_right_is_gone() -> None:
    wanted = plan(
        BoxImage(("/usr",), {}, {}), Limits(), mounts=(), files=frozenset(), user="user",
        workdir="/workspace", slot=1, cgroup=True,
    )  # fmt: skip
    names = [name for name, _ in launch._steps(wanted, [], b"", [], [])]
    order = ["ids", "keyring", "root", "proc /proc", "mask /proc/kcore", "freeze /proc/sys",
             "pivot", "close the root", "rights", "landlock", "seccomp", "imports"]  # fmt: skip
    places = [names.index(name) for name in order]
    assert places == sorted(places)
    assert names[-4:] == ["rights", "landlock", "seccomp", "imports"]


def test_a_guest_keeps_three_rights_in_its_own_box_and_a_program_none(operator: Operator) -> None:
    with operator.box():
        guest = operator.guests()[-1]
        lines = Path(f"/proc/{guest}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        # CAP_KILL, CAP_SETGID and CAP_SETUID, over uids of its own range.
        held = 0b11100000 if operator.ranged else 0
        for field in ("CapPrm", "CapEff"):
            assert int(status[field], 16) == held
        for field in ("CapBnd", "CapInh", "CapAmb"):
            assert int(status[field], 16) == 0
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert "0" not in status["Uid"].split()  # never root of the host
