"""LangChain: our tools, `pandastool`, and a shell in a box for ShellToolMiddleware.

agent = create_agent(model, tools=hutch_tools(box))
agent = create_agent(model, tools=[pandas_tool("/path/to/project")])
agent = create_agent(
    model, middleware=[ShellToolMiddleware(execution_policy=HutchExecutionPolicy())]
)
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.compat.kernellite import interrupt, pandastool
from hutch.errors import StartFailed
from hutch.tools import Answer, chosen

from . import needs
from .boxes import Boxes

with needs("langchain"):
    from langchain.agents.middleware._execution import BaseExecutionPolicy
    from langchain_core.runnables.config import ensure_config
    from langchain_core.tools import BaseTool, StructuredTool, ToolException
    from pydantic import Field

__all__ = ["HutchExecutionPolicy", "HutchTool", "hutch_tools", "pandas_tool", "pandastool"]

READY = "hutch-box-is-ready"
# Variables are passed through stdin. On a command line every user of the machine could read them,
# and in the environment of the process that owns the box they would replace its own PATH and HOME.
_BEGIN = f"""
given=
while IFS= read -r line && [ "$line" != {READY} ]; do given="$given$line
"; done
eval "$given"; unset given line; echo {READY} >&2; exec "$@"
"""


def hutch_tools(
    box: Sandbox | AsyncSandbox | None = None,
    *,
    only: Iterable[str] | None = None,
    condense: bool = True,
    **order: Any,
) -> list[HutchTool]:
    """Our tools in this box; without one, each thread (`thread_id`) gets a box of its own.

    `order` is then what `Sandbox.create` takes, and `tools[0].boxes.close()` closes them all. A
    `Sandbox` works with `invoke` and `ainvoke`, an `AsyncSandbox` only with `ainvoke`.
    `only`: names of tools.
    """
    tools = chosen(only)
    boxes = Boxes(box, only=tools, condense=condense, **order)
    return [
        HutchTool(
            name=tool.name,
            description=tool.description,
            args_schema=tool.parameters,
            boxes=boxes,
        )
        for tool in tools.values()
    ]


class HutchTool(BaseTool):
    """One of our tools. The model gets text and pictures; the artifact is the whole Answer.

    An error that the model can correct is a ToolMessage of status "error"; a box that died raises
    BoxLost.
    """

    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    handle_tool_error: Any = True
    boxes: Any = Field(exclude=True, repr=False)

    def _run(self, **arguments: Any) -> tuple[Any, Answer]:
        tools = self.boxes.get(_conversation())
        return _told(tools.call(self.name, arguments))

    async def _arun(self, **arguments: Any) -> tuple[Any, Answer]:
        tools = await self.boxes.aget(_conversation())
        return _told(await tools.acall(self.name, arguments))


def _conversation() -> str:
    return str(ensure_config().get("configurable", {}).get("thread_id", ""))


def _told(answer: Answer) -> tuple[Any, Answer]:
    if answer.failed:
        raise ToolException(answer.text)
    if not answer.pictures:
        return answer.text, answer
    blocks: list[dict[str, str]] = [{"type": "text", "text": answer.text}] if answer.text else []
    for picture in answer.pictures:
        data = base64.b64encode(picture.data).decode()
        blocks.append({"type": "image", "base64": data, "mime_type": picture.mime})
    return blocks, answer


def pandas_tool(
    project_dir: str | None = None,
    *,
    socket_dir: str | None = None,
    db: Any = None,
    config: Any = None,
) -> StructuredTool:
    """`pandastool` of one project as a tool, whose only argument is the code.

    `hutch.compat.kernellite.start_container` starts the kernel that it uses. If a call is
    cancelled, its code is interrupted.
    """
    place = {"project_dir": project_dir, "socket_dir": socket_dir, "db": db, "config": config}

    def run(code: str) -> str:
        return pandastool(code, **place)

    async def arun(code: str) -> str:
        try:
            return await asyncio.to_thread(run, code)
        except asyncio.CancelledError:
            named = project_dir or os.environ.get("PANDAS_SANDBOX_PROJECT_DIR")
            folder = str(named or getattr(db, "root_dir", ""))
            await asyncio.to_thread(interrupt, folder, socket_dir)
            raise

    return StructuredTool.from_function(
        run, arun, name="pandastool", description=" ".join((pandastool.__doc__ or "").split())
    )


@dataclass
class HutchExecutionPolicy(BaseExecutionPolicy):
    """For ShellToolMiddleware: its persistent shell runs in a box.

    The folder of the session is at /workspace: files there survive a restart of the shell, and
    nothing else does. A timeout, a restart and the end of the session end the box. `spawn` raises
    StartFailed if it does not start.
    """

    termination_timeout: float = 1.0  # seconds for a busy shell to exit before it is killed
    image: str | None = None
    memory: str = "1g"
    cpus: float = 2.0
    pids: int = 512
    mounts: Sequence[str] = ()  # HOST:BOX or HOST:BOX:ro

    def spawn(
        self, *, workspace: Path, env: Mapping[str, str], command: Sequence[str]
    ) -> subprocess.Popen[str]:
        words = ["--stdin", f"--workspace={workspace}", f"--memory={self.memory}"]
        words += [f"--cpus={self.cpus}", f"--pids={self.pids}"]
        words += [f"--image={self.image}"] if self.image else []
        words += [f"--mount={mount}" for mount in self.mounts]
        # -P: files that a box left in the current folder must not be imported.
        argv = [sys.executable, "-P", "-m", "hutch", "run", *words]
        process = subprocess.Popen(
            [*argv, "--", "/bin/sh", "-c", _BEGIN, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
            start_new_session=True,  # the middleware kills its group
        )
        assert process.stdin is not None and process.stderr is not None
        try:
            exports = "".join(f"export {name}={quote(env[name])}\n" for name in env)
            process.stdin.write(f"{exports}{READY}\n")
        except BrokenPipeError:
            pass  # it has exited; stderr has the reason
        # The middleware does not notice that a shell did not start: it would wait for an answer.
        line = process.stderr.readline().strip()
        if line != READY:
            with process:
                process.kill()
            raise StartFailed(line.removeprefix("hutch: ") or "the box did not start")
        return process
