"""The promises of every backend, kept by Pods of a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from docker_of_tests import BUSYBOX, DEBIAN
from hutch.backends.base import Backend, Spec
from hutch.testing.contract import BackendContract
from kubernetes_of_tests import Boxes
from kubernetes_of_tests import boxes as boxes
from kubernetes_of_tests import with_runtime as with_runtime


class KubernetesContract(BackendContract):
    image, bundle = DEBIAN, "image"
    folder: str | None = None
    soon = 5.0

    @pytest.fixture(autouse=True)
    def _with_a_cluster(self, boxes: Boxes) -> None:
        self.boxes = boxes

    def make_backend(self) -> Backend:
        return self.boxes.backend(self.folder, bundle=self.bundle)

    def spec(self) -> Spec:
        return Spec(image=f"{self.image}:latest")


class TestKubernetes(KubernetesContract):
    pass


class TestLastingKubernetes(KubernetesContract):
    """In an image without Python, and with a bundle that is copied."""

    image, bundle = BUSYBOX, "copy"

    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.folder = str(tmp_path / "lasting")
