"""Every backend keeps the same promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from hutch.backends.base import Backend
from hutch.backends.namespaces import NamespacesBackend
from hutch.testing.contract import BackendContract
from hutch.testing.fake import FakeBackend


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
