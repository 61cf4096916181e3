"""Sessions whose connection ends with what carries it, in a real cluster: they go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_of_tests import give_images, own_cluster
from daemon_of_tests import wait_for
from docker_of_tests import DEBIAN
from hutch import AsyncSandbox, BackendUnavailable, Sandbox
from kubernetes_of_tests import Boxes, give_runtime, own_namespace, server

SECONDS = 300


@pytest.fixture(scope="module")
def breakable() -> Iterator[Boxes]:
    """In a cluster whose parts are killed."""
    with own_cluster() as own, pytest.MonkeyPatch.context() as patch:
        give_images(own)
        give_runtime(own)
        patch.setenv("KUBECONFIG", str(own.kubeconfig))
        with own_namespace(own) as boxes:
            settings = boxes.settings()
            patch.setenv("HUTCH_KUBERNETES_NAMESPACE", settings.namespace)
            patch.setenv("HUTCH_KUBERNETES_RUNTIME_IMAGE", settings.runtime_image)
            yield boxes


@pytest.mark.parametrize(
    ("part", "away"), [("kube-apiserver", 30.0), ("kubelet", 5.0), ("containerd", 1.0)]
)
def test_a_session_goes_on_when_what_carries_its_link_was_killed(
    breakable: Boxes, part: str, away: float
) -> None:
    cluster = breakable.cluster

    async def main() -> None:
        async with (
            asyncio.timeout(SECONDS),
            await AsyncSandbox.create(backend="kubernetes", image=f"{DEBIAN}:latest") as box,
        ):
            await box.shell.run("WORD=kept; cd /tmp")
            await box.run_code("x = 6")
            program = await box.commands.run(
                "for n in $(seq 1000); do echo $n; sleep 0.01; done; exit 7", background=True
            )
            ran = asyncio.create_task(box.commands.run("touch /tmp/begun; sleep 1000"))
            while not await box.files.exists("/tmp/begun"):
                await asyncio.sleep(0.05)

            await asyncio.to_thread(cluster.stop, part)
            try:
                await asyncio.sleep(away)
                come = asyncio.create_task(box.shell.run("echo $WORD $PWD"))
            finally:
                await asyncio.to_thread(cluster.start, part)
            with pytest.raises(BackendUnavailable, match=r"broke .* and was made again. It is st"):
                await ran
            assert (await come).stdout == "kept /tmp\n"
            assert (await box.run_code("x * 7")).text == "42"
            result = await program.wait()
            assert result.exit_code == 7
            assert result.stdout == "".join(f"{n}\n" for n in range(1, 1001))

    asyncio.run(main())


def test_a_server_goes_on_and_writes_down_that_it_connected_again(
    breakable: Boxes, tmp_path: Path
) -> None:
    with server(tmp_path / "data", breakable) as daemon:
        box = Sandbox.create(url=daemon.url, ttl=600)
        box.shell.run("WORD=kept")
        breakable.cluster.stop("containerd")
        breakable.cluster.start("containerd")
        breakable.cluster.wait_until_ready()
        assert wait_for(lambda: "reconnected" in [entry.kind for entry in box.journal()], 60)
        assert box.shell.run("echo $WORD").stdout == "kept\n"
        assert box.refresh().status == "running"
