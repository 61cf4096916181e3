"""Sessions whose connection ends with what carries it, in a real cluster: they go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from benchmarks.cluster import Cluster

from cluster_of_tests import give_images, own_cluster
from docker_of_tests import DEBIAN
from hutch import AsyncSandbox, BackendUnavailable
from kubernetes_of_tests import give_runtime, own_namespace

SECONDS = 300


@pytest.fixture(scope="module")
def breakable() -> Iterator[Cluster]:
    """A cluster whose parts are killed."""
    with own_cluster() as own, pytest.MonkeyPatch.context() as patch:
        give_images(own)
        give_runtime(own)
        patch.setenv("KUBECONFIG", str(own.kubeconfig))
        with own_namespace(own) as boxes:
            settings = boxes.settings()
            patch.setenv("HUTCH_KUBERNETES_NAMESPACE", settings.namespace)
            patch.setenv("HUTCH_KUBERNETES_RUNTIME_IMAGE", settings.runtime_image)
            yield own


@pytest.mark.parametrize(
    ("part", "away"), [("kube-apiserver", 30.0), ("kubelet", 5.0), ("containerd", 1.0)]
)
def test_a_session_goes_on_when_what_carries_its_link_was_killed(
    breakable: Cluster, part: str, away: float
) -> None:
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

            await asyncio.to_thread(breakable.stop, part)
            try:
                await asyncio.sleep(away)
                come = asyncio.create_task(box.shell.run("echo $WORD $PWD"))
            finally:
                await asyncio.to_thread(breakable.start, part)
            began = time.monotonic()
            await asyncio.to_thread(breakable.wait, part, breakable._is_ready)
            print(f"{part} is there after {time.monotonic() - began:.1f} s")
            began = time.monotonic()
            with pytest.raises(BackendUnavailable, match=r"broke .* and was made again. It is st"):
                await ran
            print(f"linked again {time.monotonic() - began:.1f} s later")
            assert (await come).stdout == "kept /tmp\n"
            assert (await box.run_code("x * 7")).text == "42"
            result = await program.wait()
            assert result.exit_code == 7
            assert result.stdout == "".join(f"{n}\n" for n in range(1, 1001))

    asyncio.run(main())
