"""AutoGen: code blocks run in a box.

    async with HutchCodeExecutor() as executor:
        agent = CodeExecutorAgent("runner", code_executor=executor)

Python has one kept kernel, shell blocks one kept shell; both see the same files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import hutch
from hutch.client._async import AsyncSandbox
from hutch.errors import BoxLost

from . import checked, needs

with needs("autogen"):
    from autogen_core import CancellationToken, Component
    from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
    from pydantic import BaseModel

__all__ = ["HutchCodeExecutor", "HutchCodeExecutorConfig"]

PYTHON = ("python", "python3", "py")
SHELL = ("bash", "sh", "shell", "console")
TIMED_OUT = 124  # the exit code of timeout(1)


class HutchCodeExecutorConfig(BaseModel):
    timeout: float | None = 60
    order: dict[str, Any] = {}


class HutchCodeExecutor(CodeExecutor, Component[HutchCodeExecutorConfig]):
    """One box, from `start` (or the first block) to `stop`; `restart` gives a fresh one.

    `order` is what `AsyncSandbox.create` takes. Blocks run until one fails. Code that fails is a
    CodeResult with its exit code (124: stopped after `timeout` seconds); a box that died raises
    BoxLost. Cancelling the token kills what runs, and raises CancelledError.
    """

    component_config_schema = HutchCodeExecutorConfig
    component_provider_override = "hutch.adapters.autogen.HutchCodeExecutor"

    def __init__(self, *, timeout: float | None = 60, **order: Any) -> None:
        self._timeout, self._order = timeout, checked(order)
        self._box: AsyncSandbox | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        async with self._turn:
            if self._box is None:
                self._box = await hutch.AsyncSandbox.create(**self._order)

    async def stop(self) -> None:
        async with self._turn:
            box, self._box = self._box, None
            if box:
                try:
                    await box.close()
                except BoxLost:
                    pass

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def execute_code_blocks(
        self, code_blocks: Sequence[CodeBlock], cancellation_token: CancellationToken
    ) -> CodeResult:
        await self.start()
        work = asyncio.ensure_future(self._run_all(code_blocks))
        cancellation_token.link_future(work)
        try:
            return await work
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait((work,))  # until the code that ran is dead
            raise

    async def _run_all(self, blocks: Sequence[CodeBlock]) -> CodeResult:
        outputs: list[str] = []
        code = 0
        for block in blocks:
            code, output = await self._run(block)
            outputs.append(output)
            if code:
                break
        return CodeResult(exit_code=code, output="\n".join(filter(None, outputs)))

    async def _run(self, block: CodeBlock) -> tuple[int, str]:
        assert self._box is not None
        language = block.language.lower()
        if language in PYTHON:
            return await self._run_python(self._box, block.code)
        if language not in SHELL:
            known = ", ".join((*PYTHON, *SHELL))
            return 1, f"this executor runs {known}, not {block.language or 'code of no language'}"
        result = await self._box.shell.run(block.code, timeout=self._timeout)
        if result.timed_out:
            return TIMED_OUT, self._stopped(result.output)
        return result.exit_code, result.output.rstrip("\n")

    async def _run_python(self, box: AsyncSandbox, code: str) -> tuple[int, str]:
        done = await box.run_code(code, timeout=self._timeout)
        printed = done.logs.stdout + done.logs.stderr
        if done.timed_out:
            return TIMED_OUT, self._stopped(printed)
        if done.error is not None:
            reason = done.error.traceback or f"{done.error.name}: {done.error.value}"
            return 1, f"{printed}{reason}".rstrip("\n")
        return 0, f"{printed}{done.text or ''}".rstrip("\n")

    def _stopped(self, output: str) -> str:
        return f"{output.rstrip()}\n[stopped after {self._timeout:g} seconds]".lstrip("\n")

    def _to_config(self) -> HutchCodeExecutorConfig:
        # A key is a secret and a config is written to files, so it comes from HUTCH_API_KEY.
        order = {name: value for name, value in self._order.items() if name != "api_key"}
        return HutchCodeExecutorConfig(timeout=self._timeout, order=order)

    @classmethod
    def _from_config(cls, config: HutchCodeExecutorConfig) -> HutchCodeExecutor:
        return cls(timeout=config.timeout, **config.order)
