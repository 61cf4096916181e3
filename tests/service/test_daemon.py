"""`hutch serve` as a process: one per folder, killed and stopped, and what it leaves."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from daemons import Daemon, wait_for

from hutch import Sandbox, ServerUnavailable, SessionEnded

KEY = "test-key-1234567890"


def launchers(folder: Path) -> list[str]:
    """Processes that have this folder in use, beside the server."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd"):
        try:
            links = [str(link.readlink()) for link in path.iterdir()]
        except OSError:
            continue
        if any(link.startswith(str(folder)) for link in links):
            found.append(path.parent.name)
    return found


def test_a_second_server_on_one_folder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with Daemon(tmp_path) as first:
        with pytest.raises(RuntimeError) as refused:
            Daemon(tmp_path).start()
        assert f"pid {first.card['pid']}" in str(refused.value)
        assert first.url in str(refused.value)
        with Sandbox.create(url=first.url) as box:
            assert box.shell.run("echo on").stdout == "on\n"


def test_a_server_that_others_can_reach_wants_a_key(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="there is no key"):
        Daemon(tmp_path, "--listen", "0.0.0.0:0").start()
    with Daemon(tmp_path, "--listen", "0.0.0.0:0", HUTCH_API_KEY=KEY) as daemon:
        url = daemon.url.replace("0.0.0.0", "127.0.0.1")
        with Sandbox.create(url=url, api_key=KEY) as box:
            assert box.shell.run("echo in").stdout == "in\n"
    assert wait_for(lambda: launchers(tmp_path) == [])


def test_a_client_goes_on_with_its_box_after_the_server_was_killed(tmp_path: Path) -> None:
    port = "127.0.0.1:18731"
    with Daemon(tmp_path, "--listen", port) as daemon:
        box = Sandbox.create(url=daemon.url, ttl=300)
        box.shell.run("A=1; cd /tmp")
        box.run_code("x = 2")
        server = box.commands.run("while :; do date; sleep 0.1; done", background=True)
        daemon.kill()
        restart = threading.Timer(0.5, daemon.start)
        restart.start()
        assert box.files.list("/tmp") == []  # asked while nobody answers: it is asked again
        restart.join()
        assert box.shell.run("echo $A $PWD").stdout == "1 /tmp\n"
        assert box.run_code("x").text == "2"
        before = len(server.stdout())
        assert wait_for(lambda: len(server.stdout()) > before)
        again = Sandbox.connect(box.id, url=daemon.url)
        assert again.shell.run("echo $A").stdout == "1\n"
        box.close()
        with pytest.raises(SessionEnded):
            again.shell.run("true")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_leaves_sessions_to_the_next_and_nothing_else(tmp_path: Path, number: int) -> None:
    with Daemon(tmp_path) as daemon:
        box = Sandbox.create(url=daemon.url)
        box.shell.run("A=1")
        daemon.signal(number)
        assert daemon.wait() == 0
        assert not (tmp_path / "run" / "daemon.json").exists()
        assert not (tmp_path / "run" / "hutch.sock").exists()
        daemon.start()
        again = Sandbox.connect(box.id, url=daemon.url)
        assert again.shell.run("echo $A").stdout == "1\n"
        again.close()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert wait_for(lambda: launchers(tmp_path) == []), "no session was left, and still"


def test_a_drain_waits_for_the_command_that_runs(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        box = Sandbox.create(url=daemon.url)
        said: list[str] = []
        work = threading.Thread(
            target=lambda: said.append(box.shell.run("sleep 1.5; echo whole").stdout)
        )
        work.start()
        time.sleep(0.5)
        daemon.stop("--drain", "20")
        work.join()
        assert said == ["whole\n"]
        daemon.start()
        Sandbox.connect(box.id, url=daemon.url).close()


def test_stop_kill_ends_the_sessions_too(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path).start()
    Sandbox.create(url=daemon.url)
    daemon.stop("--kill")
    assert wait_for(lambda: launchers(tmp_path) == [])


def test_a_locked_database_is_told_and_commands_go_on(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Sandbox.create(url=daemon.url) as box:
        other = sqlite3.connect(tmp_path / "hutch.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        try:
            assert box.shell.run("echo on").stdout == "on\n"
            with pytest.raises(ServerUnavailable, match="locked by another process"):
                Sandbox.create(url=daemon.url)
            assert box.shell.run("echo on").stdout == "on\n"
        finally:
            other.execute("ROLLBACK")
            other.close()
        with Sandbox.create(url=daemon.url) as second:
            assert second.shell.run("echo two").stdout == "two\n"


def test_a_folder_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    newer = sqlite3.connect(tmp_path / "hutch.db")
    newer.execute("PRAGMA user_version = 9999")
    newer.close()
    before = (tmp_path / "hutch.db").read_bytes()
    with pytest.raises(RuntimeError, match="newer"):
        Daemon(tmp_path).start()
    assert (tmp_path / "hutch.db").read_bytes() == before
    assert wait_for(lambda: launchers(tmp_path) == [])
