"""The engine is found where Docker's own clients would find it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hutch.backends.docker.config import EngineAddress, find
from hutch.errors import BackendUnavailable

DOCKER, PODMAN = "/var/run/docker.sock", "/run/podman/podman.sock"


def only(*paths: str) -> Callable[[str], bool]:
    return lambda path: path in paths


def nowhere(path: str) -> bool:
    return False


def context(config: Path, name: str, host: str, *, skip: bool = False) -> Path:
    """A context as `docker context create` writes it; where its certificates would be."""
    folder = hashlib.sha256(name.encode()).hexdigest()
    meta = config / "contexts/meta" / folder / "meta.json"
    meta.parent.mkdir(parents=True)
    endpoint = {"Host": host, "SkipTLSVerify": skip}
    meta.write_text(json.dumps({"Name": name, "Endpoints": {"docker": endpoint}}))
    return config / "contexts/tls" / folder / "docker"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_what_was_asked_for_goes_before_all_else(env: dict[str, str]) -> None:
    env |= {"DOCKER_HOST": "unix:///b", "DOCKER_CONTEXT": "c"}
    assert find("unix:///a", env, only(DOCKER)).path == "/a"


def test_docker_host_goes_before_a_context_and_a_socket(env: dict[str, str]) -> None:
    env |= {"DOCKER_HOST": "unix:///b", "DOCKER_CONTEXT": "c"}
    assert find(None, env, only(DOCKER)) == EngineAddress("unix:///b", "DOCKER_HOST")


def test_docker_context_goes_before_the_current_one(env: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / ".docker"
    context(config, "one", "unix:///one")
    context(config, "two", "unix:///two")
    (config / "config.json").write_text('{"currentContext": "one"}')
    assert find(None, env, only(DOCKER)).path == "/one"
    assert find(None, env | {"DOCKER_CONTEXT": "two"}, only(DOCKER)).path == "/two"


def test_contexts_are_where_docker_config_says(env: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "elsewhere"
    context(config, "one", "unix:///one")
    (config / "config.json").write_text('{"currentContext": "one"}')
    assert find(None, env | {"DOCKER_CONFIG": str(config)}, nowhere).path == "/one"


def test_the_default_context_is_no_context(env: dict[str, str]) -> None:
    assert find(None, env | {"DOCKER_CONTEXT": "default"}, only(DOCKER)).path == DOCKER


def test_a_context_brings_its_certificates(env: dict[str, str], tmp_path: Path) -> None:
    files = context(tmp_path / ".docker", "far", "tcp://far:2376", skip=True)
    files.mkdir(parents=True)
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (files / name).touch()
    found = find(None, env | {"DOCKER_CONTEXT": "far"}, nowhere)
    assert found.url == "tcp://far:2376" and found.path is None
    assert found.tls and found.tls.ca == str(files / "ca.pem") and not found.tls.verify


def test_a_context_that_is_not_there_is_an_error_that_says_so(env: dict[str, str]) -> None:
    with pytest.raises(BackendUnavailable, match=r"context 'gone'.*docker context ls"):
        find(None, env | {"DOCKER_CONTEXT": "gone"}, only(DOCKER))


@pytest.mark.parametrize("content", ["{", "[]", '{"currentContext": 3}'])
def test_a_broken_config_is_an_error_or_nothing(
    env: dict[str, str], tmp_path: Path, content: str
) -> None:
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text(content)
    try:
        assert find(None, env, only(DOCKER)).path == DOCKER
    except BackendUnavailable as exc:
        assert "config.json" in str(exc)


def test_sockets_are_tried_in_order(env: dict[str, str], tmp_path: Path) -> None:
    env["XDG_RUNTIME_DIR"] = "/run/user/7"
    places = [DOCKER, "/run/user/7/docker.sock", f"{tmp_path}/.docker/run/docker.sock",
              "/run/user/7/podman/podman.sock", PODMAN]  # fmt: skip
    for number, path in enumerate(places):
        assert find(None, env, only(*places[number:])).path == path


def test_container_host_goes_before_the_sockets_of_podman(env: dict[str, str]) -> None:
    env["CONTAINER_HOST"] = "unix:///mine"
    assert find(None, env, only(PODMAN)).path == "/mine"
    assert find(None, env, only(PODMAN, DOCKER)).path == DOCKER


def test_no_engine_is_an_error_that_says_where_we_looked(env: dict[str, str]) -> None:
    with pytest.raises(BackendUnavailable, match=rf"{DOCKER}.*{PODMAN}.*systemctl start docker"):
        find(None, env, nowhere)


@pytest.mark.parametrize(
    ("given", "url"),
    [("tcp://h:1", "tcp://h:1"), ("h:2375", "tcp://h:2375"), ("http://h:1/", "tcp://h:1")],
)
def test_an_address_is_a_url_or_host_and_port(env: dict[str, str], given: str, url: str) -> None:
    assert find(given, env, nowhere).url == url


def test_tls_is_asked_for_by_variables(env: dict[str, str], tmp_path: Path) -> None:
    env |= {"DOCKER_HOST": "tcp://h:2376", "DOCKER_CERT_PATH": str(tmp_path)}
    assert find(None, env, nowhere).tls is None
    (tmp_path / "ca.pem").touch()
    found = find(None, env | {"DOCKER_TLS_VERIFY": "1"}, nowhere).tls
    assert found and found.verify and found.ca == f"{tmp_path}/ca.pem" and found.cert is None
    found = find(None, env | {"DOCKER_TLS": "1"}, nowhere).tls
    assert found and not found.verify


def test_certificates_that_are_none_are_an_error_that_names_them(
    env: dict[str, str], tmp_path: Path
) -> None:
    env |= {"DOCKER_HOST": "tcp://h:1", "DOCKER_TLS": "1", "DOCKER_CERT_PATH": str(tmp_path)}
    (tmp_path / "ca.pem").write_text("not one")
    found = find(None, env, nowhere).tls
    assert found
    with pytest.raises(BackendUnavailable, match=r"ca\.pem"):
        found.context()


def test_ssh_is_an_error_that_says_how_it_can_be_done(env: dict[str, str]) -> None:
    with pytest.raises(BackendUnavailable, match=r"ssh -nNT -L .*me@far"):
        find("ssh://me@far", env, nowhere)


@pytest.mark.parametrize(
    "url", ["npipe:////./pipe/x", "unix://relative", "fd://", "tcp://", "x://y"]
)
def test_other_addresses_are_refused(env: dict[str, str], url: str) -> None:
    with pytest.raises(BackendUnavailable, match="unix:///PATH"):
        find(url, env, nowhere)
