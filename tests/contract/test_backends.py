"""Every backend keeps the same promises."""

from __future__ import annotations

from hutch.backends.base import Backend
from hutch.backends.namespaces import NamespacesBackend
from hutch.testing.contract import BackendContract
from hutch.testing.fake import FakeBackend


class TestNamespaces(BackendContract):
    def make_backend(self) -> Backend:
        return NamespacesBackend()


class TestFake(BackendContract):
    def make_backend(self) -> Backend:
        return FakeBackend()
