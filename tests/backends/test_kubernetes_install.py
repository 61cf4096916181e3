"""The objects that run a server in a cluster, as `hutch kubernetes manifests` prints them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from hutch.backends.kubernetes import doctor
from hutch.backends.kubernetes.install import Installation
from hutch.backends.kubernetes.pod import policies
from hutch.cli.kubernetes import DECIDED
from hutch.errors import InvalidRequest
from hutch.settings import FIELDS

IMAGE = "registry.example.org/hutch/server:1"


def hutch(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hutch", "kubernetes", "manifests", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def printed(*words: str) -> list[dict[str, Any]]:
    done = hutch("--image", IMAGE, *words)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [found for found in objects if found["kind"] == kind]


def server(objects: list[dict[str, Any]]) -> Any:
    [deployment] = of_kind(objects, "Deployment")
    return deployment["spec"]["template"]["spec"]


def variables(objects: list[dict[str, Any]]) -> Mapping[str, str]:
    listed = server(objects)["containers"][0]["env"]
    return {entry["name"]: entry.get("value", "") for entry in listed}


def test_what_is_printed_is_what_was_made_and_has_no_key() -> None:
    done = hutch("--image", IMAGE, "--host", "boxes.example.org")
    made = Installation(image=IMAGE, hosts=("boxes.example.org",)).objects()
    assert list(yaml.safe_load_all(done.stdout)) == json.loads(json.dumps(made))
    assert "kind: Secret" not in done.stdout and "&id" not in done.stdout
    assert "kubectl --namespace hutch" in done.stdout.partition("---")[0]


def rights(role: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (verb, resource, group)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def test_the_roles_allow_what_the_backend_asks_for_and_nothing_else() -> None:
    objects = printed()
    [role] = of_kind(objects, "Role")
    assert role["metadata"]["namespace"] == "hutch-boxes"
    wanted = [*doctor.NEEDED, *doctor.WANTED, *doctor.WANTED_FOR_ERRORS]
    assert sorted(rights(role)) == sorted(wanted)
    [over_all] = of_kind(objects, "ClusterRole")
    assert sorted(rights(over_all)) == sorted(doctor.WANTED_EVERYWHERE)
    assert {verb for verb, _, _ in rights(over_all)} <= {"get", "list"}


def test_servers_that_share_have_an_address_a_volume_and_the_rights_for_it() -> None:
    objects = printed("--replicas", "3", "--storage", "1Gi")
    assert not of_kind(objects, "Deployment") and not of_kind(objects, "PersistentVolumeClaim")
    [several] = of_kind(objects, "StatefulSet")
    [claim] = several["spec"]["volumeClaimTemplates"]
    assert several["spec"]["replicas"] == 3 and claim["metadata"]["name"] == "data"
    [container] = several["spec"]["template"]["spec"]["containers"]
    names = [entry["name"] for entry in container["env"]]
    # A cluster replaces only what stands before.
    assert names.index("POD_IP") < names.index("HUTCH_KUBERNETES_REPLICA_URL")
    [role] = of_kind(objects, "Role")
    assert set(doctor.SHARING) <= set(rights(role))
    [role] = of_kind(printed(), "Role")
    assert not set(doctor.SHARING) & set(rights(role))


def test_boxes_get_the_policies_that_the_backend_would_make() -> None:
    found = of_kind(printed(), "NetworkPolicy")
    for policy in found:
        assert policy["metadata"].pop("namespace") == "hutch-boxes"
    assert found == list(policies().values())


def test_a_stop_is_given_more_time_than_requests_are() -> None:
    assert server(printed())["terminationGracePeriodSeconds"] == 40
    longer = printed("--set", "drain_seconds=59.5")
    assert server(longer)["terminationGracePeriodSeconds"] == 90
    assert variables(longer)["HUTCH_DRAIN_SECONDS"] == "59.5"


def test_settings_become_variables_that_the_server_reads() -> None:
    objects = printed(
        "--namespace", "tools", "--boxes-namespace", "boxes", "--runtime-image", "small:1",
        "--runtime", "kata", "--host", "a.example.org", "--host", "b.example.org",
        "--set", "pool.images=python:3.13-slim=4",
    )  # fmt: skip
    found = variables(objects)
    assert found["HUTCH_POOL_IMAGES"] == "python:3.13-slim=4"
    assert found["HUTCH_KUBERNETES_NAMESPACE"] == "boxes"
    assert found["HUTCH_KUBERNETES_RUNTIME_IMAGE"] == "small:1"
    assert found["HUTCH_RUNTIME"] == "kata"
    assert found["HUTCH_ALLOWED_HOSTS"] == (
        "hutch,hutch.tools,hutch.tools.svc,hutch.tools.svc.cluster.local,"
        "a.example.org,b.example.org"
    )
    from_image = {"HOME", "HUTCH_API_KEY"}
    known = {f"HUTCH_{key.replace('.', '_').upper()}" for key in FIELDS}
    assert set(found) <= known | from_image


def test_a_cluster_replaces_nothing_in_the_value_of_a_setting() -> None:
    made = Installation(image=IMAGE, settings={"HUTCH_X": "$(HUTCH_API_KEY) $$"}).objects()
    assert variables(made)["HUTCH_X"] == "$$(HUTCH_API_KEY) $$$$"


HOSTILE = ("a b", "a\nkind: Secret", "A", "-a", "a-", "../a", "a:{{x}}", "é", "a" * 64, '"')


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("option", ["--namespace", "--boxes-namespace"])
def test_a_namespace_is_a_label(option: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match="namespace"):
        Installation(image=IMAGE, **{option[2:].replace("-", "_"): name})


@pytest.mark.parametrize(
    "words",
    [
        ("--image", "a b"),
        ("--image", "a\nb"),
        ("--image", IMAGE, "--runtime-image", "x y"),
        ("--image", IMAGE, "--runtime", "x\ny"),
        ("--image", IMAGE, "--runtime", "UP"),
        ("--image", IMAGE, "--host", "a:80"),
        ("--image", IMAGE, "--host", "a,b"),
        ("--image", IMAGE, "--storage", "lots"),
        ("--image", IMAGE, "--storage-class", "a b"),
        ("--image", IMAGE, "--boxes", "0"),
        ("--image", IMAGE, "--replicas", "0"),
        ("--image", IMAGE, "--boxes", "many"),
        ("--image", IMAGE, "--namespace", "same", "--boxes-namespace", "same"),
        ("--image", IMAGE, "--set", "drain_seconds"),
        ("--image", IMAGE, "--set", "drain_seconds=soon"),
        ("--image", IMAGE, "--set", "drain_second=1"),
        ("--image", IMAGE, "extra"),
        (),
        *(("--image", IMAGE, "--set", f"{key}=x") for key in DECIDED),
    ],
)
def test_what_a_cluster_or_a_server_would_refuse_is_refused_here(words: tuple[str, ...]) -> None:
    done = hutch(*words)
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.startswith("hutch: ") and done.stderr.count("\n") == 1


def test_a_key_that_is_wrong_is_told_from_one_that_is_decided() -> None:
    def complaint(setting: str) -> str:
        return hutch("--image", IMAGE, "--set", setting).stderr

    assert "did you mean drain_seconds?" in complaint("drain_second=1")
    assert "use --host" in complaint("allowed_hosts=a")
    assert "drain_seconds must be a number from 0 up" in complaint("drain_seconds=soon")


def test_what_was_typed_does_not_leave_its_comment() -> None:
    done = hutch("--image", IMAGE, "--set", "history_days=1\n")
    head, _, _ = done.stdout.partition("---")
    assert done.returncode == 0 and "history_days" in head
    assert all(line.startswith("#") for line in head.splitlines())
