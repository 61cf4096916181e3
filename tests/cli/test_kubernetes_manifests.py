"""A server in a cluster as the guide installs it: used, upgraded, rolled back, removed.

Nothing leads to a Service on this cluster, so clients come through `kubectl port-forward`, as from
a laptop.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster import Cluster
from benchmarks.cluster.config import NODE

from cluster_of_tests import ask, full_name
from daemon_of_tests import wait_for
from docker_of_tests import BUSYBOX
from hutch import BackendUnavailable, InvalidRequest, Sandbox, Unauthorized, Workspace

SECONDS = 180
PERSISTENT = "/api/v1/persistentvolumes"


@dataclass(frozen=True)
class Installed:
    """A server in a cluster. `images`: two of the same content, an older and a newer one."""

    cluster: Cluster
    namespace: str
    boxes: str
    images: tuple[str, str]
    folder: Path
    replicas: int = 1

    @property
    def workload(self) -> str:
        return "deployment/hutch" if self.replicas == 1 else "statefulset/hutch"

    @property
    def env(self) -> Mapping[str, str]:
        path = f"{self.cluster.folder}/programs:{os.environ['PATH']}"
        return {
            **os.environ,
            "PATH": path,
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "KUBECACHEDIR": str(self.folder / "kubectl"),
        }

    def run(self, *argv: str, input: str = "") -> str:
        """What a program prints, which must succeed."""
        done = subprocess.run(
            argv, env=self.env, input=input, capture_output=True, text=True, timeout=SECONDS,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def kubectl(self, *words: str, input: str = "") -> str:
        return self.run("kubectl", "--namespace", self.namespace, *words, input=input)

    def manifests(self, image: str) -> str:
        return self.run(
            sys.executable, "-m", "hutch", "kubernetes", "manifests", "--image", image,
            "--namespace", self.namespace, "--boxes-namespace", self.boxes,
            "--storage-class", self.namespace, "--set", "pool.enabled=false",
            "--replicas", str(self.replicas),
        )  # fmt: skip

    def roll_out(self) -> None:
        self.kubectl("rollout", "status", self.workload, f"--timeout={SECONDS - 10}s")

    def key(self) -> str:
        path = "jsonpath={.data.api-key}"
        encoded = self.kubectl("get", "secret", "hutch-key", "--output", path)
        return self.run("base64", "-d", input=encoded)

    @contextlib.contextmanager
    def reached(self, at: str = "service/hutch") -> Iterator[str]:
        """The url of the server, through its Service, or of one Pod."""
        argv = ["kubectl", "--namespace", self.namespace, "port-forward", at, ":http"]
        with subprocess.Popen(
            argv, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as forward:
            assert forward.stdout
            said = forward.stdout.readline()
            try:
                found = re.search(r"127\.0\.0\.1:(\d+) ", said)
                assert found, said
                yield f"http://127.0.0.1:{found[1]}"
            finally:
                forward.kill()

    def pods(self) -> list[Any]:
        return list(ask(self.cluster, "GET", f"/api/v1/namespaces/{self.boxes}/pods")["items"])

    def server(self) -> Any:
        """The one Pod of the server that is not about to end."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        [found] = [
            pod
            for pod in ask(self.cluster, "GET", path)["items"]
            if "deletionTimestamp" not in pod["metadata"]
        ]
        return found


@pytest.fixture(scope="module")
def images(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Two names of what `hutch kubernetes image --server` writes, at the node."""
    archive = tmp_path_factory.mktemp("image") / "server.tar"
    tag = secrets.token_hex(4)
    first, second = f"hutch-test/server:{tag}-1", f"hutch-test/server:{tag}-2"
    for name in (first, second):
        argv = [
            sys.executable,
            "-m",
            "hutch",
            "kubernetes",
            "image",
            "--server",
            str(archive),
            name,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.stdout == f"{name}\n", done.stderr
        cluster.import_image(archive)
    archive.unlink()
    yield first, second
    ctr = [f"{cluster.folder}/programs/ctr", "--namespace=k8s.io", "images", "rm"]
    names = [full_name(name).removesuffix(":latest") for name in (first, second)]
    subprocess.run(cluster.inside([*ctr, *names]), capture_output=True, check=False)


@contextlib.contextmanager
def installation(
    cluster: Cluster, images: tuple[str, str], folder: Path, replicas: int = 1
) -> Iterator[Installed]:
    """Installed as the guide says. The cluster has no storage but what is made here."""
    name = f"hutch-{secrets.token_hex(4)}"
    made = Installed(cluster, name, f"{name}-boxes", images, folder, replicas)
    claims = ["hutch"] if replicas == 1 else [f"data-hutch-{n}" for n in range(replicas)]
    manifests = made.manifests(images[0])
    with contextlib.ExitStack() as stack:
        for claim in claims:
            stack.enter_context(volume(made, claim))
        try:
            made.run("kubectl", "apply", "--validate=strict", "--filename=-", input=manifests)
            commands = [line[4:] for line in manifests.splitlines() if line.startswith("#   ")]
            made.run("sh", "-c", "\n".join(commands))
            made.roll_out()
            yield made
        finally:
            made.run("kubectl", "delete", "--ignore-not-found", "--filename=-", input=manifests)


@contextlib.contextmanager
def volume(made: Installed, claim: str) -> Iterator[None]:
    """A volume on the node for one claim."""
    folder = made.folder / claim
    folder.mkdir()
    name = f"{made.namespace}-{claim}"
    node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
    body = {
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": made.namespace,
            "claimRef": {
                "kind": "PersistentVolumeClaim",
                "name": claim,
                "namespace": made.namespace,
            },
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [node]}]}},
        },
    }
    ask(made.cluster, "POST", PERSISTENT, body)
    try:
        yield
    finally:
        ask(made.cluster, "DELETE", f"{PERSISTENT}/{name}")


@pytest.fixture(scope="module")
def installed(
    cluster: Cluster, images: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    with installation(cluster, images, tmp_path_factory.mktemp("installed")) as made:
        yield made


def test_a_client_with_the_key_has_a_sandbox_that_ends(installed: Installed) -> None:
    with installed.reached() as url:
        with Sandbox.create(url=url, api_key=installed.key(), image=f"{BUSYBOX}:latest") as box:
            assert box.info.backend == "kubernetes"
            assert box.shell.run("echo $((6 * 7))").stdout == "42\n"
            [pod] = installed.pods()
            [image] = {each["image"] for each in pod["spec"]["initContainers"]}
            assert image == installed.images[0]
        assert wait_for(lambda: not installed.pods(), SECONDS)
        with pytest.raises(InvalidRequest, match="only 'kubernetes'"):
            Sandbox.create(url=url, api_key=installed.key(), backend="kubernetes/kube-system")
        with pytest.raises(Unauthorized):
            Sandbox.create(url=url, api_key="hutch_not-the-key", image=f"{BUSYBOX}:latest")


def test_the_server_may_do_what_it_needs_and_nothing_else(installed: Installed) -> None:
    command = ("exec", "deployment/hutch", "--", "hutch")
    said = installed.kubectl(*command, "key", "create", "--owner", "agents")
    assert said.startswith("hutch_")
    account = f"--as=system:serviceaccount:{installed.namespace}:hutch"

    def may(verb: str, what: str, namespace: str, part: str = "") -> bool:
        argv = ["kubectl", "auth", "can-i", verb, what, account, "--namespace", namespace]
        argv.append(f"--subresource={part}")
        done = subprocess.run(
            argv, env=installed.env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        return done.stdout.strip() == "yes"

    assert may("create", "pods", installed.boxes)
    assert may("create", "pods", installed.boxes, "exec")
    for verb, what in (("get", "secrets"), ("create", "networkpolicies"), ("update", "pods")):
        assert not may(verb, what, installed.boxes)
    assert not may("get", "pods", installed.boxes, "log")
    assert not may("create", "serviceaccounts", installed.boxes, "token")
    assert not may("create", "pods", installed.namespace)
    assert not may("get", "secrets", installed.namespace)
    assert may("list", "nodes", installed.namespace)  # which of them have user namespaces
    assert not may("patch", "nodes", installed.namespace)
    assert not may("list", "pods", "kube-system")


def test_its_doctor_misses_no_right(installed: Installed) -> None:
    argv = ["kubectl", "--namespace", installed.namespace, "exec", "deployment/hutch", "--",
            "hutch", "doctor", "--backend", "kubernetes", "--json"]  # fmt: skip
    done = subprocess.run(
        argv, env=installed.env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    layers = {layer["name"]: layer for layer in json.loads(done.stdout)["layers"]}
    for name in ("cluster", "rights", "rights on network", "box"):
        assert layers[name]["status"] == "active", layers[name]


def test_a_role_that_lacks_a_verb_is_told_to_the_client(installed: Installed) -> None:
    api = "/apis/rbac.authorization.k8s.io/v1"
    path = f"{api}/namespaces/{installed.boxes}/roles/hutch"
    role = ask(installed.cluster, "GET", path)
    whole = json.dumps(role)
    for rule in role["rules"]:
        if rule["resources"] == ["pods"]:
            rule["verbs"].remove("create")
    with installed.reached() as url:
        ask(installed.cluster, "PUT", path, role)
        try:
            with pytest.raises(BackendUnavailable, match="allow the verb 'create' for pods"):
                Sandbox.create(url=url, api_key=installed.key(), image=f"{BUSYBOX}:latest")
        finally:
            now = ask(installed.cluster, "GET", path)
            ask(installed.cluster, "PUT", path, {**now, "rules": json.loads(whole)["rules"]})


@contextlib.contextmanager
def second_claim(installed: Installed) -> Iterator[str]:
    """A claim of boxes on what the server has, as two volumes of one share would be."""
    claims = f"/api/v1/namespaces/{installed.boxes}/persistentvolumeclaims"
    volume = ask(installed.cluster, "GET", f"{PERSISTENT}/{installed.namespace}-hutch")
    name = f"{installed.namespace}-again"
    kept = ("capacity", "accessModes", "persistentVolumeReclaimPolicy", "local", "nodeAffinity")
    spec = {field: volume["spec"][field] for field in kept}
    wanted = {
        "accessModes": spec["accessModes"],
        "storageClassName": "",
        "volumeName": name,
        "resources": {"requests": spec["capacity"]},
    }
    ask(installed.cluster, "POST", PERSISTENT, {"metadata": {"name": name}, "spec": spec})
    try:
        ask(installed.cluster, "POST", claims, {"metadata": {"name": name}, "spec": wanted})
        try:
            yield name
        finally:
            ask(installed.cluster, "DELETE", f"{claims}/{name}")
    finally:
        ask(installed.cluster, "DELETE", f"{PERSISTENT}/{name}")


def test_boxes_have_workspaces_on_a_volume_that_both_namespaces_have(installed: Installed) -> None:
    names = ("HUTCH_KUBERNETES_VOLUME_CLAIM", "HUTCH_KUBERNETES_VOLUME_FOLDER")
    set_env = ("set", "env", "deployment/hutch")
    with second_claim(installed) as claim:
        values = (claim, "/data")
        set_them = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        installed.kubectl(*set_env, *set_them)
        installed.roll_out()
        key = installed.key()
        with installed.reached() as url:
            given = {
                "url": url, "api_key": key, "image": f"{BUSYBOX}:latest", "workspace_id": "thesis",
            }  # fmt: skip
            with Sandbox.create(**given) as box, Sandbox.create(**given) as other:
                box.shell.run("umask 077; mkdir sub; echo x > sub/file", check=True)
                assert other.shell.run("cat sub/file; ls -A /workspace").stdout == "x\nsub\n"
            thesis = Workspace("thesis", url=url, api_key=key)
            assert thesis.files.read("sub/file") == "x\n" and (thesis.info().size or 0) > 0
            thesis.remove()
            assert not list((installed.folder / "hutch/hutch/workspaces").glob("*/thesis"))
            installed.kubectl(*set_env, *(f"{name}-" for name in names))
        installed.roll_out()
        assert wait_for(lambda: not installed.pods(), SECONDS)


def test_a_session_lives_through_an_upgrade_and_its_rollback(installed: Installed) -> None:
    old, new = installed.images
    key = installed.key()
    with installed.reached() as url:
        box = Sandbox.create(url=url, api_key=key, image=f"{BUSYBOX}:latest", ttl=1200)
        box.shell.run("cd /tmp; STATE=kept; sleep 1000 & echo $! > pid")
    [pod] = installed.pods()
    before = installed.server()["metadata"]["uid"]

    def check_it_goes_on() -> None:
        installed.roll_out()
        with installed.reached() as url:
            again = Sandbox.connect(box.id, url=url, api_key=key)
            said = again.shell.run('echo $STATE $PWD; kill -0 "$(cat pid)" && echo runs').stdout
            assert said == "kept /tmp\nruns\n"
        assert [each["metadata"]["uid"] for each in installed.pods()] == [pod["metadata"]["uid"]]

    manifests = installed.manifests(new)
    installed.run("kubectl", "apply", "--filename=-", input=manifests)
    check_it_goes_on()
    upgraded = installed.server()
    assert upgraded["spec"]["containers"][0]["image"] == new
    assert upgraded["metadata"]["uid"] != before

    installed.kubectl("rollout", "undo", "deployment/hutch")
    check_it_goes_on()
    assert installed.server()["spec"]["containers"][0]["image"] == old
    with installed.reached() as url:
        Sandbox.connect(box.id, url=url, api_key=key).close()
    assert wait_for(lambda: not installed.pods(), SECONDS)


def test_nothing_is_left_of_what_is_deleted(installed: Installed) -> None:
    with installed.reached() as url:
        Sandbox.create(url=url, api_key=installed.key(), image=f"{BUSYBOX}:latest", ttl=1200)
    manifests = installed.manifests(installed.images[0])
    installed.run("kubectl", "delete", "--filename=-", input=manifests)
    for name in (installed.namespace, installed.boxes):
        assert installed.cluster.request("GET", f"/api/v1/namespaces/{name}")[0] == 404


def test_servers_share_a_session_and_one_may_go_at_any_time(
    cluster: Cluster, images: tuple[str, str], tmp_path: Path
) -> None:
    with installation(cluster, images, tmp_path, replicas=2) as made:
        key = made.key()
        with made.reached("pod/hutch-0") as url:
            box = Sandbox.create(url=url, api_key=key, image=f"{BUSYBOX}:latest", ttl=1200)
            box.shell.run("cd /tmp; STATE=kept")

        def check_it_goes_on(server: str) -> None:
            with made.reached(f"pod/{server}") as url:
                again = Sandbox.connect(box.id, url=url, api_key=key)
                assert again.shell.run("echo $STATE $PWD").stdout == "kept /tmp\n"

        check_it_goes_on("hutch-1")  # which asks the other one
        made.kubectl("delete", "pod", "hutch-0", "--grace-period=1", "--wait=false")
        check_it_goes_on("hutch-1")
        made.roll_out()
        check_it_goes_on("hutch-0")
        made.run("kubectl", "apply", "--filename=-", input=made.manifests(images[1]))
        made.roll_out()
        check_it_goes_on("hutch-0")
        assert len(made.pods()) == 1
        with made.reached("pod/hutch-1") as url:
            Sandbox.connect(box.id, url=url, api_key=key).close()
        assert wait_for(lambda: not made.pods(), SECONDS)
