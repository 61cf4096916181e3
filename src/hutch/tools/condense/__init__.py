"""What a command printed, in fewer words and with nothing lost.

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
