"""A server to measure: `hutch serve` on a folder of its own, and nothing left of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hutch import AsyncSandbox, Sandbox
from hutch import operations as op
from hutch.client._sync_http import HttpTransport
from hutch.client.transport import Server
from hutch.serving import GetPool, SizePool

T = TypeVar("T")
KEY = "key-of-the-benchmarks-0123456789"
IMAGE = "host"
STARTED = re.compile(r"started in (\d+) ms: (\d+) sessions adopted")


class Daemon:
    """It runs from `start` to `stop`; `daemon()` sees to both."""

    def __init__(
        self, folder: Path, variables: Mapping[str, str] | None = None, image: str = IMAGE
    ) -> None:
        """`variables`: more of them, such as a backend. `image`: of its pool."""
        self.folder, self._image = folder, image
        self.socket = f"unix:{folder}/run/hutch.sock"
        self.url = ""
        self._log = folder.with_name("log")
        self._port = 0
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HUTCH_")}
        own = {"HUTCH_DATA_DIR": str(folder), "HUTCH_API_KEY": KEY}
        self._environment = {**kept, **own, **(variables or {})}

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Comes back when it answers: on the same port as before, unless another has taken it."""
        if not self._listen(self._port) and not (self._port and self._listen(0)):
            raise RuntimeError(f"the server did not start: {self._log.read_text()[-2000:]}")
        self._port = int(self.url.rpartition(":")[2])

    def _listen(self, port: int) -> bool:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hutch", "serve", "--listen", f"127.0.0.1:{port}"],
                env=self._environment, cwd="/", stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self._process.stdout
        said = self._process.stdout.readline()
        if not said.startswith("serving at "):
            self._end()
            return False
        self.url = said.split()[-1]
        return True

    def started(self) -> tuple[float, int]:
        """What it says of its own start: seconds, and how many sessions it took over."""
        found = STARTED.search(self._log.read_text())
        if found is None:
            raise RuntimeError("the server does not say how its start went")
        return int(found[1]) / 1000, int(found[2])

    def crash(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._end()

    def stop(self) -> None:
        """With all its sessions."""
        if self._process.poll() is not None:
            self.start()  # only a server can end what a server left
        subprocess.run(
            [sys.executable, "-m", "hutch", "stop", "--kill"], env=self._environment, cwd="/",
            stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        self._end()

    def _end(self) -> None:
        self._process.wait(120)
        assert self._process.stdout
        self._process.stdout.close()

    def create(self, url: str | None = None) -> Sandbox:
        return Sandbox.create(url=url or self.url, api_key=KEY)

    async def create_async(self) -> AsyncSandbox:
        return await AsyncSandbox.create(url=self.url, api_key=KEY)

    def ask(self, operation: op.Operation[T]) -> T:
        return HttpTransport(Server(self.url, KEY)).perform(operation)

    def fill_pool(self, size: int) -> None:
        """Comes back when so many boxes are ready."""
        self.ask(SizePool(self._image, size))
        deadline = time.monotonic() + 60
        while sum(state.ready for state in self.ask(GetPool())) != size:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the pool did not fill: {self.ask(GetPool())}")
            time.sleep(0.02)


@contextlib.contextmanager
def daemon(
    before: Any = None, variables: Mapping[str, str] | None = None, image: str = IMAGE
) -> Iterator[Daemon]:
    """`before` is called with its folder, when nothing is in it yet."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        folder = Path(scratch, "data")
        folder.mkdir(mode=0o700)
        if before:
            before(folder)
        made = Daemon(folder, variables, image)
        made.start()
        try:
            yield made
        finally:
            made.stop()
