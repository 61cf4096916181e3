"""The doctor tells the truth: to root, to another user, and where little works."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hutch import BackendUnavailable, Sandbox
from hutch.backends.namespaces import NamespacesBackend
from hutch.backends.spawn import boot
from hutch.types import Report, Status

SOURCE = Path(__file__).parent.parent.parent / "src"
PYTHON = "/usr/bin/python3"  # one that everybody may use, wherever the tests' own lives
DOCTOR = "hutch.backends.namespaces.doctor"
MUST_WORK = "namespaces" in os.environ.get("HUTCH_MUST_WORK", "").split(",")


def need(condition: bool, why: str) -> None:
    if not condition:
        (pytest.fail if MUST_WORK else pytest.skip)(why)


@pytest.fixture(scope="module")
def report() -> Report:
    found = asyncio.run(NamespacesBackend().report())
    missing = [layer for layer in found.layers if layer.status is Status.MISSING and layer.required]
    need(not missing, f"boxes cannot be made here: {missing}")
    return found


@pytest.fixture
def everybodys_source(tmp_path: Path) -> Iterator[Path]:
    """Our source where an ordinary user can read it."""
    folder = Path(tempfile.mkdtemp(prefix="doctor-"))
    shutil.copytree(SOURCE, folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    folder.chmod(0o755)
    yield folder / "src"
    shutil.rmtree(folder)


def parsed(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return {layer["name"]: layer for layer in json.loads(done.stdout)["layers"]}


def run(argv: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=120, check=False, env=os.environ | env
    )


def test_every_required_layer_is_active_where_boxes_work(report: Report) -> None:
    assert report.grade == "ns" and report.backend == "namespaces"
    assert all(layer.status is Status.ACTIVE for layer in report.layers if layer.required)
    assert len({layer.name for layer in report.layers}) == len(report.layers) > 15


def test_every_layer_says_why_and_none_that_is_active_needs_a_fix(report: Report) -> None:
    for layer in report.layers:
        assert layer.why and (layer.status is not Status.ACTIVE or not layer.fix)


def test_asking_changes_nothing_in_the_process_that_asks(report: Report) -> None:
    def self() -> dict[str, str]:
        return {str(path): os.readlink(path) for path in Path("/proc/self/ns").iterdir()}

    before, children = self(), Path("/proc/thread-self/children").read_text()
    asyncio.run(NamespacesBackend().report())
    assert self() == before and Path("/proc/thread-self/children").read_text() == children


def test_root_is_told_of_ranges_and_others_of_one_id(report: Report) -> None:
    ids = next(layer for layer in report.layers if layer.name == "user ids")
    assert ids.status is (Status.ACTIVE if os.geteuid() == 0 else Status.DEGRADED)


def test_an_ordinary_user_can_make_boxes_and_is_told_what_root_would_add(
    everybodys_source: Path,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("the tests are run by an ordinary user: the others are this test")
    need(os.access(PYTHON, os.X_OK), f"no {PYTHON} that an ordinary user could run")
    code = (
        f"import sys; sys.path.append({str(everybodys_source)!r}); import {DOCTOR} as d; d.main()"
    )
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = run([*as_nobody, PYTHON, "-I", "-S", "-c", code])
    layers = parsed(done)
    assert json.loads(done.stdout)["grade"] == "ns", layers
    assert layers["user ids"]["status"] == "degraded" and "sudo" in layers["user ids"]["fix"]
    assert layers["a box"]["status"] == "active"


def test_in_a_box_it_finds_that_no_boxes_can_be_made(everybodys_source: Path) -> None:
    need(os.access(PYTHON, os.X_OK), f"no {PYTHON} for a box to use")
    code = f"import sys; sys.path.append('/src'); import {DOCTOR} as d; d.main()"
    try:
        box = Sandbox.create(mounts=[f"{everybodys_source}:/src:ro"])
    except BackendUnavailable as exc:
        need(False, str(exc))
    with box:
        done = box.commands.run([PYTHON, "-I", "-S", "-c", code], timeout=60)
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    layers = {layer["name"]: layer for layer in said["layers"]}
    assert said["grade"] == "none"
    for name in ("user namespaces", "mounts", "new root", "processes", "a box"):
        assert layers[name]["status"] == "missing" and layers[name]["why"], layers[name]
    assert layers["no new privileges"]["status"] == "active"  # it was so already


def test_a_switch_that_forbids_namespaces_is_found_and_its_command_given() -> None:
    need(shutil.which("unshare") is not None, "no unshare(1) to make a place without namespaces")
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    argv = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", *boot(DOCTOR)]
    layers = parsed(run(argv))
    assert layers["user namespaces"]["status"] == "missing"
    assert layers["user namespaces"]["fix"] == "sudo sysctl -w user.max_user_namespaces=15000"


def test_leftovers_of_the_dead_are_found_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = (f"hutch-{gone.pid}-dead", f"hutch-{os.getpid()}-alive", "hutch-fake-other")
    dead, alive, other = (tmp_path / name for name in names)
    for folder in (dead, alive, other):
        folder.mkdir()
    found = parsed(run(boot(DOCTOR), TMPDIR=str(tmp_path)))["leftovers"]
    assert found["status"] == "degraded" and f"rm -r {dead}" in found["fix"]
    assert str(alive) not in found["fix"] and str(other) not in found["fix"]


def test_a_trial_that_hangs_or_dies_is_an_answer_too() -> None:
    code = (
        f"import sys; sys.path.append({str(SOURCE)!r}); import {DOCTOR} as d; import os, time\n"
        "acts = (0.2, lambda: time.sleep(60)), (60, lambda: os._exit(3)), (60, lambda: 1 / 0)\n"
        "for d.TRIAL_TIMEOUT, act in acts:\n"
        "    print(d.Check('x', lambda: d.trial(act)).layer().why)\n"
    )
    said = run([sys.executable, "-I", "-S", "-c", code]).stdout.splitlines()
    assert said == ["it hangs", "the trial died", "ZeroDivisionError('division by zero')"]
