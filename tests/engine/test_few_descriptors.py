"""A process that may open few files says so, and does not blame whoever asked for a box."""

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


@pytest.mark.namespaces("containers have limits of their own")
def test_a_machine_that_lets_processes_open_too_few_files_says_so() -> None:
    said = run(
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from hutch import BackendUnavailable, Sandbox\n"
        "try: Sandbox.create()\n"
        "except BackendUnavailable as exc: print(exc.status, exc)"
    )
    assert said.startswith("503 processes may open 64 files here, and boxes take 256"), said
