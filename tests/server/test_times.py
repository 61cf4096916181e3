"""Times as people write them."""

from __future__ import annotations

import pytest

from hutch.errors import InvalidRequest
from hutch.server.times import parse_duration, parse_expiry, parse_since, show_duration, show_moment

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", NOW + 90),
        ("12h", NOW + 43_200),
        ("30d", NOW + 30 * 86_400),
        (" 2w ", NOW + 14 * 86_400),
        ("2027-01-16", 1_800_057_600.0),
        ("2027-01-15T08:00:01Z", NOW + 1),
        ("2027-01-15T10:00:01+02:00", NOW + 1),
        ("2027-01-15 08:00:01", NOW + 1),
        ("never", None),
    ],
)
def test_an_expiry_is_a_length_a_moment_or_never(text: str, expected: float | None) -> None:
    assert parse_expiry(text, NOW) == expected


@pytest.mark.parametrize(
    "text",
    ["", "30", "d", "-1d", "1.5d", "1 d", "1d1h", "Never", "2027", "2027-13-01", "20270116",
     "9999999999d", "999999999w", "9999-12-31T23:59:59-01:00",
     "2027-01-16T25:00:00Z", "\u0663d", "1d\n1d", "2026-01-01", "x" * 1000],
)  # fmt: skip
def test_what_is_no_expiry_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_expiry(text, NOW)
    assert len(str(caught.value)) < 200


def test_since_is_so_long_ago_or_a_moment() -> None:
    assert parse_since("1h", NOW) == NOW - 3600
    assert parse_since("2027-01-01", NOW) == 1_798_761_600.0
    with pytest.raises(InvalidRequest, match="30m, 12h, 7d"):
        parse_since("yesterday", NOW)


@pytest.mark.parametrize("text", ["1s", "90s", "5m", "12h", "30d", "2w"])
def test_a_duration_is_shown_as_it_is_written(text: str) -> None:
    assert show_duration(parse_duration(text)) == text


def test_a_moment_is_shown_in_utc_to_the_second() -> None:
    assert show_moment(1_798_761_600.9) == "2027-01-01T00:00:00Z"
