"""What should work where the tests run."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

MUST_WORK = os.environ.get("HUTCH_MUST_WORK", "").split(",")


def need(backend: str, why: str) -> NoReturn:
    """Skip for a reason; on CI, what should work here must work, and the skip is a failure."""
    if backend in MUST_WORK:
        pytest.fail(f"{backend} must work here: {why}")
    pytest.skip(why)
