"""Hutch, installed from its wheel, works on every Python that it says it supports."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from must_work import need

ROOT = Path(__file__).parent.parent
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
SUPPORTED = [found[1] for each in CLASSIFIERS if (found := re.search(r":: (3\.\d+)$", each))]
THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"


def interpreter(version: str) -> str | None:
    """One from PATH or pyenv. On PATH there may be a shim of pyenv that leads nowhere."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for found in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return str(found)
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (built,) = folder.iterdir()
    return built


@pytest.mark.namespaces("it is about the interpreter that Hutch runs on")
@pytest.mark.parametrize("version", [version for version in SUPPORTED if version != THIS])
def test_a_command_and_a_cell_run_on_another_python(
    version: str, wheel: Path, tmp_path: Path
) -> None:
    python = interpreter(version)
    if python is None:
        need(f"python{version}", f"there is no Python {version} on PATH or in pyenv")
    uv, venv = Path(sys.executable).with_name("uv"), tmp_path / "venv"
    subprocess.run([uv, "venv", "-q", "--python", python, venv], check=True, timeout=60)
    constraint = ["--constraint", ROOT / "tests/newest.txt"]
    install = [uv, "pip", "install", "-q", "--python", venv, *constraint, wheel]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if "client error" in installed.stderr or "network" in installed.stderr:
        need("a package registry", installed.stderr)
    assert installed.returncode == 0, installed.stderr

    def hutch(*words: str) -> str:
        # -I: what is installed there, and not this checkout.
        done = subprocess.run(
            [venv / "bin/python", "-I", "-W", "error", "-m", "hutch", *words],
            env={name: value for name, value in os.environ.items() if name != "HUTCH_URL"},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if "namespaces" in done.stderr and "cannot" in done.stderr:
            need("namespaces", done.stderr)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return done.stdout

    assert hutch("run", "--", "sh", "-c", "echo from $PWD") == "from /workspace\n"
    # Not `host`, which has the Python of this machine: this image has the one Hutch runs on.
    code = "import sys; print(sys.version_info[:2]); 6 * 7"
    printed = hutch("python", "--image", "python", "-c", code)
    assert printed == f"({version.replace('.', ', ')})\n42\n"
