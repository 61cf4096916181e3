"""Boxes in a real cluster: what is theirs alone, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.cluster import Cluster
from must_work import need

from cluster_of_tests import ask
from docker_of_tests import BUSYBOX, DEBIAN
from enforcer_of_tests import enforced
from hutch import Sandbox, wire
from hutch.backends.base import Spec
from hutch.backends.kubernetes import KubernetesBackend, box, pod
from hutch.backends.kubernetes.cluster import Pod
from hutch.engine.link import Link
from hutch.errors import BackendUnavailable, BoxLost, Conflict, NoCapacity, StartFailed
from hutch.testing.contract import running, sh
from hutch.types import Report, Status
from kubernetes_of_tests import Boxes, removed
from kubernetes_of_tests import boxes as boxes
from kubernetes_of_tests import with_runtime as with_runtime

RUNTIMES = "/apis/node.k8s.io/v1/runtimeclasses"
SMALL = Spec(image=f"{BUSYBOX}:latest")
PYTHON = Spec(image=f"{DEBIAN}:latest")
SECONDS = 120


def with_backend(
    boxes: Boxes, work: Callable[[KubernetesBackend], Awaitable[None]], **more: str
) -> None:
    async def main() -> None:
        async with asyncio.timeout(SECONDS):
            backend = boxes.backend(**more)
            try:
                await work(backend)
            finally:
                await backend.close()

    asyncio.run(main())


def runtime_class(name: str) -> dict[str, object]:
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": name},
        "handler": "runsc",
    }


# --- what a box is ------------------------------------------------------------------------------


def test_programs_get_the_variables_of_their_image_and_none_of_the_cluster(boxes: Boxes) -> None:
    async def work(backend: KubernetesBackend) -> None:
        async with running(backend, PYTHON) as (_, link):
            _, found = await sh(link, "env; cat /etc/passwd; hostname")
            lines = found.decode().splitlines()
            assert "LANG=C.UTF-8" in lines and "HOME=/home/user" in lines and "box" in lines
            others = ("KUBERNETES_", "LD_", "GLIBC_", "HOSTNAME")
            assert not [line for line in lines if line.startswith(others)]
            assert (await sh(link, "ls /var/run/secrets"))[0]

    with_backend(boxes, work)


def test_what_is_limited_ends_the_program_and_not_the_box(boxes: Boxes) -> None:
    async def work(backend: KubernetesBackend) -> None:
        async with running(backend, SMALL) as (_, link):
            code, out = await sh(link, "head -c 700m /dev/zero > /workspace/x 2>&1; ls -s | wc -l")
            assert code == 0 and b"2\n" in out
            assert await sh(link, "rm x; dd if=/dev/zero of=/new 2>&1; touch /etc/x") == (
                1,
                b"dd: can't open '/new': Read-only file system\n"
                b"touch: /etc/x: Read-only file system\n",
            )
            # More memory than it has: the program is killed, and the next one runs.
            code, _ = await sh(link, "tail -c 3g /dev/zero | tail -c 1")
            assert await sh(link, "echo on") == (0, b"on\n")

    with_backend(boxes, work)


def test_scopes_have_boxes_of_one_name_and_do_not_see_each_others(boxes: Boxes) -> None:
    async def work(backend: KubernetesBackend) -> None:
        other = boxes.backend()
        try:
            await backend.start(SMALL, "-same-")
            await other.start(SMALL, "-same-")
            assert await backend.list() == await other.list() == ["-same-"]
            with pytest.raises(Conflict):
                await other.start(SMALL, "-same-")
            await other.close()
            assert await backend.list() == ["-same-"]
        finally:
            await other.close()

    with_backend(boxes, work)


def test_a_pod_that_is_deleted_takes_its_box_along(boxes: Boxes) -> None:
    async def work(backend: KubernetesBackend) -> None:
        made = await backend.start(SMALL)
        link = await Link.open(await made.connect())
        async with link.call(wire.Exec(["sh", "-c", "echo runs; sleep 1000"])) as call:
            await anext(call)
            (found,) = boxes.pods()
            path = f"{boxes.path}/pods/{found['metadata']['name']}"
            await asyncio.to_thread(ask, boxes.cluster, "DELETE", path)
            with pytest.raises(BoxLost):
                while True:
                    await anext(call)
        await link.close()
        await made.kill()
        with pytest.raises(BoxLost):
            await backend.adopt(made.id)

    with_backend(boxes, work)


# A host that tells its guest that it may be alone for a moment only.
HOST = """
import asyncio, sys
from hutch import factory
from hutch.backends.base import Spec
from hutch.backends.kubernetes import box
from hutch.types import ClusterSettings

box.ALONE, box.TELL = 1.0, 0.2
async def main():
    settings = ClusterSettings(namespace=sys.argv[1], runtime_image=sys.argv[2])
    backend = factory.backend("kubernetes", cluster=settings)
    await backend.start(Spec(image=sys.argv[3]))
    print("up", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_of_a_host_that_is_killed_nothing_is_left(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.backends.kubernetes.LEFT", -SECONDS)
    settings = boxes.settings()
    argv = [settings.namespace, settings.runtime_image, SMALL.image]
    with subprocess.Popen([sys.executable, "-c", HOST, *argv], stdout=subprocess.PIPE) as host:
        assert host.stdout and host.stdout.readline() == b"up\n"
        (left,) = boxes.pods()
        host.send_signal(signal.SIGKILL)
    name = left["metadata"]["name"]

    async def work(backend: KubernetesBackend) -> None:
        while True:
            (found,) = (p for p in await asyncio.to_thread(boxes.pods))
            if found["status"]["phase"] == "Succeeded":
                break
            await asyncio.sleep(0.1)
        await (await backend.start(SMALL)).kill()  # a start removes what has ended
        while any(p["metadata"]["name"] == name for p in await asyncio.to_thread(boxes.pods)):
            await asyncio.sleep(0.1)

    with_backend(boxes, work)


# --- what goes wrong ----------------------------------------------------------------------------


def test_an_image_of_ours_that_cannot_be_pulled_says_which_setting_is_wrong(boxes: Boxes) -> None:
    async def work(backend: KubernetesBackend) -> None:
        with pytest.raises(BackendUnavailable, match="HUTCH_KUBERNETES_RUNTIME_IMAGE"):
            await backend.start(SMALL)

    with_backend(boxes, work, runtime_image="no-such-runtime:1")
    with_backend(boxes, work, runtime_image="")
    assert not boxes.pods()


def test_a_full_quota_is_said_with_the_words_of_the_cluster(boxes: Boxes) -> None:
    async def work(backend: KubernetesBackend) -> None:
        with pytest.raises(NoCapacity, match=r"quota of namespace.*pods=1, used: pods=0, limited"):
            await backend.start(SMALL)

    body: dict[str, object] = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    with removed(boxes, f"{boxes.path}/resourcequotas", body):
        while True:  # it is in force once the cluster has counted
            quota = ask(boxes.cluster, "GET", f"{boxes.path}/resourcequotas/none")
            if "used" in quota.get("status", {}):
                break
        with_backend(boxes, work)


def test_without_a_node_that_has_room_it_says_so(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "NO_ROOM", 2.0)
    monkeypatch.setattr("os.uname", _of_another_machine())

    async def work(backend: KubernetesBackend) -> None:
        with pytest.raises(NoCapacity, match="no node of the cluster can take the box"):
            await backend.start(SMALL)

    with_backend(boxes, work)
    assert not boxes.pods()


def _of_another_machine() -> Callable[[], os.uname_result]:
    own = os.uname()
    other = os.uname_result((own.sysname, own.nodename, own.release, own.version, "s390x"))
    return lambda: other


def test_a_guest_that_cannot_start_says_which_step_failed(boxes: Boxes) -> None:
    async def work(backend: KubernetesBackend) -> None:
        with pytest.raises(StartFailed, match="private folder"):
            await backend.start(SMALL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pod, "PRIVATE", "/proc/hutch")
        with_backend(boxes, work)
    assert not boxes.pods()


@contextmanager
def as_somebody(
    boxes: Boxes, folder: Path, *rules: tuple[str, tuple[str, ...]]
) -> Iterator[Callable[[], None]]:
    """KUBECONFIG is that of a service account which may do this and no more.

    Gives what revokes its token.
    """
    name = "limited"
    account: dict[str, object] = {"metadata": {"name": name}}
    role = {
        "metadata": {"name": name},
        "rules": [
            {
                "apiGroups": ["networking.k8s.io" if "policies" in what else ""],
                "resources": [what],
                "verbs": verbs,
            }
            for what, verbs in rules
        ],
    }
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": boxes.namespace}],
    }
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{boxes.namespace}"
    with (
        removed(boxes, f"{boxes.path}/serviceaccounts", account),
        removed(boxes, f"{rbac}/roles", role),
        removed(boxes, f"{rbac}/rolebindings", binding),
    ):
        secret: dict[str, object] = {"metadata": {"generateName": "token-"}}
        kept = ask(boxes.cluster, "POST", f"{boxes.path}/secrets", secret)["metadata"]["name"]
        # It is valid as long as this is there.
        bound = {"boundObjectRef": {"kind": "Secret", "apiVersion": "v1", "name": kept}}
        path = f"{boxes.path}/serviceaccounts/{name}/token"
        token = ask(boxes.cluster, "POST", path, {"spec": bound})["status"]["token"]
        with _with_token(boxes.cluster, folder, token):
            yield lambda: ask(boxes.cluster, "DELETE", f"{boxes.path}/secrets/{kept}")


@contextmanager
def _with_token(cluster: Cluster, folder: Path, token: str) -> Iterator[None]:
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    for user in content["users"]:
        user["user"] = {"token": token}
    file = folder / "kubeconfig"
    file.write_text(json.dumps(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(file))
        yield


ALL = {
    "pods": ("create", "get", "list", "watch", "delete"),
    "pods/exec": ("create", "get"),
    "networkpolicies": ("get", "create"),
}


@pytest.mark.parametrize(
    ("what", "verb"),
    [
        ("pods", "create"),
        ("pods", "list"),
        ("pods", "watch"),
        ("pods/exec", "create"),
        ("pods/exec", "get"),
    ],
)
def test_a_role_that_lacks_one_verb_is_told_which(
    boxes: Boxes, tmp_path: Path, what: str, verb: str
) -> None:
    rules = {**ALL, what: tuple(each for each in ALL[what] if each != verb)}

    async def work(backend: KubernetesBackend) -> None:
        with pytest.raises(BackendUnavailable, match=f"has to allow the verb '{verb}' for {what}"):
            await backend.start(SMALL)
        report = await backend.report()
        rights = next(layer for layer in report.layers if layer.name == "rights")
        assert rights.status is Status.MISSING and f"{verb} {what}" in rights.why
        assert report.grade == "none"

    with as_somebody(boxes, tmp_path, *rules.items()):
        with_backend(boxes, work)
    remove_pods(boxes)  # it could not watch them end


def test_who_may_not_delete_pods_is_told_and_they_end_by_themselves(
    boxes: Boxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "ALONE", 1.0)
    monkeypatch.setattr(box, "TELL", 0.2)
    rules = {**ALL, "pods": ("create", "get", "list", "watch")}

    async def work(backend: KubernetesBackend) -> None:
        async with asyncio.timeout(SECONDS):
            made = await backend.start(SMALL)
            with pytest.raises(BackendUnavailable, match="allow the verb 'delete' for pods"):
                await made.kill()
            while any(p["status"]["phase"] == "Running" for p in boxes.pods()):
                await asyncio.sleep(0.1)

    with as_somebody(boxes, tmp_path, *rules.items()):
        with_backend(boxes, work)
    remove_pods(boxes)


def test_who_may_not_get_pods_is_told_when_a_box_is_adopted(boxes: Boxes, tmp_path: Path) -> None:
    async def work(backend: KubernetesBackend) -> None:
        with pytest.raises(BackendUnavailable, match="allow the verb 'get' for pods"):
            await backend.adopt("one")

    with as_somebody(boxes, tmp_path, *{**ALL, "pods": ("list", "watch")}.items()):
        with_backend(boxes, work)


def remove_pods(boxes: Boxes) -> None:
    """Those that a test had no right to remove."""
    for left in boxes.pods():
        boxes.cluster.request("DELETE", f"{boxes.path}/pods/{left['metadata']['name']}")


def test_with_the_least_rights_boxes_work_and_say_what_is_not_known(
    boxes: Boxes, tmp_path: Path
) -> None:
    rules = {name: verbs for name, verbs in ALL.items() if name != "networkpolicies"}

    async def work(backend: KubernetesBackend) -> None:
        async with running(backend, SMALL) as (made, link):
            assert await sh(link, "echo hi") == (0, b"hi\n")
            network, users = made.degraded
            assert network == "network: we may not see or make a NetworkPolicy, so it may be open"
            assert users.endswith("(we may not list nodes, which tell whether they can)")

    with as_somebody(boxes, tmp_path, *rules.items()):
        with_backend(boxes, work)


def test_a_token_that_is_not_valid_is_said(boxes: Boxes, tmp_path: Path) -> None:
    async def work(backend: KubernetesBackend) -> None:
        with pytest.raises(BackendUnavailable, match=r"does not know us.*expired"):
            await backend.start(SMALL)
        report = await backend.report()
        assert report.grade == "none" and "does not know us" in report.layers[0].why

    with _with_token(boxes.cluster, tmp_path, "nonsense"):
        with_backend(boxes, work)


def test_a_token_that_is_revoked_is_said_and_what_runs_goes_on(
    boxes: Boxes, tmp_path: Path
) -> None:
    with as_somebody(boxes, tmp_path, *ALL.items()) as revoke:

        async def work(backend: KubernetesBackend) -> None:
            made = await backend.start(SMALL)
            link = await Link.open(await made.connect())
            revoke()
            with pytest.raises(BackendUnavailable, match=r"does not know us.*expired"):
                while True:  # the cluster remembers for some seconds that it was valid
                    await backend.list()
                    await asyncio.sleep(0.2)
            assert await sh(link, "echo on") == (0, b"on\n")
            await link.close()
            with pytest.raises(BackendUnavailable, match="does not know us"):
                await made.kill()

        with_backend(boxes, work)
    remove_pods(boxes)


def test_a_cluster_that_is_not_there_is_said(boxes: Boxes, tmp_path: Path) -> None:
    content = yaml.safe_load(boxes.cluster.kubeconfig.read_text())
    content["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(content))

    async def work(backend: KubernetesBackend) -> None:
        with pytest.raises(BackendUnavailable, match=r"https://127.0.0.1:1 \(context .* does not"):
            await backend.start(SMALL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(file))
        with_backend(boxes, work)


# --- as people use it ---------------------------------------------------------------------------


@pytest.fixture
def settings_of_users(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = boxes.settings()
    monkeypatch.setenv("HUTCH_KUBERNETES_NAMESPACE", settings.namespace)
    monkeypatch.setenv("HUTCH_KUBERNETES_RUNTIME_IMAGE", settings.runtime_image)


@pytest.mark.usefixtures("settings_of_users")
def test_a_sandbox_does_all_that_sandboxes_do() -> None:
    with Sandbox.create(backend="kubernetes", image=PYTHON.image) as made:
        assert made.info.backend == "kubernetes" and made.info.isolation == "ns"
        made.shell.run("cd /tmp; export WORD=kept")
        assert made.shell.run("echo $WORD $PWD").stdout == "kept /tmp\n"
        made.files.write("/workspace/data.bin", bytes(range(256)) * 1000)
        assert made.files.read("/workspace/data.bin", "bytes") == bytes(range(256)) * 1000
        made.run_code("x = 6")
        assert made.run_code("x * 7").text == "42"


HUNGRY = "python3 -c 'x = bytearray(10**9)'"


@pytest.mark.usefixtures("settings_of_users")
def test_a_box_tells_what_it_uses_and_which_command_lacked_memory() -> None:
    with Sandbox.create(backend="kubernetes", image=PYTHON.image, memory="128m") as made:
        first = made.commands.run(f"{HUNGRY}; echo next $?")
        assert (first.exit_code, first.stdout, first.oom) == (0, "next 137\n", True)
        assert not made.commands.run("exit 1").oom
        assert made.shell.run(HUNGRY).oom and not made.shell.run("true").oom
        done = made.run_code("x = bytearray(10**9)")
        assert done.oom and done.died and done.died.startswith("out of memory")
        stats = made.stats()
        assert stats.memory and stats.pids and stats.cpu_seconds and (stats.oom_kills or 0) >= 3


# What a program of a box can try to be taken for a relay of `door`. It prints what it is answered.
POSE = r"""
import ctypes, os, socket, struct
def attempt(name, ids):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    try:
        sock.connect("\0hutch")
        who = ids and struct.pack("iII", os.getpid(), *ids)
        sock.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)] if who else [])
        sock.send(b"c")
        print(name, sock.recv(1))
    except OSError as exc:
        print(name, "refused", exc)
attempt("itself", None)
attempt("another", (65533, 65533))
if not os.fork():
    if ctypes.CDLL(None).unshare(0x10000000):
        os._exit(0)
    own = os.getuid(), os.getgid()
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"65533 {own[0]} 1")
    open("/proc/self/gid_map", "w").write(f"65533 {own[1]} 1")
    attempt("mapped", (65533, 65533))
    os._exit(0)
os.wait()
"""


async def check_door(link: Link) -> None:
    """Nobody in the box is taken for a relay."""
    async with link.call(wire.Exec(["python3", "-c", POSE])) as call:
        said = b"".join([event.data async for event in call if isinstance(event, wire.Data)])
    answers = said.decode().splitlines()
    assert [answer.partition(" ")[0] for answer in answers[:2]] == ["itself", "another"], answers
    assert all("refused" in answer or "b''" in answer for answer in answers), answers
    assert await sh(link, "echo on") == (0, b"on\n")


def test_a_program_of_a_box_cannot_pose_as_a_relay(boxes: Boxes) -> None:
    async def work(backend: KubernetesBackend) -> None:
        async with running(backend, PYTHON) as (_, link):
            await check_door(link)

    with_backend(boxes, work)


@pytest.fixture
def gvisor(boxes: Boxes) -> Iterator[str]:
    """The name of a RuntimeClass that is gVisor."""
    if not shutil.which("runsc"):
        need("runsc", "gVisor is not installed (Debian: runsc)")
    body = runtime_class(f"gvisor-{boxes.namespace}")
    with removed(boxes, RUNTIMES, body):
        yield f"gvisor-{boxes.namespace}"


def test_in_gvisor_a_box_has_another_kernel_and_the_grade_says_so(
    boxes: Boxes, gvisor: str
) -> None:
    async def work(backend: KubernetesBackend) -> None:
        async with running(backend, replace(PYTHON, runtime=gvisor)) as (made, link):
            assert (made.isolation, made.runtime) == ("gvisor", gvisor)
            _, kernel = await sh(link, "uname -r")
            assert kernel.decode().strip() != os.uname().release
            await check_door(link)

    with_backend(boxes, work)


@pytest.mark.usefixtures("settings_of_users")
def test_who_asks_for_gvisor_gets_it_or_no_box(gvisor: str) -> None:
    wanted = {"backend": "kubernetes", "image": PYTHON.image, "min_isolation": "gvisor"}
    with Sandbox.create(**wanted, runtime=gvisor) as made:
        assert made.info.isolation == "gvisor"
        assert made.run_code("6 * 7").text == "42"
    with pytest.raises(BackendUnavailable, match="name of a RuntimeClass"):
        Sandbox.create(**wanted)


# --- user namespaces ------------------------------------------------------------------------------


def ids_on_the_node(boxes: Boxes) -> str:
    """The user ids of the guest of the only box, as its node sees them."""
    (found,) = boxes.pods()
    (status,) = found["status"]["containerStatuses"]
    group = status["containerID"].removeprefix("containerd://")
    (procs,) = Path("/sys/fs/cgroup").glob(f"memory/**/{group}/cgroup.procs")
    pid = procs.read_text().split()[0]
    return Path(f"/proc/{pid}/status").read_text().partition("\nUid:\t")[2].partition("\n")[0]


def test_where_the_node_can_no_user_of_a_box_is_one_of_the_node(boxes: Boxes) -> None:
    async def work(backend: KubernetesBackend) -> None:
        async with running(backend, PYTHON) as (made, link):
            assert not [said for said in made.degraded if said.startswith("user namespaces")]
            assert await sh(link, "id -u; id -un; cat /proc/self/uid_map | wc -l") == (
                0,
                b"1000\nuser\n1\n",
            )
            (on_node,) = set((await asyncio.to_thread(ids_on_the_node, boxes)).split())
            assert int(on_node) >= 65_536
            # All folders of a box are its user's there, too.
            assert (await sh(link, "touch /workspace/x /tmp/x ~/x /run/x /dev/shm/x"))[0] == 0
            await check_door(link)

    with_backend(boxes, work)
    with_backend(boxes, work, bundle="copy")


@pytest.mark.parametrize(
    ("more", "change", "why"),
    [
        ({"user_namespaces": "off"}, {}, "kubernetes.user_namespaces is off"),
        ({}, {"user": "70000"}, "they have no uid 70000"),
    ],
)
def test_a_box_without_a_namespace_of_users_says_why(
    boxes: Boxes, more: dict[str, str], change: dict[str, str], why: str
) -> None:
    async def work(backend: KubernetesBackend) -> None:
        async with running(backend, replace(SMALL, **change)) as (made, link):
            (said,) = (said for said in made.degraded if said.startswith("user namespaces"))
            assert why in said
            assert await sh(link, "cat /proc/self/uid_map | tr -s ' '") == (0, b" 0 0 4294967295\n")

    with_backend(boxes, work, **more)


def test_a_node_that_does_not_begin_a_box_with_one_is_not_asked_again(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "NO_ROOM", 0.1)
    asked: list[Pod] = []

    def lacks_sandbox(pod: Pod) -> bool:
        asked.append(pod)
        return True

    monkeypatch.setattr(box, "_lacks_sandbox", lacks_sandbox)

    async def work(backend: KubernetesBackend) -> None:
        for _ in range(2):
            async with running(backend, SMALL) as (made, link):
                (said,) = (said for said in made.degraded if said.startswith("user namespaces"))
                assert "its node did not begin it" in said
                assert await sh(link, "id -u | wc -c") == (0, b"10\n")
        assert len(asked) == 1

    with_backend(boxes, work)


def test_a_runtime_without_them_is_named_where_they_must_be_used(
    boxes: Boxes, gvisor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "NO_ROOM", 3.0)

    async def work(backend: KubernetesBackend) -> None:
        # It may not see what the RuntimeClass is, and so takes it for one like the default.
        with pytest.raises(StartFailed, match=r"can be off.*runsc.* not support user namespaces"):
            await backend.start(replace(SMALL, runtime=gvisor))

    rules = {**ALL, "events": ("list",)}
    with as_somebody(boxes, tmp_path, *rules.items()):
        with_backend(boxes, work, user_namespaces="on")
    assert not boxes.pods()


def test_root_of_a_box_is_nobody_on_its_node(boxes: Boxes) -> None:
    async def work(backend: KubernetesBackend) -> None:
        async with running(backend, replace(SMALL, user="0", relax=("user",))) as (_, link):
            assert await sh(link, "id -u") == (0, b"0\n")
            assert int((await asyncio.to_thread(ids_on_the_node, boxes)).split()[0]) >= 65_536

    with admitting(boxes, "baseline"):
        with_backend(boxes, work)


@pytest.mark.usefixtures("settings_of_users")
def test_hutch_run_and_doctor_name_the_backend(boxes: Boxes) -> None:
    def hutch(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "hutch", *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)

    ran = hutch("run", "--backend", "kubernetes", "--image", SMALL.image, "--", "sh", "-c",
                "echo from $0; exit 7", "box")  # fmt: skip
    assert (ran.stdout, ran.returncode) == ("from box\n", 7), ran.stderr
    report: Any = json.loads(hutch("doctor", "--backend", "kubernetes", "--json").stdout)
    layers = {layer["name"]: layer for layer in report["layers"]}
    for name in ("cluster", "rights", "box", "user", "capabilities", "system calls",
                 "root file system", "memory", "service account"):  # fmt: skip
        assert layers[name]["status"] == "active", layers[name]
    # The network plugin of this cluster enforces no policies, and it must not pass for one.
    for name in ("network", "network inwards"):
        assert layers[name]["status"] == "missing", layers[name]
    assert report["grade"] == "none"
    assert not boxes.pods()


def report_of(boxes: Boxes, **more: str) -> Report:
    reports: list[Report] = []

    async def work(backend: KubernetesBackend) -> None:
        reports.append(await backend.report())

    with_backend(boxes, work, **more)
    assert not boxes.pods()
    return reports[0]


def test_where_policies_are_enforced_the_doctor_has_seen_that_they_are(boxes: Boxes) -> None:
    with enforced(boxes):
        report = report_of(boxes)
    layers = {layer.name: layer for layer in report.layers}
    for name in ("network", "network inwards"):
        assert layers[name].status is Status.ACTIVE, layers[name]
    # This cluster lets a Pod reach its node, as many do, and that is where its API server is.
    assert layers["network to nodes"].status is Status.DEGRADED
    assert report.grade == "ns"


def test_where_they_are_enforced_in_one_direction_only_it_says_in_which(boxes: Boxes) -> None:
    with enforced(boxes, ["Egress"]):
        report = report_of(boxes)
    layers = {layer.name: layer for layer in report.layers}
    assert layers["network"].status is Status.ACTIVE
    assert layers["network inwards"].status is Status.MISSING
    assert report.grade == "none"


def test_the_doctor_says_what_else_it_found(boxes: Boxes) -> None:
    named = runtime_class(f"sandboxed-{boxes.namespace}")
    with removed(boxes, RUNTIMES, named), enforced(boxes):  # which needs no more tries
        report = report_of(boxes, bundle="copy")
    layers = {layer.name: layer for layer in report.layers}
    assert f"sandboxed-{boxes.namespace} (handler runsc): grade gvisor" in layers["runtimes"].why
    assert layers["box"].why.endswith("an init container that copies it")
    for name in ("PodSecurity", "sizes", "lack of memory", "user namespaces"):
        assert layers[name].status is Status.ACTIVE, layers[name]


def test_the_doctor_says_how_the_runtime_arrives_where_image_volumes_are_dropped(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(sent: dict[str, object], created: Pod) -> None:
        if '"reference":' in json.dumps(sent):
            raise box.NoImageVolumes("the cluster has no image volumes")

    monkeypatch.setattr(box, "_check_kept", drop)
    with enforced(boxes):
        layers = {layer.name: layer for layer in report_of(boxes).layers}
    assert layers["box"].why.endswith("an init container that copies it")


@contextmanager
def admitting(boxes: Boxes, level: str) -> Iterator[None]:
    path, label = f"/api/v1/namespaces/{boxes.namespace}", "pod-security.kubernetes.io/enforce"

    def enforce(level: str) -> None:
        kind = "application/merge-patch+json"
        body = {"metadata": {"labels": {label: level}}}
        assert boxes.cluster.request("PATCH", path, body, kind=kind)[0] == 200

    enforce(level)
    try:
        yield
    finally:
        enforce("restricted")


@pytest.mark.parametrize(
    ("level", "what"), [("baseline", "that is not confined"), ("privileged", "that has all rights")]
)
def test_a_namespace_that_admits_more_than_boxes_need_is_found_out(
    boxes: Boxes, tmp_path: Path, level: str, what: str
) -> None:
    async def work(backend: KubernetesBackend) -> None:
        layers = {layer.name: layer for layer in (await backend.report()).layers}
        assert layers["PodSecurity"].status is Status.DEGRADED
        assert what in layers["PodSecurity"].why and boxes.namespace in layers["PodSecurity"].fix

    # Without the right to start programs, nothing else is looked at.
    rules = {**ALL, "pods/exec": ("get",)}
    with admitting(boxes, level), as_somebody(boxes, tmp_path, *rules.items()):
        with_backend(boxes, work)
