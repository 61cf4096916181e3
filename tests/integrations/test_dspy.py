"""DSPy: RLM and other modules that write code, with an interpreter in a box."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import dspy
import pytest
from dspy.primitives.code_interpreter import (
    CodeExecutionError,
    CodeInterpreter,
    CodeInterpreterError,
    FinalOutput,
)
from dspy.utils.dummies import DummyLM
from leaving import assert_nothing_is_left_at_the_end, new_mark, wait_until

from hutch import InvalidRequest
from hutch.adapters.dspy import HutchInterpreter

FRAMEWORK = "DSPy"
PACKAGE = "dspy"
PLUGGED = "CodeInterpreter for RLM, CodeAct, ProgramOfThought; tools and SUBMIT"


@pytest.fixture(scope="module")
def shared() -> Iterator[HutchInterpreter]:
    with HutchInterpreter() as made:
        yield made


@pytest.fixture
def interpreter(shared: HutchInterpreter) -> HutchInterpreter:
    shared.tools.clear()
    shared.output_fields = None
    return shared


def test_rlm_explores_its_context_in_a_box_asks_the_model_and_submits():
    code = [
        "parts = context.split()\nprint(len(parts))",
        "said = llm_query('how many?')\nSUBMIT(answer=f'{len(parts)} {said} {double(n=2)}')",
    ]
    steps = [{"reasoning": "look", "code": each} for each in code]
    lm = DummyLM(steps)
    sub = DummyLM([{"response": "many"}] * 3)

    def double(n: int) -> int:
        return 2 * n

    rlm = dspy.RLM(
        "context, question -> answer", interpreter_factory=HutchInterpreter, tools=[double],
        sub_lm=sub, max_iters=3,
    )  # fmt: skip
    with dspy.context(lm=lm):
        done = rlm(context="a b c", question="how many?")
    assert done.answer.startswith("3 ") and done.answer.endswith(" 4") and "many" in done.answer
    assert "3" in str(done.trajectory[0])


def test_it_is_what_dspy_calls_an_interpreter(interpreter):
    assert isinstance(interpreter, CodeInterpreter)


def test_state_stays_and_the_last_value_is_given(interpreter):
    assert interpreter.execute("x = 41\nprint('hi')") == "hi"
    assert interpreter.execute("x + 1") == 42
    assert interpreter("'text'") == "text"
    assert interpreter("[1, {'a': None}]") == [1, {"a": None}]
    assert interpreter("object") == "<class 'object'>"
    assert interpreter("x = 1") is None


def test_variables_are_there_however_long_they_are(interpreter):
    assert interpreter.execute("a + b", {"a": 1, "b": 2}) == 3
    assert interpreter.execute("len(book)", {"book": "é" * 3_000_000}) == 3_000_000
    with pytest.raises(CodeInterpreterError, match="JSON"):
        interpreter.execute("1", {"a": {1}})


def test_tools_are_called_by_position_and_by_name_and_may_be_async(interpreter):
    async def shout(text: str) -> str:
        return text.upper()

    interpreter.tools.update(add=lambda a, b: a + b, shout=shout)
    assert interpreter.execute("[add(1, b=2), shout('x')]") == [3, "X"]


def test_what_a_tool_raises_is_an_error_of_the_code(interpreter):
    interpreter.tools["fail"] = lambda: {}["gone"]
    with pytest.raises(CodeExecutionError, match="KeyError: 'gone'"):
        interpreter.execute("fail()")


def test_submit_ends_the_code_with_its_fields(interpreter):
    assert interpreter.execute("SUBMIT(5)\nprint('never')") == FinalOutput({"output": 5})
    interpreter.output_fields = [{"name": "a"}, {"name": "b"}]
    assert interpreter.execute("SUBMIT(1, 2)") == FinalOutput({"a": 1, "b": 2})
    assert interpreter.execute("SUBMIT(a={1}, b=None)") == FinalOutput({"a": "{1}", "b": None})
    with pytest.raises(CodeExecutionError, match="SUBMIT takes exactly"):
        interpreter.execute("SUBMIT(a=1)")


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("1 / 0", CodeExecutionError, "ZeroDivisionError: division by zero"),
        ("x = (", SyntaxError, "was never closed"),
    ],
)
def test_errors_are_the_kind_that_dspy_has_for_them(interpreter, code, error, said):
    with pytest.raises(error, match=said):
        interpreter.execute(code)
    assert interpreter.execute("1") == 1


def test_a_timeout_kills_what_the_code_started_and_the_session_goes_on():
    with HutchInterpreter(timeout=0.5) as interpreter:
        mark = new_mark()
        interpreter.execute("x = 1")
        with pytest.raises(CodeExecutionError, match="stopped after"):
            interpreter.execute(f"import subprocess\nsubprocess.run(['sleep', '{mark}'])")
        wait_until(False, mark)
        assert interpreter.execute("x") == 1


def test_a_kernel_that_died_ends_the_session():
    with HutchInterpreter() as interpreter:
        with pytest.raises(CodeInterpreterError, match="exited with code 3") as caught:
            interpreter.execute("import os\nos._exit(3)")
        assert not isinstance(caught.value, CodeExecutionError)
        with pytest.raises(CodeInterpreterError, match="over"):
            interpreter.execute("1")


def test_a_box_that_is_gone_ends_the_session():
    with HutchInterpreter() as interpreter:
        assert interpreter._box is not None
        interpreter._box.close()
        with pytest.raises(CodeInterpreterError, match="gone") as caught:
            interpreter.execute("1")
        assert not isinstance(caught.value, CodeExecutionError)


def test_a_shutdown_from_another_thread_kills_what_runs():
    interpreter = HutchInterpreter()
    mark = new_mark()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            interpreter.execute(f"import subprocess\nsubprocess.run(['sleep', '{mark}'])")
        except BaseException as exc:
            failed.append(exc)

    runs = threading.Thread(target=run)
    runs.start()
    wait_until(True, mark)
    interpreter.shutdown()
    runs.join(60)
    assert isinstance(failed[0], CodeInterpreterError)
    wait_until(False, mark)


def test_an_option_that_no_box_has_is_refused_at_once():
    with pytest.raises(InvalidRequest, match="no option 'bogus'"):
        HutchInterpreter(bogus=1)


def test_two_interpreters_have_two_boxes(interpreter):
    interpreter.execute("mine = 1")
    with HutchInterpreter() as other, pytest.raises(CodeExecutionError, match="NameError"):
        other.execute("mine")


def test_nothing_is_left_when_the_program_ends(tmp_path: Path):
    script = """
from hutch.adapters.dspy import HutchInterpreter
HutchInterpreter().execute("import subprocess; p = subprocess.Popen(['sleep', 'SECONDS'])")
"""
    assert_nothing_is_left_at_the_end(script, tmp_path)
