"""A Docker engine to compare with, and a busybox image that needs no registry.

`python -m benchmarks.docker_peer` makes the image in the engine that runs here, and says so.
`benchmarks/run --start-engine` starts an engine of its own for the length of the run.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import struct
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

IMAGE = "hutch-benchmark/busybox"
APPLETS = ("sh", "true", "sleep", "head", "cat")
BRIDGE = Path("/sys/class/net/docker0")
GROUPS = Path("/sys/fs/cgroup")


def prepare() -> str:
    """Make sure that the engine has the image. "", or why Docker cannot be measured."""
    if not shutil.which("docker"):
        return "docker is not installed"
    try:
        tried = subprocess.run(["docker", "version"], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "the Docker engine does not answer"
    if tried.returncode:
        return "no Docker engine runs here"
    busybox = shutil.which("busybox")
    if not busybox or not is_static(busybox):
        return "a static busybox is needed for the image (Debian: busybox-static)"
    made = subprocess.run(
        ["docker", "import", "-", IMAGE], input=image_of(busybox), capture_output=True
    )
    if made.returncode:
        return f"docker import failed: {made.stderr.decode(errors='replace').strip()}"
    tried = subprocess.run(["docker", "run", "--rm", IMAGE, "true"], capture_output=True, text=True)
    return f"docker run failed: {tried.stderr.strip()}" if tried.returncode else ""


def image_of(busybox: str) -> bytes:
    """A root file system as a tar: busybox, and the names it is called by."""
    content = Path(busybox).read_bytes()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        program = tarfile.TarInfo("bin/busybox")
        program.size, program.mode = len(content), 0o755
        tar.addfile(program, io.BytesIO(content))
        for name in APPLETS:
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


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """An engine of our own while the `with` lasts: "", or why there is none.

    It keeps everything in a temporary folder; its bridge, its control groups, its mounts and
    its processes are gone afterwards. DOCKER_HOST leads to it.
    """
    why = "" if os.geteuid() == 0 else "only root can start a Docker engine"
    if not shutil.which("dockerd"):
        why = "dockerd is not installed (Debian: docker.io)"
    if why:
        yield why
        return
    had_bridge, had_groups = BRIDGE.exists(), _groups()
    folder = tempfile.mkdtemp(prefix="docker-peer-")
    os.environ["DOCKER_HOST"] = f"unix://{folder}/socket"
    daemon = _start(folder, bridge=True) or _start(folder, bridge=False)
    try:
        yield "" if daemon else f"dockerd did not start: {_last_line(folder)}"
    finally:
        if daemon:
            _stop(daemon)
        del os.environ["DOCKER_HOST"]
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if (point := line.split()[1]).startswith(folder):
                subprocess.run(["umount", point], check=False)
        if not had_bridge and BRIDGE.exists():
            subprocess.run(["ip", "link", "delete", "docker0"], check=False)
        for group in _groups() - had_groups:
            with contextlib.suppress(OSError):
                group.rmdir()
        shutil.rmtree(folder, ignore_errors=True)


def _groups() -> set[Path]:
    return {*GROUPS.glob("docker"), *GROUPS.glob("*/docker")}


def _start(folder: str, bridge: bool) -> subprocess.Popen[bytes] | None:
    # Without the firewall, which a small kernel may lack; with the bridge, which every
    # ordinary engine has and which `docker run` spends time on.
    argv = [
        "dockerd", "--iptables=false", "--ip6tables=false", "--ip-forward=false",
        *([] if bridge else ["--bridge=none"]), "-H", f"unix://{folder}/socket",
        "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "-p", f"{folder}/pid",
    ]  # fmt: skip
    with open(f"{folder}/log", "ab") as log:
        daemon = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and daemon.poll() is None:
        if not subprocess.run(["docker", "version"], capture_output=True, check=False).returncode:
            return daemon
        time.sleep(0.2)
    _stop(daemon)
    return None


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(30)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _last_line(folder: str) -> str:
    lines = Path(folder, "log").read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"


if __name__ == "__main__":
    print(prepare() or f"the image {IMAGE} is there")
