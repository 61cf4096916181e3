"""Who we are compared with, used as people use them; and why one of them is not here."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass

from . import cluster_peer, docker_peer

# The flags that its manual and most wrappers around it use.
BUBBLEWRAP = (
    "bwrap", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin",
    "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc",
    "--dev", "/dev", "--tmpfs", "/tmp", "--unshare-all", "--die-with-parent", "--new-session",
)  # fmt: skip

DOCKER_RUN = ("docker", "run", "--rm", docker_peer.IMAGE)
DOCKER_RUN_OFFLINE = ("docker", "run", "--rm", "--network", "none", docker_peer.IMAGE)


JUPYTER_PYTHON = "HUTCH_JUPYTER_PYTHON"


@dataclass(frozen=True)
class Peers:
    """For each peer: "" if it can be measured, or the reason why not."""

    docker: str
    bubblewrap: str
    jupyter: str
    kubernetes: str


def find(wanted: set[str], until: contextlib.ExitStack) -> Peers:
    """`until`: what is made for them goes with it."""
    left_out = "left out by --peers"
    return Peers(
        docker=docker_peer.prepare() if "docker" in wanted else left_out,
        bubblewrap=_bubblewrap() if "bubblewrap" in wanted else left_out,
        jupyter=_jupyter() if "jupyter" in wanted else left_out,
        kubernetes=cluster_peer.prepare(until) if "kubernetes" in wanted else left_out,
    )


def _bubblewrap() -> str:
    if not shutil.which("bwrap"):
        return "bwrap is not installed"
    tried = subprocess.run([*BUBBLEWRAP, "true"], capture_output=True, text=True)
    return f"bwrap does not work here: {tried.stderr.strip()}" if tried.returncode else ""


def _jupyter() -> str:
    python = os.environ.get(JUPYTER_PYTHON, "")
    if not python:
        return f"set {JUPYTER_PYTHON} to a Python that has ipykernel, jupyter_client and pandas"
    code = "import ipykernel, jupyter_client, pandas"
    tried = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return f"Jupyter does not work here: {tried.stderr.strip()[-200:]}" if tried.returncode else ""


def run(argv: tuple[str, ...]) -> None:
    """Run a peer's command, which must succeed."""
    subprocess.run(
        argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


class Container:
    """A Docker container that sleeps, for `docker exec` and `docker cp`."""

    def __init__(self) -> None:
        argv = ["docker", "run", "-d", "--network", "none", docker_peer.IMAGE, "sleep", "86400"]
        made = subprocess.run(argv, check=True, capture_output=True, text=True)
        self.id = made.stdout.strip()

    def pids(self) -> list[int]:
        """Its process, and the shim that Docker keeps beside it."""
        argv = ["docker", "inspect", "--format", "{{.State.Pid}}", self.id]
        pid = int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
        with open(f"/proc/{pid}/stat") as file:
            shim = int(file.read().rpartition(")")[2].split()[1])
        return [pid, shim]

    def close(self) -> None:
        run(("docker", "rm", "-f", self.id))
