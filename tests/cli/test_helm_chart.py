"""The Helm chart makes what `hutch kubernetes manifests` prints, object by object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.cluster import programs
from must_work import need

import hutch
from hutch.cli.kubernetes import DECIDED

CHART = Path(__file__).parent.parent.parent / "deploy/helm/hutch"
IMAGE = "registry.example.org/hutch/server:1"
SMALL = "registry.example.org/hutch/runtime@sha256:" + "0" * 64
SECONDS = 120

# What is asked of `hutch kubernetes manifests`, and the values of the chart that say the same.
CHOICES: list[tuple[list[str], dict[str, object]]] = [
    ([], {}),
    (
        ["--namespace", "tools", "--boxes-namespace", "b", "--boxes", "7", "--replicas", "3",
         "--runtime", "gvisor", "--runtime-image", SMALL, "--host", "a.example.org",
         "--host", "b.example.org", "--storage", "3Ti", "--storage-class", "fast.ssd",
         "--set", "drain_seconds=59.5", "--set", "pool.images=python:3.13-slim=4",
         "--set", "pool.enabled=true", "--set", "default_image=python:3.13-slim"],
        {
            "boxes": {"namespace": "b", "max": 7},
            "replicas": 3,
            "runtime": "gvisor",
            "runtimeImage": SMALL,
            "hosts": ["a.example.org", "b.example.org"],
            "storage": {"size": "3Ti", "class": "fast.ssd"},
            "settings": {"drain_seconds": "59.5", "pool.images": "python:3.13-slim=4",
                         "pool.enabled": "true", "default_image": "python:3.13-slim"},
        },
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def helm() -> Path:
    if command := programs.built_helm():
        return command
    need("kubernetes", "helm was not built (scripts/cluster build)")


def render(
    helm: Path, folder: Path, values: dict[str, object], namespace: str = "hutch"
) -> subprocess.CompletedProcess[str]:
    file = folder / "values.yaml"
    file.write_text(json.dumps({"image": IMAGE, "createNamespace": True, **values}))
    own = {"HOME": str(folder), "PATH": os.environ["PATH"]}
    argv = [helm, "template", "any", CHART, "--namespace", namespace, "--values", file]
    argv += ["--kube-version", programs.KUBERNETES]
    return subprocess.run(
        argv, env=own, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def by_name(text: str) -> dict[tuple[str, str, str], Any]:
    found = {}
    for each in yaml.safe_load_all(text):
        if each:
            metadata = each["metadata"]
            name = (each["kind"], metadata.get("namespace", ""), metadata["name"])
            assert name not in found
            found[name] = each
    return found


@pytest.mark.parametrize(("options", "values"), CHOICES)
def test_the_chart_makes_the_same_objects(
    helm: Path, tmp_path: Path, options: list[str], values: dict[str, object]
) -> None:
    argv = [sys.executable, "-m", "hutch", "kubernetes", "manifests", "--image", IMAGE, *options]
    printed = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=True)
    namespace = "tools" if options else "hutch"
    rendered = render(helm, tmp_path, values, namespace)
    assert rendered.returncode == 0, rendered.stderr
    ours, theirs = by_name(printed.stdout), by_name(rendered.stdout)
    assert theirs.keys() == ours.keys()
    for name, each in ours.items():
        assert theirs[name] == each, name


def test_namespaces_are_left_to_others_if_that_is_asked(helm: Path, tmp_path: Path) -> None:
    values: dict[str, object] = {"createNamespace": False, "boxes": {"createNamespace": False}}
    found = by_name(render(helm, tmp_path, values).stdout)
    assert found and not [kind for kind, _, _ in found if kind == "Namespace"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"image": ""}, "image"),
        ({"image": "a b"}, "image"),
        ({"runtimeImage": "a\nb: c"}, "runtimeImage"),
        ({"boxes": {"namespace": "Up"}}, "namespace"),
        ({"boxes": {"namespace": "hutch"}}, "a namespace each"),
        ({"boxes": {"max": 0}}, "max"),
        ({"runtime": "a\nb"}, "runtime"),
        ({"hosts": ["a,b"]}, "hosts"),
        ({"storage": {"size": "lots"}}, "size"),
        ({"settings": {"api_key": "nonsense-key"}}, "api_key"),
        ({"settings": {"a\nb": "c"}}, "propertyName"),
        ({"settings": {"drain_seconds": 5}}, "drain_seconds"),
        ({"replicas": 0}, "replicas"),
        ({"replica": 2}, "replica"),
    ],
)
def test_values_are_checked_before_they_are_used(
    helm: Path, tmp_path: Path, values: dict[str, object], says: str
) -> None:
    done = render(helm, tmp_path, values)
    assert done.returncode and not done.stdout and says in done.stderr


def test_helm_finds_nothing_to_say_about_the_chart(helm: Path, tmp_path: Path) -> None:
    argv = [helm, "lint", "--strict", CHART, "--set", f"image={IMAGE}"]
    own = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        argv, env=own, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_chart_has_our_version_and_refuses_the_same_settings() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == hutch.__version__
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = schema["properties"]["settings"]["propertyNames"]["not"]["enum"]
    assert sorted(refused) == sorted(DECIDED)
