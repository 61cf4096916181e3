"""The versions of other packages that Hutch says it works with are those it works with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from must_work import need

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE: list[str] = PROJECT["dependencies"]
EXTRAS: list[str] = [
    requirement
    for extra in ("docker", "mcp")
    for requirement in PROJECT["optional-dependencies"][extra]
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


@pytest.mark.namespaces("it is about the packages of the server")
@pytest.mark.parametrize("requirements", [CORE, [*CORE, *EXTRAS]], ids=["core", "with extras"])
def test_a_server_runs_on_the_oldest_versions_that_are_allowed(
    tmp_path: Path, requirements: list[str]
) -> None:
    place, uv = tmp_path / "venv", Path(sys.executable).with_name("uv")
    python = place / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, place], check=True, timeout=60)
    # Transitive ones are the newest: those are for their owners to bound.
    install = [uv, "pip", "install", "-q", "--python", python, "--only-binary", ":all:"]
    install += ["--resolution", "lowest-direct", *requirements]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if "client error" in installed.stderr or "network" in installed.stderr:
        need("a package registry", installed.stderr)
    assert installed.returncode == 0, installed.stderr
    done = subprocess.run(
        [python, ROOT / "tests" / "round_trip.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if "BackendUnavailable" in done.stdout:
        need("namespaces", done.stdout)
    assert done.returncode == 0 and "all of it works" in done.stdout, done.stdout
    assert "Traceback" not in done.stdout
