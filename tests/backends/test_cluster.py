"""`scripts/cluster`: a Kubernetes on one machine, which the tests of its backend rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.cluster import Cluster
from benchmarks.cluster.config import PAUSE
from benchmarks.cluster.programs import ClusterFailed

from cluster_of_tests import (
    PATIENCE,
    ask,
    confined_pod,
    namespace,
    own_cluster,
    run_in_pod,
    surroundings,
    traces,
    wait_for_phase,
)
from docker_of_tests import DEBIAN, busybox_of_image

ROOT = Path(__file__).parent.parent.parent
SCRIPT = str(ROOT / "scripts/cluster")
FOREVER = ["sleep", "100000"]


def test_a_confined_pod_runs_and_prints(cluster: Cluster) -> None:
    with namespace(cluster, "prints") as path:
        ask(cluster, "POST", f"{path}/pods", confined_pod("one", ["id", "-u"]))
        wait_for_phase(cluster, f"{path}/pods/one", "Succeeded")
        assert cluster.request("GET", f"{path}/pods/one/log") == (200, b"1000\n")


def test_a_pod_that_is_not_confined_is_refused(cluster: Cluster) -> None:
    with namespace(cluster, "refuses") as path:
        pod = {"metadata": {"name": "one"}, "spec": {"containers": [{"name": "a", "image": "b"}]}}
        status, said = cluster.request("POST", f"{path}/pods", pod)
        assert (status, b"restricted" in said) == (403, True)


def test_a_program_in_a_pod_gives_its_output_and_its_exit_code(cluster: Cluster) -> None:
    with namespace(cluster, "runs") as path:
        ask(cluster, "POST", f"{path}/pods", confined_pod("one", FOREVER))
        wait_for_phase(cluster, f"{path}/pods/one", "Running")
        command = ["sh", "-c", "cat; echo bad >&2; exit 3"]
        ran = run_in_pod(cluster, f"{path}/pods/one", command, b"in\n")
        assert (ran.out, ran.err) == (b"in\n", b"bad\n")
        assert ran.status["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]


def test_a_pod_of_an_image_with_python_reaches_the_api_server(cluster: Cluster) -> None:
    code = (
        "import os, ssl, urllib.request; "
        "ssl._create_default_https_context = ssl._create_unverified_context; "
        "host = os.environ['KUBERNETES_SERVICE_HOST']; "
        "print(urllib.request.urlopen(f'https://{host}/readyz').read().decode())"
    )
    with namespace(cluster, "reaches") as path:
        ask(cluster, "POST", f"{path}/pods", confined_pod("one", ["python3", "-c", code], DEBIAN))
        wait_for_phase(cluster, f"{path}/pods/one", "Succeeded", "Failed")
        assert cluster.request("GET", f"{path}/pods/one/log") == (200, b"ok\n")


def test_the_command_gives_the_node_an_image(cluster: Cluster, tmp_path: Path) -> None:
    root = tmp_path / "root.tar"
    root.write_bytes(busybox_of_image())
    given = [SCRIPT, "--folder", str(cluster.folder), "image", str(root)]
    subprocess.run([*given, "--name", "localhost/given:1"], check=True)
    assert "localhost/given:1" in cluster.images()
    with namespace(cluster, "given") as path:
        pod = confined_pod("one", ["busybox", "true"], "localhost/given:1")
        ask(cluster, "POST", f"{path}/pods", pod)
        wait_for_phase(cluster, f"{path}/pods/one", "Succeeded")
    failed = subprocess.run(given, capture_output=True, text=True)  # no archive of an image
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)


def test_kubectl_works_inside_and_outside(cluster: Cluster, tmp_path: Path) -> None:
    inside = [SCRIPT, "--folder", str(cluster.folder), "run", "--", "kubectl"]
    outside = [str(cluster.folder / "programs/kubectl"), f"--kubeconfig={cluster.kubeconfig}"]
    for kubectl in (inside, outside):
        said = subprocess.run(
            [*kubectl, "get", "nodes"],
            capture_output=True,
            text=True,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
            },
        )
        assert said.stdout.split("\n")[1].split()[:2] == ["node", "Ready"], said.stderr
        if kubectl is inside:
            assert not any(tmp_path.iterdir())
    failed = subprocess.run([*inside[:-1], "sh", "-c", "exit 7"])
    assert failed.returncode == 7


@pytest.mark.parametrize("name", ["kube-apiserver", "kubelet", "containerd"])
def test_a_daemon_can_be_killed_and_started_again(cluster: Cluster, name: str) -> None:
    with namespace(cluster, f"survives-{name}") as path:
        ask(cluster, "POST", f"{path}/pods", confined_pod("old", FOREVER))
        wait_for_phase(cluster, f"{path}/pods/old", "Running")
        cluster.stop(name)
        assert not cluster.runs(name)
        cluster.start(name)
        cluster.wait_until_ready()
        ask(cluster, "POST", f"{path}/pods", confined_pod("new", ["true"]))
        wait_for_phase(cluster, f"{path}/pods/new", "Succeeded")
        [old] = ask(cluster, "GET", f"{path}/pods/old")["status"]["containerStatuses"]
        assert old["restartCount"] == 0 and "running" in old["state"]


def test_nothing_is_left_after_down_even_of_a_pod_that_runs() -> None:
    before = surroundings()
    with own_cluster() as own:
        assert not own.up()  # it is up
        pods = "/api/v1/namespaces/default/pods"
        ask(own, "POST", pods, confined_pod("one", FOREVER, PAUSE))
        wait_for_phase(own, f"{pods}/one", "Running")
        assert surroundings() == before
        assert len(traces(own)) > 10
        assert own.down()
        assert traces(own) == set()
        assert surroundings() == before
        assert not own.down()  # it was not up


@pytest.mark.parametrize("who", ["first", "outside"])
def test_all_ends_when_the_first_process_or_its_parent_is_killed(who: str) -> None:
    with own_cluster() as own:
        first = int((own.folder / "init").read_text().split()[0])
        parent = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill({"first": first, "outside": parent}[who], signal.SIGKILL)
        until(lambda: not own.is_up())
        until(lambda: not any(trace.startswith("process") for trace in traces(own)))
        with pytest.raises(ClusterFailed, match="not up"):
            own.inside(["true"])
        own.down()
        assert traces(own) == set()


def test_what_was_interrupted_while_it_came_up_is_started_again() -> None:
    with own_cluster() as own:
        own.down()
        with subprocess.Popen([SCRIPT, "--folder", str(own.folder), "up"]) as up:
            until((own.folder / "pids/kube-apiserver").exists)
            up.kill()
        assert own.is_up()
        assert own.up(with_us=True)
        assert not own.up()


def test_a_daemon_that_cannot_start_is_named_with_its_log(cluster: Cluster) -> None:
    config = cluster.folder / "etc/kubelet.json"
    good = config.read_text()
    cluster.stop("kubelet")
    try:
        config.write_text("{")
        with pytest.raises(ClusterFailed, match=r"kubelet has ended: .*\n.*/logs/kubelet\.log$"):
            cluster.start("kubelet")
            cluster.wait("its end", lambda: False)
    finally:
        config.write_text(good)
        cluster.start("kubelet")
        cluster.wait_until_ready()


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
