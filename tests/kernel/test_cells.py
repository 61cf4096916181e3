"""What a cell is: Python, its variables, its value, and how its errors look."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from kernels_of_tests import Kernel, Ran

# values


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 + 1", "2"),
        ("1 + 1;", None),
        ("(1 + 1) ;  # quiet", None),
        ("'a;b'", "'a;b'"),
        ("x = 1", None),
        ("None", None),
        ("x = 1; x + 1", "2"),
        ("", None),
        ("\n\n# nothing\n", None),
        ("if True:\n    7", None),
        ("(1,\n 2)", "(1, 2)"),
        ("'é' ; 'ü'", "'ü'"),
        ("f'{1}' 'é';", None),
    ],
)
def test_the_value_of_the_last_expression_is_shown(kernel: Kernel, code: str, text: str) -> None:
    ran = kernel.run(code)
    assert (ran.text, ran.error) == (text, None)


def test_variables_are_kept_from_cell_to_cell(kernel: Kernel) -> None:
    kernel.run("x = 20\ndef double(): return 2 * x")
    assert kernel.run("x += 1\ndouble()").text == "42"


def test_the_last_value_is_an_underscore_away(kernel: Kernel) -> None:
    kernel.run("6 * 7")
    assert kernel.run("_ + 1").text == "43"
    assert kernel.run("_ + 1").text == "44"


def test_an_underscore_of_the_users_is_theirs(kernel: Kernel) -> None:
    kernel.run("for _ in range(3): pass\n5")
    assert kernel.run("_").text == "2"
    kernel.run("del _")
    kernel.run("7")
    assert kernel.run("_").text == "7"


def test_cells_are_counted(kernel: Kernel) -> None:
    assert [kernel.run(code).count for code in ("1", "1/0", "x = ", "2")] == [1, 2, 3, 4]


def test_user_code_runs_in_main(kernel: Kernel) -> None:
    kernel.run("import sys, pickle\nclass Box: pass")
    assert kernel.run("__name__, Box.__module__, sys.argv").text == "('__main__', '__main__', [''])"
    assert kernel.run("sys.modules['__main__'].Box is Box").text == "True"
    assert kernel.run("type(pickle.loads(pickle.dumps(Box()))) is Box").text == "True"
    assert kernel.run("'__file__' in globals()").text == "False"


def test_modules_in_the_folder_can_be_imported_but_do_not_replace_ours(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine.py").write_text("answer = 42")
    for name in ("json", "random", "socket", "traceback"):
        (tmp_path / "work" / f"{name}.py").write_text("raise SystemExit('not this one')")
    with Kernel(tmp_path) as kernel:
        assert kernel.run("import mine; mine.answer").text == "42"


def test_names_that_we_use_are_free_for_users(kernel: Kernel) -> None:
    kernel.run("display = json = sys = print = _exit_code = len = repr = str = 5")
    ran = kernel.run("{'a': display}")
    assert (ran.text, ran.error) == ("{'a': 5}", None)


def test_the_builtins_can_be_deleted_and_come_back(kernel: Kernel) -> None:
    kernel.run("del __builtins__")
    assert kernel.run("len('abc')").text == "3"


# source


@pytest.mark.parametrize(
    "code",
    [
        "    x = 3\n    if x:\n        x += 1\n    x",
        "\ufeffx = 4\nx",
        "x = 3\r\nif x:\r\n    x += 1\r\nx",
        "x = 3\rx + 1",
        "if True:\n\tx = 4\nx",
        "x = 4\n\x0c\nx",
        "  # a comment\n  x = 4\n  x",
    ],
)
def test_source_is_taken_as_editors_leave_it(kernel: Kernel, code: str) -> None:
    ran = kernel.run(code)
    assert (ran.text, ran.error) == ("4", None)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("x = ", "invalid syntax"),
        ("return 3", "'return' outside function"),
        ("x = 1\n\0", "null bytes"),
        ("if True:\nx", "expected an indented block"),
        ("x = 1\n  y = 2", "unexpected indent"),
        ("'unterminated", "string"),
        ("x = '\ud800'", "surrogates"),
        ("nonlocal x", "nonlocal declaration not allowed at module level"),
        ("(" * 300, ""),
    ],
)
def test_what_is_not_python_is_a_clean_error(kernel: Kernel, code: str, value: str) -> None:
    ran = kernel.run(code)
    assert ran.error
    assert ran.error["name"] in ("SyntaxError", "IndentationError", "MemoryError")
    assert value in ran.error["value"]
    assert kernel.run("1").text == "1"


def test_a_syntax_error_shows_the_line_and_the_place(kernel: Kernel) -> None:
    ran = kernel.run("x = 1\nreturn 3")
    assert ran.error
    place, line, mark = ran.error["traceback"].splitlines()[:3]
    assert (place, line) == ('  File "<cell 1>", line 2', "    return 3")
    assert mark.startswith("    ^")


def test_a_literal_of_ten_megabytes_is_a_literal(kernel: Kernel) -> None:
    ran = kernel.run(f"x = {'a' * 10_000_000!r}\nlen(x)")
    assert ran.text == "10000000"


def test_a_future_import_holds_for_the_cells_after_it(kernel: Kernel) -> None:
    kernel.run("from __future__ import annotations")
    assert kernel.run("def f(x: nowhere): pass\nf.__annotations__").text == "{'x': 'nowhere'}"


def test_the_source_of_a_function_can_be_asked_for(kernel: Kernel) -> None:
    kernel.run("def f(x):\n    # why\n    return x")
    ran = kernel.run("import inspect; print(inspect.getsource(f))")
    assert ran.out == "def f(x):\n    # why\n    return x\n\n"


# await


def test_a_cell_may_await(kernel: Kernel) -> None:
    ran = kernel.run(
        "import asyncio\nx = await asyncio.sleep(0, 20)\nawait asyncio.sleep(0, x + 1)"
    )
    assert (ran.text, ran.error) == ("21", None)


def test_tasks_go_on_in_the_next_cell_that_awaits(kernel: Kernel) -> None:
    kernel.run("import asyncio\nasync def f(): return 5")
    kernel.run("task = asyncio.ensure_future(f()); await asyncio.sleep(0)")
    assert kernel.run("await task").text == "5"


def test_asyncio_run_works_too(kernel: Kernel) -> None:
    ran = kernel.run("import asyncio\nasync def f(): return 5\nasyncio.run(f())")
    assert ran.text == "5"
    assert kernel.run("await f()").text == "5"


def test_an_error_behind_an_await_shows_the_users_lines_only(kernel: Kernel) -> None:
    ran = kernel.run("async def f():\n    1/0\nawait f()")
    assert ran.error
    assert "line 2, in f" in ran.error["traceback"]
    assert "hutch" not in ran.error["traceback"]


# errors


def traceback_of(ran: Ran) -> str:
    assert ran.error
    return str(ran.error["traceback"])


def test_a_traceback_has_the_users_lines_and_none_of_ours(kernel: Kernel) -> None:
    kernel.run("def f(x):\n    return json.loads(x)")
    ran = kernel.run("import json\nf('nothing')")
    assert ran.error and ran.error["name"] == "JSONDecodeError"
    assert ran.error["value"] == "Expecting value: line 1 column 1 (char 0)"
    lines = traceback_of(ran).splitlines()
    assert (
        lines[:5]
        == [
            "Traceback (most recent call last):",
            '  File "<cell 2>", line 2, in <module>',
            "    f('nothing')",
            '  File "<cell 1>", line 2, in f',
            "    return json.loads(x)",
        ]
        or "^" in lines[3]
    )
    assert "hutch" not in traceback_of(ran)


def test_causes_are_told(kernel: Kernel) -> None:
    ran = kernel.run(
        "try:\n    1/0\nexcept ArithmeticError as exc:\n    raise KeyError('x') from exc"
    )
    assert "ZeroDivisionError: division by zero\n\nThe above exception was" in traceback_of(ran)
    assert ran.error and (ran.error["name"], ran.error["value"]) == ("KeyError", "'x'")


def test_a_deep_recursion_is_folded_and_survived(kernel: Kernel) -> None:
    ran = kernel.run("def f(): f()\nf()")
    assert ran.error and ran.error["name"] == "RecursionError"
    assert "[Previous line repeated" in traceback_of(ran)
    assert len(traceback_of(ran)) < 2000
    assert kernel.run("1").text == "1"


def test_a_traceback_is_bounded(kernel: Kernel) -> None:
    ran = kernel.run("raise ValueError('x' * 10_000_000)")
    assert ran.error and ran.error["name"] == "ValueError"
    assert len(json.dumps(ran.error)) < 200_000
    assert traceback_of(ran).startswith("Traceback")


def test_an_exception_that_cannot_be_shown_is_still_reported(kernel: Kernel) -> None:
    ran = kernel.run("class E(Exception):\n    def __str__(self): raise ValueError\nraise E")
    assert ran.error and ran.error["name"] == "E"


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("import sys; sys.exit(3)", "3"),
        ("exit()", "0"),
        ("quit(0)", "0"),
        ("raise SystemExit", "0"),
        ("import sys; sys.exit('so long')", "so long"),
    ],
)
def test_exit_is_reported_and_survived(kernel: Kernel, code: str, value: str) -> None:
    kernel.run("x = 5")
    ran = kernel.run(code)
    assert ran.error and (ran.error["name"], ran.error["value"]) == ("SystemExit", value)
    assert kernel.run("x").text == "5"


def test_input_says_that_nobody_answers(kernel: Kernel) -> None:
    ran = kernel.run("input('name? ')")
    assert ran.error and ran.error["name"] == "EOFError"
    assert "input() is not available" in ran.error["value"]


def test_out_of_memory_is_an_error(kernel: Kernel) -> None:
    ran = kernel.run("x = bytearray(1 << 60)")
    assert ran.error and ran.error["name"] == "MemoryError"


# interrupts


def interrupted(kernel: Kernel, code: str) -> Ran:
    """Run `code`, which says "go", and interrupt it then."""
    kernel.begin(code)
    kernel.wait_for_output("go\n")
    kernel.interrupt()
    return kernel.finish()


@pytest.mark.parametrize(
    "code",
    [
        "print('go')\nwhile True: pass",
        "import time; print('go'); time.sleep(1e6)",
        "import asyncio; print('go'); await asyncio.sleep(1e6)",
        "import asyncio\nasync def f():\n    print('go')\n    while True: pass\nawait f()",
        "import signal; print('go'); signal.pause()",
        "import threading; print('go'); threading.Event().wait()",
        "import subprocess; print('go'); subprocess.run(['sleep', '1000'])",
        "!echo go; sleep 1000",
        "x = !echo go >&2; sleep 1000",
        "class A:\n    def __repr__(self):\n        print('go')\n        while True: pass\nA()",
        "class A:\n    def _repr_html_(self):\n        print('go')\n        while True: pass\nA()",
        "class E(Exception):\n    def __str__(self):\n        print('go')\n        while True: pass"
        "\nraise E",
    ],
)
def test_an_interrupt_ends_the_cell_and_keeps_the_variables(kernel: Kernel, code: str) -> None:
    kernel.run("x = 5")
    ran = interrupted(kernel, code)
    assert ran.error and ran.error["name"] == "KeyboardInterrupt"
    assert kernel.run("x").text == "5"


def test_an_interrupt_between_cells_is_nothing(kernel: Kernel) -> None:
    for _ in range(20):
        kernel.interrupt()
    assert kernel.run("1").text == "1"


def test_a_storm_of_interrupts_loses_no_answer(kernel: Kernel) -> None:
    kernel.run("x = list(range(1000))")
    over = threading.Event()

    def storm() -> None:
        while not over.wait(0.0003):
            kernel.interrupt()

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        for _ in range(300):
            ran = kernel.run("display(x)\nx")
            assert ran.error is None or ran.error["name"] == "KeyboardInterrupt", ran.error
    finally:
        over.set()
        thread.join()
    assert kernel.run("len(x)").text == "1000"


def test_an_interrupted_await_can_clean_up(kernel: Kernel) -> None:
    kernel.run(
        "import asyncio\nasync def f():\n    try:\n        print('go')\n"
        "        await asyncio.sleep(1e6)\n    finally:\n        print('cleaned')"
    )
    ran = interrupted(kernel, "await f()")
    assert ran.error and "cleaned" in ran.out
    assert kernel.run("await asyncio.sleep(0, 3)").text == "3"
