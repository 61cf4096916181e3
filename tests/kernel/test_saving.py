"""A state is saved by a child of the kernel, which may fail, and the kernel is as it was."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels_of_tests import Kernel, KernelDied, processes_below

from hutch.kernel import pickling, state, surroundings

Start = Callable[..., Kernel]


@pytest.fixture(params=["exec", "fork"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts kernels that end with the test: exec'ed, and forked from a warm process."""
    made: list[Kernel] = []

    def one(**options: Any) -> Kernel:
        made.append(Kernel(tmp_path, forked=request.param == "fork", **options))
        return made[-1]

    yield one
    for kernel in made:
        kernel.close()


def run(kernel: Kernel, code: str) -> None:
    ran = kernel.run(code)
    assert ran.error is None, ran.error["traceback"]


def moved(start: Start, code: str, times: int = 1) -> tuple[Kernel, dict[str, Any]]:
    kernel = start()
    run(kernel, code)
    for _ in range(times):
        saved, answer = kernel.save()
        kernel = start()
        loaded = kernel.load(saved)
        assert set(loaded["kept"]) == set(answer["kept"]), "what is reported as kept is there"
        assert loaded["lost"] == answer["lost"]
    return kernel, loaded


def wait_for_end(pid: int) -> bool:
    """Whether it ends within a minute."""
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


IDIOMS = {
    "a __setstate__ that makes a lock": """
import threading
class Store:
    def __init__(self): self.lock, self.items = threading.Lock(), [1]
    def __getstate__(self): return {"items": self.items}
    def __setstate__(self, state): self.__dict__.update(state, lock=threading.Lock())
first = Store(); value = [first, first]
def check(): assert value[0] is value[1] is first and first.items == [1] and first.lock.acquire()
""",
    "a __hash__ that uses a module": """
import zlib
class Key:
    def __init__(self, text): self.text = text
    def __hash__(self): return zlib.crc32(self.text.encode())
    def __eq__(self, other): return self.text == other.text
value = {Key("a"): 1, Key("b"): 2}; keys = {Key("c")}
def check(): assert value[Key("a")] == 1 and Key("c") in keys
""",
    "a __setitem__ that uses a helper": """
class Caseless(dict):
    def __setitem__(self, key, value): super().__setitem__(fold(key), value)
value = Caseless()
def fold(key): return key.lower() + MARK
MARK = "!"
value["A"] = 1
def check(): assert value["a!!"] == 1
""",
    "a __reduce__ by a helper that uses another class": """
class Inner:
    def __init__(self, n): self.n = n
def make(n): return Outer(Inner(n))
class Outer:
    def __init__(self, inner): self.inner = inner
    def __reduce__(self): return make, (self.inner.n,)
value = (Outer(Inner(7)),)
def check(): assert type(value[0].inner) is Inner and value[0].inner.n == 7
""",
    "a __setstate__ that uses a value made later": """
class Unit:
    def __init__(self): self.n = 1
    def __setstate__(self, state): self.n = state["n"] * TABLE["factor"]
value = Unit(); both = [value]
class Holder: unit = value
TABLE = {"factor": 5}
def check(): assert value.n == 5 and both[0] is value is Holder.unit
""",
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_is_loaded_by_code_of_cells_comes_back(start: Start, idiom: str) -> None:
    kernel, answer = moved(start, IDIOMS[idiom])
    assert answer["lost"] == []
    run(kernel, "check()")


def test_code_that_loading_runs_finds_functions_and_classes_the_first_time(start: Start) -> None:
    code = """
class Value:
    def __getstate__(self): return {"n": 1}
    def __setstate__(self, state):
        open("loads", "a").write("x")
        self.parts = make(state["n"])
value = Value()
def make(n): return Part(n)
class Part:
    def __init__(self, n): self.n = n
"""
    kernel, answer = moved(start, code)
    assert answer["lost"] == []
    run(kernel, "assert value.parts.n == 1 and open('loads').read() == 'x'")


def test_one_bad_value_does_not_cost_its_container(start: Start) -> None:
    code = """
import threading, types, functools
class HasLock:
    shared = threading.Lock()
    def __init__(self): self.l, self.n = threading.Lock(), 5
class Slots:
    __slots__ = ("a", "f")
    def __init__(self): self.a, self.f = 1, open("x.txt", "w")
hl, slots = HasLock(), Slots()
d = {"k": [0, 1, 2, (x for x in "a")], "ok": [hl]}
def counter():
    lock = threading.Lock()
    def count(): return type(lock).__name__
    return count
count = counter()
event = threading.Event()
ok = d["ok"]
"""
    kernel, answer = moved(start, code)
    lost = dict(answer["lost"])
    assert lost["hl.l"] == lost["HasLock.shared"] == "a lock"
    assert lost["slots.f"] == "an open file (x.txt)"
    assert lost["d['k'][3]"] == "a generator in the middle of its work"
    assert lost["count (closure variable lock)"] == "a lock"
    assert lost["event"] == "a lock", "an object of a library is lost as a whole"
    run(kernel, "assert hl.n == 5 and d['k'][:3] == [0, 1, 2] and d['ok'] is ok and ok[0] is hl")
    run(kernel, "assert count() == 'Lost' and slots.a == 1")
    failed = kernel.run("with hl.l: pass").error
    assert failed and "hibernation could not keep what was here: a lock" in failed["value"]


def test_what_fails_to_load_does_not_cost_its_container_either(start: Start) -> None:
    kernel = start()
    (kernel.folder / "gone.py").write_text("class Thing: pass")
    run(kernel, "import gone\nl = [1, {'t': gone.Thing()}, 3]; m = l[1]\nclass A: t = l\na = A()")
    saved, _ = kernel.save()
    (kernel.folder / "gone.py").unlink()
    after = start()
    lost = dict(after.load(saved)["lost"])
    assert set(lost) >= {"gone", "l[1]['t']", "m['t']"}
    run(after, "assert l[0] == 1 and l[2] == 3 and l[1] is m and A.t is l")
    assert "not kept" in (after.run("m['t']").text or "")


def test_settings_come_back(start: Start) -> None:
    code = """
import decimal, logging, os, signal, sys, time, warnings
logging.getLogger("app").setLevel("DEBUG")
handler = logging.FileHandler("app.log"); handler.setLevel("ERROR")
handler.setFormatter(logging.Formatter("<%(message)s>"))
logging.getLogger("app").addHandler(handler)
seen = []
class Listing(logging.Handler):
    def emit(self, record): seen.append(record.getMessage())
logging.getLogger("app").addHandler(Listing())
logging.getLogger("app").error("one"); logging.getLogger("app").propagate = False
class Odd(UserWarning): pass
warnings.filterwarnings("error", category=Odd)
decimal.getcontext().prec = 7
sys.setrecursionlimit(4321)
def on_usr1(number, frame): seen.append("signal")
signal.signal(signal.SIGUSR1, on_usr1); signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.environ["TZ"] = "Asia/Tokyo"; time.tzset(); os.umask(0o027)
__version__ = "1.2"
x: int = 3
"""
    kernel, answer = moved(start, code, times=2)
    assert answer["lost"] == [] and {"__version__", "x"} <= set(answer["kept"])
    run(kernel, "app = logging.getLogger('app'); app.error('two'); app.handlers[0].flush()")
    run(kernel, "assert open('app.log').read() == '<one>\\n<two>\\n', open('app.log').read()")
    run(kernel, "assert seen == ['one', 'two'] and app.level == 10 and not app.propagate")
    run(kernel, "assert app.handlers[0] is handler and handler.level == 40")
    failed = kernel.run("warnings.warn('w', Odd)").error
    assert failed and failed["name"] == "Odd"
    run(kernel, "assert decimal.getcontext().prec == 7 and sys.getrecursionlimit() == 4321")
    run(kernel, "os.kill(os.getpid(), signal.SIGUSR1); assert seen[-1] == 'signal'")
    run(kernel, "assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN")
    run(kernel, "assert time.tzname == ('JST', 'JST') and os.umask(0) == 0o027")
    run(kernel, "assert __version__ == '1.2' and __annotations__ == {'x': int}")


def test_what_pickling_does_is_not_seen_in_the_kernel(start: Start) -> None:
    kernel = start()
    run(
        kernel,
        """
import os
counter = []
class Counts:
    def __reduce__(self):
        counter.append(1); os.environ["SEEN"] = "1"; os.chdir("/")
        return Counts, ()
c, before = Counts(), os.getcwd()
log = open("log.txt", "w"); log.write("once ")
""",
    )
    kernel.save()
    kernel.save()
    run(kernel, "assert counter == [] and 'SEEN' not in os.environ and os.getcwd() == before")
    run(kernel, "log.write('twice'); log.close(); assert open('log.txt').read() == 'once twice'")
    assert [*processes_below(kernel.pid)] == []


def test_pickling_that_never_ends_ends_with_its_time(start: Start) -> None:
    kernel = start()
    run(kernel, "class Endless:\n    def __reduce__(self):\n        while 1: pass\ne = Endless()")
    error = kernel.save_fails(patience=0.5)
    assert error["name"] == "NotSaved" and "too long" in error["value"]
    assert kernel.value("type(e).__name__") == "Endless"
    assert [*processes_below(kernel.pid)] == []


def test_a_save_that_is_given_up_ends_its_child(start: Start) -> None:
    kernel = start()
    run(kernel, "class Endless:\n    def __reduce__(self):\n        while 1: pass\ne = Endless()")
    error = kernel.save_fails(give_up=True)
    assert "cancelled" in error["value"] and kernel.value("1") == 1
    assert [*processes_below(kernel.pid)] == []


def test_a_child_does_not_outlive_its_kernel(start: Start, tmp_path: Path) -> None:
    kernel = start()
    code = f"""
import os, signal, time
class Orphan:
    def __reduce__(self):
        open({str(tmp_path / "child")!r}, "w").write(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
        while 1: time.sleep(1)
orphan = Orphan()
"""
    run(kernel, code)
    with pytest.raises(KernelDied):
        kernel.save()
    assert wait_for_end(int((tmp_path / "child").read_text()))


def test_a_child_that_is_killed_costs_nothing(start: Start) -> None:
    kernel = start()
    code = "import os, signal\nclass Dies:\n    def __reduce__(self): os.kill(os.getpid(), 9)\n"
    run(kernel, code + "d = Dies(); x = 1")
    error = kernel.save_fails()
    assert error["name"] == "NotSaved" and "too little free memory" in error["value"]
    assert kernel.value("x") == 1


FORKS = """
import os, signal, time
class Forks:
    def __reduce__(self):
        if not os.fork():
            {first}
            open("forked", "a").write(f"{{os.getpid()}}\\n")
            time.sleep(10_000)
        while not os.path.exists("forked"): time.sleep(0.01)
        {last}
        return Forks, ()
f, x = Forks(), 1
"""


def forked(kernel: Kernel) -> list[int]:
    return [int(line) for line in (kernel.folder / "forked").read_text().split()]


def test_the_process_that_saves_is_the_first_to_go_when_memory_runs_out(start: Start) -> None:
    code = """
def score(): return int(open("/proc/self/oom_score_adj").read())
class Seen:
    def __init__(self, score): self.score = score
    def __reduce__(self): return Seen, (score(),)
before, seen = score(), Seen(None)
"""
    kernel, _ = moved(start, code)
    run(kernel, "assert seen.score == 1000 and before == score() < 1000, (seen.score, before)")


def test_a_process_forked_while_pickling_does_not_delay_the_save_and_ends_with_it(
    start: Start,
) -> None:
    kernel = start()
    run(kernel, FORKS.format(first="pass", last="pass"))
    saved, answer = kernel.save()
    assert answer["size"] == len(saved) and set(answer["kept"]) >= {"f", "x"}
    for pid in forked(kernel):
        assert wait_for_end(pid)


def test_a_process_that_hides_from_the_saver_does_not_delay_the_save(start: Start) -> None:
    kernel = start()
    run(kernel, FORKS.format(first="os.setsid()", last="pass"))
    try:
        saved, answer = kernel.save()
        assert answer["size"] == len(saved) and set(answer["kept"]) >= {"f", "x"}
    finally:
        for pid in forked(kernel):
            os.kill(pid, signal.SIGKILL)


def test_the_end_of_the_saver_is_noticed_though_a_fork_of_it_holds_the_pipe(start: Start) -> None:
    kernel = start()
    run(kernel, FORKS.format(first="pass", last="os.kill(os.getpid(), signal.SIGKILL)"))
    assert "was killed" in kernel.save_fails()["value"]
    for pid in forked(kernel):
        assert wait_for_end(pid)
    assert kernel.value("x") == 1


def test_a_fork_that_goes_on_pickling_is_no_second_saver(start: Start) -> None:
    code = "import os\nclass Twins:\n    def __reduce__(self): os.fork(); return Twins, ()\n"
    kernel, _ = moved(start, code + "t, x = Twins(), list(range(100_000))")
    assert kernel.value("[type(t).__name__, sum(x)]") == ["Twins", 4999950000]


def test_where_no_process_can_be_started_it_says_so(start: Start) -> None:
    kernel = start()
    run(kernel, "x = 1\nimport os\ndef no(): raise BlockingIOError(11, 'no')\nreal = os.fork")
    run(kernel, "os.fork = no")
    error = kernel.save_fails()
    assert "no process could be started" in error["value"]
    run(kernel, "os.fork = real")
    assert "x" in kernel.save()[1]["kept"]


def test_saving_takes_little_memory_beside_what_is_saved(start: Start) -> None:
    kernel = start()
    size = 40_000_000
    run(kernel, f"""
import resource
class Peak:
    def __reduce__(self):
        status = open("/proc/self/status").read()
        kept = int(status.partition("VmData:")[2].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (kept + 30_000_000, -1))
        return Peak, ()
first = Peak()  # comes first, so that all the rest has no more room than this
texts = [chr(97 + i) * {size} for i in range(2)] + ["ü" * ({size} // 2)]
raw = b"x" * {size}
""")  # fmt: skip
    saved, answer = kernel.save()
    assert {"texts", "raw"} <= set(answer["kept"])
    run(kernel, "del texts, raw, first")
    after = start()
    after.load(saved)
    run(after, f"assert [len(t) for t in texts] == [{size}] * 2 + [{size} // 2]")
    run(after, f"assert texts[2] == 'ü' * ({size} // 2) and raw == b'x' * {size}")


def test_much_that_is_small_is_not_collected_before_it_is_written(start: Start) -> None:
    kernel = start()
    run(kernel, """
import resource
class Peak:
    def __reduce__(self):
        status = open("/proc/self/status").read()
        kept = int(status.partition("VmData:")[2].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (kept + 60_000_000, -1))
        return Peak, ()
first = Peak()
blocks = [bytes(20_000) for _ in range(6000)]
""")  # fmt: skip
    assert "blocks" in kernel.save()[1]["kept"]


class Small:
    def __init__(self, number: int) -> None:
        self.number = number


SMALL: dict[str, Callable[[int], object]] = {
    "objects": lambda count: [Small(number) for number in range(count)],
    "dicts": lambda count: [{"a": number, "b": str(number)} for number in range(count)],
    "tuples": lambda count: {str(number): (number, [number]) for number in range(count)},
}


@pytest.mark.parametrize(("beside", "most"), [({}, 1.1), ({"lock": threading.Lock()}, 3.1)])
@pytest.mark.parametrize("kind", SMALL)
def test_a_small_object_costs_one_call_of_python_for_each_time_it_is_tried(
    kind: str, beside: dict[str, object], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million of them are saved in seconds, also beside a value that cannot be saved."""
    # As in a kernel that is full of them: no text is worth looking for.
    monkeypatch.setattr(pickling, "AVERAGE_BLOCK", 1 << 30)
    monkeypatch.setattr(surroundings, "settings", dict)  # those of pytest cannot be saved

    def calls(count: int) -> int:
        made = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event == "call"

        around = surroundings.gather()
        values = {"values": SMALL[kind](count), **beside}
        sys.setprofile(note)
        try:
            state.save(values, lambda data: None, {}, around, [])
        finally:
            sys.setprofile(None)
        return made

    calls(1)  # imports
    assert calls(5000) - calls(1000) < 4000 * most


def test_long_texts_made_while_pickling_do_not_replace_each_other(start: Start) -> None:
    code = """
class Log:
    def __init__(self): self.lines = []
    def append(self, line): self.lines.append(line)
    def extend(self, lines): self.lines.extend(lines)
    def __reduce__(self): return Log, (), None, (chr(97 + i) * 600_000 for i in range(6))
log = Log()
more = [b"%016384d" % i for i in range(2_500)]  # too much for the first pass to remember
"""
    kernel, loaded = moved(start, code)
    assert loaded["lost"] == []
    run(kernel, "assert [line[:1] for line in log.lines] == list('abcdef')")


def test_a_thread_in_the_kernel_does_not_keep_it_from_being_saved(start: Start) -> None:
    code = """
import threading, time
stop, ticks = threading.Event(), []
def tick():
    while not stop.wait(0.001): ticks.append(1)
thread = threading.Thread(target=tick, name="ticks"); thread.start()
x = 1
"""
    kernel = start()
    run(kernel, code)
    _, answer = kernel.save()
    assert "x" in answer["kept"] and "thread ticks" in dict(answer["lost"])
    run(kernel, "n = len(ticks)\nwhile len(ticks) == n: time.sleep(0.01)\nstop.set()")


def test_a_state_of_the_version_before_is_loaded(start: Start) -> None:
    kernel = start()
    loaded = kernel.load((Path(__file__).parent / "state-1.bin").read_bytes())
    if sys.version_info[:2] == (3, 11):
        assert loaded["lost"] == [], loaded
        run(kernel, "assert first.lock.acquire() and both[0] is first and Store.kind == 'store'")
        run(kernel, "assert twice(21) == 42 and rows == list(range(100))")
    else:
        assert "rows" in loaded["kept"] and dict(loaded["lost"])["twice"]
