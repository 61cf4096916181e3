"""Tools about boxes: to make one more, to see which there are, to end one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from hutch import operations as op
from hutch.tools import Answer
from hutch.tools.declare import tool
from hutch.types import BoxInfo

if TYPE_CHECKING:
    from .boxes import Boxes
    from .clients import Visitor

MAX_LIST = 100


class FrontDesk:
    """Where a caller asks for boxes; inside of one, tools have a Desk."""

    def __init__(self, boxes: Boxes, visitor: Visitor) -> None:
        self.boxes, self.visitor = boxes, visitor


async def create_box(
    front: FrontDesk,
    image: Annotated[str | None, "What is in it; without one: as in your own"] = None,
) -> Answer:
    """Make one more box, apart from your own. Other tools take its id as `box`."""
    order = front.visitor.order
    made = await front.boxes.create(front.visitor, replace(order, image=image) if image else order)
    return Answer(_line(made.desk.box.info), details={"box": made.desk.box.id})


async def list_boxes(front: FrontDesk) -> Answer:
    """List your boxes."""
    visitor = front.visitor
    found = await visitor.transport.perform(
        op.ListSessions("live", owner=visitor.owner, limit=MAX_LIST)
    )
    own = front.boxes.own(visitor)
    lines = [
        _line(info) + (" (your own)" if own and own.desk.box.id == info.id else "")
        for info in found
    ]
    more = [f"[only the newest {MAX_LIST}]"] if len(found) == MAX_LIST else []
    ids: list[object] = [info.id for info in found]
    return Answer("\n".join([*lines, *more]) or "no boxes yet", details={"boxes": ids})


async def close_box(front: FrontDesk, box: Annotated[str, "Its id"]) -> Answer:
    """End a box, with its files and all that runs in it."""
    # Closing a box that does not exist is no error, so ask first.
    await front.visitor.transport.perform(op.GetSession(box))
    await front.boxes.close(front.visitor, box)
    return Answer(f"closed {box}")


def _line(info: BoxInfo) -> str:
    return f"{info.id}  {info.image}  {info.status}"


BOX_TOOLS = {
    found.name: found
    for found in (tool(create_box), tool(list_boxes, only_reads=True), tool(close_box))
}
