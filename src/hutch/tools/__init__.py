"""The tools that an agent can call in a box, declared once."""

from __future__ import annotations

from .declare import Answer, Picture, Tool, ToolContext
from .toolbox import PROMPT, TOOLS, AsyncBoxes, AsyncToolbox, Toolbox, chosen

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
