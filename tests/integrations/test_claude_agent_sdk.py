"""Claude Agent SDK: our tools as an MCP server in the process, asked by a stand-in for the CLI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, Transport, query
from leaving import assert_nothing_is_left_at_the_end, new_mark, until

from hutch import AsyncSandbox, InvalidRequest, Sandbox
from hutch.adapters.claude_agent_sdk import hutch_options, hutch_server
from hutch.tools import TOOLS

FRAMEWORK = "Claude Agent SDK"
PACKAGE = "claude-agent-sdk"
PLUGGED = "in-process MCP tools, options without the machine's own tools"

HELLO = {
    "protocolVersion": "2025-06-18", "capabilities": {},
    "clientInfo": {"name": "stand-in", "version": "1"},
}  # fmt: skip


class StandIn(Transport):
    """Plays the CLI: begins, makes the calls it was told to make, and says that it is done."""

    def __init__(self, *calls: tuple[str, dict[str, Any]]) -> None:
        self.calls = calls
        self.answers: list[dict[str, Any]] = []
        self.asked = asyncio.Event()
        self._written: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._ready = False

    async def connect(self) -> None:
        self._ready = True

    async def write(self, data: str) -> None:
        for line in data.splitlines():
            self._written.put_nowait(json.loads(line))

    async def read_messages(self) -> AsyncIterator[dict[str, Any]]:
        begun = await self._next("control_request")
        answer = {"subtype": "success", "request_id": begun["request_id"], "response": {}}
        yield {"type": "control_response", "response": answer}
        for number, (method, params) in enumerate([("initialize", HELLO), *self.calls], 1):
            message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            request = {"subtype": "mcp_message", "server_name": "hutch", "message": message}
            yield {"type": "control_request", "request_id": str(number), "request": request}
            self.asked.set()
            told = await self._next("control_response")
            self.answers.append(told["response"]["response"]["mcp_response"])
            if method == "initialize":
                note = {"jsonrpc": "2.0", "method": "notifications/initialized", "params": {}}
                request = {"subtype": "mcp_message", "server_name": "hutch", "message": note}
                yield {"type": "control_request", "request_id": "note", "request": request}
                await self._next("control_response")
        yield {
            "type": "result", "subtype": "success", "duration_ms": 1, "duration_api_ms": 1,
            "is_error": False, "num_turns": 1, "session_id": "s", "result": "done",
        }  # fmt: skip

    async def _next(self, kind: str) -> dict[str, Any]:
        while (found := await self._written.get())["type"] != kind:
            pass
        return found

    async def close(self) -> None:
        self._ready = False

    def is_ready(self) -> bool:
        return self._ready

    async def end_input(self) -> None:
        pass


def call(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return "tools/call", {"name": name, "arguments": arguments}


async def asked(options: ClaudeAgentOptions, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """What the calls were answered with."""
    cli = StandIn(*calls)
    said = [each async for each in query(prompt="go", options=options, transport=cli)]
    assert isinstance(said[-1], ResultMessage) and said[-1].result == "done"
    return [answer.get("result", answer) for answer in cli.answers[1:]]


def text_of(result: dict[str, Any]) -> str:
    return result["content"][0]["text"]


@pytest.fixture
async def box():
    async with await AsyncSandbox.create() as made:
        yield made


async def test_a_model_has_our_tools_and_they_work_in_the_box(box):
    listed, made, seen = await asked(
        hutch_options(box), ("tools/list", {}), call("bash", command="cd /tmp && echo hi > note"),
        call("bash", command="pwd; cat note"),
    )  # fmt: skip
    assert {tool["name"] for tool in listed["tools"]} == set(TOOLS)
    bash = next(tool for tool in listed["tools"] if tool["name"] == "bash")
    assert bash["description"] == TOOLS["bash"].description
    assert bash["inputSchema"]["required"] == ["command"]
    assert not made.get("isError") and text_of(seen).strip() == "/tmp\nhi"


async def test_options_leave_nothing_of_the_machine(box):
    options = hutch_options(box, only=["bash"], model="m", allowed_tools=["mcp__other__x"])
    assert options.tools == [] and options.strict_mcp_config and options.setting_sources == []
    assert options.allowed_tools == ["mcp__hutch__bash", "mcp__hutch__recall", "mcp__other__x"]
    assert set(options.mcp_servers) == {"hutch"} and options.model == "m"
    (listed,) = await asked(options, ("tools/list", {}))
    assert [tool["name"] for tool in listed["tools"]] == ["bash", "recall"]


def test_a_tool_that_is_not_there_is_refused_and_names_may_come_from_an_iterator():
    with pytest.raises(InvalidRequest, match="there is no tool 'nope'"):
        hutch_options(only=["nope"])
    assert hutch_options(only=iter(["read"])).allowed_tools == ["mcp__hutch__read"]


async def test_what_the_model_does_wrong_is_an_error_it_can_read(box):
    wrong, unknown = await asked(
        hutch_options(box), call("bash", comand="ls"), call("nothing", a=1)
    )
    assert wrong["isError"] and "command" in text_of(wrong)
    assert unknown["isError"] and "nothing" in text_of(unknown)


async def test_a_timeout_kills_what_a_command_started(box):
    mark = new_mark()
    command = f"setsid sleep {mark} & sleep {mark}"
    (answer,) = await asked(hutch_options(box), call("bash", command=command, timeout=1))
    assert "timed out" in text_of(answer)
    await until(False, mark)


async def test_a_query_that_is_cancelled_kills_what_its_tool_runs(box):
    mark = new_mark()
    asking = asked(hutch_options(box), call("bash", command=f"sleep {mark}"))
    work = asyncio.create_task(asking)
    await until(True, mark)
    work.cancel()
    await asyncio.wait((work,))
    await until(False, mark)


async def test_a_box_that_is_gone_is_told_apart_from_a_command_that_failed(box):
    options = hutch_options(box)
    (failed,) = await asked(options, call("bash", command="exit 3"))
    assert not failed.get("isError")
    await box.close()
    (gone,) = await asked(options, call("bash", command="true"))
    assert gone["isError"] and "The box is gone" in text_of(gone)


async def test_a_box_is_made_with_the_first_call_and_each_server_has_its_own():
    one, two = hutch_options(order={"memory": "256m"}), hutch_options()
    await asked(one, call("bash", command="touch /tmp/mine"))
    (seen,) = await asked(one, call("bash", command="ls /tmp/mine"))
    (unseen,) = await asked(two, call("bash", command="ls /tmp"))
    assert "mine" in text_of(seen) and "mine" not in text_of(unseen)


async def test_a_sandbox_of_code_that_does_not_await_serves_as_well():
    with Sandbox.create() as box:
        (answer,) = await asked(hutch_options(box), call("bash", command="echo hi"))
        assert "hi" in text_of(answer)


def test_a_server_alone_is_for_options_of_ones_own():
    options = ClaudeAgentOptions(mcp_servers={"hutch": hutch_server()})
    (answer,) = asyncio.run(asked(options, call("bash", command="echo hi")))
    assert "hi" in text_of(answer)


def test_nothing_is_left_when_the_program_ends(tmp_path: Path):
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_claude_agent_sdk import asked, call, hutch_options
asyncio.run(asked(hutch_options(), call("bash", command="sleep SECONDS &")))
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)
