"""Tools that create, list and close boxes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from hutch import operations as op
from hutch.tools import Answer
from hutch.tools.declare import tool
from hutch.types import BoxInfo

if TYPE_CHECKING:
    from .boxes import McpBoxes
    from .clients import McpClient

MAX_LIST = 100


class BoxesContext:
    """What these tools get in place of a ToolContext: the boxes, and the caller."""

    def __init__(self, boxes: McpBoxes, client: McpClient) -> None:
        self.boxes, self.client = boxes, client


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
