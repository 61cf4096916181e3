"""What is written to stdout and stderr arrives: by Python, by C, by children, by threads."""

from __future__ import annotations

import pytest
from kernels_of_tests import Kernel


def test_output_is_text_in_utf8(kernel: Kernel) -> None:
    ran = kernel.run("import sys; print('é', '\\udc80'); print('oh', file=sys.stderr)")
    assert (ran.out, ran.err) == ("é \\udc80\n", "oh\n")


def test_output_without_a_newline_arrives(kernel: Kernel) -> None:
    assert kernel.run("print('no newline', end='')").out == "no newline"


def test_output_of_children_and_of_c_arrives(kernel: Kernel) -> None:
    ran = kernel.run(
        "import subprocess, ctypes, os\n"
        "print('one')\n"
        "subprocess.run(['sh', '-c', 'echo two; echo three >&2'])\n"
        "os.write(1, b'four\\n')\n"
        "ctypes.CDLL(None).puts(b'five'); ctypes.CDLL(None).fflush(None);"
    )
    assert (ran.out, ran.err) == ("one\ntwo\nfour\nfive\n", "three\n")


def test_lines_arrive_while_the_cell_runs(kernel: Kernel) -> None:
    kernel.begin("import time; print('now'); time.sleep(1000)")
    kernel.wait_for_output("now\n")
    kernel.interrupt()
    assert kernel.finish().error


def test_a_million_lines_arrive(kernel: Kernel) -> None:
    ran = kernel.run("for i in range(1_000_000): print(i)")
    assert ran.out.count("\n") == 1_000_000


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout = None",
        "import sys; sys.stdout.close()",
        "import sys; sys.stdout.detach()",
        "import sys, io; sys.stdout = sys.stderr = io.StringIO()",
        "import sys; sys.stdout = 5",
        "import sys; del sys.stdout, sys.stderr",
        "import sys; sys.stdout = sys.__stdout__ = None",
        "import os; os.close(1); os.close(2)",
        "import os; os.close(0); os.close(1); f = open('/dev/null'); g = open('/dev/null')",
        "import os; fd = os.open('/dev/null', os.O_WRONLY); os.dup2(fd, 1)",
        "import os; os.set_blocking(1, False)",
        "import sys; sys.stdin.close()",
        "import sys\nclass W:\n    def write(self, s): 1/0\n    flush = None\nsys.stdout = W()",
    ],
)
def test_the_next_cell_has_true_streams_again(kernel: Kernel, code: str) -> None:
    kernel.run(code)
    ran = kernel.run(
        "import sys, subprocess\nprint('out')\nprint('err', file=sys.stderr)\n"
        "subprocess.run(['sh', '-c', 'echo child; cat'])\nlen(sys.stdin.read())"
    )
    assert (ran.out, ran.err, ran.text) == ("out\nchild\n", "err\n", "0")


def test_what_was_redirected_goes_where_it_should(kernel: Kernel) -> None:
    ran = kernel.run(
        "import os\nfd = os.open('to', os.O_WRONLY | os.O_CREAT)\nos.dup2(fd, 1)\nprint('in file')"
    )
    assert ran.out == ""
    assert (kernel.folder / "to").read_text() == "in file\n"
    assert kernel.run("print('here')").out == "here\n"


def test_warnings_name_the_cell(kernel: Kernel) -> None:
    ran = kernel.run("import warnings\nwarnings.warn('careful')")
    assert ran.err == "<cell 1>:2: UserWarning: careful\n  warnings.warn('careful')\n"


def test_threads_that_outlive_their_cell_go_on(kernel: Kernel) -> None:
    kernel.run(
        "import threading\ngo = threading.Event()\n"
        "def later(): go.wait(); print('later', flush=True); done.set()\n"
        "done = threading.Event(); threading.Thread(target=later).start()"
    )
    assert kernel.run("go.set(); done.wait(30)").out == "later\n"
