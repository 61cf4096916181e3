"""RoomKit: boxes for agents that have a sandbox.

    agent = Agent("coder", provider=provider, sandbox=HutchSandboxExecutor())

Each room has a box of its own, created by its first call. `HutchContainerBackend` is the
alternative for those who keep `roomkit_sandbox.ContainerSandboxExecutor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import hutch
from hutch.client._async import AsyncSandbox
from hutch.compat.roomkit_sandbox import (
    OURS,
    SESSION,
    HutchContainerBackend,
    find,
    printed_by,
    toolbox_of,
    where_of,
)
from hutch.errors import BoxLost, InvalidRequest, StartFailed
from hutch.tools import Answer, AsyncBoxes, AsyncToolbox
from hutch.tools.commands import CommandBuilder, Condensed, carry_out
from hutch.tools.toolbox import HIDING

from . import checked, needs

with needs("roomkit"):
    from roomkit import ToolFailedError
    from roomkit.sandbox import (
        SANDBOX_TOOL_PREFIX,
        SANDBOX_TOOL_SCHEMAS,
        SandboxExecutor,
        SandboxResult,
    )
    from roomkit.tools import current_tool_room_id

__all__ = ["SESSION", "HutchContainerBackend", "HutchSandboxExecutor", "RoomBoxLost", "SetupFailed"]

SETUP_SECONDS = 600
_FIRST = [schema["name"].removeprefix(SANDBOX_TOOL_PREFIX) for schema in SANDBOX_TOOL_SCHEMAS]


class RoomBoxLost(ToolFailedError, BoxLost):
    """The box of a room died, or was closed. RoomKit shows the message to the model."""


class SetupFailed(ToolFailedError, StartFailed):
    """A setup command failed. There is no box."""


class HutchSandboxExecutor(SandboxExecutor):
    """Our tools, as `sandbox_<name>`: RoomKit's ten with the same parameters, and more.

    Each room has its own box; with `session_id`, all rooms share one box, which is found again by
    that id, at a server also by another process. `timeout`: seconds for commands that name none.
    `command_builder` turns calls into commands (`hutch.tools.commands`). `only`: names of tools.
    `setup_commands` run in a new box; if one fails, so does the call. `order` is what
    `AsyncSandbox.create` takes; a box that is idle for half an hour sleeps, unless the order has
    its own `idle`.

    A box that died raises BoxLost, whose message the model sees; the next call gets a new box.
    """

    def __init__(
        self,
        *,
        session_id: str | None = None,
        timeout: int = 30,
        setup_commands: Sequence[str] = (),
        command_builder: CommandBuilder | None = None,
        only: Iterable[str] | None = None,
        **order: Any,
    ) -> None:
        self._builder = command_builder or Condensed()
        self._session, self._timeout = session_id, timeout
        self._names = _chosen(self._builder, only)
        self._boxes = _Boxes(
            session_id,
            setup_commands,
            self._builder.condenses,
            **{"idle": 1800, "on_idle": "hibernate", **checked(order)},
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self._boxes!r}>"

    def tool_definitions(self) -> list[dict[str, Any]]:
        definitions = [self._builder.definition(name) for name in self._names]
        return [
            {**one, "name": SANDBOX_TOOL_PREFIX + one["name"], "description": _described(one)}
            for one in definitions
        ]

    async def execute(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """Run a tool, by its name with or without `sandbox_`.

        `env` is for this call only: with it, bash and git do not run in the kept shell. Raises
        RoomBoxLost if the box is gone, SetupFailed if a setup command fails.
        """
        if command not in self._names:
            command = command.removeprefix(SANDBOX_TOOL_PREFIX)
        if command not in self._names:
            why = f"there is no tool {command!r}, only {', '.join(self._names)}"
            return SandboxResult(exit_code=127, error=why)
        given = dict(arguments or {})
        timeout = _positive(given.get("timeout")) or self._timeout
        if command == "bash":
            given["timeout"] = timeout
        try:
            argv = self._builder.build(command, given)
        except InvalidRequest as exc:
            return SandboxResult(exit_code=1, error=str(exc), metadata={"error": exc.code})
        room = self._room()
        try:
            toolbox = await self._boxes.get(room)
            answer = await carry_out(toolbox, argv, env=env, timeout=timeout)
        except BoxLost as exc:
            await self._boxes.forget(room)
            lost = "what was in it is lost, and the next call gets a new box"
            raise RoomBoxLost(f"{exc}; {lost}") from exc
        return _result(answer, timeout)

    async def forget(self, room: str = "") -> None:
        """Close the box of a room. Its next call creates another one."""
        await self._boxes.forget(room)

    async def close(self) -> None:
        """Close all boxes that were created here. RoomKit calls this when it closes the agent."""
        await self._boxes.close()

    def _room(self) -> str:
        return "" if self._session is not None else current_tool_room_id() or ""


class _Boxes(AsyncBoxes):
    """Boxes that are found by the id of their session, or else created and set up."""

    def __init__(
        self, session: str | None, setup: Sequence[str], condense: bool, **order: Any
    ) -> None:
        labels = {OURS: "true", **(order.get("labels") or {})}
        if session is not None:
            labels[SESSION] = session
        super().__init__(**{**order, "labels": labels})
        self._where = where_of(order)
        self._session, self._setup, self._condense = session, setup, condense

    async def _open(self) -> AsyncToolbox:
        box = await self._found() or await self._made()
        return toolbox_of(box, condense=self._condense)

    async def _found(self) -> AsyncSandbox | None:
        if self._session is None:
            return None
        id = await find(self._session, **self._where)
        return await hutch.AsyncSandbox.connect(id, **self._where) if id else None

    async def _made(self) -> AsyncSandbox:
        box: AsyncSandbox = await hutch.AsyncSandbox.create(**self._order)
        try:
            for command in self._setup:
                result = await box.commands.run(command, timeout=SETUP_SECONDS)
                if not result.ok:
                    output = (result.stderr.strip() or result.output.strip())[-500:]
                    why = f"exit code {result.exit_code}: {output}"
                    raise SetupFailed(f"the setup command `{command}` failed with {why}")
        except BaseException:
            await box.close()
            raise
        return box


def _chosen(builder: CommandBuilder, only: Iterable[str] | None) -> list[str]:
    names = builder.names()
    if only is not None:
        chosen = [name.removeprefix(SANDBOX_TOOL_PREFIX) for name in only]
        if unknown := [name for name in chosen if name not in names]:
            raise InvalidRequest(f"there is no tool {unknown[0]!r}, only {', '.join(names)}")
        # Tools that shorten output need `recall`, or what they hide would be lost.
        hides = builder.condenses and any(n in HIDING or builder.builds(n) for n in chosen)
        names = [*chosen, "recall"] if hides and "recall" not in chosen else chosen
    ordered = [name for name in _FIRST if name in names]
    return ordered + [name for name in names if name not in ordered]


def _described(definition: Mapping[str, Any]) -> str:
    """The description of a tool, in which `recall` has the name that it has here."""
    name, recall = definition["name"], SANDBOX_TOOL_PREFIX + "recall"
    text: str = definition["description"]
    text = text.replace("`recall`", f"`{recall}`")
    return f"{text}\n\nMarkers call this tool recall: it is {recall}." if name == "recall" else text


def _positive(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if value > 0 else None


def _result(answer: Answer, timeout: int) -> SandboxResult:
    output, error, details = printed_by(answer, timeout)
    return SandboxResult(exit_code=answer.exit_code, output=output, error=error, metadata=details)
