"""smolagents: a CodeAgent whose code runs in a box."""

from __future__ import annotations

import base64
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest
from leaving import assert_nothing_is_left_at_the_end, new_mark, wait_until
from smolagents import ChatMessage, CodeAgent, FinalAnswerTool, MessageRole, Model, tool
from smolagents.utils import AgentError

from hutch import AsyncSandbox, BoxLost, InvalidRequest, Sandbox
from hutch.adapters.smolagents import HutchExecutor

FRAMEWORK = "smolagents"
PACKAGE = "smolagents"
PLUGGED = "HutchExecutor(RemotePythonExecutor), tools in the box or on the host"

LONG = 30  # seconds: longer than anything here takes that works


class Scripted(Model):
    """Says what it was told to say."""

    def __init__(self, *steps: str) -> None:
        super().__init__(model_id="scripted")
        self.steps = list(steps)

    def generate(self, messages: object, **options: object) -> ChatMessage:
        return ChatMessage(
            role=MessageRole.ASSISTANT, content=f"<code>\n{self.steps.pop(0)}\n</code>"
        )


@tool
def process_id(plus: int) -> int:
    """Who runs this.

    Args:
        plus: What to add.
    """
    import os

    return os.getpid() + plus


@tool
def describe(thing: object) -> object:
    """Gives it back, and what it is.

    Args:
        thing: Anything.
    """
    return (type(thing).__name__, thing)


@tool
def fail(why: str) -> str:
    """Fails.

    Args:
        why: What it says.
    """
    raise LookupError(why)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox.create() as made:
        yield made


@pytest.fixture
def executor(box: Sandbox) -> Iterator[HutchExecutor]:
    box.restart_code_context()
    with HutchExecutor(box=box) as made:
        made.send_tools({"final_answer": FinalAnswerTool()})
        yield made


def agent(executor: HutchExecutor, *steps: str, tools: tuple[object, ...] = ()) -> CodeAgent:
    return CodeAgent(list(tools), Scripted(*steps), executor=executor, verbosity_level=0)


# --- an agent ---------------------------------------------------------------------------


def test_an_agent_runs_its_code_in_a_box_from_step_to_step(executor):
    told = agent(
        executor, "import os\nx = os.getpid()\nprint('hi')", "final_answer([x, x * 0 + 1])"
    )
    pid, one = told.run("go")
    assert one == 1 and pid != os.getpid()
    assert "hi" in told.memory.steps[1].observations


def test_an_agent_runs_twice_and_its_variables_stay(executor):
    one = agent(executor, "x = 5\nfinal_answer(x)", "final_answer(x + 1)")
    assert (one.run("go"), one.run("go on", reset=False)) == (5, 6)


def test_an_error_is_told_to_the_model_which_goes_on(executor):
    told = agent(executor, "print('before')\n1 / 0", "final_answer('ok')")
    assert told.run("go") == "ok"
    message = str(told.memory.steps[1].error)
    assert "ZeroDivisionError" in message and "before" in message and "1 / 0" in message


def test_tools_go_into_the_box_as_source(executor):
    assert (
        agent(executor, "final_answer(process_id(1000000))", tools=(process_id,)).run("go")
        < 1_001_000
    )


def test_tools_on_the_host_stay_there(box):
    with HutchExecutor(box=box, tools_on_host=True) as executor:
        told = agent(
            executor, "x = process_id(plus=1)\nfinal_answer(x)", "final_answer(process_id(1))",
            tools=(process_id,),
        )  # fmt: skip
        assert told.run("go") == told.run("again") == os.getpid() + 1


def test_what_a_tool_on_the_host_takes_and_gives_keeps_its_type(box):
    import datetime

    seen: list[object] = []

    class Describe(type(describe)):  # type: ignore[misc]
        def forward(self, thing: object) -> object:
            seen.append(thing)
            return (type(thing).__name__, thing)

    describe.__class__ = Describe
    code = """
import datetime
told = [describe(x) for x in ((1, 2), {1}, b"x", datetime.date(2026, 1, 2), {1: 2}, None)]
final_answer(told)
"""
    with HutchExecutor(box=box, tools_on_host=True) as executor:
        told = agent(executor, code, tools=(describe,)).run("go")
    things = [(1, 2), {1}, b"x", datetime.date(2026, 1, 2), {1: 2}, None]
    assert seen == things and told == [(type(thing).__name__, thing) for thing in things]


def test_what_a_tool_on_the_host_raises_is_raised_in_the_box(box):
    code = "try:\n    fail('gone')\nexcept LookupError as exc:\n    final_answer(str(exc))"
    with HutchExecutor(box=box, tools_on_host=True) as executor:
        assert agent(executor, code, tools=(fail,)).run("go") == "gone"


def test_a_managed_agent_stays_on_the_host(box):
    helper = CodeAgent(
        [], Scripted("final_answer('from the helper')"), name="helper", description="Helps.",
        executor=HutchExecutor(box=box), verbosity_level=0,
    )  # fmt: skip
    with HutchExecutor() as executor:
        boss = CodeAgent(
            [], Scripted("final_answer(helper('do it'))"), managed_agents=[helper],
            executor=executor, verbosity_level=0,
        )  # fmt: skip
        assert "from the helper" in boss.run("go")


# --- answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("final_answer('text')", "text"),
        ("final_answer(answer={'a': (1, {2})})", {"a": (1, {2})}),
        ("final_answer('x' * 3_000_000)", "x" * 3_000_000),
        ("try:\n    final_answer(1)\nexcept Exception:\n    pass", 1),
        ("def f(): final_answer(2)\nf()", 2),
    ],
)
def test_a_final_answer_is_what_the_code_gave(executor, code, value):
    output = executor(code)
    assert output.is_final_answer and output.output == value


def test_a_tool_for_final_answers_of_ones_own_decides_what_the_answer_is(executor):
    class Shout(FinalAnswerTool):
        def forward(self, answer: object) -> object:
            return str(answer).upper()

    executor.send_tools({"final_answer": Shout()})
    assert executor("final_answer('a')").output == "A"


def test_the_tool_that_was_given_is_left_as_it_was(executor):
    given = FinalAnswerTool()
    executor.send_tools({"final_answer": given})
    assert type(given) is FinalAnswerTool and given("x") == "x"


def test_a_step_has_its_value_and_its_logs(executor):
    output = executor("import sys\nprint('out')\nprint('err', file=sys.stderr)\n[1, 2]")
    assert (output.output, output.is_final_answer) == ("[1, 2]", False)
    assert output.logs == "out\nerr\n"


def test_a_picture_is_a_picture(executor):
    made = io.BytesIO()
    PIL.Image.new("RGB", (2, 2)).save(made, "PNG")
    png = base64.b64encode(made.getvalue()).decode()
    code = f"import base64\nfrom IPython.display import Image\nImage(base64.b64decode({png!r}))"
    assert isinstance(executor(code).output, PIL.Image.Image)


def test_variables_are_sent_with_their_types(executor):
    executor.send_variables({"pair": (1, 2), "names": {"a"}})
    assert executor("pair, names").output == "((1, 2), {'a'})"


def test_pickles_are_refused_unless_allowed(executor):
    with pytest.raises(AgentError, match="serialize"):
        executor("class A: pass\nfinal_answer(A())")


# --- packages ---------------------------------------------------------------------------


def test_nothing_is_installed_that_is_there_already(box):
    with HutchExecutor(["json", "email.mime", "*"], box=box) as executor:
        assert executor.installed_packages == ["json", "email.mime", "*"]


def test_a_package_that_cannot_be_had_is_an_error_that_says_so(box):
    with pytest.raises(AgentError, match="pip ended with exit code"):
        HutchExecutor(["no-such-package-anywhere"], box=box)


# --- what ends --------------------------------------------------------------------------


def test_a_timeout_kills_what_the_code_started_and_keeps_its_variables(box):
    with HutchExecutor(box=box, timeout=0.5) as executor:
        mark = new_mark()
        executor("x = 7")
        with pytest.raises(AgentError, match="seconds; its variables are kept"):
            executor(f"import subprocess\nsubprocess.run(['sleep', '{mark}'])")
        wait_until(False, mark)
        assert executor("x").output == "7"


def test_an_interrupt_from_another_thread_stops_the_code(box, executor):
    done: list[BaseException] = []
    mark = new_mark()

    def run() -> None:
        try:
            executor(f"import subprocess\nsubprocess.run(['sleep', '{mark}'])")
        except BaseException as exc:
            done.append(exc)

    runs = threading.Thread(target=run)
    runs.start()
    wait_until(True, mark)
    assert executor.interrupt()
    runs.join(LONG)
    assert "KeyboardInterrupt" in str(done[0])
    wait_until(False, mark)


def test_after_a_kernel_died_the_tools_are_there_again(executor):
    executor.send_variables({"x": 1})
    with pytest.raises(AgentError, match="variables are gone"):
        executor("import os\nos._exit(1)")
    assert executor("final_answer(x)").output == 1


def test_a_box_that_is_gone_is_told_apart_from_code_that_failed():
    executor = HutchExecutor()
    executor.box.close()
    with pytest.raises(BoxLost):
        executor("1")


def test_a_box_that_was_given_is_left_alone(box):
    HutchExecutor(box=box).cleanup()
    assert box.run_code("1 + 1").text == "2"


def test_what_is_no_box_or_no_option_of_one_is_refused_at_once(box):
    with pytest.raises(InvalidRequest, match="no option 'bogus'"):
        HutchExecutor(bogus=1)
    with pytest.raises(InvalidRequest, match="the box is there already"):
        HutchExecutor(box=box, memory="1g")
    with pytest.raises(InvalidRequest, match="a box is a Sandbox here"):
        HutchExecutor(box=AsyncSandbox)


def test_two_executors_have_two_boxes():
    with HutchExecutor() as one, HutchExecutor() as two:
        one("x = 1")
        with pytest.raises(AgentError, match="NameError"):
            two("x")


def test_nothing_is_left_when_the_program_ends(tmp_path: Path):
    script = """
from hutch.adapters.smolagents import HutchExecutor
HutchExecutor()("import subprocess; subprocess.Popen(['sleep', 'SECONDS'])")
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)
