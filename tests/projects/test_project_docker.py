"""The same on containers: with the Python of the image, or with none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from projects_of_tests import run, snapshot
from wheels_of_tests import make_wheel

from docker_of_tests import BUSYBOX, DEBIAN

pytestmark = pytest.mark.usefixtures("docker_engine")
Run = Callable[..., "CompletedProcess[bytes]"]


@pytest.fixture
def in_docker(project: Path) -> Run:
    def start(image: str, *words: str) -> CompletedProcess[bytes]:
        return run(project, "--backend", "docker", "--image", image, *words)

    return start


def test_a_project_runs_in_a_container_with_what_it_needs(
    project: Path, wheels: Path, in_docker: Run
) -> None:
    script = {"tool-1.0.data/scripts/tool": "#!python\nimport tool\nprint(tool.VERSION)\n"}
    make_wheel(wheels, "tool", files=script)
    (project / "requirements.txt").write_text("tool\n")
    before = snapshot(project)
    done = in_docker(DEBIAN, "--", "sh", "-c", "tool; cat a.txt; echo x > a.txt; exit 3")
    assert (done.stdout, done.stderr, done.returncode) == (b"1.0\na\n", b"", 3)
    assert snapshot(project) == before


def test_results_come_back_and_belong_to_the_owner(project: Path, in_docker: Run) -> None:
    done = in_docker(DEBIAN, "--out", "d", "--", "sh", "-c", "mkdir d; echo 1 > d/one")
    assert (done.stderr, done.returncode) == (b"", 0)
    assert (project / "d/one").read_text() == "1\n"
    assert (project / "d/one").stat().st_uid == project.stat().st_uid


def test_a_container_is_kept_for_a_project(project: Path, in_docker: Run) -> None:
    in_docker(BUSYBOX, "--persistent", "--", "sh", "-c", "echo 1 > made; echo h > ~/home")
    done = in_docker(BUSYBOX, "--persistent", "--", "sh", "-c", "cat made ~/home")
    assert (done.stdout, done.stderr) == (b"1\nh\n", b"")
    assert b"removed" in run(project, "--reset").stdout


def test_an_image_without_python_gets_no_packages_and_says_so(
    project: Path, in_docker: Run
) -> None:
    (project / "requirements.txt").write_text("tool\n")
    done = in_docker(BUSYBOX, "--", "cat", "a.txt")
    assert (done.stdout, done.returncode) == (b"a\n", 0)
    assert done.stderr.endswith(b"has no python3\n") and done.stderr.count(b"\n") == 1
