"""RoomKit: agents with a box, and our boxes behind roomkit-sandbox's own executor.

Among the promises are those that roomkit-sandbox does not keep.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytest_asyncio
from leaving import assert_nothing_is_left_at_the_end
from roomkit import Agent, ChannelCategory, InboundMessage, RoomKit, TextContent, WebSocketChannel
from roomkit.providers.ai.base import AIResponse, AIToolCall
from roomkit.providers.ai.mock import MockAIProvider
from roomkit.sandbox import SANDBOX_TOOL_SCHEMAS, SandboxResult
from roomkit.tools import tool_turn_context
from roomkit_sandbox import ContainerSandboxExecutor, NativeCommandBuilder, RtkCommandBuilder
from roomkit_sandbox.executor import ContainerBackendProtocol

from daemon_of_tests import Daemon
from hutch import AsyncSandbox, errors
from hutch.adapters.roomkit import SESSION, HutchContainerBackend, HutchSandboxExecutor
from hutch.tools.commands import Condensed, Native

FRAMEWORK = "RoomKit"
PACKAGE = "roomkit"
PLUGGED = "SandboxExecutor, command builders, backend of roomkit-sandbox's executor"

LONG = "sleep 987654"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[HutchSandboxExecutor]:
    executor = HutchSandboxExecutor()
    yield executor
    await executor.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def box_of(executor: HutchSandboxExecutor, room: str = "") -> AsyncSandbox:
    return (await executor._boxes.get(room)).context.box


async def is_running(box: AsyncSandbox) -> bool:
    pattern = LONG.removeprefix("sleep ")[:-1] + f"[{LONG[-1]}]"  # it does not find itself
    found = await box.commands.run(["sh", "-c", f"grep -laz '{pattern}' /proc/[0-9]*/cmdline"])
    return "/proc/" in found.stdout


async def until(condition: Any, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


# --- the agent ------------------------------------------------------------------------------


async def talk(agent: Agent, *rooms: str) -> None:
    kit = RoomKit()
    user = WebSocketChannel("user")
    kit.register_channel(user)
    kit.register_channel(agent)
    for room in rooms:
        await kit.create_room(room_id=room)
        await kit.attach_channel(room, "user")
        await kit.attach_channel(room, agent.channel_id, category=ChannelCategory.INTELLIGENCE)

        async def receive(*_: object) -> None: ...

        user.register_connection("me", receive, room_id=room)
        said = TextContent(body="go on")
        await kit.process_inbound(
            InboundMessage(channel_id="user", sender_id="me", content=said), room_id=room
        )
    await kit.close()


def calling(*calls: tuple[str, dict[str, Any]]) -> list[AIResponse]:
    """A model that makes these calls, one after the other, and is content."""
    made = [
        AIResponse(content="", tool_calls=[AIToolCall(id=str(n), name=name, arguments=arguments)])
        for n, (name, arguments) in enumerate(calls)
    ]
    return [*made, AIResponse(content="done")]


def heard(provider: MockAIProvider) -> list[Any]:
    """What the model was told of its calls."""
    return [
        part
        for message in provider.calls[-1].messages
        if message.role == "tool" and not isinstance(message.content, str)
        for part in message.content
    ]


async def test_an_agent_uses_its_box_and_closing_the_agent_closes_it() -> None:
    sandbox = HutchSandboxExecutor()
    calls = calling(
        ("sandbox_write", {"path": "a b.txt", "content": "one\ntwo\n"}),
        ("sandbox_bash", {"command": "cat 'a b.txt'; exit 3"}),
    )
    provider = MockAIProvider(ai_responses=calls)
    await talk(Agent("coder", provider=provider, sandbox=sandbox, tool_search=False), "room")
    written, printed = heard(provider)
    assert SandboxResult.model_validate_json(written.result).exit_code == 0
    result = SandboxResult.model_validate_json(printed.result)
    assert result.exit_code == 3 and result.output.startswith("one\ntwo\n")
    assert not printed.is_error  # a command that failed is a result
    assert "with 0" in repr(sandbox)


async def test_each_room_has_a_box_of_its_own() -> None:
    sandbox = HutchSandboxExecutor()
    make, look = {"command": "echo mine > secret"}, {"command": "cat secret"}
    responses = [*calling(("sandbox_bash", make)), *calling(("sandbox_bash", look))]
    provider = MockAIProvider(ai_responses=responses)
    await talk(Agent("coder", provider=provider, sandbox=sandbox, tool_search=False), "one", "two")
    (seen,) = heard(provider)
    assert SandboxResult.model_validate_json(seen.result).exit_code == 1


async def test_a_model_is_told_that_its_box_died_and_the_next_call_gets_a_new_one() -> None:
    sandbox = HutchSandboxExecutor()
    try:
        await sandbox.execute("bash", {"command": "cd /tmp"})
        await (await box_of(sandbox)).kill()
        with pytest.raises(errors.BoxLost, match="the next call gets a new box"):
            await sandbox.execute("bash", {"command": "pwd"})
        assert (await sandbox.execute("bash", {"command": "pwd"})).output == "/workspace\n"
    finally:
        await sandbox.close()


async def test_what_the_model_reads_of_a_box_that_died_is_no_result_of_a_command() -> None:
    sandbox = HutchSandboxExecutor()
    with tool_turn_context(room_id="room"):
        await sandbox.execute("bash", {"command": "true"})
    await (await box_of(sandbox, "room")).kill()
    look = {"command": "ls"}
    provider = MockAIProvider(ai_responses=calling(("sandbox_bash", look), ("sandbox_ls", {})))
    await talk(Agent("coder", provider=provider, sandbox=sandbox, tool_search=False), "room")
    lost, fresh = heard(provider)
    assert lost.is_error and "what was in it is lost" in str(lost.result)
    assert not fresh.is_error


async def test_a_cancelled_call_leaves_nothing_running(shared: HutchSandboxExecutor) -> None:
    box = await box_of(shared)
    call = asyncio.ensure_future(shared.execute("bash", {"command": LONG, "timeout": 600}))
    await until(lambda: is_running(box))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: _not(is_running(box)))


async def _not(answer: Any) -> bool:
    return not await answer


@pytest.mark.parametrize("builder", [None, Native()])
async def test_a_timeout_has_exit_code_124_its_output_so_far_and_kills_the_tree(
    builder: Condensed | Native | None,
) -> None:
    sandbox = HutchSandboxExecutor(command_builder=builder)
    try:
        command = f"echo begun; (setsid {LONG} &) ; {LONG}"
        result = await sandbox.execute("bash", {"command": command, "timeout": 1})
        assert (result.exit_code, result.success) == (124, False)
        assert result.output.startswith("begun\n")
        assert "Command timed out after 1s" in result.error
        assert not await is_running(await box_of(sandbox))
    finally:
        await sandbox.close()


async def test_a_timeout_that_makes_no_sense_is_the_executors_own() -> None:
    sandbox = HutchSandboxExecutor(timeout=1)
    try:
        result = await sandbox.execute("bash", {"command": LONG, "timeout": -5})
        assert result.exit_code == 124
    finally:
        await sandbox.close()


async def test_two_who_ask_at_once_get_one_box() -> None:
    sandbox = HutchSandboxExecutor()
    try:
        both = await asyncio.gather(
            sandbox.execute("bash", {"command": "touch a"}),
            sandbox.execute("bash", {"command": "touch b"}),
        )
        assert [result.exit_code for result in both] == [0, 0]
        assert (await sandbox.execute("bash", {"command": "ls"})).output == "a\nb\n"
    finally:
        await sandbox.close()


def test_nothing_is_left_when_a_program_ends_without_closing(tmp_path: Path) -> None:
    script = """
import asyncio
from hutch.adapters.roomkit import HutchSandboxExecutor

async def main():
    sandbox = HutchSandboxExecutor()
    await sandbox.execute("bash", {"command": "(sleep SECONDS &)"})

asyncio.run(main())
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)


# --- what the tools are ---------------------------------------------------------------------


@pytest.mark.parametrize("builder", [Condensed(), Native()])
async def test_roomkits_ten_are_first_with_its_parameters_and_ours_are_in_addition(
    builder: Condensed | Native,
) -> None:
    told = HutchSandboxExecutor(command_builder=builder).tool_definitions()
    assert [each["name"] for each in told[:10]] == [each["name"] for each in SANDBOX_TOOL_SCHEMAS]
    assert {"sandbox_python", "sandbox_apply_patch"} <= {each["name"] for each in told}
    for ours, reference in zip(told, SANDBOX_TOOL_SCHEMAS, strict=False):
        mine, wanted = ours["parameters"], reference["parameters"]
        assert ours["description"]
        assert set(mine.get("required", ())) == set(wanted.get("required", ()))
        for name, schema in wanted["properties"].items():
            assert mine["properties"][name]["type"] == schema["type"]


async def test_only_some_tools_can_be_had() -> None:
    told = HutchSandboxExecutor(only=["python", "read"]).tool_definitions()
    assert [each["name"] for each in told] == ["sandbox_read", "sandbox_python", "sandbox_recall"]
    told = HutchSandboxExecutor(only=["sandbox_bash"]).tool_definitions()
    assert [each["name"] for each in told] == ["sandbox_bash", "sandbox_recall"]
    with pytest.raises(errors.InvalidRequest, match="there is no tool 'nmap'"):
        HutchSandboxExecutor(only=["nmap"])


@pytest.mark.parametrize("made", [HutchSandboxExecutor, HutchContainerBackend])
async def test_an_option_that_no_box_has_is_refused_at_once(made: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="no option 'bogus'"):
        made(bogus=1)


async def test_what_is_no_tool_is_never_a_success(shared: HutchSandboxExecutor) -> None:
    result = await shared.execute("nmap", {})
    assert (result.exit_code, result.success) == (127, False) and "no tool 'nmap'" in result.error
    result = await shared.execute("read", {"pth": "a"})
    assert result.exit_code == 1 and "pth" in result.error


# --- what roomkit-sandbox gets wrong ----------------------------------------------------------


@pytest_asyncio.fixture(
    params=[Condensed(), Native()], ids=["condensed", "native"], scope="module", loop_scope="module"
)
async def either(request: pytest.FixtureRequest) -> AsyncIterator[HutchSandboxExecutor]:
    executor = HutchSandboxExecutor(command_builder=request.param)
    yield executor
    await executor.close()


async def test_parts_of_files_are_read_whatever_their_names(either: HutchSandboxExecutor) -> None:
    content = "".join(f"line {n}\n" for n in range(1, 21))
    for path in ("with space", "it's $(id)", "-n"):
        assert (await either.execute("write", {"path": path, "content": content})).success
        part = await either.execute("read", {"path": path, "offset": 10, "limit": 2})
        assert "line 11" in part.output and "line 12" in part.output, part
        assert "line 10" not in part.output and "line 13" not in part.output
        assert (await either.execute("read", {"path": path})).output.count("line") >= 20
    gone = await either.execute("read", {"path": "nothing", "offset": 1, "limit": 2})
    assert not gone.success and gone.error


async def test_a_shell_has_its_own_exit_code_and_its_whole_output(
    either: HutchSandboxExecutor,
) -> None:
    result = await either.execute("bash", {"command": "echo out; echo err >&2; exit 7"})
    assert result.exit_code == 7
    assert (result.output, result.error) == ("out\n", "err\n")


async def test_a_large_file_is_written_with_its_folders(either: HutchSandboxExecutor) -> None:
    content = "x" * 300_000
    result = await either.execute("write", {"path": "new/deep/large", "content": content})
    assert result.success, result
    size = await either.execute("bash", {"command": "wc -c < new/deep/large"})
    assert size.output.strip() == "300000"


async def test_an_edit_keeps_mode_link_and_final_newline(either: HutchSandboxExecutor) -> None:
    make = "printf '#!/bin/sh\\necho one' > run; chmod 755 run; ln -sf run link"
    await either.execute("bash", {"command": make})
    await either.execute("read", {"path": "link"})
    edit = {"path": "link", "old_string": "one", "new_string": "two"}
    assert (await either.execute("edit", edit)).success
    check = "./run; tail -c 3 run; test -L link && echo link"
    assert (await either.execute("bash", {"command": check})).output == "two\ntwolink\n"
    assert not (await either.execute("edit", edit)).success  # it is not there any more


async def test_only_an_empty_folder_is_deleted_and_no_name_is_evaluated(
    either: HutchSandboxExecutor,
) -> None:
    await either.execute("bash", {"command": "mkdir -p full empty; touch full/file"})
    assert not (await either.execute("delete", {"path": "full"})).success
    assert (await either.execute("delete", {"path": "empty"})).success
    gone = await either.execute("delete", {"path": "$(touch owned)"})
    assert not gone.success
    left = await either.execute("bash", {"command": "ls -d full/file empty owned 2>/dev/null"})
    assert left.output == "full/file\n"


async def test_a_shell_stays_and_is_condensed_where_that_is_wanted(
    shared: HutchSandboxExecutor,
) -> None:
    await shared.execute("bash", {"command": "cd /tmp; NAME=kept"})
    assert (
        await shared.execute("bash", {"command": "echo $PWD $NAME; cd"})
    ).output == "/tmp kept\n"
    raw = "".join(f"ok {n % 3}\n" for n in range(3000))
    long = await shared.execute("bash", {"command": "cd; for i in $(seq 1000); do echo ok; done"})
    assert len(long.output) < len(raw) / 10 and long.exit_code == 0


async def test_what_is_hidden_of_a_long_output_can_be_had_again(
    shared: HutchSandboxExecutor,
) -> None:
    long = await shared.execute("bash", {"command": "seq 1000000; echo oops >&2; exit 3"})
    assert (long.exit_code, long.error) == (3, "oops\n") and len(long.output) < 100_000
    found = re.search(r'recall\("([^"]+)"\)', long.output)
    assert found, long.output[:200]
    # By either name; what a model reads is the one that it has.
    for name in ("recall", "sandbox_recall"):
        line = await shared.execute(name, {"id": found[1], "containing": "765432"})
        assert "765432" in line.output
    told = {each["name"]: each["description"] for each in shared.tool_definitions()}
    assert "`sandbox_recall` brings it back" in told["sandbox_bash"]
    assert "it is sandbox_recall" in told["sandbox_recall"]


async def test_a_box_is_closed_to_the_world_and_has_limits() -> None:
    sandbox = HutchSandboxExecutor(memory="256m", cpus=0.5, pids=64)
    try:
        look = "grep CapEff /proc/self/status; ls /sys/class/net 2>/dev/null; id -u; touch /usr/x"
        seen = await sandbox.execute("bash", {"command": look})
        assert seen.output.split()[:2] == ["CapEff:", "0000000000000000"]
        assert "1000" in seen.output.split() and "eth0" not in seen.output
        assert seen.exit_code == 1 and "touch" in seen.error
        info = (await box_of(sandbox)).info
        assert (info.limits.memory, info.limits.cpus, info.limits.pids) == (256 << 20, 0.5, 64)
        assert (info.idle, info.on_idle) == (1800, "hibernate")
    finally:
        await sandbox.close()


async def test_variables_of_one_call_are_gone_after_it(either: HutchSandboxExecutor) -> None:
    secret = {"TOKEN": "a b'c"}
    shown = await either.execute("bash", {"command": "echo $TOKEN; exit 4"}, env=secret)
    assert (shown.exit_code, shown.output) == (4, "a b'c\n")
    assert (await either.execute("bash", {"command": "echo $TOKEN"})).output == "\n"
    named = {"GIT_AUTHOR_NAME": "Me", "GIT_AUTHOR_EMAIL": "me@example.com"}
    told = await either.execute("git", {"args": "var GIT_AUTHOR_IDENT"}, env=named)
    assert told.output.startswith("Me <me@example.com>"), told


async def test_setup_runs_once_and_if_it_fails_so_does_the_call() -> None:
    sandbox = HutchSandboxExecutor(setup_commands=["echo $NAME >> made"], env={"NAME": "me"})
    try:
        await sandbox.execute("bash", {"command": "true"})
        assert (await sandbox.execute("bash", {"command": "cat made"})).output == "me\n"
    finally:
        await sandbox.close()
    broken = HutchSandboxExecutor(session_id="broken", setup_commands=["echo no >&2; exit 9"])
    with pytest.raises(errors.StartFailed, match=r"`echo no .* failed with exit code 9: no"):
        await broken.execute("bash", {"command": "true"})
    assert not [each for each in await AsyncSandbox.list() if each.labels.get(SESSION) == "broken"]


async def test_a_session_is_found_again_by_its_exact_name() -> None:
    first = HutchSandboxExecutor(session_id="a:b")
    again, other = HutchSandboxExecutor(session_id="a:b"), HutchSandboxExecutor(session_id="a-b")
    try:
        await first.execute("bash", {"command": "touch mine"})
        with tool_turn_context(room_id="some room"):
            assert (await again.execute("ls", {})).output.split()[0].startswith("mine")
        assert "mine" not in (await other.execute("bash", {"command": "ls"})).output
        await again.close()  # it did not make the box
        assert (await first.execute("bash", {"command": "ls"})).output == "mine\n"
    finally:
        for each in (first, again, other):
            await each.close()


async def test_a_box_at_a_server_is_found_again_by_another_program(tmp_path: Path) -> None:
    with Daemon(tmp_path / "data") as daemon:
        where = {"url": daemon.url, "api_key": daemon.key, "session_id": "review"}
        first, other = HutchSandboxExecutor(**where), HutchSandboxExecutor(**where)
        await first.execute("bash", {"command": "cd /tmp; NAME=kept"})
        again = await other.execute("bash", {"command": "echo $PWD $NAME"})
        assert again.output == "/tmp kept\n"
        await first.close()
        with pytest.raises(errors.BoxLost):
            await other.execute("bash", {"command": "true"})
        await other.close()


# --- builders -------------------------------------------------------------------------------


class WithCount(Condensed):
    schemas: ClassVar = {"count": {"type": "object", "properties": {"path": {"type": "string"}}}}

    def build_count(self, args: Mapping[str, Any]) -> list[str]:
        """Count the lines of a file."""
        return ["wc", "-l", args["path"]]

    def build_ls(self, args: Mapping[str, Any]) -> list[str]:
        return ["echo", "nothing to see"]

    def build_many(self, args: Mapping[str, Any]) -> list[str]:
        return ["sh", "-c", "for i in $(seq 5000); do echo the same; done; echo oops >&2; exit 5"]

    def build_missing(self, args: Mapping[str, Any]) -> list[str]:
        return ["no-such-program"]


async def test_a_builder_of_ones_own_changes_tools_and_adds_tools() -> None:
    sandbox = HutchSandboxExecutor(command_builder=WithCount())
    try:
        await sandbox.execute("write", {"path": "a b", "content": "1\n2\n"})
        assert (await sandbox.execute("count", {"path": "a b"})).output == "2 a b\n"
        assert (await sandbox.execute("ls", {})).output == "nothing to see\n"
        assert "needs 'path'" in (await sandbox.execute("count", {})).error
        many = await sandbox.execute("many", {})
        assert (many.exit_code, many.error) == (5, "oops\n") and len(many.output) < 2000
        assert (await sandbox.execute("missing", {})).exit_code == 127
    finally:
        await sandbox.close()
    told = {each["name"]: each for each in sandbox.tool_definitions()}
    assert told["sandbox_count"]["description"] == "Count the lines of a file."


# --- roomkit-sandbox's own executor, with our boxes -----------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[HutchContainerBackend]:
    backend = HutchContainerBackend()
    yield backend
    await backend.close()


@pytest.mark.parametrize(
    "builder", [RtkCommandBuilder(), NativeCommandBuilder(), Native(), Condensed()],
    ids=["rtk", "native", "our-native", "our-condensed"],
)  # fmt: skip
async def test_its_executor_works_with_every_builder(
    backend: HutchContainerBackend, builder: Any
) -> None:
    executor = ContainerSandboxExecutor(
        backend=backend, session_id=type(builder).__module__ + type(builder).__name__,
        command_builder=builder, env={"WHO": "me"}, setup_commands=["mkdir -p sub"],
    )  # fmt: skip

    async def run(tool: str, **arguments: Any) -> SandboxResult:
        return await executor.execute(tool, arguments)

    large = "spam\n" + "x" * 200_000 + "\n"
    assert (await run("write", path="sub/a.py", content=large)).success
    assert (await run("write", path="b.py", content="spam\neggs\n")).success
    assert "eggs" in (await run("read", path="b.py")).output
    part = await run("read", path="b.py", offset=1, limit=1)
    assert "eggs" in part.output and "spam" not in part.output
    assert "b.py" in (await run("ls")).output
    assert "b.py" in (await run("grep", pattern="egg", path=".")).output
    assert "a.py" in (await run("find", name="a.py", type="f")).output
    assert (await run("write", path="c.py", content="spam\n")).success
    assert "+eggs" in (await run("diff", file_a="c.py", file_b="b.py")).output
    assert (await run("git", args="init -q .")).success
    assert (await run("edit", path="b.py", old_string="eggs", new_string="ham")).success
    printed = await run("bash", command="cat b.py; echo $WHO >&2; exit 6")
    assert (printed.exit_code, printed.output, printed.error) == (6, "spam\nham\n", "me\n")
    assert (await run("delete", path="b.py")).success
    for timeout in (1, 8, 64):  # a busy machine needs more to get to the first command
        late = await run("bash", command=f"echo begun; {LONG}", timeout=timeout)
        if late.output:
            break
    assert late.exit_code == 124 and late.output == "begun\n"
    assert late.error == f"Command timed out after {timeout}s"
    shown = await executor.execute("bash", {"command": "echo $TOKEN"}, env={"TOKEN": "t"})
    assert shown.output == "t\n"


async def test_boxes_are_found_listed_and_deleted(backend: HutchContainerBackend) -> None:
    assert isinstance(backend, ContainerBackendProtocol)
    id = await backend.create_container("s:1", labels={"tenant": "x"}, env={"A": "1"})
    other = await backend.create_container("s-1", labels={"tenant": "y"})
    assert await backend.find_container("s:1") == id and await backend.find_container("s") is None
    (found,) = await backend.list_containers({"tenant": "x"})
    assert (found.container_id, found.session_id, found.status) == (id, "s:1", "running")
    assert {id, other} <= {each.container_id for each in await backend.list_containers()}
    assert await backend.container_exists(id)
    await backend.delete_container(id)
    await backend.delete_container(id)
    assert not await backend.container_exists(id) and await backend.find_container("s:1") is None
    with pytest.raises(errors.BoxLost):
        await backend.exec_command(id, ["true"])
    assert (await backend.exec_command(other, ["no-such-program"])).exit_code == 127
    assert (await backend.exec_command(other, ["rtk", "summary", "ls"])).exit_code == 127
    await backend.delete_container(other)
