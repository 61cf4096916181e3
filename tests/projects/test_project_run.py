"""A project in a box: a copy or the folder itself, what it prints, and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from projects_of_tests import listed, run, snapshot
from prompt import PATIENCE, boxes, hutch, start  # noqa: F401

pytestmark = pytest.mark.usefixtures("boxes")


# --- a copy --------------------------------------------------------------------------------


def test_the_command_finds_the_project_where_it_starts(project: Path) -> None:
    (project / "sub").mkdir()
    (project / "sub" / "b b.txt").write_text("b\n")
    done = run(project, "--", "sh", "-c", "pwd; cat a.txt 'sub/b b.txt'")
    assert (done.stdout, done.stderr, done.returncode) == (b"/workspace\na\nb\n", b"", 0)


def test_the_project_stays_as_it_was(project: Path) -> None:
    (project / "sub").mkdir()
    before = snapshot(project)
    done = run(project, "--", "sh", "-c", "echo x > a.txt; echo y > new; rm -r sub; ls")
    assert (done.stdout, done.returncode) == (b"a.txt\nnew\n", 0)
    assert snapshot(project) == before


def test_nothing_of_a_name_reaches_a_shell(project: Path, tmp_path: Path) -> None:
    odd = ["-rf", "$(touch owned)", "; touch owned", "new\nline", "`touch owned`", "é"]
    for name in odd:
        (project / name).write_text(name)
    done = run(project, "--out", "*", "--", "ls", "-1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(odd) <= set(listed(project)) and not list(tmp_path.rglob("owned"))


def test_names_need_not_be_text(project: Path) -> None:
    Path(os.fsdecode(os.fsencode(project) + b"/\xff\xfe")).write_text("odd")
    assert run(project, "--", "sh", "-c", "cat *").stdout.endswith(b"odd")


def test_modes_times_and_links_are_those_of_the_project(project: Path) -> None:
    (project / "run").write_text("#!/bin/sh\necho ran\n")
    (project / "run").chmod(0o755)
    os.utime(project / "a.txt", (1_000_000_000, 1_000_000_000))
    (project / "link").symlink_to("a.txt")
    (project / "out").symlink_to("/no/such/place")
    script = "./run; cat link; readlink out; test a.txt -ot run && echo older"
    done = run(project, "--", "sh", "-c", script)
    assert done.stdout == b"ran\na\n/no/such/place\nolder\n", done.stderr


def test_nothing_is_read_through_a_link(project: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (project / "link").symlink_to(tmp_path / "secret")
    (project / "folder").symlink_to(tmp_path)
    done = run(project, "--", "sh", "-c", "cat link folder/secret")
    assert done.returncode != 0 and b"secret" not in done.stdout


def test_what_tools_make_for_this_machine_is_left_out(project: Path) -> None:
    for name in ("__pycache__", ".pytest_cache", "sub/.mypy_cache", "environment"):
        (project / name).mkdir(parents=True)
        (project / name / "x").write_text("x")
    (project / "environment" / "pyvenv.cfg").write_text("home = /usr\n")
    (project / ".git").mkdir()
    (project / "node_modules").mkdir()  # no package.json says what would be in there
    done = run(project, "--", "sh", "-c", "find . -mindepth 1 | sort")
    assert done.stdout == b"./.git\n./a.txt\n./node_modules\n./sub\n"


def test_a_fifo_in_a_project_does_not_hang_it(project: Path) -> None:
    os.mkfifo(project / "pipe")
    assert run(project, "--", "ls").stdout == b"a.txt\n"


def test_a_project_larger_than_the_disk_is_refused_with_advice(project: Path) -> None:
    with (project / "big").open("wb") as file:
        file.truncate(40 << 20)
    done = run(project, "--memory", "64m", "--disk", "32m", "--", "true")
    assert done.returncode == 125 and done.stderr.count(b"\n") == 1
    assert b"--disk" in done.stderr and b"--mount" in done.stderr


def test_there_must_be_such_a_folder(tmp_path: Path) -> None:
    done = run(tmp_path / "nope", "--", "true")
    assert done.returncode == 125 and b"no such folder" in done.stderr


# --- the folder itself ---------------------------------------------------------------------


@pytest.fixture
def owned(project: Path) -> Path:
    """A project that belongs to a user: a container does not act as root."""
    if os.geteuid() == 0:
        for path in (project, *project.rglob("*")):
            os.chown(path, 4321, 4321)
        for parent in project.parents:
            if parent.stat().st_uid == os.geteuid() and parent != Path("/tmp"):
                parent.chmod(parent.stat().st_mode | 0o055)
    return project


def test_mount_alone_shows_the_folder_itself(owned: Path) -> None:
    done = run(owned, "--mount", "--", "sh", "-c", "cat a.txt; echo new > b.txt")
    assert (done.stdout, done.returncode) == (b"a\n", 0), done.stderr
    assert (owned / "b.txt").read_text() == "new\n"
    assert (owned / "b.txt").stat().st_uid == owned.stat().st_uid


def test_mount_with_a_value_is_still_another_folder(project: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir(mode=0o755)
    (tmp_path / "more" / "m.txt").write_text("more\n")
    done = run(project, "--mount", f"{tmp_path}/more:/more:ro", "cat", "a.txt", "/more/m.txt")
    assert (done.stdout, done.returncode) == (b"a\nmore\n", 0), done.stderr


def test_mount_alone_needs_no_dashes_after_it(owned: Path) -> None:
    assert run(owned, "--mount", "cat", "a.txt").stdout == b"a\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--copy", "--mount", "--", "true"], "exclude each other"),
     (["--mount", "--out", "x", "--", "true"], "--out is not needed with --mount"),
     (["--workspace", ".", "--", "true"], "choose one"),
     (["--out", "../x", "--", "true"], "a path in the project"),
     (["--out", "/etc/passwd", "--", "true"], "a path in the project"),
     ([], "no command given")],
)  # fmt: skip
def test_what_makes_no_sense_together_is_said(project: Path, words: list[str], says: str) -> None:
    done = run(project, *words)
    assert done.returncode == 125 and says.encode() in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_file_is_no_project(project: Path) -> None:
    done = run(project / "a.txt", "--", "true")
    assert done.returncode == 125 and b"a.txt is a file; give the project" in done.stderr


def test_a_folder_of_roots_is_not_shown_to_a_container_but_copied(tmp_path: Path) -> None:
    if tmp_path.stat().st_uid != 0:
        pytest.skip("only root has folders of root's")
    done = run(tmp_path, "--backend", "docker", "--mount", "--", "true")
    assert done.returncode == 125 and b"belongs to root" in done.stderr
    assert b"use --copy" in done.stderr and b"read-only" not in done.stderr


@pytest.mark.parametrize("word", ["--persistent", "--reset", "--copy", "--out=x", "--extra=x"])
def test_what_is_for_projects_needs_one(word: str) -> None:
    done = hutch("run", word, "--", "true")
    assert done.returncode == 125 and b"needs --project" in done.stderr


# --- what comes back -----------------------------------------------------------------------


def test_results_come_back_when_they_are_asked_for(project: Path) -> None:
    make = "mkdir -p dist/deep build; echo 1 > dist/deep/one; echo 2 > build/x.whl; echo 3 > no"
    done = run(project, "--out", "dist", "--out", "build/*.whl", "--", "sh", "-c", make)
    assert (done.stderr, done.returncode) == (b"", 0)
    assert listed(project) == {
        "a.txt": b"a\n", "build": None, "build/x.whl": b"2\n", "dist": None, "dist/deep": None,
        "dist/deep/one": b"1\n",
    }  # fmt: skip
    assert (project / "dist/deep/one").stat().st_uid == project.stat().st_uid


def test_results_come_back_of_a_command_that_failed(project: Path) -> None:
    done = run(project, "--out", "a.txt", "--out", "nope", "--", "sh", "-c", "echo x>a.txt; exit 7")
    assert done.returncode == 7
    assert done.stderr == b"hutch: --out nope: no such file in the box\n"
    assert (project / "a.txt").read_text() == "x\n"


def test_results_come_back_after_a_timeout(project: Path) -> None:
    script = "echo x > a.txt; sleep 1000"
    done = run(project, "--timeout", "1", "--out", "a.txt", "--", "sh", "-c", script)
    assert done.returncode == 124 and b"timed out" in done.stderr
    assert (project / "a.txt").read_text() == "x\n"


def test_a_box_cannot_write_outside_of_the_project_by_links(project: Path, tmp_path: Path) -> None:
    (project / "trap").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").mkdir()
    (project / "target").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("safe")
    make = "rm trap target; mkdir trap; echo x > trap/x; echo x > target; ln -s /etc dist; echo y>b"
    words = ["--out", "trap", "--out", "target", "--out", "dist", "--out", "b"]
    done = run(project, *words, "--", "sh", "-c", make)
    assert done.returncode == 0
    assert not list((tmp_path / "outside").iterdir())
    assert (tmp_path / "victim").read_text() == "safe"
    assert (project / "b").read_text() == "y\n" and not (project / "dist").exists()
    assert done.stderr.count(b"not copied") == 2 and b"skipped 1" in done.stderr


def test_a_sparse_giant_does_not_fill_this_machine(project: Path) -> None:
    done = run(project, "--memory", "64m", "--out", "big", "--", "truncate", "-s", "150M", "big")
    assert done.returncode == 0 and b"not copied: big: more than" in done.stderr
    assert listed(project) == {"a.txt": b"a\n"}


# --- as `hutch run` ------------------------------------------------------------------------


def test_output_comes_as_it_is_made(project: Path) -> None:
    talk = "echo first; read line; echo got $line"
    words = ["run", "--project", str(project), "--stdin", "--", "sh", "-c", talk]
    with start(*words, stdin=subprocess.PIPE) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == b"first\n"
        process.stdin.write(b"it\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"got it\n"
        assert process.wait(PATIENCE) == 0


def test_json_tells_of_the_project_too(project: Path) -> None:
    words = ["--json", "--out", "a.txt", "--out", "nope", "--", "sh", "-c", "echo hi; exit 3"]
    done = run(project, *words)
    told = json.loads(done.stdout)
    assert (told["exit_code"], told["stdout"], done.returncode) == (3, "hi\n", 3)
    assert told["project"] == {
        "path": str(project), "copied": 1, "out": 1, "missing": ["nope"], "refused": [],
        "needs": [], "not_installed": [], "notes": [],
    }  # fmt: skip


def test_an_error_is_json_too_where_that_is_asked_for(project: Path) -> None:
    (project / "pyproject.toml").write_text("[")
    done = run(project, "--json", "--", "true")
    assert done.returncode == 125
    assert json.loads(done.stdout)["error"]["code"] == "invalid_request"


def test_a_program_that_is_not_there_gives_127(project: Path) -> None:
    assert run(project, "--", "no-such-program").returncode == 127
