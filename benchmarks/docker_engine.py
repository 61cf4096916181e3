"""A Docker engine of one's own: started in a temporary folder, and gone without a trace.

Everything it makes is found again by the folder's path or by the name of its control group, so
that `close` can end what a killed or live-restored engine left behind: containers, shims, mounts.
The owner's pid is in the name: what an owner that was killed left is swept by the next start.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlencode, urlsplit

PREFIX = "docker-of-"
PATIENCE = 90.0
BRIDGE = Path("/sys/class/net/docker0")
GROUPS = Path("/sys/fs/cgroup")
RUNSC = ["--network=none", "--platform=ptrace"]  # works without KVM, on every kernel


class EngineFailed(Exception):
    """The engine did not start, or did not do as requested."""


def why_not() -> str:
    """Why no engine can be started here, or nothing."""
    if os.geteuid() != 0:
        return "only root can start a Docker engine"
    if not shutil.which("dockerd"):
        return "dockerd is not installed (Debian: docker.io)"
    return ""


class Client:
    """The few calls that a set-up makes to an engine."""

    def __init__(self, host: str) -> None:
        self.host = host

    def answers(self) -> bool:
        try:
            self.call("GET", "/_ping", timeout=5)
        except (OSError, http.client.HTTPException, EngineFailed):
            return False
        return True

    def has_image(self, name: str) -> bool:
        try:
            self.call("GET", f"/images/{name}/json")
        except EngineFailed:
            return False
        return True

    def import_image(self, name: str, tar: BinaryIO, changes: Iterable[str] = ()) -> None:
        """Make an image of a root file system."""
        query = [("fromSrc", "-"), ("repo", name), *(("changes", c) for c in changes)]
        said = self.call("POST", f"/images/create?{urlencode(query)}", body=tar)
        if b'"error"' in said:
            raise EngineFailed(said.decode(errors="replace"))

    def tag(self, image: str, name: str) -> None:
        self.call("POST", f"/images/{image}/tag?{urlencode({'repo': name})}")

    def remove_containers(self) -> None:
        for found in json.loads(self.call("GET", "/containers/json?all=1")):
            with contextlib.suppress(EngineFailed):
                self.call("DELETE", f"/containers/{found['Id']}?force=1&v=1")

    def call(
        self, method: str, path: str, *, body: BinaryIO | None = None, timeout: float = 300
    ) -> bytes:
        connection = _connection(self.host, timeout)
        try:
            headers = {"Content-Type": "application/x-tar"} if body else {}
            connection.request(method, path, body, headers, encode_chunked=True)
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        if answer.status >= 400:
            raise EngineFailed(f"{method} {path}: {said.decode(errors='replace')}")
        return said


def _connection(host: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(host)
    if parts.scheme != "unix":
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    connection = http.client.HTTPConnection("localhost", timeout=timeout)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(timeout)
    try:
        connection.sock.connect(parts.path)
    except OSError:
        connection.close()
        raise
    return connection


class Engine(Client):
    """`start`, `stop`, `kill` and `start` again as often as one likes; `close` ends it all."""

    def __init__(
        self, *, live_restore: bool = False, bridge: bool = False, runtime: str = "runc"
    ) -> None:
        sweep()
        self.folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
        self.group = os.path.basename(self.folder)
        self.had_bridge = BRIDGE.exists()
        null = os.stat("/dev/null")
        self.owner_of_null = null.st_uid, null.st_gid
        super().__init__(f"unix://{self.folder}/socket")
        self.process: subprocess.Popen[bytes] | None = None
        self.configure(live_restore=live_restore, bridge=bridge, runtime=runtime)

    def configure(self, *, live_restore: bool, bridge: bool, runtime: str = "runc") -> None:
        """What the next start goes by."""
        runsc = shutil.which("runsc")
        settings: dict[str, Any] = {
            "hosts": [self.host],
            "data-root": f"{self.folder}/data",
            "exec-root": f"{self.folder}/exec",
            "pidfile": f"{self.folder}/pid",
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "cgroup-parent": f"/{self.group}",
            "live-restore": live_restore,
            # Without the firewall, which a small kernel may lack.
            "iptables": False,
            "ip6tables": False,
            "ip-forward": False,
            "runtimes": {"runsc": {"path": runsc, "runtimeArgs": RUNSC}} if runsc else {},
            "default-runtime": runtime,
        }
        if not bridge:
            settings["bridge"] = "none"
        Path(self.folder, "config.json").write_text(json.dumps(settings))

    def start(self) -> None:
        # The engine ends, and its containers with it, when we are killed.
        argv = ["dockerd", "--config-file", f"{self.folder}/config.json"]
        if setpriv := shutil.which("setpriv"):
            argv = [setpriv, "--pdeathsig", "TERM", *argv]
        with open(f"{self.folder}/log", "ab") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            if self.answers():
                return
            time.sleep(0.05)
        self.kill()
        raise EngineFailed(f"dockerd did not start: {self._last_line()}")

    def stop(self) -> None:
        """As an administrator stops it: its containers end too, unless it has live-restore."""
        if self.process:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.kill()
            self.process = None

    def kill(self) -> None:
        """As the kernel ends it when memory is short. Its containerd dies with it."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None
            _end(f"containerd --config {self.folder}/")
            # As long as the process is not reaped, the next start would take it for alive.
            Path(self.folder, "exec/containerd/containerd.pid").unlink(missing_ok=True)

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException, EngineFailed, ValueError):
                self.remove_containers()
        self.stop()
        _remove(Path(self.folder))
        os.chown("/dev/null", *self.owner_of_null)  # runsc changes it
        if not self.had_bridge and BRIDGE.exists() and not _other_engines():
            subprocess.run(["ip", "link", "delete", "docker0"], check=False)

    def _last_line(self) -> str:
        lines = Path(self.folder, "log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"


@contextlib.contextmanager
def engine(
    *, live_restore: bool = False, bridge: bool = False, runtime: str = "runc"
) -> Iterator[Engine]:
    """An engine that runs while the `with` lasts."""
    made = Engine(live_restore=live_restore, bridge=bridge, runtime=runtime)
    try:
        made.start()
        yield made
    finally:
        made.close()


def sweep() -> None:
    """Remove what engines of killed owners left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}[0-9]*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                _remove(folder)


def _remove(folder: Path) -> None:
    """End every process of an engine, undo its mounts, remove its groups and its folder."""
    _end(f"{folder}/", folder.name)
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        point = line.split()[1]
        if point.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", point], check=False)
    for top in _groups(folder.name):
        for group, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(group)
    shutil.rmtree(folder, ignore_errors=True)


def _end(arguments: str, group: str = "") -> None:
    """Kill those with this among their arguments, and those in this group, until none is left."""
    deadline = time.monotonic() + PATIENCE
    while (left := _with(arguments) | _inside(group)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _with(arguments: str) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            if arguments.encode() in line:
                found.add(int(entry.name))
    return found - {os.getpid()}


def _inside(group: str) -> set[int]:
    found: set[int] = set()
    for top in _groups(group) if group else []:
        for path, _, _ in os.walk(top):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(path, "cgroup.procs").read_text().split()))
    return found


def _groups(name: str) -> list[Path]:
    return [*GROUPS.glob(name), *GROUPS.glob(f"*/{name}")]


def _other_engines() -> bool:
    names = (entry / "comm" for entry in Path("/proc").glob("[0-9]*"))
    for name in names:
        with contextlib.suppress(OSError):
            if name.read_text().strip() == "dockerd":
                return True
    return False


def busybox_root(busybox: str, applets: Iterable[str]) -> bytes:
    """A root file system as a tar: busybox, and the names it is called by."""
    content = Path(busybox).read_bytes()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        program = tarfile.TarInfo("bin/busybox")
        program.size, program.mode = len(content), 0o755
        tar.addfile(program, io.BytesIO(content))
        for name in applets:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        tmp = tarfile.TarInfo("tmp")
        tmp.type, tmp.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(tmp)
    return packed.getvalue()


def is_static(path: str) -> bool:
    """Whether a 64-bit program needs no loader: it has no PT_INTERP header."""
    with open(path, "rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":
            return False
        offset = struct.unpack_from("<Q", head, 32)[0]
        size, count = struct.unpack_from("<HH", head, 54)
        file.seek(offset)
        table = file.read(size * count)
    kinds = [struct.unpack_from("<I", table, size * i)[0] for i in range(count)]
    return 3 not in kinds
