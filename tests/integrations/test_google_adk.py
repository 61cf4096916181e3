"""Hutch in Google's ADK, with a model that reads from a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from google.adk.agents import LlmAgent
from google.adk.code_executors.code_execution_utils import CodeExecutionInput
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner
from google.adk.tools.environment import EnvironmentToolset
from google.genai import types
from leaving import assert_nothing_is_left_when_killed

from hutch import BoxLost, Sandbox
from hutch.adapters.google_adk import HutchCodeExecutor, HutchEnvironment

FRAMEWORK = "Google ADK"
PACKAGE = "google-adk"
PLUGGED = "BaseEnvironment, BaseCodeExecutor"

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Scripted(BaseLlm):
    """Says what it is told to say: text, or (tool, arguments)."""

    model: str = "scripted"
    steps: list[Any]

    async def generate_content_async(
        self, llm_request: Any, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        step = self.steps.pop(0)
        if isinstance(step, str):
            part = types.Part(text=step)
        else:
            part = types.Part(function_call=types.FunctionCall(name=step[0], args=step[1]))
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


async def said_by(agent: LlmAgent, *messages: str, session: str = "s") -> str:
    """All that happened, as text."""
    runner = InMemoryRunner(agent, app_name="app")
    await runner.session_service.create_session(app_name="app", user_id="u", session_id=session)
    events = []
    for text in messages:
        message = types.Content(role="user", parts=[types.Part(text=text)])
        async for event in runner.run_async(user_id="u", session_id=session, new_message=message):
            events.append(str(event.content))
    return "\n".join(events)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environment() -> AsyncIterator[HutchEnvironment]:
    made = HutchEnvironment()
    await made.initialize()
    yield made
    await made.close()


async def alive(environment: HutchEnvironment, seconds: str) -> bool:
    found = await environment.execute(f"ps -eo args | grep -c '^sleep {seconds}'")
    return found.stdout.strip() != "0"


async def test_an_agent_works_in_an_environment(environment: HutchEnvironment) -> None:
    toolset = EnvironmentToolset(environment=environment)
    names = {tool.name for tool in await toolset.get_tools()}
    assert "Execute" in names
    steps = [("Execute", {"command": "echo $((6 * 7)) $(pwd); exit 3"}), "done"]
    agent = LlmAgent(name="a", model=Scripted(steps=steps), tools=[toolset])
    happened = await said_by(agent, "go")
    assert "42 /workspace" in happened and "3" in happened


async def test_a_command_gives_both_streams_and_its_exit_code(
    environment: HutchEnvironment,
) -> None:
    result = await environment.execute("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr) == (7, "out\n", "err\n")
    assert environment.working_dir == Path("/workspace")


async def test_files_go_in_and_out(environment: HutchEnvironment) -> None:
    await environment.write_file(Path("deep/file.bin"), b"\x00\xff")
    assert await environment.read_file(Path("/workspace/deep/file.bin")) == b"\x00\xff"
    with pytest.raises(FileNotFoundError):
        await environment.read_file(Path("nothing"))


async def test_a_timeout_kills_the_tree(environment: HutchEnvironment) -> None:
    result = await environment.execute("echo so far; setsid sleep 4301 & sleep 4301", timeout=0.5)
    assert (result.timed_out, result.stdout) == (True, "so far\n")
    assert not await alive(environment, "4301")


async def test_a_cancel_kills_the_tree(environment: HutchEnvironment) -> None:
    work = asyncio.ensure_future(environment.execute("sleep 4302 & touch go; sleep 4302"))
    while (await environment.execute("test -e go")).exit_code:
        await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not await alive(environment, "4302")


async def test_a_box_that_died_is_told_apart_from_a_command_that_failed() -> None:
    environment = HutchEnvironment()
    await environment.initialize()
    assert (await environment.execute("false")).exit_code == 1
    await (await environment.box()).close()
    with pytest.raises(BoxLost):
        await environment.execute("true")
    await environment.close()


async def test_code_of_a_model_runs_in_a_box_of_its_session() -> None:
    executor = HutchCodeExecutor(timeout_seconds=60)
    first = ["```python\nx = 40\n```", "ok", "```python\nprint(x + 2)\n```", "ok"]
    agent = LlmAgent(name="a", model=Scripted(steps=first), code_executor=executor)
    assert "42" in await said_by(agent, "begin", "go on", session="one")
    second = ["```python\nprint('x' in globals())\n```", "ok"]
    agent = LlmAgent(name="a", model=Scripted(steps=second), code_executor=executor)
    assert "False" in await said_by(agent, "begin", session="two")
    boxes = [made.result().box for made in executor._boxes._toolboxes.values()]
    assert len(boxes) == 2
    executor.close()
    for box in boxes:
        assert isinstance(box, Sandbox)
        with pytest.raises(BoxLost):
            box.run_code("1")


async def test_an_error_of_the_code_is_told() -> None:
    executor = HutchCodeExecutor()
    steps = ["```python\n1 / 0\n```", "I see"]
    agent = LlmAgent(name="a", model=Scripted(steps=steps), code_executor=executor)
    assert "ZeroDivisionError" in await said_by(agent, "go")
    executor.close()


async def test_pictures_are_files_of_their_kind() -> None:
    executor = HutchCodeExecutor()
    code = "class Photo:\n    def _repr_jpeg_(self): return b'\\xff\\xd8'\nPhoto()"
    context: Any = SimpleNamespace(session=SimpleNamespace(id="one"))
    done = await asyncio.to_thread(executor.execute_code, context, CodeExecutionInput(code=code))
    executor.close()
    [file] = done.output_files
    assert (file.name, file.mime_type) == ("picture-1.jpeg", "image/jpeg")
    assert file.content == b"\xff\xd8"


async def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = """
import asyncio
from hutch.adapters.google_adk import HutchEnvironment
asyncio.run(HutchEnvironment().execute("sleep SECONDS & sleep SECONDS"))
"""
    assert_nothing_is_left_when_killed(script, tmp_path)
