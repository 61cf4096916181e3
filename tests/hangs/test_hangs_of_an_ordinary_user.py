"""The same zoo for an ordinary user: there, user code and its subreapers share one uid.

So they do in a container, where `test_hangs` has met the rest of the zoo.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_hangs import ZOO, Animal

from hutch import factory

SOURCE = Path(__file__).parent.parent.parent / "src"
PYTHON = "/usr/bin/python3"  # one that everybody may use, wherever the tests' own lives

MORE = {
    "a program that kills everyone": ["program", "echo so far; kill -9 -1; exit 5", 5, "so far\n"],
    "stopping everyone": ["program", "echo so far; kill -STOP -1; exit 6", 6, "so far\n"],
    "a shell that stops everyone": ["shell", "echo so far; kill -STOP -1", 0, "so far\n"],
    "killing one's parent": ["program", "kill -9 $PPID; echo so far; exit 7", 7, "so far\n"],
    "stopping one's parent": ["program", "kill -STOP $PPID; echo so far; exit 8", 8, "so far\n"],
    "a bomb": ["shell", "echo so far; f() { f | f & f | f; }; f 2>/dev/null", 124, "so far\n"],
}

DRIVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from hutch import Sandbox
for name, (kind, command, code, out) in json.load(sys.stdin).items():
    with Sandbox.create(pids=64) as box:
        run = box.shell.run if kind == "shell" else box.commands.run
        argv = command if kind == "shell" else ["bash", "-c", command]
        for timeout in (1.5, 12, 60) if code == 124 else (60,):
            result = run(argv, timeout=timeout)
            if result.stdout:  # else a busy machine did not get to the first command
                break
        after = box.shell.run("echo next", timeout=60).stdout
        program = box.commands.run(["echo", "next"], timeout=60).stdout
    print(json.dumps([name, [result.exit_code, result.stdout, after[-5:], program]]), flush=True)
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, list[object]]:
    if factory.default() != "namespaces":
        return _drive([sys.executable, "-c", DRIVER, str(SOURCE)], MORE, dict(os.environ))
    if os.geteuid() != 0:
        pytest.skip("the tests are run by an ordinary user: test_hangs is this test")
    if not os.access(PYTHON, os.X_OK):
        pytest.skip(f"no {PYTHON} that an ordinary user could run")
    # Not below pytest's folder, which each run of pytest closes to other users when it starts.
    with tempfile.TemporaryDirectory(prefix="ordinary-") as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(SOURCE, f"{folder}/src", ignore=shutil.ignore_patterns("__pycache__"))
        zoo = {animal.name: ["shell", animal.ends, animal.code, animal.out] for animal in ZOO}
        as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        argv = [*as_nobody, PYTHON, "-c", DRIVER, f"{folder}/src"]
        return _drive(argv, zoo | MORE, {"PATH": os.environ["PATH"]})


def _drive(
    argv: list[str], zoo: dict[str, list[object]], env: dict[str, str]
) -> dict[str, list[object]]:
    done = subprocess.run(
        argv, input=json.dumps(zoo), capture_output=True, text=True, timeout=300, env=env,
        cwd="/", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.namespaces("a container has one user, no matter who starts it")
@pytest.mark.parametrize("animal", ZOO, ids=str)
def test_a_command_of_an_ordinary_user_ends_by_itself(
    seen: dict[str, list[object]], animal: Animal
) -> None:
    if not shutil.which(animal.needs):
        pytest.skip(f"{animal.needs} is not on this machine")
    assert seen[animal.name] == [animal.code, animal.out, "next\n", "next\n"]


@pytest.mark.parametrize("name", MORE)
def test_what_hits_its_own_keeper_hurts_only_itself(
    seen: dict[str, list[object]], name: str
) -> None:
    _, _, code, out = MORE[name]
    assert seen[name] == [code, out, "next\n", "next\n"]
