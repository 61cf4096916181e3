"""A card names one process, and never another that has its number."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hutch import pidfile
from hutch.pidfile import PidFile, ServerPidFile


def card_of(pid: int) -> PidFile:
    return PidFile(pid, pidfile.began(pid) or 0, pidfile.boot())


def test_who_lives_is_known_by_number_moment_and_boot() -> None:
    me = card_of(os.getpid())
    assert me.is_alive
    assert not replace(me, began=me.began - 1).is_alive
    assert not replace(me, boot="another").is_alive


def test_who_has_ended_is_gone_also_before_anybody_buried_it() -> None:
    child = subprocess.Popen(["sleep", "60"])
    card = card_of(child.pid)
    with card.held() as process:
        assert process
        process.signal(signal.SIGKILL)
        assert process.ends_within(20)
        assert not card.is_alive
        process.signal(signal.SIGKILL)  # it has ended, and that is no error
    with card.held() as process:
        assert process is None
    child.wait()
    with card.held() as process:
        assert process is None


def test_nobody_is_held_who_only_has_the_number() -> None:
    with replace(card_of(os.getpid()), began=1).held() as process:
        assert process is None


def test_a_server_is_found_by_its_card_while_it_lives(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert pidfile.server_of(tmp_path) is None
    me = card_of(os.getpid())
    server = ServerPidFile(me.pid, me.began, me.boot, "http://127.0.0.1:1", "/s", "0")
    server.leave_in(tmp_path)
    assert pidfile.server_of(tmp_path) == server
    replace(server, began=1).leave_in(tmp_path)
    assert pidfile.server_of(tmp_path) is None
    pidfile.take_back(tmp_path)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}'])
def test_what_is_no_card_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "daemon.json").write_text(text)
    assert pidfile.server_of(tmp_path) is None
