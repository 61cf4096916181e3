"""The server as a process: its socket, its log, its beginning and its end."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from asking import PATIENCE, Served, ask, connect, receive, send, wait_until


def is_alive(pid: int) -> bool:
    """An orphan that has ended may have to wait for its funeral; that is init's business."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- the beginning -------------------------------------------------------------------------


def test_it_says_when_it_has_started(served: Served) -> None:
    assert served.said == 'EVENT:{"type": "session_started"}\n'
    assert "[BOOT] sandbox daemon started" in served.log


def test_the_project_is_the_workspace(served: Served) -> None:
    (served.project / "here.txt").write_text("seen")
    assert served.exec("import os; os.getcwd(), open('here.txt').read()")["stdout"] == (
        "('/workspace', 'seen')\n"
    )
    served.exec("open('there.txt', 'w').write('made')")
    assert (served.project / "there.txt").read_text() == "made"


def test_the_socket_can_be_anywhere_and_its_log_is_beside_it(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "sockets/mine"
    project.mkdir()
    elsewhere.parent.mkdir()
    with Served(project, f"--socket={elsewhere}/kernel.sock"):
        with connect(elsewhere / "kernel.sock") as sock:
            assert ask(sock, {"op": "ping"}) == {"status": "[OK] pong"}
        assert not (project / ".sandbox").exists()
        assert "[BOOT]" in (elsewhere / "daemon.log").read_text()


def test_the_path_of_a_socket_may_be_long(tmp_path: Path) -> None:
    project = tmp_path / ("long" * 30)
    project.mkdir()
    with Served(project) as served:
        assert served.ask(op="ping") == {"status": "[OK] pong"}


def test_the_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    with Served(tmp_path) as first:
        first.end(signal.SIGKILL)
        assert stat.S_ISSOCK(first.path.stat().st_mode)
    with Served(tmp_path) as second:
        assert second.ask(op="ping") == {"status": "[OK] pong"}


def test_the_socket_of_a_live_server_is_not_touched(served: Served) -> None:
    with Served(served.project) as second:
        assert second.said == "" and second.process.wait(PATIENCE) == 125
        assert "listens at" in second.complaint()
    assert served.ask(op="ping") == {"status": "[OK] pong"}


def test_of_two_servers_that_start_at_once_one_serves(tmp_path: Path) -> None:
    found: list[Served] = []
    starting = [threading.Thread(target=lambda: found.append(Served(tmp_path))) for _ in range(2)]
    for each in starting:
        each.start()
    for each in starting:
        each.join()
    with found[0], found[1]:
        assert sorted(bool(each.said) for each in found) == [False, True]
        assert found[0].ask(op="ping") == {"status": "[OK] pong"}


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--project=/nowhere"], "not a folder"), ([], "--project"),
     (["--project=.", "--memory=much"], "--memory"), (["--project=.", "--cpus=all"], "--cpus"),
     (["--project=.", "--timeout=soon"], "--timeout"),
     (["--project=.", "--idle-hibernate=never"], "--idle-hibernate"),
     (["--project=.", "--image=no-such"], "no-such"), (["--porject=."], "--project")],
)  # fmt: skip
def test_a_wrong_option_is_told_in_one_line(options: list[str], says: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hutch", "kernel", *options]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (125, "")
    assert says in done.stderr and done.stderr.count("\n") == 1


# --- who may ask ---------------------------------------------------------------------------


def test_the_socket_is_for_its_owner_and_group_alone(served: Served) -> None:
    found = served.path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o660 and found.st_uid == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_other_users_cannot_connect(tmp_path_factory: pytest.TempPathFactory) -> None:
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    )
    folder = tmp_path_factory.mktemp("open")
    folder.chmod(0o755)
    for above in list(folder.parents)[:2]:
        above.chmod(above.stat().st_mode | 0o055)
    with Served(folder, f"--socket={folder}/kernel.sock"):
        argv = [sys.executable, "-c", code, f"{folder}/kernel.sock"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
    assert "PermissionError" in done.stderr


def test_the_code_in_the_box_sees_no_socket_and_no_log(served: Served) -> None:
    assert served.exec("import os; os.listdir('.sandbox')")["stdout"] == "[]\n"
    answer = served.exec("open('.sandbox/kernel.sock', 'w')")
    assert "Read-only" in answer["stderr"]
    answer = served.exec("os.rename('.sandbox', 'mine')")
    assert answer["status"] == "[ERROR] exec"
    assert served.ask(op="ping") == {"status": "[OK] pong"}


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    project.mkdir(), other.mkdir()
    (project / ".sandbox").symlink_to(other)
    with Served(project) as served:
        assert served.said == "" and "no socket can be made" in served.complaint()
    assert list(other.iterdir()) == []


def test_a_link_in_place_of_the_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".sandbox").mkdir()
    (tmp_path / "victim").write_text("mine\n")
    (tmp_path / ".sandbox/daemon.log").symlink_to(tmp_path / "victim")
    with Served(tmp_path) as served:
        assert served.said == "" and "daemon.log" in served.complaint()
    assert (tmp_path / "victim").read_text() == "mine\n"


@pytest.mark.parametrize("name", ["daemon.log", "kernel.sock"])
def test_a_pipe_in_place_of_a_file_hangs_nobody(name: str, tmp_path: Path) -> None:
    (tmp_path / ".sandbox").mkdir()
    os.mkfifo(tmp_path / ".sandbox" / name)
    with Served(tmp_path) as served:
        assert served.said == "" and name in served.complaint()


# --- the end -------------------------------------------------------------------------------


def test_shutdown_is_answered_and_the_socket_is_gone_by_then(served: Served) -> None:
    assert served.ask(op="shutdown") == {"status": "[OK] shutdown"}
    assert not served.path.exists()
    assert served.process.wait(PATIENCE) == 0
    assert "[STOP]" in served.log


def test_a_server_can_be_started_as_soon_as_shutdown_is_answered(served: Served) -> None:
    served.ask(op="shutdown")
    with Served(served.project) as second:
        served.process.wait(PATIENCE)
        assert second.ask(op="ping") == {"status": "[OK] pong"}


def test_a_shutdown_that_nobody_waits_for_is_carried_out(served: Served) -> None:
    with served.connect() as sock:
        send(sock, {"op": "shutdown"})
    assert served.process.wait(PATIENCE) == 0


def test_shutdown_does_not_wait_for_a_cell_and_its_client_is_told(served: Served) -> None:
    with served.start("open('running', 'w')\nwhile True: pass") as sock:
        served.wait_for("running")
        served.ask(op="shutdown")
        answer = receive(sock)
    assert answer["status"] == "[ERROR] server" and "shut down" in answer["stderr"]
    assert served.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(served: Served, number: int) -> None:
    launchers = children(served.process.pid)
    assert launchers
    with served.start("open('running', 'w')\nwhile True: pass"):
        served.wait_for("running")
        assert served.end(number) == 128 + number
    assert not served.path.exists() and served.complaint() == ""
    wait_until(lambda: not any(map(is_alive, launchers)))


def test_a_server_that_is_killed_leaves_no_box(served: Served) -> None:
    launchers = children(served.process.pid)
    assert launchers
    served.end(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, launchers)))
    with pytest.raises(ConnectionRefusedError):
        served.connect()


def test_a_box_that_is_lost_is_replaced(served: Served) -> None:
    [launcher] = children(served.process.pid)
    for zygote in children(launcher):
        os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: served.exec("1")["status"] == "[OK] exec")
    assert served.ask(op="ping") == {"status": "[OK] pong"}


def test_no_descriptor_is_lost_however_clients_leave(served: Served) -> None:
    folder = Path(f"/proc/{served.process.pid}/fd")
    served.exec("1")
    before = len(list(folder.iterdir()))
    for number in range(30):
        with served.connect() as sock:
            if number % 3:
                send(sock, {"op": "exec", "code": "1"})
            if number % 3 == 2:
                receive(sock)
    served.exec("1")
    wait_until(lambda: len(list(folder.iterdir())) <= before)


def test_a_socket_that_became_somebody_elses_is_left_alone(served: Served) -> None:
    served.path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        here = os.getcwd()
        os.chdir(served.path.parent)
        try:
            other.bind(served.path.name)
        finally:
            os.chdir(here)
        served.end()
        assert served.path.exists()


def test_a_socket_that_the_box_can_see_is_warned_of(tmp_path: Path) -> None:
    with Served(tmp_path, f"--socket={tmp_path}/kernel.sock") as served:
        with connect(tmp_path / "kernel.sock") as sock:
            assert ask(sock, {"op": "ping"}) == {"status": "[OK] pong"}
        served.end()
        assert "hidden" in served.complaint()
