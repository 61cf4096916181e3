"""`hutch run --project` as people start it, and a registry of Node packages on this machine."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prompt import hutch

from hutch import factory

# An image with a Python that nothing has to be fetched for.
WITH_PYTHON = ["--image", "host"] if factory.default() == "namespaces" else []


PROGRESS = re.compile(
    rb"^hutch: [^:\n]+: (choosing versions|waiting for|downloading|installing|compiling|fetching"
    rb"|building).*\n",
    re.M,
)


def run(project: Path, *words: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Without the lines that say how far an installation is: a slow machine sees some."""
    done = hutch("run", "--project", str(project), *words, **options)
    done.stderr = PROGRESS.sub(b"", done.stderr or b"")
    return done


def listed(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder: files with their contents."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    return found


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """When and how everything in a folder was changed."""
    paths = [folder, *folder.rglob("*")]
    status = {str(path): os.lstat(path) for path in paths}
    return {path: (s.st_mtime_ns, s.st_ino, s.st_mode) for path, s in status.items()}


class Registry:
    """Gives packages of Node out, and counts who asks."""

    def __init__(self) -> None:
        self.packages: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.asked.append(self.path)
                body = registry.answer(self.path.lstrip("/"))
                self.send_response(404 if body is None else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body or b"{}")))
                self.end_headers()
                self.wfile.write(body or b"{}")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, name: str, version: str = "1.0.0", **about: Any) -> None:
        """A package that says its own version, and has a program that does."""
        package = {"name": name, "version": version, "main": "index.js", "bin": "index.js", **about}
        files = {
            "package.json": json.dumps(package),
            "index.js": f"#!/usr/bin/env node\nmodule.exports = '{version}'\n"
            f"if (require.main === module) console.log('{name} {version}')\n",
        }
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path, text in files.items():
                member = tarfile.TarInfo(f"package/{path}")
                member.size, member.mode = len(text), 0o755
                archive.addfile(member, io.BytesIO(text.encode()))
        self.packages.setdefault(name, {})[version] = buffer.getvalue()

    def integrity(self, name: str, version: str = "1.0.0") -> str:
        digest = hashlib.sha512(self.packages[name][version]).digest()
        return "sha512-" + base64.b64encode(digest).decode()

    def answer(self, path: str) -> bytes | None:
        name, dash, file = path.partition("/-/")
        versions = self.packages.get(name)
        if versions is None:
            return None
        if dash:
            return versions.get(file.removesuffix(".tgz").rpartition("-")[2])
        described = {}
        for version, data in versions.items():
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                file_ = archive.extractfile("package/package.json")
                assert file_
                about = json.loads(file_.read())
            tarball = f"{self.url}{name}/-/{name}-{version}.tgz"
            dist = {"tarball": tarball, "integrity": self.integrity(name, version)}
            described[version] = {**about, "dist": dist,
                                  "hasInstallScript": "scripts" in about}  # fmt: skip
        latest = {"latest": list(versions)[-1]}
        return json.dumps({"name": name, "dist-tags": latest, "versions": described}).encode()
