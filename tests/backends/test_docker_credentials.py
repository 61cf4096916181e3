"""Who we are at a registry, from the file that `docker login` writes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from hutch.backends.docker.config import Login, host_of, login_at, whole

PASSWORD = base64.b64encode(b"ann:a:b").decode()


def login(folder: Path, config: Any, host: str = "registry.example:5000") -> Login:
    (folder / "config.json").write_text(json.dumps(config))
    return login_at(host, {"DOCKER_CONFIG": str(folder), "HOME": "/nowhere"})


@pytest.mark.parametrize(
    ("reference", "host", "name"),
    [("alpine:3", "docker.io", "docker.io/library/alpine:3"),
     ("team/image", "docker.io", "docker.io/team/image"),
     ("docker.io/team/image", "docker.io", "docker.io/team/image"),
     ("localhost/a", "localhost", "localhost/a"),
     ("registry.example/a/b", "registry.example", "registry.example/a/b"),
     ("h:5000/a@sha256:0", "h:5000", "h:5000/a@sha256:0")],
)  # fmt: skip
def test_the_registry_of_an_image_is_in_its_name(reference: str, host: str, name: str) -> None:
    assert (host_of(reference), whole(reference)) == (host, name)


@pytest.mark.parametrize("key", ["registry.example:5000", "https://registry.example:5000/v2/"])
def test_a_password_goes_to_its_own_registry_and_to_no_other(tmp_path: Path, key: str) -> None:
    config = {"auths": {"other.example": {"auth": PASSWORD}, key: {"auth": PASSWORD}}}
    assert login(tmp_path, config).auth == {
        "username": "ann", "password": "a:b", "serveraddress": "registry.example:5000"}  # fmt: skip
    assert login(tmp_path, config, "registry.example") == Login()


def test_the_registry_that_needs_no_name_is_found_by_what_docker_calls_it(tmp_path: Path) -> None:
    config = {"auths": {"https://index.docker.io/v1/": {"username": "ann", "password": "x"}}}
    found = login(tmp_path, config, "docker.io").auth
    assert found and found["password"] == "x" and found["serveraddress"] == "docker.io"


def test_a_token_will_do(tmp_path: Path) -> None:
    entry = {"auth": PASSWORD, "identitytoken": "t"}
    found = login(tmp_path, {"auths": {"registry.example:5000": entry}}).auth
    assert found == {"identitytoken": "t", "serveraddress": "registry.example:5000"}


@pytest.mark.parametrize(
    "config",
    [{"credsStore": "desktop"}, {"credHelpers": {"registry.example:5000": "ecr"}},
     {"credsStore": "x", "auths": {"registry.example:5000": {}}}],
)  # fmt: skip
def test_a_helper_is_not_run_and_that_is_told(tmp_path: Path, config: dict[str, Any]) -> None:
    found = login(tmp_path, config)
    assert found.auth is None and "credential helper" in found.hint


@pytest.mark.parametrize(
    "config",
    [{}, {"auths": 1}, {"auths": {"registry.example:5000": 1}}, {"credHelpers": {"other": "x"}},
     {"auths": {"registry.example:5000": {"auth": "!"}}}],
)  # fmt: skip
def test_without_a_password_anybody_pulls(tmp_path: Path, config: Any) -> None:
    assert login(tmp_path, config) == Login()


def test_a_file_that_makes_no_sense_is_told_and_does_no_harm(tmp_path: Path) -> None:
    assert login_at("x", {"HOME": str(tmp_path)}) == Login()
    found = login(tmp_path, [1])
    assert found.auth is None and "cannot read" in found.hint
