"""FastMCP: CodeMode with a box in place of its own sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fastmcp import Client, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.experimental.transforms.code_mode import CodeMode
from leaving import assert_nothing_is_left_at_the_end, new_mark, until

from hutch import AsyncSandbox, BoxLost, InvalidRequest, Sandbox
from hutch.adapters.fastmcp import HutchSandboxProvider

FRAMEWORK = "FastMCP"
PACKAGE = "fastmcp"
PLUGGED = "SandboxProvider of CodeMode"


@pytest.fixture
async def box():
    async with await AsyncSandbox.create() as made:
        yield made


@pytest.fixture
def provider(box: AsyncSandbox) -> HutchSandboxProvider:
    return HutchSandboxProvider(box=box)


async def test_code_mode_runs_in_a_box_and_calls_the_servers_tools():
    mcp = FastMCP("shop", transforms=[CodeMode(sandbox_provider=HutchSandboxProvider())])

    @mcp.tool
    def price(item: str) -> int:
        return {"apple": 3, "pear": 4}[item]

    code = f"""
import asyncio, os
place = {__file__!r}
prices = await asyncio.gather(*(call_tool("price", dict(item=i)) for i in ("apple", "pear")))
return [sum(p["result"] for p in prices), os.path.exists(place)]
"""
    async with Client(mcp) as client:
        assert {tool.name for tool in await client.list_tools()} >= {"execute"}
        done = await client.call_tool("execute", {"code": code})
        assert done.content[0].text.replace(" ", "") == "[7,false]"
        with pytest.raises(ToolError, match="price"):
            await client.call_tool(
                "execute", {"code": 'return await call_tool("price", {"item": "plum"})'}
            )
        with pytest.raises(ToolError, match="Unknown tool"):
            await client.call_tool("execute", {"code": 'return await call_tool("nothing", {})'})


async def test_code_returns_what_json_has(provider):
    assert await provider.run("return [1, {'a': None}, 'x']") == [1, {"a": None}, "x"]
    assert await provider.run("x = 1") is None
    assert await provider.run("") is None
    assert await provider.run('return """a\n    b"""') == "a\n    b"
    assert await provider.run("return a + b", inputs={"a": 1, "b": 2}) == 3


async def test_functions_that_are_not_async_are_awaited_all_the_same(provider):
    assert await provider.run("return await f(2)", external_functions={"f": lambda n: 2 * n}) == 4


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("return 1 / 0", "ZeroDivisionError"),
        ("return (", "SyntaxError"),
        ("print('so far'); raise ValueError('no')", "so far"),
        ("return {1, 2}", "JSON"),
    ],
)
async def test_what_code_does_wrong_is_a_tool_error(provider, code, said):
    with pytest.raises(ToolError, match=said):
        await provider.run(code)


async def test_runs_do_not_see_each_other(provider):
    await provider.run("global x\nx = 1")
    with pytest.raises(ToolError, match="NameError"):
        await provider.run("return x")


async def test_a_sandbox_of_code_that_does_not_await_serves_as_well():
    async def double(number):
        return 2 * number

    with Sandbox.create() as box:
        provider = HutchSandboxProvider(box=box)
        code = "return await double(21)"
        assert await provider.run(code, external_functions={"double": double}) == 42
        with pytest.raises(InvalidRequest, match="the box is there already"):
            HutchSandboxProvider(box=box, memory="1g")


def test_an_option_that_no_box_has_is_refused_at_once():
    with pytest.raises(InvalidRequest, match="no option 'bogus'"):
        HutchSandboxProvider(bogus=1)


async def test_a_timeout_kills_what_the_code_started(box):
    provider, mark = HutchSandboxProvider(box=box, timeout=0.5), new_mark()
    with pytest.raises(ToolError, match="stopped after"):
        await provider.run(f"import subprocess\nsubprocess.run(['sleep', '{mark}'])")
    await until(False, mark)


async def test_a_cancel_kills_what_the_code_started(box, provider):
    mark = new_mark()
    code = f"import subprocess\nsubprocess.run(['sleep', '{mark}'])"
    run = asyncio.create_task(provider.run(code))
    await until(True, mark)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(False, mark)


async def test_a_box_that_is_gone_is_no_tool_error(box, provider):
    await box.close()
    with pytest.raises(BoxLost):
        await provider.run("return 1")


def test_nothing_is_left_when_the_program_ends(tmp_path: Path):
    script = """
import asyncio
from hutch.adapters.fastmcp import HutchSandboxProvider
code = "import subprocess; subprocess.Popen(['sleep', 'SECONDS'])"
asyncio.run(HutchSandboxProvider().run(code))
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)
