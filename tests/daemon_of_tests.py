"""A real server for tests: `hutch serve` on a folder of its own, and nothing left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import pytest

KEY = "key-of-the-tests-0123456789"


class Daemon:
    """Runs for the length of a `with`. Its sessions end with it."""

    def __init__(self, folder: Path, *, key: str | None = KEY, port: int = 0, **settings: str):
        """`settings` are those of the config file, by their names."""
        self.folder, self.key, self._port, self._settings = folder, key, port, settings
        self.url = ""

    @property
    def socket(self) -> str:
        return f"unix:{self.folder}/run/hutch.sock"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HUTCH_")}
        given = {f"HUTCH_{name.upper()}": value for name, value in self._settings.items()}
        told = {"HUTCH_DATA_DIR": str(self.folder), "HUTCH_API_KEY": self.key or ""}
        return {**kept, **given, **told}

    def start(self) -> Daemon:
        listen = f"127.0.0.1:{self._port}"
        argv = ["serve", "--listen", listen, "--data-dir", str(self.folder)]
        self._log = open(f"{self.folder}.log", "ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hutch", *argv], env=self.environment, cwd="/",
            stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        said = self.process.stdout.readline()
        if not said.startswith("serving at "):
            self._end()
            pytest.fail(f"the server did not start: {said}{self.complaint()}")
        self.url = said.split()[-1]
        self._port = int(self.url.rsplit(":", 1)[1])  # the same one after a restart
        return self

    def complaint(self) -> str:
        return Path(f"{self.folder}.log").read_text()[-3000:]

    def crash(self) -> None:
        """As the machine's out-of-memory killer would."""
        self.process.send_signal(signal.SIGKILL)
        self._end()

    def stop(self) -> None:
        """And leave the sessions as they are."""
        self.process.terminate()
        self._end()

    def _end(self) -> None:
        try:
            self.process.wait(60)
        finally:
            self.process.stdout.close()
            self._log.close()

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.process.poll() is not None:
            self.start()  # to end what it left
        subprocess.run(
            [sys.executable, "-m", "hutch", "stop", "--kill"], env=self.environment, cwd="/",
            capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        if self.process.poll() is None:
            self.process.terminate()
        self._end()
