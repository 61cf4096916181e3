"""Microsoft Agent Framework: an agent with a shell in a box, and with our tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_framework import (
    Agent,
    AgentResponse,
    BaseChatClient,
    ChatResponse,
    Content,
    FunctionInvocationLayer,
    Message,
    MiddlewareFailure,
)
from agent_framework_tools.shell import ShellEnvironmentProvider, ShellExecutor
from leaving import assert_nothing_is_left_at_the_end, new_mark, until

import hutch
from hutch.adapters.agent_framework import HutchShellTool

FRAMEWORK = "Microsoft Agent Framework"
PACKAGE = "agent-framework-core"
PLUGGED = "ShellExecutor with `as_function`, function tools"

Call = tuple[str, dict[str, Any]]


class Scripted(FunctionInvocationLayer[Any], BaseChatClient[Any]):
    """Makes these calls, one after another, and is then done."""

    def __init__(self, *calls: Call) -> None:
        super().__init__()
        self._steps = iter(calls)
        self.instructions = ""

    async def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Mapping[str, Any], **_: Any
    ) -> ChatResponse:
        self.instructions = str(options.get("instructions"))
        step = next(self._steps, None)
        content = Content.from_text("done")
        if step is not None:
            arguments = json.dumps(step[1])
            content = Content.from_function_call(f"call-{id(step)}", step[0], arguments=arguments)
        return ChatResponse(messages=[Message("assistant", [content])])


@pytest.fixture(scope="module")
def shell() -> Iterator[HutchShellTool]:
    with hutch.Sandbox.create() as box:
        yield HutchShellTool(box)


async def asked(tools: Any, *calls: Call) -> AgentResponse:
    response = await Agent(client=Scripted(*calls), tools=tools).run("go")
    assert response.text == "done"
    return response


def answers(response: AgentResponse) -> list[str]:
    contents = [content for message in response.messages for content in message.contents]
    return [str(each.result) for each in contents if each.type == "function_result"]


async def test_an_agent_has_one_kept_shell(shell: HutchShellTool) -> None:
    assert isinstance(shell, ShellExecutor)
    lines = "cd /tmp; export A=41", "pwd; expr $A + 1; echo no >&2; exit 3"
    calls = [("run_shell", {"command": line}) for line in lines]
    response = await asked([shell.as_function()], *calls)
    assert answers(response) == ["exit_code: 0", "/tmp\n42\n\nstderr: no\n\nexit_code: 3"]


async def test_our_tools_are_tools_of_theirs(shell: HutchShellTool) -> None:
    calls = ("python", {"code": "6 * 7"}), ("read", {"path": "nowhere"}), ("bash", {"wrong": 1})
    told = answers(await asked(shell.hutch_tools(), *calls))
    assert "42" in told[0] and "nowhere" in told[1] and "Error" in told[2]
    assert [tool.name for tool in shell.hutch_tools(only=["read"])] == ["read"]


async def test_the_environment_provider_asks_the_box() -> None:
    async with HutchShellTool(env={"BASH_VERSION": "9.9"}) as shell:
        client = Scripted()
        agent = Agent(client=client, context_providers=[ShellEnvironmentProvider(shell)])
        await agent.run("go")
        assert "Working directory: /workspace" in client.instructions


async def test_long_output_is_cut_in_the_middle(shell: HutchShellTool) -> None:
    done = await shell.run("echo first; yes | head -c 300000; echo last")
    assert done.truncated and len(done.stdout) < 70_000
    assert done.stdout.startswith("first\n") and done.stdout.endswith("last\n")
    assert "bytes omitted" in done.stdout


async def test_a_timeout_and_a_cancel_kill_the_whole_tree(shell: HutchShellTool) -> None:
    mark = new_mark()
    line = f"echo so far; setsid sleep {mark} & sleep {mark}"
    done = await shell.run(line, timeout=1)
    assert (done.stdout, done.exit_code, done.timed_out) == ("so far\n", 124, True)
    await until(False, mark)
    work = asyncio.ensure_future(shell.run(line))
    await until(True, mark)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await until(False, mark)


async def test_a_box_that_died_ends_the_run_and_is_not_replaced() -> None:
    with hutch.Sandbox.create() as box:
        shell = HutchShellTool(box)
        box.close()
        for tools in ([shell.as_function(name="bash")], shell.hutch_tools()):
            with pytest.raises(MiddlewareFailure, match="the sandbox is gone"):
                await asked(tools, ("bash", {"command": "true"}))
        with pytest.raises(hutch.BoxLost):
            await shell.run("true")


async def test_approval_is_required_if_you_say_so() -> None:
    shell = HutchShellTool(approval_mode="always_require")
    agent = Agent(client=Scripted(("run_shell", {"command": "true"})), tools=[shell.as_function()])
    response = await agent.run("go")
    assert len(response.user_input_requests) == 1
    assert await hutch.AsyncSandbox.list() == []


def test_an_option_that_no_box_has_is_refused() -> None:
    with pytest.raises(hutch.InvalidRequest, match="no option 'bogus'"):
        HutchShellTool(bogus=1)


def test_nothing_is_left_when_the_program_ends(tmp_path: Path) -> None:
    script = """
import asyncio
from hutch.adapters.agent_framework import HutchShellTool
asyncio.run(HutchShellTool().run("sleep SECONDS > /dev/null 2>&1 &"))
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)
