"""`!command`, `%magic`, `name?`: what notebooks understand, and only that."""

from __future__ import annotations

import pytest
from kernels_of_tests import Kernel

# what is left alone


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("'''\n!ls\n%cd /\n'''", r"'\n!ls\n%cd /\n'"),
        ("10\\\n% 4", "2"),
        ("(10\n% 4)", "2"),
        ("'%s!' % 5", "'5!'"),
        ("x = 7\nx %= 4\nx", "3"),
        ("1 != 2", "True"),
        ("f'{3!r}'", "'3'"),
        ("# !ls\n1", "1"),
        ("'what?'", "'what?'"),
    ],
)
def test_python_is_left_alone(kernel: Kernel, code: str, text: str) -> None:
    assert kernel.run(code).text == text


def test_python_is_left_alone_beside_a_magic(kernel: Kernel) -> None:
    ran = kernel.run(
        'text = """\n!not this\n%nor this\n"""\n'
        "rest = (10\n% 4)\n"
        "also = 10 \\\n% 4\n"
        "short = '# (' '\\'' \"[\"\n"
        "!echo shell\n"
        "def f():\n    !echo inner\n    return 5\n"
        "text, rest, also, short, f()"
    )
    assert ran.error is None, ran.error
    assert ran.text == r"""('\n!not this\n%nor this\n', 2, 2, "# ('[", 5)"""
    assert ran.out == "shell\ninner\n"


def test_an_error_in_a_cell_with_magics_is_where_it_is(kernel: Kernel) -> None:
    ran = kernel.run("!true\nx = (1,\n  2)\n1/0")
    assert ran.error and 'File "<cell 1>", line 4' in ran.error["traceback"]
    ran = kernel.run("!true\nx = = 3")
    assert ran.error and ran.error["name"] == "SyntaxError"
    assert "line 2\n    x = = 3" in ran.error["traceback"]


# commands


def test_a_command_writes_where_output_goes(kernel: Kernel) -> None:
    ran = kernel.run("print('a')\n!echo b; echo c >&2; exit 3\nprint(_exit_code)")
    assert (ran.out, ran.err) == ("a\nb\n3\n", "c\n")


def test_the_output_of_a_command_can_be_kept(kernel: Kernel) -> None:
    assert kernel.run("x = !printf 'a\\nb\\n'\nx").text == "['a', 'b']"
    assert kernel.run("d = {}\nd['k'] = !echo z\nd").text == "{'k': ['z']}"
    assert kernel.run("a, b = !printf '1\\n2'\na + b").text == "'12'"


def test_a_command_goes_on_after_a_backslash(kernel: Kernel) -> None:
    ran = kernel.run("!echo one \\\n  two\nimport inspect\ninspect.currentframe().f_lineno")
    assert (ran.out, ran.text) == ("one two\n", "4")


@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("echo {name} $name", "file.txt file.txt"),
        ("echo {name.upper()} {1 + 1}", "FILE.TXT 2"),
        ("echo $NOT_PYTHON ${HOME:+home}", "home"),
        ("echo a b | awk '{print $2}'", "b"),
        ("echo a b | awk '{print}'", "a b"),
        ("echo {1..3}", "1 2 3"),
        ("echo {{name}}", "{name}"),
        ("echo '{'", "{"),
    ],
)
def test_python_values_go_into_commands(kernel: Kernel, command: str, out: str) -> None:
    kernel.run("name = 'file.txt'")
    assert kernel.run(f"!{command}").out == f"{out}\n"


def test_commands_in_functions_see_local_names(kernel: Kernel) -> None:
    assert kernel.run("def f(local):\n    !echo {local}\nf(7)").out == "7\n"


def test_a_command_in_the_background_is_not_waited_for(kernel: Kernel) -> None:
    kernel.run("!sleep 1000 & echo $! > pid")
    ran = kernel.run("import os, signal; os.kill(int(open('pid').read()), signal.SIGKILL)")
    assert ran.error is None


def test_pip_is_the_pip_of_this_python(kernel: Kernel) -> None:
    here = kernel.value("__import__('sys').prefix")
    for code in ("%pip --version", "!pip --version", "!pip3 --version"):
        ran = kernel.run(code)
        assert here in ran.out or "No module named pip" in ran.err


def test_what_a_command_installs_can_be_imported(kernel: Kernel) -> None:
    kernel.run("import sys, os; os.mkdir('lib'); sys.path.append('lib')")
    assert kernel.run("import fresh_module").error
    ran = kernel.run("!echo 'x = 1' > lib/fresh_module.py\nimport fresh_module\nfresh_module.x")
    assert ran.text == "1"


# line magics


def test_cd_and_pwd(kernel: Kernel) -> None:
    kernel.run("import os; os.makedirs('a b/c')")
    assert kernel.run("%cd a b/c").out == f"{kernel.folder}/a b/c\n"
    assert kernel.run("%pwd").text == repr(f"{kernel.folder}/a b/c")
    assert kernel.run("%cd -").out == f"{kernel.folder}\n"
    assert kernel.run("here = %pwd\nhere == os.getcwd()").text == "True"
    ran = kernel.run("%cd nowhere")
    assert ran.error and ran.error["name"] == "FileNotFoundError"


def test_env(kernel: Kernel) -> None:
    kernel.run("%env ONE=1 and more\n%env TWO 2")
    assert kernel.run("%env ONE").text == "'1 and more'"
    assert kernel.run("!echo $TWO").out == "2\n"
    assert "'TWO': '2'" in (kernel.run("%env").text or "") or kernel.run("%env").results


def test_time_shows_the_value_and_the_time(kernel: Kernel) -> None:
    ran = kernel.run("%time sum(range(10))")
    assert ran.text == "45" and "Wall time: " in ran.out
    ran = kernel.run("%time y = 5")
    assert ran.text is None and "Wall time: " in ran.out
    assert kernel.run("y").text == "5"
    ran = kernel.run("%%time\nz = 6\nz + 1")
    assert ran.text == "7" and "Wall time: " in ran.out
    ran = kernel.run("%%time\n1/0")
    assert ran.error and "line 2" in ran.error["traceback"] and "Wall time: " in ran.out


def test_timeit(kernel: Kernel) -> None:
    assert "per loop" in kernel.run("x = 3\n%timeit -n 10 -r 2 x + 1").out
    assert "2 runs, 10 loops" in kernel.run("%%timeit -n 10 -r 2 y = 1\ny + x\nx").out
    ran = kernel.run("%timeit -n1 -r1 1/0")
    assert ran.error and ran.error["name"] == "ZeroDivisionError"


def test_who_and_reset(kernel: Kernel) -> None:
    kernel.run("one = 1\ntwo = 2")
    assert kernel.run("%who").out == "one  two\n"
    kernel.run("%reset -f")
    assert kernel.run("'one' in globals()").text == "False"
    assert kernel.run("len('abc')").text == "3"


@pytest.mark.parametrize(
    "line", ["%matplotlib inline", "%load_ext autoreload", "%config X.y = 'z'", "%autoreload 2"]
)
def test_what_is_not_needed_here_is_accepted(kernel: Kernel, line: str) -> None:
    ran = kernel.run(f"{line}\n1")
    assert (ran.text, ran.error) == ("1", None)


@pytest.mark.parametrize("code", ["%nothing here", "%%nothing\nx"])
def test_an_unknown_magic_says_which_there_are(kernel: Kernel, code: str) -> None:
    ran = kernel.run(code)
    assert ran.error and ran.error["name"] == "NameError"
    assert "nothing" in ran.error["value"] and "%time" in ran.error["value"]
    assert "hutch" not in ran.error["traceback"]


# cell magics


def test_a_cell_can_be_a_script(kernel: Kernel) -> None:
    ran = kernel.run("%%bash\nfor i in 1 2; do\n  echo $i\ndone")
    assert (ran.out, ran.error) == ("1\n2\n", None)
    ran = kernel.run("%%sh\necho x\nexit 4")
    assert ran.out == "x\n"
    assert ran.error and "exit code 4" in ran.error["value"]


def test_a_cell_can_be_a_file(kernel: Kernel) -> None:
    assert kernel.run("%%writefile a.py\nx = '%s'\n!no").out == "Writing a.py\n"
    assert (kernel.folder / "a.py").read_text() == "x = '%s'\n!no\n"
    assert kernel.run("%%writefile -a a.py\ny").out == "Appending to a.py\n"
    assert (kernel.folder / "a.py").read_text() == "x = '%s'\n!no\ny\n"
    assert kernel.run("%%writefile a.py\n").out == "Overwriting a.py\n"


# help


def test_help_is_a_question_mark_away(kernel: Kernel) -> None:
    kernel.run("def f(x, y=2):\n    'Adds.'\n    return x + y")
    for code in ("f?", "?f"):
        ran = kernel.run(code)
        assert "f(x, y=2)" in ran.out and "Adds." in ran.out
    assert "return x + y" in kernel.run("f??").out
    ran = kernel.run("nothing?")
    assert ran.error and ran.error["name"] == "NameError"
