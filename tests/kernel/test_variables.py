"""What a kernel says about its variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernels_of_tests import Kernel


def told(kernel: Kernel, code: str) -> dict[str, dict[str, Any]]:
    ran = kernel.run(code)
    assert ran.error is None, ran.error["traceback"]
    return {one["name"]: one for one in kernel.ask("variables")["variables"]}


def test_variables_are_told_in_the_order_they_were_made(kernel: Kernel) -> None:
    code = """
import os, collections as c
z = 5; text = "hello"; items = [1, 2, 3]; _mine = None; d = {"a": (1,)}
def f(x): return x
class Point: pass
p = Point(); lots = list(range(10**6)); counter = c.Counter("aab")
path = __import__("pathlib").Path()
5
"""
    found = told(kernel, code)
    assert list(found) == [
        "z", "text", "items", "_mine", "d", "f", "Point", "p", "lots", "counter", "path",
    ]  # fmt: skip
    assert found["z"] == {
        "name": "z", "type": "int", "shape": None, "length": None, "bytes": 28, "preview": "5",
        "asleep": False,
    }  # fmt: skip
    assert found["text"]["preview"] == "'hello'" and found["text"]["length"] == 5
    assert found["items"]["preview"] == "[1, 2, 3]"
    assert found["d"]["preview"] == "{'a': (1,)}"
    assert (found["f"]["type"], found["Point"]["type"]) == ("function", "type")
    assert found["p"]["type"] == "Point"
    assert found["lots"]["length"] == 10**6 and len(found["lots"]["preview"]) <= 120
    assert found["counter"]["type"] == "collections.Counter"


def test_objects_with_code_of_their_own_cannot_spoil_it(kernel: Kernel) -> None:
    code = """
class Raises:
    def __repr__(self): raise ValueError("no")
    def __len__(self): raise TypeError
    shape = property(lambda self: 1 / 0)
class Never:
    def __repr__(self):
        while True:
            try: pass
            except Exception: pass
    __len__ = __sizeof__ = __repr__
class Wide:
    def __repr__(self): return "x\\n" * 10**6
    shape = ("not", "numbers")
class Exits:
    def __repr__(self): raise SystemExit
raises, never, wide, exits, after = Raises(), Never(), Wide(), Exits(), "after"
many = [Never() for _ in range(10)]
"""
    found = told(kernel, code)
    assert "Raises" in found["raises"]["preview"] and found["raises"]["length"] is None
    assert found["raises"]["shape"] is None
    assert found["never"]["preview"] == "<Never>"
    assert len(found["wide"]["preview"]) == 120 and "\n" not in found["wide"]["preview"]
    assert found["wide"]["shape"] is None
    assert found["exits"]["type"] == "Exits"
    assert found["after"]["preview"] == "'after'"
    assert kernel.value("after") == "after"


def test_an_alarm_of_the_users_still_goes_off(kernel: Kernel) -> None:
    kernel.run("""
import signal
rang = []
signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
signal.alarm(1)
class Slow:
    def __repr__(self):
        while True: pass
slow = Slow()
""")
    kernel.ask("variables")
    assert kernel.run("while not rang: signal.pause()", timeout=30).error is None


def test_frames_and_arrays_are_told_by_shape_and_size(data_kernel: Kernel) -> None:
    code = """
import numpy as np, pandas as pd, pyarrow as pa
df = pd.DataFrame({"a": np.arange(1000), "b": np.random.rand(1000)})
objects = pd.DataFrame({"o": pd.Series([("x" * 1000, i) for i in range(1000)], dtype=object)})
s = df["a"]; big = np.zeros((300, 400)); small = np.arange(3); wide = pd.DataFrame(np.eye(500))
t = pa.table({"x": [1, 2]}); scalar = np.float64(2.5)
"""
    found = told(data_kernel, code)
    assert found["df"]["type"] == "pandas.DataFrame"
    assert found["df"]["shape"] == [1000, 2] and found["df"]["length"] == 1000
    assert 16_000 <= found["df"]["bytes"] < 17_000
    assert found["df"]["preview"] == "1000 rows, 2 columns: a, b"
    assert found["objects"]["bytes"] > 50_000
    assert found["s"]["type"] == "pandas.Series" and found["s"]["shape"] == [1000]
    assert found["big"]["bytes"] == 960_000 and found["big"]["shape"] == [300, 400]
    assert found["small"]["preview"] == "array([0, 1, 2])"
    assert len(found["wide"]["preview"]) == 120
    assert found["t"]["shape"] == [2, 1] and found["t"]["length"] == 2
    assert not any(one["asleep"] for one in found.values())


def test_what_sleeps_is_not_woken_by_looking(data_python: str, tmp_path: Path) -> None:
    with open(tmp_path / "swap", "w+b") as swap:
        place = (swap.fileno(), 1 << 30)
        environ = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
        with Kernel(tmp_path, data_python, swap=place, environ=environ) as kernel:
            code = """
import numpy as np, pandas as pd
df = pd.DataFrame(np.random.rand(500_000, 4), columns=list("abcd"))
df["s"] = [f"text {i}" for i in range(500_000)]
a = np.random.rand(1_000_000); view = a[5:10]; kept = [a]; x = 1
"""
            told(kernel, code)
            slept = kernel.ask("sleep", frame_bytes=10**6, array_bytes=10**6)["slept"]
            assert slept == ["df", "a", "view", "kept"]
            for _ in range(3):
                found = {one["name"]: one for one in kernel.ask("variables")["variables"]}
                assert [name for name, one in found.items() if one["asleep"]] == ["df", "a", "view"]
            assert found["df"]["preview"] == "500000 rows, 5 columns: a, b, c, d, s"
            found = told(kernel, "total = df[list('abcd')].sum().sum() + a.sum()")
            assert not found["a"]["asleep"] and not found["view"]["asleep"]
