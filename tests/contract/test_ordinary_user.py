"""The same promises, kept for an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from must_work import need

from hutch.testing.contract import BackendContract

SOURCE = Path(__file__).parent.parent.parent / "src"
PYTHON = "/usr/bin/python3"  # one that everybody may use, wherever the tests' own lives
NAMES = sorted(name for name in dir(BackendContract) if name.startswith("test_"))

DRIVER = """
import json, os, shutil, sys, tempfile, time, traceback
sys.path.insert(0, sys.argv[1])
from hutch.backends.namespaces import NamespacesBackend
from hutch.testing.contract import BackendContract

class Mine(BackendContract):
    lasting = None

    def make_backend(self):
        return NamespacesBackend(lasting=self.lasting)

def remove(folder):
    # A launcher that goes away removes its copy of the code at the same time.
    deadline = time.monotonic() + 60
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)
    assert not os.path.exists(folder)

for name in sys.argv[3:]:
    folder = tempfile.mkdtemp()
    try:
        mine = Mine()
        mine.lasting = folder if sys.argv[2] == "lasting" else None
        getattr(mine, name)()
        said = "kept"
    except BaseException:
        said = traceback.format_exc()
    remove(folder)
    print(json.dumps([name, said]), flush=True)
"""


@pytest.fixture(scope="module", params=["embedded", "lasting"])
def said(request: pytest.FixtureRequest) -> dict[str, str]:
    if os.geteuid() != 0:
        pytest.skip("the tests are run by an ordinary user: TestNamespaces is this test")
    if not os.access(PYTHON, os.X_OK):
        need("namespaces", f"no {PYTHON} that an ordinary user could run")
    # Not below pytest's folder, which each run of pytest closes to other users when it starts.
    with tempfile.TemporaryDirectory(prefix="ordinary-") as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(SOURCE, f"{folder}/src", ignore=shutil.ignore_patterns("__pycache__"))
        as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        done = subprocess.run(
            [*as_nobody, PYTHON, "-c", DRIVER, f"{folder}/src", request.param, *NAMES],
            capture_output=True, text=True, timeout=300, env={"PATH": os.environ["PATH"]},
            cwd="/", check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_a_promise_is_kept_for_an_ordinary_user(said: dict[str, str], name: str) -> None:
    assert said[name] == "kept", said[name]
