"""Control groups of both versions: what is read of the machine, what is written, what is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hutch.backends.linux import cgroup
from hutch.types import GiB, Limits

V1 = """\
30 24 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 24 0:27 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
32 24 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
33 24 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def test_version_1_is_one_folder_per_controller() -> None:
    own = "4:memory:/user/me\n3:pids:/\n2:cpu,cpuacct:/user\n0::/\n"
    mounts = cgroup.parse(V1, own)
    assert mounts.v1["cpu"] == "/sys/fs/cgroup/cpu,cpuacct"
    assert (mounts.own_v1["memory"], mounts.own_v1["cpu"]) == ("/user/me", "/user")
    assert mounts.v2 == "/sys/fs/cgroup/unified"


def test_version_2_is_one_folder_for_all() -> None:
    mounts = cgroup.parse(V2, "0::/user.slice/user-1000.slice\n")
    assert (mounts.v1, mounts.v2) == ({}, "/sys/fs/cgroup")
    assert mounts.own_v2 == "/user.slice/user-1000.slice"


@pytest.mark.parametrize("version", [1, 2])
def test_every_controller_gets_its_limit(version: int) -> None:
    limits = Limits(memory=GiB, pids=77, cpus=1.5)
    written = {c: dict(cgroup.settings(version, c, limits)) for c in cgroup.WANTED}
    assert "77" in written["pids"].values()
    assert str(GiB) in written["memory"].values()
    assert any("150000" in value for value in written["cpu"].values())


def tree(folder: Path, controllers: str) -> Path:
    """A folder that looks like a version 2 hierarchy with these controllers."""
    folder.mkdir(exist_ok=True)
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text("")
    (folder / "cgroup.procs").write_text("")
    return folder


def test_a_group_of_version_2_holds_all_limits_in_one_folder(tmp_path: Path) -> None:
    top = tree(tmp_path, "cpu memory pids")
    hierarchy = cgroup.Hierarchy(2, dict.fromkeys(cgroup.WANTED, str(top)), {})
    group = cgroup.Group(hierarchy, "hutch-1-a", Limits(pids=9))
    made = top / "hutch-1-a"
    assert (made / "pids.max").read_text() == "9"
    assert (made / "cpu.max").read_text() == "200000 100000"
    assert (made / "memory.max").read_text() == str(GiB)
    assert (made / "memory.swap.max").read_text() == "0"
    (made / "memory.events").write_text("low 0\noom_kill 3\n")
    (made / "cpu.stat").write_text("usage_usec 2500000\n")
    read = group.read()
    assert (read["oom_kills"], read["cpu_seconds"]) == (3, 2.5)


def test_the_top_of_the_whole_machine_is_not_rearranged(tmp_path: Path) -> None:
    top = tree(tmp_path, "hugetlb")  # none that we want, and no cgroup.events: it is the top
    found = cgroup._find_v2(cgroup.Mounts({}, str(top), {}, "/"))
    assert found.folders == {} and not (top / "hutch-host").exists()


def test_room_is_made_once_in_a_group_that_is_ours(tmp_path: Path) -> None:
    tree(tmp_path, "")
    own = tree(tmp_path / "mine", "")
    (own / "cgroup.events").write_text("")
    (own / "cgroup.subtree_control").write_text("cpu memory pids")
    for path in ("/mine", "/mine/hutch-host"):
        found = cgroup._find_v2(cgroup.Mounts({}, str(tmp_path), {}, path))
        assert found.folders["memory"] == str(own), path
    assert not list(own.rglob("hutch-host/hutch-host"))


def test_groups_of_dead_launchers_are_swept_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    dead = tmp_path / "hutch-999999999-a"
    alive = tmp_path / f"hutch-{os.getpid()}-b"
    other = tmp_path / "another-user"
    for folder in (dead, alive, other):
        folder.mkdir()
    cgroup.sweep(cgroup.Hierarchy(2, {"pids": str(tmp_path)}, {}))
    assert not dead.exists() and alive.exists() and other.exists()


def test_a_group_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "missing"
    good.mkdir()
    hierarchy = cgroup.Hierarchy(1, {"pids": str(good), "memory": str(bad)}, {})
    with pytest.raises(OSError):
        cgroup.Group(hierarchy, "hutch-1-a", Limits())
    assert list(good.iterdir()) == []


def test_a_machine_without_cgroups_is_told_apart_from_one_that_forbids_them() -> None:
    found = cgroup.find()
    assert found.version in (0, 1, 2)
    assert {*found.folders, *found.missing} - {cgroup.COUNTING} == set(cgroup.WANTED)
