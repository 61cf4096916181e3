"""A namespace of a real cluster for boxes, and the image with our runtime in it."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster import Cluster

from cluster_of_tests import ask, full_name, namespace
from hutch import factory
from hutch.backends.kubernetes import KubernetesBackend
from hutch.images import bundle_image
from hutch.types import ClusterSettings

RUNTIME = "hutch-test/runtime"


@dataclass(frozen=True)
class Boxes:
    """Where boxes are made. KUBECONFIG leads to the cluster."""

    cluster: Cluster
    namespace: str

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}"

    def settings(self, **more: str) -> ClusterSettings:
        wanted = {"namespace": self.namespace, "runtime_image": f"{RUNTIME}:latest", **more}
        return ClusterSettings(**wanted)

    def backend(self, lasting: str | None = None, **more: str) -> KubernetesBackend:
        made = factory.backend("kubernetes", lasting=lasting, cluster=self.settings(**more))
        assert isinstance(made, KubernetesBackend)
        return made

    def pods(self) -> list[Any]:
        return list(ask(self.cluster, "GET", f"{self.path}/pods")["items"])


@pytest.fixture(scope="session")
def with_runtime(cluster: Cluster) -> Cluster:
    if full_name(RUNTIME) not in cluster.images():
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder, "runtime.tar")
            bundle_image.write(factory.bundle(), f"{RUNTIME}:latest", archive)
            cluster.import_image(archive)
    return cluster


@pytest.fixture(scope="module")
def boxes(with_runtime: Cluster) -> Iterator[Boxes]:
    """A namespace whose Pods must be confined. What is left in it ends with it."""
    with namespace(with_runtime, f"boxes-{secrets.token_hex(4)}") as path:
        yield Boxes(with_runtime, path.rpartition("/")[2])


@contextlib.contextmanager
def removed(made: Boxes, path: str, body: dict[str, object]) -> Iterator[Any]:
    """An object of the cluster, for the length of a `with`."""
    created = ask(made.cluster, "POST", path, body)
    try:
        yield created
    finally:
        ask(made.cluster, "DELETE", f"{path}/{created['metadata']['name']}")
