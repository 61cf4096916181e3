"""A caller, and the options that it chose."""

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
    """What a client can choose about the tools: with options of the command, or in the URL."""

    only: tuple[str, ...] | None = None  # names of tools; None: all of them
    raw: bool = False  # do not shorten the output of commands
    # Results as JSON too. Off by default: some clients then show a model only the JSON, which has
    # no pictures, and is longer than the text.
    structured: bool = False
    timeout: float | None = None  # seconds that a command may take; a model may ask for fewer

    def __post_init__(self) -> None:
        self.tools()  # raises if there is no such tool
        if self.timeout is not None and not 0 < self.timeout < 1e9:
            raise InvalidRequest(f"timeout is a number of seconds, not {self.timeout!r}")

    def tools(self) -> dict[str, Tool]:
        """The tools that a client may call. Raises InvalidRequest if one does not exist."""
        return chosen(self.only, EVERY)

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> ToolOptions:
        """The options in `?only=bash,read&raw&structured&timeout=300`.

        Raises InvalidRequest if one is unknown, or has a wrong value.
        """
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
    """The names in `bash,read`; None for all tools, while an empty text means no tools."""
    if text is None:
        return None
    return tuple(name for name in text.replace(" ", "").split(",") if name)


def _nothing(end: Callable[[], object]) -> Callable[[], object]:
    return lambda: None


@dataclass(frozen=True)
class McpClient:
    """One caller, and the way to their boxes."""

    connect: Callable[[], AsyncTransport]  # called for each use, so that it can load late
    order: op.OpenSession = field(default_factory=op.OpenSession)  # for their boxes
    options: ToolOptions = field(default_factory=ToolOptions)
    name: str = ""  # distinguishes callers; "" if there is only one
    owner: str | None = None  # at a server; None without one
    session_id: str = ""  # the MCP session, for a client of the older protocol
    # Calls its argument if the caller's key is revoked, until the returned function is called.
    watch: Watch = _nothing

    @property
    def transport(self) -> AsyncTransport:
        return self.connect()
