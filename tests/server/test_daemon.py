"""`hutch serve` as a process: one per folder, killed and stopped, and what it leaves."""

from __future__ import annotations

import signal
import sqlite3
import threading
from pathlib import Path

import pytest

from daemon_of_tests import Daemon, wait_for
from hutch import Sandbox, ServerUnavailable, SessionEnded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def launchers(folder: Path) -> list[str]:
    """Processes that have this folder in use, beside the server."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd"):
        try:
            links = [str(link.readlink()) for link in path.iterdir()]
        except OSError:
            continue
        if any(link.startswith(f"{folder}/") for link in links):
            found.append(path.parent.name)
    return found


def test_a_second_server_on_one_folder_is_refused_and_told_who_has_it(folder: Path) -> None:
    with Daemon(folder, key=None) as first:
        with pytest.raises(RuntimeError) as refused:
            Daemon(folder, key=None).start()
        assert f"pid {first.card.pid}" in str(refused.value)
        assert first.url in str(refused.value)
        with Sandbox.create(url=first.url) as box:
            assert box.shell.run("echo on").stdout == "on\n"


def test_a_server_that_others_can_reach_wants_a_key(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="there is no key"):
        Daemon(folder, key=None, host="0.0.0.0").start()
    with Daemon(folder, host="0.0.0.0") as daemon:
        url = daemon.url.replace("0.0.0.0", "127.0.0.1")
        with Sandbox.create(url=url, api_key=daemon.key) as box:
            assert box.shell.run("echo in").stdout == "in\n"
    assert wait_for(lambda: launchers(folder) == [])


def test_a_client_goes_on_with_its_box_after_the_server_was_killed(folder: Path) -> None:
    with Daemon(folder, key=None) as daemon:
        box = Sandbox.create(url=daemon.url, ttl=300)
        box.shell.run("A=1; cd /tmp")
        box.run_code("x = 2")
        server = box.commands.run("while :; do date; sleep 0.1; done", background=True)
        daemon.crash()
        restart = threading.Timer(0.5, daemon.start)
        restart.start()
        assert box.files.list("/tmp") == []  # sent while no server answers: it is sent again
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
def test_a_stop_leaves_sessions_to_the_next_and_nothing_else(folder: Path, number: int) -> None:
    with Daemon(folder, key=None) as daemon:
        box = Sandbox.create(url=daemon.url)
        box.shell.run("A=1")
        assert daemon.signal(number) == 0
        assert not (folder / "run" / "daemon.json").exists()
        assert not (folder / "run" / "hutch.sock").exists()
        daemon.start()
        again = Sandbox.connect(box.id, url=daemon.url)
        assert again.shell.run("echo $A").stdout == "1\n"
        again.close()
        assert daemon.signal(signal.SIGTERM) == 0
        assert wait_for(lambda: launchers(folder) == []), "no session was left, and still"


def test_of_a_burst_of_creates_past_the_bound_each_is_served_in_the_end(folder: Path) -> None:
    with Daemon(folder, max_starts="1", max_waiting="1") as daemon:
        boxes: list[Sandbox] = []

        def create() -> None:
            boxes.append(Sandbox.create(url=daemon.url, api_key=daemon.key))

        threads = [threading.Thread(target=create) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({box.id for box in boxes}) == 8


def test_a_drain_waits_for_the_command_that_runs(folder: Path) -> None:
    with Daemon(folder, key=None) as daemon:
        box = Sandbox.create(url=daemon.url)
        said: list[str] = []
        work = threading.Thread(
            target=lambda: said.append(box.shell.run("touch begun; sleep 2; echo whole").stdout)
        )
        work.start()
        assert wait_for(lambda: box.files.exists("begun"), 120)
        daemon.stop("--drain", "120")
        work.join()
        assert said == ["whole\n"]
        daemon.start()
        Sandbox.connect(box.id, url=daemon.url).close()


def test_stop_kill_ends_the_sessions_too(folder: Path) -> None:
    daemon = Daemon(folder, key=None).start()
    Sandbox.create(url=daemon.url)
    daemon.stop("--kill")
    assert wait_for(lambda: launchers(folder) == [])


def test_a_locked_database_is_told_and_commands_go_on(folder: Path) -> None:
    with Daemon(folder, key=None) as daemon, Sandbox.create(url=daemon.url) as box:
        other = sqlite3.connect(folder / "hutch.db", isolation_level=None)
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


def test_a_folder_of_a_newer_version_is_refused_and_left_alone(folder: Path) -> None:
    (folder / "run").mkdir(mode=0o700, parents=True)
    newer = sqlite3.connect(folder / "hutch.db")
    newer.execute("PRAGMA user_version = 9999")
    newer.close()
    before = (folder / "hutch.db").read_bytes()
    with pytest.raises(RuntimeError, match="newer"):
        Daemon(folder, key=None).start()
    assert (folder / "hutch.db").read_bytes() == before
    assert wait_for(lambda: launchers(folder) == [])


def test_what_cannot_be_written_or_read_in_its_folder_does_not_end_a_server(folder: Path) -> None:
    (folder / "run/daemon.new").mkdir(parents=True)  # as a full disk: the card cannot be written
    (folder / "run/stop.json").mkdir()
    folder.chmod(0o755)
    daemon = Daemon(folder, key=None).start()
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert "cannot write run/daemon.json" in daemon.complaint()
        with Sandbox.create(url=daemon.url) as box:
            assert box.shell.run("echo on").stdout == "on\n"
    finally:
        code = daemon.signal(signal.SIGTERM)
    assert code == 0
    assert wait_for(lambda: launchers(folder) == [])


def test_an_order_to_stop_that_makes_no_sense_is_not_followed(folder: Path) -> None:
    with Daemon(folder, key=None) as daemon:
        box = Sandbox.create(url=daemon.url)
        (folder / "run/stop.json").write_text('{"drain": "long", "kill": "yes"}')
        assert daemon.signal(signal.SIGTERM) == 0
        daemon.start()
        assert Sandbox.connect(box.id, url=daemon.url).shell.run("echo on").stdout == "on\n"
