"""What runs, in a box or not, and what is left of boxes whose program has ended."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 600  # seconds; some frameworks take long to load


def new_mark() -> str:
    """Seconds to sleep that no other process sleeps."""
    return f"86400.{secrets.randbelow(10**12):012}"


def pids(mark: str) -> list[int]:
    """The processes of this machine, in a box or not, with this in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            pass  # it has just ended
    return found


def running(mark: str) -> bool:
    return bool(pids(mark))


async def until(is_running: bool, mark: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while running(mark) is not is_running:
            await asyncio.sleep(0.05)


def wait_until(is_running: bool, mark: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while running(mark) is not is_running:
        assert time.monotonic() < deadline, f"{mark} is {'not ' * is_running}running"
        time.sleep(0.05)


def assert_nothing_is_left_when_killed(script: str, folder: Path) -> None:
    """The script runs `sleep SECONDS` in a box, and is killed in the midst of it."""
    mark = new_mark()
    file = folder / "script.py"  # on its command line the mark would be found, too
    file.write_text(script.replace("SECONDS", mark))
    process = subprocess.Popen(
        [sys.executable, file], env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(True, mark)
    finally:
        process.kill()
        process.wait()
    wait_until(False, mark)


def assert_nothing_is_left_at_the_end(script: str, folder: Path) -> None:
    """The script runs `sleep SECONDS` in a box, and ends without closing it."""
    mark = new_mark()
    file = folder / "script.py"
    file.write_text(script.replace("SECONDS", mark))
    done = subprocess.run(
        [sys.executable, file], cwd=folder, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    wait_until(False, mark)
