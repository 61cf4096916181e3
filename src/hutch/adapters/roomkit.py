"""RoomKit: boxes for agents that have a sandbox.

    agent = Agent("coder", provider=provider, sandbox=HutchSandboxExecutor())

Each room has a box of its own, created by its first call. `HutchContainerBackend` is the
alternative for those who keep `roomkit_sandbox.ContainerSandboxExecutor`.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import hutch
from hutch.client._async import AsyncSandbox
from hutch.errors import BoxLost, InvalidRequest, StartFailed
from hutch.tools import Answer, AsyncBoxes, AsyncToolbox
from hutch.tools.commands import CommandBuilder, Condensed, carry_out, tool_of
from hutch.tools.toolbox import HIDING

from . import checked, fitted, needs

with needs("roomkit"):
    from roomkit import ToolFailedError
    from roomkit.sandbox import (
        SANDBOX_TOOL_PREFIX,
        SANDBOX_TOOL_SCHEMAS,
        SandboxExecutor,
        SandboxResult,
    )
    from roomkit.tools import current_tool_room_id

SESSION = "roomkit.sandbox.session_id"  # a label of boxes with a session id
OURS = "roomkit.sandbox"  # a label of every box that is created here
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
        self._where = _where(order)
        self._session, self._setup, self._condense = session, setup, condense

    async def _open(self) -> AsyncToolbox:
        box = await self._found() or await self._made()
        return _toolbox(box, condense=self._condense)

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


@dataclass(frozen=True)
class Ran:
    """What a command did, like `roomkit_sandbox.ExecResult`."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Contained:
    """A box, like `roomkit_sandbox.ContainerInfo`."""

    container_id: str
    session_id: str | None
    labels: dict[str, str]
    status: str
    created_at: str | None


class HutchContainerBackend:
    """Boxes for `roomkit_sandbox.ContainerSandboxExecutor(backend=HutchContainerBackend())`.

    It works with any of its command builders, and with ours. Commands of `rtk` are carried out by
    our tools, so no image needs it. `order` is what `AsyncSandbox.create` takes.
    """

    def __init__(self, **order: Any) -> None:
        self._order = {"idle": 1800, "on_idle": "hibernate", **checked(order)}
        self._where = _where(order)
        self._boxes: dict[str, AsyncToolbox] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {len(self._boxes)} boxes>"

    async def create_container(
        self,
        session_id: str,
        labels: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
    ) -> str:
        marks = {**(self._order.get("labels") or {}), **(labels or {})}
        marks |= {OURS: "true", SESSION: session_id}
        variables = {**(self._order.get("env") or {}), **(env or {})}
        order = {**self._order, "labels": marks, "env": variables}
        box: AsyncSandbox = await hutch.AsyncSandbox.create(**order)
        self._boxes[box.id] = _toolbox(box)
        return box.id

    async def exec_command(
        self,
        container_id: str,
        cmd: list[str],
        workdir: str = "/workspace",
        env: dict[str, str] | None = None,
        timeout: int = 30,
    ) -> Ran:
        """Run a command. After `timeout` seconds it is killed: exit code 124, with its output.

        Raises BoxLost if the box is gone.
        """
        toolbox = await self._toolbox(container_id)
        try:
            argv = _by_tools(cmd, workdir)
            plain = tool_of(argv) is None
            if plain and argv[0] != "git":
                toolbox = _toolbox(toolbox.context.box, condense=False)
            if plain:  # may be long: the builders of roomkit_sandbox write files with commands
                argv = await fitted(toolbox.context.box, argv)
            answer = await carry_out(toolbox, argv, cwd=workdir, env=env, timeout=timeout)
        except InvalidRequest as exc:
            return Ran(127, "", str(exc))
        result = _result(answer, timeout)
        return Ran(result.exit_code, result.output, result.error)

    async def container_exists(self, container_id: str) -> bool:
        try:
            await self._toolbox(container_id, fresh=True)
        except BoxLost:
            self._boxes.pop(container_id, None)
            return False
        return True

    async def find_container(self, session_id: str) -> str | None:
        return await find(session_id, **self._where)

    async def delete_container(self, container_id: str) -> None:
        """End a box. It is not an error if it is gone already."""
        try:
            toolbox = await self._toolbox(container_id)
            await toolbox.context.box.close()
        except BoxLost:
            pass
        self._boxes.pop(container_id, None)

    async def list_containers(self, labels: dict[str, str] | None = None) -> list[Contained]:
        wanted = {OURS: "true", **(labels or {})}.items()
        boxes = await hutch.AsyncSandbox.list(label=f"{OURS}=true", **self._where)
        return [
            Contained(
                info.id,
                info.labels.get(SESSION),
                dict(info.labels),
                info.status,
                datetime.fromtimestamp(info.created_at, UTC).isoformat(),
            )
            for info in boxes
            if wanted <= info.labels.items()
        ]

    async def close(self) -> None:
        """End the boxes that were used here. `ContainerSandboxExecutor.close` ends none."""
        for id in list(self._boxes):
            await self.delete_container(id)

    async def _toolbox(self, id: str, *, fresh: bool = False) -> AsyncToolbox:
        if fresh or id not in self._boxes:
            box = await hutch.AsyncSandbox.connect(id, **self._where)
            self._boxes.setdefault(id, _toolbox(box))
        return self._boxes[id]


async def find(session_id: str, **where: str) -> str | None:
    """The id of the newest live box of a session; None if it has no live box."""
    boxes = await hutch.AsyncSandbox.list(label=SESSION, **where)
    return next((info.id for info in boxes if info.labels[SESSION] == session_id), None)


def _toolbox(box: AsyncSandbox, *, condense: bool = True) -> AsyncToolbox:
    toolbox = AsyncToolbox(box, condense=condense)
    toolbox.context.apart = True
    return toolbox


def _where(order: Mapping[str, Any]) -> dict[str, Any]:
    return {name: order[name] for name in ("url", "api_key") if name in order}


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
    output, error = str(answer.details.get("stdout", answer.text)), answer.details.get("stderr")
    if answer.failed:
        output, error = "", answer.text
    # A model reads the metadata, too, so whatever is empty or shown elsewhere is left out.
    shown = {"stdout", "stderr", "exit_code", "family", "hidden_lines", "kept"}
    details = {name: value for name, value in answer.details.items() if value and name not in shown}
    if details.get("timed_out"):
        error = f"{error or ''}\nCommand timed out after {timeout}s".lstrip()
    if answer.pictures:  # a result is text
        details["pictures"] = [f"{one.mime}, {len(one.data)} bytes" for one in answer.pictures]
    return SandboxResult(
        exit_code=answer.exit_code, output=output, error=str(error or ""), metadata=details
    )


# --- commands of roomkit_sandbox's builders ------------------------------------------------


def _by_tools(cmd: list[str], workdir: str) -> list[str]:
    """The command; one of `rtk` becomes a call of our tool.

    Raises InvalidRequest if it is empty, or unknown to us.
    """
    if not cmd:
        raise InvalidRequest("there is no command")
    if cmd[0] == "rtk":
        if cmd[1:2] == ["git"]:
            return cmd[1:]
        name, given = _of_rtk(cmd)
    elif called := tool_of(cmd):
        name, given = called
    else:
        return cmd
    for key in ("path", "file_a", "file_b"):
        if key in given:
            given[key] = posixpath.join(workdir, given[key])
    if name in ("ls", "grep", "find", "glob"):
        given.setdefault("path", workdir)
    return Condensed().build(name, given)


def _of_rtk(cmd: list[str]) -> tuple[str, dict[str, Any]]:
    name, rest = cmd[1] if len(cmd) > 1 else "", cmd[2:]
    places = {
        "read": ["path"],
        "ls": ["path"],
        "grep": ["pattern", "path"],
        "find": ["path"],
        "diff": ["file_a", "file_b"],
    }.get(name)
    if places is None:
        raise InvalidRequest(
            f"`{shlex.join(cmd)}`: of rtk there are read, ls, grep, find, git, diff"
        )
    options = {"read": ("--offset", "--limit"), "grep": ("--type",), "find": ("-name", "-type")}
    given: dict[str, Any] = {}
    while rest:
        word = rest.pop(0)
        # A pattern or a file may look like an option: places that are still empty come first.
        is_place = places and (name in ("read", "diff") or (name == "grep" and len(places) == 2))
        if word in options.get(name, ()) and rest and not is_place:
            given[word.lstrip("-")] = rest.pop(0)
        elif places:
            given[places.pop(0)] = word
        else:
            raise InvalidRequest(f"`{shlex.join(cmd)}`: there is no place for {word!r}")
    return name, given
