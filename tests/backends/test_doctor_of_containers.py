"""What the doctor says of a box without isolation: what the box found, and not its opposite."""

from __future__ import annotations

import msgspec

from hutch.backends.docker import doctor as docker
from hutch.backends.docker.engine import facts_of
from hutch.backends.kubernetes import doctor as kubernetes
from hutch.backends.kubernetes.cluster import Pod
from hutch.types import Layer, Status

FULL = "000001ffffffffff"  # all capabilities


def missing(layers: list[Layer]) -> dict[str, str]:
    return {layer.name: layer.why for layer in layers if layer.status is Status.MISSING}


def test_a_pod_without_isolation_is_described_as_it_is() -> None:
    look = kubernetes.Look(
        uid="0",
        capabilities=FULL,
        no_new_privileges="0",
        seccomp="0",
        read_only=False,
        memory="max",
        has_token=True,
        reaches=True,
        users=["0", "0", "4294967295"],
        dies_whole=True,
    )
    assert missing(kubernetes.judge(look, "image")) == {
        "user": "the box finds: uid 0",
        "capabilities": f"the box finds: {FULL}",
        "no new privileges": "the box finds: set-uid programs gain the rights of their owner",
        "system calls": "the box finds: not filtered",
        "root file system": "the box finds: writable",
        "memory": "the box finds: no bound",
        "service account": "the box finds: a token",
    }


def test_what_of_a_pod_is_not_bounded_is_named() -> None:
    limits = {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Mi"}

    def judged(container: dict[str, object], volume: dict[str, object]) -> Layer:
        spec = {"containers": [container], "volumes": [volume]}
        body = {"metadata": {"name": "p"}, "spec": spec}
        return kubernetes.sizes(msgspec.convert(body, Pod))

    own = {"name": "box", "resources": {"limits": limits}}
    bounded = {"name": "room", "emptyDir": {"sizeLimit": "1Mi"}}
    assert judged(own, bounded).status is Status.ACTIVE
    del limits["memory"]
    assert judged(own, bounded).why == "container box has no limit of memory"
    assert judged({"name": "proxy"}, bounded).why.endswith(
        "something in the cluster adds it to Pods"
    )
    limits["memory"] = "1Gi"
    assert judged(own, {"name": "room", "emptyDir": {}}).why == "volume room has no size"


def test_a_container_without_isolation_is_described_as_it_is() -> None:
    found = {
        "guest": {"Uid": "0 0 0 0", "CapBnd": FULL, "NoNewPrivs": "0", "Seccomp": "0"},
        "read_only": False,
        "interfaces": ["lo", "eth0"],
        "memory": "",
        "pids": "",
    }
    assert missing(docker.judge(found, facts_of({}, {}, by_socket=True))) == {
        "user": "the box finds: uid 0",
        "capabilities": f"the box finds: {FULL}",
        "no new privileges": "the box finds: set-uid programs gain the rights of their owner",
        "system calls": "the box finds: not filtered",
        "root file system": "the box finds: writable",
        "network": "the box finds: eth0",
        "memory": "the box finds: no bound",
        "processes": "the box finds: no bound",
    }
