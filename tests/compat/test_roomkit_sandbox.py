"""roomkit-sandbox's Kubernetes backend, on our Pods. RoomKit itself is in tests/integrations."""

from __future__ import annotations

import asyncio
from inspect import signature

import pytest

from daemon_of_tests import wait_for
from docker_of_tests import BUSYBOX
from hutch import InvalidRequest, factory
from hutch.compat.roomkit_sandbox import KubernetesSandboxBackend
from kubernetes_of_tests import Boxes
from kubernetes_of_tests import boxes as boxes
from kubernetes_of_tests import with_runtime as with_runtime

SECONDS = 180


def test_its_pods_are_in_the_namespace_and_do_what_its_containers_did(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUTCH_KUBERNETES_RUNTIME_IMAGE", boxes.settings().runtime_image)

    async def main() -> None:
        backend = KubernetesSandboxBackend(
            image=f"{BUSYBOX}:latest", namespace=boxes.namespace, extra_env={"WHO": "me"}
        )
        async with asyncio.timeout(SECONDS):
            try:
                id = await backend.create_container("s:1", {"tenant": "x"}, {"A": "1"})
                assert len(boxes.pods()) == 1
                argv = ["sh", "-c", "echo $WHO $A $B $PWD; echo no >&2; exit 6"]
                ran = await backend.exec_command(id, argv, "/tmp", {"B": "2"})
                assert (ran.exit_code, ran.stdout, ran.stderr) == (6, "me 1 2 /tmp\n", "no\n")
                large = "printf %s " + "x" * 200_000 + " | wc -c"
                assert (await backend.exec_command(id, ["sh", "-c", large])).stdout == "200000\n"
                late = await backend.exec_command(id, ["sleep", "1000"], timeout=1)
                assert late.exit_code == 124
                assert await backend.find_container("s:1") == id
                (found,) = await backend.list_containers({"tenant": "x"})
                assert (found.container_id, found.session_id) == (id, "s:1")
                assert await backend.container_exists(id)
                await backend.delete_container(id)
                assert not await backend.container_exists(id)
                other = await backend.create_container("s:2")
                assert other != id
            finally:
                await backend.close()
        assert not await backend.container_exists(other)

    asyncio.run(main())
    assert wait_for(lambda: not boxes.pods(), SECONDS)


def test_it_has_the_parameters_of_the_backend_that_it_replaces() -> None:
    names = list(signature(KubernetesSandboxBackend).parameters)
    wanted = ["image", "namespace", "service_account", "image_pull_secret", "extra_env"]
    assert names[: len(wanted)] == wanted


def test_what_a_box_cannot_have_is_refused_before_there_is_one() -> None:
    with pytest.raises(InvalidRequest, match="service_account 'admin': a box has none"):
        KubernetesSandboxBackend(service_account="admin")
    with pytest.raises(InvalidRequest, match="kubectl patch serviceaccount default"):
        KubernetesSandboxBackend(image_pull_secret="registry")
    with pytest.raises(InvalidRequest, match="no option 'memry'"):
        KubernetesSandboxBackend(memry="1g")


@pytest.mark.parametrize("namespace", ["Up", "a/b", "../x", "a b"])
def test_a_namespace_that_cannot_be_is_refused(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUTCH_KUBERNETES_RUNTIME_IMAGE", "hutch-test/runtime:latest")

    async def main() -> None:
        backend = KubernetesSandboxBackend(namespace=namespace)
        with pytest.raises(Exception, match="invalid namespace"):
            await backend.create_container("s")

    asyncio.run(main())


def test_no_other_backend_has_namespaces() -> None:
    for name in ("docker/x", "namespaces/x", "kubernetes2"):
        with pytest.raises(InvalidRequest, match="no backend"):
            factory.backend(name)
