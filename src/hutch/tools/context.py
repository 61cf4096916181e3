"""What the tools of one conversation work at: a box, and what is remembered between calls."""

from __future__ import annotations

from hutch.client._async import AsyncSandbox
from hutch.client._async_code import Functions


class ToolContext:
    """Tools await nothing but the box: so they serve code that does not await, too."""

    def __init__(
        self,
        box: AsyncSandbox,
        *,
        condense: bool = True,
        functions: Functions | None = None,
    ) -> None:
        self.box = box
        self.functions = functions  # of this process, for code in Python to call
        self.condense = condense  # what commands print is made shorter for the model
        self.apart = False  # stdout and stderr are in the details of an answer, each by itself
        self.hidden: dict[str, tuple[str, str]] = {}  # outputs with hidden lines: whose they are
        self.seen: dict[str, str] = {}  # path of a file -> what it was when it was last read
