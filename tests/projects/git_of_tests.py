"""A git server on this machine, over HTTPS, and repositories with packages in them."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tls_of_tests import make_certificate

# A build backend that needs nothing: the package brings it along.
BACKEND = """
import os, zipfile

def build_wheel(out, config_settings=None, metadata_directory=None):
    VERSION = {version!r}
    exec({code!r}, globals() | {{"out": out}}, found := {{}})
    VERSION = found.get("VERSION", VERSION)
    info = "{name}-{version}.dist-info/"
    about = "Metadata-Version: 2.1\\nName: {inner}\\nVersion: {version}\\n"
    about += "".join("Requires-Dist: %s\\n" % each for each in {needs!r})
    files = {{
        "{name}.py": "VERSION = %r\\n" % VERSION.strip(),
        info + "METADATA": about,
        info + "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }}
    files[info + "RECORD"] = "".join("%s,,\\n" % each for each in [*files, info + "RECORD"])
    wheel = "{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(out, wheel), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel
"""
ENV = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], env=ENV, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def package(
    name: str,
    version: str = "1.0",
    *,
    code: str = "",
    inner: str = "",
    needs: tuple[str, ...] = (),
    requires: tuple[str, ...] = (),
) -> dict[str, str]:
    """The files of a package with a module that has a VERSION.

    `code` runs when it is built; `inner` is what the wheel calls itself, `needs` what it asks for,
    and `requires` what it is built with.
    """
    about = f"[build-system]\nrequires = {json.dumps(requires)}\n"
    about += 'build-backend = "backend"\nbackend-path = ["."]\n'
    backend = BACKEND.format(
        name=name, version=version, code=code, inner=inner or name, needs=list(needs)
    )
    return {"pyproject.toml": about, "backend.py": backend}


class GitServer:
    """Gives repositories out by `git http-backend`, and counts who asks."""

    def __init__(self, folder: Path) -> None:
        self.top = folder / "repositories"
        self.top.mkdir()
        self.asked: list[str] = []
        self.refuses = False  # 401 for all
        self.hangs = threading.Event()  # set: no answer comes until it is cleared
        self.waiting = threading.Event()
        self.certificate, key = make_certificate(folder, "git")
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"https://localhost:{self._server.server_port}"

    def __enter__(self) -> GitServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.hangs.clear()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, name: str, files: dict[str, str], *, tag: str = "") -> str:
        """Commit these files to a repository, which is made if it does not exist. The commit."""
        folder = self.top / name
        if not folder.exists():
            folder.mkdir()
            git(folder, "init", "-q", "-b", "main")
            git(folder, "config", "http.receivepack", "false")
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "--allow-empty", "-m", "one")
        if tag:
            git(folder, "tag", "-a", "-m", tag, tag)
        return git(folder, "rev-parse", "HEAD")

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.partition("?")
        self.asked.append(request.path)
        while self.hangs.is_set():
            self.waiting.set()
            threading.Event().wait(0.05)
        if self.refuses:
            request.send_response(401)
            request.send_header("www-authenticate", "Basic")
            request.send_header("content-length", "0")
            request.end_headers()
            return
        name, _, rest = path.lstrip("/").partition("/")
        env = ENV | {
            "GIT_PROJECT_ROOT": str(self.top),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": f"/{name}/.git/{rest}",
            "QUERY_STRING": query,
            "REQUEST_METHOD": request.command,
            "CONTENT_TYPE": request.headers.get("content-type", ""),
            "HTTP_CONTENT_ENCODING": request.headers.get("content-encoding", ""),
            "GIT_PROTOCOL": request.headers.get("git-protocol", ""),
            "REMOTE_ADDR": "127.0.0.1",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }
        body = request.rfile.read(int(request.headers.get("content-length", "0")))
        done = subprocess.run(["git", "http-backend"], env=env, input=body, capture_output=True)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
        request.send_response(int(fields.pop("Status", "200").split()[0]))
        for field, value in fields.items():
            request.send_header(field, value)
        request.send_header("content-length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)
