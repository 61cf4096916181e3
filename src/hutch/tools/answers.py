"""What a tool call comes to: text for the model, pictures, and the facts behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Picture:
    """An image that a tool shows to the model."""

    data: bytes
    mime: str  # "image/png"


@dataclass(frozen=True)
class Answer:
    """What the model is told. Whatever it could put right itself is an answer, not an exception."""

    text: str
    exit_code: int = 0  # of what ran; 1 for a tool that could not do what was asked
    failed: bool = False  # the tool could not do it: `text` says why, and what to do next
    pictures: tuple[Picture, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)  # for programs; goes into JSON
