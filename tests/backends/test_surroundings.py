"""A box is the same whatever the process is like that asks for it."""

from __future__ import annotations

import subprocess
import sys

ASK = """
from hutch import Sandbox
with Sandbox.create() as box:
    print(box.commands.run("echo hi; umask").stdout)
"""


def test_a_box_can_be_made_by_who_lets_nobody_read_his_files() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK], umask=0o077, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["hi", "0022"], done.stderr
