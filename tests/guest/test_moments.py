"""What started before a moment, and what after it, though the clock stood still in between."""

from __future__ import annotations

import pytest

from hutch.guest.procfs import Moment, Row


def row(pid: int, started: int) -> Row:
    return Row(pid, 1, "S", started, 0)


@pytest.mark.parametrize(
    "moment",
    [Moment(100, last_pid=7), Moment(100, last_pid=0, existing=frozenset((1, 7)))],
    ids=["Linux", "gVisor"],
)
def test_what_exists_at_a_moment_is_before_it_also_in_the_same_tick(moment: Moment) -> None:
    assert not moment.before(row(7, started=99)) and not moment.before(row(7, started=100))
    assert moment.before(row(8, started=100)) and moment.before(row(3, started=101))
