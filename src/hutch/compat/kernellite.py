"""KernelLite's functions, with a box in place of its container.

    from hutch.compat.kernellite import exec_code, start_container, stop_container

    start_container("/path/to/project", "my-project")
    print(exec_code("/path/to/project", "1 + 1")["stdout"])
    stop_container("my-project")

Signatures, answers and the protocol on the socket are the same. docs/guides/from-kernellite.md
lists the differences.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hutch.errors import BackendUnavailable, InvalidRequest, StartFailed
from hutch.images import store
from hutch.images.store import data_dir
from hutch.pidfile import PidFile, began, boot, parse

from .kernellite_socket import HEAD, address, length_of, pack, sweep, unpack

IMAGE = "data"
SOCKET = "kernel.sock"
START_TIMEOUT = 300.0  # seconds
END_TIMEOUT = 10.0  # seconds to exit after SIGTERM; then it is killed, and its box with it
SHORT = 5.0  # seconds for an answer that needs no work
GRACE = 10.0  # seconds that an answer may take beyond the timeout of its cell
TOOL_TIMEOUT = 300.0
WORKSPACE_DATA = "/workspace/data"  # where the code in the box finds the datasets

_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_SECRET = ("key", "secret", "token", "password")


def build_image() -> None:
    """Build the image that servers use; returns at once if it exists."""
    store.build(IMAGE)


def start_container(
    project_dir: str,
    slug: str,
    idle_hibernate_sec: int = 900,
    mem: str = "4g",
    cpus: str = "1.0",
    socket_dir: str | None = None,
    *,
    image: str = IMAGE,
) -> str:
    """Start a server for a project, replacing one of the same slug. Returns its name.

    When this returns, the server answers; it outlives this process. The image is built first if
    necessary. Raises StartFailed, with the reason, if the server does not start (nothing is left
    of it then), InvalidRequest if the slug or the project is invalid.
    """
    name = _name(slug)
    project = Path(os.path.abspath(project_dir))
    if not project.is_dir():
        raise InvalidRequest(f"the project is not a folder: {project_dir}")
    if image != "host":
        store.build(image)
    if socket_dir is None and project.is_relative_to("/mnt"):
        socket_dir = f"/tmp/agent_sockets/{slug}"  # on WSL, folders below /mnt have no sockets
    path = Path(os.path.abspath(socket_dir or project / ".sandbox"), SOCKET)
    words = {
        "--socket": path,
        "--project": project,
        "--image": image,
        "--memory": mem,
        "--cpus": cpus,
        "--idle-hibernate": idle_hibernate_sec,
    }
    with server_file(name) as file:
        _stop(file)
        pid, output = _spawn([f"{option}={value}" for option, value in words.items()])
        server = RunningServer.now(pid, project, path)
        file.write(server)
        try:
            _wait_until_ready(output, name)
            if not ping(project_dir, str(path.parent)):
                raise StartFailed(f"{name} started and does not answer at {path}")
        except BaseException:
            _stop(file)
            raise
        finally:
            os.close(output)
    return name


def stop_container(slug: str) -> None:
    """Stop a server, also one that another process started. Its box and socket are gone then.

    Does nothing if no server has this name.
    """
    with server_file(_name(slug)) as file:
        _stop(file)


def exec_code(
    project_dir: str, code: str, timeout: float | None = 120.0, socket_dir: str | None = None
) -> dict[str, Any]:
    """Run a cell. The answer always has `status`, `stdout` and `stderr`.

    After `timeout` seconds the cell is interrupted, and the answer has its output so far; with
    None, only the server's own limit applies. Raises OSError if there is no server.
    """
    return _exec(project_dir, socket_dir, timeout, {"code": code})


def ping(project_dir: str, socket_dir: str | None = None) -> bool:
    """Whether a server answers, busy or not."""
    return _short(project_dir, socket_dir, "ping") == "[OK] pong"


def interrupt(project_dir: str, socket_dir: str | None = None) -> bool:
    """Interrupt the running cell, if there is one. The variables stay."""
    return _short(project_dir, socket_dir, "interrupt") == "[OK] interrupt"


def shutdown(project_dir: str, socket_dir: str | None = None) -> bool:
    """Ask the server to exit. False if none runs."""
    return _short(project_dir, socket_dir, "shutdown") == "[OK] shutdown"


def pandastool(
    code: str,
    *,
    project_dir: str | None = None,
    socket_dir: str | None = None,
    db: Any = None,
    config: Any = None,
) -> str:
    """Run concise pandas code in the project's kernel, where variables stay from call to call.

    The code finds DB_ROOT (the folder of the datasets), DATASETS (their names, for `load`) and
    CFG (the configuration, with secrets masked). Returns JSON: status, stdout, stderr.
    """
    if not isinstance(code, str) or not code.strip():
        return _told("[ERROR] exec", stderr="empty code")
    project = (
        project_dir or os.environ.get("PANDAS_SANDBOX_PROJECT_DIR") or getattr(db, "root_dir", None)
    )
    if not project or not Path(project).is_dir():
        return _told("[ERROR] exec", stderr="invalid project_dir")
    request = {"setup": _setup(Path(project), config), "code": code}
    try:
        answer = _exec(str(project), socket_dir, TOOL_TIMEOUT, request)
    except (OSError, ValueError):
        return _told("[ERROR] exec", stderr=traceback.format_exc())
    return _told(*(str(answer.get(name) or "") for name in ("status", "stdout", "stderr")))


# --- servers -----------------------------------------------------------------------------


def _name(slug: str) -> str:
    if not _SLUG.fullmatch(slug):
        raise InvalidRequest(f"a slug is letters, digits and -_. without others: not {slug!r}")
    return f"sandbox_{slug}"


def _stop(file: ServerFile) -> None:
    before = file.read()
    if before:
        before.end()
        sweep(Path(before.socket))
    file.clear()


def _spawn(words: list[str]) -> tuple[int, int]:
    """Start a server in a session of its own. Returns its pid, and a descriptor of its output."""
    output, theirs = os.pipe()
    # -P: our directory may be the project, and files that a box left there must not be imported.
    argv = [sys.executable, "-P", "-m", "hutch", "kernel", *words]
    try:
        pid = os.posix_spawn(
            sys.executable,
            argv,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
                (os.POSIX_SPAWN_DUP2, theirs, 1),
                (os.POSIX_SPAWN_DUP2, theirs, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE],
        )
    except BaseException:
        os.close(output)
        raise
    finally:
        os.close(theirs)
    # Without a wait for it, it would stay a zombie while this process lives.
    threading.Thread(target=_reap, args=(pid,), daemon=True).start()
    return pid, output


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # other code waits for all children of this process


def _wait_until_ready(output: int, name: str) -> None:
    """Wait for the event that the server prints when it has started."""
    printed = b""
    deadline = time.monotonic() + START_TIMEOUT
    while b"EVENT:" not in printed:
        if not select.select([output], [], [], max(0, deadline - time.monotonic()))[0]:
            raise StartFailed(
                f"{name} did not start within {START_TIMEOUT:g} s: {_last_line(printed)}"
            )
        data = os.read(output, 65536)
        if not data:
            raise StartFailed(f"{name} did not start: {_last_line(printed)}")
        printed += data


def _last_line(printed: bytes) -> str:
    lines = printed.decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("hutch: ") if lines else "it said nothing"


# --- which servers run ---------------------------------------------------------------------
#
# One process can start a server and another stop it. Each has a small file, by name, which is also
# the lock for starting and stopping it.


@dataclass(frozen=True)
class RunningServer(PidFile):
    """A server, as it was started."""

    project: str
    socket: str

    @classmethod
    def now(cls, pid: int, project: Path, socket: Path) -> RunningServer:
        return cls(pid, began(pid) or 0, boot(), str(project), str(socket))

    def end(self) -> None:
        """Stop it; when this returns, it is gone. Never signals a process that reuses its pid."""
        with self.held() as process:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process is None or process.ends_within(0):
                    return
                process.signal(number)
                process.ends_within(END_TIMEOUT)


class ServerFile:
    """The file of one name, while it is locked."""

    def __init__(self, file: int) -> None:
        self._file = file

    def read(self) -> RunningServer | None:
        return parse(RunningServer, os.pread(self._file, 65536, 0))

    def write(self, running: RunningServer) -> None:
        self.clear()
        os.pwrite(self._file, running.dump(), 0)

    def clear(self) -> None:
        os.ftruncate(self._file, 0)


@contextmanager
def server_file(name: str) -> Iterator[ServerFile]:
    """The file of this name, locked: other callers wait for it."""
    path = _folder() / f"{name}.json"
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, path):
                continue  # removed while we waited
            locked = ServerFile(file)
            try:
                yield locked
            finally:
                if locked.read() is None:
                    path.unlink(missing_ok=True)
            return
        finally:
            os.close(file)


def find_server(project: Path) -> RunningServer | None:
    """The running server of this project, if it was started by name."""
    for path in _folder().glob("*.json"):
        try:
            running = parse(RunningServer, path.read_bytes())
        except OSError:
            continue
        if running and running.project == str(project) and running.is_alive:
            return running
    return None


def empty_folder() -> Path:
    """An empty folder, mounted over what a box must not see."""
    folder = _folder() / "empty"
    folder.mkdir(0o755, exist_ok=True)
    return folder


def _folder() -> Path:
    folder = data_dir() / "kernels"
    try:
        folder.mkdir(0o755, parents=True, exist_ok=True)
    except OSError as exc:
        raise BackendUnavailable(f"cannot make {folder}: {exc.strerror}") from exc
    return folder


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


# --- requests ----------------------------------------------------------------------------


def _exec(
    project_dir: str, socket_dir: str | None, timeout: float | None, request: Mapping[str, object]
) -> dict[str, Any]:
    message = {"op": "exec", **request, "timeout": timeout}
    patience = math.inf if timeout is None else timeout + GRACE
    return _ask(_path(project_dir, socket_dir), message, patience)


def _short(project_dir: str, socket_dir: str | None, op: str) -> object:
    try:
        return _ask(_path(project_dir, socket_dir), {"op": op}, SHORT).get("status")
    except (OSError, ValueError):
        return None


def _path(project_dir: str, socket_dir: str | None) -> Path:
    if socket_dir:
        return Path(socket_dir, SOCKET)
    path = Path(project_dir, ".sandbox", SOCKET)
    if not path.exists():
        server = find_server(Path(os.path.abspath(project_dir)))
        if server:
            return Path(server.socket)
    return path


def _ask(path: Path, message: Mapping[str, object], timeout: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    if not path.exists():
        hint = "no server listens here, start_container starts one"
        raise FileNotFoundError(errno.ENOENT, hint, str(path))
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            _allow(sock, deadline)
            sock.connect(address(path.name, folder))
            sock.sendall(pack(message))
            body = _exactly(sock, length_of(_exactly(sock, HEAD, deadline)), deadline)
    finally:
        os.close(folder)
    answer = unpack(body)
    if not isinstance(answer, dict):
        raise ConnectionError("invalid answer from the server: not a JSON object")
    return answer


def _allow(sock: socket.socket, deadline: float) -> None:
    left = max(0.001, deadline - time.monotonic())
    sock.settimeout(None if math.isinf(left) else left)


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        _allow(sock, deadline)
        piece = sock.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the server ended before it had answered")
        data += piece
    return bytes(data)


# --- pandastool --------------------------------------------------------------------------


def _told(status: str, stdout: str = "", stderr: str = "") -> str:
    return json.dumps({"status": status, "stdout": stdout, "stderr": stderr})


def _setup(project: Path, config: object) -> str:
    names = sorted(p.stem for p in (project / "data").glob("*.parquet") if p.stem[:1] != ".")
    masked = _mask(config) if isinstance(config, dict) else {}
    return f"DB_ROOT = {WORKSPACE_DATA!r}\nDATASETS = {names!r}\nCFG = {masked!r}\n"


def _mask(value: object) -> object:
    """A value that `repr` can write as Python, with secrets masked at any depth."""
    if isinstance(value, dict):
        return {
            str(name): "***" if _is_secret(str(name)) else _mask(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mask(inner) for inner in value]
    if value is None or type(value) in (str, int, bool):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in _SECRET)
