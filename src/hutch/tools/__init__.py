"""What an agent can call in a box, declared once."""

from __future__ import annotations

from .answers import Answer, Picture
from .boxes import AsyncBoxes
from .context import ToolContext
from .declare import Tool
from .toolbox import PROMPT, TOOLS, AsyncToolbox, Toolbox, chosen

__all__ = [
    "PROMPT",
    "TOOLS",
    "Answer",
    "AsyncBoxes",
    "AsyncToolbox",
    "Picture",
    "Tool",
    "ToolContext",
    "Toolbox",
    "chosen",
]
