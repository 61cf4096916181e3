"""OpenAI Agents SDK, for agents without a sandbox: our tools as function tools, an executor for
ShellTool, an editor for ApplyPatchTool."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from typing import Any, Literal

from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import BoxLost, Conflict, HutchError
from hutch.tools import Answer, AsyncToolbox, Tool, Toolbox

from . import needs
from .boxes import async_box, async_tools

with needs("openai-agents"):
    from agents import (
        ApplyPatchOperation,
        ApplyPatchResult,
        FunctionTool,
        ShellCallOutcome,
        ShellCommandOutput,
        ShellCommandRequest,
        ShellResult,
        ToolOutputImage,
        ToolOutputText,
        apply_diff,
    )


def hutch_tools(
    box: Sandbox | AsyncSandbox | Toolbox | AsyncToolbox,
    *,
    only: Iterable[str] | None = None,
    condense: bool = True,
) -> list[FunctionTool]:
    """Our tools in this box, for `Agent(tools=…)`. A box that is gone ends the run."""
    toolbox = async_tools(box, only, condense)

    def function_tool(tool: Tool) -> FunctionTool:
        async def invoke(context: Any, arguments: str) -> Any:
            try:
                given = json.loads(arguments or "{}")
            except ValueError as exc:
                return f"the arguments are no JSON: {exc}"
            return _shown(await toolbox.call(tool.name, given))

        return FunctionTool(
            name=tool.name,
            description=tool.description,
            params_json_schema=tool.parameters,
            on_invoke_tool=invoke,
            strict_json_schema=False,
        )

    return [function_tool(tool) for tool in toolbox.tools.values()]


def _shown(answer: Answer) -> Any:
    if not answer.pictures:
        return answer.text
    images = [
        ToolOutputImage(image_url=f"data:{one.mime};base64,{base64.b64encode(one.data).decode()}")
        for one in answer.pictures
    ]
    return [ToolOutputText(text=answer.text), *images] if answer.text else images


def shell_executor(box: Sandbox | AsyncSandbox) -> Callable[[ShellCommandRequest], Any]:
    """For `ShellTool(executor=…)`: the commands run in the box's kept shell, one after another."""
    shell = async_box(box).shell

    async def run(request: ShellCommandRequest) -> ShellResult:
        action = request.data.action
        timeout = None if action.timeout_ms is None else action.timeout_ms / 1000
        outputs = []
        for command in action.commands:
            result = await shell.run(command, timeout=timeout)
            how: Literal["exit", "timeout"] = "timeout" if result.timed_out else "exit"
            code = None if result.timed_out else result.exit_code
            outputs.append(
                ShellCommandOutput(
                    stdout=result.stdout,
                    stderr=result.stderr,
                    outcome=ShellCallOutcome(type=how, exit_code=code),
                    command=command,
                )
            )
            if result.timed_out:
                break
        return ShellResult(output=outputs, max_output_length=action.max_output_length)

    return run


class HutchEditor:
    """For `ApplyPatchTool(editor=…)`: changes files of the box.

    Failures are results with a reason; only BoxLost is raised.
    """

    def __init__(self, box: Sandbox | AsyncSandbox) -> None:
        self._box = async_box(box)

    async def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        async def work() -> str:
            if await self._box.files.exists(operation.path):
                raise Conflict(f"{operation.path} is there already: update it instead")
            text = apply_diff("", operation.diff or "", mode="create")
            await self._box.files.write(operation.path, text)
            return f"Created {operation.path}"

        return await self._tried(work)

    async def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        async def work() -> str:
            before = (await self._box.files.read(operation.path, "bytes")).decode()
            after = apply_diff(before, operation.diff or "")
            await self._box.files.write(operation.path, after)
            if operation.move_to and operation.move_to != operation.path:
                await self._box.files.move(operation.path, operation.move_to)
                return f"Updated {operation.path}, which is {operation.move_to} now"
            return f"Updated {operation.path}"

        return await self._tried(work)

    async def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        async def work() -> str:
            await self._box.files.remove(operation.path)
            return f"Deleted {operation.path}"

        return await self._tried(work)

    async def _tried(self, work: Callable[[], Any]) -> ApplyPatchResult:
        try:
            return ApplyPatchResult(status="completed", output=await work())
        except BoxLost:
            raise
        except UnicodeDecodeError:
            why = "the file is not text in UTF-8: change it with a command"
            return ApplyPatchResult(status="failed", output=why)
        except (HutchError, ValueError) as exc:
            return ApplyPatchResult(status="failed", output=str(exc))
