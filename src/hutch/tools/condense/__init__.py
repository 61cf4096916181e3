"""Shortens what a command printed; everything hidden is counted, and can be recalled.

condense("pytest -v", output, exit_code).text
"""

from __future__ import annotations

from .condenser import FAMILIES, CondensedOutput, Condenser, condense
from .custom import Filter
from .family import CommandLine, Family, Hidden

__all__ = [
    "FAMILIES",
    "CommandLine",
    "CondensedOutput",
    "Condenser",
    "Family",
    "Filter",
    "Hidden",
    "condense",
]
