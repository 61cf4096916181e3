"""A process that may open few files says so, and does not blame the caller."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
from hutch import NoCapacity, Sandbox
boxes = []
try:
    for _ in range(60):
        boxes.append(Sandbox.create())
except NoCapacity as exc:
    print(exc.status, exc)
for box in boxes[5:]:
    box.close()
print(boxes[0].shell.run("echo usable").stdout)
with Sandbox.create():
    print("and another")
print(len(Sandbox.list()) == 5)
"""

# Takes all descriptors but those in use from the launcher, and gives them back.
SCRIPT_OF_LAUNCHER = """
import os, resource
from glob import glob
from hutch import NoCapacity, Sandbox
box = Sandbox.create()
(launcher,) = " ".join(open(path).read() for path in glob("/proc/self/task/*/children")).split()
used = {int(name) for name in os.listdir(f"/proc/{launcher}/fd")}
free = min(set(range(len(used) + 1)) - used)
before = resource.prlimit(int(launcher), resource.RLIMIT_NOFILE)
resource.prlimit(int(launcher), resource.RLIMIT_NOFILE, (free, before[1]))
try:
    Sandbox.create()
except NoCapacity as exc:
    print(exc.status, exc)
resource.prlimit(int(launcher), resource.RLIMIT_NOFILE, before)
print(Sandbox.create().shell.run("echo another").stdout + box.shell.run("echo usable").stdout)
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.namespaces("containers take other descriptors")
def test_a_box_that_finds_no_descriptor_left_is_refused_as_the_machines_limit() -> None:
    said = run(SCRIPT.format(hard=4096))
    assert said.startswith("503 ") and "too many files open" in said, said
    assert said.endswith("usable\n\nand another\nTrue\n"), said


def test_a_server_that_has_no_descriptor_left_does_not_blame_its_caller() -> None:
    said = run(
        "import os, resource\n"
        "from hutch.errors import NoCapacity, as_answers\n"
        "os.close(free := os.open('/', os.O_RDONLY))  # the lowest one\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))\n"
        "try:\n"
        "    with as_answers(): os.open('/', os.O_RDONLY)\n"
        "except NoCapacity as exc: print(exc.status, exc)"
    )
    assert said.startswith("503 the server has too many files open"), said


@pytest.mark.namespaces("containers have no launcher")
def test_a_launcher_that_has_no_descriptor_left_says_so_and_goes_on() -> None:
    said = run(SCRIPT_OF_LAUNCHER)
    assert said.startswith("503 the launcher has too many files open"), said
    assert said.endswith("another\nusable\n\n"), said


@pytest.mark.namespaces("containers have limits of their own")
def test_a_machine_that_lets_processes_open_too_few_files_says_so() -> None:
    said = run(
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from hutch import BackendUnavailable, Sandbox\n"
        "try: Sandbox.create()\n"
        "except BackendUnavailable as exc: print(exc.status, exc)"
    )
    assert said.startswith("503 processes may open 64 files here, and boxes take 256"), said
