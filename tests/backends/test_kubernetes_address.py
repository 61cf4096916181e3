"""What a kubeconfig says: found, checked, and turned into credentials."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hutch.backends.kubernetes import address
from hutch.backends.kubernetes.address import ClusterAddress, find
from hutch.errors import BackendUnavailable
from tls_of_tests import make_certificate


def config(**more: Any) -> dict[str, Any]:
    """A kubeconfig, with these keys of its user."""
    return {
        "current-context": "main",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": more}],
        "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u"}}],
    }


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def found(path: Path, content: object, **options: str) -> ClusterAddress:
    return find({"KUBECONFIG": str(write(path, content))}, **options)


async def headers(where: ClusterAddress) -> dict[str, str]:
    return dict((await where.access()).headers)


def complaint(path: Path, content: object, **options: str) -> str:
    with pytest.raises(BackendUnavailable) as caught:
        asyncio.run(found(path, content, **options).access())
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kubeconfig"


def test_the_file_is_that_of_kubectl(tmp_path: Path) -> None:
    write(tmp_path / ".kube/config", config(token="of-home"))
    where = find({"HOME": str(tmp_path)})
    assert asyncio.run(headers(where)) == {"Authorization": "Bearer of-home"}
    assert (where.server, where.namespace) == ("http://127.0.0.1:1", "default")
    own = write(tmp_path / "own", config(token="of-own"))
    where = find({"HOME": str(tmp_path), "KUBECONFIG": str(own)})
    assert asyncio.run(headers(where)) == {"Authorization": "Bearer of-own"}


def test_several_files_are_one_and_the_first_wins(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a/one", {"current-context": "main", "users": config(token="1")["users"]}
    )
    second = write(tmp_path / "b/two", {**config(token="2"), "current-context": "other"})
    env = {"KUBECONFIG": f"{first}:{tmp_path}/missing::{second}"}
    assert asyncio.run(headers(find(env))) == {"Authorization": "Bearer 1"}


def test_a_context_and_a_namespace_can_be_chosen(file: Path) -> None:
    content = config(token="x")
    other = {"cluster": "c", "namespace": "theirs"}
    content["contexts"].append({"name": "other", "context": other})
    assert found(file, content, context="other").namespace == "theirs"
    assert found(file, content, context="other", namespace="mine").namespace == "mine"
    assert "there is no context 'third': there is main, other" in complaint(
        file, content, context="third"
    )
    for name in ("-x", "a/b", "A", "a" * 64, "../x"):
        assert "invalid namespace" in complaint(file, content, namespace=name)


def test_without_a_cluster_it_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"\.kube/config.*KUBECONFIG"):
        find({"HOME": str(tmp_path)})
    with pytest.raises(BackendUnavailable, match=f"KUBECONFIG: there is no file {tmp_path}/x"):
        find({"KUBECONFIG": f"{tmp_path}/x"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[", "line 1: invalid YAML"),
        ("\0", "invalid YAML"),
        ("[1]", "the file: Expected `object`, got `array`"),
        ("", "current-context is empty"),
        ({"users": [{"name": "u", "user": {"token": 3}}]}, "users[0].user.token: Expected `str`"),
        ({"clusters": [{"name": "c"}]}, "clusters[0]: Object missing required field `cluster`"),
        ({"clusters": []}, "there is no cluster 'c': there is none"),
        ({"users": None}, "there is no user 'u'"),
        ({"contexts": [{"name": "main", "context": {}}]}, "missing required field `cluster`"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_key(file: Path, change: Any, said: str) -> None:
    content = change if isinstance(change, str) else {**config(token="x"), **change}
    text = complaint(file, content)
    assert said in text and str(file) in text


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"server": "ftp://x"}, "server: 'ftp://x' is not an address"),
        ({"server": "https://"}, "is not an address"),
        ({"server": "https://x:0"}, "is not an address"),
        ({"server": "https://x:99999"}, "is not an address"),
        ({"server": "https://user:word@x"}, "is not an address"),
        ({"server": "https://x\r\nHost: y"}, "is not an address"),
        ({"server": "https://x", "proxy-url": "http://y"}, "proxy-url"),
        ({"server": "https://x", "certificate-authority-data": "!"}, "invalid base64"),
        ({"server": "https://x", "certificate-authority-data": "eA=="}, "has no certificate"),
        ({"server": "https://x", "certificate-authority": "missing"}, "cannot read"),
    ],
)
def test_a_cluster_that_cannot_be_used_says_why(
    file: Path, cluster: dict[str, Any], said: str
) -> None:
    content = {**config(token="x"), "clusters": [{"name": "c", "cluster": cluster}]}
    assert said in complaint(file, content)


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({"token": "a b"}, "a token is one line of printable ASCII"),
        ({"token": "a\r\nX-Other: y"}, "a token is one line of printable ASCII"),
        ({"tokenFile": "missing"}, "tokenFile: cannot read"),
        ({"auth-provider": {"name": "gcp"}}, "auth-provider: kubectl has removed these"),
        ({"as": "admin"}, "as: another user cannot be impersonated"),
        ({"exec": {"command": "x", "apiVersion": "v7"}}, "exec.apiVersion: 'v7' is not known"),
    ],
)
def test_a_user_that_cannot_be_used_says_why(file: Path, user: dict[str, Any], said: str) -> None:
    assert said in complaint(file, config(**user))


def test_a_password_is_sent_as_http_wants_it(file: Path) -> None:
    where = found(file, config(username="me", password="ü:x"))
    sent = asyncio.run(headers(where))["Authorization"].removeprefix("Basic ")
    assert base64.b64decode(sent).decode() == "me:ü:x"


def test_a_token_file_is_read_again_once_it_is_refused(file: Path) -> None:
    token = write(file.parent / "token", "first\n")
    where = found(file, config(tokenFile="token"))

    async def check() -> None:
        assert await headers(where) == {"Authorization": "Bearer first"}
        token.write_text("second\n")
        assert await headers(where) == {"Authorization": "Bearer first"}
        where.expire()
        assert where.renews and await headers(where) == {"Authorization": "Bearer second"}

    asyncio.run(check())


def test_in_a_pod_the_service_account_is_used(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path)
    folder = tmp_path / "account"
    write(folder / "namespace", "boxes\n")
    write(folder / "token", "of-pod")
    write(folder / "ca.crt", certificate.read_text())
    env = {"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "fd00::1"}
    where = find(env, service_account=folder)
    assert (where.server, where.host, where.port) == ("https://[fd00::1]:443", "fd00::1", 443)
    assert where.namespace == "boxes"
    access = asyncio.run(where.access())
    assert dict(access.headers) == {"Authorization": "Bearer of-pod"}
    assert access.tls and access.tls.check_hostname and len(access.tls.get_ca_certs()) == 1


def test_a_client_certificate_needs_no_file(file: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    encoded = {
        f"client-{name}-data": base64.b64encode(path.read_bytes()).decode()
        for name, path in (("certificate", certificate), ("key", key))
    }
    content = config(**encoded)
    content["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    assert asyncio.run(found(file, content).access()).tls
    del encoded["client-key-data"]
    content["users"][0]["user"] = encoded
    assert "there is only the certificate" in complaint(file, content)


# --- credential plugins -------------------------------------------------------------------------

PLUGIN = """\
#!/bin/sh
echo run >> "$COUNT"
case "$KUBERNETES_EXEC_INFO" in *'"interactive": false'*) ;; *) exit 9 ;; esac
cat "$ANSWER"
"""


class Plugin:
    def __init__(self, folder: Path) -> None:
        self.path = write(folder / "bin/plugin", PLUGIN)
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)
        self.count, self.answer = folder / "count", folder / "answer"

    def says(self, **status: str) -> None:
        said = {"apiVersion": address.EXEC_VERSIONS[0], "kind": "ExecCredential", "status": status}
        self.answer.write_text(json.dumps(said))

    def user(self, **more: Any) -> dict[str, Any]:
        env = {"COUNT": str(self.count), "ANSWER": str(self.answer)}
        return {
            "exec": {
                "apiVersion": address.EXEC_VERSIONS[0],
                "command": "./bin/plugin",
                "env": [{"name": name, "value": value} for name, value in env.items()],
                **more,
            }
        }

    @property
    def runs(self) -> int:
        return self.count.read_text().count("run")


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


def test_a_plugin_is_run_once_and_again_when_its_credential_expires(
    file: Path, plugin: Plugin
) -> None:
    where = found(file, config(**plugin.user()))

    async def check() -> None:
        plugin.says(token="one")
        sent = await asyncio.gather(*(headers(where) for _ in range(5)))
        assert all(each == {"Authorization": "Bearer one"} for each in sent)
        assert plugin.runs == 1
        soon = datetime.now(UTC) + timedelta(seconds=address.EARLY / 2)
        plugin.says(token="two", expirationTimestamp=soon.strftime("%Y-%m-%dT%H:%M:%SZ"))
        where.expire()  # the cluster did not take it
        assert await headers(where) == {"Authorization": "Bearer two"}
        plugin.says(token="three")
        assert await headers(where) == {"Authorization": "Bearer three"}
        assert plugin.runs == 3

    asyncio.run(check())


@pytest.mark.parametrize(
    ("more", "answer", "said"),
    [
        ({"command": "no-such-plugin-of-hutch", "installHint": "get it"}, "", "program.*: get it"),
        ({"command": "/dev/null"}, "", "cannot run /dev/null: Permission denied"),
        ({"command": "false"}, "", "ended with 1"),
        ({"interactiveMode": "Always"}, "", "interactiveMode: a plugin that needs a terminal"),
        ({}, "no json", "printed no credential"),
        ({}, "{}", "printed no credential"),
        ({}, '{"apiVersion": "x", "kind": "y", "status": {}}', "printed a 'y' of 'x'"),
    ],
)
def test_a_plugin_that_gives_nothing_says_why(
    file: Path, plugin: Plugin, more: dict[str, Any], answer: str, said: str
) -> None:
    plugin.answer.write_text(answer)
    with pytest.raises(BackendUnavailable, match=said):
        asyncio.run(found(file, config(**plugin.user(**more))).access())


def test_a_plugin_that_does_not_end_is_ended(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "PLUGIN_PATIENCE", 0.5)
    slow = write(tmp_path / "slow", f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/pid\nwait\n")
    slow.chmod(0o700)
    user = {"exec": {"apiVersion": address.EXEC_VERSIONS[0], "command": str(slow)}}
    assert "did not end in 0.5 seconds" in complaint(file, config(**user))
    pid = (tmp_path / "pid").read_text().strip() if (tmp_path / "pid").exists() else ""
    while pid and os.path.exists(f"/proc/{pid}"):
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
            break
        time.sleep(0.05)


def test_who_has_contacted_no_cluster_has_not_loaded_what_it_takes() -> None:
    script = (
        "import sys, hutch.backends.kubernetes\n"
        "late = {'httpcore', 'h11', 'websockets', 'yaml', 'cryptography'}\n"
        "assert not late & sys.modules.keys(), late & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
