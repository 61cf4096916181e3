"""System calls that the filter refuses and the guest counts."""

from __future__ import annotations

from .hosts import FarThing

STORM = (
    "import ctypes, platform; call = ctypes.CDLL(None).syscall\n"
    "number = 101 if platform.machine() == 'x86_64' else 117\n"
    "while call(number, 0, 0, 0, 0) == -1: pass"
)


def test_a_storm_of_refused_calls_stalls_nobody_and_can_be_ended(box: FarThing) -> None:
    storms = [box.commands.run(["python3", "-c", STORM], background=True) for _ in range(4)]
    assert box.commands.run("echo alive").stdout == "alive\n"
    assert box.shell.run("echo alive").stdout == "alive\n"
    for storm in storms:
        storm.kill()
    assert box.commands.run("pgrep -c python3").stdout == "0\n"


def test_a_call_that_a_signal_interrupts_is_not_let_through(box: FarThing) -> None:
    code = (
        "import ctypes, platform, signal; call = ctypes.CDLL(None).syscall\n"
        "signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(0, 0.0003, 0.0003)\n"
        "number = 101 if platform.machine() == 'x86_64' else 117\n"
        "print({call(number, 0, 0, 0, 0) for _ in range(300)})"
    )
    assert box.commands.run(["python3", "-c", code]).stdout == "{-1}\n"
