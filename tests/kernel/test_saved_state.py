"""A namespace goes to bytes in one process and comes back in another."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels_of_tests import Kernel

Start = Callable[..., Kernel]


@pytest.fixture
def start(data_python: str, tmp_path: Path) -> Iterator[Start]:
    """Starts kernels, all in one folder, that end with the test."""
    made: list[Kernel] = []

    def one(python: str = data_python, **options: Any) -> Kernel:
        made.append(Kernel(tmp_path, python, **options))
        return made[-1]

    yield one
    for kernel in made:
        kernel.close()


def run(kernel: Kernel, code: str) -> None:
    ran = kernel.run(code)
    assert ran.error is None, ran.error["traceback"]


def moved(start: Start, code: str, times: int = 1) -> tuple[Kernel, dict[str, Any]]:
    """Run a cell, save, and load in a new kernel, as often as asked."""
    kernel = start()
    run(kernel, code)
    for _ in range(times):
        saved, answer = kernel.save()
        kernel = start()
        loaded = kernel.load(saved)
        assert loaded["kept"] == answer["kept"]
        assert loaded["lost"] == answer["lost"]
    return kernel, loaded


def test_plain_variables_come_back_with_the_number_of_cells(start: Start) -> None:
    kernel, answer = moved(start, "import math, os.path as p; a = [1, {'b': (2, None)}]; t = 'ü'")
    assert answer == {"kept": ["math", "p", "a", "t"], "lost": [], "count": 1}
    run(kernel, "assert a == [1, {'b': (2, None)}] and t == 'ü' and p.join('a', 'b') == 'a/b'")
    assert kernel.run("math.pi").count == 3


def test_names_of_one_object_are_one_object_again(start: Start) -> None:
    code = "a = [1]; b = a; c = {'x': a}; d = [a, c]; d.append(d); e = (a, a)"
    kernel, _ = moved(start, code, times=2)
    run(kernel, "assert a is b is c['x'] is d[0] is e[0] is e[1] and d[1] is c and d[2] is d")
    run(kernel, "a.append(2); assert e[1] == [1, 2]")


def test_functions_see_the_globals_of_now(start: Start) -> None:
    code = """
factor = 2
def twice(x): return x * factor
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
table = {"f": twice, "g": lambda x: twice(x) + later}
"""
    kernel, _ = moved(start, code, times=2)
    run(kernel, "assert twice(5) == 10 and even(10) and twice.__globals__ is globals()")
    run(kernel, "factor = 3; later = 1; assert table['f'](5) == 15 and table['g'](5) == 16")
    run(kernel, "assert table['f'] is twice\ndef odd(n): return 'new'")
    run(kernel, "assert even(3) == 'new'")


def test_a_function_is_kept_although_a_global_it_uses_is_not(start: Start) -> None:
    kernel, answer = moved(start, "f = open('x.txt', 'w')\ndef write(): f.write('a')")
    assert "write" in answer["kept"] and [name for name, _ in answer["lost"]] == ["f"]
    run(kernel, "f = open('x.txt', 'w'); write(); f.close(); assert open('x.txt').read() == 'a'")


def test_who_uses_a_name_that_was_lost_is_told_why(start: Start) -> None:
    kernel, _ = moved(start, "f = open('x.txt', 'w')\ndef write(): f.write('a')")
    for code in ("f", "write()"):
        error = kernel.run(code).error
        assert error and error["name"] == "NameError"
        why = "name 'f' is not defined: it was lost when this session slept ("
        assert error["value"].startswith(why) and why in error["traceback"]
    error = kernel.run("nothing").error
    assert error and error["value"] == "name 'nothing' is not defined"


def test_closures_share_the_variables_they_shared(start: Start) -> None:
    code = """
def counter():
    n = 0
    def up():
        nonlocal n
        n += 1
        return n
    def get(): return n
    return up, get
up, get = counter()
up()
def outer():
    def inner(n): return 1 if n == 0 else n * inner(n - 1)
    return inner
factorial = outer()
adders = [lambda x, i=i: x + i for i in range(3)]
def decorate(f):
    def wrapped(*a, **k): return ["seen", f(*a, **k)]
    wrapped.note = "kept"
    return wrapped
@decorate
def hello(name, *, mark="!"):
    "Says hello."
    return name + mark
"""
    kernel, _ = moved(start, code, times=2)
    run(kernel, "assert up() == 2 and get() == 2 and factorial(5) == 120")
    run(kernel, "assert [f(10) for f in adders] == [10, 11, 12]")
    run(kernel, "assert hello('a') == ['seen', 'a!'] and hello.note == 'kept'")


def test_cached_functions_and_nested_modules_are_kept(start: Start) -> None:
    code = """
import functools, xml.etree.ElementTree, concurrent.futures as cf
@functools.lru_cache(maxsize=7)
def slow(n): return n if n < 2 else slow(n - 1) + slow(n - 2)
@functools.cache
def other(n): return -n
def make():
    @functools.cache
    def inner(n): return 1 if n == 0 else n * inner(n - 1)
    return inner
inner = make()
double = functools.partial(slow, 10)
"""
    kernel, answer = moved(start, code, times=2)
    assert answer["lost"] == []
    run(kernel, "assert slow(10) == double() == 55 and slow.cache_info().maxsize == 7")
    run(kernel, "assert other(3) == -3 and inner(5) == 120 and slow.__name__ == 'slow'")
    run(kernel, "assert xml.etree.ElementTree.fromstring('<a/>').tag == 'a'")


def test_classes_of_cells_keep_their_instances(start: Start) -> None:
    code = """
import abc, collections, dataclasses, enum, typing
class Base(abc.ABC):
    count = 0
    @abc.abstractmethod
    def name(self): ...
class Child(Base):
    __slots__ = ("x", "me")
    def __init__(self, x): self.x, self.me = x, self
    def name(self): return "child of " + super().__class__.__name__
    @property
    def double(self): return 2 * self.x
    @classmethod
    def make(cls): return cls(7)
@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: list = dataclasses.field(default_factory=list)
class Colour(enum.Enum):
    RED = 1
    BLUE = "b"
class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()
Pair = collections.namedtuple("Pair", "left right")
class Typed(typing.NamedTuple):
    a: int = 1
class Oops(ValueError):
    def __init__(self, code): super().__init__(code); self.code = code
child, point, red, both = Child.make(), Point(1, [2]), Colour.RED, Flags.A | Flags.B
pair, typed, oops, bound = Pair(1, 2), Typed(5), Oops(3), child.name
"""
    kernel, answer = moved(start, code, times=2)
    assert answer["lost"] == []
    run(kernel, "assert type(child) is Child and child.me is child and child.double == 14")
    run(kernel, "assert issubclass(Child, Base) and bound.__self__ is child and child.name()")
    run(kernel, "assert type(point) is Point and point == Point(1, [2]) and hash(Point(1, ()))")
    run(kernel, "assert red is Colour.RED is Colour(1) and both == Flags.A | Flags.B")
    run(kernel, "assert pair == Pair(1, 2) and pair.left == 1 and typed == Typed(5)")
    run(kernel, "assert type(oops) is Oops and oops.code == 3")
    run(kernel, "import pickle; assert pickle.loads(pickle.dumps(point)) == point")
    run(kernel, "Base.count = 5; assert child.count == 5")


LOST = {
    "file": ("open('x.txt', 'w')", "an open file (x.txt)"),
    "closed": ("open('x.txt', 'w'); closed.close()", "a closed file (x.txt)"),
    "inside": ("{'deep': [(x for x in [1])]}", "a generator in the middle of its work"),
    "sock": ("__import__('socket').socket()", "a socket"),
    "lock": ("__import__('threading').Lock()", "a lock"),
    "event": ("__import__('threading').Event()", "a lock"),
    "base": ("__import__('sqlite3').connect(':memory:')", "a connection to a database"),
    "deep": (
        "[]\nfor _ in range(100_000): deep = [deep]",
        "it is nested too deeply",
    ),
}


def test_what_cannot_be_kept_is_named_and_costs_nothing_else(start: Start) -> None:
    code = "\n".join(f"{name} = {made}" for name, (made, _) in LOST.items())
    code += """
import sys
class Stubborn:
    def __reduce__(self): raise RuntimeError("I stay")
class Quits:
    def __reduce__(self): sys.exit(3)
stubborn, quits, good = Stubborn(), Quits(), [1, 2]
also = good
"""
    kernel, answer = moved(start, code)
    assert {"Stubborn", "Quits", "good", "also"} <= set(answer["kept"])
    lost = dict(answer["lost"])
    expected = {name: why for name, (_, why) in LOST.items()}
    expected["inside['deep'][0]"] = expected.pop("inside")
    assert lost == {
        **expected,
        "stubborn": "RuntimeError: I stay",
        "quits": "SystemExit: 3",
    }
    run(kernel, "assert good == [1, 2] and good is also")
    run(kernel, "import os; assert os.path.exists('x.txt')")


def test_what_was_running_is_named(start: Start) -> None:
    code = """
import asyncio, subprocess, threading
gate = threading.Event().wait
threading.Thread(target=gate, name="worker", daemon=True).start()
process = subprocess.Popen(["sleep", "600"])
async def wait(): await asyncio.sleep(600)
task = asyncio.create_task(wait(), name="waiter")
await asyncio.sleep(0)
"""
    kernel = start()
    run(kernel, code)
    pid = kernel.value("process.pid")
    _, answer = kernel.save()
    run(kernel, "process.kill(); process.wait();")
    lost = dict(answer["lost"])
    assert lost["thread worker"] == "a thread cannot be saved"
    assert lost[f"process {pid} (sleep)"] == "a running process cannot be saved"
    assert lost["task waiter"] == "a running task cannot be saved"
    assert lost["process"] == "a process that was started here"
    assert lost["task"] == "a task or future of an event loop"


def test_a_variable_that_cannot_be_loaded_costs_only_those_that_hold_it(
    start: Start, tmp_path: Path
) -> None:
    kernel = start()
    (kernel.folder / "gone.py").write_text(
        "class Thing:\n    pass\n"
        "class Fragile:\n    def __setstate__(self, state): check()\n"
        "    def __init__(self): self.x = 1\n"
        "def check(): import os; os.stat('present')\n"
        "class Picky(dict):\n    def __setitem__(self, k, v): check(); super().__setitem__(k, v)\n"
    )
    (kernel.folder / "present").touch()
    run(
        kernel,
        """
import gone, decimal
shared = [decimal.Decimal("1.5")]
fragile = gone.Fragile()
picky = gone.Picky(); picky["a"] = shared
first = {"thing": gone.Thing(), "number": shared, "name": "common text"}
class Mine(gone.Thing): pass
mine = Mine()
second = {"number": shared, "name": first["name"], "d": decimal.Decimal("2.5")}
holder = [first]
broken = [fragile, 1]
around = []; around.append(around)
def use(): return gone.Thing()
last = second
""",
    )
    saved, answer = kernel.save()
    assert answer["lost"] == []
    (kernel.folder / "present").unlink()
    after = start()
    loaded = after.load(saved)
    assert {name for name, _ in loaded["lost"]} == {"fragile", "picky", "broken[0]"}
    run(after, "assert first['number'] is shared and type(first['thing']) is gone.Thing")
    (kernel.folder / "gone.py").unlink()
    without = start()
    loaded = without.load(saved)
    lost = dict(loaded["lost"])
    whole = {"gone", "fragile", "picky", "Mine", "mine"}
    assert set(lost) == {*whole, "first['thing']", "holder[0]['thing']", "broken[0]"}
    assert all("No module named 'gone'" in why for why in lost.values())
    rest = ["first", "second", "holder", "broken", "around", "use", "last"]
    assert loaded["kept"] == ["decimal", "shared", *rest]
    run(without, "assert second['number'] is shared and last is second")
    run(without, "assert second == {'number': [decimal.Decimal('1.5')], 'name': 'common text', "
                 "'d': decimal.Decimal('2.5')}")  # fmt: skip


def of_another_python(saved: bytes) -> bytes:
    """The same state with another version in its header, and checksums to match."""
    made, checksum, at = saved[:21], 0, 21
    while at < len(saved):
        kind, size, _ = struct.unpack(">cII", saved[at : at + 9])
        payload = saved[at + 9 : at + 9 + size]
        at += 9 + size
        payload = re.sub(rb'"cpython", 3, \d+', b'"cpython", 3, 99', payload)
        checksum = zlib.crc32(payload, checksum)
        made += struct.pack(">cII", kind, len(payload), checksum) + payload
    return made


def test_code_of_another_python_is_not_run(start: Start) -> None:
    kernel = start()
    run(kernel, "def f(): return 1\nx = [1, 2]; g = [f]")
    saved, _ = kernel.save()
    loaded = start().load(of_another_python(saved))
    assert loaded["kept"] == ["x", "g"] and "g[0]" in dict(loaded["lost"])
    assert dict(loaded["lost"])["f"] == "it was compiled by another version of Python"


def test_surroundings_come_back(start: Start) -> None:
    code = """
import os, random, sys
os.makedirs("sub", exist_ok=True); os.chdir("sub"); sys.path.append("/tmp/added")
os.environ["ADDED"] = "1"; os.environ.pop("GONE", None)
random.seed(5); random.random()
def traced():
    raise ValueError("here")
"""
    kernel, _ = moved(lambda: start(environ={"GONE": "x"}), code, times=2)
    run(kernel, "import os, sys; assert os.getcwd().endswith('/sub')")
    run(kernel, "assert '/tmp/added' in sys.path and os.environ['ADDED'] == '1'")
    run(kernel, "assert 'GONE' not in os.environ")
    assert kernel.value("random.random()") == _second_of(5)
    run(kernel, "import inspect; assert 'raise ValueError' in inspect.getsource(traced)")
    failed = kernel.run("traced()").error
    assert failed is not None and 'raise ValueError("here")' in failed["traceback"]


def _second_of(seed: int) -> float:
    import random

    one = random.Random(seed)
    one.random()
    return one.random()


def test_a_directory_that_is_gone_is_named(start: Start) -> None:
    kernel = start()
    run(kernel, "import os; os.mkdir('sub'); os.chdir('sub'); x = 1")
    saved, _ = kernel.save()
    (kernel.folder / "sub").rmdir()
    loaded = start().load(saved)
    assert loaded["kept"] == ["os", "x"]
    assert loaded["lost"][0][0] == "directory"


def test_the_namespace_itself_can_be_a_variable(start: Start) -> None:
    kernel, _ = moved(start, "me = globals(); import __main__ as main; x = 1", times=2)
    run(kernel, "assert me is globals() and main.x == 1 and vars(main) is me")


def test_bytes_that_are_no_state_change_nothing(start: Start) -> None:
    kernel = start()
    run(kernel, "x = [1] * 1000; y = 'text'")
    saved, _ = kernel.save()
    after = start()
    run(after, "y = 'mine'")
    damaged = [
        b"", b"hutch", b"GIF89a" * 100, saved[:100], saved[:-1], saved[:-4] + b"0000",
        saved[:30] + b"\xff" + saved[31:], saved[:-100] + b"\x00" + saved[-99:],
        saved[:21] + b"\xff\xff\xff\xff" + saved[25:],
    ]  # fmt: skip
    for bad in damaged:
        loaded = after.load(bad)
        assert loaded["kept"] == []
        assert loaded["lost"][0][0] == "everything", loaded
    run(after, "assert y == 'mine' and 'x' not in globals()")
    assert after.load(saved)["lost"] == []


def test_without_cloudpickle_functions_are_named_as_lost(start: Start) -> None:
    kernel = start()
    (kernel.folder / "cloudpickle.py").write_text("raise ImportError")
    code = "import math; x = [1]; y = x\ndef f(): pass\nclass A: pass\na = A(); g = math.sin"
    run(kernel, code)
    saved, answer = kernel.save()
    assert answer["kept"] == ["math", "x", "y", "g"]
    assert {name for name, _ in answer["lost"]} == {"f", "A", "a"}
    assert all("defined in a cell" in why for _, why in answer["lost"])
    after = start()
    after.load(saved)
    run(after, "assert x is y and g is math.sin")


FRAMES = """
import numpy as np, pandas as pd
n = 10_000
df = pd.DataFrame({
    "f": np.random.rand(n), "s": [f"text {i}" for i in range(n)],
    "t": pd.date_range("2020", periods=n, freq="h", tz="Asia/Tokyo"),
    "c": pd.Categorical(["a", "b"] * (n // 2)), "I": pd.array([1, None] * (n // 2), dtype="Int64"),
    "o": pd.Series([{i} for i in range(n)], dtype=object),
}, index=pd.MultiIndex.from_product([range(n // 2), list("xy")], names=["i", "j"]))
part, other, series = df.iloc[:100], df, df["f"]
cow = df[["f"]]
"""


def test_objects_in_arrays_and_frames_are_looked_at_too(start: Start) -> None:
    kernel = start()
    (kernel.folder / "gone.py").write_text("class Thing: pass")
    run(kernel, """
import gone, numpy as np, pandas as pd
a = np.array([1, None, gone.Thing()], dtype=object)
cyclic = np.array([None, 2], dtype=object); cyclic[0] = cyclic
df = pd.DataFrame({"x": pd.Series([gone.Thing()] * 3, dtype=object)})
fine = pd.DataFrame({"x": pd.Series([{1}, "b"], dtype=object)})
klass = gone.Thing
""")  # fmt: skip
    saved, _ = kernel.save()
    (kernel.folder / "gone.py").unlink()
    after = start()
    loaded = after.load(saved)
    assert {name for name, _ in loaded["lost"]} == {"gone", "a", "df", "klass"}
    run(after, "assert cyclic[0] is cyclic and fine['x'].tolist() == [{1}, 'b']")


def test_frames_come_back_exactly(start: Start) -> None:
    kernel = start()
    run(kernel, FRAMES + "\nsum_before = float(df['f'].sum()); df.to_pickle('kept.pickle')")
    for _ in range(2):
        saved, _ = kernel.save()
        kernel = start()
        assert kernel.load(saved)["lost"] == []
        run(kernel, "kept = pd.read_pickle('kept.pickle')")
        run(kernel, "pd.testing.assert_frame_equal(df, kept, check_exact=True); assert other is df")
        run(kernel, "pd.testing.assert_frame_equal(part, kept.iloc[:100])")
        run(kernel, "assert float(series.sum()) == sum_before")
    run(
        kernel, "df.loc[(0, 'x'), 'f'] = -1.0; assert cow.iloc[0, 0] != -1 and series.iloc[0] != -1"
    )


def test_arrays_that_shared_memory_share_it_again(start: Start) -> None:
    code = """
import numpy as np
a = np.arange(100_000.0); v = a[10:20]; w = a.reshape(100, 1000).T; b = a
times = np.arange(1000).astype("M8[s]"); late = times[500:]
fortran = np.asfortranarray(np.random.rand(300, 400)); column = fortran[:, 3]
far = [np.arange(100_000)[:5]]
locked = a[50:60]; locked.flags.writeable = False
points = np.zeros(1000, dtype=[("x", "f8"), ("n", "i4")]); record = points.view(np.recarray)
"""
    kernel, _ = moved(start, code, times=2)
    run(kernel, "a[10] = -5; a[1] = -6; assert v[0] == -5 and w[1, 0] == -6 and a is b")
    run(kernel, "v[1] = -7; assert a[11] == -7")
    run(kernel, "late[0] = '2000-01-01'; assert str(times[500]).startswith('2000')")
    run(kernel, "column[7] = 9; assert fortran[7, 3] == 9 and fortran.flags.f_contiguous")
    run(kernel, "assert far[0].tolist() == [0, 1, 2, 3, 4] and not locked.flags.writeable")
    run(kernel, "a[50] = 8; assert locked[0] == 8")
    run(kernel, "record.x[3] = 4; assert points['x'][3] == 4 and type(record) is np.recarray")


def test_an_array_over_a_file_is_over_that_file_again(start: Start) -> None:
    code = """
import numpy as np
m = np.memmap("m.bin", dtype="f8", mode="w+", offset=16, shape=(300, 400), order="F")
m[:] = 1; m[7, 9] = 5
read = np.memmap("m.bin", dtype="u1", mode="r"); own = np.memmap("m.bin", dtype="u1", mode="c")
own[:] = 3
"""
    kernel, answer = moved(start, code, times=2)
    assert answer["lost"] == []
    run(kernel, "assert m[7, 9] == 5 and m.flags.f_contiguous and not read.flags.writeable")
    run(kernel, "m[0, 0] = 9; m.flush(); assert np.fromfile('m.bin', offset=16)[0] == 9")
    run(kernel, "assert (own == 3).all()")


def test_a_small_view_does_not_carry_its_large_base(start: Start) -> None:
    kernel = start()
    run(kernel, "import numpy as np; v = np.random.rand(2_000_000)[:5]; f = v.sum()")
    assert len(kernel.save()[0]) < 100_000


def test_numpy_chance_goes_on_where_it_was(start: Start) -> None:
    code = (
        "import numpy as np; np.random.seed(3); np.random.rand(10); rng = np.random.default_rng(1)"
    )
    kernel, _ = moved(start, code)
    run(kernel, "again = np.random.RandomState(3); again.rand(10)")
    run(kernel, "assert np.random.rand() == again.rand()")
    run(kernel, "assert rng.random() == np.random.default_rng(1).random()")


def test_what_sleeps_gently_can_be_saved_and_what_was_loaded_can_sleep(
    start: Start, tmp_path: Path
) -> None:
    with open(tmp_path / "swap", "w+b") as swap:
        options = {"swap": (swap.fileno(), 1 << 30)}
        kernel = start(**options)
        run(kernel, "import numpy as np; a = np.arange(2_000_000.0); total = float(a.sum())")
        assert kernel.ask("sleep", frame_bytes=10**6, array_bytes=10**6)["slept"] == ["a"]
        saved, _ = kernel.save()
        after = start(**options)
        after.load(saved)
        assert after.ask("sleep", frame_bytes=10**6, array_bytes=10**6)["slept"] == ["a"]
        run(after, "assert float(a.sum()) == total; a += 1; assert a[0] == 1")


def test_a_frame_of_100_megabytes_comes_back_as_it_was(start: Start) -> None:
    kernel = start()
    run(
        kernel, "import numpy as np, pandas as pd; df = pd.DataFrame(np.random.rand(1_250_000, 10))"
    )
    run(kernel, "total = pd.util.hash_pandas_object(df).sum()")
    saved, _ = kernel.save()
    after = start()
    assert after.load(saved)["kept"] == ["np", "pd", "df", "total"]
    run(after, "assert pd.util.hash_pandas_object(df).sum() == total")
