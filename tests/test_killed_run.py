"""A run of tests that is killed, and one in the background."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from must_work import need

from guard_of_tests import started_by

HERE = Path(__file__).parent
TEST = """
import os, sys, time
from pathlib import Path
from daemon_of_tests import Daemon
from hutch import Sandbox

def test_that_is_killed(tmp_path):
    with Daemon(tmp_path / "data") as daemon:
        Sandbox.create(url=daemon.url, api_key=daemon.key).shell.run("true")
        print("MARK", os.environ["TEST_RUN_OF_HUTCH"], tmp_path, file=sys.__stderr__, flush=True)
        time.sleep(600)
"""


def test_a_killed_run_leaves_no_server_and_no_launcher_behind() -> None:
    folder = tempfile.mkdtemp(prefix="killed-")  # short, as a socket's path has to be
    test = HERE / f"test_killed_{os.getpid()}.py"  # beside conftest.py
    test.write_text(TEST)
    argv = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(test)]
    try:
        with subprocess.Popen(
            [*argv, f"--basetemp={folder}/t"], stderr=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, cwd=HERE.parent, start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stderr and process.stdout
            line = process.stderr.readline()
            if not (found := re.match(r"MARK (\S+) (\S+)$", line)):
                process.kill()
                need("namespaces", process.stdout.read() + line)
            mark, folders = found[1], [f"{folder}/"]
            assert len(started_by(mark, folders)) > 2  # itself, a server, a launcher
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while left := started_by(mark, folders):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        test.unlink()
        shutil.rmtree(folder, ignore_errors=True)


IGNORED = """
import subprocess

def test_of_what_it_starts():
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    ignored = int(next(line for line in status.splitlines() if "SigIgn" in line).split()[1], 16)
    assert not ignored & 0b110  # SIGINT is signal 2, SIGQUIT is 3: the lowest bit is signal 1
"""


def test_a_run_in_the_background_tests_ctrl_c_too() -> None:
    test = HERE / f"test_background_{os.getpid()}.py"  # beside conftest.py
    test.write_text(IGNORED)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    try:
        done = subprocess.run(
            ["env", "--ignore-signal=INT,QUIT", *argv], cwd=HERE.parent,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        test.unlink()
    assert done.returncode == 0, done.stdout + done.stderr
