"""A release is made whole or not at all, and the same commit gives the same files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
RELEASED = ["src", "scripts", "deploy", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md",
            "openapi.json", "hatch_build.py", ".gitignore", "tests/newest.txt"]  # fmt: skip
VERSION = "9.8.0"
FILES = {
    "RELEASE_NOTES.md", "SHA256SUMS", "hutch.cdx.json",
    f"hutch-{VERSION}.tar.gz", f"hutch-{VERSION}-py3-none-any.whl",
}  # fmt: skip


class Repository:
    """A repository with what is released in it, and a version to release."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def git(self, *words: str) -> str:
        who = ["-c", "user.name=tests", "-c", "user.email=tests@example.com"]
        done = subprocess.run(
            ["git", *who, "-C", str(self.folder), *words],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def release(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, self.folder / "scripts/release", *arguments],
            env={**os.environ, "GIT_AUTHOR_NAME": "tests", "GIT_AUTHOR_EMAIL": "t@example.com",
                 "GIT_COMMITTER_NAME": "tests", "GIT_COMMITTER_EMAIL": "t@example.com"},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    def state(self) -> tuple[str, str, str]:
        return self.git("rev-parse", "HEAD"), self.git("tag"), self.git("status", "--porcelain")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    folder = tmp_path_factory.mktemp("release") / "original"
    for name in RELEASED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)
    (folder / "images").symlink_to("src/hutch/recipes/images")
    (folder / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## {VERSION} — unreleased\n\n- A thing.\n\n## 9.7.0 — unreleased\n"
    )
    repository = Repository(folder)
    repository.git("init", "-q", "-b", "main")
    repository.git("add", "-A")
    repository.git("commit", "-q", "-m", "All of it")
    return repository


@pytest.fixture
def repository(original: Repository, tmp_path: Path) -> Repository:
    original.git("clone", "-q", str(original.folder), str(tmp_path / "clone"))
    return Repository(tmp_path / "clone")


def test_a_dry_run_builds_everything_and_changes_nothing(
    repository: Repository, tmp_path: Path
) -> None:
    before, out = repository.state(), tmp_path / "out"
    done = repository.release(VERSION, "--dry-run", "--out", out)
    assert done.returncode == 0, done.stderr
    assert repository.state() == before
    assert {path.name for path in out.iterdir()} == FILES
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, _, name = line.partition("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert (out / "RELEASE_NOTES.md").read_text() == "- A thing."
    with zipfile.ZipFile(out / f"hutch-{VERSION}-py3-none-any.whl") as wheel:
        assert f'__version__ = "{VERSION}"' in wheel.read("hutch/__init__.py").decode()
        assert "hutch/py.typed" in wheel.namelist()
        top = {name.partition("/")[0] for name in wheel.namelist()}
        assert top == {"hutch", f"hutch-{VERSION}.dist-info"}
        modules = {name for name in wheel.namelist() if name.startswith("hutch/")}
    with tarfile.open(out / f"hutch-{VERSION}.tar.gz") as sdist:
        sources = {name.removeprefix(f"hutch-{VERSION}/") for name in sdist.getnames()}
    assert "pyproject.toml" in sources
    # A wheel that is built from the sources has everything, too.
    assert {f"src/{name}" for name in modules} <= sources


def test_the_bill_of_materials_names_all_that_an_installation_brings_along(
    repository: Repository, tmp_path: Path
) -> None:
    assert repository.release(VERSION, "--dry-run", "--out", tmp_path / "out").returncode == 0
    sbom = json.loads((tmp_path / "out/hutch.cdx.json").read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    assert sbom["metadata"]["component"]["purl"] == f"pkg:pypi/hutch@{VERSION}"
    components = {component["name"]: component["purl"] for component in sbom["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        if not requirement.marker or requirement.marker.evaluate():
            assert requirement.name in components
    assert "cffi" in components, "what cryptography needs"
    assert "anyio" in components, "an extra of httpcore that we ask for"
    assert not {"pytest", "aiodocker"} & set(components), "these are installed only on request"
    known = {*components.values(), f"pkg:pypi/hutch@{VERSION}"}
    assert {entry["ref"] for entry in sbom["dependencies"]} == known
    assert {each for entry in sbom["dependencies"] for each in entry["dependsOn"]} <= known


def test_a_release_is_a_commit_and_a_tag_that_build_the_same_again(
    repository: Repository, tmp_path: Path
) -> None:
    before = repository.git("rev-parse", "HEAD")
    done = repository.release(VERSION, "--out", tmp_path / "first")
    assert done.returncode == 0, done.stderr
    assert f"git push --atomic origin HEAD v{VERSION}" in done.stdout
    assert repository.git("rev-parse", "HEAD^") == before
    assert repository.git("tag", "--points-at", "HEAD") == f"v{VERSION}"
    assert repository.git("cat-file", "-t", f"v{VERSION}") == "tag"
    changed = repository.git("diff", "--name-only", "HEAD^").split()
    assert changed == [
        "CHANGELOG.md",
        "deploy/helm/hutch/Chart.yaml",
        "openapi.json",
        "pyproject.toml",
        "src/hutch/__init__.py",
    ]
    heading = (repository.folder / "CHANGELOG.md").read_text().splitlines()[2]
    assert heading.startswith(f"## {VERSION} — 20")

    again = repository.release("--build", "--out", tmp_path / "second")
    assert again.returncode == 0, again.stderr
    for name in FILES:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_what_is_not_ready_is_refused_with_the_reason(
    repository: Repository, tmp_path: Path
) -> None:
    repository.git("tag", "v9.7.0")

    def refused(*arguments: str) -> str:
        before = repository.state()
        done = repository.release(*arguments, "--out", tmp_path / "out")
        assert done.returncode == 1 and repository.state() == before, done.stdout + done.stderr
        assert not list(tmp_path.glob("out/*"))
        return done.stderr

    assert "no section '## 9.9.0 — unreleased'" in refused("9.9.0")
    assert "the tag v9.7.0 exists" in refused("9.7.0")
    repository.git("tag", "--delete", "v9.7.0")
    assert "says nothing about 9.7.0" in refused("9.7.0")
    assert "not a version" in refused("v9.8.0")
    assert "HEAD is not tagged" in refused("--build")
    (repository.folder / "notes.txt").write_text("not committed\n")
    assert "not committed:\n?? notes.txt" in refused(VERSION)


def test_a_folder_that_holds_another_release_is_not_added_to(
    repository: Repository, tmp_path: Path
) -> None:
    (tmp_path / "hutch-0.0.1.tar.gz").touch()
    done = repository.release(VERSION, "--out", tmp_path)
    assert done.returncode == 1 and "is not empty: " in done.stderr
