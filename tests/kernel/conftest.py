"""Kernels for tests: one with the standard library only, and one with the data packages."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels_of_tests import Kernel

PACKAGES = [
    "numpy", "pandas", "scipy", "matplotlib", "scikit-learn", "pyarrow", "plotly", "altair",
    "cloudpickle",
]  # fmt: skip


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def data_python() -> str:
    """A Python with the data packages: the one that is named, or one made once and kept."""
    if named := os.environ.get("HUTCH_TEST_DATA_PYTHON"):
        return named
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    name = hashlib.sha256(" ".join([version, *PACKAGES]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("HUTCH_TEST_CACHE", Path.home() / ".cache" / "hutch-tests"))
    folder = cache / f"data-{name}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"data-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once make it once
        if not (folder / "made").exists():
            _make(folder)
    return str(folder / "bin" / "python")


def _make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if uv := shutil.which("uv"):
        make = [uv, "venv", "-q", "-p", sys.executable, folder]
        fill = [uv, "pip", "install", "-q", "-p", folder / "bin" / "python", *PACKAGES]
    else:
        make = [sys.executable, "-m", "venv", folder]
        fill = [folder / "bin" / "python", "-m", "pip", "install", "-q", *PACKAGES]
    subprocess.run(make, check=True, timeout=300)
    subprocess.run(fill, check=True, timeout=1800)
    (folder / "made").touch()


@pytest.fixture(scope="module")
def data_kernel(data_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel with the data packages, for all tests of a module: importing them is slow."""
    with Kernel(tmp_path_factory.mktemp("data"), data_python) as made:
        yield made
