"""How commands end that do not end by themselves, and what is left of them then: nothing."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable

from docker_of_tests import RUNTIME
from hutch import AsyncSandbox, Result, Sandbox


def _until(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def _running(box: Sandbox, name: str) -> bool:
    found = box.commands.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '").stdout
    return name in found.replace("cat /proc/", "")


def test_a_timeout_kills_what_the_command_started_wherever_it_hid(box: Sandbox) -> None:
    hide = "(setsid sleep 4321 &); nohup sleep 4322 & (sleep 4323 &); sleep 4324"
    assert box.shell.run(hide, timeout=0.5).timed_out
    assert box.commands.run(["bash", "-c", hide], timeout=0.5).timed_out
    assert not _running(box, "sleep 432")


def test_a_timeout_leaves_the_background_jobs_of_earlier_commands_alone(box: Sandbox) -> None:
    for n in range(1, 6):  # in the same tick of the clock, most of them
        box.shell.run("sleep 4321 &")
        assert box.shell.run("sleep 4323", timeout=0.1).timed_out
        assert box.shell.run("jobs -r").stdout.count("sleep 4321") == n
    box.shell.run("(setsid sleep 4322 &)")
    assert box.shell.run("sleep 4323", timeout=0.1).timed_out
    assert _running(box, "sleep 4322") and not _running(box, "sleep 4323")


def test_a_timeout_keeps_the_shell_and_all_its_state(box: Sandbox) -> None:
    box.shell.run("cd /tmp; plain=1; f() { echo f; }; alias l='echo l'; set -o pipefail; umask 077")
    pid = box.shell.run("echo $$").stdout
    assert box.shell.run("g() { sleep 1000; }; while :; do g; done", timeout=0.3).timed_out
    after = box.shell.run("echo $$; echo $plain; f; l; set -o | grep pipefail; umask; pwd")
    assert after.stdout.split() == [pid.strip(), "1", "f", "l", "pipefail", "on", "0077", "/tmp"]
    assert not after.restarted


def test_what_a_killed_command_leaves_unsaid_is_not_said_later(box: Sandbox) -> None:
    box.shell.run("true")  # a shell takes long to start on a busy machine
    result = box.shell.run("echo one; sleep 1000", timeout=3)
    assert (result.stdout, result.stderr) == ("one\n", "")
    assert box.shell.run("echo two").output == "two\n"


def test_a_timeout_shorter_than_the_command_itself_leaves_no_pieces_of_it(box: Sandbox) -> None:
    box.shell.run("true")
    long = "echo piece\n" * 18_000 + "echo end"
    assert box.shell.run(long, timeout=0.001).timed_out
    assert box.shell.run("echo next", timeout=60).output == "next\n"


def test_many_timeouts_in_a_row_never_mix_up_answers(box: Sandbox) -> None:
    for n in range(30):
        slow = box.shell.run(f"sleep 0.0{n % 7}; echo slow", timeout=0.03)
        assert slow.timed_out or slow.stdout == "slow\n"
        assert box.shell.run(f"echo {n}; (exit {n})").exit_code == n


def test_two_commands_at_once_on_one_shell_run_in_order() -> None:
    async def both() -> list[Result]:
        async with await AsyncSandbox.create() as box:
            tasks = [asyncio.create_task(box.shell.run("sleep 0.3; echo 1; n=1"))]
            await asyncio.sleep(0.05)
            tasks += [asyncio.create_task(box.shell.run(f"echo {i} $n; n={i}")) for i in (2, 3)]
            return await asyncio.gather(*tasks)

    assert [r.stdout for r in asyncio.run(both())] == ["1\n", "2 1\n", "3 2\n"]


def test_a_timeout_while_waiting_for_the_turn_is_a_result(box: Sandbox) -> None:
    command = "touch /tmp/begun; until [ -e /tmp/go ]; do sleep 0.1; done; echo done > /tmp/done"
    first = threading.Thread(target=lambda: box.shell.run(command))
    first.start()
    _until(lambda: box.files.exists("/tmp/begun"), "the first command does not start")
    waiting = box.shell.run("echo never", timeout=0.2)
    assert (waiting.timed_out, waiting.exit_code, waiting.stdout) == (True, 124, "")
    assert "busy" in waiting.stderr
    box.files.write("/tmp/go", "")
    first.join()
    assert box.shell.run("cat /tmp/done").stdout == "done\n"


def test_a_client_that_goes_away_takes_its_command_with_it(box: Sandbox) -> None:
    tree = "echo go; (setsid sleep 4321 &); sleep 4322"
    for stream in (box.shell.stream(tree), box.commands.stream(["bash", "-c", tree])):
        with stream:
            assert next(stream).text == "go\n"
            _until(lambda: _running(box, "sleep 4321"), "it did not start")
        _until(lambda: not _running(box, "sleep 432"), "what it started is still there")
    assert box.shell.run("echo next").output == "next\n"


def test_a_client_that_goes_away_does_not_take_the_turn_of_others() -> None:
    async def leave() -> Result:
        async with await AsyncSandbox.create() as box:
            first = asyncio.create_task(box.shell.run("sleep 1000"))
            await asyncio.sleep(0.1)
            second = asyncio.create_task(box.shell.run("echo second"))
            third = asyncio.create_task(box.shell.run("echo third"))
            await asyncio.sleep(0.1)
            second.cancel()
            first.cancel()
            return await third

    assert asyncio.run(leave()).output == "third\n"


def test_a_fork_bomb_ends_at_its_timeout_and_the_box_goes_on() -> None:
    with Sandbox.create(pids=64, cpus=0.5) as box:
        bomb = box.shell.run("f() { f | f & f | f; }; f", timeout=1)
        assert (bomb.timed_out, bomb.exit_code) == (True, 124)
        said = box.shell.run("echo shell", timeout=60)
        if RUNTIME == "runsc" and said.exit_code == 128 + signal.SIGHUP:
            # Seen once. Probably gVisor hangs up on a process group, and the shell in it, when
            # one of its processes ends while another is stopped.
            said = box.shell.run("echo shell", timeout=60)
        assert said.stdout.endswith("shell\n")
        assert box.commands.run(["echo", "program"], timeout=60).stdout == "program\n"


def test_a_fork_bomb_in_the_background_ends_with_its_shell() -> None:
    with Sandbox.create(pids=64, cpus=0.5) as box:
        shell = box.shell.open("bomber")
        # In a subshell: the shell itself starts one process, while there is room for it. Whether
        # it finds room for a second one beside the bomb depends on which of them is quicker.
        assert shell.run("(:(){ :|:& };:) &", timeout=60).exit_code == 0
        shell.close()
        assert box.shell.run("echo over", timeout=60).stdout == "over\n"


def test_a_background_job_that_never_stops_printing_does_not_stop_others(box: Sandbox) -> None:
    assert box.shell.run("yes & echo $!", timeout=60).exit_code == 0
    assert box.commands.run("yes & echo ok >&2", timeout=60).stderr == "ok\n"
    assert box.shell.run("echo still here", timeout=60).exit_code == 0
    assert box.shell.run("kill %1; wait; echo over", timeout=60).stdout.endswith("over\n")


def test_a_job_that_prints_after_its_command_is_heard_by_the_next(box: Sandbox) -> None:
    box.shell.run("(until [ -e now ]; do sleep 0.01; done; echo late; touch then) & echo early")
    late = box.shell.run("touch now; until [ -e then ]; do sleep 0.01; done", timeout=60)
    assert late.stdout == "late\n"


def test_closing_a_shell_ends_the_command_in_it(box: Sandbox) -> None:
    shell = box.shell.open("other")
    results: list[Result] = []
    runner = threading.Thread(target=lambda: results.append(shell.run("echo go; sleep 4321")))
    runner.start()
    _until(lambda: _running(box, "sleep 4321"), "the command does not start")
    shell.close()
    runner.join(60)
    assert (results[0].exit_code, results[0].stdout) == (137, "go\n")
    assert not _running(box, "sleep 4321")
