"""What a Kubernetes for tests is made of: found, or built once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.cluster import programs

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 120


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert {"etcd (Debian: etcd-server)", "runc (Debian: runc)"} < set(programs.missing())


# --- with a stand-in for the go command -----------------------------------------------------

GO = """\
#!/bin/sh
module() { printf '{"Path": "%s", "Dir": "%s", "GoMod": "x"}' "$1" "$SOURCE"; }
case "$1 $2" in
"mod download") module "$4" ;;
"mod edit") echo '{"Go": "1.26", "Require": [{"Path": "a/b", "Version": "v0"}], "Replace": null}' ;;
build*)
    cat go.mod go.sum >> "$SOURCE/built"
    while [ -e "$SOURCE/wait" ]; do sleep 0.05; done
    for last; do case $last in */programs/) into=$last;; */cmd/*) echo x > "$into${last##*/}";; esac
    done ;;
esac
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the go command downloads, with the record of what it was asked to build."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "go.sum").write_text("a/b v0 h1:1\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/go").write_text(GO)
    (tmp_path / "bin/go").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SOURCE", str(folder))
    monkeypatch.setenv("HUTCH_CLUSTER_CACHE", str(tmp_path / "cache"))
    return folder


def start_build() -> subprocess.Popen[str]:
    code = "from benchmarks.cluster import programs; print(programs.build())"
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_two_builds_at_once_build_once(source: Path) -> None:
    (source / "wait").touch()
    with start_build() as first, start_build() as second:
        until((source / "built").exists)
        (source / "wait").unlink()
        said = {build.communicate(timeout=PATIENCE)[0] for build in (first, second)}
    assert said == {f"{programs.built()}\n"}
    assert (source / "built").read_text().count("module cluster") == len(programs.MODULES)
    built = programs.built()
    assert built and {path.name for path in built.iterdir()} >= {"kubelet", "ctr", "kubectl"}
    assert sorted(os.listdir(built.parent)) == sorted([built.name, "lock"])


def test_a_build_that_was_killed_leaves_nothing_that_is_taken_for_one(source: Path) -> None:
    (source / "wait").touch()
    with start_build() as build:
        until((source / "built").exists)
        build.kill()
    assert programs.built() is None
    (source / "wait").unlink()
    built = programs.build()
    assert sorted(os.listdir(built.parent)) == sorted([built.name, "lock"])


def test_a_build_uses_no_module_but_the_one_that_was_reviewed(source: Path) -> None:
    programs.build()
    written = (source / "built").read_text()
    for module in programs.MODULES:
        assert f"{module.path} {module.version} {module.sums[0]}\n" in written
        assert f"require {module.path} {module.version}\n" in written


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
