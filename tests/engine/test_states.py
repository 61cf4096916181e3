"""The lifecycle of a session, as a table."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch.engine.states import TRANSITIONS, Event, after, is_in_time
from hutch.errors import Conflict
from hutch.types import ENDED, STATES

EVENTS: tuple[Event, ...] = get_args(Event)


@given(st.lists(st.sampled_from(EVENTS), max_size=60))
def test_a_session_is_always_in_a_state_and_once_ended_stays_so(events: list[Event]) -> None:
    state = STATES[0]
    assert state == "starting"
    for event in events:
        try:
            following = after(state, event)
        except Conflict as exc:
            assert str(exc).startswith("the session ") and " cannot " in str(exc)
            continue
        assert state not in ENDED
        assert following in STATES
        state = following


def test_every_state_can_be_reached() -> None:
    reached, new = {"starting"}, ["starting"]
    while new:
        for state in TRANSITIONS[new.pop()].values():
            if state not in reached:
                reached.add(state)
                new.append(state)
    assert reached == set(STATES) == set(TRANSITIONS)


def test_every_event_can_happen() -> None:
    assert {event for events in TRANSITIONS.values() for event in events} == set(EVENTS)


def test_from_every_state_that_is_not_ended_there_is_an_end() -> None:
    for state in STATES:
        if state not in ENDED:
            assert after(state, "close") == "destroying"
            assert after(state, "expire") == "expired"
            assert after(state, "lost") == "crashed"
    assert after("destroying", "gone") == "destroyed"


@pytest.mark.parametrize("state", ENDED)
@pytest.mark.parametrize("event", EVENTS)
def test_ended_is_final(state: str, event: Event) -> None:
    with pytest.raises(Conflict):
        after(state, event)  # type: ignore[arg-type]


def test_sleep_that_fails_changes_nothing_and_wake_that_fails_neither() -> None:
    assert after(after("running", "hibernate"), "failed") == "running"
    assert after(after("asleep", "wake"), "failed") == "asleep"


def test_what_cannot_be_is_said_in_words() -> None:
    with pytest.raises(Conflict, match="the session is asleep and cannot be put to sleep"):
        after("asleep", "hibernate")
    with pytest.raises(Conflict, match="because its deadline passed and cannot be woken"):
        after("expired", "wake")


def test_what_was_written_down_as_ending_does_not_live_again() -> None:
    assert is_in_time("running", "asleep"), "what passed quickly may not have been written down"
    assert is_in_time("destroying", "destroyed") and is_in_time("expired", "expired")
    assert not is_in_time("destroying", "running")
    assert not any(is_in_time(old, new) for old in ENDED for new in STATES if new != old)
