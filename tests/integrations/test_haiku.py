"""haiku.skills: the sandbox skill, run by a sub-agent and directly, bound to an AG-UI thread."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from ag_ui.core import RunAgentInput, UserMessage
from haiku.skills import SkillsCapability
from haiku.skills.agent import run_agui_stream, run_skill
from haiku.skills.discovery import discover_resources
from haiku.skills.parser import parse_skill_md
from haiku.skills.registry import SkillRegistry
from haiku.skills.state import SkillDeps
from leaving import assert_nothing_is_left_at_the_end, new_mark, pids, until
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.ui.ag_ui import AGUIAdapter

import hutch
from hutch.adapters.haiku import FRESH, SandboxState, create_skill

FRAMEWORK = "haiku.skills"
PACKAGE = "haiku.skills"
PLUGGED = "skill `sandbox`: entry point, sub-agents, direct tools, AG-UI state"

Call = tuple[str, dict[str, Any]]


def calls(*wanted: Call) -> FunctionModel:
    """A model that makes these calls, one after the other, and then says what they came to."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        returned: list[str] = []  # since it was last asked something
        for part in (part for message in messages for part in message.parts):
            if part.part_kind == "user-prompt":
                returned = []
            elif part.part_kind == "tool-return":
                returned.append(str(part.content))
        if len(returned) < len(wanted):
            name, arguments = wanted[len(returned)]
            yield {0: DeltaToolCall(name=name, json_args=json.dumps(arguments))}
        else:
            yield "\n".join(["Done.", *returned])

    return FunctionModel(stream_function=answer)


def run(command: str, **more: Any) -> Call:
    return ("execute", {"command": command, **more})


async def skill_run(skill: Any, *wanted: Call, state: SandboxState) -> str:
    text, _, _ = await run_skill(calls(*wanted), skill, "work", state=state)
    return text


async def boxes() -> list[str]:
    return [info.id for info in await hutch.AsyncSandbox.list()]


def crash(pid: int) -> None:
    """Kill the whole box that a process is in, as the kernel would."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        if fields["NSpid"].split()[-1] == "1":
            os.kill(pid, signal.SIGKILL)
            return
        pid = int(fields["PPid"])


# --- the skill ---------------------------------------------------------------------------


def test_the_skill_is_found_by_its_entry_point() -> None:
    registry = SkillRegistry()
    registry.discover(use_entrypoints=True)
    skill = registry.get("sandbox")
    assert skill is not None
    assert skill.state_metadata().namespace == "sandbox"
    assert skill.resources == []
    assert skill.path is not None and discover_resources(skill.path) == []
    assert parse_skill_md(skill.path / "SKILL.md") == (skill.metadata, skill.instructions)
    skill.reconfigure(idle_timeout=5)


def test_finding_the_skill_loads_no_engine() -> None:
    script = """
import sys
from haiku.skills.discovery import discover_from_entrypoints
assert "sandbox" in [skill.metadata.name for skill in discover_from_entrypoints()]
loaded = [name for name in sys.modules if name.startswith(("hutch.engine", "hutch.backends"))]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


async def test_the_workspace_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAIKU_SKILLS_SANDBOX_WORKSPACE", str(tmp_path))
    await skill_run(create_skill(), run("echo hello > note"), state=SandboxState())
    assert (tmp_path / "note").read_text() == "hello\n"


@pytest.mark.parametrize("text", ["soon", "-1", "0", "1.5"])
def test_an_idle_timeout_that_is_no_number_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAIKU_SKILLS_SANDBOX_IDLE_TIMEOUT", text)
    with pytest.raises(ValueError, match="HAIKU_SKILLS_SANDBOX_IDLE_TIMEOUT"):
        create_skill()
    assert create_skill(idle_timeout=5)


async def test_the_console_tools_answer_as_they_always_did() -> None:
    text = await skill_run(
        create_skill(),
        ("write_file", {"path": "a/b.txt", "content": "one\ntwo\nthree\n"}),
        ("read_file", {"path": "a/b.txt", "offset": 1, "limit": 1}),
        ("edit_file", {"path": "a/b.txt", "old_string": "two", "new_string": "2"}),
        run("echo changed >> a/b.txt"),
        ("edit_file", {"path": "a/b.txt", "old_string": "three", "new_string": "3"}),
        ("ls", {}),
        ("ls", {"path": "nowhere"}),
        ("glob", {"pattern": "*.txt"}),
        ("grep", {"pattern": "^t.r", "output_mode": "content"}),
        run("cat a/b.txt; exit 3"),
        run("sleep 600", timeout=1),
        ("read_file", {"path": "nowhere"}),
        ("read_file", {}),
        state=SandboxState(),
    )
    expected = [
        "Wrote 3 lines to a/b.txt",
        "     2\ttwo\n\n... (1 more lines)",
        "Edited a/b.txt: replaced 1 occurrence(s)",
        "Error: 'a/b.txt' changed since you last read it",
        "Contents of .:\n  a/",
        "Directory 'nowhere' is empty or does not exist",
        "Found 1 file(s) matching '*.txt':\n  /workspace/a/b.txt",
        "Matches for '^t.r':\n  /workspace/a/b.txt:3: three",
        "Command failed (exit code 3):\none\n2\nthree\nchanged\n",
        "Command failed (exit code 124):\nError: Command timed out",
        "Error: No such file or directory: /workspace/nowhere",
        "Error: read_file needs 'path'",
    ]
    assert [line for line in expected if line not in text] == []


async def test_python_keeps_its_variables() -> None:
    code = ({"code": "x = 6"}, {"code": "x * 7"})
    cells = [("python", each) for each in code]
    assert "42" in await skill_run(create_skill(), *cells, state=SandboxState())


# --- tools of users ----------------------------------------------------------------------


async def test_tools_of_your_own_have_the_backend_that_they_know() -> None:
    skill, state, seen = create_skill(), SandboxState(), []

    def count(ctx: RunContext[Any], name: str) -> str:
        backend = ctx.deps.backend
        assert backend.write("sub/own.txt", "one\ntwo\n").error is None
        assert backend.read("sub/own.txt", offset=1) == "     2\ttwo"
        assert backend.read_bytes("sub/own.txt") == b"one\ntwo\n"
        assert backend.edit("sub/own.txt", "two", "2").occurrences == 1
        assert backend.exists("sub/own.txt") and not backend.exists("sub")
        assert [each["name"] for each in backend.ls_info("sub")] == ["own.txt"]
        [found] = backend.glob_info("**/*.txt", "/workspace")
        assert found == {
            "name": "own.txt", "path": "/workspace/sub/own.txt", "is_dir": False, "size": 6,
        }  # fmt: skip
        [match] = backend.grep_raw("^2", "sub")
        assert (match["line_number"], match["line"]) == (2, "2")
        # Failures are returned.
        assert backend.read("nowhere").startswith("Error: ") and backend.read_bytes("x") == b""
        assert backend.edit("nowhere", "a", "b").error and backend.write("/usr/x", "").error
        assert backend.ls_info("nowhere") == [] and isinstance(backend.grep_raw("("), str)
        assert backend.execute("exit 3").exit_code == 3
        assert backend.execute("sleep 600", timeout=1).exit_code == 124
        seen.append(backend.id)
        return backend.execute(f"wc -l < {name}").output

    async def lines(ctx: RunContext[Any]) -> str:
        with pytest.raises(RuntimeError, match="event loop"):
            ctx.deps.backend.execute("true")
        box = await ctx.deps.backend.box()
        seen.append(box.id)
        return await box.files.read("sub/own.txt")

    skill.tools = [count, lines]
    wanted = ("count", {"name": "sub/own.txt"}), ("lines", {}), run("cat sub/own.txt")
    text = await skill_run(skill, *wanted, state=state)
    assert text == "Done.\n2\n\none\n2\n\none\n2\n"
    assert seen == [*await boxes()] * 2


# --- sessions ----------------------------------------------------------------------------


async def test_a_box_starts_with_the_first_tool_call_and_stays() -> None:
    skill, state = create_skill(), SandboxState()
    await skill_run(skill, state=state)
    assert await boxes() == []
    assert state.session_id is None
    await skill_run(skill, run("echo 42 > note"), state=state)
    (box,) = await boxes()
    assert state.session_id
    again = SandboxState.model_validate_json(state.model_dump_json())
    assert "42" in await skill_run(skill, run("cat note"), state=again)
    assert await boxes() == [box]
    assert again == state


async def test_an_idle_box_stops_by_itself_and_the_next_is_said_to_be_new() -> None:
    skill, state = create_skill(idle_timeout=3), SandboxState()
    assert FRESH not in await skill_run(skill, run("touch note"), state=state)
    async with asyncio.timeout(60):
        while await boxes():
            await asyncio.sleep(0.05)
    session = state.session_id
    text = await skill_run(skill, run("echo there: $(ls)"), state=state)
    assert FRESH in text
    assert "there:\n" in text
    assert state.session_id == session


async def test_calls_at_once_share_a_box() -> None:
    skill, state = create_skill(), SandboxState()
    state.session_id = "a-session"
    await asyncio.gather(*(skill_run(skill, run("true"), state=state) for _ in range(4)))
    assert len(await boxes()) == 1


async def test_a_box_that_died_is_no_failed_command() -> None:
    skill, state, mark = create_skill(), SandboxState(), new_mark()
    running = asyncio.ensure_future(
        skill_run(skill, run(f"sleep {mark}", timeout=600), state=state)
    )
    await until(True, mark)
    crash(pids(mark)[0])
    with pytest.raises(hutch.BoxLost, match="the sandbox died"):
        await running
    assert FRESH in await skill_run(skill, run("true"), state=state)


async def test_a_box_that_could_not_start_is_tried_again_and_said_to_be_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skill, state = create_skill(), SandboxState(session_id="a-session")
    with monkeypatch.context() as patch:
        patch.setenv("HUTCH_URL", "http://127.0.0.1:1")
        with pytest.raises(hutch.HutchError):
            await skill_run(skill, run("true"), state=state)
    assert FRESH in await skill_run(skill, run("true"), state=state)


async def test_a_cancelled_run_kills_all_that_its_command_started() -> None:
    mark = new_mark()
    command = run(f"setsid sleep {mark} & sleep {mark}", timeout=600)
    running = asyncio.ensure_future(skill_run(create_skill(), command, state=SandboxState()))
    await until(True, mark)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(False, mark)


async def test_a_timeout_kills_all_that_a_command_started() -> None:
    mark = new_mark()
    command = run(f"setsid sleep {mark} & sleep {mark}", timeout=1)
    assert "exit code 124" in await skill_run(create_skill(), command, state=SandboxState())
    await until(False, mark)


@pytest.mark.parametrize("hostile", ["", "a" * 1000, "new\nline"])
async def test_an_id_that_cannot_be_ours_gets_a_new_one(hostile: str) -> None:
    state = SandboxState(session_id=hostile)
    await skill_run(create_skill(), run("true"), state=state)
    assert state.session_id != hostile


# --- agents ------------------------------------------------------------------------------


Served = tuple[Agent[Any, str], SkillsCapability]


async def asked(served: Served, thread: str, state: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """One request of an AG-UI client: what the tool said, and the state as the client has it."""
    agent, capability = served
    given = RunAgentInput(
        thread_id=thread, run_id=secrets.token_hex(8), state=state, tools=[], context=[],
        forwarded_props={}, messages=[UserMessage(id="1", role="user", content="go")],
    )  # fmt: skip
    adapter = AGUIAdapter(agent, given)
    said, deps = "", SkillDeps(state=state)
    async with run_agui_stream(adapter, toolset=capability.toolset, deps=deps) as stream:
        async for event in stream:
            kind = event.type.value
            if kind == "TOOL_CALL_RESULT":
                said = event.content
            elif kind == "STATE_DELTA":
                for change in event.model_dump()["delta"]:
                    assert change["path"] == "/sandbox/session_id"
                    state = {"sandbox": {"session_id": change["value"]}}
            assert kind != "RUN_ERROR", event
    return said, state


def agent_with(*wanted: Call, direct: bool) -> Served:
    """One agent, as a server has it for all its threads."""
    capability = SkillsCapability(
        skills=[create_skill()], skill_model=calls(*wanted), use_subagents=not direct
    )
    if direct:
        outer = [
            ("execute_skill_tool", {"skill_name": "sandbox", "tool_name": name, "arguments": args})
            for name, args in wanted
        ]
    else:
        outer = [("execute_skill", {"skill_name": "sandbox", "request": "work"})]
    return Agent(calls(*outer), deps_type=SkillDeps, capabilities=[capability]), capability


@pytest.mark.parametrize("direct", [False, True], ids=["by a sub-agent", "directly"])
async def test_the_state_of_a_thread_leads_back_to_its_box(direct: bool) -> None:
    served = agent_with(run("echo seen: $(ls); touch mine"), direct=direct)
    first, state = await asked(served, "thread-1", {"sandbox": {"session_id": None}})
    assert state["sandbox"]["session_id"]
    again, after = await asked(served, "thread-1", state)
    assert ["mine" in said for said in (first, again)] == [False, True]
    assert after == state
    assert len(await boxes()) == 1


@pytest.mark.parametrize("direct", [False, True], ids=["by a sub-agent", "directly"])
async def test_a_thread_never_gets_the_box_of_another(direct: bool) -> None:
    served = agent_with(run("echo seen: $(ls); touch mine"), direct=direct)
    _, state = await asked(served, "thread-1", {})
    new, _ = await asked(served, "thread-2", {})  # the toolset still has the state of the first
    thief, other = await asked(served, "thread-3", state)
    assert "mine" not in new + thief
    assert other != state
    assert len(await boxes()) == 3


def test_nothing_is_left_when_the_process_ends(tmp_path: Path) -> None:
    script = """
import asyncio
from haiku.skills.agent import run_skill
from pydantic_ai.models.test import TestModel
from hutch.adapters.haiku import SandboxState, create_skill
skill = create_skill()
async def main():
    (toolset,) = skill.toolsets
    tool = toolset.tools["execute"]
    from types import SimpleNamespace
    ctx = SimpleNamespace(deps=SimpleNamespace(state=SandboxState()), conversation_id=None)
    await tool.function(ctx, command="sleep SECONDS > /dev/null 2>&1 & echo begun")
asyncio.get_event_loop_policy().new_event_loop().run_until_complete(main())  # and never closed
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)


def test_what_its_entry_point_loads_has_no_engine() -> None:
    code = "import sys, hutch.adapters.haiku; print('hutch.engine' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
