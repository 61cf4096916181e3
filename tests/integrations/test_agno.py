"""agno: an agent whose tools run in the box of its session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.base import Model
from agno.models.response import ModelResponse
from agno.run.agent import RunOutput
from leaving import assert_nothing_is_left_at_the_end, new_mark, until

import hutch
from hutch.adapters.agno import HutchTools
from hutch.tools import TOOLS

FRAMEWORK = "agno"
PACKAGE = "agno"
PLUGGED = "Toolkit"

Call = tuple[str, dict[str, Any]]


class Scripted(Model):
    """Makes these calls, one after another, and is then done."""

    def __init__(self, *calls: Call) -> None:
        super().__init__(id="scripted")
        self._steps = iter(calls)

    def _next(self) -> ModelResponse:
        if (step := next(self._steps, None)) is None:
            return ModelResponse(role="assistant", content="done")
        function = {"name": step[0], "arguments": json.dumps(step[1])}
        call = {"id": f"call-{id(step)}", "type": "function", "function": function}
        return ModelResponse(role="assistant", tool_calls=[call])

    def invoke(self, *args: Any, **kwargs: Any) -> ModelResponse:
        return self._next()

    async def ainvoke(self, *args: Any, **kwargs: Any) -> ModelResponse:
        return self._next()

    def invoke_stream(self, *args: Any, **kwargs: Any) -> Iterator[ModelResponse]:
        yield self._next()

    async def ainvoke_stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ModelResponse]:
        yield self._next()

    def _parse_provider_response(self, response: Any, **kwargs: Any) -> ModelResponse:
        raise NotImplementedError

    def _parse_provider_response_delta(self, response: Any) -> ModelResponse:
        raise NotImplementedError


def agent(tools: HutchTools, *calls: Call) -> Agent:
    return Agent(model=Scripted(*calls), tools=[tools], db=InMemoryDb(), telemetry=False)


def answers(output: RunOutput) -> list[str]:
    return [str(message.content) for message in output.messages or [] if message.role == "tool"]


@pytest.fixture(scope="module")
def tools() -> Iterator[HutchTools]:
    made = HutchTools()
    yield made
    made.close()


def test_an_agent_works_in_the_box_of_its_session(tools: HutchTools) -> None:
    line = {"command": "ls; touch mine"}
    outputs = [
        agent(tools, ("bash", line)).run("go", session_id=session)
        for session in ("one", "two", "one")
    ]
    assert [output.content for output in outputs] == ["done"] * 3
    assert ["mine" in answers(output)[0] for output in outputs] == [False, False, True]
    tools.forget("one")
    assert "mine" not in answers(agent(tools, ("bash", line)).run("go", session_id="one"))[0]


async def test_code_that_awaits_and_code_that_does_not_share_the_box(tools: HutchTools) -> None:
    await agent(tools, ("python", {"code": "x = 6"})).arun("go", session_id="both")
    there = agent(tools, ("python", {"code": "x * 7"}))
    output = await asyncio.to_thread(there.run, "go", session_id="both")
    assert "42" in answers(output)[0]


async def test_a_streamed_run_calls_the_tools(tools: HutchTools) -> None:
    asked = agent(tools, ("bash", {"command": "echo $((6 * 7))"}))
    events = [event async for event in asked.arun("go", session_id="stream", stream=True,
                                                  stream_events=True)]  # fmt: skip
    done = [event.tool.result for event in events if event.event == "ToolCallCompleted"]
    assert len(done) == 1 and "42" in str(done[0])


def test_a_model_is_told_what_it_did_wrong(tools: HutchTools) -> None:
    calls = ("bash", {"wrong": "x"}), ("read", {"path": "nowhere", "run_context": "forged"})
    told = answers(agent(tools, *calls).run("go", session_id="one"))
    assert "has no parameter" in told[0] and "nowhere" in told[1]


def test_text_that_reads_like_a_value_stays_text(tools: HutchTools) -> None:
    calls = ("write", {"path": "flag", "content": "true"}), ("bash", {"command": "cat flag"})
    assert "true" in answers(agent(tools, *calls).run("go", session_id="one"))[1]


def test_the_tools_have_our_names_and_schemas(tools: HutchTools) -> None:
    assert list(tools.get_functions()) == list(tools.get_async_functions()) == list(TOOLS)
    assert tools.functions["bash"].parameters == TOOLS["bash"].parameters
    assert set(HutchTools(only=["read"]).functions) == {"read"}


async def test_a_picture_is_an_image_of_the_result(tools: HutchTools) -> None:
    png = (
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
        "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    write = f"import base64; open('dot.png', 'wb').write(base64.b64decode('{png}'))"
    calls = ("python", {"code": write}), ("read", {"path": "dot.png"})
    output = await agent(tools, *calls).arun("go", session_id="picture")
    [image] = [image for message in output.messages or [] for image in message.images or []]
    assert image.get_content_bytes().startswith(b"\x89PNG")


async def test_a_cancelled_run_kills_what_its_tool_started(tools: HutchTools) -> None:
    mark = new_mark()
    calls = ("bash", {"command": f"setsid sleep {mark} & sleep {mark}", "timeout": 600})
    work = asyncio.ensure_future(agent(tools, calls).arun("go", session_id="cancel"))
    await until(True, mark)
    work.cancel()
    await asyncio.wait((work,))
    await until(False, mark)


async def test_a_box_that_died_stops_the_run_and_is_not_replaced() -> None:
    with hutch.Sandbox.create() as box:
        tools = HutchTools(box)
        box.close()
        for run in (True, False):
            asked = agent(tools, ("bash", {"command": "true"}), ("bash", {"command": "true"}))
            output = await asked.arun("go") if run else asked.run("go")
            assert output.content != "done" and len(answers(output)) == 1
            assert "the sandbox is gone" in answers(output)[0]


def test_an_option_that_no_box_has_is_refused() -> None:
    with pytest.raises(hutch.InvalidRequest, match="no option 'bogus'"):
        HutchTools(bogus=1)


def test_nothing_is_left_when_the_program_ends(tmp_path: Path) -> None:
    script = """
from hutch.adapters.agno import HutchTools
HutchTools().functions["bash"].entrypoint(command="sleep SECONDS > /dev/null 2>&1 & echo begun")
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)
