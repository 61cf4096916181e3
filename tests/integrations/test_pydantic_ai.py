"""Pydantic AI: the official suite of workspaces, resuming, the console tools, our own tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from leaving import assert_nothing_is_left_at_the_end, new_mark, running, until
from pydantic_ai import Agent, ModelMessagesTypeAdapter
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.workspaces import (
    WorkspaceBackend,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite
from pydantic_ai_backends import ConsoleCapability, create_console_toolset
from pydantic_ai_backends.permissions import PERMISSIVE_RULESET

import hutch
from hutch.adapters.pydantic_ai import HutchWorkspace, HutchWorkspaceBackend, hutch_toolset

FRAMEWORK = "pydantic-ai"
PACKAGE = "pydantic-ai-slim"
PLUGGED = "HutchWorkspace, WorkspaceBackend, console tools, hutch_toolset"
SUITE = "WorkspaceBackendSuite"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class TestWorkspaceBackend(WorkspaceBackendSuite):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[WorkspaceBackend]:
        made = HutchWorkspaceBackend()
        yield made
        await made.close()

    @pytest.fixture
    async def fresh_backend(self) -> AsyncIterator[Callable[[], WorkspaceBackend]]:
        made: list[HutchWorkspaceBackend] = []

        def fresh() -> WorkspaceBackend:
            made.append(HutchWorkspaceBackend())
            return made[-1]

        yield fresh
        for each in made:
            try:
                await each.close()
            except WorkspaceUnavailableError:
                pass  # the test destroyed it

    @pytest.fixture
    def attach_backend(self) -> Callable[[WorkspaceRef], WorkspaceBackend]:
        return lambda ref: HutchWorkspaceBackend(ref=ref)

    @pytest.fixture
    def destroy_environment(self) -> Callable[[WorkspaceBackend], Awaitable[None]]:
        async def destroy(backend: WorkspaceBackend) -> None:
            assert backend.ref is not None
            await HutchWorkspace().destroy(backend.ref)

        return destroy


def calls(*wanted: tuple[str, dict[str, Any]]) -> FunctionModel:
    """A model that makes these calls, one after the other, and then says what they came to."""

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        returned: list[str] = []  # since it was last asked something
        for part in (part for message in messages for part in message.parts):
            if part.part_kind == "user-prompt":
                returned = []
            elif part.part_kind == "tool-return":
                returned.append(str(part.content))
        if len(returned) < len(wanted):
            return ModelResponse(parts=[ToolCallPart(*wanted[len(returned)])])
        return ModelResponse(parts=[TextPart("\n".join(["Done.", *returned]))])

    return FunctionModel(answer)


async def test_a_serialized_history_resumes_in_the_same_box() -> None:
    workspace = HutchWorkspace()
    first = Agent(
        calls(("bash", {"command": "echo kept > note; cd /tmp"})),
        capabilities=[workspace],
        toolsets=[hutch_toolset(only=["bash"])],
    )
    history = (await first.run("begin")).all_messages_json()

    again = Agent(
        calls(("bash", {"command": "cat /workspace/note; pwd"})),
        capabilities=[HutchWorkspace()],
        toolsets=[hutch_toolset(only=["bash"])],
    )
    messages = ModelMessagesTypeAdapter.validate_json(history)
    result = await again.run("go on", message_history=messages)
    assert "kept\n/tmp" in result.output
    ref = result.all_messages()[-1].workspace_ref
    await workspace.destroy(ref)
    with pytest.raises(WorkspaceUnavailableError):
        await again.run("and on", message_history=messages)


@pytest.mark.parametrize("id", ["../../v1/keys", "", "x" * 100, "a b", "a?b=c", "no-such-box"])
async def test_a_history_that_names_no_box_of_ours_reaches_nothing(id: str) -> None:
    with pytest.raises(WorkspaceUnavailableError):
        backend = HutchWorkspace().get_workspace(None, ref=WorkspaceRef(provider="hutch", id=id))
        await backend.working_dir()


async def test_a_history_cannot_name_a_box_of_somebody_else() -> None:
    mine = HutchWorkspaceBackend(labels={"user": "ann"})
    async with await hutch.AsyncSandbox.create() as other:
        await mine.working_dir()
        for ref in (WorkspaceRef(provider="hutch", id=other.id), mine.ref):
            with pytest.raises(WorkspaceUnavailableError, match="not made for this agent"):
                await HutchWorkspaceBackend(ref=ref, labels={"user": "bob"}).working_dir()
        assert await HutchWorkspaceBackend(ref=mine.ref, labels={"user": "ann"}).working_dir()
    await mine.close()


def test_the_ref_of_another_provider_is_left_to_its_capability() -> None:
    ref = WorkspaceRef(provider="e2b", id="x")
    assert HutchWorkspace().get_workspace(None, ref=ref) is None


async def test_each_conversation_has_a_box_of_its_own() -> None:
    agent = Agent(
        calls(("bash", {"command": "ls; touch mine"})),
        capabilities=[HutchWorkspace()],
        toolsets=[hutch_toolset(only=["bash"])],
    )
    results = await asyncio.gather(agent.run("one"), agent.run("two"))
    refs = {result.all_messages()[-1].workspace_ref for result in results}
    assert len(refs) == 2
    assert all("mine" not in result.output for result in results)


@pytest.mark.parametrize("with_capability", [True, False])
async def test_the_console_tools_work_in_a_box(with_capability: bool) -> None:
    model = calls(
        ("write_file", {"path": "a/b.txt", "content": "one\ntwo\n"}),
        ("edit_file", {"path": "a/b.txt", "old_string": "two", "new_string": "three"}),
        ("read_file", {"path": "a/b.txt"}),
        ("ls", {"path": "a"}),
        ("glob", {"pattern": "*.txt"}),
        ("grep", {"pattern": "thr.e", "output_mode": "content"}),
        ("execute", {"command": "cat a/b.txt; exit 3"}),
    )
    if with_capability:
        console = ConsoleCapability(permissions=PERMISSIVE_RULESET)
        agent = Agent(model, capabilities=[HutchWorkspace(), console])
    else:
        toolset = create_console_toolset(require_execute_approval=False)
        agent = Agent(model, capabilities=[HutchWorkspace()], toolsets=[toolset])
    output = (await agent.run("work")).output
    assert "Edited a/b.txt: replaced 1 occurrence(s)" in output
    assert "     2\tthree" in output
    assert "b.txt (10 bytes)" in output
    assert "b.txt:2: three" in output
    assert "exit code 3" in output


async def test_our_tools_work_in_a_given_box() -> None:
    async with await hutch.AsyncSandbox.create() as box:
        agent = Agent(
            calls(("bash", {"command": "echo $((6 * 7))"}), ("bash", {"comand": "ls"})),
            toolsets=[hutch_toolset(box, only=["bash"])],
        )
        output = (await agent.run("work")).output
    assert "42" in output
    assert "no parameter 'comand'" in output


async def test_a_sandbox_of_code_that_does_not_await_serves_as_well() -> None:
    with hutch.Sandbox.create() as box:
        tools = hutch_toolset(box, only=["bash"])
        agent = Agent(calls(("bash", {"command": "echo $((6 * 7))"})), toolsets=[tools])
        assert "42" in (await agent.run("work")).output


@pytest.mark.parametrize("made", [HutchWorkspace, HutchWorkspaceBackend])
def test_an_option_that_no_box_has_is_refused_at_once(made: Callable[..., Any]) -> None:
    with pytest.raises(hutch.InvalidRequest, match="no option 'bogus'"):
        made(bogus=1)


async def test_our_tools_without_a_workspace_say_what_to_do() -> None:
    agent = Agent(calls(("bash", {"command": "ls"})), toolsets=[hutch_toolset(only=["bash"])])
    with pytest.raises(UserError, match="HutchWorkspace"):
        await agent.run("work")


async def test_a_timeout_kills_all_that_a_command_started() -> None:
    backend, mark = HutchWorkspaceBackend(), new_mark()
    with pytest.raises(WorkspaceTimeoutError) as raised:
        command = f"echo begun; setsid sleep {mark} & sleep {mark}"
        await backend.run(command, shell=True, timeout=3)
    assert raised.value.stdout == "begun\n"
    await until(False, mark)
    await backend.close()


async def test_a_cancelled_run_kills_all_that_its_command_started() -> None:
    async with await hutch.AsyncSandbox.create() as box:
        mark = new_mark()
        command = f"setsid sleep {mark} & sleep {mark}"
        agent = Agent(
            calls(("bash", {"command": command, "timeout": 600})),
            toolsets=[hutch_toolset(box, only=["bash"])],
        )
        run = asyncio.ensure_future(agent.run("work"))
        async with asyncio.timeout(60):
            while not running(mark):
                await asyncio.sleep(0.05)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await until(False, mark)


async def test_a_box_that_died_is_no_failed_command() -> None:
    box = await hutch.AsyncSandbox.create()
    agent = Agent(calls(("bash", {"command": "ls"})), toolsets=[hutch_toolset(box, only=["bash"])])
    await box.close()
    with pytest.raises(WorkspaceUnavailableError):
        await agent.run("work")


async def test_output_beyond_the_limit_is_an_error_and_not_cut_off() -> None:
    backend = HutchWorkspaceBackend(output_limit=1000)
    with pytest.raises(WorkspaceOutputLimitError) as raised:
        await backend.run("yes", shell=True)
    assert raised.value.stdout.startswith("y\ny\n")
    await backend.close()


def test_nothing_is_left_when_the_process_ends(tmp_path: Path) -> None:
    script = """
import asyncio
from hutch.adapters.pydantic_ai import HutchWorkspaceBackend
async def main():
    await HutchWorkspaceBackend().run("sleep SECONDS > /dev/null 2>&1 & echo begun", shell=True)
asyncio.run(main())
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)
