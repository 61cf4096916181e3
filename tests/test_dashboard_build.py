"""The dashboard is built when Hutch is installed, and Hutch is installed without it, too.

With the hook and the settings of this repository, and a dashboard that takes no packages.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STATIC = "src/hutch/dashboard/static"
BUILD = """
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
const out = '../../src/hutch/dashboard/static';
mkdirSync(out + '/assets', { recursive: true });
writeFileSync(out + '/index.html', '<head></head>' + readFileSync('page.txt', 'utf8'));
writeFileSync(out + '/assets/index-1.js', '// ' + 'x'.repeat(5000));
writeFileSync(out + '/assets/icon.png', 'a picture');
"""
NO_PACKAGES = {
    "name": "page",
    "version": "1.0.0",
    "lockfileVersion": 3,
    "packages": {"": {"name": "page", "version": "1.0.0"}},
}

pytestmark = [
    pytest.mark.skipif(not shutil.which("npm"), reason="there is no npm"),
    pytest.mark.namespaces("no box is made"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """As much of this repository as a wheel takes."""
    tree = tmp_path / "tree"
    (tree / "src/hutch/recipes/images").mkdir(parents=True)  # pyproject.toml names it
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py", ".gitignore"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "src/hutch/__init__.py").write_text("")
    (tree / "openapi.json").write_text("{}")
    page = tree / "packages/dashboard"
    page.mkdir(parents=True)
    about = {"name": "page", "version": "1.0.0", "type": "module"}
    write(page / "package.json", about | {"scripts": {"build": "node build.js"}})
    write(page / "package-lock.json", NO_PACKAGES)
    (page / "build.js").write_text(BUILD)
    (page / "page.txt").write_text("the first")
    return tree


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def build(
    tree: Path, out: Path, *targets: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    words = [word for target in targets for word in ("-t", target)]
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *words, "-d", out],
        cwd=tree, env={**os.environ, "SOURCE_DATE_EPOCH": "1800000000", **(env or {})},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def built(tree: Path, out: Path, *targets: str, env: dict[str, str] | None = None) -> str:
    """What was said while it was built."""
    done = build(tree, out, *targets, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def pages(out: Path) -> dict[str, bytes]:
    """What a wheel has of the dashboard."""
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if name.startswith("hutch/dashboard/")]
        return {name.removeprefix("hutch/dashboard/static/"): file.read(name) for name in names}


def path_without_node(folder: Path, **programs: str) -> dict[str, str]:
    """A PATH with these programs only, as shell scripts."""
    folder.mkdir()
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def test_a_wheel_has_the_dashboard_with_compressed_files_beside_it(
    tree: Path, tmp_path: Path
) -> None:
    assert "without its dashboard" not in built(tree, tmp_path / "out", "wheel")
    files = pages(tmp_path / "out")
    assert set(files) == {
        "index.html", "sources.sha256", "assets/index-1.js", "assets/index-1.js.gz",
        "assets/icon.png",
    }  # fmt: skip
    assert gzip.decompress(files["assets/index-1.js.gz"]) == files["assets/index-1.js"]
    # Nothing of the build is left among the sources.
    left = {path.name for path in (tree / "packages/dashboard").iterdir()}
    assert left == {"package.json", "package-lock.json", "build.js", "page.txt"}
    assert {path.name for path in (tree / "src/hutch/dashboard").iterdir()} == {"static"}


def test_what_is_up_to_date_is_not_built_and_needs_no_node(tree: Path, tmp_path: Path) -> None:
    built(tree, tmp_path / "first", "wheel")
    before = (tree / STATIC / "index.html").stat()
    env = path_without_node(tmp_path / "bin")
    assert "without its dashboard" not in built(tree, tmp_path / "second", "wheel", env=env)
    assert (tree / STATIC / "index.html").stat() == before
    first, second = (next((tmp_path / n).glob("*.whl")) for n in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_a_changed_source_is_built_again_with_the_same_bytes_each_time(
    tree: Path, tmp_path: Path
) -> None:
    built(tree, tmp_path / "first", "wheel")
    (tree / "packages/dashboard/page.txt").write_text("the second")
    built(tree, tmp_path / "second", "wheel")
    assert pages(tmp_path / "second")["index.html"] == b"<head></head>the second"
    (tree / "packages/dashboard/page.txt").write_text("the first")
    built(tree, tmp_path / "third", "wheel")
    assert pages(tmp_path / "third") == pages(tmp_path / "first")


def test_a_wheel_from_an_sdist_has_the_dashboard_without_node(tree: Path, tmp_path: Path) -> None:
    built(tree, tmp_path / "out", "sdist")
    with tarfile.open(next((tmp_path / "out").glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("hutch-*")
    env = path_without_node(tmp_path / "bin")
    assert "without its dashboard" not in built(unpacked, tmp_path / "wheel", "wheel", env=env)
    assert pages(tmp_path / "wheel")["index.html"] == b"<head></head>the first"


@pytest.mark.parametrize(
    ("programs", "says"),
    [
        ({}, "there is no Node.js"),
        ({"node": "echo v20.19.0"}, "there is no npm"),
        ({"node": "echo v18.20.4", "npm": ""}, "Node.js v18.20.4 is too old"),
        (
            {"node": "echo v22.1.0", "npm": "echo a word; echo npm error of this; exit 1"},
            "`npm ci --ignore-scripts` failed: npm error of this",
        ),
        ({"node": "echo v22.1.0", "npm": ""}, "made no src/hutch/dashboard/static/index.html"),
    ],
)
def test_without_what_it_takes_the_install_works_and_says_so_in_one_line(
    tree: Path, tmp_path: Path, programs: dict[str, str], says: str
) -> None:
    env = path_without_node(tmp_path / "bin", **programs)
    said = built(tree, tmp_path / "out", "wheel", env=env)
    (line,) = [line for line in said.splitlines() if "without its dashboard" in line]
    assert says in line
    assert pages(tmp_path / "out") == {}
    strict = build(tree, tmp_path / "other", "wheel", env=env | {"HUTCH_DASHBOARD": "require"})
    assert strict.returncode and says in strict.stderr, "a release is complete, or not made"


def test_what_cannot_be_built_again_is_not_served_either(tree: Path, tmp_path: Path) -> None:
    built(tree, tmp_path / "first", "wheel")
    (tree / "packages/dashboard/build.js").write_text("throw new Error('an error of the build')")
    said = built(tree, tmp_path / "second", "wheel")
    assert "`npm run build` failed" in said and "an error of the build" in said
    assert pages(tmp_path / "second") == {}


def test_without_a_network_the_install_works(tree: Path, tmp_path: Path) -> None:
    lock = NO_PACKAGES | {
        "packages": {
            "": {"name": "page", "version": "1.0.0", "dependencies": {"left-pad": "1.3.0"}},
            "node_modules/left-pad": {
                "version": "1.3.0",
                "integrity": "sha512-" + "A" * 86 + "==",
            },
        }
    }
    page = tree / "packages/dashboard"
    write(page / "package-lock.json", lock)
    about = json.loads((page / "package.json").read_text())
    write(page / "package.json", about | {"dependencies": {"left-pad": "1.3.0"}})
    env = {
        "npm_config_registry": "http://127.0.0.1:9/",
        "npm_config_cache": str(tmp_path / "cache"),
    }
    said = built(tree, tmp_path / "out", "wheel", env=env)
    assert "`npm ci --ignore-scripts` failed: npm error" in said


def test_the_build_can_be_left_out(tree: Path, tmp_path: Path) -> None:
    said = built(tree, tmp_path / "out", "wheel", env={"HUTCH_DASHBOARD": "skip"})
    assert "dashboard" not in said and pages(tmp_path / "out") == {}


@pytest.mark.parametrize("name", ["dashboard", "sdk"])
def test_packages_are_pinned_and_name_no_registry(name: str) -> None:
    lock = json.loads((ROOT / "packages" / name / "package-lock.json").read_text())
    assert not [path for path, entry in lock["packages"].items() if "resolved" in entry]
    assert (
        "omit-lockfile-registry-resolved=true" in (ROOT / "packages" / name / ".npmrc").read_text()
    )
