"""Ends what a test run started, however the run itself ended; `kill -9` included.

Run as a program beside pytest: it waits for the end of its stdin, which pytest holds open. What the
run started has its mark in the environment. Lasting launchers have no environment, and hold the
folder that they serve open as descriptor 4: those are below one of the run's folders.
"""

from __future__ import annotations

import os
import signal
import sys
import time

MARK = "TEST_RUN_OF_HUTCH"
GRACE = 20  # seconds between SIGTERM and SIGKILL: an engine stops its containers first


def started_by(mark: str, folders: list[str]) -> set[int]:
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                is_marked = wanted in file.read().split(b"\0")
            with open(f"/proc/{name}/cmdline", "rb") as file:
                is_launcher = b"hutch.backends.namespaces.lasting" in file.read()
            served = os.readlink(f"/proc/{name}/fd/4") if is_launcher else ""
        except OSError:
            continue  # it ended, or is not ours
        if is_marked or served.startswith(tuple(folders)):
            found.add(int(name))
    return found


def main() -> None:
    mark, *folders = sys.argv[1:]
    sys.stdin.buffer.read()
    deadline, told = time.monotonic() + GRACE, set[int]()
    while left := started_by(mark, folders):
        is_late = time.monotonic() > deadline
        for pid in left if is_late else left - told:
            try:
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            except OSError:
                continue
        told |= left
        time.sleep(0.1)


if __name__ == "__main__":
    main()
