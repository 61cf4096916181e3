"""Google's Agent Development Kit: an environment for EnvironmentToolset, and a code executor."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Literal

from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.errors import NotFound
from hutch.types import CellResult

from . import needs
from .boxes import Boxes

with needs("google-adk"):
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.code_executors.base_code_executor import BaseCodeExecutor
    from google.adk.code_executors.code_execution_utils import (
        CodeExecutionInput,
        CodeExecutionResult,
        File,
    )
    from google.adk.environment import BaseEnvironment, ExecutionResult
    from pydantic import ConfigDict, Field, PrivateAttr

TIMEOUT = 300  # seconds for code, if the executor has no `timeout_seconds`


class HutchEnvironment(BaseEnvironment):
    """One box: `EnvironmentToolset(environment=HutchEnvironment())`.

    `box`: an existing box; it is not closed here. `order`: what `Sandbox.create` takes.
    """

    def __init__(self, box: Sandbox | AsyncSandbox | None = None, **order: Any) -> None:
        self._boxes = Boxes(box, **order)
        self._workdir = box.info.workdir if box else order.get("workdir", "/workspace")

    async def box(self) -> AsyncSandbox:
        """The box, for async code; it is created if needed."""
        return await self._boxes.box()

    async def initialize(self) -> None:
        await self.box()
        self.is_initialized = True

    async def close(self) -> None:
        await self._boxes.aclose()
        self.is_initialized = False

    @property
    def working_dir(self) -> Path:
        return Path(self._workdir)

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        result = await (await self.box()).commands.run(command, timeout=timeout)
        return ExecutionResult(result.exit_code, result.stdout, result.stderr, result.timed_out)

    async def read_file(self, path: Path) -> bytes:
        try:
            return await (await self.box()).files.read(str(path), "bytes")
        except NotFound as exc:
            raise FileNotFoundError(str(exc)) from exc

    async def write_file(self, path: Path, content: str | bytes) -> None:
        await (await self.box()).files.write(str(path), content)


class HutchCodeExecutor(BaseCodeExecutor):
    """Python in the kept kernel of a box: `LlmAgent(code_executor=HutchCodeExecutor())`.

    Every session of the ADK has a box of its own. `order` is what `Sandbox.create` takes. `forget`
    ends the box of one session, `close` all of them.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    stateful: bool = True
    order: dict[str, Any] = Field(default_factory=dict)
    _boxes: Boxes = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._boxes = Boxes(**self.order)

    def execute_code(
        self, invocation_context: InvocationContext, code_execution_input: CodeExecutionInput
    ) -> CodeExecutionResult:
        box = self._boxes.get(invocation_context.session.id).box
        assert isinstance(box, Sandbox)
        for file in code_execution_input.input_files:
            box.files.write(PurePosixPath(file.name).name, file.content)
        execution = box.run_code(code_execution_input.code, timeout=self.timeout_seconds or TIMEOUT)
        wrong = execution.error.traceback if execution.error else execution.died or ""
        if execution.timed_out:
            wrong += f"\nit was stopped after {self.timeout_seconds or TIMEOUT} seconds"
        return CodeExecutionResult(
            stdout=execution.logs.stdout + (f"{execution.text}\n" if execution.text else ""),
            stderr=execution.logs.stderr + wrong,
            output_files=_pictures(execution.results),
            exit_code=0 if execution.ok else 1,
        )

    def forget(self, session_id: str) -> None:
        self._boxes.forget(session_id)

    def close(self) -> None:
        self._boxes.close()


def _pictures(results: tuple[CellResult, ...]) -> list[File]:
    forms: tuple[Literal["png", "jpeg"], ...] = ("png", "jpeg")
    return [
        File(f"picture-{number}.{form}", result.bytes_of(form), f"image/{form}")
        for number, result in enumerate(results, 1)
        for form in forms
        if getattr(result, form) is not None
    ]
