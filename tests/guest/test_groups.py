"""What a guest reads of its own control groups, in both versions, and where there are none."""

from __future__ import annotations

from pathlib import Path

from hutch.guest.groups import ControlGroups

NONE = dict.fromkeys(("memory", "pids", "cpu_seconds", "oom_kills"))
ALL = {"memory": 4096, "pids": 7, "cpu_seconds": 2.5, "oom_kills": 3}


def written(folder: Path, **files: str) -> ControlGroups:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return ControlGroups(str(folder))


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    groups = written(
        tmp_path,
        memory__memory_dot_usage_in_bytes="4096\n",
        memory__memory_dot_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        pids__pids_dot_current="7\n",
        cpuacct__cpuacct_dot_usage="2500000000\n",
    )
    assert groups.numbers() == ALL and groups.oom_kills() == 3


def test_version_2_has_one_folder(tmp_path: Path) -> None:
    groups = written(
        tmp_path,
        cgroup_dot_controllers="cpu memory pids\n",
        memory_dot_current="4096\n",
        memory_dot_events="oom 9\noom_kill 3\noom_group_kill 0\n",
        pids_dot_current="7\n",
        cpu_dot_stat="usage_usec 2500000\nuser_usec 1\n",
    )
    assert groups.numbers() == ALL and groups.oom_kills() == 3


def test_what_is_not_told_is_not_known_rather_than_nothing(tmp_path: Path) -> None:
    assert ControlGroups(str(tmp_path / "none")).numbers() == NONE
    groups = written(
        tmp_path, memory__memory_dot_oom_control="oom_kill\n", pids__pids_dot_current="max"
    )
    assert groups.numbers() == NONE and groups.oom_kills() is None
