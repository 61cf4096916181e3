"""The states of a session, as a table of transitions.

    starting ──started──> running ──hibernate──> saving ──saved──> asleep
                             ^ ^                   │                 │ ^
                             │ └──────failed───────┘            wake │ │ failed
                             └─────────woken───────────────── waking <─┘

From each of these, `close` leads to destroying, and from there `gone` to destroyed. From each, and
from destroying, `expire` leads to expired, and `lost` (its box, or what was saved of it) to
crashed. Ended is final.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hutch.errors import Conflict
from hutch.types import ENDED, State

Event = Literal[
    "started", "failed", "hibernate", "saved", "wake", "woken", "close", "gone", "expire", "lost"
]

TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    "starting": {
        "started": "running",
        "failed": "crashed",
        "close": "destroying",
        "expire": "expired",
        "lost": "crashed",
    },
    "running": {
        "hibernate": "saving",
        "close": "destroying",
        "expire": "expired",
        "lost": "crashed",
    },
    "saving": {
        "saved": "asleep",
        "failed": "running",  # it could not be saved, and continues
        "close": "destroying",
        "expire": "expired",
        "lost": "crashed",
    },
    "asleep": {
        "wake": "waking",
        "close": "destroying",
        "expire": "expired",
        "lost": "crashed",
    },
    "waking": {
        "woken": "running",
        "failed": "asleep",  # what was saved is still there
        "close": "destroying",
        "expire": "expired",
        "lost": "crashed",
    },
    "destroying": {
        "close": "destroying",  # closing twice is not an error
        "gone": "destroyed",
        "expire": "expired",
        "lost": "crashed",
    },
    "destroyed": {},
    "expired": {},
    "crashed": {},
}

_IS: Mapping[State, str] = {
    "starting": "is starting",
    "running": "is running",
    "saving": "is being put to sleep",
    "asleep": "is asleep",
    "waking": "is waking up",
    "destroying": "is being closed",
    "destroyed": "was closed",
    "expired": "has ended, because its deadline passed",
    "crashed": "has ended, because its box was lost",
}
_CANNOT: Mapping[Event, str] = {
    "started": "cannot start",
    "failed": "cannot fail",
    "hibernate": "cannot be put to sleep",
    "saved": "cannot have been saved",
    "wake": "cannot be woken",
    "woken": "cannot have woken up",
    "close": "cannot be closed",
    "gone": "cannot have gone",
    "expire": "cannot pass its deadline",
    "lost": "cannot be lost",
}


def is_in_time(old: State, new: State) -> bool:
    """Whether a session that is stored as `old` may become `new`: one that ended stays so.

    Not every short-lived state is stored, so this may span several transitions.
    """
    over = old == "destroying" or old in ENDED
    return new == old or not over or new in TRANSITIONS[old].values()


def after(state: State, event: Event) -> State:
    """The next state. Raises Conflict if this event is not possible in this state."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise Conflict(f"the session {_IS[state]} and {_CANNOT[event]}") from None
