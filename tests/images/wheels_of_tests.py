"""Packages made for a test, and an index that gives them out when it is told to."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tarfile
import threading
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def make_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    needs: tuple[str, ...] = (),
    tag: str = "py3-none-any",
    about: str = "",
    files: dict[str, str] | None = None,
) -> Path:
    """A wheel with one module of the package's name, and whatever else is asked for."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    content = {f"{module}.py": f"VERSION = {version!r}\n"} | (files or {})
    content[f"{info}/METADATA"] = "\n".join([*lines, about, ""])
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
    rows = [f"{path},{digest(text.encode())},{len(text)}\n" for path, text in content.items()]
    content[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"])
    wheel = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return wheel


def make_source(folder: Path, name: str, setup: str) -> None:
    """A package that has to be run to be installed."""
    top = f"{name.replace('-', '_')}-1.0"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    with tarfile.open(folder / f"{top}.tar.gz", "w:gz") as archive:
        for path, text in {"PKG-INFO": about, "setup.py": setup}.items():
            member = tarfile.TarInfo(f"{top}/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def digest(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip(
        "="
    )


class Index:
    """An index on this machine that has nothing. It does not answer at once for `slow` packages."""

    def __init__(self, slow: str, asked: Callable[[], None] = lambda: None) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if f"/{slow}/" in self.path:
                    asked()
                    index.asked.set()
                    index.answer.wait()
                self.send_error(404)

            def log_message(self, format: str, *args: object) -> None:
                pass

            def handle(self) -> None:
                try:
                    super().handle()
                except ConnectionError:
                    pass  # the client was killed

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}/simple"

    def __enter__(self) -> Index:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.answer.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def children(pid: int) -> list[int]:
    """Processes that were started by this one, from any of its threads."""
    found = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return []
    for thread in threads:
        try:
            words = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [int(word) for word in words]
    return found
