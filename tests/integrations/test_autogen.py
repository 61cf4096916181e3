"""AutoGen: code blocks of an agent, in a box."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from autogen_agentchat.agents import ApprovalResponse, CodeExecutorAgent
from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock, CodeExecutor
from leaving import assert_nothing_is_left_at_the_end, new_mark, until

from hutch import BoxLost, InvalidRequest
from hutch.adapters.autogen import HutchCodeExecutor

FRAMEWORK = "AutoGen"
PACKAGE = "autogen-core"
PLUGGED = "CodeExecutor (a Component)"


@pytest.fixture
async def executor():
    async with HutchCodeExecutor() as made:
        yield made


async def run(executor: HutchCodeExecutor, *blocks: tuple[str, str]) -> tuple[int, str]:
    given = [CodeBlock(code=code, language=language) for language, code in blocks]
    result = await executor.execute_code_blocks(given, CancellationToken())
    return result.exit_code, result.output


async def test_an_agent_runs_the_code_of_a_message_in_the_box(executor):
    agent = CodeExecutorAgent(
        "runner", code_executor=executor, supported_languages=["python", "bash"],
        approval_func=lambda request: ApprovalResponse(approved=True, reason="it is a box"),
    )  # fmt: skip
    said = "```python\nx = 6\nprint(x * 7)\n```\n\n```bash\necho from the shell\n```"
    answer = await agent.on_messages(
        [TextMessage(content=said, source="user")], CancellationToken()
    )
    assert "42" in answer.chat_message.content and "from the shell" in answer.chat_message.content


async def test_state_stays_and_languages_share_their_files(executor):
    assert await run(executor, ("python", "x = 1"), ("sh", "cd /tmp && echo hi > note")) == (0, "")
    assert await run(executor, ("py", "x + 1"), ("bash", "cat note")) == (0, "2\nhi")
    assert await run(executor, ("python", "open('/tmp/note').read()")) == (0, "'hi\\n'")


async def test_blocks_run_until_one_fails(executor):
    code, output = await run(executor, ("bash", "echo a"), ("python", "1 / 0"), ("bash", "echo b"))
    assert code == 1 and output.startswith("a\n") and "ZeroDivisionError" in output
    assert "b" not in output.splitlines()
    assert await run(executor, ("bash", "exit 7")) == (7, "")
    assert (await run(executor, ("fortran", "END")))[0] == 1


async def test_a_timeout_kills_what_the_code_started():
    async with HutchCodeExecutor(timeout=0.5) as executor:
        for language, code in (
            ("bash", "sleep {}"),
            ("python", "import os; os.system('sleep {}')"),
        ):
            mark = new_mark()
            status, output = await run(executor, (language, code.format(mark)))
            assert status == 124 and "stopped after 0.5 seconds" in output
            await until(False, mark)


async def test_cancelling_the_token_kills_what_runs(executor):
    token = CancellationToken()
    mark = new_mark()
    block = CodeBlock(code=f"sleep {mark}", language="bash")
    work = asyncio.create_task(executor.execute_code_blocks([block], token))
    await until(True, mark)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await until(False, mark)


async def test_a_restart_gives_a_fresh_box(executor):
    await run(executor, ("python", "x = 1"))
    await executor.restart()
    assert "NameError" in (await run(executor, ("python", "x")))[1]


async def test_a_box_that_is_gone_is_no_result(executor):
    await run(executor, ("python", "1"))
    await executor._box.close()
    with pytest.raises(BoxLost):
        await run(executor, ("python", "1"))


async def test_it_is_written_to_a_config_without_its_key_and_made_from_it():
    made = HutchCodeExecutor(timeout=5, memory="256m", api_key="secret").dump_component()
    assert "secret" not in made.model_dump_json()
    again = CodeExecutor.load_component(made)
    assert isinstance(again, HutchCodeExecutor)
    async with again:
        assert await run(again, ("python", "1 + 1")) == (0, "2")


def test_an_option_that_no_box_has_is_refused_at_once():
    with pytest.raises(InvalidRequest, match="no option 'bogus'"):
        HutchCodeExecutor(bogus=1)


async def test_two_executors_have_two_boxes(executor):
    await run(executor, ("bash", "touch /tmp/mine"))
    async with HutchCodeExecutor() as other:
        assert (await run(other, ("bash", "test -e /tmp/mine")))[0] == 1


def test_nothing_is_left_when_the_program_ends(tmp_path: Path):
    script = """
import asyncio
from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock
from hutch.adapters.autogen import HutchCodeExecutor

async def main():
    block = CodeBlock(code="sleep SECONDS &", language="bash")
    await HutchCodeExecutor().execute_code_blocks([block], CancellationToken())

asyncio.run(main())
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)
