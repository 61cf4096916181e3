"""What a Kubernetes for tests is made of: found, or built once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.cluster import programs

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 120
SUMS = ("Sum", "GoModSum")
MODULES = (*programs.MODULES, *programs.RUNTIME_MODULES)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = {"etcd (Debian: etcd-server)", "openssl (Debian: openssl)"}
    assert wanted < set(programs.missing())


# --- with a stand-in for the go command -----------------------------------------------------

GO = """\
#!/bin/sh
module() { cat "$SOURCE/$(echo "$1" | tr / _)"; }
case "$1 $2" in
"mod download") module "$4" ;;
"mod edit") echo '{"Go": "1.26", "Require": [{"Path": "a/b", "Version": "v0"}], "Replace": null}' ;;
build*)
    cat go.mod go.sum >> "$SOURCE/built"
    while [ -e "$SOURCE/wait" ]; do sleep 0.05; done
    for last; do
        case $last in */programs/) into=$last;; [a-z]*/*) echo x > "$into${last##*/}";; esac
    done ;;
esac
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the go command downloads, with the record of what it was asked to build."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "go.sum").write_text("a/b v0 h1:1\n")
    for module in MODULES:
        described = {"Dir": str(folder), "GoMod": "x", **dict(zip(SUMS, module.sums, strict=True))}
        name = f"{module.path}@{module.version}".replace("/", "_")
        (folder / name).write_text(json.dumps(described))
        if module.change:
            file, text, _ = module.change
            (folder / file).parent.mkdir(parents=True)
            (folder / file).write_text(text)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/go").write_text(GO)
    (tmp_path / "bin/go").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SOURCE", str(folder))
    monkeypatch.setenv("HUTCH_CLUSTER_CACHE", str(tmp_path / "cache"))
    return folder


def start_build() -> subprocess.Popen[str]:
    code = "from benchmarks.cluster import programs; print(*programs.build())"
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_two_builds_at_once_build_once(source: Path) -> None:
    (source / "wait").touch()
    with start_build() as first, start_build() as second:
        until((source / "built").exists)
        (source / "wait").unlink()
        said = {build.communicate(timeout=PATIENCE)[0] for build in (first, second)}
    built = programs.built()
    assert said == {" ".join(map(str, built)) + "\n"}
    assert (source / "built").read_text().count("module cluster") == len(MODULES)
    made = {path.name for folder in built for path in folder.iterdir()}
    assert made == {command for module in MODULES for command in module.commands}
    assert sorted(os.listdir(programs.cache())) == sorted([*(path.name for path in built), "lock"])


def test_what_was_built_is_not_built_again_when_something_else_has_another_version(
    source: Path,
) -> None:
    first, second = programs.build()
    shutil.rmtree(second)
    (source / "built").unlink()
    assert programs.build() == [first, second]
    again = (source / "built").read_text().count("module cluster")
    assert again == len(programs.RUNTIME_MODULES)


def test_a_module_that_is_not_what_we_change_is_not_built(source: Path) -> None:
    for module in MODULES:
        if module.change:
            (source / module.change[0]).write_text("other")
    with pytest.raises(programs.ClusterFailed, match="is not what we change"):
        programs.build()
    assert not programs.built()


def test_a_module_that_is_another_than_the_one_that_was_reviewed_is_not_built(source: Path) -> None:
    for file in source.glob("*@*"):
        file.write_text(file.read_text().replace("h1:", "h1:x"))
    with pytest.raises(programs.ClusterFailed, match="is not the one that was reviewed"):
        programs.build()
    assert not programs.built() and not (source / "built").exists()


def test_a_build_that_was_killed_leaves_nothing_that_is_taken_for_one(source: Path) -> None:
    (source / "wait").touch()
    with start_build() as build:
        until((source / "built").exists)
        build.kill()
    assert programs.built() == []
    (source / "wait").unlink()
    names = [path.name for path in programs.build()]
    assert sorted(os.listdir(programs.cache())) == sorted([*names, "lock"])


def test_a_build_uses_no_module_but_the_one_that_was_reviewed(source: Path) -> None:
    programs.build()
    written = (source / "built").read_text()
    for module in MODULES:
        assert f"{module.path} {module.version} {module.sums[0]}\n" in written
        assert f"require {module.path} {module.version}\n" in written


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
