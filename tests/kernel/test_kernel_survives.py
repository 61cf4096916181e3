"""What a cell may do to the process it runs in, and what must be as before in the next."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels_of_tests import Kernel, KernelDied, processes_below


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.settrace(lambda *a: 1/0)",
        "import threading; threading.settrace(lambda *a: 1/0)",
        "import sys; sys.setprofile(lambda *a: None)",
        "import sys; sys.setrecursionlimit(60)",
        "import os, shutil; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)",
        "import signal; signal.signal(signal.SIGINT, lambda *a: 1/0)",
        "import atexit; atexit.register(lambda: 1/0)",
        "import sys; sys.excepthook = sys.displayhook = None",
        "import sys; sys.path.clear(); sys.meta_path.clear(); sys.path_hooks.clear()",
        "import sys; sys.modules.clear()",
        "import gc; gc.disable()",
        "import linecache; linecache.cache.clear()",
        "import builtins; builtins._ = 5; del builtins.display",
        "import threading; threading.current_thread().name = 'x'",
        "import asyncio; asyncio.new_event_loop().close()",
        "import os; os.environ.clear()",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))",
        "globals().clear()",
        "import warnings; warnings.simplefilter('error')",
        "import decimal, locale; decimal.getcontext().prec = 1",
    ],
)
def test_the_kernel_goes_on(kernel: Kernel, code: str) -> None:
    assert kernel.run(code).error is None
    ran = kernel.run("def f(): return 1 + 1\nf()")
    assert (ran.text, ran.error) == ("2", None)
    assert kernel.run("1 / 0").error
    assert kernel.run("[1, {'a': 2}]").text == "[1, {'a': 2}]"


def test_an_interrupt_works_after_its_handler_was_changed(kernel: Kernel) -> None:
    kernel.run("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    kernel.begin("print('go')\nwhile True: pass")
    kernel.wait_for_output("go\n")
    kernel.interrupt()
    ran = kernel.finish()
    assert ran.error and ran.error["name"] == "KeyboardInterrupt"


def test_an_alarm_that_rings_between_cells_is_told_and_survived(kernel: Kernel) -> None:
    kernel.run(
        "import signal\ndef ring(*a): raise TimeoutError('too late')\n"
        "signal.signal(signal.SIGALRM, ring)\nsignal.setitimer(signal.ITIMER_REAL, 0.05)"
    )
    kernel.wait_for_output("too late")
    assert kernel.run("1").text == "1"


def test_an_alarm_in_a_cell_is_an_error_of_the_cell(kernel: Kernel) -> None:
    ran = kernel.run(
        "import signal, time\ndef ring(*a): raise TimeoutError('too long')\n"
        "signal.signal(signal.SIGALRM, ring)\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\n"
        "time.sleep(100)"
    )
    assert ran.error and ran.error["value"] == "too long"


def test_handlers_that_raise_all_the_time_break_no_frame(kernel: Kernel) -> None:
    kernel.run(
        "import signal\ndef ring(*a): raise TimeoutError('ring')\n"
        "signal.signal(signal.SIGALRM, ring)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)"
    )
    for size in range(100):
        kernel.run(f"for _ in range(5): display('x' * {size * 1000})")
    while kernel.run("signal.setitimer(signal.ITIMER_REAL, 0)").error:
        pass
    assert kernel.run("display(1); 2").text == "2"


def test_a_handler_may_display_in_the_middle_of_a_display(kernel: Kernel) -> None:
    ran = kernel.run(
        "import signal\nrung = 0\ndef ring(*a):\n    global rung; rung += 1; display('ring')\n"
        "signal.signal(signal.SIGALRM, ring)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
        "for _ in range(100): display('x' * 200_000)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\nrung"
    )
    assert ran.error is None and ran.text
    assert len(ran.results) == 101 + int(ran.text)


# children


def test_a_forked_child_is_no_second_kernel(kernel: Kernel) -> None:
    ran = kernel.run("import os\npid = os.fork()\nprint('child' if pid == 0 else 'parent')\n5")
    assert ran.text == "5"
    ran = kernel.run("os.waitpid(pid, 0)[1]")
    assert ran.text == "0"
    assert kernel.run("os.getpid()").text == str(kernel.pid)


@pytest.mark.parametrize(
    ("code", "status"), [("sys.exit(3)", 3), ("1/0", 1), ("pass", 0), ("os._exit(7)", 7)]
)
def test_a_forked_child_ends_as_a_script_would(kernel: Kernel, code: str, status: int) -> None:
    ran = kernel.run(f"import os, sys\npid = os.fork()\nif pid == 0: {code}")
    assert ran.error is None
    wait = "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    assert kernel.run(wait).text == str(status)


def test_a_forked_child_cannot_display(kernel: Kernel) -> None:
    ran = kernel.run(
        "import os\npid = os.fork()\ndisplay('x')\nif pid: os.waitpid(pid, 0)\nelse: os._exit(0)"
    )
    assert len(ran.results) == 1


def test_multiprocessing_works(kernel: Kernel) -> None:
    kernel.run("import multiprocessing\ndef square(x): return x * x")
    ran = kernel.run(
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    squares = pool.map(square, range(4))\nsquares"
    )
    assert ran.text == "[0, 1, 4, 9]"


def test_a_daemon_does_not_keep_the_channel_open(kernel: Kernel) -> None:
    kernel.run(
        "import os, time\nif os.fork() == 0:\n    os.setsid(); open('daemon', 'w').write("
        "str(os.getpid())); time.sleep(1000)"
    )
    path = kernel.folder / "daemon"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    daemon = int(path.read_text())
    try:
        kernel.begin("os._exit(0)")
        with pytest.raises(KernelDied):
            kernel.finish()
    finally:
        os.kill(daemon, 9)


def test_programs_do_not_inherit_the_channel(kernel: Kernel) -> None:
    ran = kernel.run("import subprocess\nsubprocess.run(['ls', '/proc/self/fd'], close_fds=False)")
    assert set(ran.out.split()) <= {"0", "1", "2", "3", "4"}


def test_programs_hear_interrupts(kernel: Kernel) -> None:
    """A program started between cells, by a thread, is not deaf to SIGINT for ever."""
    kernel.run(
        "import threading, subprocess, time\ngo = threading.Event()\n"
        "def start():\n    go.wait(); time.sleep(0.05)\n"
        "    global program; program = subprocess.Popen(['sleep', '1000']); started.set()\n"
        "started = threading.Event(); threading.Thread(target=start).start()"
    )
    kernel.run("go.set()")
    ran = kernel.run("started.wait(30); program.send_signal(2); program.wait(30)")
    assert ran.text == "-2"


# the end


@pytest.mark.parametrize(
    "code",
    ["import os; os._exit(3)", "import os; os.abort()", "import ctypes; ctypes.string_at(0)"],
)
def test_a_kernel_that_dies_hangs_up(kernel: Kernel, code: str) -> None:
    kernel.begin(code)
    with pytest.raises(KernelDied):
        kernel.finish()


def test_a_crash_says_where_it_was(kernel: Kernel) -> None:
    kernel.begin("import ctypes\nctypes.string_at(0)")
    with pytest.raises(KernelDied, match=r'Segmentation fault[\s\S]*"<cell 1>", line 2'):
        kernel.finish()


def test_a_kernel_ends_when_its_guest_is_gone(kernel: Kernel) -> None:
    kernel.run("import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()")
    assert kernel.hang_up() == 0


def test_a_kernel_in_the_middle_of_a_cell_ends_when_its_guest_is_gone(kernel: Kernel) -> None:
    kernel.begin("print('go')\nfor i in range(10**9): display(i)")
    kernel.wait_for_output("go\n")
    assert kernel.hang_up() == 0


def test_an_unknown_request_is_answered(kernel: Kernel) -> None:
    assert kernel.ask("nonsense")["error"]
    assert kernel.run("1").text == "1"


def test_nothing_is_left_of_an_interrupted_command(kernel: Kernel) -> None:
    kernel.begin("!echo go; trap '' INT; sleep 1234.5 & sleep 1234.5")
    kernel.wait_for_output("go\n")
    kernel.interrupt()
    assert kernel.finish().error
    assert not [*processes_below(kernel.pid)]
    assert not [*programs_with("1234.5")]


def programs_with(word: str) -> Iterator[Path]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                yield folder
