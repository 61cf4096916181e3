"""The backends of roomkit-sandbox, with boxes in place of its containers.

    backend = KubernetesSandboxBackend(image="python:3.13-slim", namespace="production")
    sandbox = ContainerSandboxExecutor(backend=backend)

They work with any of its command builders, and with ours. Neither it nor RoomKit is imported here.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import hutch
from hutch.adapters import checked, fitted
from hutch.client._async import AsyncSandbox
from hutch.errors import BoxLost, InvalidRequest
from hutch.tools import Answer, AsyncToolbox
from hutch.tools.commands import Condensed, carry_out, tool_of

__all__ = ["HutchContainerBackend", "KubernetesSandboxBackend"]

SESSION = "roomkit.sandbox.session_id"  # a label of boxes with a session id
OURS = "roomkit.sandbox"  # a label of every box that is created here


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
        self._where = where_of(order)
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
        self._boxes[box.id] = toolbox_of(box)
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
                toolbox = toolbox_of(toolbox.context.box, condense=False)
            if plain:  # may be long: the builders of roomkit_sandbox write files with commands
                argv = await fitted(toolbox.context.box, argv)
            answer = await carry_out(toolbox, argv, cwd=workdir, env=env, timeout=timeout)
        except InvalidRequest as exc:
            return Ran(127, "", str(exc))
        output, error, _ = printed_by(answer, timeout)
        return Ran(answer.exit_code, output, error)

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
            self._boxes.setdefault(id, toolbox_of(box))
        return self._boxes[id]


class KubernetesSandboxBackend(HutchContainerBackend):
    """`roomkit_sandbox.k8s_backend.KubernetesSandboxBackend`, with its parameters.

    Pods are made with your kubeconfig, in `namespace`; a server (`url`, or HUTCH_URL) makes them in
    its own, and refuses another one. What a Pod of ours has not is refused, too: a service account,
    and credentials of a registry, which belong to the namespace's service account `default`.
    `order` is what `AsyncSandbox.create` takes. `close()` ends the boxes that were used here.
    """

    def __init__(
        self,
        image: str = "python:3.13-slim",
        namespace: str = "",
        service_account: str = "default",
        image_pull_secret: str | None = None,
        extra_env: Mapping[str, str] | None = None,
        **order: Any,
    ) -> None:
        if service_account != "default":
            raise InvalidRequest(
                f"service_account {service_account!r:.100}: a box has none, so that code in it may "
                "do nothing in the cluster"
            )
        if image_pull_secret:
            raise InvalidRequest(
                "image_pull_secret: give it to the service account `default` of the namespace: "
                "kubectl patch serviceaccount default --patch "
                '\'{"imagePullSecrets": [{"name": "NAME"}]}\''
            )
        backend = f"kubernetes/{namespace}" if namespace else "kubernetes"
        super().__init__(backend=backend, image=image, env=dict(extra_env or {}), **order)


async def find(session_id: str, **where: str) -> str | None:
    """The id of the newest live box of a session; None if it has no live box."""
    boxes = await hutch.AsyncSandbox.list(label=SESSION, **where)
    return next((info.id for info in boxes if info.labels[SESSION] == session_id), None)


def toolbox_of(box: AsyncSandbox, *, condense: bool = True) -> AsyncToolbox:
    toolbox = AsyncToolbox(box, condense=condense)
    toolbox.context.apart = True
    return toolbox


def where_of(order: Mapping[str, Any]) -> dict[str, Any]:
    return {name: order[name] for name in ("url", "api_key") if name in order}


def printed_by(answer: Answer, timeout: int) -> tuple[str, str, dict[str, Any]]:
    """What a call printed, what went wrong, and details for a model."""
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
    return output, str(error or ""), details


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
