"""A Kubernetes for tests, with images that need no registry.

`cluster` is one for all tests of a run, started when the first test asks for it; a test that ends
one takes one of its own: `own_cluster`. HUTCH_TEST_CLUSTER names the folder of one that is up, to
use instead: `scripts/cluster up` makes it, in HUTCH_CLUSTER or ~/.local/state/hutch/cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from benchmarks.cluster import Cluster, pack_image, programs, why_not
from benchmarks.cluster.config import SEEN_BY_KUBELET
from benchmarks.cluster.programs import ClusterFailed
from benchmarks.docker_engine import EngineFailed
from must_work import need
from websockets import Subprotocol
from websockets.sync.client import connect

from docker_of_tests import BUSYBOX, DEBIAN, busybox_of_image, debian_root
from hutch import BackendUnavailable
from hutch.docker_logins import DEFAULT_HOST

PREFIX = "cluster-of-"
PATIENCE = 120
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EXEC = Subprotocol("v5.channel.k8s.io")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster with both images of the tests; KUBECONFIG leads to it."""
    with contextlib.ExitStack() as stack:
        if named := os.environ.get("HUTCH_TEST_CLUSTER"):
            made = Cluster(Path(named))
        else:
            made = stack.enter_context(own_cluster())
        with _or_need():
            give_images(made)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("KUBECONFIG", str(made.kubeconfig))
        yield made


@contextlib.contextmanager
def own_cluster() -> Iterator[Cluster]:
    """A cluster that a test may break. It ends with the test run, however that ends."""
    if why := why_not():
        need("kubernetes", why)
    if not programs.built():
        need("kubernetes", "Kubernetes was not built (scripts/cluster build)")
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    made = Cluster(folder / "cluster")
    try:
        with _or_need():
            made.up(with_us=True)
        yield made
    finally:
        made.down()
        shutil.rmtree(folder)


def sweep() -> None:
    """Remove what clusters of test runs left that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}[0-9]*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            Cluster(folder / "cluster").down()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _or_need() -> Iterator[None]:
    try:
        yield
    except (ClusterFailed, EngineFailed, BackendUnavailable) as exc:
        need("kubernetes", str(exc))


def full_name(image: str) -> str:
    """As containerd knows it."""
    path = image if "/" in image else f"library/{image}"
    return f"{DEFAULT_HOST}/{path if ':' in image else f'{path}:latest'}"


def give_busybox(to: Cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        busybox = Path(folder, "busybox")
        busybox.write_bytes(busybox_of_image())
        give_image(to, BUSYBOX, busybox, Env=[PATH], Cmd=["sh"])


def give_images(to: Cluster) -> None:
    give_busybox(to)
    give_image(to, DEBIAN, debian_root(), Env=[PATH, "LANG=C.UTF-8"], Cmd=["bash"])


def give_image(to: Cluster, name: str, root: Path, **config: object) -> None:
    """Make an image of the tar of a root file system, unless the node has one of this name."""
    if full_name(name) in to.images():
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "image.tar")
        pack_image(full_name(name), root, archive, config)
        to.import_image(archive)


# --- what tests ask the API server for ------------------------------------------------------


def ask(cluster: Cluster, method: str, path: str, body: object = None) -> Any:
    """The answer of the API server, which must be a good one."""
    status, said = cluster.request(method, path, body)
    assert status < 300, said.decode()
    return json.loads(said)


@contextlib.contextmanager
def namespace(cluster: Cluster, name: str) -> Iterator[str]:
    """A namespace whose Pods must be confined, and its path."""
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"metadata": {"name": name, "labels": level}}
    ask(cluster, "POST", "/api/v1/namespaces", body)
    path = f"/api/v1/namespaces/{name}"
    account = f"{path}/serviceaccounts/default"
    try:
        cluster.wait("the service account", lambda: cluster.request("GET", account)[0] == 200)
        yield path
    finally:
        ask(cluster, "DELETE", path)
        cluster.wait("its end", lambda: cluster.request("GET", path)[0] == 404)


def confined_pod(name: str, command: Sequence[str], image: str = BUSYBOX) -> dict[str, object]:
    return {
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": image,
                    "imagePullPolicy": "Never",
                    "command": list(command),
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def wait_for_phase(cluster: Cluster, path: str, *phases: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while (status := ask(cluster, "GET", path)["status"])["phase"] not in phases:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)


@dataclass
class Ran:
    out: bytes
    err: bytes
    status: Any  # as the API server tells it


def run_in_pod(cluster: Cluster, path: str, argv: Sequence[str], input: bytes = b"") -> Ran:
    """Run a program in a container, over a WebSocket, as every client does."""
    streams = [("container", "main"), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
    query = urlencode([*streams, *(("command", word) for word in argv)])
    context = ssl.create_default_context(cafile=str(cluster.folder / "etc/ca.crt"))
    ran = Ran(b"", b"", None)
    with connect(
        f"wss://127.0.0.1:{cluster.config.port}{path}/exec?{query}",
        ssl=context,
        max_size=None,
        compression=None,
        subprotocols=[EXEC],
        open_timeout=PATIENCE,
        proxy=None,
        additional_headers={"Authorization": f"Bearer {cluster.config.token}"},
    ) as link:
        assert link.subprotocol == EXEC
        link.send(b"\0" + input)
        link.send(b"\xff\0")  # its stdin ends
        for message in link:
            assert isinstance(message, bytes)
            match message[0], message[1:]:
                case 1, data:
                    ran.out += data
                case 2, data:
                    ran.err += data
                case 3, data:
                    ran.status = json.loads(data)
    return ran


# --- what must not be left ------------------------------------------------------------------


def traces(cluster: Cluster) -> set[str]:
    """What of a cluster is on this machine: processes, mounts, groups, links, files, settings."""
    name = str(cluster.folder)
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name.encode() in (entry / "cmdline").read_bytes():
                found.add(f"process {entry.name}")
    found |= {
        f"mount {line}" for line in Path("/proc/mounts").read_text().split("\n") if name in line
    }
    found |= {
        f"group {path}" for path in Path("/sys/fs/cgroup").glob(f"**/{cluster.config.group}*")
    }
    if cluster.folder.exists():
        found.add(f"folder {name}")
    return found


def surroundings() -> dict[str, object]:
    """What a cluster could change outside its folder, and nothing else on the machine does."""
    places = [
        "/etc/cni",
        "/opt/cni",
        "/run/netns",
        "/usr/libexec/kubernetes",
        "/var/lib/cni",
        "/var/lib/kubelet",
        "/var/log/containers",
        "/var/log/pods",
    ]
    links = {name for _, name in socket.if_nameindex()}
    return {
        "places": {place: sorted(os.listdir(place)) for place in places if os.path.isdir(place)},
        "links": links & {"node", "pods"},
        "settings": {name: Path("/proc/sys", name).read_text() for name in SEEN_BY_KUBELET},
    }
