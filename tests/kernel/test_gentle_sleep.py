"""Large arrays and tables go to disk, and code that holds them cannot tell."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels_of_tests import Kernel

ROOM = 2 << 30
BEGIN = "import gc, numpy as np, pandas as pd"
CLEAR = "for _name in [n for n in globals() if not n.startswith('_')]: del globals()[_name]"
RESIDENT = """
def resident():
    lines = open("/proc/self/smaps_rollup").read().split()
    return int(lines[lines.index("Rss:") + 1]) * 1024
"""


class Sleeper:
    """A kernel that can sleep, and the file that it sleeps in."""

    def __init__(self, folder: Path, python: str, **options: Any) -> None:
        self.file = os.open(folder / "swap", os.O_RDWR | os.O_CREAT)
        os.unlink(folder / "swap")
        environ = {"ARROW_DEFAULT_MEMORY_POOL": "system", **options.pop("environ", {})}
        room = options.pop("room", ROOM)
        self.kernel = Kernel(folder, python, swap=(self.file, room), environ=environ, **options)

    def close(self) -> None:
        self.kernel.close()
        os.close(self.file)

    def run(self, code: str) -> None:
        ran = self.kernel.run(code)
        assert ran.error is None, ran.error["traceback"]

    def sleep(self, frame: int = 100_000, array: int = 100_000) -> dict[str, Any]:
        return self.kernel.ask("sleep", frame_bytes=frame, array_bytes=array)

    def slept(self) -> list[str]:
        answer = self.sleep()
        assert answer["awake"] == []
        names: list[str] = answer["slept"]
        return names

    def asleep(self) -> set[str]:
        return {one["name"] for one in self.kernel.ask("variables")["variables"] if one["asleep"]}

    def on_disk(self) -> int:
        return os.fstat(self.file).st_blocks * 512


@pytest.fixture(scope="module")
def shared(data_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sleeper]:
    one = Sleeper(tmp_path_factory.mktemp("sleeper"), data_python)
    yield one
    one.close()


@pytest.fixture
def sleeper(shared: Sleeper) -> Sleeper:
    shared.run(CLEAR)
    shared.run(BEGIN)
    return shared


@pytest.fixture
def alone(data_python: str, tmp_path: Path) -> Iterator[Sleeper]:
    one = Sleeper(tmp_path, data_python)
    one.run(BEGIN)
    yield one
    one.close()


def test_a_large_frame_gives_its_memory_back(sleeper: Sleeper) -> None:
    sleeper.run(RESIDENT)
    sleeper.run("before = resident(); df = pd.DataFrame(np.random.rand(6_250_000, 10))")
    sleeper.run("total = float(df.to_numpy().sum()); awake = resident()")
    answer = sleeper.sleep(20_000_000, 10_000_000)
    assert answer["slept"] == ["df"] and answer["awake"] == []
    assert answer["bytes"] > 499_000_000
    sleeper.run("asleep = resident()")
    assert sleeper.kernel.value("(awake - asleep) / (awake - before)") >= 0.95
    sleeper.run("assert float(df.to_numpy().sum()) == total")


COLUMNS = """
n = 50_000
rng = np.random.default_rng(1)
nan = np.full(n, np.nan); nan.view("uint64")[::2] |= 12345
df = pd.DataFrame({
    "z": np.arange(n, dtype="int64"), "i8": rng.integers(-100, 100, n).astype("int8"),
    "f": rng.random(n), "f32": rng.random(n).astype("float32"), "b": rng.random(n) > 0.5,
    "t": pd.date_range("2020-01-01", periods=n, freq="min", tz="Europe/Berlin"),
    "d": pd.to_timedelta(rng.integers(0, 10**9, n), unit="s"),
    "c": pd.Categorical.from_codes(rng.integers(0, 3, n), ["x", "y", "z"], ordered=True),
    "I": pd.array(np.where(rng.random(n) > 0.5, 1, None), dtype="Int64"),
    "s": pd.Series([f"text {i}" for i in range(n)], dtype="str"), "nan": nan,
    "a": pd.period_range("2020-01", periods=n, freq="D"),
})
"""


def test_every_kind_of_column_comes_back_as_it_was(sleeper: Sleeper) -> None:
    sleeper.run(COLUMNS)
    sleeper.run("import pickle; kept = pickle.dumps(df); bits = df['nan'].to_numpy().tobytes()")
    assert sleeper.slept() == ["nan", "df"]
    assert "df" in sleeper.asleep()
    sleeper.run("pd.testing.assert_frame_equal(df, pickle.loads(kept), check_exact=True)")
    sleeper.run("assert list(df.columns) == list(pickle.loads(kept).columns)")
    sleeper.run("assert df['nan'].to_numpy().tobytes() == bits")


@pytest.mark.parametrize(
    "index",
    [
        "pd.RangeIndex(5, 5 + 3 * n, 3)",
        "pd.date_range('2020', periods=n, freq='h')",
        "pd.MultiIndex.from_product([range(n // 4), list('abcd')], names=['k', 'l'])",
        "pd.Index(np.random.rand(n))",
        "pd.Index([f'row {i}' for i in range(n)])",
    ],
)
def test_every_kind_of_index_comes_back_as_it_was(sleeper: Sleeper, index: str) -> None:
    sleeper.run(f"n = 40_000; s = pd.Series(np.random.rand(n), index={index}, name='s')")
    sleeper.run("import pickle; kept = pickle.dumps(s)")
    assert sleeper.slept() == ["s"]
    sleeper.run("pd.testing.assert_series_equal(s, pickle.loads(kept), check_freq=True)")
    sleeper.run("assert type(s.index) is type(pickle.loads(kept).index)")
    sleeper.run("assert s.loc[s.index[7]] == s.iloc[7]")


@pytest.mark.parametrize(
    "array",
    [
        "np.asfortranarray(np.random.rand(500, 700))",
        "np.random.rand(500, 700)[::2, ::-3]",
        "np.zeros(300_000, dtype=[('x', 'f8'), ('name', 'S12')])",
        "np.broadcast_to(np.random.rand(200_000), (3, 200_000))",
        "np.arange(400_000, dtype='>i4')",
        "np.random.rand(300_000).astype('complex64').reshape(10, 20, 1500)",
        "np.ma.masked_greater(np.random.rand(300_000), 0.5)",
        "np.array(['ab', 'cde'] * 100_000)",
    ],
)
def test_every_kind_of_array_comes_back_as_it_was(sleeper: Sleeper, array: str) -> None:
    sleeper.run(f"a = {array}; import pickle; kept = a.copy(); flags = str(a.flags), a.strides")
    assert set(sleeper.slept()) == {"a", "kept"}
    sleeper.run("assert np.array_equal(a, kept) and a.dtype == kept.dtype")
    sleeper.run("assert (str(a.flags), a.strides) == flags")


def test_what_is_small_or_empty_stays(sleeper: Sleeper) -> None:
    sleeper.run("zero = np.array(5.0); none = np.empty((0, 7)); small = np.arange(100)")
    sleeper.run("df = pd.DataFrame({'a': []}); big = np.random.rand(1_000_000)")
    assert sleeper.slept() == ["big"]
    assert sleeper.sleep(10**9, 10**9) == {"slept": [], "bytes": 0, "awake": []}


def test_aliases_are_one_object_and_views_share_memory(sleeper: Sleeper) -> None:
    sleeper.run("a = np.arange(500_000); b = a; v = a[100_000:200_000]; w = a.reshape(500, 1000).T")
    assert sleeper.slept() == ["a", "b", "v", "w"]
    sleeper.run("v[0] = -1; w[0, 0] = -2; b[1] = -3")
    sleeper.run("assert a is b and v.base is a and (a[100_000], a[0], a[1]) == (-1, -2, -3)")
    assert sleeper.slept() == ["a", "b", "v", "w"]
    sleeper.run("assert (v[0], w[0, 0], b[1], a[499_999]) == (-1, -2, -3, 499_999)")


def test_it_is_found_wherever_it_is_held(sleeper: Sleeper) -> None:
    sleeper.run("""
def make():
    inner = np.random.rand(200_000)
    def total(): return float(inner.sum())
    return total
class Plain:
    shared = np.random.rand(200_000)
    def __init__(self): self.mine = pd.Series(np.random.rand(200_000))
class Slotted:
    __slots__ = ("data",)
def default(x=np.random.rand(200_000)): return float(x.sum())
def generate(x=np.random.rand(200_000)):
    local = x + 1
    yield float(local.sum())
    yield float(local.sum())
closure, plain, slotted, running = make(), Plain(), Slotted(), generate()
slotted.data = np.random.rand(200_000)
box = {"a": [(np.random.rand(200_000),)], "b": plain}
before = [closure(), float(plain.mine.sum()), float(Plain.shared.sum()), default(), next(running)]
before += [float(slotted.data.sum()), float(box["a"][0][0].sum())]
""")
    names = {"closure", "plain", "slotted", "box", "Plain", "default", "generate", "running"}
    assert names <= set(sleeper.slept())
    sleeper.run("""
after = [closure(), float(plain.mine.sum()), float(Plain.shared.sum()), default(), next(running)]
after += [float(slotted.data.sum()), float(globals()["box"]["a"][0][0].sum())]
assert before == after
assert [float(x.sum()) for x in [slotted.data] for _ in "ab"] == 2 * [float(slotted.data.sum())]
""")


def test_ten_times_is_as_good_as_once(sleeper: Sleeper) -> None:
    sleeper.run("df = pd.DataFrame(np.zeros((100_000, 5))); expected = df.copy()")
    for _ in range(10):
        assert sleeper.slept() == ["df", "expected"]
        sleeper.run("df.iloc[::1000, 2] += 1.5; expected.iloc[::1000, 2] += 1.5")
        sleeper.run("pd.testing.assert_frame_equal(df, expected)")
    sleeper.run("assert df.iloc[0, 2] == 15")


def test_what_was_only_read_is_not_written_again(alone: Sleeper) -> None:
    alone.run("a = np.random.rand(2_000_000); total = float(a.sum())")
    assert alone.slept() == ["a"]
    written = _written(alone.kernel.pid)
    alone.run("assert float(a.sum()) == total")
    assert alone.asleep() == set()
    assert alone.slept() == ["a"]
    assert alone.asleep() == {"a"}
    assert _written(alone.kernel.pid) - written < 100_000
    alone.run("assert float(a.sum()) == total")


def _written(pid: int) -> int:
    words = Path(f"/proc/{pid}/io").read_text().split()
    return int(words[words.index("wchar:") + 1])


def test_memory_that_nobody_touched_is_not_written(alone: Sleeper) -> None:
    alone.run("a = np.zeros(50_000_000); a[:1000] = 1; a[-1] = 2")
    alone.sleep()
    assert alone.on_disk() < 20_000_000
    alone.run("assert a.sum() == 1002 and a[-1] == 2")


def test_a_frame_that_is_freed_while_asleep_frees_its_space(alone: Sleeper) -> None:
    alone.run("a = np.random.rand(4_000_000); b = np.random.rand(500_000)")
    assert alone.slept() == ["a", "b"]
    assert alone.on_disk() > 35_000_000
    alone.run("del a; gc.collect(); total = float(b.sum())")
    assert alone.slept() == ["b"]
    assert alone.on_disk() < 6_000_000
    alone.run("assert float(b.sum()) == total")


def test_an_array_can_grow_and_shrink_after_it_slept(sleeper: Sleeper) -> None:
    sleeper.run("a = np.arange(2_000_000.0); b = a.copy(); c = bytearray(b'x' * 3_000_000)")
    assert sleeper.slept() == ["a", "b"]
    sleeper.run("a.resize(5_000_000, refcheck=False); b.resize(300_000, refcheck=False)")
    sleeper.run("assert a[1_999_999] == 1_999_999 and a[2_000_000:].sum() == 0")
    sleeper.run("assert np.array_equal(b, np.arange(300_000.0))")
    sleeper.run(
        "fresh = [np.zeros(2_000_000) for _ in range(20)]; assert not sum(map(np.any, fresh))"
    )


def test_new_memory_is_zero_where_something_slept(sleeper: Sleeper) -> None:
    """In the heap too, where what was freed is handed out again."""
    for size in (20_000, 100_000, 1_000_000, 3_000_000):
        sleeper.run(f"many = [np.full({size}, 7.0) for _ in range(20)]; del many[::2]")
        sleeper.sleep()
        sleeper.run("kept = many[3]; del many; gc.collect()")
        sleeper.run(
            f"new = [np.zeros({size}) for _ in range(30)]; assert not any(map(np.any, new))"
        )
        sleeper.run(f"assert (kept == 7).all() and len(kept) == {size}")


def test_memory_that_a_thread_asked_for_sleeps_too(alone: Sleeper) -> None:
    """Once something of its size was freed, a thread gets it from a heap of its own."""
    alone.run("""
import threading
big = np.ones(3_500_000); del big
kept = []
def work():
    for i in range(6): kept.append(np.full(300_000, float(i)))
thread = threading.Thread(target=work); thread.start(); thread.join(); del thread
""")
    assert alone.slept() == ["kept"]
    alone.run("assert all((a == i).all() for i, a in enumerate(kept)); del kept[::2]; gc.collect()")
    alone.run("thread = threading.Thread(target=work); thread.start(); thread.join()")
    alone.run("assert [a[0] for a in kept] == [1, 3, 5, 0, 1, 2, 3, 4, 5]")
    alone.run("def zeros(): kept[:] = [np.zeros(n * 1000) for n in range(1, 400)]")
    alone.run("thread = threading.Thread(target=zeros); thread.start(); thread.join()")
    alone.run("assert not any(map(np.any, kept))")


def test_a_forked_child_reads_what_sleeps_also_when_its_parent_goes_on(alone: Sleeper) -> None:
    alone.run("""
import os
a = np.arange(1_000_000.0)
""")
    assert alone.slept() == ["a"]
    alone.run("""
go, done = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    os.read(go[0], 1)
    os.write(done[1], str(float(a.sum())).encode())
    os._exit(0)
""")
    alone.run("expected = float(a.sum()); a[:] = 0; b = np.full(1_000_000, 3.0)")
    assert alone.slept() == ["a", "b"]
    alone.run("del b; a += 1")
    assert alone.slept() == ["a"]
    alone.run("os.write(go[1], b'x'); told = float(os.read(done[0], 100)); os.waitpid(pid, 0)")
    alone.run("assert told == expected, told")


def test_files_and_shared_memory_are_left_alone(sleeper: Sleeper) -> None:
    sleeper.run("""
import mmap, os, tempfile
from multiprocessing import shared_memory
path = os.path.join(tempfile.mkdtemp(), "m")
m = np.memmap(path, dtype="f8", mode="w+", shape=200_000); m[:] = 1
shm = shared_memory.SharedMemory(create=True, size=1_600_000)
s = np.ndarray(200_000, buffer=shm.buf); s[:] = 2
anonymous = mmap.mmap(-1, 1_600_000)
x = np.frombuffer(anonymous, dtype="f8")
""")
    answer = sleeper.sleep()
    assert answer["slept"] == []
    assert {name for name, _ in answer["awake"]} == {"m", "s", "x"}
    assert all("shared or of a file" in why for _, why in answer["awake"])
    sleeper.run("m[0] = 5; m.flush(); assert np.fromfile(path, dtype='f8')[0] == 5")
    sleeper.run("del s, x; shm.close(); shm.unlink()")
    sleeper.run("import shutil; shutil.rmtree(os.path.dirname(path))")


def test_a_full_disk_loses_nothing(data_python: str, tmp_path: Path) -> None:
    one = Sleeper(tmp_path, data_python)
    try:
        one.run(BEGIN + "; a = np.arange(2_000_000.0); b = np.arange(8_000_000.0); c = b * 2")
        limit = resource.RLIMIT_FSIZE
        resource.prlimit(one.kernel.pid, limit, (20 << 20, resource.RLIM_INFINITY))
        answer = one.sleep()
        assert answer["bytes"] <= 20 << 20
        assert all("disk is full" in why for _, why in answer["awake"])
        resource.prlimit(one.kernel.pid, limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        one.run("assert a[-1] == 1_999_999 and b[-1] == 7_999_999 and (c == b * 2).all()")
        assert one.slept() == ["a", "b", "c"]
        one.run("assert a[-1] == 1_999_999 and b[-1] == 7_999_999 and (c == b * 2).all()")
    finally:
        one.close()


def test_what_does_not_fit_stays_awake(data_python: str, tmp_path: Path) -> None:
    one = Sleeper(tmp_path, data_python, room=10 << 20)
    try:
        one.run(BEGIN + "; a = np.arange(1_000_000.0); b = np.arange(3_000_000.0)")
        answer = one.sleep()
        assert answer["bytes"] == 10 << 20
        assert "the swap space is full" in dict(answer["awake"]).values()
        assert one.on_disk() <= 10 << 20
        one.run("assert a.sum() == sum(range(1_000_000)) and b[-1] == 2_999_999")
    finally:
        one.close()


def test_nothing_sleeps_while_a_thread_runs(sleeper: Sleeper) -> None:
    sleeper.run("""
import threading, _thread
a = np.random.rand(500_000)
stop = threading.Event()
thread = threading.Thread(target=stop.wait); thread.start()
""")
    assert sleeper.sleep() == {"slept": [], "bytes": 0, "awake": [["a", "a thread is running"]]}
    sleeper.run("stop.set(); thread.join()")
    assert sleeper.slept() == ["a"]
    sleeper.run("gate = _thread.allocate_lock(); gate.acquire()")
    sleeper.run("_thread.start_new_thread(lambda: gate.acquire(), ())")
    assert sleeper.sleep()["slept"] == []
    sleeper.run("gate.release()")


def test_idle_workers_of_libraries_do_not_keep_it_awake(alone: Sleeper) -> None:
    alone.run("import os, pyarrow.compute as pc, pyarrow as pa")
    alone.run("m = np.random.rand(700, 700); total = float((m @ m).sum())")
    alone.run("pa.table({'x': np.random.rand(90_000), 'y': np.arange(90_000)}).sort_by('x');")
    assert alone.kernel.value("len(os.listdir('/proc/self/task'))") > 1
    deadline = time.monotonic() + 30  # they look for more work for a while before they wait for it
    while alone.sleep()["slept"] != ["m"]:
        assert time.monotonic() < deadline
    alone.run("assert float((m @ m).sum()) == total")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_a_kernel_that_changed_its_user_can_still_see_its_threads(alone: Sleeper) -> None:
    alone.run("import ctypes, os, pyarrow; a = np.ones(300_000); os.setgid(1000); os.setuid(1000)")
    assert alone.kernel.value("len(os.listdir('/proc/self/task'))") > 1
    assert alone.slept() == ["a"]
    alone.run("assert a.sum() == 300_000 and ctypes.CDLL(None).prctl(3) == 0")


def test_a_native_thread_that_may_wake_by_itself_keeps_all_awake(alone: Sleeper) -> None:
    alone.run("import faulthandler; faulthandler.dump_traceback_later(600); a = np.ones(300_000)")
    answer = alone.sleep()
    assert answer["slept"] == []
    assert answer["awake"][0][1].startswith("a native thread is running")
    alone.run("faulthandler.cancel_dump_traceback_later()")
    assert alone.slept() == ["a"]


def test_columns_of_python_objects_stay_and_are_named(sleeper: Sleeper) -> None:
    sleeper.run("df = pd.DataFrame({'f': np.random.rand(100_000)})")
    sleeper.run(
        "df['o'] = pd.Series([{i} for i in range(100_000)], dtype=object); kept = df.copy()"
    )
    answer = sleeper.sleep()
    assert answer["slept"] == ["df", "kept"]
    assert ["df", "column 'o' holds Python objects"] in answer["awake"]
    sleeper.run("assert df['o'].iloc[777] == {777}; pd.testing.assert_frame_equal(df, kept)")


def test_tables_of_arrow_and_sparse_matrices_sleep(sleeper: Sleeper) -> None:
    sleeper.run("""
import pyarrow as pa, scipy.sparse as sp
t = pa.table({"s": [f"text {i}" for i in range(200_000)], "n": list(range(200_000)),
              "l": [[i, i + 1] for i in range(200_000)],
              "d": pa.array(["a", "b"] * 100_000).dictionary_encode()})
m = sp.random(5_000, 5_000, density=0.01, format="csr", random_state=1)
copy, total = t.to_pydict(), float(m.sum())
""")
    assert sleeper.slept() == ["t", "m"]
    sleeper.run("assert t.to_pydict() == copy and float(m.sum()) == total; t.validate(full=True)")


def test_memory_of_other_allocators_is_left_alone(data_python: str, tmp_path: Path) -> None:
    one = Sleeper(tmp_path, data_python, environ={"ARROW_DEFAULT_MEMORY_POOL": "mimalloc"})
    try:
        one.run(BEGIN + "; import pyarrow as pa; t = pa.table({'n': pa.array(range(500_000))})")
        answer = one.sleep()
        assert answer["slept"] == []
        assert "not from the C library's allocator" in answer["awake"][0][1]
        one.run("assert t['n'].to_pylist() == list(range(500_000))")
    finally:
        one.close()


def test_a_waiting_request_ends_it_and_nothing_is_half_done(alone: Sleeper) -> None:
    alone.run("a = np.random.rand(40_000_000); total = float(a.sum())")
    alone.kernel._send(b"R", b'{"do": "sleep", "frame_bytes": 1000000, "array_bytes": 1000000}')
    alone.kernel._send(b"R", b'{"do": "run", "code": "again = float(a.sum())"}')
    _, answer = alone.kernel._receive(time.monotonic() + 60)
    assert ["a", "a request came in between"] in json.loads(answer)["awake"]
    assert alone.kernel.finish().error is None
    alone.run("assert again == total")
    assert alone.slept() == ["a"]
    alone.run("assert float(a.sum()) == total")


def test_a_signal_that_comes_meanwhile_is_handled_after(alone: Sleeper) -> None:
    alone.run("""
import signal
a = np.zeros(30_000_000); a += 1; seen = 0
def tick(*_):
    global seen
    seen += 1
    a[::1_000_000] += 1
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.01)
""")
    for _ in range(3):
        alone.sleep()
    alone.run("signal.setitimer(signal.ITIMER_REAL, 0); assert seen")
    alone.run("assert (a[::1_000_000] == 1 + seen).all() and a.sum() == 30_000_000 + 30 * seen")


def test_a_kernel_without_large_things_has_nothing_to_do(kernel: Kernel, tmp_path: Path) -> None:
    assert kernel.ask("sleep", frame_bytes=1, array_bytes=1) == {
        "slept": [],
        "bytes": 0,
        "awake": [],
    }


def test_user_code_that_closes_descriptors_costs_only_the_sleep(alone: Sleeper) -> None:
    alone.run("a = np.random.rand(1_000_000); total = float(a.sum())")
    assert alone.slept() == ["a"]
    alone.run("""
import os
for fd in range(3, 300):
    try:
        if "swap" in os.readlink(f"/proc/self/fd/{fd}"): os.close(fd)
    except OSError: pass
a += 1
""")
    answer = alone.sleep()
    assert answer["slept"] == [] and answer["awake"]
    alone.run("assert abs(float(a.sum()) - total - 1_000_000) < 1")
