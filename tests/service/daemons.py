"""A real `hutch serve`, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUTCH = [sys.executable, "-m", "hutch"]


def wait_for(is_so: Callable[[], object], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.02)
    return bool(is_so())


class Daemon:
    """`with Daemon(folder) as daemon`: it answers; at the end, it and its sessions are gone."""

    def __init__(self, folder: Path, *options: str, **variables: str) -> None:
        self.folder, self._options = folder, options
        self._variables = variables
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    @property
    def env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HUTCH_")}
        return {**kept, "HUTCH_DATA_DIR": str(self.folder), **self._variables}

    def start(self) -> Daemon:
        listen = () if "--listen" in self._options else ("--listen", "127.0.0.1:0")
        self.process = subprocess.Popen(
            [*HUTCH, "serve", *listen, *self._options], env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout and self.process.stderr
        line = self.process.stdout.readline()
        if not line:
            said = self.process.stderr.read()
            self.wait()
            raise RuntimeError(said)
        self.url = line.split()[-1]
        return self

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop("--kill")

    def stop(self, *options: str) -> str:
        """With `hutch stop`. What it said."""
        done = self.hutch("stop", *options)
        self.wait()
        return done.stdout

    def signal(self, number: int) -> None:
        assert self.process
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        if self.process is None:
            return 0
        code = self.process.wait(30)
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()
        self.process = None
        return code

    def hutch(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*HUTCH, *words], env=self.env, text=True, capture_output=True, timeout=60, **more
        )

    @property
    def card(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "run" / "daemon.json").read_text())
        return found
