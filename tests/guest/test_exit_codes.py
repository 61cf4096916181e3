"""Exit codes are true, whatever a command prints and wherever it writes."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from hutch import Sandbox
from hutch.guest.agent import RequestError
from hutch.guest.spawn import Program, Subreaper

FORGE = r"""
import os, sys
for fd in range(3, 1024):
    for text in (b"0\0/forged\0declare -x FORGED=1\0", b"x\0\0\0\0", b"0\n", b"e\0\0\0\0" * 9):
        try:
            os.write(fd, text)
        except OSError:
            pass
sys.exit(7)
"""


@pytest.fixture(scope="module")
def forger(shared_box: Sandbox) -> str:
    shared_box.files.write("/tmp/forge.py", FORGE)
    return "python3 /tmp/forge.py"


@pytest.mark.parametrize("code", [0, 1, 2, 124, 126, 127, 130, 255])
def test_an_exit_code_is_what_the_program_said(shared_box: Sandbox, code: int) -> None:
    assert shared_box.shell.run(f"(exit {code})").exit_code == code
    assert shared_box.commands.run(f"exit {code}").exit_code == code


@pytest.mark.parametrize("number", [1, 6, 9, 11, 15])
def test_a_signal_is_128_and_its_number(shared_box: Sandbox, number: int) -> None:
    assert shared_box.shell.run(f"sh -c 'kill -{number} $$'").exit_code == 128 + number
    assert shared_box.commands.run(f"kill -{number} $$").exit_code == 128 + number


def test_a_child_that_writes_to_every_descriptor_forges_nothing(
    shared_box: Sandbox, forger: str
) -> None:
    for run in (shared_box.shell.run, shared_box.commands.run):
        result = run(forger, timeout=60)
        assert (result.exit_code, result.output) == (7, "")
    after = shared_box.shell.run("echo [$FORGED] $PWD")
    assert (after.stdout, after.restarted) == ("[] /workspace\n", False)


def test_a_shell_that_writes_to_every_descriptor_of_its_own_still_answers(box: Sandbox) -> None:
    # What bash saved of ours it can find, being the same process. It can confuse only itself.
    forge = "for fd in {3..255}; do printf '0\\0/forged\\0\\0' 2>/dev/null >&$fd; done; (exit 9)"
    assert box.shell.run(forge, timeout=60).exit_code == 9
    after = box.shell.run("pwd", timeout=60)
    assert (after.exit_code, after.stdout, after.cwd) == (0, "/workspace\n", "/workspace")


def test_a_flood_where_answers_go_is_endured(box: Sandbox) -> None:
    flood = "for fd in {10..20}; do (while :; do printf %4096s; done >&$fd) 2>/dev/null & done"
    assert box.shell.run(f"{flood}; (exit 6)", timeout=60).exit_code == 6
    assert box.shell.run("kill $(jobs -p); (exit 5)", timeout=60).exit_code == 5
    assert box.shell.run("echo fine", timeout=60).stdout.endswith("fine\n")


def test_output_that_looks_like_an_answer_is_output(shared_box: Sandbox) -> None:
    for target in (1, 2):
        result = shared_box.shell.run(f"printf '0\\0/forged\\0\\0' >&{target}; (exit 8)")
        assert (result.exit_code, result.cwd) == (8, "/workspace")
        assert result.output == "0\0/forged\0\0"


def test_stdout_and_stderr_are_apart_and_output_has_both_in_order(shared_box: Sandbox) -> None:
    command = "for i in 1 2 3; do echo out $i; sleep 0.1; echo err $i >&2; sleep 0.1; done"
    for result in (shared_box.shell.run(command), shared_box.commands.run(command)):
        assert result.stdout == "out 1\nout 2\nout 3\n"
        assert result.stderr == "err 1\nerr 2\nerr 3\n"
        assert result.output == "out 1\nerr 1\nout 2\nerr 2\nout 3\nerr 3\n"


def test_a_file_that_cannot_be_run_says_why(shared_box: Sandbox) -> None:
    with pytest.raises(Exception, match="no such program in the box: no-such-program"):
        shared_box.commands.run(["no-such-program"])
    with pytest.raises(Exception, match="no such working directory"):
        shared_box.commands.run(["true"], cwd="/no/such")
    with pytest.raises(Exception, match="Permission denied"):
        shared_box.commands.run(["/etc/passwd"])
    assert shared_box.shell.run("no-such-program").exit_code == 127


@pytest.mark.namespaces("a container has one user")
def test_a_user_can_be_chosen_and_the_guest_cannot(shared_box: Sandbox) -> None:
    if "one only" in " ".join(shared_box.info.degraded):
        pytest.skip("run by an ordinary user, a box has one user")
    assert shared_box.commands.run(["id", "-u"], user="root").stdout == "0\n"
    assert shared_box.commands.run(["id", "-u"], user="1234").stdout == "1234\n"
    with pytest.raises(Exception, match="reserved"):
        shared_box.commands.run(["id"], user="hutch")


def test_stdin_arrives_whole_and_is_empty_otherwise(shared_box: Sandbox) -> None:
    data = bytes(range(256)) * 20_000
    assert shared_box.commands.run(["cat"], stdin=data).total_bytes == len(data)
    assert shared_box.commands.run(["wc", "-c"], stdin=data).stdout.split() == [str(len(data))]
    assert shared_box.commands.run(["wc", "-c"]).stdout.split() == ["0"]
    assert shared_box.commands.run(["true"], stdin=data).exit_code == 0


def test_a_program_whose_keeper_was_killed_before_it_got_it_says_so() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        subreaper = Subreaper(os.getpid(), ours, lambda subreaper: None)
        with pytest.raises(
            RequestError, match=r"killed while it was being started.* out of memory"
        ):
            async with asyncio.timeout(120):
                await subreaper.begin(Program(["true"], subreaper), {}, [0])
        assert not subreaper.is_up

    asyncio.run(test())
