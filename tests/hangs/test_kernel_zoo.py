"""A zoo of what ends other kernels, or makes them hang. Here each ends, and says how.

Each is run after a cell that set a variable. What the next cell finds tells whether the kernel
lived; if it did not, the cell before said so, and this one says that it has a fresh one. In
`host` a kernel is executed, in `python` it is forked from a process that was warm; in a
container, each is executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from docker_of_tests import RUNTIME
from hutch import Sandbox, factory

IMAGES = ("host", "python") if factory.default() == "namespaces" else ("python",)
GUARD = 60  # seconds: a test that fails here would otherwise never come back


@dataclass(frozen=True)
class Animal:
    name: str
    code: str
    error: str | None = None  # the name of it
    died: str | None = None  # a pattern; None: the kernel lives
    timeout: float | None = None  # it is reached
    text: str | None = None

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


ZOO = [
    Animal("sys.exit", "import sys; sys.exit(3)", "SystemExit"),
    Animal("exit", "exit()", "SystemExit"),
    Animal("os._exit", "import os; os._exit(3)", died="exited with code 3"),
    Animal("os._exit as if by a signal", "import os; os._exit(139)", died="exited with code 139"),
    Animal("os.abort", "import os; os.abort()", died=r"signal 6 \(SIGABRT\)"),
    Animal("a segfault", "import ctypes; ctypes.string_at(0)", died=r"signal 11 \(SIGSEGV\)"),
    Animal("an alarm", "import signal, time; signal.alarm(1); time.sleep(60)",
           died=r"signal 14 \(SIGALRM\)"),
    Animal("killing oneself", "import os; os.kill(os.getpid(), 9)", died=r"signal 9 \(SIGKILL\)"),
    Animal("killing everyone", "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass"),
    Animal("stopping oneself", "import os; os.kill(os.getpid(), 19); 'on'", text="'on'"),
    Animal("a child that stops itself", "import os; os.system('kill -STOP $$; echo on')", text="0"),
    Animal("becoming something else", "import os; os.execvp('sleep', ['sleep', '1000'])",
           died="broke its channel"),
    Animal("closing every descriptor", "import os; os.closerange(3, 10_000)", died="."),
    Animal("an endless loop", "while True: pass", "KeyboardInterrupt", timeout=0.5),
    Animal("an endless sleep", "import time; time.sleep(1e9)", "KeyboardInterrupt", timeout=0.5),
    Animal("signal.pause", "import signal; signal.pause()", "KeyboardInterrupt", timeout=0.5),
    Animal("a lock that is never free", "import threading; threading.Semaphore(0).acquire()",
           "KeyboardInterrupt", timeout=0.5),
    Animal("a thread that is waited for",
           "import threading, time\nt = threading.Thread(target=time.sleep, args=(999,), "
           "daemon=True)\nt.start()\nt.join()", "KeyboardInterrupt", timeout=0.5),
    Animal("a loop in C that hears nothing", "sum(range(10**15))", timeout=0.5,
           died="did not stop when it was interrupted, and was killed"),
    Animal("a loop that catches everything",
           "import time\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass",
           timeout=0.5, died="did not stop"),
    Animal("an await that never ends", "import asyncio; await asyncio.sleep(1e6)",
           "KeyboardInterrupt", timeout=0.5),
    Animal("a command that never ends", "import subprocess; subprocess.run(['sleep', '1000'])",
           "KeyboardInterrupt", timeout=0.5),
    Animal("a command that hears nothing", "!trap '' INT TERM; sleep 1000", "KeyboardInterrupt",
           timeout=0.5),
    Animal("output without end", "while True: print('y' * 1000)", "KeyboardInterrupt", timeout=0.5),
    Animal("output of a command without end", "import os; os.system('yes'); 1 / 0",
           "ZeroDivisionError", timeout=0.5),
    Animal("input", "input('your name: ')", "EOFError"),
    Animal("a command that reads its input",
           "import subprocess; subprocess.run(['cat']).returncode", text="0"),
    Animal("recursion", "def f(): return f()\nf()", "RecursionError"),
    Animal("a fork", "import os\npid = os.fork()\nprint(end='')\n1 if pid else 2", text="1"),
    Animal("a fork that stays", "import os, time\nif not os.fork(): time.sleep(1000)\n'parent'",
           text="'parent'"),
    Animal("a pool of processes",
           "import multiprocessing\nwith multiprocessing.Pool(2) as p: print(end='')\n'done'",
           text="'done'"),
    Animal("a thread that goes on",
           "import threading, time\n"
           "def go():\n    while True: time.sleep(0.01)\n"
           "threading.Thread(target=go, daemon=True).start()\n1", text="1"),
    Animal("no stdout", "import sys; sys.stdout = None; 5", text="5"),
    Animal("a closed stdout", "import sys; sys.stdout.close(); sys.stderr.close()"),
    Animal("closed descriptors", "import os; os.close(0); os.close(1); os.close(2)"),
    Animal("a repr that raises", "class A:\n    def __repr__(self): return 1 / 0\nA()", text="."),
    Animal("a repr that never ends",
           "class A:\n    def __repr__(self):\n        while True: pass\nA()",
           "KeyboardInterrupt", timeout=0.5),
    Animal("a million lines", "for n in range(1_000_000): print(n)"),
    Animal("a list of a million", "list(range(1_000_000))", text="."),
    Animal("a string of ten million", "'x' * 10_000_000", text="."),
    Animal("a broken module", "import json, sys; sys.modules['json'] = None; json.dumps = None",
           died="exited"),
    Animal("no builtins", "del __builtins__"),
    Animal("an atexit handler", "import atexit; atexit.register(lambda: 1 / 0)"),
    Animal("a deleted folder", "import os; os.mkdir('x'); os.chdir('x'); os.rmdir('../x')"),
    Animal("a code page of its own", "# coding: latin-1\n'é'", text="'é'"),
    Animal("half a character", "'\\ud800'", text="."),
]  # fmt: skip


@pytest.fixture(params=IMAGES)
def box(request: pytest.FixtureRequest, shared_box: Sandbox) -> Iterator[Sandbox]:
    with Sandbox.create(image=request.param) as made:
        yield made


@pytest.mark.parametrize("animal", ZOO, ids=str)
def test_a_cell_ends_and_says_how(box: Sandbox, animal: Animal) -> None:
    timeout = animal.timeout and (animal.timeout if RUNTIME == "runc" else 4)
    while True:
        assert box.run_code("kept = 'kept'").ok
        done = box.run_code("print('so far')\n" + animal.code, timeout=timeout or GUARD)
        if done.logs.stdout or not timeout or timeout > GUARD:
            break
        timeout *= 4  # a busy machine did not get to the first line: it has more time
    assert done.timed_out is bool(animal.timeout)
    assert done.logs.stdout.startswith("so far\n")
    if animal.died:
        assert done.died and re.search(animal.died, done.died)
        assert done.error and done.error.name == "KernelDied"
    else:
        assert done.died is None
        name = done.error.name if done.error else None
        assert name == animal.error or (animal.timeout and name == "KeyboardInterrupt")
        text = done.text or ""
        assert text == animal.text or (animal.text == "." and text) or animal.text is None
    assert done.killed is bool(animal.timeout and animal.died)
    after = box.run_code("kept", timeout=GUARD)
    assert after.restarted is bool(animal.died)
    assert after.text == (None if animal.died else "'kept'")
    assert box.run_code("6 * 7", timeout=GUARD).text == "42"


@pytest.mark.parametrize("image", IMAGES)
def test_out_of_memory_is_told_and_the_next_cell_has_a_fresh_kernel(
    image: str, shared_box: Sandbox
) -> None:
    with Sandbox.create(image=image, memory="256m") as box:
        box.run_code("kept = 1")
        done = box.run_code("x = []\nwhile True: x.append(b'x' * 10_000_000)", timeout=GUARD)
        assert not done.timed_out
        if done.died:
            assert done.oom and done.died.startswith("out of memory")
            assert box.run_code("kept").restarted
        else:  # where no cgroup bounds a box, a limit of the process does
            assert done.error and done.error.name == "MemoryError"
            assert box.run_code("del x; kept").text == "1"
        assert box.run_code("6 * 7", timeout=GUARD).text == "42"


def test_what_a_thread_prints_after_its_cell_is_in_the_next_one(box: Sandbox) -> None:
    box.run_code(
        "import threading\ngo, gone = threading.Event(), threading.Event()\n"
        "def late():\n    go.wait()\n    print('late')\n    gone.set()\n"
        "threading.Thread(target=late).start()"
    )
    done = box.run_code("go.set(); gone.wait(20)", timeout=GUARD)
    assert (done.text, done.logs.stdout) == ("True", "late\n")


def test_a_kernel_that_dies_between_two_cells_is_missed_by_the_next(box: Sandbox) -> None:
    pid = box.run_code("import os; os.getpid()").text
    box.commands.run(["kill", "-9", pid or ""])
    done = box.run_code("1 + 1", timeout=GUARD)
    if done.died:  # the kill and the cell were on their way at once
        done = box.run_code("1 + 1", timeout=GUARD)
    assert done.text == "2" and done.restarted


def test_a_dead_kernel_takes_all_it_started_along(box: Sandbox) -> None:
    box.run_code("import os, subprocess\nsubprocess.Popen(['setsid', 'sleep', '1004'])")
    assert "1004" in box.commands.run("ps ax").stdout
    assert box.run_code("os._exit(1)").died
    assert "1004" not in box.commands.run("ps ax").stdout


def test_every_animal_can_be_met_in_one_kernel_after_the_other(box: Sandbox) -> None:
    for animal in ZOO[:12] * 2:
        box.run_code(animal.code, timeout=animal.timeout or GUARD)
    assert box.run_code("6 * 7", timeout=GUARD).text == "42"
