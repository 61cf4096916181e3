"""A Kubernetes to compare with: the cluster that `scripts/cluster` means, and its kubectl.

`benchmarks/run --start-cluster` starts one for the length of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hutch import factory
from hutch.images import bundle_image

from .cluster import CGROUPS, Cluster, default_folder, pack_image, why_not
from .cluster.programs import ClusterFailed
from .docker_engine import busybox_root, is_static
from .docker_peer import APPLETS

HOST = "docker.io"
IMAGE = f"{HOST}/hutch-benchmark/busybox:latest"
NAME = f"hutch-benchmark-{os.getpid()}"
PATIENCE = 120


def prepare(until: contextlib.ExitStack) -> str:
    """Make sure that the cluster has the images and a namespace, which goes with the stack.

    "", or why Kubernetes cannot be measured.
    """
    cluster = Cluster(default_folder())
    if not cluster.is_up():
        return "no cluster is up (scripts/cluster up)"
    busybox = shutil.which("busybox")
    if not busybox or not is_static(busybox):
        return "a static busybox is needed for the image (Debian: busybox-static)"
    try:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            archive, root = Path(folder, "image.tar"), Path(folder, "root.tar")
            root.write_bytes(busybox_root(busybox, APPLETS))
            pack_image(IMAGE, root, archive, {"Cmd": ["sh"], "Env": ["PATH=/bin"]})
            cluster.import_image(archive)
            bundle_image.write(factory.bundle(), runtime(), archive)
            cluster.import_image(archive)
        place = Namespace()
        place.make()
        until.callback(place.remove)
    except ClusterFailed as exc:
        return str(exc)
    return ""


def runtime() -> str:
    return f"{HOST}/hutch-benchmark/runtime:{factory.bundle().path.name}"


@contextlib.contextmanager
def started() -> Iterator[str]:
    """Run a cluster during the `with`. Gives "", or why it cannot run."""
    if why := why_not():
        yield why
        return
    had = os.environ.get("HUTCH_CLUSTER")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        cluster = Cluster(Path(folder, "cluster"))
        os.environ["HUTCH_CLUSTER"] = str(cluster.folder)
        try:
            cluster.up(with_us=True)
            yield ""
        except ClusterFailed as exc:
            yield str(exc)
        finally:
            cluster.down()
            os.environ.pop("HUTCH_CLUSTER")
            if had is not None:
                os.environ["HUTCH_CLUSTER"] = had


class Namespace:
    """The one for our boxes and for what kubectl makes beside them."""

    def __init__(self) -> None:
        self._cluster = cluster = Cluster(default_folder())
        name, self.path = NAME, f"/api/v1/namespaces/{NAME}"
        self.variables = {
            "HUTCH_KUBERNETES_NAMESPACE": name,
            "HUTCH_KUBERNETES_RUNTIME_IMAGE": runtime(),
            "KUBECONFIG": str(cluster.kubeconfig),
        }
        self._kubectl = (
            str(cluster.folder / "programs/kubectl"),
            f"--kubeconfig={cluster.kubeconfig}",
            f"--cache-dir={cluster.folder}/kubectl",
            f"--namespace={name}",
        )

    def make(self) -> None:
        """From now on, all boxes of this process are there."""
        _checked(self._cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAME}}))
        account = f"{self.path}/serviceaccounts/default"
        self._cluster.wait(
            "the service account", lambda: self._cluster.request("GET", account)[0] == 200
        )
        os.environ.update(self.variables)

    def remove(self) -> None:
        """With all that is in it."""
        _checked(self._cluster.request("DELETE", self.path))

    def kubectl(self, *words: str) -> None:
        subprocess.run(
            [*self._kubectl, *words], check=True, capture_output=True, stdin=subprocess.DEVNULL
        )

    def run_pod(self) -> str:
        """A Pod that sleeps: its name, once it is ready."""
        name = f"plain-{secrets.token_hex(4)}"
        self.kubectl(
            "run", name, f"--image={IMAGE}", "--image-pull-policy=IfNotPresent",
            "--restart=Never", "--", "sleep", "86400",
        )  # fmt: skip
        self.kubectl("wait", f"pod/{name}", "--for=condition=Ready", f"--timeout={PATIENCE}s")
        return name

    @contextlib.contextmanager
    def pod(self) -> Iterator[str]:
        name = self.run_pod()
        try:
            yield name
        finally:
            self.delete_pod(name)

    def delete_pod(self, name: str) -> None:
        self.kubectl("delete", "pod", name, "--grace-period=1")

    def pids(self) -> set[int]:
        """The processes of all Pods here, as this machine counts."""
        found = set()
        _, listed = self._cluster.request("GET", f"{self.path}/pods")
        uids = [pod["metadata"]["uid"] for pod in json.loads(listed)["items"]]
        group = self._cluster.config.group
        for at in (group, f"*/{group}"):
            for uid in uids:
                for file in CGROUPS.glob(f"{at}/**/pod{uid}/**/cgroup.procs"):
                    with contextlib.suppress(OSError):  # it has just gone
                        found |= set(map(int, file.read_text().split()))
        return found


def _checked(answer: tuple[int, bytes]) -> None:
    status, said = answer
    if status >= 300:
        raise ClusterFailed(said.decode()[:500])
