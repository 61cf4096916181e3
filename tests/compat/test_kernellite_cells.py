"""What KernelLite got wrong when it ran code, each as a promise."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from asking import Served, receive, wait_until

FOREVER = "import pathlib, time\npathlib.Path('{0}').touch()\nwhile True: time.sleep(0.01)"
STARTED = 'EVENT:{"type": "session_started"}\n'


# --- what is shown -------------------------------------------------------------------------


def test_variables_stay_from_call_to_call(shared: Served) -> None:
    shared.exec("kept = [1, 2]")
    assert shared.exec("print(kept)")["stdout"] == "[1, 2]\n"


def test_the_value_of_the_last_expression_is_shown(shared: Served) -> None:
    assert shared.exec("x = 20\nx + 1")["stdout"] == "21\n"


def test_a_value_comes_on_a_line_of_its_own_after_what_was_printed(shared: Served) -> None:
    assert shared.exec("print('no newline', end='')\n7")["stdout"] == "no newline\n7\n"


def test_none_is_not_shown(shared: Served) -> None:
    assert shared.exec("None")["stdout"] == ""


def test_what_is_displayed_is_shown_too(shared: Served) -> None:
    assert shared.exec("for i in range(3): display(i)")["stdout"] == "0\n1\n2\n"


def test_output_of_subprocesses_is_captured(shared: Served) -> None:
    answer = shared.exec("import subprocess\n_ = subprocess.run('echo out; echo err >&2', shell=1)")
    assert (answer["stdout"], answer["stderr"]) == ("out\n", "err\n")


def test_output_of_c_code_is_captured(shared: Served) -> None:
    code = "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.puts(b'from C'); _ = libc.fflush(None)"
    assert shared.exec(code)["stdout"] == "from C\n"


def test_output_is_bounded_and_says_what_is_left_out(shared: Served) -> None:
    answer = shared.exec("for i in range(300_000): print('line', i, 'of many')")
    assert len(answer["stdout"]) < 1_200_000 and "bytes not shown" in answer["stdout"]
    assert answer["stdout"].startswith("line 0 ")
    assert answer["stdout"].endswith("line 299999 of many\n")


def test_what_is_displayed_is_bounded_too(shared: Served) -> None:
    answer = shared.exec("for i in range(30): display('x' * 100_000)")
    assert len(answer["stdout"]) < 1_200_000 and "not shown" in answer["stdout"]


# --- what ends a cell ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "leave", ["import sys; sys.exit()", "exit()", "quit()", "raise SystemExit"]
)
def test_leaving_ends_the_cell_and_nothing_else(shared: Served, leave: str) -> None:
    shared.exec("mine = 42")
    answer = shared.exec(f"print('before'); {leave}; print('after')")
    assert answer == {"status": "[OK] exec", "stdout": "before\n", "stderr": ""}
    assert shared.exec("mine")["stdout"] == "42\n"


def test_leaving_with_a_code_is_an_error(shared: Served) -> None:
    answer = shared.exec("import sys; sys.exit(3)")
    assert answer["status"] == "[ERROR] exec" and "SystemExit" in answer["stderr"]
    assert "restarted" not in shared.exec("1")


def test_a_timeout_interrupts_and_keeps_the_variables(shared: Served) -> None:
    answer = shared.time_out("mine = 'kept'\nprint('begun')\nwhile True: pass")
    assert (answer["status"], answer["stdout"]) == ("[ERROR] exec", "begun\n")
    assert answer["timed_out"] and "interrupted" in answer["stderr"]
    assert shared.exec("mine") == {"status": "[OK] exec", "stdout": "'kept'\n", "stderr": ""}


def test_a_cell_that_cannot_be_interrupted_is_killed_and_the_answer_says_so(
    served: Served,
) -> None:
    stubborn = (
        "import signal, time\nsignal.pthread_sigmask(0, [2])\nprint('deaf')\n"
        "while True: time.sleep(1)"
    )
    answer = served.time_out(stubborn)
    assert answer["status"] == "[ERROR] exec" and answer["timed_out"] and answer["died"]
    assert "killed" in answer["stderr"] and "variables" in answer["stderr"]
    assert served.exec("'new'")["restarted"] is True


def test_another_client_can_interrupt(served: Served) -> None:
    served.exec("mine = 1")
    with served.start(FOREVER.format("running")) as sock:
        served.wait_for("running")
        assert served.ask(op="interrupt") == {"status": "[OK] interrupt"}
        answer = receive(sock)
    assert answer["status"] == "[ERROR] exec" and "KeyboardInterrupt" in answer["stderr"]
    assert served.exec("mine")["stdout"] == "1\n"


def test_an_interrupt_when_nothing_runs_harms_nothing(shared: Served) -> None:
    assert shared.ask(op="interrupt") == {"status": "[OK] interrupt"}
    assert shared.exec("1 + 1")["stdout"] == "2\n"


def test_a_client_that_goes_away_interrupts_its_cell(served: Served) -> None:
    served.exec("mine = 1")
    with served.start(FOREVER.format("running")):
        served.wait_for("running")
    assert served.exec("mine")["stdout"] == "1\n"


def test_a_client_that_goes_away_before_its_turn_is_left_out(served: Served) -> None:
    with served.start(FOREVER.format("running")) as first:
        served.wait_for("running")
        with served.start("open('never', 'w')"):
            pass
        served.ask(op="interrupt")
        receive(first)
    assert served.exec("import os; os.path.exists('never')")["stdout"] == "False\n"


def test_the_server_can_set_a_limit_for_every_cell(tmp_path: Path) -> None:
    with Served(tmp_path, "--timeout=0.5") as served:
        assert served.exec("import time; time.sleep(60)")["timed_out"]
        assert served.exec("import time; time.sleep(60)", timeout=600)["timed_out"]


# --- turns ---------------------------------------------------------------------------------


def test_ping_is_answered_while_a_cell_runs(served: Served) -> None:
    with served.start(FOREVER.format("running")):
        served.wait_for("running")
        assert served.ask(op="ping") == {"status": "[OK] pong"}


def test_cells_of_many_clients_take_turns(shared: Served) -> None:
    shared.exec("import time\nlog, inside = [], 0")
    code = "inside += 1; log.append(inside); time.sleep(0.01); inside -= 1"
    clients = [threading.Thread(target=shared.exec, args=(code,)) for _ in range(20)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert shared.exec("len(log), set(log)")["stdout"] == "(20, {1})\n"


def test_the_wait_for_a_turn_is_part_of_the_timeout(served: Served) -> None:
    with served.start(FOREVER.format("running")):
        served.wait_for("running")
        answer = served.exec("print('ran')", timeout=0.3)
    assert answer["status"] == "[ERROR] exec" and answer["stdout"] == ""
    assert "nothing was run" in answer["stderr"]


# --- deaths --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    ["import os; os._exit(3)", "import os; os.abort()", "import ctypes; ctypes.string_at(0)"],
)
def test_a_kernel_that_dies_is_replaced_and_everybody_is_told(shared: Served, code: str) -> None:
    shared.exec("mine = 1")
    answer = shared.exec(f"print('last words', flush=True); {code}")
    assert answer["status"] == "[ERROR] exec" and answer["stdout"] == "last words\n"
    assert answer["died"] in answer["stderr"]
    after = shared.exec("'mine' in globals()")
    assert after == {
        "status": "[OK] exec", "stdout": STARTED + "False\n", "stderr": "", "restarted": True,
    }  # fmt: skip
    assert shared.exec("1") == {"status": "[OK] exec", "stdout": "1\n", "stderr": ""}
    assert "the kernel died" in shared.log


def test_a_kernel_that_dies_between_cells_is_noticed(served: Served) -> None:
    served.exec("import os, threading\nthreading.Timer(0.1, os._exit, (1,)).start()")
    wait_until(lambda: "restarted" in served.exec("1"))


def test_a_cell_that_takes_all_memory_is_told_so(tmp_path: Path) -> None:
    with Served(tmp_path, "--memory=128m") as served:
        answer = served.exec("x = bytearray(10)\nwhile True: x += bytes(10_000_000)")
        assert answer["status"] == "[ERROR] exec" and "emory" in answer["stderr"]
        assert served.exec("1 + 1")["stdout"].endswith("2\n")
