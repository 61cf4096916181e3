"""LangChain: our tools, `pandastool`, and the shell of ShellToolMiddleware in a box."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ShellToolMiddleware
from langchain.agents.middleware.shell_tool import ShellSession
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from leaving import assert_nothing_is_left_at_the_end, new_mark, running, until, wait_until

import hutch
from hutch.adapters.langchain import HutchExecutionPolicy, hutch_tools, pandas_tool, pandastool
from hutch.compat.kernellite import start_container, stop_container
from hutch.tools import TOOLS

FRAMEWORK = "LangChain"
PACKAGE = "langchain"
PLUGGED = "tools, pandastool, ShellToolMiddleware policy"


class Scripted(GenericFakeChatModel):
    """The framework's fake model, which can be given tools."""

    def bind_tools(self, tools: Any, **options: Any) -> Scripted:
        return self


def scripted(*calls: tuple[str, dict[str, Any]]) -> Scripted:
    """A model that makes these calls, one after the other, and is then content."""
    messages = [
        AIMessage("", tool_calls=[{"name": name, "args": args, "id": f"call-{number}"}])
        for number, (name, args) in enumerate(calls)
    ]
    return Scripted(messages=iter([*messages, AIMessage("Done.")]))


def told(result: dict[str, Any]) -> list[ToolMessage]:
    return [each for each in result["messages"] if isinstance(each, ToolMessage)]


GO = {"messages": [("user", "go")]}


@pytest.fixture(scope="module")
def box() -> Iterator[hutch.Sandbox]:
    with hutch.Sandbox.create() as made:
        yield made


# --- tools -------------------------------------------------------------------------------


def test_an_agent_has_all_our_tools(box: hutch.Sandbox) -> None:
    tools = hutch_tools(box)
    assert [each.name for each in tools] == list(TOOLS)
    assert tools[0].tool_call_schema["properties"] == TOOLS[tools[0].name].parameters["properties"]


@pytest.mark.parametrize("awaits", [True, False])
async def test_an_agent_works_in_its_box(box: hutch.Sandbox, awaits: bool) -> None:
    model = scripted(("bash", {"command": "cd /tmp; x=6"}), ("bash", {"command": "echo $x $PWD"}))
    agent = create_agent(model, hutch_tools(box, only=["bash"]))
    result = await agent.ainvoke(GO) if awaits else await asyncio.to_thread(agent.invoke, GO)
    message = told(result)[-1]
    assert message.content.startswith("6 /tmp\n")
    assert message.artifact.exit_code == 0
    assert message.status == "success"


def test_what_a_model_can_put_right_is_told_to_it(box: hutch.Sandbox) -> None:
    agent = create_agent(scripted(("bash", {"comand": "ls"})), hutch_tools(box, only=["bash"]))
    (message,) = told(agent.invoke(GO))
    assert message.status == "error"
    assert "no parameter 'comand'" in message.content


def test_a_tool_that_is_not_there_is_refused_at_once(box: hutch.Sandbox) -> None:
    with pytest.raises(hutch.InvalidRequest, match="bush"):
        hutch_tools(box, only=["bush"])


def test_what_is_no_box_or_no_option_of_one_is_refused_at_once(box: hutch.Sandbox) -> None:
    with pytest.raises(hutch.InvalidRequest, match=r"no option 'bogus'.* image, memory"):
        hutch_tools(bogus=1)
    with pytest.raises(hutch.InvalidRequest, match="memory: the box is there already"):
        hutch_tools(box, memory="1g")
    with pytest.raises(hutch.InvalidRequest, match="a Sandbox or an AsyncSandbox, not 'x'"):
        hutch_tools("x")  # type: ignore[arg-type]


def test_each_thread_has_a_box_of_its_own() -> None:
    tools = hutch_tools(only=["bash"], memory="256m")
    seen = []
    for name in ("one", "two", "one"):
        agent = create_agent(scripted(("bash", {"command": "ls -A; touch mine"})), tools)
        thread = {"configurable": {"thread_id": name}}
        seen.append("mine" in told(agent.invoke(GO, thread))[-1].content)
    assert seen == [False, False, True]
    tools[0].boxes.close()


def test_a_timeout_kills_all_that_a_command_started(box: hutch.Sandbox) -> None:
    mark = new_mark()
    tool = hutch_tools(box, only=["bash"])[0]
    tool.invoke({"command": f"setsid sleep {mark} & sleep {mark}", "timeout": 1})
    wait_until(False, mark)


async def test_a_cancelled_agent_leaves_nothing_running(box: hutch.Sandbox) -> None:
    mark = new_mark()
    call = ("bash", {"command": f"setsid sleep {mark} & sleep {mark}", "timeout": 600})
    agent = create_agent(scripted(call), hutch_tools(box, only=["bash"]))
    run = asyncio.ensure_future(agent.ainvoke(GO))
    await until(True, mark)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(False, mark)


async def test_a_box_that_died_is_no_failed_command() -> None:
    dead = hutch.Sandbox.create()
    dead.close()
    tools = hutch_tools(dead, only=["bash"])
    with pytest.raises(hutch.BoxLost):
        create_agent(scripted(("bash", {"command": "ls"})), tools).invoke(GO)
    with pytest.raises(hutch.BoxLost):
        await create_agent(scripted(("bash", {"command": "ls"})), tools).ainvoke(GO)


async def test_an_async_box_serves_code_that_awaits() -> None:
    async with await hutch.AsyncSandbox.create() as box:
        tool = hutch_tools(box, only=["bash"])[0]
        assert (await tool.ainvoke({"command": "echo hello"})).startswith("hello\n")


def test_a_picture_is_shown_as_a_picture(box: hutch.Sandbox) -> None:
    pixel = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
        "gg=="
    )
    box.files.write("dot.png", pixel)
    agent = create_agent(scripted(("read", {"path": "dot.png"})), hutch_tools(box, only=["read"]))
    (message,) = told(agent.invoke(GO))
    (image,) = [block for block in message.content if block["type"] == "image"]
    assert image["mime_type"] == "image/png"
    assert base64.b64decode(image["base64"]) == pixel


# --- pandastool --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "data").mkdir()
    (folder / "data" / "sales.parquet").touch()
    slug = f"langchain-{secrets.token_hex(4)}"
    start_container(str(folder), slug, image="host")
    yield folder
    stop_container(slug)


def test_pandastool_is_an_agents_tool(project: Path) -> None:
    tool = pandas_tool(str(project), config={"api_key": "secret", "name": "it"})
    assert list(tool.args) == ["code"]
    model = scripted(
        ("pandastool", {"code": "x = len(DATASETS)"}),
        ("pandastool", {"code": "print(x, DATASETS, DB_ROOT, CFG)"}),
    )
    answer = json.loads(told(create_agent(model, [tool]).invoke(GO))[-1].content)
    assert answer["status"] == "[OK] exec"
    assert "1 ['sales'] /workspace/data {'api_key': '***', 'name': 'it'}" in answer["stdout"]
    assert json.loads(pandastool("1", project_dir="/nowhere"))["status"] == "[ERROR] exec"


async def test_a_cancelled_pandastool_is_interrupted(project: Path) -> None:
    mark, tool = new_mark(), pandas_tool(str(project))
    code = f"import subprocess; subprocess.run(['sleep', '{mark}'])"
    run = asyncio.ensure_future(tool.ainvoke({"code": code}))
    await until(True, mark)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(False, mark)
    assert json.loads(await tool.ainvoke({"code": "1 + 1"}))["stdout"] == "2\n"


# --- ShellToolMiddleware -----------------------------------------------------------------


@pytest.fixture
def session(tmp_path: Path) -> Iterator[ShellSession]:
    made = ShellSession(tmp_path, HutchExecutionPolicy(), ("/bin/bash",), {"GREETING": "a b"})
    made.start()
    yield made
    made.stop(timeout=60)


def test_the_shell_of_the_middleware_is_in_a_box(tmp_path: Path) -> None:
    policy = HutchExecutionPolicy(startup_timeout=120, command_timeout=120)
    shell = ShellToolMiddleware(tmp_path, execution_policy=policy, startup_commands=["x=6"])
    model = scripted(
        ("shell", {"command": "cd /tmp; id -un; echo $x > /workspace/note"}),
        ("shell", {"command": "pwd; ls /root; exit_code=3; (exit $exit_code)"}),
        ("shell", {"restart": True}),
        ("shell", {"command": "pwd; cat note"}),
    )
    messages = told(create_agent(model, middleware=[shell]).invoke(GO))
    assert messages[0].content == "user\n"
    assert messages[1].artifact["exit_code"] == 3
    assert messages[3].content == "/workspace\n6\n"
    assert (tmp_path / "note").read_text() == "6\n"


def test_what_the_shell_has_in_its_environment_is_on_no_command_line(tmp_path: Path) -> None:
    secret = new_mark()
    given = {"SECRET": secret, "TEXT": "it's\n$two\n", "HOME": "/workspace"}
    made = ShellSession(tmp_path, HutchExecutionPolicy(), ("/bin/bash",), given)
    made.start()
    try:
        done = made.execute('echo "$SECRET$TEXT$HOME"', timeout=120)
        assert done.output == f"{secret}it's\n$two\n/workspace\n"
        assert not running(secret)
    finally:
        made.stop(timeout=60)


def test_a_timeout_kills_the_shell_and_all_it_started(session: ShellSession) -> None:
    mark = new_mark()
    assert session.execute("echo $GREETING > kept", timeout=120).exit_code == 0
    done = session.execute(f"setsid sleep {mark} & sleep {mark}", timeout=1)
    assert done.timed_out
    wait_until(False, mark)
    assert session.execute("cat kept", timeout=120).output == "a b\n"


def test_the_end_of_a_session_ends_what_it_left_running(session: ShellSession) -> None:
    mark = new_mark()
    session.execute(f"setsid sleep {mark} & echo begun", timeout=120)
    wait_until(True, mark)
    session.stop(timeout=60)
    wait_until(False, mark)


def test_a_box_that_cannot_start_is_no_failed_command(tmp_path: Path) -> None:
    policy = HutchExecutionPolicy(image="no-such-image")
    with pytest.raises(hutch.StartFailed, match="no-such-image"):
        policy.spawn(workspace=tmp_path, env={}, command=["/bin/bash"])


def test_a_box_that_died_is_no_failed_command_of_its_shell(session: ShellSession) -> None:
    process = session._process
    process.kill()
    process.wait()
    with pytest.raises(RuntimeError, match="not running"):
        session.execute("true", timeout=60)


# --- all of it ---------------------------------------------------------------------------


def test_nothing_is_left_when_the_process_ends(tmp_path: Path) -> None:
    script = """
import pathlib
from langchain.agents.middleware.shell_tool import ShellSession
from hutch.adapters.langchain import HutchExecutionPolicy, hutch_tools
bash = hutch_tools(only=["bash"])[0]
bash.invoke({"command": "sleep SECONDS > /dev/null 2>&1 & echo begun"})
shell = ShellSession(pathlib.Path(), HutchExecutionPolicy(), ("/bin/bash",), {})
shell.start()
shell.execute("sleep SECONDS & echo begun", timeout=100)
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)
