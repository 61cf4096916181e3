"""The names of our own images in an engine.

They are built, never pulled: otherwise, the owner of that name at a public registry would supply
the default image.
"""

from __future__ import annotations

from hutch.docker_logins import DEFAULT_HOST

from .config import whole

NAMES = ("base", "small", "python", "data", "node")
PREFIX = "hutch/"


def is_own(reference: str) -> bool:
    return whole(reference).startswith(f"{DEFAULT_HOST}/{PREFIX}")


def build(name: str) -> str:
    """The command that builds one."""
    return f"hutch image build --backend docker {name}"


def missing(reference: str) -> str:
    """The message for one that the engine does not have."""
    name = whole(reference).removeprefix(f"{DEFAULT_HOST}/{PREFIX}").removesuffix(":latest")
    if name in NAMES:
        return f"the engine has no image {PREFIX}{name}: build it with `{build(name)}`"
    return (
        f"the engine has no image {reference!r}, and what begins with {PREFIX} is not pulled: "
        f"`{build('NAME')}` makes {', '.join(NAMES)}; give an image of yours another name"
    )
