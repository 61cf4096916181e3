"""Times as people write them: `30d`, `2027-01-01`, `never`.

Relative times count from the clock of the machine that reads them, so a server and its clients
need not agree on what time it is.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from hutch.errors import InvalidRequest

NEVER = "never"
_DURATION = re.compile(r"([0-9]{1,9})(s|m|h|d|w)", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
LATEST = 253_402_300_799.0  # 9999-12-31T23:59:59Z, the last second that can be shown
_MOMENT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?(Z|[+-][0-9]{2}:[0-9]{2})?)?",
    re.ASCII,
)


def parse_duration(text: str) -> float:
    """`90s`, `30m`, `12h`, `30d` or `2w` in seconds. Raises ValueError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    return float(found[1]) * _SECONDS[found[2]]


def show_duration(seconds: float) -> str:
    """What `parse_duration` reads, in the largest unit that fits."""
    for unit in ("w", "d", "h", "m"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{seconds:.0f}s"


def parse_moment(text: str) -> float:
    """A date, or a date and time, in seconds since 1970; UTC unless it names an offset.

    Raises ValueError.
    """
    if not _MOMENT.fullmatch(text.strip()):
        raise ValueError(text)
    when = datetime.fromisoformat(text.strip())
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def parse_expiry(text: str, now: float) -> float | None:
    """When something expires that is to expire at, or after, `text`; None: never.

    Raises InvalidRequest.
    """
    if text.strip() == NEVER:
        return None
    try:
        moment = now + parse_duration(text)
    except ValueError:
        try:
            moment = parse_moment(text)
        except (ValueError, OverflowError):
            raise InvalidRequest(
                f"expires must be like 12h, 30d, 2027-01-01 or never, not {text[:64]!r}"
            ) from None
        if moment <= now:
            raise InvalidRequest(f"expires is in the past: {text[:64]}") from None
    if moment > LATEST:
        raise InvalidRequest(f"expires is after the year 9999: {text[:64]}; say never")
    return moment


def parse_since(text: str, now: float) -> float:
    """The moment so long ago, or the one that `text` names. Raises InvalidRequest."""
    try:
        return now - parse_duration(text)
    except ValueError:
        pass
    try:
        return parse_moment(text)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"since must be like 30m, 12h, 7d or 2027-01-01, not {text[:64]!r}"
        ) from None


def show_moment(seconds: float) -> str:
    """RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
