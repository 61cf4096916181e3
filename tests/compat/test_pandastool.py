"""`pandastool`, as an agent calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asking import Served

from hutch.compat.kernellite import pandastool


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "data").mkdir()
    with Served(folder):
        yield folder


def call(code: str, **more: Any) -> dict[str, str]:
    answer: dict[str, str] = json.loads(pandastool(code, **more))
    assert list(answer) == ["status", "stdout", "stderr"]
    return answer


def test_variables_stay_between_calls(project: Path) -> None:
    assert call("x = 1", project_dir=str(project))["status"] == "[OK] exec"
    assert call("x + 1", project_dir=str(project))["stdout"] == "2\n"


def test_the_project_can_come_from_the_environment(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANDAS_SANDBOX_PROJECT_DIR", str(project))
    assert call("1")["stdout"] == "1\n"


def test_the_project_can_come_from_the_database(project: Path) -> None:
    assert call("1", db=SimpleNamespace(root_dir=project))["stdout"] == "1\n"


def test_the_sockets_folder_can_be_given(project: Path) -> None:
    more = {"project_dir": str(project), "socket_dir": str(project / ".sandbox")}
    assert call("1", **more)["stdout"] == "1\n"


def test_the_root_of_the_datasets_is_a_path_in_the_box(project: Path) -> None:
    code = "import os; DB_ROOT, os.path.isdir(DB_ROOT)"
    assert call(code, project_dir=str(project))["stdout"] == "('/workspace/data', True)\n"


def test_the_datasets_are_named_in_order_and_unfinished_ones_are_not(project: Path) -> None:
    for name in ("b", "a", ".half"):
        (project / f"data/{name}.parquet").touch()
    assert call("DATASETS", project_dir=str(project))["stdout"] == "['a', 'b']\n"


def test_secrets_in_the_configuration_are_masked_however_deep(project: Path) -> None:
    config = {
        "model": "m", "API_KEY": "k1", "auth": {"Token": "k2", "user": "me"},
        "list": [{"password": "k3"}], "client_secret": {"deep": "k4"},
    }  # fmt: skip
    answer = call("print(CFG)", project_dir=str(project), config=config)
    for secret in ("k1", "k2", "k3", "k4"):
        assert secret not in answer["stdout"]
    assert answer["stdout"].count("***") == 4 and "'user': 'me'" in answer["stdout"]


def test_every_configuration_can_be_written_as_python(project: Path) -> None:
    config = {"yes": True, "none": None, "half": 0.5, "nan": float("nan"), 1: Path("/x"),
              "quote": "'\"\n\\"}  # fmt: skip
    seen = {**config, "nan": "nan", "1": "/x"}
    del seen[1]
    answer = call(f"CFG == {seen!r}", project_dir=str(project), config=config)
    assert answer["stdout"] == "True\n"


def test_a_configuration_of_another_kind_is_left_out(project: Path) -> None:
    assert call("CFG", project_dir=str(project), config="text")["stdout"] == "{}\n"


def test_lines_in_a_traceback_are_those_of_the_code(project: Path) -> None:
    answer = call("x = 1\n1 / 0", project_dir=str(project))
    assert answer["status"] == "[ERROR] exec" and "line 2" in answer["stderr"]


@pytest.mark.parametrize("code", ["", "  \n", None, 5])
def test_empty_code_is_an_error(code: Any, project: Path) -> None:
    answer = call(code, project_dir=str(project))
    assert answer == {"status": "[ERROR] exec", "stdout": "", "stderr": "empty code"}


def test_a_project_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANDAS_SANDBOX_PROJECT_DIR", raising=False)
    for project_dir in (None, "/nowhere/at/all"):
        answer = call("1", project_dir=project_dir)
        assert answer == {"status": "[ERROR] exec", "stdout": "", "stderr": "invalid project_dir"}


def test_without_a_server_it_says_so_and_raises_nothing(tmp_path: Path) -> None:
    answer = call("1", project_dir=str(tmp_path))
    assert answer["status"] == "[ERROR] exec" and "FileNotFoundError" in answer["stderr"]
