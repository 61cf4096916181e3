"""`hutch shell`, by someone who types."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from prompt import Terminal, Traces, boxes, hutch  # noqa: F401

pytestmark = pytest.mark.usefixtures("boxes")

PROMPT = "user@box:"


def test_a_shell_answers_and_gives_its_exit_code() -> None:
    with Terminal("shell") as terminal:
        terminal.expect(PROMPT)
        terminal.type("echo $((6 * 7)) in $(hostname)\r")
        terminal.expect("42 in box")
        terminal.type("exit 7\r")
        assert terminal.end() == 7


def test_it_is_a_terminal_of_the_box_and_not_ours() -> None:
    with Terminal("shell", COLORTERM="truecolor") as terminal:
        terminal.expect(PROMPT)
        terminal.type("tty; echo $TERM-$COLORTERM; test -t 0 && test -t 1 && echo bo''th\r")
        terminal.expect("/dev/pts/0")
        terminal.expect("xterm-256color-truecolor")
        terminal.expect("both")
        terminal.expect(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0


def test_the_window_has_our_size_and_follows_it() -> None:
    watch = "trap 'stty size; exit 3' WINCH; stty size; echo up; while :; do sleep 0.1; done"
    with Terminal("shell", "--", "sh", "-c", watch, columns=101, rows=33) as terminal:
        terminal.expect("33 101")
        terminal.expect("up")
        terminal.resize(77, 22)
        terminal.expect("22 77")
        assert terminal.end() == 3


def test_ctrl_c_is_for_the_program_in_the_box() -> None:
    with Terminal("shell") as terminal:
        terminal.expect(PROMPT)
        terminal.type("sh -c 'echo sleep''ing; exec sleep 1000'\r")
        terminal.expect("sleeping")
        terminal.type("\x03")
        terminal.expect(PROMPT)
        terminal.type("exit 5\r")
        assert terminal.end() == 5


def test_escapes_pass_for_this_is_a_terminal_session() -> None:
    with Terminal("shell", "--", "printf", r"\033[31mred\033[0m") as terminal:
        assert terminal.end() == 0
        assert b"\x1b[31mred\x1b[0m" in terminal.screen


def test_a_command_of_ones_own_can_have_the_terminal() -> None:
    with Terminal("shell", "--env", "A=b", "--", "sh", "-c", "tty && echo $A; exit 9") as terminal:
        terminal.expect("/dev/pts/0")
        terminal.expect("b")
        assert terminal.end() == 9


def test_a_command_that_is_not_there_gives_127() -> None:
    with Terminal("shell", "--", "no-such-program") as terminal:
        terminal.expect("cannot run no-such-program")
        assert terminal.end() == 127


def test_a_program_in_a_box_cannot_type_for_us() -> None:
    type_for_us = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')"
    with Terminal("shell", "--", "python3", "-c", type_for_us) as terminal:
        terminal.expect("Operation not permitted")
        assert terminal.end() == 1


# --- the terminal afterwards ---------------------------------------------------------------


def test_the_terminal_is_raw_meanwhile_and_restored_after() -> None:
    with Terminal("shell") as terminal:
        terminal.expect(PROMPT)
        assert terminal.modes_now() != terminal.modes
        terminal.type("exit\r")
        terminal.expect("logout")
        terminal.end()
        assert terminal.modes_now() == terminal.modes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_restores_the_terminal(number: signal.Signals) -> None:
    with Terminal("shell") as terminal:
        terminal.expect(PROMPT)
        traces = Traces(terminal.pid)
        os.kill(terminal.pid, number)
        assert terminal.end() == 128 + number
        assert terminal.modes_now() == terminal.modes and traces.left() == []


def test_the_death_of_the_box_is_told_and_restores_the_terminal() -> None:
    with Terminal("shell") as terminal:
        terminal.expect(PROMPT)
        terminal.type(r"printf '\033[?1049h\033[?25l\033[?1000;1006h'; echo drawn" + "\r")
        terminal.expect("drawn\r\n")
        (launcher,) = Path(f"/proc/{terminal.pid}/task/{terminal.pid}/children").read_text().split()
        os.kill(int(launcher), signal.SIGKILL)
        terminal.expect("hutch:")
        assert terminal.end() == 125
        assert terminal.modes_now() == terminal.modes
    assert hutch("run", "--", "true").returncode == 0  # and sweeps what the dead launcher left


def test_what_a_killed_program_switched_on_is_switched_off() -> None:
    draw = r"printf '\033[?1049h\033[?25l\033[?1000;1006h'; echo drawn; sleep 1000"
    with Terminal("shell", "--", "sh", "-c", draw) as terminal:
        terminal.expect("drawn")
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.end() == 143
        for switched_off in ("?1049l", "?25h", "?1000l", "?1006l"):
            assert b"\x1b[" + switched_off.encode() in terminal.screen


def test_without_a_terminal_it_says_what_to_use() -> None:
    done = hutch("shell")
    assert done.returncode == 125
    assert done.stderr.startswith(b"hutch: ") and b"hutch run --stdin -- sh" in done.stderr
