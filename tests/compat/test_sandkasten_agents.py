"""Sandkasten's tools for the OpenAI Agents SDK, where that is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from daemon_of_tests import Daemon
from hutch.compat.sandkasten import SandboxClient
from hutch.compat.sandkasten_agents import (
    SandkastenContext,
    create_sandkasten_tools,
    sandbox_tools_for_workspace,
    sandkasten_tools,
)

INSTALLED = importlib.util.find_spec("agents") is not None
NAMES = ["sandbox_exec", "sandbox_write_file", "sandbox_read_file", "sandbox_list_files",
         "sandbox_stats"]  # fmt: skip


@pytest.mark.skipif(INSTALLED, reason="the Agents SDK is installed here")
def test_without_the_agents_sdk_it_is_said_what_to_install():
    with pytest.raises(ImportError, match="pip install openai-agents"):
        sandkasten_tools()


def test_loading_the_module_does_not_load_the_agents_sdk():
    code = "import sys, hutch.compat.sandkasten_agents; assert 'agents' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    pytest.importorskip("agents")
    with Daemon(tmp_path_factory.mktemp("daemon")) as made:
        yield made


async def call(tool: Any, context: Any = None, **arguments: Any) -> str:
    from agents.tool_context import ToolContext

    wrapped = ToolContext(
        context, tool_name=tool.name, tool_call_id="1", tool_arguments=json.dumps(arguments)
    )
    return await tool.on_invoke_tool(wrapped, json.dumps(arguments))


def test_tools_of_a_session_do_what_they_say(daemon):
    async def use() -> None:
        client = SandboxClient(base_url=daemon.url, api_key=daemon.key)
        async with await client.create_session(image="host") as session:
            tools = {tool.name: tool for tool in create_sandkasten_tools(session)}
            assert list(tools) == NAMES
            told = await call(tools["sandbox_exec"], cmd="cd /tmp; echo hi; false")
            assert told == "exit_code=1\ncwd=/tmp\n---\nhi\n"
            assert await call(tools["sandbox_write_file"], path="f", content="x") == "wrote f"
            assert await call(tools["sandbox_read_file"], path="f") == "x"
            cut = await call(tools["sandbox_read_file"], path="f", max_bytes=0)
            assert cut == "\n(truncated)"
            assert " f\n" in await call(tools["sandbox_list_files"], path="/workspace")
            assert (await call(tools["sandbox_stats"])).startswith("memory_bytes=")

    asyncio.run(use())


def test_tools_of_a_context_find_their_session(daemon):
    async def use() -> None:
        client = SandboxClient(base_url=daemon.url, api_key=daemon.key)
        async with await client.create_session(image="host") as session:
            tools = {tool.name: tool for tool in sandkasten_tools()}
            assert list(tools) == NAMES
            assert "ctx" not in tools["sandbox_exec"].params_json_schema["properties"]
            context = SandkastenContext(session=session)
            assert "hi" in await call(tools["sandbox_exec"], context, cmd="echo hi")

    asyncio.run(use())


def test_tools_for_a_workspace_end_with_their_session(daemon):
    async def use() -> None:
        client = SandboxClient(base_url=daemon.url, api_key=daemon.key)
        async with sandbox_tools_for_workspace(client, "for-tools", image="host") as (
            session,
            all_,
        ):
            assert [tool.name for tool in all_] == NAMES
        assert (await session.info()).status == "destroyed"
        await client.delete_workspace("for-tools")

    asyncio.run(use())
