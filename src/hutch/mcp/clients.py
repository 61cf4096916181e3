"""Who asks, and how they want to be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import InvalidRequest
from hutch.tools import TOOLS, Tool, chosen

from .box_tools import BOX_TOOLS

EVERY = {**TOOLS, **BOX_TOOLS}

Watch = Callable[[Callable[[], object]], Callable[[], object]]
YES = {"": True, "1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class ToolOptions:
    """What a client can choose about the tools: with options, or in the url."""

    only: tuple[str, ...] | None = None  # names of tools; None: all of them
    raw: bool = False  # what commands print is not made shorter
    # Results as JSON too. Not unless asked for: there are clients that then show a model the JSON
    # and nothing else, which has no pictures, and more letters than the text.
    structured: bool = False
    timeout: float | None = None  # seconds a command has, unless the model wants fewer

    def __post_init__(self) -> None:
        self.tools()  # which knows what there is
        if self.timeout is not None and not 0 < self.timeout < 1e9:
            raise InvalidRequest(f"timeout is a number of seconds, not {self.timeout!r}")

    def tools(self) -> dict[str, Tool]:
        """What a client may call. Who names the tools that it wants gets no others."""
        return chosen(self.only, EVERY)

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> ToolOptions:
        """`?only=bash,read&raw&structured&timeout=300`. Raises InvalidRequest."""
        if unknown := sorted(set(query) - {"only", "raw", "structured", "timeout"}):
            raise InvalidRequest(
                f"there is no {unknown[0]!r} here: a url can have only, raw, structured, timeout"
            )
        try:
            return cls(
                only=names(query.get("only")),
                raw=YES[query.get("raw", "no")],
                structured=YES[query.get("structured", "no")],
                timeout=float(query["timeout"]) if "timeout" in query else None,
            )
        except (KeyError, ValueError):
            raise InvalidRequest(
                "raw and structured are yes or no, and timeout is a number of seconds"
            ) from None


def names(text: str | None) -> tuple[str, ...] | None:
    """`bash,read`. Who says that it is these, and then says none, has none."""
    if text is None:
        return None
    return tuple(name for name in text.replace(" ", "").split(",") if name)


def _nothing(end: Callable[[], object]) -> Callable[[], object]:
    return lambda: None


@dataclass(frozen=True)
class McpClient:
    """One caller, and the way to their boxes."""

    connect: Callable[[], AsyncTransport]  # called for each use, so that it can load late
    order: op.OpenSession = field(default_factory=op.OpenSession)  # what a box of theirs is like
    options: ToolOptions = field(default_factory=ToolOptions)
    name: str = ""  # tells callers apart; "" where there is one only
    owner: str | None = None  # as the server knows them
    session_id: str = ""  # the MCP session, of a client of the older protocol that has one
    # Have something called when they may no longer ask, until the answer is called.
    watch: Watch = _nothing

    @property
    def transport(self) -> AsyncTransport:
        return self.connect()
