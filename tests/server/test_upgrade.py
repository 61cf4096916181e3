"""Another version of Hutch is installed in the place of the one that runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_of_tests import Daemon, wait_for
from docker_of_tests import DEBIAN, Client
from hutch import IncompatibleBox, Sandbox, SessionEnded
from installed import Installation

PATIENCE = 60
OLD, NEW, NEWEST = "0.7.1", "0.7.2", "0.8.0"
WIRE = "VERSION = 1\nOLDEST = 1"
ADDS = {"wire/connection.py": (WIRE, "VERSION = 2\nOLDEST = 1")}


def adds(request: str) -> dict[str, tuple[str, str]]:
    """A version whose protocol has a request that guests of before do not know."""
    since = "SINCE: dict[str, int] = {"
    return {**ADDS, "wire/events.py": (since + "}", f'{since}"{request}": 2}}')}


BREAKS = {
    "wire/connection.py": (WIRE, "VERSION = 3\nOLDEST = 3"),
    "engine/hibernate.py": ("FORMAT = 2\n", "FORMAT = 3\n"),
}


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def daemon(installation: Installation, tmp_path: Path) -> Iterator[Daemon]:
    """A server of the old version."""
    installation.install(OLD)
    with Daemon(tmp_path / "data", key=None, program=installation.program) as made:
        yield made


@pytest.fixture(params=["namespaces", "docker"])
def server(
    request: pytest.FixtureRequest, installation: Installation, tmp_path: Path
) -> Iterator[Daemon]:
    """A server of the old version, on each backend."""
    settings = {"backend": request.param}
    if request.param == "docker":
        engine: Client = request.getfixturevalue("docker_engine")
        assert engine
        settings["default_image"] = DEBIAN
    installation.install(OLD)
    program = installation.program
    with Daemon(tmp_path / "data", key=None, program=program, **settings) as made:
        yield made


def replace(daemon: Daemon, installation: Installation, *version: Any) -> None:
    """Install another version, and restart the server."""
    installation.install(*version)
    daemon.crash()
    daemon.start()


def launchers(daemon: Daemon) -> list[str]:
    return sorted(path.name for path in (daemon.folder / "run").glob("launcher*.sock"))


def copies(daemon: Daemon) -> list[str]:
    return sorted(path.name for path in (daemon.folder / "run").glob("code-*"))


def begin(daemon: Daemon) -> Sandbox:
    """A session with something in its shell and in its kernel."""
    box = Sandbox.create(url=daemon.url, ttl=600)
    box.shell.run("A=kept; cd /tmp")
    box.run_code("x = 41")
    return box


def check(daemon: Daemon, box: Sandbox) -> None:
    """That session is as it was, and can do all that it could."""
    again = Sandbox.connect(box.id, url=daemon.url)
    assert again.shell.run("echo $A $PWD").stdout == "kept /tmp\n"
    assert again.run_code("x + 1").text == "42"
    # This starts a process that imports from the code in the box.
    context = again.create_code_context()
    loads = "import hutch_kernel.state, cloudpickle.cloudpickle; 1"
    assert again.run_code(loads, context=context).text == "1"
    again.remove_code_context(context)


def check_new(daemon: Daemon) -> Sandbox:
    box = begin(daemon)
    check(daemon, box)
    return box


def test_sessions_go_on_and_new_ones_start_after_an_upgrade_in_place(
    daemon: Daemon, installation: Installation
) -> None:
    box = begin(daemon)
    asleep = begin(daemon)
    asleep.hibernate()

    installation.install(NEW)
    check(daemon, box)
    check_new(daemon).close()
    check(daemon, asleep)
    asleep.hibernate()
    assert len(launchers(daemon)) == 1

    daemon.stop()
    daemon.start()
    check(daemon, box)
    new = check_new(daemon)
    assert len(launchers(daemon)) == len(copies(daemon)) == 2  # each has its own
    check(daemon, asleep)  # it wakes in a box of the new version
    box.close()
    assert wait_for(lambda: Sandbox.list(url=daemon.url) and len(launchers(daemon)) == 1, PATIENCE)
    assert wait_for(lambda: len(copies(daemon)) == 1, PATIENCE)
    check(daemon, new)
    asleep.hibernate()

    installation.install(OLD)
    daemon.crash()
    daemon.start()
    check(daemon, new)
    check(daemon, asleep)
    check_new(daemon)
    assert len(launchers(daemon)) == 2
    daemon.stop("--kill")
    assert wait_for(lambda: not launchers(daemon) and not copies(daemon), PATIENCE)
    daemon.start()


def test_versions_of_the_protocol_that_overlap_serve_each_others_sessions(
    server: Daemon, installation: Installation
) -> None:
    box = begin(server)
    replace(server, installation, NEW, ADDS)
    check(server, box)
    newer = check_new(server)
    replace(server, installation, OLD)
    check(server, box)
    check(server, newer)


def test_what_an_older_box_cannot_do_can_be_done_after_it_was_hibernated(
    daemon: Daemon, installation: Installation
) -> None:
    box = begin(daemon)
    replace(daemon, installation, NEW, adds("glob"))
    again = Sandbox.connect(box.id, url=daemon.url)
    with pytest.raises(IncompatibleBox, match="Hibernate the session, and it wakes in a box of"):
        again.files.glob("*")
    again.hibernate()
    assert again.files.glob("*.txt") == []
    check(daemon, box)


def test_an_idle_box_that_is_too_old_to_be_saved_is_tried_once(
    daemon: Daemon, installation: Installation
) -> None:
    box = Sandbox.create(url=daemon.url, ttl=600, idle=1, on_idle="hibernate")
    busy = box.commands.run(["sleep", "1000"], background=True)
    soon = {"engine/lifecycle.py": ("\nNAP = 30 ", "\nNAP = 0.1 ")}
    replace(daemon, installation, NEW, {**adds("pack"), **soon})
    again = Sandbox.connect(box.id, url=daemon.url)
    with pytest.raises(IncompatibleBox, match="copy its files to a new session"):
        again.hibernate()
    busy.kill()

    def failures() -> list[str]:
        journal = daemon.folder / "sessions" / box.id / "journal.jsonl"
        entries = map(json.loads, journal.read_text().splitlines())
        return [entry["body"]["why"] for entry in entries if entry["kind"] == "not_saved"]

    assert wait_for(failures, PATIENCE)
    for _ in range(3):
        assert again.shell.run("echo awake").stdout == "awake\n"
        time.sleep(2)
    (why,) = failures()
    assert "older version" in why and "not tried again" in why
    assert again.refresh().status == "running"


def test_a_session_of_a_version_that_cannot_be_served_is_kept_for_one_that_can(
    server: Daemon, installation: Installation
) -> None:
    box, other, asleep = begin(server), begin(server), begin(server)
    asleep.hibernate()
    replace(server, installation, NEWEST, BREAKS)
    kept = Sandbox.connect(box.id, url=server.url)
    assert kept.info.status == "running" and "another version" in (kept.info.why or "")
    with pytest.raises(IncompatibleBox, match="lives until its deadline"):
        kept.shell.run("true")
    assert {info.id for info in Sandbox.list(url=server.url)} == {box.id, other.id, asleep.id}
    other.close()  # it can be ended all the same
    check(server, asleep)  # it wakes in a box of this version
    asleep.hibernate()
    newest = check_new(server)

    replace(server, installation, OLD)
    check(server, box)
    for each in (asleep, newest):
        with pytest.raises(IncompatibleBox):
            Sandbox.connect(each.id, url=server.url).shell.run("true")
    assert "format 3" in (Sandbox.connect(asleep.id, url=server.url).info.why or "")
    with pytest.raises(SessionEnded, match="it was closed"):
        other.shell.run("true")

    replace(server, installation, NEWEST, BREAKS)
    check(server, asleep)
    check(server, newest)
