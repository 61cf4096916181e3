"""The private copy of the code that a launcher runs from."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hutch.backends import builds
from installed import Installation


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_a_copy_has_all_that_is_imported_by_what_runs_from_it(folder: int, tmp_path: Path) -> None:
    build = builds.take(folder)
    root = tmp_path / f"code-{build.name}"
    modules = ["lasting", "doctor", "unpacker", "zygote"]
    code = f"import sys; sys.path.append({str(root)!r})\n" + "\n".join(
        f"import hutch.backends.namespaces.{name}" for name in modules
    )
    subprocess.run([builds.interpreter(), "-I", "-S", "-c", code], check=True)
    assert (root / "hutch/kernel/main.py").is_file() and (root / "cloudpickle").is_dir()
    os.close(build.fd)


def test_a_copy_is_made_once_and_goes_with_the_last_who_holds_it(
    folder: int, tmp_path: Path
) -> None:
    first, second = builds.take(folder), builds.take(folder)
    assert first.name == second.name == builds.installed()
    builds.sweep(folder)
    builds.release(folder, first)
    assert [path.name for path in tmp_path.iterdir()] == [f"code-{first.name}"]
    builds.release(folder, second)
    assert not list(tmp_path.iterdir())


def test_a_copy_that_others_can_write_to_is_not_run(folder: int, tmp_path: Path) -> None:
    os.close(builds.take(folder).fd)
    next(tmp_path.iterdir()).chmod(0o770)
    with pytest.raises(builds.CannotCopy):
        builds.take(folder)


def test_what_was_left_unfinished_goes_and_spare_copies_stay(folder: int, tmp_path: Path) -> None:
    for name, age in ((".new-old", 3600), (".new-young", 0), ("code-a", 10), ("code-b", 20)):
        (tmp_path / name).mkdir(0o700)
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    builds.sweep(folder, spare=4)
    assert {path.name for path in tmp_path.iterdir()} == {".new-young", "code-a", "code-b"}
    builds.sweep(folder, spare=1)
    assert {path.name for path in tmp_path.iterdir()} == {".new-young", "code-a"}


def test_copies_in_use_are_not_counted_as_spare(folder: int, tmp_path: Path) -> None:
    for name in ("used", "unused"):
        (tmp_path / f"code-{name}").mkdir(0o700)
    os.utime(tmp_path / "code-unused", (0, 0))
    held = builds.hold(folder, "used")
    assert held
    builds.sweep(folder, spare=1)
    assert (tmp_path / "code-unused").is_dir()
    os.close(held.fd)


def test_a_copy_that_was_replaced_before_it_was_locked_stays(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "code-a", fcntl.flock
    path.mkdir(0o700)

    def replace_and_lock(fd: int, how: int) -> None:
        path.rename(tmp_path / "before")
        path.mkdir(0o700)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", replace_and_lock)
    builds.remove(folder, "code-a")
    assert path.is_dir()


def test_a_file_that_is_not_copied_whole_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(4000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As on a full disk: the first write takes what there is room for, the next one fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            builds._copy(str(source), str(tmp_path / "copy"), source.stat())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


EMBEDDED = """
import sys
from hutch import Sandbox

with Sandbox.create() as box:
    print(box.run_code("40 + 2").text, flush=True)
    sys.stdin.readline()
    with Sandbox.create() as other:
        print(box.shell.run("echo still here").stdout + other.run_code("6 * 7").text, flush=True)
"""


@pytest.mark.namespaces("of launchers, which containers do not have")
def test_a_program_with_boxes_goes_on_after_an_upgrade_in_place(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    installation.install("0.7.1")
    argv = [installation.program[0], "-I", "-c", EMBEDDED]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdout and program.stdin
        assert program.stdout.readline() == "42\n"
        installation.install("0.7.2")
        said, _ = program.communicate("go on\n", timeout=120)
    assert said == "still here\n42\n"
