"""Hutch inside a Docker container, as root and as a user, with the options that it asks for.

A real engine, and Debian with nothing of ours in it: our source is mounted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import packaging
import pytest
from must_work import need

import hutch
from docker_of_tests import DEBIAN, Client

TESTS = Path(__file__).parent.parent
SECCOMP = "--security-opt seccomp=unconfined"
PATHS = "--security-opt systempaths=unconfined"
BOTH = f"{SECCOMP} {PATHS}"
USER = "--user 1000:1000"
TIMEOUT = 300  # seconds; on a quiet machine, a container takes five


class Case(NamedTuple):
    options: str
    lacks: str = ""  # options that it says are missing


CASES = {
    "root": Case("", BOTH),
    "user": Case(USER, BOTH),
    "root, no filter": Case(SECCOMP, PATHS),
    "root, all of /proc": Case(PATHS, SECCOMP),
    "root with SYS_ADMIN": Case("--cap-add SYS_ADMIN", BOTH),
    "root, both": Case(BOTH),
    "user, both": Case(f"{USER} {BOTH}"),
    "root with SYS_ADMIN, both": Case(f"--cap-add SYS_ADMIN {BOTH}"),
    "root without capabilities, both": Case(
        f"--cap-drop ALL {BOTH}",
        "--cap-add CHOWN --cap-add SETGID --cap-add SETUID --cap-add SETFCAP",
    ),
    "root, read-only": Case("--read-only", f"{BOTH} --tmpfs /tmp --tmpfs /run"),
    "root, read-only, both": Case(f"--read-only --tmpfs /tmp {BOTH}", "--tmpfs /run"),
    "root, read-only, all": Case(f"--read-only --tmpfs /tmp --tmpfs /run {BOTH}"),
}
GOOD = [name for name, case in CASES.items() if not case.lacks]
BAD = [name for name, case in CASES.items() if case.lacks]

Found = Callable[[str], Any]


@pytest.fixture(scope="module")
def found(docker_engine: Client, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each case said, and `boxes`; two containers at a time."""
    if not shutil.which("docker"):
        need("docker", "no docker command (Debian: docker.io, or docker-cli)")
    folder = tmp_path_factory.mktemp("shown")
    for package in (hutch, packaging):
        source = Path(package.__file__ or "").parent
        shutil.copytree(source, folder / "lib" / source.name)
    shutil.copytree(TESTS / "security" / "probes", folder / "probes")
    shutil.copy(TESTS / "backends" / "in_a_container.py", folder)
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    (folder / "cache").mkdir()
    (folder / "cache").chmod(0o777)
    with ThreadPoolExecutor(2) as pool:
        coming: dict[str, Future[Any]] = {
            name: pool.submit(_run, docker_engine.host, folder, case.options, "commands")
            for name, case in CASES.items()
        }
        coming["boxes"] = pool.submit(_run, docker_engine.host, folder, BOTH, "boxes")
        yield lambda name: coming[name].result()


def _run(host: str, folder: Path, options: str, what: str) -> Any:
    name = f"hutch-test-{os.getpid()}-{os.urandom(4).hex()}"
    argv = [
        "docker", "--host", host, "run", "--rm", "--name", name, "--runtime", "runc",
        "--network", "none", "--volume", f"{folder}:/opt:ro", "--volume", f"{folder}/cache:/cache",
        "--env", "PYTHONPYCACHEPREFIX=/cache", "--env", "PYTHONPATH=/opt/lib",
        "--env", "HOME=/tmp", *options.split(), DEBIAN,
        "python3", "/opt/in_a_container.py", what,
    ]  # fmt: skip
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    finally:
        remove = ["docker", "--host", host, "rm", "--force", name]
        subprocess.run(remove, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", GOOD)
def test_with_the_options_that_it_asks_for_boxes_can_be_made(found: Found, name: str) -> None:
    (run,), doctor = found(name)["runs"], found(name)["doctor"]
    assert (run["code"], run["out"], run["error"]) == (0, "1000\n", "")
    assert doctor["code"] == 0 and "(grade ns)" in doctor["out"] and "docker" not in doctor["out"]


@pytest.mark.parametrize("name", BAD)
def test_without_them_a_run_names_those_that_are_missing(found: Found, name: str) -> None:
    for run in found(name)["runs"]:
        assert run["code"] == 125 and run["out"] == ""
        assert run["error"].startswith("hutch: this container does not allow boxes (")
        assert run["error"].endswith(f"): add {CASES[name].lacks} to `docker run`\n")


@pytest.mark.parametrize("name", BAD)
def test_without_them_the_doctor_names_them_once(found: Found, name: str) -> None:
    doctor = found(name)["doctor"]
    text = re.sub(r" \\\n +", " ", doctor["out"])
    assert doctor["code"] == 1 and "Do not use boxes here" in text
    assert text.rstrip().endswith(f"\n  fix: docker run {CASES[name].lacks} IMAGE")
    assert text.count("docker run") == 1 and "sudo hutch" not in text


def test_root_needs_no_more_capabilities_for_a_range_of_user_ids(found: Found) -> None:
    box = found("boxes")["nothing"]
    assert not any("user ids" in line for line in box["degraded"]), box["degraded"]
    assert any("counted by rlimit" in line for line in box["degraded"]), box["degraded"]
    assert "Cannot fork" in box["forked"]


@pytest.mark.parametrize(("name", "owner"), [("root", 0), ("another", 1001)])
def test_the_user_of_a_box_with_mounts_is_their_owner_and_that_is_said(
    found: Found, name: str, owner: int
) -> None:
    box = found("boxes")[name]
    assert (box["wrote"], box["owner"]) == (0, owner)
    assert any("is the owner of what is mounted" in line for line in box["degraded"])


def test_only_a_box_whose_user_is_root_has_unbounded_processes_and_that_is_said(
    found: Found,
) -> None:
    said = {
        name: [line for line in box["degraded"] if "not bounded: the kernel" in line]
        for name, box in found("boxes").items()
    }
    assert said["root"] and not said["nothing"] and not said["another"]
    assert "Cannot fork" in found("boxes")["another"]["forked"]


@pytest.mark.parametrize("name", ["nothing", "root", "another"])
def test_code_in_a_box_does_not_get_out_of_it_into_the_container(found: Found, name: str) -> None:
    box = found("boxes")[name]
    probes = dict(line.split(" ", 1) for line in box["probes"].splitlines())
    assert len(probes) > 100
    assert {id: said for id, said in probes.items() if not said.startswith("BLOCKED")} == {}
    assert box["secrets"] == ""
