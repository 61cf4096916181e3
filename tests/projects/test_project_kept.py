"""A box that is kept for a project from run to run, and for no other."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from projects_of_tests import WITH_PYTHON, listed, run, snapshot
from prompt import PATIENCE, boxes, start  # noqa: F401

from daemon_of_tests import Daemon
from hutch import factory
from hutch.projects.saved import name_of

pytestmark = pytest.mark.usefixtures("boxes")


def keep(project: Path, script: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    return run(project, "--persistent", *words, "--", "sh", "-c", script)


def test_files_of_the_box_are_there_in_the_next_run(project: Path) -> None:
    before = snapshot(project)
    keep(project, "echo 1 > made; mkdir -p d/e; ln -s made link; echo h > ~/home; exit 3")
    done = keep(project, "cat made link ~/home; ls -d d/e")
    assert (done.stdout, done.returncode) == (b"1\n1\nh\nd/e\n", 0), done.stderr
    assert snapshot(project) == before


def test_what_changed_in_the_project_arrives(project: Path) -> None:
    (project / "sub").mkdir()
    (project / "sub" / "gone").write_text("gone")
    (project / "turns").write_text("file")
    keep(project, "echo box > sub/own; echo box > b.txt; cat sub/gone turns")
    (project / "a.txt").write_text("new a\n")
    (project / "b.txt").write_text("new b\n")
    shutil.rmtree(project / "sub")
    (project / "turns").unlink()
    (project / "turns").mkdir()
    (project / "turns" / "x").write_text("x\n")
    done = keep(project, "cat a.txt b.txt turns/x; ls sub")
    assert done.stdout == b"new a\nnew b\nx\nown\n", done.stderr


def test_what_the_box_changed_stays_until_the_project_changes_it(project: Path) -> None:
    keep(project, "echo box > a.txt")
    assert keep(project, "cat a.txt").stdout == b"box\n"
    (project / "a.txt").write_text("project\n")
    assert keep(project, "cat a.txt").stdout == b"project\n"


def test_results_of_a_kept_box_come_back_too(project: Path) -> None:
    keep(project, "echo made > made")
    keep(project, "true", "--out", "made")
    assert listed(project) == {"a.txt": b"a\n", "made": b"made\n"}


def test_a_run_that_keeps_nothing_sees_nothing_of_it(project: Path) -> None:
    keep(project, "echo 1 > made")
    assert run(project, "--", "ls").stdout == b"a.txt\n"
    assert keep(project, "ls").stdout == b"a.txt\nmade\n"


def test_reset_removes_it(project: Path, data: Path) -> None:
    keep(project, "echo 1 > made")
    assert list((data / "projects/boxes").iterdir())
    done = run(project, "--reset")
    assert (done.stdout, done.returncode) == (f"removed the saved box of {project}\n".encode(), 0)
    assert list((data / "projects/boxes").iterdir()) == []
    assert run(project, "--reset").stdout == f"there is no saved box for {project}\n".encode()
    assert keep(project, "ls").stdout == b"a.txt\n"


def test_reset_before_a_command_begins_anew(project: Path) -> None:
    keep(project, "echo 1 > made")
    assert keep(project, "ls; echo 2 > two", "--reset").stdout == b"a.txt\n"
    assert keep(project, "ls").stdout == b"a.txt\ntwo\n"


def test_no_two_projects_share_a_box(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / project.name
    other.mkdir(parents=True)
    keep(project, "echo 1 > made")
    assert keep(other, "ls").stdout == b""
    assert name_of(project) != name_of(other)


def test_a_project_is_the_same_by_every_name_of_its_folder(project: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(project)
    keep(tmp_path / "link", "echo 1 > made")
    done = run(Path("."), "--persistent", "--", "cat", "made", cwd=project)
    assert done.stdout == b"1\n"


def test_two_runs_at_once_do_not_share_it(project: Path) -> None:
    words = ["run", "--project", str(project), "--persistent", "--stdin", "--"]
    talk = ["sh", "-c", "echo go; cat; echo 1 > made"]
    with start(*words, *talk, stdin=subprocess.PIPE) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == b"go\n"
        for done in (keep(project, "true"), run(project, "--reset")):
            assert done.returncode == 125 and b"another run is using" in done.stderr
        assert run(project, "--", "ls").stdout == b"a.txt\n"
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
    assert keep(project, "cat made").stdout == b"1\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_broken_off_leaves_it_as_it_was(
    project: Path, data: Path, number: signal.Signals
) -> None:
    keep(project, "echo before > made")
    words = ["run", "--project", str(project), "--persistent", "--"]
    with start(*words, "sh", "-c", "echo after > made; echo go; sleep 1000") as process:
        assert process.stdout and process.stdout.readline() == b"go\n"
        process.send_signal(number)
        process.wait(PATIENCE)
    assert keep(project, "cat made").stdout == b"before\n"
    (folder,) = (path for path in (data / "projects/boxes").iterdir() if path.is_dir())
    assert len(list(folder.iterdir())) == 3  # what there is, and two folders


def test_nobody_else_can_read_what_is_kept(project: Path, data: Path) -> None:
    keep(project, "true")
    assert (data / "projects/boxes").stat().st_mode & 0o077 == 0


def test_a_box_cannot_fill_this_machine_by_being_kept(project: Path, data: Path) -> None:
    done = keep(project, "truncate -s 150M big", "--memory", "64m")
    assert done.returncode == 125 and b"too large to be saved" in done.stderr
    size = sum(path.stat().st_size for path in data.rglob("*.tar"))
    assert size < 100 << 20
    assert keep(project, "ls").stdout == b"a.txt\n"


def test_a_box_of_another_kind_is_not_mixed_up_with_it(project: Path) -> None:
    keep(project, "echo 1 > made", *WITH_PYTHON)
    done = keep(project, "ls", "--image", "another")
    assert done.returncode == 125 and b"--reset" in done.stderr and done.stderr.count(b"\n") == 1
    backend = f"--backend {factory.default()}".encode()
    assert b"was made with " + backend in done.stderr
    assert b"not with " + backend + b" --image another" in done.stderr


@pytest.mark.skipif(factory.default() != "namespaces", reason="a container does not act as root")
def test_what_is_kept_never_lands_in_a_folder_that_is_mounted(project: Path) -> None:
    keep(project, "echo 1 > made; echo h > ~/home")
    done = keep(project, "ls; cat ~/home; echo i > ~/home", "--mount")
    assert done.stdout == b"a.txt\nh\n"
    assert os.listdir(project) == ["a.txt"]
    assert keep(project, "cat made ~/home").stdout == b"1\ni\n"


def test_it_is_the_same_with_a_server(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon(tmp_path / "server") as daemon:
        assert daemon.key
        monkeypatch.setenv("HUTCH_URL", daemon.url)
        monkeypatch.setenv("HUTCH_API_KEY", daemon.key)
        done = keep(project, "cat a.txt; echo 1 > made; exit 3", "--out", "made")
        assert (done.stdout, done.returncode) == (b"a\n", 3), done.stderr
        assert (project / "made").read_text() == "1\n"
        assert keep(project, "ls").stdout == b"a.txt\nmade\n"
        done = run(project, "--mount", "--", "true")
        assert done.returncode == 125 and b"a server cannot see" in done.stderr
        assert b"removed" in run(project, "--reset").stdout
