"""What a command printed, in fewer words and with nothing lost.

condense("pytest -v", output, exit_code).text
"""

from __future__ import annotations

from .condenser import CondensedOutput, Condenser, condense
from .custom import Filter
from .families import FAMILIES
from .family import CommandLine, Family, Hidden

__all__ = [
    "FAMILIES", "CommandLine", "CondensedOutput", "Condenser", "Family", "Filter", "Hidden",
    "condense",
]  # fmt: skip
