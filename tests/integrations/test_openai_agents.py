"""Hutch behind the OpenAI Agents SDK, driven by its own scripted model."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agents import Agent, ApplyPatchTool, RunConfig, Runner, ShellTool
from agents.editor import ApplyPatchOperation
from agents.run_context import RunContextWrapper
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File
from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    InvalidManifestPathError,
    PtySessionNotFoundError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.manifest import Environment
from agents.sandbox.session import SandboxSession
from agents.sandbox.workspace_paths import SandboxPathGrant
from agents.testing import ScriptedModel, assistant_message, function_call
from agents.tool import ShellActionRequest, ShellCallData, ShellCommandRequest
from leaving import assert_nothing_is_left_when_killed, new_mark, until
from openai.types.responses import ResponseCustomToolCall

import hutch
from hutch.adapters.openai_agents import (
    HutchEditor,
    HutchSandboxClient,
    HutchSandboxClientOptions,
    hutch_tools,
    shell_executor,
)
from hutch.client._async import AsyncSandbox
from hutch.client._sync import Sandbox
from hutch.tools import AsyncToolbox, Toolbox

FRAMEWORK = "OpenAI Agents SDK"
PACKAGE = "openai-agents"
PLUGGED = "agents.sandbox client, ShellTool executor, ApplyPatchTool editor, function tools"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def client() -> HutchSandboxClient:
    return HutchSandboxClient()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session(client: HutchSandboxClient) -> AsyncIterator[SandboxSession]:
    manifest = Manifest(
        entries={"notes/hello.txt": File(content=b"hello from the manifest\n")},
        environment=Environment(value={"COLOUR": "green"}),
    )
    made = await client.create(manifest=manifest)
    async with made:
        yield made
    await client.delete(made)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[AsyncSandbox]:
    async with await hutch.AsyncSandbox.create() as made:
        yield made


async def alive(box: AsyncSandbox, seconds: str) -> bool:
    """Whether `sleep SECONDS` runs in the box."""
    found = await box.commands.run(["sh", "-c", f"ps -eo args | grep -c '^sleep {seconds}'"])
    return found.stdout.strip() != "0"


# --- the sandbox ----------------------------------------------------------------------


async def test_a_manifest_is_what_the_workspace_begins_with(session: SandboxSession) -> None:
    result = await session.exec("cat notes/hello.txt; echo $COLOUR; pwd")
    assert result.stdout == b"hello from the manifest\ngreen\n/workspace\n"


async def test_a_command_gives_both_streams_and_its_exit_code(session: SandboxSession) -> None:
    result = await session.exec("echo out; echo err >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 7)


async def test_output_of_many_megabytes_is_whole(session: SandboxSession) -> None:
    result = await session.exec("head", "-c", "5000000", "/dev/zero", shell=False)
    assert len(result.stdout) == 5_000_000


async def test_a_program_that_is_not_there_is_127(session: SandboxSession) -> None:
    result = await session.exec("no-such-program", shell=False)
    assert result.exit_code == 127
    assert b"no-such-program" in result.stderr


async def test_a_command_runs_as_another_user_without_sudo(session: SandboxSession) -> None:
    assert (await session.exec("id -un", user="root")).stdout == b"root\n"
    await session.write(Path("/workspace/root/of.txt"), io.BytesIO(b"mine"), user="user")
    assert (await session.read(Path("root/of.txt"), user="root")).read() == b"mine"


async def test_a_timeout_kills_the_whole_tree(session: SandboxSession) -> None:
    with pytest.raises(ExecTimeoutError):
        await session.exec("setsid sleep 4001 & sleep 4001", timeout=0.5)
    assert not await alive(session._inner.box, "4001")


async def test_cancelling_a_command_kills_the_whole_tree(session: SandboxSession) -> None:
    work = asyncio.ensure_future(session.exec("sleep 4002 & touch started; sleep 4002"))
    while not await session._inner.box.files.exists("started"):
        await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not await alive(session._inner.box, "4002")


async def test_files_go_in_and_out_as_bytes(session: SandboxSession) -> None:
    data = bytes(range(256)) * 9000
    await session.write(Path("a folder/data.bin"), io.BytesIO(data))
    assert (await session.read(Path("a folder/data.bin"))).read() == data
    assert await session.read_bounded(Path("a folder/data.bin"), max_bytes=10) == data[:10]
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("nothing.txt"))


async def test_a_link_does_not_lead_out_of_the_workspace(session: SandboxSession) -> None:
    await session.exec("ln -sfn /etc out")
    with pytest.raises(InvalidManifestPathError):
        await session.read(Path("out/passwd"))


async def test_the_sdk_can_list_move_and_remove(session: SandboxSession) -> None:
    await session.mkdir("things/inner", parents=True)
    await session.write(Path("things/one.txt"), io.BytesIO(b"1"))
    await session.mv("things/one.txt", "things/two.txt")
    assert {Path(entry.path).name for entry in await session.ls("things")} == {"inner", "two.txt"}
    await session.rm("things", recursive=True)
    assert not await session._inner.box.files.exists("things")


async def test_a_terminal_is_typed_into_and_says_how_it_ended(session: SandboxSession) -> None:
    update = await session.pty_exec_start(
        "read name; echo hello $name $COLOUR; test -t 0; exit 3", tty=True, yield_time_s=0.25
    )
    assert (update.exit_code, update.process_id is None) == (None, False)
    update = await session.pty_write_stdin(
        session_id=update.process_id, chars="world\n", yield_time_s=20
    )
    assert b"hello world green" in update.output
    assert (update.exit_code, update.process_id) == (3, None)


async def test_a_program_that_goes_on_is_polled(session: SandboxSession) -> None:
    update = await session.pty_exec_start(
        "echo begun; while ! test -e go; do sleep 0.05; done; echo done", yield_time_s=0.25
    )
    assert update.process_id is not None
    await session.exec("touch go")
    more = await session.pty_write_stdin(session_id=update.process_id, chars="", yield_time_s=20)
    assert (update.output + more.output, more.exit_code) == (b"begun\ndone\n", 0)
    with pytest.raises(PtySessionNotFoundError):
        await session.pty_write_stdin(session_id=update.process_id, chars="")


async def test_programs_that_go_on_end_with_the_session(client: HutchSandboxClient) -> None:
    made = await client.create(options=HutchSandboxClientOptions(on_exit="sleep"))
    async with made:
        await made.pty_exec_start("sleep 4003", yield_time_s=0.25)
        assert await alive(made._inner.box, "4003")
        await made.pty_terminate_all()
        assert not await alive(made._inner.box, "4003")
        update = await made.pty_exec_start("sleep 4003", yield_time_s=0.25)
    with pytest.raises(PtySessionNotFoundError):
        await made.pty_write_stdin(session_id=update.process_id, chars="")
    await client.delete(made)


async def test_a_box_that_died_is_told_apart_from_a_command_that_failed(
    client: HutchSandboxClient,
) -> None:
    made = await client.create()
    async with made:
        assert await made.running()
        await made._inner.box.close()
        assert not await made.running()
        with pytest.raises(ExecTransportError):
            await made.exec("true")
        with pytest.raises(ExecTransportError):
            await made.pty_exec_start("true")
    await client.delete(made)


async def test_ports_are_refused_with_a_reason(session: SandboxSession) -> None:
    with pytest.raises(ExposedPortUnavailableError):
        await session._inner._resolve_exposed_port(8000)


async def test_a_folder_that_is_granted_is_there(
    client: HutchSandboxClient, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "given.txt").write_text("given")
    grant = SandboxPathGrant(path="/given", host_path=str(tmp_path), read_only=True)
    made = await client.create(manifest=Manifest(extra_path_grants=(grant,)))
    async with made:
        assert (await made.exec("cat /given/given.txt")).stdout == b"given"
        assert (await made.exec("touch /given/more")).exit_code != 0
    await client.delete(made)


async def test_a_session_is_resumed_in_another_box(
    client: HutchSandboxClient, tmp_path: Path
) -> None:
    first = await client.create(snapshot=LocalSnapshotSpec(base_path=tmp_path))
    async with first:
        await first.write(Path("kept/notes.txt"), io.BytesIO(b"remember me"))
        await first.exec("chmod +x kept/notes.txt; ln -s notes.txt kept/link")
        first.register_persist_workspace_skip_path("left")
        await first.write(Path("left/out.txt"), io.BytesIO(b"not this"))
    await client.delete(first)
    payload = json.loads(json.dumps(client.serialize_session_state(first.state)))
    second = await client.resume(client.deserialize_session_state(payload))
    assert second.state.box_id != payload["box_id"]
    async with second:
        look = "cat kept/link; test -x kept/notes.txt && echo ' run'; ls left"
        result = await second.exec(look)
        assert result.stdout == b"remember me run\n"
    await client.delete(second)


async def test_a_session_that_sleeps_is_resumed_in_its_own_box(client: HutchSandboxClient) -> None:
    first = await client.create(options=HutchSandboxClientOptions(on_exit="sleep"))
    async with first:
        await first.exec("echo still here > note")
    second = await client.resume(first.state)
    assert second.state.box_id == first.state.box_id
    async with second:
        assert (await second.exec("cat note")).stdout == b"still here\n"
    await client.delete(second)


async def test_a_state_that_names_a_box_of_others_is_refused(client: HutchSandboxClient) -> None:
    made = await client.create()
    async with await hutch.AsyncSandbox.create() as box:
        for id in (box.id, f"../sessions/{box.id}", ""):
            state = made.state.model_copy(update={"box_id": id})
            with pytest.raises(hutch.InvalidRequest):
                await client.resume(state)
        assert (await box.commands.run("true")).ok
    await client.delete(made)


async def test_an_agent_works_in_a_box_of_its_own(client: HutchSandboxClient) -> None:
    before = len(await hutch.AsyncSandbox.list())
    patch = "*** Begin Patch\n*** Add File: made.txt\n+by a patch\n*** End Patch\n"
    model = ScriptedModel(
        [
            [
                ResponseCustomToolCall(
                    type="custom_tool_call", name="apply_patch", input=patch, call_id="1"
                )
            ],
            [function_call("exec_command", {"cmd": "cat made.txt; exit 5"}, call_id="2")],
            [assistant_message("done")],
        ]
    )
    agent = SandboxAgent(name="a", model=model, instructions="work")
    config = RunConfig(sandbox=SandboxRunConfig(client=client), tracing_disabled=True)
    result = await Runner.run(agent, "go", run_config=config)
    assert result.final_output == "done"
    told = json.dumps([str(item.raw_item) for item in result.new_items])
    assert "by a patch" in told and "exited with code 5" in told
    assert len(await hutch.AsyncSandbox.list()) == before


# --- tools ----------------------------------------------------------------------------


async def test_our_tools_are_function_tools(box: AsyncSandbox) -> None:
    tools = hutch_tools(box)
    assert {tool.name for tool in tools} == set(box.tools.tools)
    model = ScriptedModel(
        [
            [function_call("bash", {"command": "echo $((6*7))"}, call_id="1")],
            [function_call("bash", {"comand": "typo"}, call_id="2")],
            [assistant_message("42")],
        ]
    )
    agent = Agent(name="a", model=model, tools=tools)
    result = await Runner.run(agent, "go", run_config=RunConfig(tracing_disabled=True))
    told = [str(getattr(item, "output", "")) for item in result.new_items]
    assert any("42" in text for text in told)
    assert any("has no parameter 'comand'" in text for text in told)


@pytest.fixture(scope="module")
def plain() -> Iterator[Sandbox]:
    """A box for code that does not await."""
    with hutch.Sandbox.create() as made:
        yield made


async def test_a_sandbox_of_code_that_does_not_await_serves_as_well(plain: Sandbox) -> None:
    (bash, _) = hutch_tools(plain, only=["bash"])
    told = await bash.on_invoke_tool(None, json.dumps({"command": "echo $((6*7))"}))
    assert told.strip() == "42"
    ran = await shell_executor(plain)(asked("cd /tmp", "pwd"))
    assert [one.stdout for one in ran.output] == ["", "/tmp\n"]
    operation = ApplyPatchOperation("create_file", "a.txt", "+one\n")
    assert (await HutchEditor(plain).create_file(operation)).status == "completed"
    assert plain.files.read("a.txt").strip() == "one"


async def test_a_cancel_kills_what_a_sandbox_that_is_not_awaited_runs(
    plain: Sandbox,
) -> None:
    mark = new_mark()
    run = asyncio.create_task(shell_executor(plain)(asked(f"sleep {mark}")))
    await until(True, mark)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(False, mark)


async def test_a_toolbox_gives_its_own_tools_and_no_others(
    box: AsyncSandbox, plain: Sandbox
) -> None:
    def double(number: int) -> int:
        return 2 * number

    for toolbox in (
        AsyncToolbox(box, only=["python"], functions={"double": double}),
        Toolbox(plain, only=["python"], functions={"double": double}),
    ):
        tools = hutch_tools(toolbox)
        assert [tool.name for tool in tools] == ["python", "recall"]
        told = await tools[0].on_invoke_tool(None, json.dumps({"code": "double(21)"}))
        assert "42" in told
        with pytest.raises(hutch.InvalidRequest, match="there is no tool 'bash', only python"):
            hutch_tools(toolbox, only=["bash"])
    with pytest.raises(hutch.InvalidRequest, match="a Sandbox or an AsyncSandbox, not 'x'"):
        hutch_tools("x")  # type: ignore[arg-type]


def asked(*commands: str, timeout_ms: int | None = None) -> ShellCommandRequest:
    action = ShellActionRequest(commands=list(commands), timeout_ms=timeout_ms)
    return ShellCommandRequest(RunContextWrapper(None), ShellCallData("1", action))


async def test_a_shell_tool_keeps_its_directory(box: AsyncSandbox) -> None:
    run = ShellTool(executor=shell_executor(box)).executor
    result = await run(asked("mkdir -p deep && cd deep", "pwd; exit 4"))
    assert [(one.stdout, one.exit_code) for one in result.output] == [
        ("", 0),
        ("/workspace/deep\n", 4),
    ]
    result = await run(asked("sleep 4004", "echo never", timeout_ms=400))
    assert [one.outcome.type for one in result.output] == ["timeout"]
    assert not await alive(box, "4004")


async def test_a_patch_is_applied_or_refused_with_a_reason(box: AsyncSandbox) -> None:
    editor = ApplyPatchTool(editor=HutchEditor(box)).editor

    async def patched(kind: Any, path: str, diff: str | None = None, **more: Any) -> str:
        operation = ApplyPatchOperation(kind, path, diff, **more)
        result = await getattr(editor, kind)(operation)
        return f"{result.status}: {result.output}"

    assert await patched("create_file", "/workspace/p/a.py", "+one\n+two\n") == (
        "completed: Created /workspace/p/a.py"
    )
    assert "is there already" in await patched("create_file", "/workspace/p/a.py", "+x\n")
    await patched("update_file", "/workspace/p/a.py", "@@\n one\n-two\n+three\n")
    assert (await box.files.read("/workspace/p/a.py")).split() == ["one", "three"]
    refused = await patched("update_file", "/workspace/p/a.py", "@@\n-four\n+five\n")
    assert refused.startswith("failed: ")
    moved = await patched("update_file", "p/a.py", "@@\n-one\n+1\n", move_to="p/b.py")
    assert moved.startswith("completed") and await box.files.exists("p/b.py")
    assert (await patched("delete_file", "p/b.py")).startswith("completed")
    assert re.match("failed: .*p/b.py", await patched("delete_file", "p/b.py"))


async def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = """
import asyncio
from hutch.adapters.openai_agents import HutchSandboxClient

async def main():
    session = await HutchSandboxClient().create()
    await session.start()
    await session.pty_exec_start("setsid sleep SECONDS & sleep SECONDS", yield_time_s=30)

asyncio.run(main())
"""
    assert_nothing_is_left_when_killed(script, tmp_path)
