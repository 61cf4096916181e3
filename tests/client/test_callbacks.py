"""Code in a box calls functions of this process: in this process, and from a server."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from must_work import need

from daemon_of_tests import Daemon
from hutch import (
    AsyncSandbox,
    BackendUnavailable,
    InvalidRequest,
    NotFound,
    Sandbox,
    factory,
)
from hutch import operations as op
from hutch.types import CellError

KERNEL = "import sys; Calls = sys.modules['hutch_kernel.calls'].HostCalls\n"
CHANNEL = (
    "import gc; channel = next(o for o in gc.get_objects() if type(o).__name__ == 'Channel')\n"
)


@pytest.fixture(scope="module", params=["here", "at a server"])
def place(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == "here":
        return {}
    daemon: Daemon = request.getfixturevalue("daemon")
    return {"url": daemon.url, "api_key": daemon.key or ""}


@pytest.fixture(scope="module")
def box(place: dict[str, str]) -> Iterator[Sandbox]:
    try:
        made = Sandbox.create(**place)
    except BackendUnavailable as exc:
        need(factory.default(), str(exc))
    with made:
        yield made


def search(text: str, k: int = 1) -> list[str]:
    return [text.upper()] * k


# --- values -----------------------------------------------------------------------------


def test_code_calls_a_function_of_this_process_and_gets_its_answer(box):
    done = box.run_code("search('a', k=2) + search(text='é')", functions={"search": search})
    assert done.check().text == "['A', 'A', 'É']"


def test_what_json_has_survives_both_ways(box):
    heard: list[object] = []
    code = "x = [None, True, 1, -2.5, 10**30, 'ü\\n\\0', [], {'a': {'b': [1]}}]\necho(x) == x"
    done = box.run_code(code, functions={"echo": lambda x: heard.append(x) or x})
    assert done.check().text == "True"
    assert heard == [[None, True, 1, -2.5, 10**30, "ü\n\0", [], {"a": {"b": [1]}}]]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("echo({1, 2})", "TypeError"),
        ("echo(float('nan'))", "TypeError"),
        ("echo('x' * (5 << 20))", "ValueError"),
        ("x = []\nfor _ in range(40): x = [x]\necho(x)", "ValueError"),
    ],
)
def test_what_cannot_be_sent_is_refused_where_it_is_called(box, code, error):
    done = box.run_code(code, functions={"echo": lambda x: x})
    assert done.error is not None and done.error.name == error and done.died is None
    assert "JSON" in done.error.value or "nested" in done.error.value


class Trap(dict):
    def items(self):
        raise SystemExit


@pytest.mark.parametrize("answer", [{1}, float("inf"), object(), "x" * (5 << 20), Trap(a=1)])
def test_an_answer_that_cannot_be_sent_is_an_error_in_the_box(box, answer):
    done = box.run_code("give()", functions={"give": lambda: answer})
    assert done.error is not None and done.error.name in ("TypeError", "ValueError")


def test_arguments_and_answers_of_a_megabyte_arrive_whole(box):
    done = box.run_code("len(echo('é' * 1_000_000))", functions={"echo": lambda x: x + x})
    assert done.check().text == "2000000"


# --- errors -----------------------------------------------------------------------------


def test_an_exception_here_is_an_exception_there(box):
    class OutOfStock(Exception):
        pass

    def buy(what: str) -> None:
        raise {"a": ValueError("no a"), "b": OutOfStock("no b"), "c": KeyError("c")}[what]

    code = """
told = []
for what in "abc":
    try:
        buy(what)
    except (ValueError, KeyError) as exc:
        told.append(repr(exc))
    except Exception as exc:
        told.append((type(exc).__name__, str(exc)))
told
"""
    done = box.run_code(code, functions={"buy": buy})
    assert (
        done.check().text == """["ValueError('no a')", ('OutOfStock', 'no b'), "KeyError('c')"]"""
    )


def test_no_path_of_this_machine_goes_into_the_box(box):
    done = box.run_code("fail()", functions={"fail": lambda: 1 / 0})
    assert done.error is not None and done.error.name == "ZeroDivisionError"
    assert str(Path(__file__).parent) not in done.error.traceback


def test_wrong_arguments_are_a_type_error_there(box):
    done = box.run_code("search(1, 2, 3, 4)", functions={"search": search})
    assert done.error is not None and done.error.name == "TypeError"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


ODD_ENDS = [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit, Mute]
TOLD = "try:\n    end()\nexcept Exception as exc:\n    told = type(exc).__name__\ntold"


@pytest.mark.parametrize("kind", ODD_ENDS)
def test_a_function_that_ends_oddly_is_answered_all_the_same(box, kind):
    def end() -> None:
        raise kind

    assert (
        box.run_code(TOLD, functions={"end": end}, timeout=30).check().text == f"'{kind.__name__}'"
    )


def test_an_interrupt_of_the_user_reaches_them_while_a_function_runs(box):
    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    code = "interrupt()\nimport time; time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        box.run_code(code, functions={"interrupt": interrupt})
    assert box.run_code("search('i')", functions={"search": search}).text == "['I']"


def test_an_argument_may_have_any_name(box):
    names = {"self": 1, "name": 2, "args": 3, "function": 4, "callable": 5}
    done = box.run_code(f"take(**{names})", functions={"take": lambda **kwargs: kwargs})
    assert done.check().text == str(names)


# --- names ------------------------------------------------------------------------------


def test_a_name_goes_with_its_cell_and_gives_back_what_it_hid(box):
    box.run_code("search = 7\nkept = None", check=True)
    box.run_code("kept = search; search('x')", functions={"search": search}, check=True)
    assert box.run_code("search").text == "7"
    gone = box.run_code("kept('x')")
    assert gone.error is not None and "cannot be called" in gone.error.value
    assert box.run_code("kept('x')", functions={"search": search}).text == "['X']"
    box.run_code("del search, kept", check=True)
    assert box.run_code("search").error.name == "NameError"


def test_without_functions_there_is_no_way_to_call(box):
    asked = '{"id": 1, "name": "search", "args": [], "kwargs": {}}'
    forged = box.run_code(
        CHANNEL + f"channel.call({asked.encode()!r})\nimport time; time.sleep(60)"
    )
    assert forged.died is not None and "channel" in forged.died
    assert box.run_code("1 + 1").text == "2"


def test_a_forged_call_of_a_name_that_was_not_given_is_refused(box):
    reached: list[str] = []
    functions = {"search": search, "other": lambda: reached.append("other")}
    forged = KERNEL + "Calls.current._names |= {'other'}\nCalls.current.call('other', (), {})"
    done = box.run_code(forged, functions={"search": functions["search"]})
    assert done.error is not None and done.error.name == "NameError" and not reached


@pytest.mark.parametrize("name", ["not a name", "", "class", "a" * 300])
def test_a_name_is_one_of_python(box, name):
    with pytest.raises(InvalidRequest, match="name"):
        box.run_code("1", functions={name: search})


def test_an_answer_that_nobody_waits_for_is_refused(box):
    with pytest.raises(NotFound, match="no such call"):
        box._transport.perform(op.AnswerCall(box.id, "0123456789abcdef", 1))
    with pytest.raises(NotFound, match="no such call"):
        error = CellError("ValueError", "x")
        box._transport.perform(op.AnswerCall(box.id, "0123456789abcdef", None, error))


# --- several at once --------------------------------------------------------------------


def test_threads_of_a_cell_call_at_once(box):
    together = threading.Barrier(4, timeout=60)

    def meet(n: int) -> int:
        together.wait()
        return n

    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    met = list(pool.map(meet, range(4)))
met
"""
    assert box.run_code(code, functions={"meet": meet}).check().text == "[0, 1, 2, 3]"


def test_threads_that_call_all_the_time_never_disturb_each_other(box):
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    total = sum(pool.map(double, range(300)))
total
"""
    assert box.run_code(code, functions={"double": lambda n: 2 * n}).check().text == "89700"


def test_more_calls_than_may_be_out_at_once_wait_for_their_turn(box):
    code = "import asyncio\nsum(await asyncio.gather(*(double(n) for n in range(100))))"
    done = box.run_code(code, functions={"double": lambda n: 2 * n}, awaitable=True)
    assert done.check().text == "9900"


def test_awaited_calls_and_threads_share_one_cell(box):
    code = """
import asyncio
async def both():
    return await asyncio.gather(
        double(1), asyncio.to_thread(lambda: asyncio.run(_await(double(2)))), double(3)
    )
async def _await(call):
    return await call
await both()
"""
    done = box.run_code(code, functions={"double": lambda n: 2 * n}, awaitable=True)
    assert done.check().text == "[2, 4, 6]"


def test_a_function_may_use_the_box_that_calls_it(box):
    functions = {"ask": lambda text: box.shell.run(text).stdout}
    assert box.run_code("ask('echo hi')", functions=functions).check().text == "'hi\\n'"


def test_a_function_sees_the_context_variables_of_its_caller(box):
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who")
    who.set("me")
    assert box.run_code("who()", functions={"who": who.get}).check().text == "'me'"


def test_a_stream_answers_calls_while_it_is_read(box):
    with box.stream_code("print(search('x'))", functions={"search": search}) as stream:
        *printed, done = stream
    assert "".join(chunk.text for chunk in printed) == "['X']\n" and done.ok


# --- ends -------------------------------------------------------------------------------


def test_a_timeout_ends_a_call_and_the_kernel_stays(box):
    box.run_code("x = 5", check=True)
    over = threading.Event()
    done = box.run_code("wait()", functions={"wait": lambda: over.wait(60)}, timeout=0.3)
    over.set()
    assert done.timed_out and not done.killed
    assert box.run_code("x + search('y')[0].count('Y')", functions={"search": search}).text == "6"


def test_a_kernel_that_dies_in_a_call_ends_the_cell(box):
    code = "import os, threading\nthreading.Timer(0.1, os._exit, [3]).start()\nwait()"
    over = threading.Event()
    done = box.run_code(code, functions={"wait": lambda: over.wait(60)})
    over.set()
    assert done.died is not None
    assert box.run_code("search('z')", functions={"search": search}).text == "['Z']"


def test_a_thread_that_outlives_its_cell_is_told(box):
    code = """
import threading
told = []
def ask():
    try:
        wait()
    except Exception as exc:
        told.append(str(exc))
thread = threading.Thread(target=ask)
thread.start()
begin()
"""
    over = threading.Event()
    functions = {"wait": lambda: over.wait(60), "begin": lambda: None}
    box.run_code(code, functions=functions, check=True)
    over.set()
    assert box.run_code("thread.join(30); told").text == "['its cell is over']"


def test_a_process_that_a_cell_starts_cannot_call(box):
    code = """
import os
read, write = os.pipe()
if not os.fork():
    try:
        search("x")
    except Exception as exc:
        os.write(write, str(exc).encode())
    os._exit(0)
os.wait()
os.read(read, 1000)
"""
    done = box.run_code(code, functions={"search": search})
    assert "not by a process that it started" in (done.check().text or "")


# --- async ------------------------------------------------------------------------------


def test_async_functions_are_awaited_and_cancelled_with_their_cell(place):
    async def main() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def double(n: int) -> int:
            await asyncio.sleep(0)
            return 2 * n

        async def hang() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with await AsyncSandbox.create(**place) as box:
            done = await box.run_code("double(4)", functions={"double": double})
            assert done.check().text == "8"
            done = await box.run_code(
                "await double(5)", functions={"double": double}, awaitable=True
            )
            assert done.check().text == "10"
            run = asyncio.create_task(box.run_code("hang()", functions={"hang": hang}))
            await begun.wait()
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            assert cancelled.is_set()
            assert (await box.run_code("1")).text == "1"

    asyncio.run(main())


def test_an_async_function_needs_an_async_box(box):
    async def double(n: int) -> int:
        return 2 * n

    done = box.run_code("double(1)", functions={"double": double})
    assert done.error is not None and "AsyncSandbox" in done.error.value


def test_a_function_that_ends_oddly_leaves_the_event_loop_as_it_is(place):
    async def main() -> None:
        async with await AsyncSandbox.create(**place) as box:
            for kind in (*ODD_ENDS, asyncio.CancelledError):

                def end(kind: type[BaseException] = kind) -> None:
                    raise kind

                async def aend(kind: type[BaseException] = kind) -> None:
                    raise kind

                for function in (end, aend):
                    done = await box.run_code(TOLD, functions={"end": function}, timeout=30)
                    # A coroutine cannot raise StopIteration: Python makes another of it.
                    assert done.check().text in (f"'{kind.__name__}'", "'RuntimeError'")

            async def cancel() -> None:
                asyncio.current_task().cancel()
                await asyncio.sleep(0)

            done = await box.run_code(TOLD, functions={"end": cancel}, timeout=30)
            assert done.check().text == "'CancelledError'"

    asyncio.run(main())


def test_functions_that_hang_hold_up_neither_others_nor_the_end_of_the_program(place):
    over, ended = threading.Event(), []
    begun = threading.Barrier(31, timeout=60)  # more than the threads that asyncio would have

    def hang() -> None:
        begun.wait()
        over.wait(60)
        ended.append(1)

    code = (
        "import threading\nfor _ in range(30): threading.Thread(target=hang, daemon=True).start()"
    )

    async def main() -> None:
        async with await AsyncSandbox.create(**place) as box:
            functions = {"hang": hang, "begin": begun.wait}
            await box.run_code(f"{code}\nbegin()", functions=functions, check=True)
            done = await box.run_code("search('x')", functions={"search": search})
            assert done.check().text == "['X']"
            assert await asyncio.to_thread(lambda: 1) == 1

    try:
        asyncio.run(main())
        assert not ended
    finally:
        over.set()
