"""`hutch` as people start it: from a script, or at a terminal."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

HUTCH = [sys.executable, "-m", "hutch"]
PATIENCE = 60  # seconds; everything here takes well under one, on a machine with nothing else to do


def hutch(*words: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run it to its end, with its outputs on pipes."""
    given = {"capture_output": True, "timeout": PATIENCE, "check": False} | options
    if "stdin" not in given and "input" not in given:
        given["stdin"] = subprocess.DEVNULL
    return subprocess.run([*HUTCH, *words], **given)


def start(*words: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start it, and have its outputs on pipes."""
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*HUTCH, *words], **(given | options))


@pytest.fixture(scope="session")
def boxes() -> None:
    """For tests that are about nothing where boxes cannot be made."""
    tried = hutch("run", "--", "true")
    if tried.returncode == 125:
        fail = "namespaces" in os.environ.get("HUTCH_MUST_WORK", "").split(",")
        (pytest.fail if fail else pytest.skip)(tried.stderr.decode())


class Traces:
    """What a running hutch has on this machine, to be looked for when it has ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self._launchers = [int(child) for child in children]
        assert self._launchers

    def left(self) -> list[str]:
        found = [f"process {pid}" for pid in self._launchers if _is_alive(pid)]
        found += map(str, Path("/tmp").glob(f"hutch-{self._pid}-*"))
        for folder, names, _ in os.walk("/sys/fs/cgroup"):  # those of other processes come and go
            mine = tuple(f"hutch-{pid}-" for pid in self._launchers)
            found += [f"{folder}/{name}" for name in names if name.startswith(mine)]
        return found

    def are_gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.left()


def _is_alive(pid: int) -> bool:
    """An orphan that has ended may have to wait for its funeral; that is init's business."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Terminal:
    """A terminal with `hutch` on it, and someone who types and reads."""

    def __init__(self, *words: str, columns: int = 80, rows: int = 24, **env: str) -> None:
        self.screen = b""
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.environ.update({"TERM": "xterm-256color", **env})
            os.execv(HUTCH[0], [*HUTCH, *words])
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(self._fd)  # as they were before hutch changed them
        self.code: int | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.code is None:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, text: str) -> None:
        """Read until this is on the screen. What was there before does not count twice."""
        deadline = time.monotonic() + PATIENCE
        while text.encode() not in self.screen:
            left = deadline - time.monotonic()
            assert left > 0 and self._read(left), f"no {text!r} in {self.screen!r}"
        self.screen = self.screen.partition(text.encode())[2]

    def end(self) -> int:
        """Read to its end. Its exit code."""
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline - time.monotonic()):
            pass
        assert time.monotonic() < deadline, f"it does not end: {self.screen!r}"
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def modes_now(self) -> list[Any]:
        return termios.tcgetattr(self._fd)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._fd], [], [], max(0, seconds))[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError as exc:
            assert exc.errno == errno.EIO  # no process has the terminal open any more
            data = b""
        self.screen += data
        return bool(data)


class Served:
    """A server of a folder of its own, and the commands that talk to it."""

    def __init__(self, data: Path, **env: str) -> None:
        self.data = data
        clean = {name: value for name, value in os.environ.items() if name[:6] != "HUTCH_"}
        self.env = clean | {"HUTCH_DATA_DIR": str(data), "HOME": str(data)} | env
        for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
            self.env.pop(name, None)
        self.url = ""

    def begin(self) -> None:
        done = hutch("serve", "--listen", "127.0.0.1:0", "--detach", env=self.env)
        assert done.returncode == 0, done.stderr.decode()
        self.url = done.stdout.decode().removeprefix("serving at ").strip()

    def end(self, *words: str) -> str:
        return self(*(words or ("stop", "--kill", "--drain", "0")))

    def __call__(self, *words: str, code: int = 0, **options: object) -> str:
        done = hutch(*words, **({"env": self.env} | options))
        assert done.returncode == code, (words, done.returncode, done.stderr.decode())
        return (done.stdout + done.stderr).decode()

    def session(self, **fields: object) -> str:
        made = "import sys, json, hutch; box = hutch.Sandbox.create(**json.loads(sys.argv[1])); "
        code = made + "print(box.id)"
        url = f"unix:{self.data}/run/hutch.sock"
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps({"url": url, **fields})],
            env=self.env, capture_output=True, text=True, timeout=PATIENCE, check=True,
        )  # fmt: skip
        return done.stdout.strip()
