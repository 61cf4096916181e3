"""scripts/suites: says how far it is, names flaky tests and broken ones, and ends what it runs."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The script with one suite instead of its own, and a line about it at once.
DRIVER = """
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
_, script, folder, test = sys.argv
suites = SourceFileLoader("suites", script).load_module()
suites.SUITES = [suites.Suite("mine", 7, [test])]
suites.ROOT, suites.FLAKY, suites.TELL = Path(folder), Path(folder, "build/flaky.txt"), 0
sys.exit(suites.main())
"""
FLAKY = """
from pathlib import Path

def test_that_passes(): pass

def test_that_fails_the_first_time():
    before = Path(__file__).with_name("before")
    was_there = before.exists()
    before.touch()
    assert was_there
"""
BROKEN = "def test_that_fails(): assert False\n"
ENDLESS = """
import os, sys, time
from pathlib import Path

def test_that_goes_on():
    Path(os.environ["HEARD"]).write_text(str(os.getpid()))
    time.sleep(86400)
"""


def begin(folder: Path, content: str, **env: str) -> subprocess.Popen[str]:
    test = folder / "test_of_a_suite.py"
    test.write_text(content)
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    argv = [sys.executable, "-W", "ignore", "-c", DRIVER]
    return subprocess.Popen(
        [*argv, str(HERE.parent / "scripts" / "suites"), str(folder), str(test)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=alone | env,
    )  # fmt: skip


def test_a_test_that_passes_when_run_again_is_told_at_the_end_and_kept(tmp_path: Path) -> None:
    with begin(tmp_path, FLAKY) as process:
        output, _ = process.communicate()
    name = "test_of_a_suite.py::test_that_fails_the_first_time"
    assert process.returncode == 0
    assert output.endswith(f"flaky, which is a bug (also in build/flaky.txt):\n  {name}\n"), output
    (kept,) = (tmp_path / "build" / "flaky.txt").read_text().splitlines()
    assert kept.endswith(name) and "failed twice" not in output


def test_a_test_that_fails_twice_fails_the_run_and_is_no_flake(tmp_path: Path) -> None:
    with begin(tmp_path, BROKEN) as process:
        output, _ = process.communicate()
    assert process.returncode == 1 and not (tmp_path / "build").exists()
    assert output.endswith("=== failed twice:\n  test_of_a_suite.py::test_that_fails\n"), output


def test_while_it_runs_it_says_how_far_it_is_and_how_long_it_usually_takes(tmp_path: Path) -> None:
    with begin(tmp_path, "def test_that_passes(): pass\n") as process:
        output, _ = process.communicate()
    assert process.returncode == 0
    assert re.match(r"mine begins \(\d+ min of 7\)\n", output), output
    assert re.search(r"^=== mine passed in \d+ min: .*1 passed", output, re.MULTILINE), output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_run_that_is_stopped_ends_its_suites(number: int, tmp_path: Path) -> None:
    fifo = tmp_path / "heard"
    os.mkfifo(fifo)
    with begin(tmp_path, ENDLESS, HEARD=str(fifo)) as process:
        with open(fifo) as heard:
            pidfd = os.pidfd_open(int(heard.read()))
        process.send_signal(number)
        process.communicate()
    assert process.returncode
    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)
