"""Workspaces and sleeping sessions of a server whose boxes are Pods, on a volume of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster_of_tests import ask
from daemon_of_tests import HUTCH, KEY, Daemon, wait_for
from docker_of_tests import DEBIAN
from hutch import Conflict, HutchError, NotFound, Sandbox, Workspace
from hutch.backends.base import Spec
from hutch.backends.contained import OWN_OF_FEW
from hutch.backends.kubernetes import box as box_module
from hutch.backends.kubernetes import doctor
from hutch.errors import BackendUnavailable, NoCapacity, StartFailed
from hutch.types import Layer, Mount, Status
from kubernetes_of_tests import Boxes, removed
from kubernetes_of_tests import boxes as boxes
from kubernetes_of_tests import with_runtime as with_runtime

CLAIM = "hutch-data"
SIZE = {"storage": "1Gi"}
ORDINARY = 1234


@contextlib.contextmanager
def claim(boxes: Boxes, name: str, folder: Path, **spec: object) -> Iterator[None]:
    """A claim whose volume is a folder of this machine, as every node of the cluster sees it."""
    modes = spec.pop("accessModes", ["ReadWriteMany"])
    volume = f"hutch-test-{secrets.token_hex(4)}"
    of_volume = {
        "capacity": SIZE,
        "accessModes": modes,
        "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": str(folder), "type": "Directory"},
        "claimRef": {"namespace": boxes.namespace, "name": name},
        **spec,
    }
    with (
        removed(
            boxes,
            "/api/v1/persistentvolumes",
            {"metadata": {"name": volume}, "spec": of_volume},
        ),
        unbound_claim(boxes, name, volume, modes),
    ):
        path = f"{boxes.path}/persistentvolumeclaims/{name}"
        boxes.cluster.wait(
            "the claim", lambda: ask(boxes.cluster, "GET", path)["status"]["phase"] == "Bound"
        )
        yield


@contextlib.contextmanager
def unbound_claim(boxes: Boxes, name: str, volume: str, modes: object) -> Iterator[None]:
    spec = {
        "accessModes": modes,
        "storageClassName": "",
        "volumeName": volume,
        "resources": {"requests": SIZE},
    }
    path = f"{boxes.path}/persistentvolumeclaims"
    with removed(boxes, path, {"metadata": {"name": name}, "spec": spec}):
        yield


@dataclass
class Place:
    """A server whose data folder is on a claim."""

    daemon: Daemon
    boxes: Boxes
    data: Path

    def key(self, owner: str) -> str:
        return self.daemon.hutch("key", "create", "--owner", owner).stdout.split()[-1]

    def session(self, workspace: str, key: str = KEY, **more: Any) -> Sandbox:
        given = {"url": self.daemon.url, "api_key": key, "ttl": 600, **more}
        return Sandbox.create(workspace_id=workspace, **given)

    def workspace(self, name: str, key: str = KEY) -> Workspace:
        return Workspace(name, url=self.daemon.url, api_key=key)

    def folder(self, name: str, owner: str = "local") -> Path:
        return self.data / "workspaces" / owner / name

    def pods(self, path: str) -> list[Any]:
        """Those that have a folder of the claim."""
        return [pod for pod in self.boxes.pods() if path in self._mounted(pod)]

    def _mounted(self, pod: Any) -> list[str]:
        containers = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
        mounts = [mount for container in containers for mount in container["volumeMounts"]]
        return [mount.get("subPath") for mount in mounts if mount["name"] == "claim"]


def daemon(
    folder: Path,
    boxes: Boxes,
    *,
    claim: str = CLAIM,
    program: Sequence[str] = HUTCH,
) -> Daemon:
    settings = boxes.settings()
    return Daemon(
        folder,
        program=program,
        backend="kubernetes",
        default_image=f"{DEBIAN}:latest",
        kubernetes_namespace=settings.namespace,
        kubernetes_runtime_image=settings.runtime_image,
        kubernetes_volume_claim=claim,
        pool_enabled="false",
    )


@pytest.fixture(scope="module")
def place(boxes: Boxes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    data = tmp_path_factory.mktemp("volume") / "data"
    data.mkdir()
    with claim(boxes, CLAIM, data):
        with daemon(data, boxes) as running:
            yield Place(running, boxes, data)
        assert wait_for(lambda: not boxes.pods(), 60), "the claim must not be used any more"


def test_sessions_share_a_workspace_and_the_next_one_finds_it(place: Place) -> None:
    with place.session("shared") as one, place.session("shared") as two:
        one.shell.run("umask 077; mkdir deep; echo from one > deep/file", check=True)
        two.shell.run("cat deep/file; echo and two >> deep/file; id -u", check=True)
        assert one.files.read("/workspace/deep/file") == "from one\nand two\n"
        assert one.shell.run("id -u").stdout == two.shell.run("id -u").stdout
        assert "uid" in " ".join(one.info.degraded), "this user is not the box's own"
        with pytest.raises(Conflict, match="is used by session"):
            place.workspace("shared").remove()
    folder = place.folder("shared")
    uid = folder.stat().st_uid
    assert uid in OWN_OF_FEW and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.stat().st_uid for path in folder.rglob("*")} == {uid}
    with place.session("shared") as later:
        assert later.files.read("/workspace/deep/file") == "from one\nand two\n"
        later.shell.run("echo three >> deep/file && rm -r deep", check=True)


def test_files_of_a_workspace_are_read_and_written_without_a_session(place: Place) -> None:
    notes = place.workspace("notes")
    notes.files.write("today.md", "- water the plants\n")
    (pod,) = place.pods("workspaces/local/notes")
    image = place.boxes.settings().runtime_image
    assert pod["spec"]["containers"][0]["image"] == image, "which is on the node already"
    with place.session("notes") as box:
        box.shell.run("cat today.md && mkdir sub && echo more > sub/more.md", check=True)
        assert notes.files.read("sub/more.md") == "more\n"
        notes.files.write("sub/more.md", "less\n")
        assert box.shell.run("cat sub/more.md").stdout == "less\n"
    assert (notes.info().size or 0) > 0
    tar = io.BytesIO()
    notes.export(tar)
    copy = place.workspace("copy-of-notes")
    assert copy.import_(tar.getvalue()) >= 2
    assert copy.files.read("sub/more.md") == "less\n"
    copy.remove()
    assert not place.folder("copy-of-notes").exists()


def test_the_commands_for_workspaces_work(place: Place, tmp_path: Path) -> None:
    (tmp_path / "local.md").write_text("from here\n")

    def hutch(*words: str) -> str:
        ran = place.daemon.hutch("workspace", *words)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    hutch("cp", f"{tmp_path}/local.md", "papers:")
    assert "papers" in hutch("ls")
    assert hutch("cp", "papers:local.md", "-") == "from here\n"
    hutch("export", "papers", f"{tmp_path}/papers.tar")
    hutch("import", "again", f"{tmp_path}/papers.tar")
    assert hutch("cp", "again:local.md", "-") == "from here\n"
    hutch("rm", "papers", "again")
    assert "papers" not in hutch("ls")


def test_links_that_a_box_leaves_lead_the_next_one_nowhere(place: Place) -> None:
    place.workspace("secret").files.write("file", "of another workspace")
    attack = (
        "ln -s / top; ln -s ../secret other; ln -s ../../../run run; ln -s /workspace/../.. up;"
        "mkdir sub; mv sub old; ln -s ../secret sub;"
        'cd /; rmdir /workspace; python3 -c \'import os; os.rename("/workspace", "/tmp/w")\';'
        "ln -sfnT /etc /workspace"
    )
    with place.session("trap") as box:
        box.shell.run(attack)
        assert len(box.files.list("/workspace")) == 6, "it is still there"
    assert place.folder("trap").is_dir() and not place.folder("trap").is_symlink()
    with place.session("trap") as box:
        found = box.shell.run("cat sub/file other/file; ls run/ up/workspaces; ls -A top/").stdout
        assert "of another workspace" not in found and "hutch.db" not in found
        assert "workspace" in found.split(), "the top of a link is that of the box"
        mounted = box.shell.run("grep -c ' /workspace ' /proc/self/mountinfo").stdout
        assert mounted == "1\n"
        for name in ("sub/file", "other/file", "run/hutch.sock"):
            with pytest.raises(NotFound):
                place.workspace("trap").files.read(name)
    seen = [path for path in place.data.rglob("*") if path.name in ("top", "run", "other")]
    assert {path.parent for path in seen if path.is_symlink()} == {place.folder("trap")}


def test_an_owner_never_gets_the_workspace_of_another(place: Place) -> None:
    ada, bob = place.key("ada"), place.key("bob")
    with place.session("thesis", ada) as hers, place.session("thesis", bob) as his:
        hers.files.write("/workspace/file", "ada's")
        assert his.files.list("/workspace") == []
        assert hers.shell.run("id -u").stdout != his.shell.run("id -u").stdout
        for owner in ("ada", "bob"):
            assert len(place.pods(f"workspaces/{owner}/thesis")) == 1
    for name in ("../ada/thesis", "ada/thesis", "..", ".", "a/../../x", "thesis\n", "$(X)"):
        with pytest.raises(HutchError):
            place.session(name, bob)
    with pytest.raises(HutchError):
        Workspace("thesis", url=place.daemon.url, api_key=KEY).files.read("file")
    assert place.workspace("thesis", ada).files.read("file") == "ada's"


def test_a_sleeping_session_has_no_pod_and_wakes_under_the_next_server(place: Place) -> None:
    def bedrooms() -> list[Any]:
        return place.pods("workspaces/local/bedroom")

    box = place.session("bedroom")
    assert len(bedrooms()) == 1
    box.files.write("/workspace/file", "stays")
    box.shell.run("A='x y'; cd /tmp; echo mine > /home/user/own", check=True)
    box.run_code("x = [1, 2]\ny = x").check()
    report = box.hibernate()
    assert "files" in report.kept
    assert not bedrooms()
    assert (place.data / "sessions" / box.id).is_dir()
    place.daemon.crash()
    assert place.folder("bedroom").joinpath("file").read_text() == "stays"
    place.daemon.start()
    again = Sandbox.connect(box.id, url=place.daemon.url, api_key=KEY)
    assert again.info.status == "asleep" and not bedrooms()
    said = again.shell.run('echo "$A"; pwd; cat /workspace/file ~/own')
    assert said.stdout == "x y\n/tmp\nstaysmine\n" and said.woke
    assert again.run_code("y.append(3); x").text == "[1, 2, 3]"
    assert again.shell.run("echo more >> /workspace/file", check=True).exit_code == 0
    journal = place.daemon.hutch("logs", box.id).stdout
    assert all(word in journal for word in ("hibernate", "adopt", "wake", "x = [1, 2]"))
    again.close()
    assert not bedrooms()


def test_a_workspace_that_grows_over_its_quota_ends_its_session(place: Place) -> None:
    place.workspace("small").create(quota=1_000_000)
    box = place.session("small")
    box.shell.run("head -c 5000000 /dev/zero > large")
    assert wait_for(lambda: box.refresh().status == "destroyed", 60)
    assert "may have 1000000" in (box.info.why or "")
    with pytest.raises(HutchError, match="remove files"):
        place.session("small")
    place.workspace("small").files.remove("large")
    place.session("small").close()


def test_a_server_of_an_ordinary_user_has_workspaces_too(
    boxes: Boxes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As in a Pod that PodSecurity restricts, where nobody can give files away."""
    home = tmp_path_factory.mktemp("ordinary")
    (home / "data").mkdir(parents=True)
    shutil.copy(boxes.cluster.kubeconfig, home / "kubeconfig")
    for path in (home, *home.rglob("*")):
        os.chown(path, ORDINARY, ORDINARY)
    # It may read the Python of the tests, wherever that is, and change no file of others.
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    become = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups", *may_read]
    program = [*become, "env", f"HOME={home}", f"KUBECONFIG={home}/kubeconfig", *HUTCH]
    with (
        claim(boxes, "of-ordinary", home / "data"),
        daemon(home / "data", boxes, claim="of-ordinary", program=program) as running,
    ):
        given = {"url": running.url, "api_key": KEY, "ttl": 600, "workspace_id": "thesis"}
        with Sandbox.create(**given) as box:
            assert box.shell.run("id -u; mkdir -m 700 sub; echo x > sub/file").stdout == "1234\n"
            assert "user ids: uid 1234 is not the box's own" in box.info.degraded
            assert any("processes" in why for why in box.info.degraded)
        with Sandbox.create(**given) as box:
            assert box.shell.run("cat sub/file; echo y >> sub/file").stdout == "x\n"
        thesis = Workspace("thesis", url=running.url, api_key=KEY)
        assert thesis.files.read("sub/file") == "x\ny\n" and (thesis.info().size or 0) > 0
        thesis.remove()
        assert not (home / "data/workspaces/local/thesis").exists()


def test_the_doctor_says_whether_there_is_a_claim(boxes: Boxes, tmp_path: Path) -> None:
    async def layer(name: str) -> Layer:
        backend = boxes.backend(volume_claim=name)
        try:
            cluster = (await backend._reach()).cluster
            return await doctor._workspaces(cluster, name)
        finally:
            await backend.close()

    missing = asyncio.run(layer("nowhere"))
    assert missing.status is Status.MISSING and "kubernetes.volume_claim" in missing.fix
    with unbound_claim(boxes, "unbound", "no-such-volume", ["ReadWriteMany"]):
        assert asyncio.run(layer("unbound")).status is Status.DEGRADED
    with claim(boxes, "bound", tmp_path):
        found = asyncio.run(layer("bound"))
    assert found.status is Status.ACTIVE and found.why == "claim bound: Bound ReadWriteMany"


# --- claims that cannot be used ---------------------------------------------------------------


def start(boxes: Boxes, folder: Path, top: Path, name: str = CLAIM) -> None:
    """Start a box with this folder of the claim, and end it."""

    async def main() -> None:
        backend = boxes.backend(volume_claim=name, volume_folder=str(top))
        try:
            mounts = (Mount(str(folder), "/workspace"),)
            spec = Spec(image=f"{DEBIAN}:latest", mounts=mounts, give=(str(folder),))
            box = await backend.start(spec)
            await box.kill()
        finally:
            await backend.close()

    asyncio.run(main())
    assert not boxes.pods()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workspace, in a data folder."""
    (tmp_path / "data/workspaces/ada/thesis").mkdir(parents=True)
    return tmp_path / "data/workspaces/ada/thesis"


def test_a_claim_that_is_not_there_is_named_at_once(boxes: Boxes, folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"has no PersistentVolumeClaim 'nowhere'.*claim"):
        start(boxes, folder, folder.parents[2], "nowhere")


def test_a_claim_without_a_volume_is_told_in_the_words_of_the_scheduler(
    boxes: Boxes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_module, "NO_ROOM", 3.0)
    with (
        unbound_claim(boxes, "unbound", "no-such-volume", ["ReadWriteMany"]),
        pytest.raises(NoCapacity, match=r"unbound.*PersistentVolumeClaims"),
    ):
        start(boxes, folder, folder.parents[2], "unbound")


def test_a_volume_of_another_node_is_told_in_the_words_of_the_scheduler(
    boxes: Boxes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_module, "NO_ROOM", 3.0)
    there = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["elsewhere"]}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [there]}]}}
    modes = ["ReadWriteOnce"]
    with (
        claim(boxes, "once", folder.parents[2], accessModes=modes, nodeAffinity=affinity),
        pytest.raises(NoCapacity, match=r"PersistentVolume.s node affinity"),
    ):
        start(boxes, folder, folder.parents[2], "once")


def test_a_volume_that_its_node_cannot_mount_is_told_in_the_words_of_the_node(
    boxes: Boxes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_module, "START_TIMEOUT", 8.0)
    monkeypatch.setattr(box_module, "NO_ROOM", 3.0)
    with (
        claim(boxes, "gone", folder.parents[2] / "nowhere"),
        pytest.raises(StartFailed, match=r"FailedMount.*hostPath"),
    ):
        start(boxes, folder, folder.parents[2], "gone")


def test_a_claim_that_has_other_files_is_noticed_by_the_box(boxes: Boxes, folder: Path) -> None:
    """A cluster makes a folder that is missing, and it would look like an empty workspace."""
    (other := folder.parents[2] / "other").mkdir()
    with (
        claim(boxes, "other", other),
        pytest.raises(StartFailed, match=r"/workspace belongs to user 0.*the claim is not"),
    ):
        start(boxes, folder, folder.parents[2], "other")
