"""What tests of projects share is beside them, and beside the tests of images and of the CLI."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "images"), str(HERE.parent / "cli")]

from wheels_of_tests import Index  # noqa: E402


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of its own, and no server."""
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))
    for name in ("HUTCH_URL", "HUTCH_API_KEY", "HUTCH_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "data"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with one file in it, whose name is of the kind that breaks scripts."""
    folder = tmp_path / "my $(touch owned) project"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n")
    return folder


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place that packages of Python come from."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    with Index("none") as empty:
        monkeypatch.setenv("UV_DEFAULT_INDEX", empty.url)
        yield folder
