"""`hutch serve --backend kubernetes` as a process: killed, started again, stopped."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import pytest

from cluster_of_tests import ask
from daemon_of_tests import wait_for
from docker_of_tests import DEBIAN
from hutch import BoxLost, InvalidRequest, Sandbox
from kubernetes_of_tests import Boxes, server
from kubernetes_of_tests import boxes as boxes
from kubernetes_of_tests import with_runtime as with_runtime

IMAGE = f"{DEBIAN}:latest"


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


def test_a_warm_pod_becomes_a_session_with_its_own_variables_and_is_not_used_again(
    tmp_path: Path, boxes: Boxes
) -> None:
    with server(tmp_path / "data", boxes, pool=f"{IMAGE}=1") as daemon:

        def is_ready() -> bool:
            with urlopen(f"{daemon.url}/metrics") as answer:
                return b"\nhutch_pool_ready 1.0\n" in answer.read()

        assert wait_for(is_ready), daemon.complaint()
        (warm,) = boxes.pods()
        box = Sandbox.create(url=daemon.url, ttl=600, env={"TOKEN": "of-this-one"})
        assert (box.info.acquire_source, box.info.acquire_detail) == ("pool", None)
        assert box.shell.run("echo $TOKEN").stdout == "of-this-one\n"
        box.shell.run("touch /tmp/used")
        assert wait_for(is_ready), daemon.complaint()
        next_one = Sandbox.create(url=daemon.url, ttl=600)
        assert next_one.info.acquire_source == "pool"
        assert next_one.shell.run("echo $TOKEN; ls /tmp").stdout == "\n"
        box.kill()
        assert warm["metadata"]["name"] not in {pod["metadata"]["name"] for pod in boxes.pods()}
        next_one.kill()
        daemon.stop()
        assert wait_for(lambda: not boxes.pods(), 60)  # those that waited ended with the server


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
