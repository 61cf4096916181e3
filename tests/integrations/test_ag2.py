"""AG2: agents with its shell and code tools, and with ours, in a box."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from ag2 import Agent
from ag2.events import ToolCallEvent, ToolResultEvent
from ag2.stream import MemoryStream
from ag2.testing import TestConfig
from ag2.tools import SandboxCodeTool, SandboxShellTool
from ag2.tools.sandbox import SandboxFactory
from leaving import assert_nothing_is_left_at_the_end, new_mark, until

import hutch
from hutch.adapters.ag2 import HutchEnvironment

FRAMEWORK = "AG2"
PACKAGE = "ag2"
PLUGGED = "environment of SandboxShellTool and SandboxCodeTool, function tools"


@pytest.fixture(scope="module")
def environment() -> Iterator[HutchEnvironment]:
    with hutch.Sandbox.create() as box:
        yield HutchEnvironment(box)


def call(name: str, **arguments: Any) -> ToolCallEvent:
    return ToolCallEvent(name, arguments=json.dumps(arguments))


async def results(tools: list[Any], *calls: ToolCallEvent) -> list[str]:
    """What the tools answered when an agent's model made these calls."""
    stream = MemoryStream()
    config = TestConfig(*calls, "done")  # which raises the errors of tools
    reply = await Agent("coder", config=config, tools=tools).ask("go", stream=stream)
    assert reply.body == "done"
    events = await stream.history.get_events()
    answers = [event for event in events if isinstance(event, ToolResultEvent)]
    return ["".join(str(part.content) for part in each.result.parts) for each in answers]


def test_it_is_what_ag2_calls_an_environment(environment: HutchEnvironment) -> None:
    assert isinstance(environment, SandboxFactory)
    assert copy.deepcopy(environment) is environment


async def test_an_agent_runs_commands_and_code_in_the_same_box(
    environment: HutchEnvironment,
) -> None:
    tools = [SandboxShellTool(environment), SandboxCodeTool(environment)]
    found = await results(
        tools,
        call("run_shell_command", command="pwd; echo 41 > kept"),
        call("run_code", code="expr $(cat kept) + 1; exit 3", language="bash"),
    )
    assert found == ["/workspace", "42\n[exit code: 3]"]


async def test_a_tool_that_restricts_commands_does_so(environment: HutchEnvironment) -> None:
    tools = [SandboxShellTool(environment, allowed=["echo"])]
    ran, refused = await results(
        tools,
        call("run_shell_command", command="echo hi"),
        call("run_shell_command", command="cat kept"),
    )
    assert ran == "hi" and "not allowed" in refused


async def test_our_tools_are_tools_of_theirs(environment: HutchEnvironment) -> None:
    found = await results(
        environment.hutch_tools(),
        call("python", code="x = 6"),
        call("python", code="x * 7"),
        call("bash", wrong="x"),
    )
    assert "42" in found[1] and "has no parameter" in found[2]


async def test_commands_follow_the_conventions(environment: HutchEnvironment) -> None:
    async with environment.open() as sandbox:
        done = await sandbox.exec(["sh", "-c", "echo $A; echo no >&2; exit 4"], env={"A": "b"})
        assert (done.output, done.exit_code) == ("b\nno", 4)
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127
        assert (await sandbox.exec([])).exit_code == 2
        long = await sandbox.exec(["sh", "-c", "yes | head -c 300000"])
        assert len(long.output) < 101_000 and long.output.endswith("[output truncated]")
        await sandbox.put_file(PurePosixPath("a/b.bin"), b"\xff\x00")
        done = await sandbox.exec(["od", "-An", "-tx1", "a/b.bin"])
        assert done.output == "ff 00"
        await sandbox.remove_file(PurePosixPath("a/b.bin"))
        assert (await sandbox.exec(["test", "-e", "a/b.bin"])).exit_code == 1
        with pytest.raises(ValueError, match="relative"):
            await sandbox.put_file(PurePosixPath("/etc/x"), b"")


async def test_a_timeout_and_a_cancel_kill_the_whole_tree(environment: HutchEnvironment) -> None:
    async with environment.open() as sandbox:
        mark = new_mark()
        line = f"echo so far; setsid sleep {mark} & sleep {mark}"
        done = await sandbox.exec(["sh", "-c", line], timeout=1)
        assert (done.output, done.exit_code) == ("so far\nExecution timed out after 1s", 124)
        await until(False, mark)
        work = asyncio.ensure_future(sandbox.exec(["sh", "-c", line]))
        await until(True, mark)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await until(False, mark)


async def test_a_box_that_died_is_an_error_and_is_not_replaced() -> None:
    async with HutchEnvironment() as environment:
        tools = [SandboxShellTool(environment)]
        async with environment.open() as sandbox:
            await sandbox._box.close()
        with pytest.raises(hutch.BoxLost):
            await results(tools, call("run_shell_command", command="true"))


async def test_a_box_of_yours_stays_open() -> None:
    async with await hutch.AsyncSandbox.create() as box:
        async with HutchEnvironment(box) as environment, environment.open() as sandbox:
            await sandbox.put_file(PurePosixPath("note"), b"hi")
        assert await box.files.read("note") == "hi"


def test_an_option_that_no_box_has_is_refused() -> None:
    with pytest.raises(hutch.InvalidRequest, match="no option 'bogus'"):
        HutchEnvironment(bogus=1)


def test_nothing_is_left_when_the_program_ends(tmp_path: Path) -> None:
    script = """
import asyncio
from hutch.adapters.ag2 import HutchEnvironment

async def main():
    async with HutchEnvironment().open() as sandbox:
        await sandbox.exec(["sh", "-c", "sleep SECONDS > /dev/null 2>&1 &"])

asyncio.run(main())
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)
