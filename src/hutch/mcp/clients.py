"""A caller, the options that it chose, and the tools by which it creates and ends boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import InvalidRequest
from hutch.tools import TOOLS, Answer, Tool, chosen
from hutch.tools.declare import tool
from hutch.types import BoxInfo

if TYPE_CHECKING:
    from .boxes import McpBoxes

MAX_LIST = 100


@dataclass(frozen=True)
class BoxesContext:
    """What these tools get in place of a ToolContext: the boxes, and the caller."""

    boxes: McpBoxes
    client: McpClient


async def create_box(
    ctx: BoxesContext,
    image: Annotated[str | None, "What is in it; without one: as in your own"] = None,
) -> Answer:
    """Make one more box, apart from your own. Other tools take its id as `box`."""
    order = ctx.client.order
    toolbox = await ctx.boxes.create(ctx.client, replace(order, image=image) if image else order)
    return Answer(_line(toolbox.context.box.info), details={"box": toolbox.context.box.id})


async def list_boxes(ctx: BoxesContext) -> Answer:
    """List your boxes."""
    client = ctx.client
    sessions = await client.transport.perform(
        op.ListSessions("live", owner=client.owner, limit=MAX_LIST)
    )
    own = ctx.boxes.own(client)
    lines = [
        _line(info) + (" (your own)" if own and own.context.box.id == info.id else "")
        for info in sessions
    ]
    more = [f"[only the newest {MAX_LIST}]"] if len(sessions) == MAX_LIST else []
    ids: list[object] = [info.id for info in sessions]
    return Answer("\n".join([*lines, *more]) or "no boxes yet", details={"boxes": ids})


async def close_box(ctx: BoxesContext, box: Annotated[str, "Its id"]) -> Answer:
    """End a box, with its files and all that runs in it."""
    # Closing a box that does not exist is not an error, so look it up first.
    await ctx.client.transport.perform(op.GetSession(box))
    await ctx.boxes.close(ctx.client, box)
    return Answer(f"closed {box}")


def _line(info: BoxInfo) -> str:
    return f"{info.id}  {info.image}  {info.status}"


BOX_TOOLS = {
    declared.name: declared
    for declared in (tool(create_box), tool(list_boxes, only_reads=True), tool(close_box))
}
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
