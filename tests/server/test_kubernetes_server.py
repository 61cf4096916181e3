"""`hutch serve --backend kubernetes` as a process: killed, started again, stopped."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster_of_tests import ask
from daemon_of_tests import Daemon, wait_for
from docker_of_tests import DEBIAN
from hutch import BoxLost, InvalidRequest, Sandbox
from kubernetes_of_tests import Boxes
from kubernetes_of_tests import boxes as boxes
from kubernetes_of_tests import with_runtime as with_runtime


def server(folder: Path, boxes: Boxes) -> Daemon:
    settings = boxes.settings()
    return Daemon(
        folder,
        key=None,
        backend="kubernetes",
        default_image=f"{DEBIAN}:latest",
        kubernetes_namespace=settings.namespace,
        kubernetes_runtime_image=settings.runtime_image,
        pool_enabled="false",
    )


def test_a_pod_and_all_in_it_outlives_a_server_that_is_killed(tmp_path: Path, boxes: Boxes) -> None:
    with server(tmp_path / "data", boxes) as daemon:
        box = Sandbox.create(url=daemon.url, ttl=600)
        assert box.info.backend == "kubernetes" and "network" in box.info.degraded[0]
        box.shell.run("A=1; cd /tmp")
        box.run_code("x = 2")
        daemon.crash()
        daemon.start()
        again = Sandbox.connect(box.id, url=daemon.url)
        assert again.shell.run("echo $A $PWD").stdout == "1 /tmp\n"
        assert again.run_code("x").text == "2"
        with pytest.raises(InvalidRequest, match=r"cannot be mounted in a Pod.*volume_claim"):
            Sandbox.create(url=daemon.url, workspace_id="thesis")
        again.close()
        assert wait_for(lambda: not boxes.pods(), 60)


def test_stop_kill_leaves_no_pod_even_of_a_server_that_is_gone(
    tmp_path: Path, boxes: Boxes
) -> None:
    daemon = server(tmp_path / "data", boxes).start()
    Sandbox.create(url=daemon.url, ttl=600)
    daemon.crash()
    assert len(boxes.pods()) == 1
    said = daemon.hutch("stop", "--kill").stdout
    assert "ended 1 Pod " in said and not boxes.pods()


def test_a_pod_that_is_deleted_under_a_command_ends_its_session_and_says_so(
    tmp_path: Path, boxes: Boxes
) -> None:
    with server(tmp_path / "data", boxes) as daemon, ThreadPoolExecutor() as threads:
        box = Sandbox.create(url=daemon.url, ttl=600)
        running = threads.submit(box.commands.run, "touch /tmp/begun; sleep 1000")
        assert wait_for(lambda: box.files.exists("/tmp/begun"), 60)
        (pod,) = boxes.pods()
        ask(boxes.cluster, "DELETE", f"{boxes.path}/pods/{pod['metadata']['name']}")
        with pytest.raises(BoxLost, match="gone"):
            running.result(60)
        assert wait_for(lambda: box.refresh().status == "crashed", 60)
        assert "reconnected" not in [entry.kind for entry in box.journal()]
