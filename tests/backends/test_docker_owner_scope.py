"""What processes that were killed leave in the folder for temporary files."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hutch.backends.docker import owner_scope
from hutch.backends.kubernetes import KubernetesBackend
from hutch.backends.linux import temporary
from hutch.backends.linux.folders import kept_name
from hutch.errors import BackendUnavailable


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def _of_a_dead_process() -> str:
    make = "from hutch.backends.linux import temporary; print(temporary.new_folder())"
    argv = [sys.executable, "-c", make]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def test_folders_of_the_dead_are_swept_and_of_the_living_are_not() -> None:
    ours, dead = temporary.new_folder(), _of_a_dead_process()
    Path(dead, "docker").mkdir()
    assert temporary.sweep_folders() == [dead]
    assert os.path.isdir(ours) and not os.path.exists(dead)


def test_a_backend_whose_boxes_are_elsewhere_sweeps_them_too() -> None:
    dead = _of_a_dead_process()
    backend = KubernetesBackend(lambda: pytest.fail("no box is made"))

    async def folder() -> str:
        made = await backend.folder()
        assert os.path.isdir(made) and not os.path.exists(dead)
        await backend.close()
        return made

    assert not os.path.exists(asyncio.run(folder()))


def test_folders_of_processes_with_other_numbers_than_ours_are_left_alone(tmp_path: Path) -> None:
    dead = Path(_of_a_dead_process())
    pid, world = dead.name.split("-")[1:3]
    assert world == os.readlink("/proc/self/ns/pid")[5:-1]
    theirs = dead.rename(tmp_path / f"hutch-{pid}-{int(world) + 1}-{'0' * 16}")
    assert temporary.sweep_folders() == [] and theirs.is_dir()


def test_a_yard_whose_folder_was_tidied_away_has_no_boxes() -> None:
    made = owner_scope.of_process()
    os.rmdir(made.boxes)
    assert made.places() == []


def test_a_scope_whose_maker_was_killed_before_it_wrote_its_name_gets_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / "name").touch(0o600)
    name = kept_name(str(folder), "name")
    assert kept_name(str(folder), "name") == name == (folder / "name").read_text()
    assert kept_name(str(folder), "other") != name
    (folder / "name").write_text(name[:20])
    with pytest.raises(BackendUnavailable, match="is damaged"):
        kept_name(str(folder), "name")
