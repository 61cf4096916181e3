"""Python in a box, as a caller sees it: cells, results, errors, contexts."""

from __future__ import annotations

import asyncio
import base64
import threading
import time

import pytest

from hutch import (
    AsyncSandbox,
    BoxLost,
    CellResult,
    Chunk,
    CommandFailed,
    Conflict,
    Execution,
    InvalidRequest,
    NotFound,
    Sandbox,
    TimedOut,
)

pytestmark = pytest.mark.usefixtures("shared_box")  # which skips where there can be none


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def begun(box: Sandbox, code: str, **options) -> tuple[threading.Thread, list[Execution]]:
    """A cell that runs by now: the code waits for nothing before it has made a file."""
    done: list[Execution] = []
    mark = f"/tmp/begun-{time.monotonic_ns()}"
    code = f"open({mark!r}, 'w').close()\n{code}"
    run = threading.Thread(target=lambda: done.append(box.run_code(code, **options)))
    run.start()
    wait_for(lambda: box.files.exists(mark))
    return run, done


# --- cells ------------------------------------------------------------------------------


def test_variables_imports_and_functions_stay_from_cell_to_cell(shared_box):
    run = shared_box.run_code
    assert run("import math\nx = 20\ndef double(n): return 2 * n").ok
    assert run("double(x) + math.floor(2.9)").text == "42"
    assert run("x = 1; x").text == "1"
    assert run("class A: y = x\nA().y").text == "1"


def test_an_execution_has_everything(shared_box):
    before = shared_box.run_code("1").execution_count
    done = shared_box.run_code("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (done.text, done.logs.stdout, done.logs.stderr) == ("42", "out\n", "err\n")
    assert done.execution_count == before + 1 and done.total_bytes == 8
    assert done.ok and done.error is None and done.died is None
    assert not (done.timed_out or done.killed or done.restarted or done.truncated or done.oom)
    (result,) = done.results
    assert result.is_main and result.formats() == ("text",)


def test_a_cell_without_a_value_has_no_text(shared_box):
    assert shared_box.run_code("x = 1").text is None
    assert shared_box.run_code("None").text is None
    assert shared_box.run_code("").ok


@pytest.mark.parametrize("code", [b"1", 1, None, ["1"]])
def test_code_is_text(shared_box, code):
    with pytest.raises(InvalidRequest, match="text"):
        shared_box.run_code(code)


def test_code_may_be_long_and_have_any_character(shared_box):
    text = "é🙂\\" * 1_000_000
    assert shared_box.run_code(f"s = {text!r}\nlen(s)").text == "3000000"
    with pytest.raises(InvalidRequest, match="16 MiB"):
        shared_box.run_code("#" * (17 << 20))


def test_an_error_is_a_result_that_shows_the_users_line(shared_box):
    done = shared_box.run_code("def f():\n    return 1 / 0\n\nprint('so far')\nf()")
    assert (done.error.name, done.error.value) == ("ZeroDivisionError", "division by zero")
    assert "return 1 / 0" in done.error.traceback and "hutch" not in done.error.traceback
    assert done.logs.stdout == "so far\n" and not done.ok and done.died is None
    assert shared_box.run_code("1 +").error.name == "SyntaxError"


def test_check_turns_a_bad_cell_into_an_error_that_has_it(shared_box):
    assert shared_box.run_code("1", check=True).ok
    with pytest.raises(CommandFailed, match="ValueError: oh no") as failed:
        shared_box.run_code("print('so far')\nraise ValueError('oh no')", check=True)
    assert failed.value.execution.logs.stdout == "so far\n"
    with pytest.raises(TimedOut) as late:
        shared_box.run_code("import time; time.sleep(100)", timeout=0.3, check=True)
    assert late.value.execution.timed_out


def test_results_come_in_every_form_that_they_have(shared_box):
    done = shared_box.run_code(
        "class Thing:\n"
        "    def __repr__(self): return 'thing'\n"
        "    def _repr_html_(self): return '<b>thing</b>'\n"
        "    def _repr_png_(self): return b'\\x89PNG'\n"
        "    def _repr_mimebundle_(self, **_): return {'application/x-odd': 'odd'}\n"
        "display(Thing())\n"
        "Thing()"
    )
    shown, main = done.results
    assert not shown.is_main and main.is_main
    for result in (shown, main):
        assert (result.text, result.extra.get("application/x-odd")) == ("thing", "odd")
    class_ = "class T:\n    def _repr_png_(self): return b'\\x89PNG'\nT()"
    (picture,) = shared_box.run_code(class_).results
    assert base64.b64decode(picture.png) == picture.bytes_of("png") == b"\x89PNG"
    with pytest.raises(InvalidRequest, match="no pdf"):
        picture.bytes_of("pdf")


def test_callbacks_hear_everything_in_the_order_it_was_made(shared_box):
    heard: list[str] = []
    done = shared_box.run_code(
        "for n in range(3):\n    print('line', n)\n    display(n)\n'end'",
        on_stdout=heard.append,
        on_stderr=heard.append,
        on_result=lambda result: heard.append(result.text),
    )
    assert heard == ["line 0\n", "0", "line 1\n", "1", "line 2\n", "2", "'end'"]
    assert [result.text for result in done.results] == ["0", "1", "2", "'end'"]


@pytest.mark.namespaces("a container has no disk to sleep on: what it may write to is memory")
def test_an_idle_kernel_sleeps_by_the_sizes_that_were_asked_for():
    with Sandbox.create(
        image="data", memory="1g", idle_hibernate=0.5, hibernate_array_bytes=1_000_000
    ) as box:
        box.run_code("import numpy as np\nlarge = np.arange(500_000.0)\nsmall = np.arange(9.0)")

        wait_for(lambda: any(v.asleep for v in box.variables()))  # looking keeps none awake
        assert {v.name: v.asleep for v in box.variables()} == {"large": True, "small": False}
        assert box.run_code("float(large.sum() + small.sum())").text == "124999750036.0"


def test_output_arrives_while_the_cell_runs(shared_box):
    heard: list[str] = []
    code = (
        "import os, time\nprint('first')\n"
        "while not os.path.exists('/tmp/go'): time.sleep(0.01)\nprint('last')"
    )
    run = threading.Thread(target=shared_box.run_code, args=(code,),
                           kwargs={"on_stdout": heard.append})  # fmt: skip
    run.start()
    wait_for(lambda: heard == ["first\n"])
    shared_box.files.write("/tmp/go", "")
    run.join(30)
    assert heard == ["first\n", "last\n"]


def test_a_stream_gives_chunks_and_results_and_then_the_execution(shared_box):
    *items, done = shared_box.stream_code("print('a')\ndisplay(1)\n2")
    assert [type(item) for item in items] == [Chunk, CellResult, CellResult]
    assert isinstance(done, Execution) and done.text == "2"


def test_leaving_a_stream_early_interrupts_the_cell_and_keeps_its_variables(shared_box):
    shared_box.run_code("kept = 7")
    with shared_box.stream_code("print('go')\nimport time\ntime.sleep(1000)") as stream:
        assert next(stream).text == "go\n"
    done = shared_box.run_code("kept", timeout=30)
    assert done.text == "7" and not done.restarted and done.logs.stdout == ""


def test_output_of_subprocesses_and_of_c_is_output(shared_box):
    done = shared_box.run_code(
        "import os, subprocess, ctypes\n"
        "os.system('echo from a shell'); subprocess.run(['sh', '-c', 'echo to stderr >&2'])\n"
        "os.write(1, b'from a system call\\n'); None"
    )
    assert done.logs.stdout == "from a shell\nfrom a system call\n"
    assert done.logs.stderr == "to stderr\n"


def test_long_output_is_clipped_and_never_lost(shared_box):
    done = shared_box.run_code("for n in range(400_000): print(n + 1)")
    assert done.truncated and done.total_bytes == 2_688_895
    assert done.logs.stdout.startswith("1\n2\n") and done.logs.stdout.endswith("400000\n")
    piece = shared_box.read_output(done.kept, 1_000_000, 100)
    assert piece.start == 1_000_000 and len(piece.data) == 100


def test_a_result_that_is_too_large_is_kept_in_a_file_and_named(shared_box):
    code = "class H:\n    def _repr_html_(self): return 'x' * 9_000_000\nH()"
    (result,) = shared_box.run_code(code).results
    assert result.html is None
    assert shared_box.files.stat(result.files["html"]).size == 9_000_000


def test_results_of_one_cell_are_bounded_in_number(shared_box):
    done = shared_box.run_code("for n in range(10_050): display(n)")
    assert len(done.results) == 10_000
    assert "more results not sent" in done.results[-1].text
    assert shared_box.run_code("1").text == "1"


# --- time -------------------------------------------------------------------------------


def test_a_timeout_interrupts_first_and_keeps_the_variables(shared_box):
    shared_box.run_code("kept = 'still here'")
    done = shared_box.run_code("print('so far')\nwhile True: pass", timeout=3)
    assert done.timed_out and not done.killed and done.died is None
    assert done.error.name == "KeyboardInterrupt" and done.logs.stdout == "so far\n"
    after = shared_box.run_code("kept")
    assert after.text == "'still here'" and not after.restarted


def test_a_timeout_kills_what_does_not_let_itself_be_interrupted(box):
    box.run_code("gone = 1")
    stubborn = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('so far')"
    done = box.run_code(f"{stubborn}\ntime.sleep(1000)", timeout=3)
    assert done.timed_out and done.killed and "killed" in done.died
    assert done.error.name == "KernelDied" and done.logs.stdout == "so far\n"
    after = box.run_code("gone")
    assert after.restarted and after.error.name == "NameError"
    assert not box.run_code("1").restarted


def test_a_timeout_ends_what_the_cell_started_and_nothing_else(box):
    box.run_code("import subprocess\nearlier = subprocess.Popen(['sleep', '1000'])")
    done = box.run_code("import os\nos.system('trap \"\" INT; sleep 1001')", timeout=0.5)
    assert done.timed_out and not done.killed
    assert box.run_code("earlier.poll() is None").text == "True"
    assert "1001" not in box.commands.run("ps ax").stdout


def test_interrupt_stops_a_cell_and_keeps_the_variables(shared_box):
    shared_box.run_code("kept = 3")
    run, done = begun(shared_box, "import time\ntime.sleep(1000)")
    assert shared_box.interrupt() is True
    run.join(30)
    assert done[0].error.name == "KeyboardInterrupt" and done[0].interrupted
    assert not done[0].timed_out and shared_box.run_code("kept").text == "3"
    assert shared_box.interrupt() is False


def test_a_cell_that_waits_for_its_turn_can_time_out(shared_box):
    wait = "import os, time\nwhile not os.path.exists('/tmp/turn'): time.sleep(0.01)\n'first'"
    run, done = begun(shared_box, wait)
    late = shared_box.run_code("'second'", timeout=0.3)
    assert late.timed_out and late.text is None and "busy" in late.logs.stderr
    shared_box.files.write("/tmp/turn", "")
    run.join(30)
    assert done[0].text == "'first'"


def test_cells_of_one_context_queue_in_order(shared_box):
    run, done = begun(shared_box, "import time\ntime.sleep(0.5)\norder = [1]")
    assert shared_box.run_code("order.append(2); order").text == "[1, 2]"
    run.join(30)
    assert done[0].ok


def test_a_cancelled_cell_is_interrupted():
    async def main() -> None:
        async with await AsyncSandbox.create() as box:
            await box.run_code("kept = 5")
            task = asyncio.create_task(box.run_code("import time\ntime.sleep(1000)"))
            while not (await box.list_code_contexts())[0].busy:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            done = await box.run_code("kept", timeout=30)
            assert done.text == "5" and not done.restarted

    asyncio.run(asyncio.wait_for(main(), 60))


def test_closing_a_box_ends_the_cell_that_runs():
    with Sandbox.create() as box:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                box.run_code("print('go')\nimport time\ntime.sleep(1000)", on_stdout=go.append)
            except BoxLost as exc:
                failed.append(exc)

        go: list[str] = []
        thread = threading.Thread(target=run)
        thread.start()
        wait_for(lambda: bool(go))
    thread.join(30)
    assert failed
    with pytest.raises(BoxLost):
        box.run_code("1")


# --- contexts ---------------------------------------------------------------------------


def test_contexts_are_apart(shared_box):
    one = shared_box.create_code_context("one", cwd="/tmp", env={"A": "1"})
    two = shared_box.create_code_context()
    assert (one.id, one.cwd, one.busy, one.execution_count) == ("one", "/tmp", False, 0)
    shared_box.run_code("x = 'main'")
    shared_box.run_code("x = 'one'", context=one)
    assert shared_box.run_code("'x' in globals()", context=two).text == "False"
    assert shared_box.run_code("x", context="one").text == "'one'"
    assert shared_box.run_code("x").text == "'main'"
    assert shared_box.run_code("import os; os.getcwd(), os.environ['A']", context=one).text == (
        "('/tmp', '1')"
    )
    listed = {context.id: context for context in shared_box.list_code_contexts()}
    assert listed.keys() >= {"main", "one", two.id} and listed["one"].execution_count == 3
    assert listed["one"].pid == int(shared_box.run_code("os.getpid()", context=one).text)
    with pytest.raises(Conflict):
        shared_box.create_code_context("one")
    shared_box.remove_code_context(one)
    shared_box.remove_code_context(two)
    with pytest.raises(NotFound):
        shared_box.run_code("1", context="one")


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65, "é", "-x"])
def test_a_context_has_a_plain_name(shared_box, name):
    with pytest.raises(InvalidRequest):
        shared_box.create_code_context(name)


def test_a_context_needs_a_folder_that_is_there(shared_box):
    with pytest.raises(NotFound, match="no such folder"):
        shared_box.create_code_context("nowhere", cwd="/no/such")
    assert "nowhere" not in [context.id for context in shared_box.list_code_contexts()]


def test_two_contexts_run_at_once(shared_box):
    other = shared_box.create_code_context("other")
    code = (
        "import os, time\nopen('/tmp/{me}', 'w').close()\n"
        "while not os.path.exists('/tmp/{other}'): time.sleep(0.01)"
    )
    run = threading.Thread(
        target=shared_box.run_code, args=(code.format(me="ping", other="pong"),),
        kwargs={"context": other, "timeout": 30},
    )  # fmt: skip
    run.start()
    assert shared_box.run_code(code.format(me="pong", other="ping"), timeout=30).ok
    run.join(30)
    shared_box.remove_code_context("other")


def test_a_restart_is_a_fresh_kernel_and_says_nothing_of_a_death(box):
    first = box.run_code("x = 1; import os; os.getpid()").text
    context = box.restart_code_context()
    assert str(context.pid) != first and context.execution_count == 0
    after = box.run_code("x")
    assert after.error.name == "NameError" and not after.restarted and after.execution_count == 1


def test_a_restart_ends_the_cell_that_runs(box):
    run, done = begun(box, "import time\ntime.sleep(1000)")
    box.restart_code_context()
    run.join(30)
    assert done[0].died == "was restarted" and not done[0].timed_out
    assert box.run_code("1").text == "1"


def test_a_restart_does_not_wait_for_somebody_who_does_not_read(box):
    with box.stream_code("print('x' * 9_000_000)") as stream:
        next(stream)
        box.restart_code_context()
        assert [item for item in stream][-1].died == "was restarted"
    assert box.run_code("1").text == "1"


def test_a_context_that_is_removed_takes_its_children_along(box):
    box.create_code_context("gone")
    box.run_code("import subprocess\nsubprocess.Popen(['sleep', '1002'])", context="gone")
    assert "1002" in box.commands.run("ps ax").stdout
    box.remove_code_context("gone")
    assert "1002" not in box.commands.run("ps ax").stdout
    with pytest.raises(NotFound):
        box.remove_code_context("gone")


def test_a_box_has_only_so_many_contexts(box):
    with pytest.raises(Exception, match="32 contexts"):
        for _ in range(40):
            box.create_code_context()
    assert len(box.list_code_contexts()) == 32


def test_variables_are_described(shared_box):
    shared_box.restart_code_context()
    assert shared_box.variables() == []
    shared_box.run_code("number = 3; words = ['a', 'b']; _hidden = 1; import os")
    found = {variable.name: variable for variable in shared_box.variables()}
    assert found["number"].type == "int" and found["number"].preview == "3"
    assert (found["words"].type, found["words"].length) == ("list", 2)
    assert "os" not in found and found["words"].bytes > 0 and not found["words"].asleep


def test_nothing_of_a_kernel_is_left_when_its_box_goes(box):
    box.run_code("import os; os.system('sleep 1003 & echo started')")
    inside = box.commands.run("ps ax").stdout
    assert "1003" in inside
    box.close()


def test_code_in_an_async_box():
    async def main() -> None:
        async with await AsyncSandbox.create() as box:
            heard: list[str] = []
            done = await box.run_code("print('hi'); 1 + 1", on_stdout=heard.append)
            assert (done.text, heard) == ("2", ["hi\n"])
            async with await box.stream_code("2 + 2") as stream:
                items = [item async for item in stream]
            assert items[-1].text == "4"
            assert await box.interrupt() is False
            assert [c.id for c in await box.list_code_contexts()] == ["main"]

    asyncio.run(main())
