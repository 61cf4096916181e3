"""A namespace of a real cluster for boxes, and the image with our runtime in it.

With HUTCH_BACKEND=kubernetes, boxes that are not asked for otherwise are Pods: `as_default`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster import CGROUPS, Cluster

from cluster_of_tests import ask, full_name, namespace
from daemon_of_tests import Daemon
from docker_of_tests import DEBIAN
from hutch import factory, local
from hutch.backends.kubernetes import KubernetesBackend
from hutch.backends.kubernetes.pod import BOX_CONTAINER
from hutch.images import bundle_image
from hutch.types import ClusterSettings


@functools.cache
def runtime() -> str:
    """The image with the runtime as it is now: runs of several versions may share a cluster."""
    return f"hutch-test/runtime:{factory.bundle().path.name}"


@dataclass(frozen=True)
class Boxes:
    """Where boxes are made. KUBECONFIG leads to the cluster."""

    cluster: Cluster
    namespace: str

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}"

    def settings(self, **more: str) -> ClusterSettings:
        wanted = {"namespace": self.namespace, "runtime_image": runtime(), **more}
        return ClusterSettings(**wanted)

    def backend(self, lasting: str | None = None, **more: str) -> KubernetesBackend:
        made = factory.backend("kubernetes", lasting=lasting, cluster=self.settings(**more))
        assert isinstance(made, KubernetesBackend)
        return made

    def pods(self) -> list[Any]:
        return list(ask(self.cluster, "GET", f"{self.path}/pods")["items"])

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs, to make all its boxes here."""
        return {
            "HUTCH_BACKEND": "kubernetes",
            "HUTCH_KUBERNETES_NAMESPACE": self.namespace,
            "HUTCH_KUBERNETES_RUNTIME_IMAGE": runtime(),
            "KUBECONFIG": str(self.cluster.kubeconfig),
        }

    def guests(self) -> list[int]:
        """The first processes of its boxes, as this machine counts, the oldest box first."""
        name, found = self.cluster.config.group, []
        group = next(path for at in (name, f"*/{name}") for path in CGROUPS.glob(at))
        for pod in self.pods():
            for container in pod["status"].get("containerStatuses", ()):
                id = container.get("containerID", "").rpartition("/")[2]
                for path in group.rglob(id) if id and container["name"] == BOX_CONTAINER else ():
                    with contextlib.suppress(OSError, ValueError):  # it has just gone
                        found.append(min(map(int, (path / "cgroup.procs").read_text().split())))
        return sorted(found)


@pytest.fixture(scope="session")
def with_runtime(cluster: Cluster) -> Cluster:
    give_runtime(cluster)
    return cluster


def give_runtime(to: Cluster) -> None:
    if full_name(runtime()) not in to.images():
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder, "runtime.tar")
            bundle_image.write(factory.bundle(), runtime(), archive)
            to.import_image(archive)


@contextlib.contextmanager
def own_namespace(cluster: Cluster) -> Iterator[Boxes]:
    """A namespace whose Pods must be confined. What is left in it ends with it."""
    with namespace(cluster, f"boxes-{secrets.token_hex(4)}") as path:
        yield Boxes(cluster, path.rpartition("/")[2])


def server(folder: Path, boxes: Boxes, pool: str = "") -> Daemon:
    settings = boxes.settings()
    return Daemon(
        folder,
        key=None,
        backend="kubernetes",
        default_image=f"{DEBIAN}:latest",
        kubernetes_namespace=settings.namespace,
        kubernetes_runtime_image=settings.runtime_image,
        pool_images=pool,
    )


@pytest.fixture(scope="module")
def boxes(with_runtime: Cluster) -> Iterator[Boxes]:
    with own_namespace(with_runtime) as made:
        yield made


@contextlib.contextmanager
def removed(made: Boxes, path: str, body: dict[str, object]) -> Iterator[Any]:
    """An object of the cluster, for the length of a `with`."""
    created = ask(made.cluster, "POST", path, body)
    try:
        yield created
    finally:
        ask(made.cluster, "DELETE", f"{path}/{created['metadata']['name']}")


@contextlib.contextmanager
def as_default(cluster: Cluster, images: Sequence[str]) -> Iterator[None]:
    """Every box is a Pod, and what tests call images are there. No Pod may be left at the end."""
    names = {full_name(name) for name in (*images, KubernetesBackend.default_image)}
    if missing := names - cluster.images():
        cluster.tag_image(full_name(DEBIAN), *sorted(missing))
    with own_namespace(cluster) as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.variables.items():
            patch.setenv(name, value)
        yield
        if local._embedded:
            local._embedded.close()
        cluster.wait("the end of all Pods", lambda: not made.pods())


def default_boxes() -> Boxes:
    """Where the boxes of this run are, with HUTCH_BACKEND=kubernetes."""
    folder = Path(os.environ["KUBECONFIG"]).parent
    return Boxes(Cluster(folder), os.environ["HUTCH_KUBERNETES_NAMESPACE"])
