"""A node whose kubelet has died: what runs there, what shall start, and what shall end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from cluster_of_tests import give_busybox, own_cluster
from docker_of_tests import BUSYBOX
from hutch.backends.base import Spec
from hutch.backends.kubernetes import KubernetesBackend, box
from hutch.errors import BackendUnavailable
from kubernetes_of_tests import Boxes, give_runtime, own_namespace

SMALL = Spec(image=f"{BUSYBOX}:latest")


@pytest.fixture
def boxes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Boxes]:
    with own_cluster() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        give_busybox(cluster)
        give_runtime(cluster)
        with own_namespace(cluster) as made:
            yield made


def test_a_node_without_its_kubelet_is_said_and_nothing_is_left_once_it_is_back(
    boxes: Boxes,
) -> None:
    async def work(backend: KubernetesBackend) -> None:
        made = await backend.start(SMALL)
        boxes.cluster.stop("kubelet")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(box, "PATIENCE", 2.0)
            patch.setattr(box, "START_TIMEOUT", 3.0)
            for act in (made.kill, lambda: backend.start(SMALL)):
                with pytest.raises(BackendUnavailable, match="its node may be away"):
                    await act()
        assert len(boxes.pods()) == 2
        boxes.cluster.start("kubelet")
        while boxes.pods():
            await asyncio.sleep(0.1)
        boxes.cluster.wait_until_ready()
        await (await backend.start(SMALL)).kill()

    async def main() -> None:
        async with asyncio.timeout(300):
            backend = boxes.backend()
            try:
                await work(backend)
            finally:
                await backend.close()

    asyncio.run(main())
