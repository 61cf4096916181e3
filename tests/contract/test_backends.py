"""Every backend keeps the same promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from must_work import need

from docker_of_tests import BUSYBOX, DEBIAN, Client
from hutch import factory
from hutch.backends.base import Backend, Spec
from hutch.backends.docker import DockerBackend
from hutch.backends.docker.engine import DockerEngine
from hutch.backends.namespaces import NamespacesBackend
from hutch.testing.contract import BackendContract
from hutch.testing.fake import FakeBackend
from hutch.types import GiB, Limits


class TestNamespaces(BackendContract):
    def make_backend(self) -> Backend:
        return NamespacesBackend()


class TestLasting(BackendContract):
    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.folder = str(tmp_path / "lasting")

    def make_backend(self) -> Backend:
        return NamespacesBackend(lasting=self.folder)


class TestFake(BackendContract):
    def make_backend(self) -> Backend:
        return FakeBackend()


class TestLastingFake(BackendContract):
    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.folder = str(tmp_path)

    def make_backend(self) -> Backend:
        return FakeBackend(lasting=self.folder)


class DockerContract(BackendContract):
    image, runtime = DEBIAN, ""
    soon = 5.0

    @pytest.fixture(autouse=True)
    def _with_an_engine(self, docker_engine: Client) -> None:
        self.host = docker_engine.host

    def make_backend(self) -> Backend:
        return DockerBackend(factory.bundle, docker_host=self.host)

    def spec(self) -> Spec:
        return Spec(image=self.image, runtime=self.runtime)


class TestDocker(DockerContract):
    pass


class TestDockerWithBusybox(DockerContract):
    image = BUSYBOX


class TestLastingDocker(DockerContract):
    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.folder = str(tmp_path / "lasting")

    def make_backend(self) -> Backend:
        return DockerBackend(factory.bundle, docker_host=self.host, lasting=self.folder)


class TestDockerThroughTheEngine(TestLastingDocker):
    """As with an engine on another machine: nothing of this one is mounted."""

    image = BUSYBOX

    def make_backend(self) -> Backend:
        return FarAway(factory.bundle, docker_host=self.host, lasting=self.folder)


class FarAway(DockerBackend):
    def _engine(self) -> DockerEngine:
        engine = super()._engine()
        engine.treat_as_remote()
        return engine


class TestGVisor(DockerContract):
    image, runtime = BUSYBOX, "runsc"

    def spec(self) -> Spec:
        # There, a fork shares little with its parent: a hundred at once take their time and space.
        return replace(super().spec(), limits=Limits(memory=4 * GiB))

    @pytest.fixture(autouse=True)
    def _with_gvisor(self, docker_engine: Client) -> None:
        if b'"runsc"' not in docker_engine.call("GET", "/info"):
            need("runsc", "the engine has no gVisor (Debian: runsc)")
