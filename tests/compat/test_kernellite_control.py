"""KernelLite's functions: servers that outlive the process that started them, and are found."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asking import PATIENCE, timed_out, wait_until

from hutch import InvalidRequest, StartFailed
from hutch.compat import kernellite
from hutch.compat.kernellite import (
    exec_code,
    interrupt,
    ping,
    shutdown,
    start_container,
    stop_container,
)
from hutch.images.store import data_dir


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "hutch"))


@pytest.fixture
def project(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "project"
    folder.mkdir()
    yield str(folder)
    stop_container("it")


def start(project: str, slug: str = "it", **more: str) -> str:
    return start_container(project, slug, image="host", **more)


def server_of(project: str) -> kernellite.RunningServer:
    found = kernellite.find_server(Path(project))
    assert found
    return found


def records() -> list[str]:
    return sorted(path.name for path in data_dir().glob("kernels/*.json"))


# --- the same as KernelLite's --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("build_image", ""),
     ("start_container", "project_dir slug idle_hibernate_sec=900 mem='4g' cpus='1.0' "
                         "socket_dir=None"),
     ("stop_container", "slug"), ("exec_code", "project_dir code timeout=120.0 socket_dir=None"),
     ("ping", "project_dir socket_dir=None"), ("shutdown", "project_dir socket_dir=None"),
     ("pandastool", "code")],
)  # fmt: skip
def test_the_functions_take_what_kernellites_took(name: str, parameters: str) -> None:
    signature = inspect.signature(getattr(kernellite, name))
    given = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in signature.parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert " ".join(given) == parameters


def test_a_session_from_its_start_to_its_end(project: str) -> None:
    assert start(project) == "sandbox_it"
    assert ping(project)
    exec_code(project, "x = 41")
    answer = exec_code(project, "print(x + 1)")
    assert answer == {"status": "[OK] exec", "stdout": "42\n", "stderr": ""}
    assert shutdown(project) is True
    assert not Path(project, ".sandbox/kernel.sock").exists()
    assert ping(project) is False and shutdown(project) is False
    stop_container("it")
    assert records() == []


def test_the_sockets_folder_can_be_chosen(project: str, tmp_path: Path) -> None:
    sockets = str(tmp_path / "sockets")
    start(project, socket_dir=sockets)
    assert ping(project, socket_dir=sockets)
    assert exec_code(project, "1", socket_dir=sockets)["stdout"] == "1\n"
    assert not Path(project, ".sandbox").exists()


def test_a_server_is_found_by_its_project_when_its_socket_is_elsewhere(
    project: str, tmp_path: Path
) -> None:
    start(project, socket_dir=str(tmp_path / "sockets"))
    assert ping(project)


# --- starting ------------------------------------------------------------------------------


def test_a_server_outlives_the_process_that_started_it(project: str) -> None:
    code = (
        "import sys; from hutch.compat.kernellite import start_container\n"
        "print(start_container(sys.argv[1], 'it', image='host'))"
    )
    argv = [sys.executable, "-W", "error", "-c", code, project]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("sandbox_it\n", "")
    assert exec_code(project, "'alive'")["stdout"] == "'alive'\n"
    stop_container("it")
    assert not ping(project)


def test_a_server_of_the_same_slug_is_replaced(project: str) -> None:
    start(project)
    exec_code(project, "old = 1")
    first = server_of(project)
    start(project)
    assert not first.is_alive
    assert exec_code(project, "'old' in globals()")["stdout"] == "False\n"


def test_a_server_that_does_not_come_up_is_an_error_and_leaves_nothing(project: str) -> None:
    with pytest.raises(StartFailed, match="cpus"):
        start(project, cpus="0")
    assert records() == [] and not ping(project)


def test_a_place_that_is_taken_is_an_error(project: str) -> None:
    start(project)
    with pytest.raises(StartFailed, match="listens at"):
        start(project, "other")
    assert ping(project)


def test_a_server_that_never_answers_is_ended(
    project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernellite, "START_TIMEOUT", 0.0)
    with pytest.raises(StartFailed, match="within"):
        start(project)
    assert records() == [] and not ping(project)


@pytest.mark.parametrize("slug", ["", "../up", "a/b", "-x", "a b", "ü", "x" * 200])
def test_a_slug_that_could_be_a_path_is_refused(slug: str, project: str) -> None:
    with pytest.raises(InvalidRequest):
        start(project, slug)
    with pytest.raises(InvalidRequest):
        stop_container(slug)


def test_a_project_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not a folder"):
        start("/nowhere/at/all")


def test_nothing_is_imported_from_the_folder_we_are_in(
    project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hutch", "asyncio", "socket"):
        Path(project, f"{name}.py").write_text("raise SystemExit('imported what a box wrote')")
    monkeypatch.chdir(project)
    start(".")
    assert ping(".")


# --- stopping ------------------------------------------------------------------------------


def test_stopping_twice_or_what_never_ran_is_no_error(project: str) -> None:
    stop_container("it")
    start(project)
    stop_container("it")
    stop_container("it")
    assert not ping(project) and records() == []


def test_when_stop_returns_the_server_and_its_socket_are_gone(project: str) -> None:
    start(project)
    server = server_of(project)
    stop_container("it")
    assert not server.is_alive and not Path(server.socket).exists()


def test_a_busy_server_is_stopped(project: str) -> None:
    start(project)
    code = "open('running', 'w')\nimport signal\nsignal.pthread_sigmask(0, [2])\nwhile True: pass"
    argv = [sys.executable, "-c", "import sys; from hutch.compat.kernellite import *\n"
            "print(exec_code(sys.argv[1], sys.argv[2])['status'])", project, code]  # fmt: skip
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as client:
        wait_until(Path(project, "running").exists)
        stop_container("it")
        assert client.communicate(timeout=PATIENCE)[0] == "[ERROR] server\n"


def test_a_server_that_was_killed_is_cleaned_up_after(project: str) -> None:
    start(project)
    server = server_of(project)
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_alive)
    assert Path(server.socket).exists() and not ping(project)
    stop_container("it")
    assert not Path(server.socket).exists() and records() == []


@pytest.mark.parametrize("lie", [{"began": 1}, {"boot": "another"}])
def test_a_stranger_with_the_same_number_is_never_touched(
    project: str, lie: dict[str, Any]
) -> None:
    with subprocess.Popen(["sleep", "600"]) as stranger:
        seen = kernellite.RunningServer.now(stranger.pid, Path(project), Path(project, "x.sock"))
        with kernellite.server_file("sandbox_it") as file:
            file.write(replace(seen, **lie))
        stop_container("it")
        assert stranger.poll() is None and records() == []
        stranger.kill()


def test_a_server_that_ended_is_no_zombie(project: str) -> None:
    start(project)
    server = server_of(project)
    shutdown(project)
    wait_until(lambda: not Path(f"/proc/{server.pid}").exists())


# --- asking --------------------------------------------------------------------------------


def test_a_timeout_has_the_output_so_far_and_the_variables_stay(project: str) -> None:
    start(project)
    code = "x = 1\nprint('begun')\nwhile True: pass"
    answer = timed_out(lambda timeout: exec_code(project, code, timeout=timeout))
    assert (answer["status"], answer["stdout"]) == ("[ERROR] exec", "begun\n")
    assert "TimeoutError" in answer["stderr"]
    assert exec_code(project, "x")["stdout"] == "1\n"


def test_a_cell_may_be_given_all_the_time_it_wants(project: str) -> None:
    start(project)
    assert exec_code(project, "import time; time.sleep(0.1); 1", timeout=None)["stdout"] == "1\n"


def test_a_cell_can_be_interrupted_from_elsewhere(project: str) -> None:
    start(project)
    argv = [sys.executable, "-c", "import sys; from hutch.compat.kernellite import *\n"
            "print(exec_code(sys.argv[1], sys.argv[2])['stderr'])", project,
            "open('running', 'w')\nwhile True: pass"]  # fmt: skip
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as client:
        wait_until(Path(project, "running").exists)
        assert interrupt(project)
        assert "KeyboardInterrupt" in client.communicate(timeout=PATIENCE)[0]


def test_without_a_server_code_is_not_run_and_that_is_an_error(project: str) -> None:
    with pytest.raises(FileNotFoundError):
        exec_code(project, "1")


def test_a_server_that_is_killed_before_it_answers_is_an_error(project: str) -> None:
    start(project)
    argv = [sys.executable, "-c", "import sys; from hutch.compat.kernellite import *\n"
            "try: exec_code(sys.argv[1], sys.argv[2])\n"
            "except ConnectionError: print('told')", project,
            "open('running', 'w')\nwhile True: pass"]  # fmt: skip
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as client:
        wait_until(Path(project, "running").exists)
        os.kill(server_of(project).pid, signal.SIGKILL)
        assert client.communicate(timeout=PATIENCE)[0] == "told\n"


def test_the_answers_are_json_that_can_be_passed_on(project: str) -> None:
    start(project)
    assert json.loads(json.dumps(exec_code(project, "print('\\udc80', 'ü')")))["stdout"]
