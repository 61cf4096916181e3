"""Deadlines that no clock on the wall can move."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hutch.engine.clock import boot_id, since_boot
from hutch.server.store import SessionRecord
from hutch.types import BoxInfo, Limits


def record(deadline: float | None, boot: str, expires_at: float | None) -> SessionRecord:
    info = BoxInfo(
        "s1", "namespaces", "host", "ns", Limits(), "/workspace", "user", 0.0, expires_at=expires_at
    )
    return SessionRecord(info, deadline=deadline, boot=boot)


@pytest.mark.parametrize("now", [0.0, 1000.0, 1e12])
def test_in_the_same_boot_the_time_of_day_does_not_matter(now: float) -> None:
    assert record(50.0, "this", 1000.0).time_left("this", 20.0, now) == 30.0
    assert record(50.0, "this", 1000.0).time_left("this", 60.0, now) == -10.0


def test_after_a_boot_the_time_of_day_counts() -> None:
    assert record(50.0, "before", 1000.0).time_left("this", 20.0, 990.0) == 10.0


def test_without_a_deadline_there_is_none() -> None:
    assert record(None, "this", None).time_left("this", 20.0, 990.0) is None


def test_this_machine_has_a_boot_and_a_clock_that_goes_forward() -> None:
    assert boot_id() == boot_id() and len(boot_id()) == 36
    assert 0 < since_boot() <= since_boot()


def test_who_has_no_store_does_not_load_one() -> None:
    script = "import sys, hutch.engine.clock; sys.exit('sqlite3' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
