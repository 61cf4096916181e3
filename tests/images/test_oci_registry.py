"""Images from a registry: a real one, and ones that do what no registry should."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from must_work import need

from hutch.errors import (
    BackendUnavailable,
    HutchError,
    InvalidRequest,
    NotFound,
    Unauthorized,
)
from hutch.images.oci import http
from hutch.images.oci import registry as module
from hutch.images.oci import store as oci
from hutch.images.oci.layers import partial_of
from hutch.images.oci.manifest import machine
from hutch.images.oci.progress import LayerProgress
from hutch.images.oci.reference import parse
from hutch.images.oci.registry import credentials_of
from hutch.images.oci.store import StoredImage, bring
from oci_of_tests import (
    INDEX,
    PATIENCE,
    Asked,
    Made,
    Registry,
    Told,
    basic,
    data,
    left_in,
    log_in,
    make_image,
    make_index,
    told,
    unpacks,
)

__all__ = ["data", "unpacks"]  # fixtures
pytestmark = pytest.mark.usefixtures("data", "unpacks")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as made:
        yield made


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSE", 0.01)
    monkeypatch.setattr(http, "MAX_PAUSE", 0.05)


def pull(name: str, report: Callable[[LayerProgress], None] = lambda step: None) -> StoredImage:
    with module.Registry(parse(name)) as source:
        return bring(source, parse(name), report)


def content(image: StoredImage, name: str) -> bytes:
    for folder in reversed(image.root().layers):
        if os.path.exists(os.path.join(folder, name)):
            return Path(folder, name).read_bytes()
    raise FileNotFoundError(name)


# --- a real one --------------------------------------------------------------------------


def test_an_image_is_pulled_with_its_layers_in_order_and_what_it_says(registry: Registry) -> None:
    config = {"Env": ["A=1"], "User": "7"}
    image = make_image({"a": b"1", "b": b"1"}, {"a": b"2"}, config=config)
    name = registry.push("some/thing", "1", image)
    found = pull(name)
    assert found.digest == image.digest
    assert (content(found, "a"), content(found, "b")) == (b"2", b"1")
    root = oci.find(name).root()
    assert root == found.root()
    assert (root.env, root.user) == ((("A", "1"),), "7")
    assert root.digest == image.digest


def test_layers_that_are_not_packed_are_read_too(registry: Registry) -> None:
    name = registry.push("plain", "1", make_image({"a": b"1"}, zipped=False))
    assert content(pull(name), "a") == b"1"


def test_layers_that_zstd_packed_are_read_too(registry: Registry) -> None:
    image = make_image({"a": b"1" * 500_000}, {"b": os.urandom(500_000)}, zipped="zstd")
    found = pull(registry.push("zstd", "1", image))
    assert content(found, "a") == b"1" * 500_000
    assert content(found, "b") in image.layers[1]


def test_an_index_gives_the_image_for_this_machine(registry: Registry) -> None:
    here, there = make_image({"a": b"here"}), make_image({"a": b"there"}, architecture="s390x")
    registry.push("both", "here", here)
    registry.push("both", "there", there)
    index = make_index({"linux/s390x": there, f"linux/{machine()}": here})
    registry.push_manifest("both", "1", index, INDEX)
    found = pull(f"{registry.host}/both:1")
    assert content(found, "a") == b"here"
    assert found.digest not in (here.digest, there.digest), "it is what the tag stood for"
    with pytest.raises(InvalidRequest, match="s390x"):
        pull(f"{registry.host}/both:there")


def test_an_image_can_be_had_by_its_digest(registry: Registry) -> None:
    image = make_image({"a": b"pinned"})
    registry.push("pinned", "1", image)
    name = f"{registry.host}/pinned@{image.digest}"
    pull(name)
    assert oci.find(name).digest == image.digest
    assert oci.find(f"{registry.host}/pinned:any@{image.digest}").digest == image.digest


def test_layers_that_are_here_are_not_downloaded_again(registry: Registry) -> None:
    base = {"base": b"x" * 1000}
    pull(registry.push("one", "1", make_image(base)))
    steps: list[LayerProgress] = []
    pull(registry.push("two", "1", make_image(base, {"more": b""})), steps.append)
    assert len({step.layer for step in steps if step.stage == "downloading"}) == 1


def test_progress_is_told_for_each_layer(registry: Registry) -> None:
    image = make_image({"a": os.urandom(300_000)}, {"b": os.urandom(300_000)})
    steps: list[LayerProgress] = []
    pull(registry.push("progress", "1", image), steps.append)
    layers = {step.layer for step in steps} - {""}
    assert len(layers) == 2
    for layer in layers:
        mine = [step for step in steps if step.layer == layer]
        stages = list(dict.fromkeys(step.stage for step in mine))
        assert stages == ["downloading", "unpacking", "done"]
        counts = [step.done for step in mine if step.stage == "downloading"]
        assert counts == sorted(counts) and counts[-1] == mine[0].total
    assert steps[-1] == LayerProgress("", "layers", 2, 2)


def test_a_tag_that_was_moved_leaves_the_old_image_for_those_who_know_its_digest(
    registry: Registry,
) -> None:
    old, new = make_image({"a": b"old"}), make_image({"a": b"new"})
    name = registry.push("moving", "1", old)
    pull(name)
    registry.push("moving", "1", new)
    assert content(oci.find(name), "a") == b"old", "nothing is pulled unasked"
    pull(name)
    assert content(oci.find(name), "a") == b"new"
    assert content(oci.find(f"{name}@{old.digest}"), "a") == b"old"
    oci.prune()
    with pytest.raises(NotFound):
        oci.find(f"{name}@{old.digest}")


def test_an_image_that_is_not_there_says_so(registry: Registry, data: Path) -> None:
    with pytest.raises(NotFound, match="has no image"):
        pull(f"{registry.host}/nothing:1")
    assert left_in(data) == []


def test_a_registry_that_wants_a_password_gets_it(tmp_path: Path) -> None:
    with Registry(tmp_path, locked=True) as registry:
        name = registry.push("secret", "1", make_image({"a": b"1"}))
        with pytest.raises(Unauthorized, match=f"docker login {registry.host}"):
            pull(name)
        log_in(tmp_path / "docker", registry.host)
        assert content(pull(name), "a") == b"1"


def test_two_who_pull_the_same_download_it_once(registry: Registry, data: Path) -> None:
    image = make_image({"a": os.urandom(100_000)}, {"b": os.urandom(100_000)})
    name = registry.push("same", "1", image)
    steps: list[LayerProgress] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            pull(name, steps.append)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures
    assert [step.stage for step in steps].count("done") == 2
    assert len(left_in(data)) == 4


# --- ones that do what no registry should ------------------------------------------------


@pytest.fixture
def image() -> Made:
    return make_image({"a": b"1" * 1000}, config={})


@pytest.fixture
def server(image: Made) -> Iterator[Told]:
    with told(image) as made:
        yield made


def refused(server: Told, kind: type[HutchError], says: str, data: Path) -> None:
    with pytest.raises(kind, match=says):
        pull(f"{server.host}/x")
    # The part of a layer that came is for the next pull, unless the image itself is bad.
    is_kept = kind is BackendUnavailable
    assert not [n for n in left_in(data) if not (is_kept and n.endswith(".partial"))]


def test_a_layer_with_a_wrong_digest_is_not_kept(server: Told, image: Made, data: Path) -> None:
    digest = next(iter(image.blobs))
    server.content[digest] = server.content[digest][:-1] + b"x"
    refused(server, InvalidRequest, "does not match that digest; nothing was kept", data)


def test_a_configuration_with_a_wrong_digest_is_refused(
    server: Told, image: Made, data: Path
) -> None:
    server.content[list(image.blobs)[-1]] = b"{}"
    refused(server, InvalidRequest, "does not match that digest", data)


def test_a_manifest_with_a_wrong_digest_is_refused(server: Told, image: Made, data: Path) -> None:
    other = make_image({"b": b""})
    server.acts["manifests"] = lambda asked: asked.give(other.manifest)
    with pytest.raises(InvalidRequest, match="does not match that digest"):
        pull(f"{server.host}/x@{image.digest}")
    server.acts["manifests"] = lambda asked: asked.give(
        image.manifest, Docker_Content_Digest=other.digest
    )
    refused(server, InvalidRequest, "does not match that digest", data)


def test_a_layer_that_is_not_the_one_of_the_configuration_is_not_kept(data: Path) -> None:
    lies = {"rootfs": {"type": "layers", "diff_ids": ["sha256:" + "0" * 64]}}
    with told(make_image({"a": b""}, **lies)) as server:
        refused(server, InvalidRequest, "is not sha256:000000000000, as it says", data)


def test_a_layer_without_an_end_ends_at_its_size(server: Told, data: Path) -> None:
    def pour(asked: Asked) -> None:
        asked.send_response(200)
        asked.send_header("Transfer-Encoding", "chunked")
        asked.end_headers()
        while True:
            asked.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")

    server.acts["blobs/" + layer_of(server)] = pour
    refused(server, InvalidRequest, "sent more bytes than it announced", data)


def test_a_manifest_without_an_end_is_refused(server: Told, data: Path) -> None:
    server.acts["manifests"] = lambda asked: asked.give(b" " * (6 << 20))
    refused(server, InvalidRequest, "more than 4096 KiB", data)


def test_a_layer_that_breaks_off_is_asked_for_again(server: Told, data: Path) -> None:
    digest = layer_of(server)
    whole = server.content[digest]

    def break_off(asked: Asked) -> None:
        if len(server.paths(digest)) < 3:
            asked.send_response(200)
            asked.send_header("Content-Length", str(len(whole)))
            asked.end_headers()
            asked.wfile.write(whole[:10])
            asked.close_connection = True
        else:
            asked.give(whole)

    server.acts[digest] = break_off
    pull(f"{server.host}/x")
    assert len(server.paths(digest)) == 3


def test_a_layer_that_always_breaks_off_is_given_up(server: Told, data: Path) -> None:
    digest = layer_of(server)
    server.acts[digest] = lambda asked: asked.give(server.content[digest][:10])
    refused(server, BackendUnavailable, "broke off in the middle; try again later", data)
    assert len(server.paths(digest)) == 3


def part_of(data: Path) -> Path:
    (found,) = (data / "images/layers").glob("*.partial")
    return found


def cut_after(count: int) -> Callable[[Asked], None]:
    """Give that many bytes from where it is asked to begin, and hang up."""

    def give(asked: Asked) -> None:
        whole = asked.server.content[asked.path.rpartition("/")[2]]
        start = int(asked.headers.get("Range", "bytes=0-")[6:-1])
        asked.send_response(206 if start else 200)
        if start:
            asked.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
        asked.send_header("Content-Length", str(len(whole) - start))
        asked.end_headers()
        asked.wfile.write(whole[start : start + count])
        asked.close_connection = True

    return give


@pytest.fixture
def large() -> Iterator[Told]:
    """An image whose layer is not packed away to nothing."""
    with told(make_image({"a": os.urandom(100_000)})) as server:
        yield server


def test_a_layer_that_breaks_off_goes_on_where_it_ended(large: Told, data: Path) -> None:
    digest = layer_of(large)
    large.acts[digest] = cut_after(20_000)
    with pytest.raises(BackendUnavailable, match=r"hung up|broke off"):
        pull(f"{large.host}/x")
    assert part_of(data).read_bytes() == large.content[digest][:60_000]
    large.acts[digest] = cut_after(1_000_000)
    before = len(large.asked)
    pull(f"{large.host}/x")
    ((_, headers),) = [each for each in large.asked[before:] if digest in each[0]]
    assert headers["Range"] == "bytes=60000-"
    assert not list(data.glob("images/layers/*.partial"))


def test_a_download_that_comes_on_is_not_given_up_and_never_seems_to_go_back(data: Path) -> None:
    with told(make_image({"a": os.urandom(3 << 20)})) as server:  # eight pieces, and three tries
        digest = layer_of(server)
        server.acts[digest] = cut_after(http.ENOUGH * 2 // 5)
        steps: list[LayerProgress] = []
        pull(f"{server.host}/x", steps.append)
        assert len(server.paths(digest)) == 8
    counts = [step.done for step in steps if step.stage == "downloading"]
    assert counts == sorted(counts) and len(counts) > 8


def test_a_server_that_begins_again_each_time_is_given_up(data: Path) -> None:
    with told(make_image({"a": os.urandom(6 << 20)})) as server:
        digest = layer_of(server)

        def begin_again(asked: Asked) -> None:
            del asked.headers["Range"]
            is_endless = len(server.paths(digest)) > 9
            asked.give(b"", 404) if is_endless else cut_after(2 * http.ENOUGH)(asked)

        server.acts[digest] = begin_again
        with pytest.raises(
            BackendUnavailable, match="try again later: what was downloaded is kept"
        ):
            pull(f"{server.host}/x")
        assert len(server.paths(digest)) == 1 + http.TRIES


def test_a_real_registry_sends_the_rest_of_a_layer(registry: Registry, data: Path) -> None:
    image = make_image({"a": os.urandom(100_000)})
    name = registry.push("part", "1", image)
    with module.Registry(parse(name)) as source:
        part = partial_of(source.image.layers[0])
        part.parent.mkdir(parents=True)
        part.write_bytes(image.packed[0][:70_000])
        told: list[LayerProgress] = []
        bring(source, parse(name), told.append)
    counts = [step.done for step in told if step.stage == "downloading"]
    assert counts[0] == 70_000 and counts[-1] == len(image.packed[0]) and min(counts) == 70_000


@pytest.mark.parametrize("size", [10_000, 1_000_000], ids=["shorter", "longer"])
def test_a_part_of_something_else_is_downloaded_again(large: Told, data: Path, size: int) -> None:
    digest = layer_of(large)
    large.acts[digest] = cut_after(1_000_000)
    with module.Registry(parse(f"{large.host}/x")) as source:
        part = partial_of(source.image.layers[0])
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(size))
    pull(f"{large.host}/x")
    assert not list(data.glob("images/layers/*.partial"))


def test_a_server_that_sends_all_again_is_understood(large: Told, data: Path) -> None:
    digest = layer_of(large)
    large.acts[digest] = cut_after(20_000)
    with pytest.raises(BackendUnavailable):
        pull(f"{large.host}/x")
    del large.acts[digest]  # it knows no ranges
    pull(f"{large.host}/x")
    assert large.asked[-1][1]["Range"] == "bytes=60000-"


def test_a_server_that_sends_another_part_is_asked_for_all(large: Told, data: Path) -> None:
    digest = layer_of(large)
    large.acts[digest] = cut_after(20_000)
    with pytest.raises(BackendUnavailable):
        pull(f"{large.host}/x")

    def lie(asked: Asked) -> None:
        if "Range" in asked.headers:
            asked.give(large.content[digest][5:], 206, Content_Range="bytes 5-9/10")
        else:
            asked.give(large.content[digest])

    large.acts[digest] = lie
    pull(f"{large.host}/x")


def test_parts_of_layers_are_kept_for_a_week_and_go_with_prune(large: Told, data: Path) -> None:
    digest = layer_of(large)
    for old in (True, False):
        large.acts[digest] = cut_after(1000)
        with pytest.raises(BackendUnavailable):
            pull(f"{large.host}/x")
        if old:
            os.utime(part_of(data), (0, 0))
            with told(make_image({"b": b"1"})) as other:
                pull(f"{other.host}/y")
        else:
            oci.prune()
        assert not list(data.glob("images/layers/*.partial"))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_registry_is_asked_again(server: Told, status: int, image: Made) -> None:
    def busy(asked: Asked) -> None:
        if len(server.paths("manifests")) < 3:
            asked.give(b"", status, Retry_After="0")
        else:
            asked.give(image.manifest)

    server.acts["manifests"] = busy
    assert pull(f"{server.host}/x").digest == image.digest


def test_a_registry_that_stays_busy_is_given_up(server: Told, data: Path) -> None:
    server.acts["manifests"] = lambda asked: asked.give(b"", 503, Retry_After="99999999")
    refused(server, BackendUnavailable, "answers 503; try again later", data)
    assert len(server.asked) == 3


@pytest.mark.parametrize("slow", ["manifests", "blobs"])
@pytest.mark.parametrize("has_head", [True, False], ids=["body", "head"])
def test_an_answer_that_comes_byte_by_byte_is_given_up(
    server: Told, slow: str, has_head: bool, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PATIENCE", 0.3)
    over = threading.Event()

    def drip(asked: Asked) -> None:
        head = b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: 1000\r\n\r\n" if has_head else b"X: ")
        asked.wfile.write(head)
        for _ in range(400):  # and not forever, so that a client without patience fails the test
            if over.wait(0.05):
                break
            asked.wfile.write(b"x")

    server.acts["manifests" if slow == "manifests" else layer_of(server)] = drip
    try:
        refused(server, BackendUnavailable, "sends too slowly; try again later", data)
    finally:
        over.set()


def test_silence_is_given_up(server: Told, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(http._TIMES, "read", 0.2)
    monkeypatch.setattr(http, "TRIES", 1)
    over = threading.Event()
    server.acts["manifests"] = lambda asked: over.wait(PATIENCE) and None
    try:
        refused(server, BackendUnavailable, "does not answer", data)
    finally:
        over.set()


def test_nobody_there_says_so(data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        host = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(BackendUnavailable, match="cannot be reached"):
        pull(f"{host}/x")


def test_what_is_no_answer_says_so(data: Path) -> None:
    def answer() -> None:
        for _ in range(3):
            call, _ = listening.accept()
            with call:
                call.recv(65536)
                call.sendall(b"SSH-2.0-x\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE)
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BackendUnavailable, match="hung up"):
            pull(f"127.0.0.1:{listening.getsockname()[1]}/x")
        thread.join()


def layer_of(server: Told) -> str:
    manifest = json.loads(server.content["latest"])
    digest: str = manifest["layers"][0]["digest"]
    return digest


# --- who sends us where ------------------------------------------------------------------


def test_a_password_is_not_sent_to_where_a_layer_is_kept(
    server: Told, image: Made, tmp_path: Path
) -> None:
    digest = layer_of(server)
    log_in(tmp_path / "docker", server.host)

    def locked(asked: Asked) -> None:
        if asked.headers.get("Authorization") != f"Basic {basic()}":
            asked.give(b"", 401, WWW_Authenticate='Basic realm="x"')
        elif digest in asked.path:
            asked.give(b"", 307, Location=f"http://{elsewhere.host}/cdn/{digest}?signed=1")
        else:
            asked.give(server.content[asked.path.rpartition("/")[2]])

    with told(image) as elsewhere:
        server.acts["/v2/"] = locked
        assert pull(f"{server.host}/x").digest == image.digest
        assert [path for path, _ in elsewhere.asked] == [f"/cdn/{digest}?signed=1"]
        assert "Authorization" not in elsewhere.asked[0][1]


@pytest.mark.parametrize("how", ['Basic realm="x"', 'Bearer realm="{}/token",service="me"'])
def test_who_a_registry_sends_us_to_cannot_ask_for_our_password(
    server: Told, how: str, tmp_path: Path, data: Path
) -> None:
    log_in(tmp_path / "docker", server.host)
    digest = layer_of(server)
    with told() as elsewhere:
        challenge = how.format(f"http://{elsewhere.host}")
        elsewhere.acts["/"] = lambda asked: asked.give(b"", 401, WWW_Authenticate=challenge)
        server.acts[digest] = lambda asked: asked.give(
            b"", 307, Location=f"http://{elsewhere.host}/cdn"
        )
        refused(server, Unauthorized, "or does not let us have it", data)
        assert [path for path, _ in elsewhere.asked] == ["/cdn"]
        assert not any("Authorization" in headers for _, headers in server.asked)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("http://10.255.255.1/x", "without encryption"),
        ("file:///etc/passwd", "invalid URL from registry"),
        ("gopher://127.0.0.1/", "invalid URL from registry"),
        ("http://[::1/", "redirects to an invalid URL"),
        ("/v2/x/manifests/latest", "too many redirects"),
    ],
)
def test_a_registry_cannot_send_us_anywhere(
    server: Told, where: str, says: str, data: Path
) -> None:
    server.acts["manifests"] = lambda asked: asked.give(b"", 302, Location=where)
    refused(server, HutchError, says, data)
    assert len(server.asked) <= http.MAX_HOPS


def test_the_world_cannot_send_us_to_this_machine() -> None:
    for there in (
        "http://localhost/", "https://127.0.0.1:2375/x", "http://[::1]:80/", "https://a@localhost/",
        "https://localhost./", "https://a.localhost/", "https://0.0.0.0/", "https://127.1/",
        "https://2130706433/", "https://0x7f.1/", "https://[::ffff:127.0.0.1]/", "https://[::]/",
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match="this machine itself"):
            http.check_hop("https://registry.example.com/v2/", there)
    http.check_hop("http://localhost:5000/v2/", "http://127.0.0.1:6000/")
    http.check_hop("https://registry.example.com/v2/", "https://cdn.example.com/x")


def bearer(server: Told, image: Made, *, works: bool = True) -> Callable[[Asked], None]:
    def act(asked: Asked) -> None:
        if asked.headers.get("Authorization") == "Bearer t0ken" and works:
            asked.give(server.content[asked.path.rpartition("/")[2]])
        else:
            realm = f'Bearer realm="http://{server.host}/token?a=b",service="me",scope="s"'
            asked.give(b"", 401, WWW_Authenticate=realm)

    return act


def test_a_token_is_asked_for_where_the_registry_says(
    server: Told, image: Made, tmp_path: Path
) -> None:
    server.acts["/v2/"] = bearer(server, image)
    server.acts["/token"] = lambda asked: asked.give(b'{"token": "t0ken"}')
    log_in(tmp_path / "docker", server.host)
    assert pull(f"{server.host}/x").digest == image.digest
    assert server.paths("/token") == ["/token?a=b&service=me&scope=s"]
    told_whom = [headers for path, headers in server.asked if path.startswith("/token")]
    assert told_whom[0]["Authorization"] == f"Basic {basic()}"


def test_a_registry_that_is_never_content_is_left(server: Told, image: Made, data: Path) -> None:
    server.acts["/v2/"] = bearer(server, image, works=False)
    server.acts["/token"] = lambda asked: asked.give(b'{"access_token": "t0ken"}')
    refused(server, Unauthorized, "or does not let us have it", data)
    assert len(server.asked) == 3


@pytest.mark.parametrize("body", [b"[]", b"x", b'{"token": 1}', b'{"token": "a\\nb: c"}', b"{}"])
def test_a_token_that_is_none_is_refused(
    server: Told, image: Made, data: Path, body: bytes
) -> None:
    server.acts["/v2/"] = bearer(server, image)
    server.acts["/token"] = lambda asked: asked.give(body)
    refused(server, BackendUnavailable, "invalid token", data)


def test_a_challenge_that_nobody_knows_is_refused(server: Told, data: Path) -> None:
    server.acts["/v2/"] = lambda asked: asked.give(b"", 401, WWW_Authenticate="Negotiate")
    refused(server, Unauthorized, "unsupported kind of authentication", data)


def test_credential_helpers_are_named_and_not_run(server: Told, tmp_path: Path, data: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(json.dumps({"credsStore": "; touch /tmp/x"}))
    server.acts["/v2/"] = lambda asked: asked.give(b"", 401, WWW_Authenticate="Basic realm=x")
    refused(server, Unauthorized, "a program which hutch does not run", data)


def config_file(folder: Path, **says: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(says))


@pytest.mark.parametrize(
    ("key", "host"),
    [("h.example", "h.example"), ("https://h.example", "h.example"),
     ("h.example:5000", "h.example:5000"), ("https://h.example/v1/", "h.example"),
     ("https://index.docker.io/v1/", "docker.io")],
)  # fmt: skip
def test_passwords_are_found_as_docker_wrote_them(key: str, host: str, tmp_path: Path) -> None:
    config_file(
        tmp_path / "docker", auths={"other.example": {"auth": "eDp5"}, key: {"auth": basic()}}
    )
    assert credentials_of(host).basic == basic()
    assert credentials_of("third.example").basic == ""


def test_a_file_of_passwords_that_is_broken_is_named(tmp_path: Path) -> None:
    for auth in ({"auth": "%%"}, {"auth": 7}, {"auth": "eA=="}, [], {"auth": "a\nb"}):
        config_file(tmp_path / "docker", auths={"h.example": auth})
        assert credentials_of("h.example").basic == ""
    config_file(tmp_path / "docker", auths=[1], credHelpers={"h.example": "x"})
    assert "does not run" in credentials_of("h.example").hint
    (tmp_path / "docker/config.json").write_text("{")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        credentials_of("h.example")


# --- encrypted ---------------------------------------------------------------------------


@pytest.fixture
def encrypted(image: Made, tmp_path: Path) -> Iterator[Told]:
    """A registry that is not called like this machine, and has a certificate of its own."""
    if not shutil.which("openssl"):
        need("openssl", "openssl is not installed")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=tests", "-addext", "subjectAltName=IP:0.0.0.0",
         "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with told(image, context) as server:
        server.host = server.host.replace("127.0.0.1", "0.0.0.0")
        yield server


def test_a_registry_elsewhere_has_to_prove_who_it_is(
    encrypted: Told, image: Made, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(encrypted, BackendUnavailable, "cannot be reached .*CERTIFICATE_VERIFY_FAILED", data)
    assert not encrypted.asked
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    assert pull(f"{encrypted.host}/x").digest == image.digest


def test_a_registry_is_reached_through_the_proxy_that_the_environment_names(
    encrypted: Told, image: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    monkeypatch.setenv("no_proxy", "")
    with proxy() as (url, asked):
        monkeypatch.setenv("https_proxy", url.replace("://", "://ann:secret@"))
        assert pull(f"{encrypted.host}/x").digest == image.digest
    assert asked and all(f"CONNECT {encrypted.host} ".encode() in each for each in asked)
    assert all(f"basic {basic()}".encode() in each.replace(b"Basic", b"basic") for each in asked)


@contextmanager
def proxy() -> Iterator[tuple[str, list[bytes]]]:
    """One that lets through whatever it is asked for."""
    asked: list[bytes] = []

    class Pass(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                request += self.request.recv(65536)
            asked.append(request)
            host, _, port = request.split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port))) as there:
                self.request.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                ends = {self.request: there, there: self.request}
                while True:
                    for end in select.select(list(ends), [], [])[0]:
                        try:
                            data = end.recv(65536)
                        except OSError:
                            return
                        if not data:
                            return
                        ends[end].sendall(data)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Pass) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


# --- those who leave in the middle -------------------------------------------------------

PULL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # the caller of the tests may ignore it
from hutch.images.oci import http
from hutch.images.oci.store import bring
from hutch.images.oci.reference import parse
from hutch.images.oci.registry import Registry
http._TIMES["read"] = 86400  # what ends it is not its own patience
with Registry(parse(sys.argv[1])) as source:
    bring(source, parse(sys.argv[1]), lambda step: None)
"""


def wait_until_only_parts_are_left(data: Path, number: signal.Signals) -> None:
    if number == signal.SIGINT:
        end = time.monotonic() + PATIENCE
        while [name for name in left_in(data) if not name.endswith(".partial")]:
            assert time.monotonic() < end, left_in(data)
            time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_pull_that_is_stopped_leaves_nothing_that_stays(
    server: Told, image: Made, data: Path, number: signal.Signals
) -> None:
    begun, over = threading.Event(), threading.Event()
    digest = layer_of(server)

    def begin(asked: Asked) -> None:
        asked.send_response(200)
        asked.send_header("Content-Length", str(len(server.content[digest])))
        asked.end_headers()
        asked.wfile.write(b"\x1f\x8b")
        asked.wfile.flush()
        begun.set()
        over.wait(2 * PATIENCE)

    server.acts[digest] = begin
    process = subprocess.Popen(
        [sys.executable, "-c", PULL, f"{server.host}/x"],
        stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert begun.wait(PATIENCE)
        process.send_signal(number)
        assert process.wait(PATIENCE) != 0
    finally:
        process.kill()
        process.wait()
        over.set()
    wait_until_only_parts_are_left(data, number)
    del server.acts[digest]
    pull(f"{server.host}/x")
    assert len(left_in(data)) == 3 and not list(data.glob("images/layers/*building*"))


def test_what_a_report_raises_ends_the_pull(server: Told, data: Path) -> None:
    def report(step: LayerProgress) -> None:
        raise HutchError("enough")

    with pytest.raises(HutchError, match="enough"):
        pull(f"{server.host}/x", report)
    assert not [name for name in left_in(data) if not name.endswith(".partial")]
