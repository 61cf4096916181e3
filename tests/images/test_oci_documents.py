"""What images are called, and what they say of themselves: all of it is read with suspicion."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch.backends.namespaces import plan
from hutch.errors import InvalidRequest
from hutch.images.oci import manifest
from hutch.images.oci.manifest import (
    Index,
    Manifest,
    choose,
    machine,
    parse_config,
    parse_document,
)
from hutch.images.oci.reference import is_local, parse
from oci_of_tests import digest_of, make_image

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("written", "normal", "familiar"),
    [
        ("alpine", "docker.io/library/alpine:latest", "alpine:latest"),
        ("node:22-slim", "docker.io/library/node:22-slim", "node:22-slim"),
        ("a/b", "docker.io/a/b:latest", "a/b:latest"),
        ("localhost/a", "localhost/a:latest", "localhost/a:latest"),
        ("host:5000/a/b", "host:5000/a/b:latest", "host:5000/a/b:latest"),
        ("[::1]:5000/a", "[::1]:5000/a:latest", "[::1]:5000/a:latest"),
        (f"h.example/a@{DIGEST}", f"h.example/a@{DIGEST}", f"h.example/a@{DIGEST}"),
        (f"a:1@{DIGEST}", f"docker.io/library/a@{DIGEST}", f"a@{DIGEST}"),
        ("docker.io/library/a", "docker.io/library/a:latest", "a:latest"),
        ("a__b/c-d.e", "docker.io/a__b/c-d.e:latest", "a__b/c-d.e:latest"),
    ],
)
def test_a_name_means_what_docker_means_by_it(written: str, normal: str, familiar: str) -> None:
    found = parse(written)
    assert (str(found), found.familiar) == (normal, familiar)
    assert parse(normal) == found and parse(familiar) == found


@pytest.mark.parametrize(
    "written",
    ["", "--x", "-x", ";$(id)", "a;$(id)", "a\n", "a\nb", "a b", "A", "a:", "a:-x", "a:b:c", "a@b",
     "a@sha256:ab", f"a@{DIGEST}\n", f"a@{DIGEST.upper()}", "a/../b", "../a", "/a", "a/", "a//b",
     "a%2fb", "%n", "http://h/a", "u:p@h.example/a", "h.example:/a", "h.example:123456/a",
     "-h.example/a", "a:" + "t" * 129, "a" * 180, "a" * 300, "ä", "a:ä", "a+b", "a\0"],
)  # fmt: skip
def test_what_is_no_name_is_refused(written: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(written)


@given(st.text())
def test_any_text_is_a_name_or_is_refused(written: str) -> None:
    try:
        found = parse(written)
    except InvalidRequest:
        return
    assert parse(str(found)) == found
    assert "+" not in str(found) and ".." not in str(found).split("/")


def test_only_this_machine_is_spoken_to_without_encryption() -> None:
    for host in ("localhost", "localhost:5000", "127.0.0.1:5000", "[::1]", "[::1]:5000"):
        assert is_local(host)
    for host in ("localhost.example", "127.0.0.1.example", "10.0.0.1", "[::2]", "a@localhost"):
        assert not is_local(host)


def document(**changes: Any) -> bytes:
    return make_image({"a": b"1"}, changes=changes).manifest


def layer(**changes: Any) -> dict[str, Any]:
    kind = "application/vnd.oci.image.layer.v1.tar+gzip"
    return {"mediaType": kind, "digest": DIGEST, "size": 1} | changes


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (document(schemaVersion=1), "schema 1 manifest"),
        (document(layers=[layer(urls=["https://x.example"])]), "stored elsewhere"),
        (document(layers=[layer(mediaType="application/x.foreign.tar")]), "stored elsewhere"),
        (document(layers=[layer(mediaType="application/x-helm")]), "unknown kind"),
        (document(layers=[layer(digest="sha512:" + "a" * 128)]), "not a sha256 digest"),
        (document(layers=[layer(digest="../../etc/passwd")]), "not a sha256 digest"),
        (document(layers=[layer(size=-1)]), "give the size"),
        (document(layers=[layer(size=True)]), "give the size"),
        (document(layers=["x"]), "broken"),
        (document(layers=None), "broken"),
        (document(config=None), "broken"),
        (b"[1]", "invalid image"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (5 << 20), "larger than"),
    ],
)  # fmt: skip
def test_a_manifest_that_is_not_for_us_is_refused(written: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_document(written)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just(DIGEST),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["schemaVersion", "manifests", "layers", "config", "digest", "size", "platform",
                 "annotations", "os", "architecture", "mediaType", "rootfs", "diff_ids", "Env",
                 "User", "urls"]
            ),
            inner,
        )
    ),
)  # fmt: skip


@given(JSON)
def test_whatever_a_document_says_it_is_understood_or_refused(said: Any) -> None:
    for read in (parse_document, parse_config):
        try:
            found = read(json.dumps(said).encode())
        except InvalidRequest:
            continue
        assert isinstance(found, (Index, Manifest, tuple))
        if isinstance(found, Index):
            try:
                choose(found)
            except InvalidRequest:
                continue


def index(*platforms: dict[str, str]) -> Index:
    listed = [{"digest": DIGEST, "size": n, "platform": p} for n, p in enumerate(platforms)]
    found = parse_document(json.dumps({"schemaVersion": 2, "manifests": listed}).encode())
    assert isinstance(found, Index)
    return found


def test_the_image_for_this_machine_is_chosen() -> None:
    here, other = {"os": "linux", "architecture": machine()}, {"os": "windows"}
    unknown = {"os": "unknown", "architecture": "unknown"}
    assert choose(index(other, unknown, here)).size == 2
    assert choose(index({**other, "architecture": machine()}, here)).size == 1


def test_an_image_for_other_machines_says_for_which() -> None:
    platforms = [
        {"os": "linux", "architecture": "s390x"},
        {"os": "linux", "architecture": machine(), "variant": "v99"},
        {"os": "unknown", "architecture": "unknown"},
    ]
    with pytest.raises(InvalidRequest, match=f"but for linux/{machine()}/v99, linux/s390x"):
        choose(index(*platforms))


def test_a_configuration_is_read() -> None:
    config = {"Env": ["PATH=/bin:/x", "A=1=2", "B", "=x", "A=3"], "User": "app:7", "Labels": {}}
    found, diff_ids = parse_config(make_image({"a": b""}, config=config).config)
    assert found.env == (("PATH", "/bin:/x"), ("A", "3"), ("B", ""))
    assert found.user == "app:7"
    assert len(diff_ids) == 1


def test_an_image_can_have_as_many_layers_as_a_box_and_no_more() -> None:
    assert manifest.MAX_LAYERS == plan.MAX_LAYERS

    def config(count: int, repeated: int = 1) -> bytes:
        diff_ids = [f"sha256:{number:064x}" for number in range(count)] * repeated
        return make_image({"a": b""}, rootfs={"diff_ids": diff_ids}).config

    assert len(parse_config(config(plan.MAX_LAYERS, repeated=4))[1]) == 4 * plan.MAX_LAYERS
    with pytest.raises(InvalidRequest, match=f"has {plan.MAX_LAYERS + 1} layers.*docker export"):
        parse_config(config(plan.MAX_LAYERS + 1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"os": "windows"}, "is for windows/"),
        ({"architecture": "s390x"}, f"linux/s390x; this machine is linux/{machine()}"),
        ({"rootfs": {"diff_ids": []}}, "what its layers are"),
        ({"rootfs": {"diff_ids": ["../x"]}}, "what its layers are"),
        ({"rootfs": None}, "what its layers are"),
        ({"config": [1]}, "invalid image"),
        ({"config": {"Env": "A=1"}}, "broken"),
        ({"config": {"Env": ["A=\0"]}}, "invalid text"),
        ({"config": {"Env": [1]}}, "invalid text"),
        ({"config": {"User": "\ud800"}}, "invalid text"),
        ({"config": {"User": {"a": 1}}}, "invalid text"),
    ],
)
def test_a_configuration_that_is_wrong_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_config(make_image({"a": b""}, **changes).config)


def test_a_digest_is_that_of_the_bytes() -> None:
    assert make_image({"a": b""}).digest == digest_of(make_image({"a": b""}).manifest)
