"""The watchdog for memory, where no cgroup bounds a box."""

from __future__ import annotations

import pytest

from hutch.guest import procfs
from hutch.guest.procfs import Row


def victim(monkeypatch: pytest.MonkeyPatch, *processes: tuple[int, int]) -> int:
    """The place of the process that is killed, of some with these sizes and oom_score_adj."""
    monkeypatch.setattr(procfs, "_oom_score_adj", lambda pid: processes[pid][1])
    rows = [Row(pid, 1, "S", 0, resident) for pid, (resident, _) in enumerate(processes)]
    return procfs._victim(rows).pid


def test_small_processes_that_offer_themselves_do_not_protect_a_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert victim(monkeypatch, (100, 1000), (90000, 0), (100, 1000)) == 1


def test_a_process_that_offers_itself_dies_first_if_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert victim(monkeypatch, (60000, 1000), (90000, 0), (70000, 0)) == 0
    assert victim(monkeypatch, (60000, 0), (90000, 0), (70000, 0)) == 1
