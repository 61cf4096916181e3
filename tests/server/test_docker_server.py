"""`hutch serve --backend docker` as a process: killed, started again, stopped."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_of_tests import Daemon, wait_for
from docker_of_tests import BUSYBOX, DEBIAN, Client
from hutch import Sandbox
from hutch.backends.docker import owner_scope
from hutch.backends.docker.images import FRESH, NAMES

PATIENCE = 60
MOVING = "hutch-test/moving"


@pytest.fixture
def folder(tmp_path: Path, docker_engine: Client) -> Iterator[Path]:
    """And no container is left of a server that had it."""
    before = {each["Id"] for each in containers(docker_engine)}
    yield tmp_path / "data"
    assert wait_for(
        lambda: {each["Id"] for each in containers(docker_engine)} <= before, PATIENCE
    ), containers(docker_engine)


def containers(engine: Client) -> list[dict[str, Any]]:
    found = json.loads(engine.call("GET", "/containers/json?all=1"))
    return [each for each in found if owner_scope.BOX in (each["Labels"] or {})]


def asked(daemon: Daemon, path: str) -> Any:
    with urllib.request.urlopen(daemon.url + path, timeout=PATIENCE) as answer:
        return json.load(answer)


def digest_of(engine: Client, image: str) -> str:
    return str(json.loads(engine.call("GET", f"/images/{image}/json"))["Id"])


def test_a_container_and_all_in_it_outlives_a_server_that_is_killed(folder: Path) -> None:
    with Daemon(folder, key=None, backend="docker", default_image=DEBIAN) as daemon:
        box = Sandbox.create(url=daemon.url, ttl=600, workspace_id="thesis")
        assert box.info.image == DEBIAN and box.info.backend == "docker"
        box.shell.run("A=1; cd /tmp; echo kept > /workspace/notes")
        box.run_code("x = 2")
        clock = box.commands.run("while :; do date; sleep 0.1; done", background=True)
        daemon.crash()
        daemon.start()
        again = Sandbox.connect(box.id, url=daemon.url)
        assert again.shell.run("echo $A $PWD; cat /workspace/notes").stdout == "1 /tmp\nkept\n"
        assert again.run_code("x").text == "2"
        before = len(clock.stdout())
        assert wait_for(lambda: len(clock.stdout()) > before, PATIENCE)
        again.close()
        with Sandbox.create(url=daemon.url, workspace_id="thesis") as later:
            assert later.files.read("/workspace/notes") == "kept\n"


def test_stop_kill_leaves_no_container(folder: Path, docker_engine: Client) -> None:
    before = len(containers(docker_engine))
    daemon = Daemon(folder, key=None, backend="docker", default_image=BUSYBOX).start()
    Sandbox.create(url=daemon.url)
    assert len(containers(docker_engine)) == before + 1
    daemon.stop("--kill")
    assert len(containers(docker_engine)) == before


def test_a_server_of_another_backend_touches_no_container(folder: Path) -> None:
    daemon = Daemon(folder, key=None, backend="docker", default_image=BUSYBOX).start()
    box = Sandbox.create(url=daemon.url, ttl=600)
    box.shell.run("A=1")
    assert "`hutch serve --backend docker` has it again" in daemon.stop()
    other = Daemon(folder, key=None)
    with pytest.raises(RuntimeError, match="--backend docker, or end it first: hutch stop --kill"):
        other.start()
    daemon.start()
    assert Sandbox.connect(box.id, url=daemon.url).shell.run("echo $A").stdout == "1\n"
    daemon.crash()
    said = daemon.hutch("stop", "--kill").stdout
    assert "ended 1 session " in said and "ended 1 container " in said
    with other:
        assert asked(other, f"/v1/sessions/{box.id}")["status"] == "destroyed"


def test_the_images_that_a_server_can_build_are_listed(folder: Path) -> None:
    with Daemon(folder, key=None, backend="docker", default_image=BUSYBOX) as daemon:
        names = [image["name"] for image in asked(daemon, "/v1/images")]
        assert names == [f"hutch/{name}" for name in NAMES]


def test_a_warm_box_is_not_given_out_once_its_name_stands_for_another_image(
    folder: Path, docker_engine: Client
) -> None:
    docker_engine.tag(BUSYBOX, MOVING)
    settings = {"default_image": MOVING, "pool_images": f"{MOVING}=1"}
    try:
        with Daemon(folder, key=None, backend="docker", **settings) as daemon:

            def is_warm() -> bool:
                return bool(asked(daemon, "/v1/pool")[0]["ready"])

            assert wait_for(is_warm, PATIENCE)
            with Sandbox.create(url=daemon.url) as box:
                assert box.info.acquire_source == "pool"
                assert box.info.digest == digest_of(docker_engine, BUSYBOX)
            assert wait_for(is_warm, PATIENCE)
            docker_engine.tag(DEBIAN, MOVING)
            time.sleep(FRESH)
            with Sandbox.create(url=daemon.url) as box:
                assert box.info.acquire_source == "cold"
                assert box.info.digest == digest_of(docker_engine, DEBIAN)
    finally:
        docker_engine.call("DELETE", f"/images/{MOVING}?force=1")
