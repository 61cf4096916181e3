"""The versions of other packages that Hutch says it works with are those it works with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
from must_work import need
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE: list[str] = PROJECT["dependencies"]
EXTRAS: list[str] = [
    requirement
    for extra in ("docker", "kubernetes", "mcp")
    for requirement in PROJECT["optional-dependencies"][extra]
]
NEWEST = ROOT / "tests" / "newest.txt"
PINS = ROOT / "tests" / "integrations" / "pins"
FRAMEWORKS: list[str] = [
    requirement
    for extra, requirements in PROJECT["optional-dependencies"].items()
    if extra not in ("docker", "kubernetes", "mcp", "docs", "dev")
    for requirement in requirements
]
INTERNALS = ("uvicorn", "httptools", "websockets", "aiodocker")  # of which we use some


@pytest.mark.parametrize("requirement", [*CORE, *EXTRAS])
def test_every_requirement_says_from_which_version_on(requirement: str) -> None:
    assert re.match(
        r"[a-z0-9-]+(\[[a-z]+\])?>=[0-9.]+(,<[0-9.]+)?(; python_version < '3.14')?$",
        requirement,
    )


@pytest.mark.parametrize("package", INTERNALS)
def test_packages_whose_internals_are_used_have_an_upper_bound(package: str) -> None:
    (found,) = (each for each in (*CORE, *EXTRAS) if re.split(r"[\[<>=]", each)[0] == package)
    assert ",<" in found


def pins(*files: Path) -> dict[str, str]:
    """The versions that files pin, by package. A line pins one, and names no other place."""
    found: dict[str, str] = {}
    for line in "\n".join(file.read_text() for file in files).splitlines():
        if line and not line.startswith("#"):
            (pinned,) = Requirement(line).specifier
            assert pinned.operator == "=="
            found[canonicalize_name(Requirement(line).name)] = pinned.version
    return found


@pytest.mark.parametrize("requirement", FRAMEWORKS)
def test_a_framework_is_tested_with_the_lowest_version_that_is_allowed(requirement: str) -> None:
    wanted = Requirement(requirement)
    (lowest,) = (each.version for each in wanted.specifier if each.operator == ">=")
    tested = pins(PINS / "lowest.txt", PINS / "more-lowest.txt")[canonicalize_name(wanted.name)]
    assert Requirement(f"x=={lowest}").specifier.contains(tested, prereleases=True), (
        f"{requirement}: its lowest version is tested with {tested}. "
        "Run scripts/integrations pin, or raise the bound"
    )


@pytest.mark.parametrize("requirement", FRAMEWORKS)
def test_a_framework_may_release_new_minor_versions(requirement: str) -> None:
    for bound in Requirement(requirement).specifier:
        if bound.operator != ">=":
            assert re.fullmatch(r"<\d+", str(bound)), "only a new major version may be refused"


@pytest.mark.parametrize(
    ("version", "allowed"), [("2.9", True), ("3.0b1", True), ("4.0", False), ("1.9", False)]
)
def test_a_newest_release_that_works_and_is_not_allowed_is_told(
    version: str, allowed: bool
) -> None:
    loader = SourceFileLoader("integrations", str(ROOT / "scripts" / "integrations"))
    spec = spec_from_loader("integrations", loader)
    assert spec
    loader.exec_module(integrations := module_from_spec(spec))
    assert integrations.allows("some-framework[all]>=2,<4", {"some-framework[all]": version}) is (
        allowed
    )


def test_the_newest_version_of_each_requirement_is_pinned_within_its_bounds() -> None:
    newest = pins(NEWEST)
    for each in (*CORE, *EXTRAS):
        wanted = Requirement(each)
        assert wanted.specifier.contains(newest[canonicalize_name(wanted.name)]), each


@pytest.mark.namespaces("it is about the packages of the server")
@pytest.mark.parametrize(
    ("resolution", "requirements"),
    [
        (["--resolution", "lowest-direct"], CORE),
        (["--resolution", "lowest-direct"], [*CORE, *EXTRAS]),
        # Pinned, so that a release of others cannot fail our tests: `scripts/integrations newest
        # core` tries what is the newest today.
        (["--constraint", str(NEWEST)], [*CORE, *EXTRAS]),
    ],
    ids=["lowest core", "lowest with extras", "newest with extras"],
)
def test_a_server_runs_on_the_lowest_and_the_newest_versions(
    tmp_path: Path, resolution: list[str], requirements: list[str]
) -> None:
    place, uv = tmp_path / "venv", Path(sys.executable).with_name("uv")
    python = place / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, place], check=True, timeout=60)
    # Transitive ones are the newest: those are for their owners to bound.
    install = [uv, "pip", "install", "-q", "--python", python, "--only-binary", ":all:"]
    install += [*resolution, *requirements]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if "client error" in installed.stderr or "network" in installed.stderr:
        need("a package registry", installed.stderr)
    assert installed.returncode == 0, installed.stderr
    foreign = tmp_path / "foreign"  # another user's server
    code, said = run_group(
        [python, ROOT / "tests" / "round_trip.py"],
        {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HUTCH_DATA_DIR": str(foreign)},
    )
    if "BackendUnavailable" in said:
        need("namespaces", said)
    assert code == 0 and "all of it works" in said, said
    assert "Traceback" not in said and not foreign.exists()


def run_group(argv: list[object], env: dict[str, str]) -> tuple[int, str]:
    """The exit code and the output of a program that leaves no process, also if it hangs."""
    process = subprocess.Popen(
        list(map(str, argv)),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=300)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said = process.communicate()[0]
        raise AssertionError(f"it hangs: {said}") from None
    return process.returncode, said
