"""Hutch as the sandbox of Strands agents, with a model that reads from a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from leaving import assert_nothing_is_left_when_killed
from strands import Agent
from strands.models import Model
from strands.sandbox.errors import SandboxPathNotFoundError, SandboxTimeoutError
from strands.sandbox.types import StreamChunk

from hutch import BoxLost, Sandbox
from hutch.adapters.strands import HutchSandbox

FRAMEWORK = "Strands Agents"
PACKAGE = "strands-agents"
PLUGGED = "Sandbox, tools"


class Scripted(Model):
    """Says what it is told to say: text, or (tool, input)."""

    def __init__(self, *steps: str | tuple[str, dict[str, Any]]) -> None:
        self._steps = iter(steps)

    def update_config(self, **config: Any) -> None: ...

    def get_config(self) -> dict[str, Any]:
        return {}

    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def stream(self, messages: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        step = next(self._steps)
        yield {"messageStart": {"role": "assistant"}}
        if isinstance(step, str):
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": step}}}
        else:
            use = {"name": step[0], "toolUseId": f"use-{id(step)}"}
            yield {"contentBlockStart": {"start": {"toolUse": use}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(step[1])}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(step, str) else "tool_use"}}


def told(agent: Agent) -> str:
    """What the tools answered."""
    blocks = [block for message in agent.messages for block in message["content"]]
    return str([block["toolResult"] for block in blocks if "toolResult" in block])


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox.create() as made:
        yield made


@pytest.fixture(scope="module")
def sandbox(box: Sandbox) -> HutchSandbox:
    return HutchSandbox(box)


def alive(box: Sandbox, seconds: str) -> bool:
    found = box.commands.run(["sh", "-c", f"ps -eo args | grep -c '^sleep {seconds}'"])
    return found.stdout.strip() != "0"


def test_an_agent_that_is_called_again_has_the_same_box() -> None:
    with HutchSandbox() as sandbox:
        calls = ("shell", {"command": "echo 41 > kept; pwd"}), "done"
        more = ("shell", {"command": "expr $(cat kept) + 1; exit 3"}), "done"
        agent = Agent(Scripted(*calls, *more), sandbox=sandbox, callback_handler=None)
        agent("begin")
        assert "/workspace" in told(agent)
        agent("go on")  # in another event loop than before
        assert "42" in told(agent) and "3" in told(agent)


def test_our_tools_are_tools_of_theirs(sandbox: HutchSandbox) -> None:
    steps = ("bash", {"command": "echo $((6 * 7))"}), ("bash", {"wrong": "x"}), "done"
    agent = Agent(Scripted(*steps), tools=sandbox.hutch_tools(), callback_handler=None)
    agent("go")
    assert "42" in told(agent)
    assert "has no parameter" in told(agent) and "'error'" in told(agent)


async def test_output_arrives_in_pieces_and_then_whole(sandbox: HutchSandbox) -> None:
    *pieces, result = [piece async for piece in sandbox.execute_streaming(
        "printf '\\303'; sleep 0.2; printf '\\251\\n'; echo no >&2; echo $A; pwd; exit 4",
        cwd="/tmp", env={"A": "b"},
    )]  # fmt: skip
    assert (result.exit_code, result.stdout, result.stderr) == (4, "é\nb\n/tmp\n", "no\n")
    chunks = [piece for piece in pieces if isinstance(piece, StreamChunk)]
    assert "".join(p.data for p in chunks if p.stream_type == "stdout") == result.stdout


async def test_python_keeps_its_variables(sandbox: HutchSandbox) -> None:
    await sandbox.execute_code("x = 20", "python")
    assert (await sandbox.execute_code("print('hm')\nx * 2 + 2", "python")).stdout == "hm\n42\n"
    failed = await sandbox.execute_code("1 / 0", "python")
    assert failed.exit_code == 1 and "ZeroDivisionError" in failed.stderr
    assert (await sandbox.execute_code("echo sh $0", "sh")).stdout == "sh sh\n"
    found = await sandbox.execute_code("import os; print(os.getcwd())", "py", cwd="/tmp")
    assert found.stdout == "/tmp\n"
    assert (await sandbox.execute_code("x", "no-such-language")).exit_code == 127


async def test_files_are_bytes_and_their_absence_is_told(sandbox: HutchSandbox) -> None:
    await sandbox.write_file("a b/c.bin", b"\xff\x00")
    assert await sandbox.read_file("a b/c.bin") == b"\xff\x00"
    [found] = await sandbox.list_files("a b")
    assert (found.name, found.is_dir, found.size) == ("c.bin", False, 2)
    await sandbox.remove_file("a b/c.bin")
    for gone in (sandbox.read_file("a b/c.bin"), sandbox.remove_file("a b/c.bin")):
        with pytest.raises(FileNotFoundError):
            await gone
    with pytest.raises(SandboxPathNotFoundError):
        await sandbox.list_files("nothing")
    with pytest.raises(OSError, match="Read-only"):
        await sandbox.write_file("/usr/x", b"")


async def test_a_timeout_kills_the_tree_and_keeps_what_was_said(
    sandbox: HutchSandbox, box: Sandbox
) -> None:
    with pytest.raises(SandboxTimeoutError) as caught:
        await sandbox.execute("echo so far; setsid sleep 4201 & sleep 4201", timeout=0.5)
    assert caught.value.stdout == "so far\n"
    assert not alive(box, "4201")


async def test_a_cancel_kills_the_tree(sandbox: HutchSandbox, box: Sandbox) -> None:
    work = asyncio.ensure_future(sandbox.execute("sleep 4202 & touch go; sleep 4202"))
    while not box.files.exists("go"):
        await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not alive(box, "4202")


async def test_a_box_that_died_is_told_apart_from_a_command_that_failed() -> None:
    with HutchSandbox() as sandbox:
        assert (await sandbox.execute("false")).exit_code == 1
        await (await sandbox.box()).close()
        with pytest.raises(BoxLost):
            await sandbox.execute("true")
        with pytest.raises(BoxLost):
            await sandbox.read_file("x")


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = """
import asyncio
from hutch.adapters.strands import HutchSandbox
asyncio.run(HutchSandbox().execute("sleep SECONDS & sleep SECONDS"))
"""
    assert_nothing_is_left_when_killed(script, tmp_path)
