"""A real server for tests: `hutch serve` on a folder of its own, and nothing left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hutch import pidfile

KEY = "key-of-the-tests-0123456789"
HUTCH = [sys.executable, "-m", "hutch"]


def wait_for(is_so: Callable[[], object], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.02)
    return bool(is_so())


class Daemon:
    """Runs for the length of a `with`. Its sessions end with it, also if it was killed."""

    def __init__(
        self,
        folder: Path,
        *,
        key: str | None = KEY,
        host: str = "127.0.0.1",
        program: Sequence[str] = HUTCH,
        port: int = 0,
        **settings: str,
    ) -> None:
        """`settings` are those of the config file, by their names. `program`: which `hutch`."""
        self._program = program
        self.folder, self.key, self._host, self._settings = folder, key, host, settings
        self._port = port
        self.url = ""

    @property
    def socket(self) -> str:
        return f"unix:{self.folder}/run/hutch.sock"

    @property
    def card(self) -> pidfile.ServerPidFile:
        found = pidfile.server_of(self.folder)
        assert found
        return found

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HUTCH_")}
        given = {f"HUTCH_{name.upper()}": value for name, value in self._settings.items()}
        told = {"HUTCH_DATA_DIR": str(self.folder), "HUTCH_API_KEY": self.key or ""}
        return {**kept, **given, **told}

    def start(self) -> Daemon:
        """RuntimeError, with what it said, if it cannot be started."""
        argv = ["serve", "--listen", f"{self._host}:{self._port}", "--data-dir", str(self.folder)]
        self._log = open(f"{self.folder}.log", "ab")
        self.process = subprocess.Popen(
            [*self._program, *argv], env=self.environment, cwd="/",
            stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        assert self.process.stdout
        said = self.process.stdout.readline()
        if not said.startswith("serving at "):
            self.wait()
            raise RuntimeError(f"the server did not start: {said}{self.complaint()}")
        self.url = said.split()[-1]
        self._port = int(self.url.rsplit(":", 1)[1])  # the same one after a restart
        return self

    def complaint(self) -> str:
        return Path(f"{self.folder}.log").read_text()[-3000:]

    def hutch(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._program, *words], env=self.environment, cwd="/", text=True, capture_output=True,
            timeout=120, check=False,
        )  # fmt: skip

    def signal(self, number: int) -> int:
        """And wait. Its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def crash(self) -> None:
        """As the machine's out-of-memory killer would."""
        self.signal(signal.SIGKILL)

    def stop(self, *options: str) -> str:
        """With `hutch stop`. What that said."""
        said = self.hutch("stop", *options).stdout
        self.wait()
        return said

    def wait(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            assert self.process.stdout
            self.process.stdout.close()
            self._log.close()

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.hutch("stop", "--kill")  # also what one that was killed has left
        if self.process.poll() is None:
            self.process.terminate()
        self.wait()
