"""What /proc tells a box of the machine it is on, and a caller of the guest that answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hutch.errors import HutchError

from .hosts import FarThing, Operator

OF_THE_MACHINE = [
    "cmdline", "bootconfig", "partitions", "diskstats", "mdstat", "swaps", "consoles", "misc",
    "buddyinfo", "zoneinfo", "schedstat", "pressure/cpu", "pressure/memory", "version_signature",
]  # fmt: skip


def test_a_box_does_not_see_how_the_machine_was_started_nor_its_disks(box: FarThing) -> None:
    for name in OF_THE_MACHINE:
        assert box.commands.run(f"cat /proc/{name} 2>/dev/null").stdout == "", name


def test_programs_still_find_what_they_need_in_proc(box: FarThing) -> None:
    for name in ("cpuinfo", "meminfo", "stat", "vmstat", "loadavg", "uptime", "version"):
        assert box.commands.run(f"cat /proc/{name}").stdout, name
    assert box.commands.run("free && uptime").exit_code == 0


def test_a_box_has_a_boot_id_of_its_own(operator: Operator) -> None:
    if operator.who == "docker":
        pytest.skip("an engine shows the machine's own: SECURITY.md says so")
    path = "/proc/sys/kernel/random/boot_id"
    with operator.box() as one, operator.box() as other:
        seen = [box.commands.run(f"cat {path}").stdout for box in (one, other)]
        assert one.commands.run(f"echo x > {path}").exit_code != 0
    assert all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\n", text) for text in seen)
    assert len({*seen, Path(path).read_text()}) == 3


OWN = [
    "/proc/self/maps", "/proc/self/smaps", "/proc/self/auxv", "/proc/self/stat", "/proc/1/maps",
    "/proc/thread-self/maps", "/proc/self/task/1/maps", "/proc/self/fdinfo/0", "/dev/fd/../maps",
]  # fmt: skip


@pytest.mark.parametrize("path", OWN)
def test_a_caller_cannot_read_what_proc_has_about_the_guest(box: FarThing, path: str) -> None:
    box.commands.run("ln -s /proc/self /workspace/self; ln -s /proc/self/maps /workspace/maps")
    through = [path, path.replace("/proc/self", "/workspace/self"), "/workspace/maps"]
    for way in through:
        with pytest.raises(HutchError):
            box.files.read(way)


def test_a_search_or_a_listing_does_not_look_into_the_guest(box: FarThing) -> None:
    assert [found for found in box.files.search("r-xp", "/proc") if "maps" in found.path] == []
    with pytest.raises(HutchError):
        box.files.list("/proc/self/fd")
    for name in ("exe", "cwd", "root"):
        assert box.files.stat(f"/proc/self/{name}").target is None
    assert box.files.read("/proc/version")


def test_a_program_can_still_read_what_proc_has_about_itself(box: FarThing) -> None:
    assert "r-xp" in box.commands.run("cat /proc/self/maps").stdout
