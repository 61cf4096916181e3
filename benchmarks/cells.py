"""Kernels: how soon, how small, and how well they sleep; beside Jupyter's in the same run.

Jupyter is used as its own documentation has it (`jupyter_client` starting an `ipykernel`), in an
environment that has the very packages of image `data`, and without any isolation.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hutch import Image, Sandbox

from . import memory
from .measure import Contender, Promise, absent, milliseconds
from .peers import JUPYTER_PYTHON, Peers

STACK = (
    "import numpy, pandas, pyarrow, pyarrow.parquet, scipy, scipy.stats, scipy.optimize; "
    "import matplotlib, matplotlib.pyplot, sklearn, sklearn.linear_model, sklearn.model_selection; "
)
FRAME = "import pandas as pd; pd.DataFrame({'a': [1, 2, 3]}).a.sum()"
MB = 1_000_000

# Answers one line with one line: how many milliseconds what it was asked for took.
JUPYTER = """
import json, sys, time
from jupyter_client.manager import start_new_kernel

def run(client, code):
    client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            break
    client.get_shell_msg(timeout=60)

def fresh(code):
    began = time.perf_counter()
    manager, client = start_new_kernel(kernel_name="python3")
    run(client, code)
    took = (time.perf_counter() - began) * 1000
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    return took

manager, client = start_new_kernel(kernel_name="python3")
run(client, "1+1")
print("ready", flush=True)
for line in sys.stdin:
    what, code = json.loads(line)
    if what != "warm":
        took = fresh(code)
    else:
        began = time.perf_counter()
        run(client, code)
        took = (time.perf_counter() - began) * 1000
    print(took, flush=True)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


class Jupyter:
    """A process that has a Jupyter kernel, and starts more when it is asked to."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", JUPYTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout and self._process.stdout.readline() == "ready\n"

    def ask(self, what: str, code: str) -> float:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([what, code]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def jupyter(peers: Peers) -> Iterator[Callable[[str, str], float] | None]:
    if peers.jupyter:
        yield None
        return
    made = Jupyter(os.environ[JUPYTER_PYTHON])
    try:
        yield made.ask
    finally:
        made.close()


def beside(
    ask: Callable[[str, str], float] | None,
    why: str,
    what: str,
    code: str,
    n: int,
    bound: float = 0,
) -> Contender:
    name = {
        "fresh": "a fresh Jupyter kernel, same imports",
        "bare": "a fresh Jupyter kernel, pandas only",
        "warm": "Jupyter",
    }[what]
    promise = Promise(bound, at_most=False) if bound else None
    if ask is None:
        return absent(name, why, promise)
    return Contender(name, partial(ask, what, code), n, promise=promise)


@contextlib.contextmanager
def new_kernel(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    with Sandbox.create(image="data") as warm, jupyter(peers) as ask:
        warm.run_code(FRAME).check()  # the first box of an image waits for its imports
        yield [
            Contender("hutch", partial(create_and_run, FRAME), size.turns, promise=Promise(50)),
            beside(ask, peers.jupyter, "fresh", STACK + FRAME, size.bulk, 40),
            beside(ask, peers.jupyter, "bare", FRAME, size.bulk),
        ]


def create_and_run(code: str) -> float:
    """Milliseconds from nothing to the result of a cell; the closing is not counted."""
    began = time.perf_counter()
    box = Sandbox.create(image="data")
    assert box.run_code(code).text == "np.int64(6)"
    took = (time.perf_counter() - began) * 1000
    box.close()
    return took


@contextlib.contextmanager
def warm_cell(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    with Sandbox.create(image="data") as box, jupyter(peers) as ask:
        box.run_code("1+1")
        yield [
            Contender(
                "hutch", partial(milliseconds, lambda: box.run_code("1+1").check()),
                size.turns * 5, promise=Promise(1),
            ),
            beside(ask, peers.jupyter, "warm", "1+1", size.turns, 5),
        ]  # fmt: skip


@contextlib.contextmanager
def kernel_memory(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    if os.geteuid() != 0:
        yield [absent("hutch", "only root can read the memory of a box's processes", Promise(15))]
        return
    count = size.boxes
    imported = partial(own_memory, count, "import pandas as pd")
    used = partial(own_memory, count, FRAME)
    yield [
        Contender(f"hutch, one of {count}, pandas imported", imported, 1, promise=Promise(15)),
        Contender(f"hutch, one of {count}, after a pandas result", used, 1),
    ]


def own_memory(count: int, code: str) -> float:
    """MiB of all processes of one of `count` boxes, each with a kernel that has run `code`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(Sandbox.create(image="data")).run_code(code)
        before = memory.below(os.getpid())
        for _ in range(count):
            stack.enter_context(Sandbox.create(image="data")).run_code(code).check()
        time.sleep(6)  # a guest keeps a helper for the next program for five seconds
        return memory.proportional(memory.below(os.getpid()) - before) / count


@contextlib.contextmanager
def wake_up(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    yield [Contender("hutch", partial(wake, size.file), size.bulk, promise=Promise(500))]


def wake(frame: int) -> float:
    """Milliseconds from the call that wakes a box to its result, with a frame of so many bytes."""
    with Sandbox.create(image="data", memory="2g") as box:
        make = f"import numpy as np, pandas as pd; df = pd.DataFrame(np.arange({frame // 8}.0))"
        box.run_code(make).check()
        box.hibernate()
        began = time.perf_counter()
        assert box.run_code("len(df)").check().text == str(frame // 8)
        return (time.perf_counter() - began) * 1000


@contextlib.contextmanager
def given_back(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    promise = Promise(95, at_most=False)
    yield [Contender("hutch", partial(give_back, size.file * 5), size.bulk, promise=promise)]


OWN = """
def own():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))
own()
"""
ASLEEP_AFTER = 5  # seconds without a word: to ask whether it sleeps would wake it


def give_back(frame: int) -> float:
    """Percent of a frame's memory that its kernel does not hold any more once it sleeps."""
    half = frame // 2
    with Sandbox.create(
        image="data", memory="2g", idle_hibernate=1,
        hibernate_frame_bytes=half, hibernate_array_bytes=half,
    ) as box:  # fmt: skip
        before = int(box.run_code("import numpy as np, pandas as pd\n" + OWN).check().text or 0)
        box.run_code(f"df = pd.DataFrame(np.arange({frame // 8}.0).reshape(-1, 8))").check()
        awake = int(box.run_code("own()").check().text or 0)
        time.sleep(ASLEEP_AFTER)
        asleep = int(box.run_code("own()").check().text or 0)
        assert awake - before > frame * 0.9 and any(v.asleep for v in box.variables())
        return max(0.0, (awake - asleep) / (awake - before) * 100)


@contextlib.contextmanager
def second_use(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    image = Image.python(packages=["six"])
    with Sandbox.create(image=image):  # built now, if it was not
        pass
    yield [
        Contender("hutch", partial(more_than_bare, image), size.slow, promise=Promise(100)),
    ]


def more_than_bare(image: Image) -> float:
    """Milliseconds that the first box of a process takes longer with an environment than bare."""
    return max(0.0, first_box(repr(image)) - first_box("'python'"))


def first_box(image: str) -> float:
    code = (
        "import time\nfrom hutch import Image, Sandbox\nbegan = time.perf_counter()\n"
        f"box = Sandbox.create(image={image})\nassert box.run_code('1+1').text == '2'\n"
        "print((time.perf_counter() - began) * 1000)\nbox.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)
