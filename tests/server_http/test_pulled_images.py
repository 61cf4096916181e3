"""Images that a server pulls: from a real registry, and from ones that make it wait or fail."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from http_of_tests import Running, eventually

from hutch.images.held_images import HeldImages
from hutch.images.oci import http as registry_client
from hutch.images.oci import layers
from hutch.server.rules import Rules
from hutch.serving import PullImage
from layers_of_tests import busybox, tar_of
from oci_of_tests import (
    PATIENCE,
    Asked,
    Made,
    Registry,
    Told,
    data,
    digest_of,
    left_in,
    log_in,
    make_image,
    told,
    unpacks,
)

__all__ = ["data", "unpacks"]  # fixtures
pytestmark = [
    pytest.mark.namespaces("images are kept here, and not in an engine"),
    pytest.mark.usefixtures("unpacks"),
]


@pytest.fixture
def server(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(registry_client, "PAUSE", 0.01)
    running = Running(data)
    yield running
    running.close()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as made:
        yield made


def with_a_shell() -> Made:
    """An image that a box can be made of, with a second layer that does not shrink."""
    plain = tar_of(*busybox())
    made = make_image({"large": os.urandom(1_000_000)})
    packed = gzip.compress(plain, mtime=0)
    config = json.loads(made.config)
    config["rootfs"]["diff_ids"].insert(0, digest_of(plain))
    written = json.dumps(config).encode()
    manifest = json.loads(made.manifest)
    manifest["layers"].insert(
        0, {**manifest["layers"][0], "digest": digest_of(packed), "size": len(packed)}
    )
    manifest["config"] |= {"digest": digest_of(written), "size": len(written)}
    layers = [packed, *made.packed]
    blobs = {digest_of(each): each for each in [*layers, written]}
    return Made([plain, *made.layers], layers, written, json.dumps(manifest).encode(), blobs)


def pull(server: Running, reference: str) -> list[dict[str, Any]]:
    events = list(server.events("POST", "/v1/images/pull", {"reference": reference}))
    assert {event for event, _ in events} == {"progress"}, events
    return [body for _, body in events]


def refused(server: Running, reference: str, status: int, says: str) -> None:
    """Refused, at once or after a while."""
    answer = server.ask("POST", "/v1/images/pull", {"reference": reference})
    assert answer.status == status and says in answer.json["message"], answer.body


def names(server: Running) -> list[str]:
    return [image["name"] for image in server.ask("GET", "/v1/images").json]


def threads_named(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(name)]


class Slow:
    """A registry that sends a part of its layer, and no more until it is told to."""

    def __init__(self, told: Told, image: Made) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        (self.layer,) = image.packed
        told.acts[digest_of(self.layer)] = self._send

    def _send(self, asked: Asked) -> None:
        if asked.headers.get("Range") or self.begun.is_set():
            asked.give(self.layer)
            return
        asked.send_response(200)
        asked.send_header("Content-Length", str(len(self.layer)))
        asked.end_headers()
        asked.wfile.write(self.layer[:1000])
        asked.wfile.flush()
        self.begun.set()
        self.go_on.wait(PATIENCE)
        asked.wfile.write(self.layer[1000:])


@pytest.fixture
def slow() -> Iterator[tuple[Told, Slow]]:
    image = make_image({"a": os.urandom(100_000)})
    with told(image) as server:
        made = Slow(server, image)
        yield server, made
        made.go_on.set()


def test_a_server_pulls_an_image_that_is_used_at_once_and_removed(
    server: Running, registry: Registry, data: Path
) -> None:
    image = with_a_shell()
    name = registry.push("team/tools", "1", image)
    steps = pull(server, name)
    assert [step["done"] for step in steps] == [False] * (len(steps) - 1) + [True]
    counted = [step for step in steps if step.get("bytes_total")]
    assert {step["bytes_total"] for step in counted} == {sum(map(len, image.packed))}
    assert counted[-1]["bytes_done"] == counted[-1]["bytes_total"]
    assert any(step["step"].startswith("downloading ") for step in counted)
    assert f"{name} is {image.digest}" in steps[-2]["step"]
    assert name in names(server)

    session = server.session(image=name)
    assert server.run(session, "ls /large")["stdout"] == "/large\n"
    path = f"/v1/images/{quote(name, safe='')}"
    assert server.ask("DELETE", path).status == 409
    assert server.ask("DELETE", f"/v1/sessions/{session}").status < 300
    assert eventually(lambda: server.ask("DELETE", path).status < 300)
    assert name not in names(server) and left_in(data) == []


def test_a_pull_of_what_is_there_downloads_nothing(server: Running, registry: Registry) -> None:
    name = registry.push("twice", "1", make_image({"a": b"1"}))
    pull(server, name)
    assert not [step for step in pull(server, name) if step.get("bytes_total")]


def test_a_pull_that_is_left_ends_at_once_and_leaves_no_image(
    server: Running, slow: tuple[Told, Slow], data: Path
) -> None:
    registry, sending = slow
    events = server.events("POST", "/v1/images/pull", {"reference": f"{registry.host}/x"})
    next(events)
    assert sending.begun.wait(PATIENCE)
    events.close()  # type: ignore[attr-defined]
    # The registry still sends nothing: what ends the pull is that its connection is closed.
    eventually(lambda: not [each for each in left_in(data) if not each.endswith(".partial")])
    eventually(lambda: not threads_named("hutch-layer"))
    assert names(server) == [each for each in names(server) if registry.host not in each]
    assert pull(server, f"{registry.host}/x")[-1]["done"]


def test_a_pull_that_is_left_before_the_registry_answers_ends_too(
    server: Running, data: Path
) -> None:
    asked, over = threading.Event(), threading.Event()

    def wait(request: Asked) -> None:
        asked.set()
        over.wait(PATIENCE)

    with told(make_image({"a": b""})) as registry:
        registry.acts["/manifests/"] = wait
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        try:
            connection.request(
                "POST",
                "/v1/images/pull",
                json.dumps({"reference": f"{registry.host}/x"}),
                {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"},
            )
            assert asked.wait(PATIENCE)
        finally:
            connection.close()
        try:
            del registry.acts["/manifests/"]
            # The next one waits for its turn: it gets it, as the first one has ended.
            assert pull(server, f"{registry.host}/x")[-1]["done"]
        finally:
            over.set()


def test_a_pull_that_is_left_does_not_wait_for_a_host_that_is_silent(data: Path) -> None:
    async def leave(host: str) -> threading.Thread:
        steps = HeldImages().pull(PullImage(f"{host}/x"))
        first = asyncio.ensure_future(anext(steps))
        while not (connecting := threads_named("hutch-connect")):
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        return connecting[0]

    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, contextlib.ExitStack() as all:
        # Once its queue is full, the kernel answers no other who connects.
        address = silent.getsockname()
        for _ in range(2):
            caller = all.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(address)
        connecting = asyncio.run(leave(f"127.0.0.1:{address[1]}"))
        assert connecting.is_alive(), "the pull has ended before"
    connecting.join(PATIENCE)
    assert not connecting.is_alive()


def test_a_pull_that_is_left_does_not_wait_for_a_layer_of_another_one(
    server: Running, registry: Registry, data: Path
) -> None:
    name = registry.push("waiting", "1", make_image({"a": os.urandom(10_000)}))
    with layers._one_at_a_time:  # as if a large layer were being unpacked
        events = server.events("POST", "/v1/images/pull", {"reference": name})
        while (step := next(events)[1])["bytes_done"] != step["bytes_total"]:
            pass
        events.close()  # type: ignore[attr-defined]
        eventually(lambda: not threads_named("hutch-layer"))
    assert [each for each in left_in(data) if not each.endswith(".partial")] == []


def test_of_two_pulls_of_one_image_only_the_first_downloads(
    server: Running, slow: tuple[Told, Slow]
) -> None:
    registry, sending = slow
    name = f"{registry.host}/x"
    first: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: first.extend(pull(server, name)))
    thread.start()
    assert sending.begun.wait(PATIENCE)
    second = server.events("POST", "/v1/images/pull", {"reference": name})
    assert next(second)[1]["step"] == "waiting for another pull"
    sending.go_on.set()
    assert list(second)[-1][1]["done"]
    thread.join(PATIENCE)
    assert first[-1]["done"]
    assert len(registry.paths(digest_of(sending.layer))) == 1


def test_what_a_registry_refuses_is_said_in_the_words_of_the_command(
    server: Running, registry: Registry, tmp_path: Path
) -> None:
    refused(server, "Not/A/Name", 400, "cannot be the name of an image")
    refused(server, f"{registry.host}/no/such:1", 404, f"{registry.host} has no image")
    with told() as gone:
        host = gone.host
    refused(server, f"{host}/x", 503, f"{host} cannot be reached")


def test_a_registry_with_a_password_gets_the_one_of_docker_login(
    server: Running, tmp_path: Path
) -> None:
    (tmp_path / "registry").mkdir()
    with Registry(tmp_path / "registry", locked=True) as registry:
        name = registry.push("secret", "1", make_image({"a": b"1"}))
        # Not 401: the caller's own key is a good one.
        refused(server, name, 403, f"docker login {registry.host}")
        log_in(tmp_path / "docker", registry.host)
        assert pull(server, name)[-1]["done"]


@pytest.mark.skipif(os.geteuid() != 0, reason="making a small disk takes root")
def test_a_full_disk_is_said_and_nothing_is_kept(
    server: Running, registry: Registry, data: Path
) -> None:
    name = registry.push("large", "1", make_image({"a": os.urandom(100_000)}))
    disk = data / "images"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], check=True)
    try:
        refused(server, name, 507, "no room for this image")
        assert left_in(data) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_only_admins_pull_and_only_what_is_allowed_is_used(
    data: Path, registry: Registry, tmp_path: Path
) -> None:
    name = registry.push("allowed", "1", make_image({"a": b"1"}))
    running = Running(data, rules=Rules(allowed_images=("host",)))
    try:
        key = running.ask("POST", "/v1/keys", {"owner": "ann", "scope": "run"}).json["key"]
        body = {"reference": name}
        assert running.ask("POST", "/v1/images/pull", body, key=key).status == 403
        assert name not in names(running)
        assert pull(running, name)[-1]["done"]
        answer = running.ask("POST", "/v1/sessions", {"image": name})
        assert answer.status == 400 and "is not allowed here" in answer.json["message"]
    finally:
        running.close()
