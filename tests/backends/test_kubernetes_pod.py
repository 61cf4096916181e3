"""What a cluster is asked for when a box starts. Without a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hutch.backends.base import Spec, named
from hutch.backends.contained import GUEST_MEMORY, GVISOR_MEMORY
from hutch.backends.kubernetes.claim import ClaimMount, ClaimMounts
from hutch.backends.kubernetes.pod import (
    FOR_LOADER,
    BundleImage,
    PodUser,
    body,
    digest_of,
    grade_of,
    name_of,
    policies,
    scope_label,
    user_of,
    weaker_user,
)
from hutch.errors import InvalidRequest
from hutch.guest.relay import RELAY
from hutch.types import RELAXATIONS, Limits, MiB, Mount

SPEC = Spec(image="python:3.13-slim")
USER = PodUser(0x2000_0001, 0x2000_0001, is_own=True)
DIGEST = "sha256:" + "a" * 64
# Kubernetes' own rules for names and for values of labels.
DNS_NAME = re.compile("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LABEL = re.compile("([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")


def command(module: str, *args: str, at: str = "/.hutch") -> list[str]:
    return [f"{at}/lib/loader", f"{at}/bin/python3", "-m", module, *args]


IMAGE = BundleImage("registry.example.org/hutch/runtime:1", "image", "amd64", command)


def pod(spec: Spec = SPEC, **more: Any) -> Any:
    wanted = {"box": "b1", "scope": "s", "user": USER, "bundle": IMAGE, "isolation": "ns", **more}
    return json.loads(json.dumps(body(spec, **wanted)))


def containers(made: Any) -> list[Any]:
    return [*made["spec"]["initContainers"], *made["spec"]["containers"]]


def orders(made: Any) -> Any:
    """As the guest gets them: a cluster makes one dollar of two."""
    return json.loads(made["spec"]["containers"][0]["command"][-1].replace("$$", "$"))


def test_a_pod_is_as_confined_as_restricted_asks_for() -> None:
    made = pod()
    spec = made["spec"]
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never" and spec["activeDeadlineSeconds"] > 0
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "serviceAccount"):
        assert name not in spec
    for container in containers(made):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        assert set(container["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}
        assert "ports" not in container and "volumeDevices" not in container
    assert {"hostPath", "persistentVolumeClaim", "secret", "configMap"}.isdisjoint(
        kind for volume in spec["volumes"] for kind in volume
    )


def test_relays_run_under_a_user_that_nothing_in_the_box_can_be() -> None:
    door, box = containers(pod())
    assert door["securityContext"]["runAsUser"] == RELAY and door["restartPolicy"] == "Always"
    assert "runAsUser" not in box["securityContext"]
    assert user_of(SPEC).uid != RELAY and user_of(SPEC) != user_of(SPEC)
    with pytest.raises(InvalidRequest, match="reserved"):
        user_of(replace(SPEC, user=str(RELAY)))


def test_folders_in_memory_have_sizes_and_leave_memory_to_programs() -> None:
    limits = Limits(memory=512 * MiB, disk=200 * MiB)
    made = pod(replace(SPEC, limits=limits))
    volumes = {volume["name"]: volume for volume in made["spec"]["volumes"]}
    mounts = {
        mount["mountPath"]: volumes[mount["name"]]
        for mount in made["spec"]["containers"][0]["volumeMounts"]
    }
    sizes = {
        path: int(volume["emptyDir"]["sizeLimit"])
        for path, volume in mounts.items()
        if "emptyDir" in volume
    }
    assert sizes["/workspace"] == 200 * MiB and sizes["/dev/shm"] == limits.shared_memory
    assert set(sizes) == {"/workspace", "/home/user", "/tmp", "/var/tmp", "/run", "/dev/shm"}
    assert all(v["emptyDir"]["medium"] == "Memory" for v in mounts.values() if "emptyDir" in v)
    assert sum(sizes.values()) < limits.memory
    resources = made["spec"]["containers"][0]["resources"]
    assert resources["limits"]["memory"] == str(limits.memory + GUEST_MEMORY)
    assert resources["limits"]["cpu"] == "2000m" and resources["requests"]["cpu"] == "10m"


def test_another_kernel_gets_what_it_needs() -> None:
    made = pod(replace(SPEC, runtime="gvisor"), isolation="gvisor")
    assert made["spec"]["runtimeClassName"] == "gvisor" and orders(made)["foreign"] is True
    limits = made["spec"]["containers"][0]["resources"]["limits"]
    assert limits["memory"] == str(SPEC.limits.memory + GVISOR_MEMORY)
    assert [grade_of(name) for name in ("runsc", "kata-qemu", "runc", "")] == [
        "gvisor", "vm", "ns", "ns",
    ]  # fmt: skip


def test_a_namespace_of_user_ids_has_few_of_them() -> None:
    mapped = user_of(SPEC, may_map=True)
    assert mapped.has_namespace and mapped.is_own and 0 < mapped.uid < 65_536
    assert pod(user=mapped)["spec"]["hostUsers"] is False
    assert "hostUsers" not in pod()["spec"]
    root = replace(SPEC, user="0", relax=("user",))
    assert user_of(root, may_map=True) == PodUser(0, 0, is_own=False, has_namespace=True)
    assert user_of(replace(SPEC, user="65535"), may_map=True).has_namespace
    for far in ("65536", "1:65536"):
        assert not user_of(replace(SPEC, user=far), may_map=True).has_namespace
    assert not user_of(SPEC).has_namespace


def test_the_image_says_nothing_to_our_loader() -> None:
    for container in containers(pod()):
        assert container["env"] == [{"name": name, "value": ""} for name in FOR_LOADER]
    inherited = orders(pod())["inherit"]
    assert set(FOR_LOADER) <= set(inherited) and "KUBERNETES_SERVICE_" in inherited


def test_where_there_are_no_image_volumes_the_bundle_is_copied_once() -> None:
    made = pod(bundle=replace(IMAGE, how="copy"))
    copying, door, box = containers(made)
    assert "restartPolicy" not in copying and copying["image"] == IMAGE.name
    assert copying["command"][:2] == ["/lib/loader", "/bin/python3"]
    (mount,) = copying["volumeMounts"]
    for other in (door, box):
        assert {**mount, "readOnly": True} in other["volumeMounts"]
    (volume,) = (v for v in made["spec"]["volumes"] if v["name"] == mount["name"])
    assert int(volume["emptyDir"]["sizeLimit"]) > 0


def test_only_what_is_relaxed_is_weaker() -> None:
    strict = pod()
    for relaxation in RELAXATIONS:
        spec = replace(SPEC, relax=(relaxation,))
        made = pod(spec, user=user_of(spec) if relaxation == "user" else USER)
        assert made != strict
        security = made["spec"]["containers"][0]["securityContext"]
        assert security["readOnlyRootFilesystem"] is (relaxation != "writable-root")
        assert security["allowPrivilegeEscalation"] is (relaxation == "new-privileges")
        assert ("capabilities" in security) is (relaxation != "capabilities")
        assert made["spec"]["securityContext"]["runAsNonRoot"] is (relaxation != "user")
        is_open = made["metadata"]["labels"]["hutch.dev/network"] == "open"
        assert is_open is (relaxation == "network")
        assert orders(made)["filter"] is (relaxation not in ("new-privileges", "seccomp"))
        assert made["spec"]["initContainers"] == strict["spec"]["initContainers"]


def test_policies_close_the_network_of_all_boxes_but_relaxed_ones() -> None:
    made = pod()["metadata"]["labels"]
    opened = pod(replace(SPEC, relax=("network",)))["metadata"]["labels"]

    def directions(labels: dict[str, str]) -> Iterator[str]:
        for policy in policies().values():
            spec: Any = policy["spec"]
            assert "ingress" not in spec and "egress" not in spec  # nothing is allowed
            if spec["podSelector"]["matchLabels"].items() <= labels.items():
                yield from spec["policyTypes"]

    assert sorted(directions(made)) == ["Egress", "Ingress"]
    assert list(directions(opened)) == ["Ingress"]


@pytest.mark.parametrize("user", ["agent", "1000:staff", "-1", "1 ", "", "٣", "9999999999", "a:b"])
def test_a_user_that_is_no_number_is_refused(user: str) -> None:
    with pytest.raises(InvalidRequest, match="number"):
        user_of(replace(SPEC, user=user))


def test_a_user_can_be_a_number() -> None:
    assert user_of(replace(SPEC, user="1000")) == PodUser(1000, 1000)
    assert user_of(replace(SPEC, user="1000:20")) == PodUser(1000, 20)
    for root in ("0", "root"):  # the only name that is the same in every image
        with pytest.raises(InvalidRequest, match="relax user"):
            user_of(replace(SPEC, user=root))
        assert user_of(replace(SPEC, user=root, relax=("user",))) == PodUser(0, 0)
    assert user_of(replace(SPEC, user="0", relax=("user",))) == PodUser(0, 0)
    # Others may have this uid, too, so their processes must not count.
    assert "NPROC" not in orders(pod(user=PodUser(1000, 1000)))["limits"]


WORKSPACE = (Mount("/data/workspaces/ada/thesis", "/workspace"),)
CLAIMED = ClaimMounts(
    "data", (ClaimMount("workspaces/ada/thesis", "/workspace", False, 20_001),), (20_001, 20_001)
)


def test_a_box_has_its_folder_of_a_claim_and_no_more_of_it() -> None:
    made = pod(replace(SPEC, mounts=WORKSPACE), claimed=CLAIMED)
    (claim,) = (v for v in made["spec"]["volumes"] if "persistentVolumeClaim" in v)
    assert claim["persistentVolumeClaim"] == {"claimName": "data"}
    mounts = [m for c in containers(made) for m in c["volumeMounts"] if m["name"] == claim["name"]]
    assert mounts == [
        {
            "name": claim["name"],
            "mountPath": "/workspace",
            "subPath": "workspaces/ada/thesis",
            "readOnly": False,
        }
    ], "and the container of relays has nothing of it"
    places = [m["mountPath"] for m in made["spec"]["containers"][0]["volumeMounts"]]
    assert places.count("/workspace") == 1
    assert orders(made)["owners"] == {"/workspace": 20_001}
    assert "/workspace" not in orders(made)["rooms"], "which is what a sleeping session keeps"


def test_no_group_is_given_the_files_of_a_whole_claim() -> None:
    for made in (pod(replace(SPEC, mounts=WORKSPACE), claimed=CLAIMED), pod()):
        assert "fsGroup" not in made["spec"]["securityContext"]


def test_a_box_with_a_workspace_runs_as_its_owner() -> None:
    assert user_of(SPEC, (20_001, 20_002)) == PodUser(20_001, 20_002)
    assert user_of(SPEC, (20_001, 0)) == PodUser(20_001, 20_001), "never with the group of root"
    assert user_of(replace(SPEC, user="1000"), (20_001, 20_001)) == PodUser(1000, 1000)
    assert user_of(replace(SPEC, relax=("user",)), (20_001, 20_001)) == PodUser(20_001, 20_001)
    for owner in ((RELAY, 1), (1, RELAY)):
        with pytest.raises(InvalidRequest, match="reserved"):
            user_of(SPEC, owner)


def test_a_box_whose_user_others_have_too_says_so() -> None:
    assert weaker_user(USER) == ()
    assert any("uid 1000 is not the box's own" in why for why in weaker_user(PodUser(1000, 1000)))
    assert len(weaker_user(PodUser(1000, 1000))) == 2 and len(weaker_user(PodUser(0, 0))) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mounts": (Mount("/srv", "/srv"),)}, "only folders of a claim"),
        ({"image": "a b"}, "not the name of an image"),
        ({"image": "-x"}, "not the name of an image"),
        ({"image": "x" * 600}, "not the name of an image"),
        ({"image": ""}, "not the name of an image"),
        ({"runtime": "../x"}, "not the name of a RuntimeClass"),
        ({"workdir": "/" + "x" * 200_000}, "too long"),
    ],
)
def test_what_a_pod_cannot_do_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        pod(replace(SPEC, **change))


def test_an_image_is_asked_for_by_the_digest_that_it_had() -> None:
    def image(spec: Spec) -> object:
        return pod(spec)["spec"]["containers"][0]["image"]

    assert image(replace(SPEC, digest=DIGEST)) == f"python@{DIGEST}"
    own = replace(SPEC, image="host:5000/a/b:tag", digest=DIGEST)
    assert image(own) == f"host:5000/a/b@{DIGEST}"
    assert image(replace(SPEC, image=f"a@{DIGEST}", digest=None)) == f"a@{DIGEST}"
    assert image(replace(SPEC, digest="none")) == SPEC.image
    assert digest_of(f"docker.io/library/python@{DIGEST}") == DIGEST
    assert digest_of(DIGEST) is None and digest_of("") is None  # it was never in a registry


@settings(max_examples=200, deadline=None)
@given(
    box=st.from_regex("[0-9a-z-]{1,63}", fullmatch=True),
    scope=st.text(max_size=200),
    workdir=st.text(max_size=100),
)
def test_nothing_of_a_caller_becomes_a_name_a_label_or_an_expression(
    box: str, scope: str, workdir: str
) -> None:
    assert named(box) == box
    made = pod(replace(SPEC, workdir=workdir), box=box, scope=scope)
    metadata = made["metadata"]
    assert DNS_NAME.fullmatch(metadata["name"]) and metadata["name"] == name_of(scope, box)
    assert all(LABEL.fullmatch(value) for value in metadata["labels"].values())
    assert metadata["annotations"]["hutch.dev/box"] == box
    assert orders(made)["workdir"] == workdir
    # A cluster replaces $(NAME) unless the dollar is doubled.
    for word in made["spec"]["containers"][0]["command"]:
        assert "$" not in word.replace("$$", "")


@given(st.text(), st.text(), st.text(), st.text())
def test_two_boxes_never_have_one_name(a: str, b: str, c: str, d: str) -> None:
    if "\0" not in a + b + c + d and (a, b) != (c, d):
        assert name_of(a, b) != name_of(c, d)
    assert (scope_label(a) == scope_label(c)) is (a == c)
