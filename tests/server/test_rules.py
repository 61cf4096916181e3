"""What a session gets, decided from its request and the rules of the operator alone."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hutch import operations as op
from hutch.engine.sealing import Sealer
from hutch.errors import Conflict, IncompatibleBox, InvalidRequest, NoImage
from hutch.server.requests import (
    check_digest,
    check_mounts,
    checked_key,
    completed,
    digest_of,
    image_of,
    own_name,
)
from hutch.server.rules import Rules
from hutch.server.stored_requests import request_of
from hutch.types import GiB, Limits, MiB, Mount, show_size

HOST = "host"


def decided(o: op.OpenSession, rules: Rules, data: str = "/srv/hutch") -> op.OpenSession:
    return completed(o, rules, HOST, Path(data))


def test_who_asks_for_nothing_gets_the_operators_defaults() -> None:
    rules = Rules(
        default_image="data", default_ttl=60, default_idle=30,
        default_limits=Limits(memory=256 * MiB), runtime="runsc",
    )  # fmt: skip
    got = decided(op.OpenSession(), rules)
    assert (got.image, got.ttl_seconds, got.idle, got.runtime) == ("data", 60, 30, "runsc")
    assert got.limits.memory == 256 * MiB


def test_who_asks_gets_what_was_asked_for() -> None:
    rules = Rules(default_image="data", default_idle=30, default_limits=Limits(memory=GiB, pids=9))
    asked = op.OpenSession("chem", ttl_seconds=5, idle=7, limits=Limits(memory=2 * GiB))
    got = decided(asked, rules)
    assert (got.image, got.ttl_seconds, got.idle) == ("chem", 5, 7)
    assert (got.limits.memory, got.limits.pids) == (2 * GiB, 9)


@pytest.mark.parametrize("ttl", [None, 0, -1])
def test_a_session_without_an_end_ends_by_default(ttl: float | None) -> None:
    assert decided(op.OpenSession(ttl_seconds=ttl), Rules()).ttl_seconds == Rules().default_ttl


@pytest.mark.parametrize(
    ("asked", "rules", "why"),
    [
        (op.OpenSession(ttl_seconds=61), Rules(max_ttl=60), r"at most 60 \(1m\)"),
        (op.OpenSession(relax=("network",)), Rules(), "allows none"),
        (op.OpenSession(relax=("network",)), Rules(relax=("capabilities",)), "allows capabilities"),
        (op.OpenSession(runtime="runc"), Rules(runtime="runsc"), "this server has 'runsc'"),
        (op.OpenSession(mounts=(Mount("/etc", "/x"),)), Rules(), "no folder of its host"),
        (op.OpenSession(mounts=(Mount("/e\0tc", "/x"),)), Rules(), "not a valid path"),
    ],
)  # fmt: skip
def test_what_the_operator_does_not_allow_is_refused(
    asked: op.OpenSession, rules: Rules, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decided(asked, rules)


@pytest.mark.parametrize("name", ["memory", "cpus", "pids", "disk", "open_files", "output"])
def test_no_limit_can_be_above_its_maximum(name: str) -> None:
    most = getattr(Limits(), name) or Limits().disk_size
    rules = Rules(max_limits=replace(Limits(), **{name: most}))
    decided(op.OpenSession(limits=replace(Limits(), **{name: most})), rules)
    shown = show_size(most) if name in ("memory", "disk", "output") else most
    with pytest.raises(InvalidRequest, match=f"^{name} can be at most {shown}"):
        decided(op.OpenSession(limits=replace(Limits(), **{name: most + 1})), rules)


def test_only_allowed_images_are_given_and_nothing_is_added_to_them() -> None:
    rules = Rules(allowed_images=("data", "sandbox-runtime:node"), default_image="data")
    assert decided(op.OpenSession(), rules).image == "data"
    assert decided(op.OpenSession("node"), rules).image == "node"
    for refused in (op.OpenSession("chem"), op.OpenSession("data", packages=("left-pad",))):
        with pytest.raises(NoImage, match="not allowed here: data, sandbox-runtime:node"):
            decided(refused, rules)


def test_images_of_sandkasten_have_our_names_where_no_engine_has_images_of_its_own() -> None:
    assert image_of(op.OpenSession("sandbox-runtime:python"), Rules(), HOST) == "python"
    assert own_name("sandbox-runtime:base", HOST) == HOST
    for name in ("sandbox-runtime", "alpine:3"):
        assert own_name(name, HOST) == name
    assert own_name("sandbox-runtime:python", "debian") == "sandbox-runtime:python"


def test_a_mount_is_below_an_allowed_folder_and_apart_from_the_servers_data(tmp_path: Path) -> None:
    allowed, data, elsewhere = (
        tmp_path / "allowed",
        tmp_path / "allowed/data",
        tmp_path / "allowed2",
    )
    data.mkdir(parents=True)
    (allowed / "link").symlink_to("/etc")
    rules = Rules(mounts=(str(allowed),))

    def mount(path: Path) -> None:
        check_mounts((Mount(str(path), "/x"),), rules, data)

    mount(allowed / "project")
    for path, why in [
        (allowed, "the server lives there"),
        (data / "sessions", "the server lives there"),
        (allowed / "link", "a link is on the way"),
        (elsewhere, f"allows {allowed}"),
    ]:
        with pytest.raises(InvalidRequest, match=why):
            mount(path)


def test_an_idempotency_key_is_printable_and_stands_for_one_request() -> None:
    assert checked_key("x" * 255) == "x" * 255
    for wrong in ("", "x" * 256, "a\nb"):
        with pytest.raises(InvalidRequest, match="1 to 255 printable"):
            checked_key(wrong)
    check_digest("same", "same")
    with pytest.raises(Conflict):
        check_digest("before", "now")


def test_what_a_later_version_wrote_down_is_read_if_it_asks_for_nothing_more() -> None:
    asked = op.OpenSession(mounts=(Mount("/a", "/b"),), relax=("network",), env={"A": "b"})

    def read(**more: object) -> op.OpenSession:
        return request_of(asdict(asked) | more, Sealer(b"x" * 32))

    assert read() == asked
    assert read(new=()) == asked
    with pytest.raises(IncompatibleBox, match="opened with new"):
        read(new="more")
    assert digest_of(asked, Sealer(b"x" * 32)) != digest_of(asked, Sealer(b"y" * 32))
