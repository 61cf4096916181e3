"""What a kept shell keeps, from call to call and from one shell to its successor."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from direct import Guest, with_guest

from hutch import InvalidRequest, Sandbox, Shell, wire
from hutch.guest.shell import receive


@pytest.fixture
def shell(shared_box: Sandbox) -> Iterator[Shell]:
    opened = shared_box.shell.open()
    yield opened
    opened.close()


KEPT = {
    "the directory": ("cd /usr/bin", "pwd", "/usr/bin"),
    "an exported variable": ("export A='x  y'", 'sh -c \'echo "$A"\'', "x  y"),
    "an array that is not exported": ("b=1; c=(1 2 3)", 'echo "$b ${c[2]}"; env | grep ^b', "1 3"),
    "a function": ("hi() { echo hi $1; }", "hi you", "hi you"),
    "an alias": ("alias ll='echo alias'", "ll", "alias"),
    "an option": ("set -o pipefail", "false | true; echo $?", "1"),
    "an option of shopt": ("shopt -s nullglob", "echo x/no*", ""),
    "the umask": ("umask 027", "umask", "0027"),
    "a background job": ("sleep 1000 &", "jobs -r; kill %1", "[1]+  Running"),
    "the last job": ("sleep 1000 & echo $! >/tmp/pid", "[ $! = $(cat /tmp/pid) ]; echo $?", "0"),
    "arguments": ("set -- a b c; shift", 'echo "$@"', "b c"),
    "an open descriptor": ("exec 7>/tmp/seven", "echo x >&7; cat /tmp/seven", "x"),
    "a trap": ("trap 'echo usr1' USR1", "kill -USR1 $$", "usr1"),
    "the status": ("(exit 42)", "echo $?", "42"),
    "the status after an error": ("(", "echo $?", "2"),
    "a variable from declare": ("declare -i n=5", "n+=1; echo $n", "6"),
    "the previous directory": ("cd /tmp; cd /usr", "cd -", "/tmp"),
}  # fmt: skip


@pytest.mark.parametrize("what", KEPT)
def test_a_shell_keeps(shell: Shell, what: str) -> None:
    first, then, expected = KEPT[what]
    shell.run(first)
    result = shell.run(then)
    assert result.stdout.strip().startswith(expected)
    assert bool(result.stdout.strip()) is bool(expected) and not result.restarted


def test_a_result_says_where_the_shell_is(shell: Shell) -> None:
    assert shell.run("mkdir -p '/tmp/a b'; cd '/tmp/a b'").cwd == "/tmp/a b"
    assert shell.run("unset PWD; true").cwd == "/tmp/a b"
    assert shell.run("cd /").cwd == "/"


ENDINGS = {
    "exit": ("export B=2; cd /tmp; exit 3", 3, "2 /tmp"),
    "set -e": ("export B=2; cd /tmp; set -e; false", 1, "2 /tmp"),
    "exit in a function": ("f() { export B=2; cd /tmp; exit 4; }; f", 4, "2 /tmp"),
    "an unset variable": ("set -u; export B=2; cd /tmp; echo $nope", 1, "2 /tmp"),
    # Nothing is left that could report what it did: the state before the command stands.
    "exec": ("export B=2; cd /tmp; exec true", 0, "1 /usr"),
    "exec that fails": ("export B=2; cd /tmp; exec /no/such", 127, "1 /usr"),
    "kill": ("export B=2; cd /tmp; kill -9 $$", 137, "1 /usr"),
    "a trap that exits": ("trap 'exit 5' TERM; cd /tmp; kill $$; sleep 9", 5, "1 /tmp"),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDINGS)
def test_after_an_end_there_is_a_new_shell_where_the_old_one_stood(shell: Shell, how: str) -> None:
    command, code, state = ENDINGS[how]
    shell.run('export B=1 Q="quote \' and\nnewline"; unexported=1; cd /usr')
    assert shell.run(command, timeout=60).exit_code == code
    after = shell.run('echo $B $PWD; echo "$Q"; echo "[$unexported]"')
    assert after.stdout == f"{state}\nquote ' and\nnewline\n[]\n"
    assert after.restarted and not shell.run("true").restarted


def test_the_first_command_of_a_shell_is_no_restart(shared_box: Sandbox) -> None:
    with Sandbox.create() as box:
        assert not box.shell.run("true").restarted
        assert not box.shell.open("second").run("true").restarted


def test_a_shell_that_died_between_two_commands_is_replaced(shell: Shell) -> None:
    pid = shell.run("export A=1; cd /tmp; echo $$; (sleep 0.1; kill -9 $$) & disown").stdout.strip()
    while shell.run(f"[ $$ = {pid} ] && kill -0 {pid} && sleep 0.05").exit_code == 0:
        pass
    after = shell.run("echo $A $PWD")
    assert after.stdout == "1 /tmp\n"


def test_an_environment_larger_than_any_argument_survives_an_exit(shell: Shell) -> None:
    shell.run("export BIG=$(head -c 300000 /dev/zero | tr '\\0' x); exit")
    assert shell.run("echo ${#BIG}").stdout == "300000\n"


def test_a_directory_that_is_gone_does_not_keep_a_shell_from_starting(shell: Shell) -> None:
    shell.run("mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone; exit 3")
    result = shell.run("echo here")
    assert (result.stdout, result.cwd, result.restarted) == ("here\n", "/", True)


def state_folder(box: Sandbox) -> str:
    """Where shells leave their state when they exit."""
    # Not with ls, whose statx some versions of gVisor refuse.
    find = "[ -d /run/hutch ] && echo /run/hutch || echo /.hutch/run"
    return box.commands.run(find).stdout.strip()


def test_a_pipe_among_the_files_of_shells_cannot_block_an_exit(shared_box: Sandbox) -> None:
    shell = shared_box.shell.open("fifo")
    folder = state_folder(shared_box)
    assert shell.run(f"mkfifo {folder}/shell-fifo {folder}/fifo").exit_code == 0
    ended = shell.run("export A=1; exit 3", timeout=20)
    assert (ended.exit_code, ended.timed_out) == (3, False)
    assert shell.run("echo $A", timeout=20).stdout == "1\n"
    shell.run(f"rm {folder}/shell-fifo {folder}/fifo")
    shell.close()


def test_shells_that_ended_leave_no_files(shared_box: Sandbox, shell: Shell) -> None:
    folder = state_folder(shared_box)
    before = shell.run(f"echo {folder}/*").stdout
    for ending in ("exit 3", "kill $$", "kill -9 $$"):
        shell.run(ending)
        assert shell.run(f"echo {folder}/*").stdout == before


SEND_STOP = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGRTMIN + 7)"
SENDERS = {
    "the shell itself": "kill -s RTMIN+7 $$",
    "a subshell": "(kill -s RTMIN+7 $$)",
    "a child": f"python3 -c '{SEND_STOP}' $$",
}


@pytest.mark.parametrize("sender", SENDERS)
def test_a_stop_signal_that_the_box_sends_stops_no_later_command(shell: Shell, sender: str) -> None:
    stopped = shell.run(f"kept=1; f() {{ {SENDERS[sender]}; sleep 1000; }}; f", timeout=60)
    assert stopped.exit_code == 130
    assert shell.run("(exit 7)").exit_code == 7
    after = shell.run("g() { echo $kept; }; for n in 1; do g; done")
    assert (after.exit_code, after.stdout, after.restarted) == (0, "1\n", False)


def test_a_stop_signal_from_outside_a_shell_stops_no_later_command(
    shared_box: Sandbox, shell: Shell
) -> None:
    pid = shell.run("echo $$").stdout.strip()
    send = ["python3", "-c", SEND_STOP, pid]
    shared_box.commands.run(send, check=True)  # between two commands
    assert shell.run("(exit 7)").exit_code == 7
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(shell.run, "touch /tmp/began; while :; do sleep 0.1; done")
        shared_box.commands.run("until [ -e /tmp/began ]; do sleep 0.05; done", timeout=60)
        shared_box.commands.run(send, check=True)
        assert running.result(60).exit_code == 130
    assert shell.run("(exit 7)").exit_code == 7
    assert shell.run("echo next").stdout == "next\n"


def test_a_debug_trap_of_the_user_outlives_commands_that_were_not_stopped(shell: Shell) -> None:
    shell.run("trap 'seen=$BASH_COMMAND' DEBUG; set -T")
    for _ in range(2):
        result = shell.run("echo $seen; case $- in *T*) echo traced;; esac")
        assert result.stdout == "echo $seen\ntraced\n"


def test_shells_are_independent_of_each_other(shared_box: Sandbox) -> None:
    one, two = shared_box.shell.open(cwd="/usr", env={"A": "1"}), shared_box.shell.open(cwd="/tmp")
    one.run("b=1")
    assert one.run("echo $A $b $PWD").stdout == "1 1 /usr\n"
    assert two.run('echo "$A$b" $PWD').stdout == " /tmp\n"
    one.close()
    two.close()


def test_a_command_of_any_length_or_form_arrives_as_it_is(shell: Shell) -> None:
    text = "line 'one'\n\"two\" \\ $three `four` \t !five\r\n\udcff end" + "x" * 100_000
    result = shell.run(f"cat <<'EOF_'\n{text}\nEOF_\n")
    assert result.stdout_bytes == text.encode("utf-8", "surrogateescape") + b"\n"


# --- commands that are longer than a frame ------------------------------------------------------


def padded(command: str, size: int = 900 * 1024) -> str:
    """This command, and a lot beside it that does nothing."""
    line = ": 'no \u00e9 operation'\n"
    return line * (size // len(line.encode())) + command


def test_a_command_of_hundreds_of_kilobytes_is_one_like_any_other(shell: Shell) -> None:
    first = shell.run(padded("kept=$((40 + 2)); cd /usr; (exit 7)"))
    assert (first.exit_code, first.cwd, first.output) == (7, "/usr", "")
    after = shell.run('echo "$? $kept $PWD"; ls -A /workspace | wc -l')
    assert (after.stdout, after.restarted) == ("7 42 /usr\n0\n", False)


def test_a_long_command_arrives_as_it_is(shell: Shell) -> None:
    text = "line 'one'\n\"two\" \\ $three `four` \t !five\r\n\udcff end" + "x\u00e9" * 150_000
    result = shell.run(f"cat <<'EOF_'\n{text}\nEOF_\n")
    assert result.stdout_bytes == text.encode("utf-8", "surrogateescape") + b"\n"


def test_a_long_command_starts_programs_though_all_variables_are_exported(shell: Shell) -> None:
    shell.run("set -a")
    result = shell.run(padded("/bin/echo started"))
    assert (result.exit_code, result.stdout) == (0, "started\n")


def test_a_syntax_error_in_a_long_command_costs_that_command_only(shell: Shell) -> None:
    shell.run("kept=1")
    result = shell.run(padded("if true; then"))
    assert result.exit_code == 2 and "syntax error" in result.stderr
    assert (shell.run("echo $kept").stdout, shell.run("true").restarted) == ("1\n", False)


def test_a_timeout_in_a_long_command_costs_that_command_only(shell: Shell) -> None:
    shell.run("kept=1")
    result = shell.run(padded("kept=2; echo begun; sleep 1000"), timeout=15)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "begun\n")
    after = shell.run("echo $kept")
    assert (after.stdout, after.restarted) == ("2\n", False)


def test_a_short_command_does_not_overtake_a_long_one_that_is_still_arriving(
    tmp_path: Path,
) -> None:
    async def work(guest: Guest) -> None:
        async with guest.link.call(wire.ShellCommand("main")) as long:
            short = asyncio.create_task(guest.shell("echo $first"))
            await guest.program("true")  # the guest has heard of both by now
            await long.feed([b"first=", b"long"])
            async for _ in long:
                pass
            assert await short == (0, "long\n")

    with_guest(tmp_path, work)


def test_a_command_that_is_too_long_is_told_the_limit(shell: Shell) -> None:
    assert shell.run(padded("", 1024 * 1024)).exit_code == 0
    with pytest.raises(InvalidRequest, match=r"may have 1 MiB.*write it to a file"):
        shell.run(padded("", 1024 * 1024 + 100))


def test_an_answer_that_comes_while_its_reader_is_cancelled_is_not_lost() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        answers, shell = socket.socketpair()
        now, trigger = socket.socketpair()
        with answers, shell, now, trigger:
            answers.setblocking(False)
            reading = asyncio.create_task(receive(answers))
            await asyncio.sleep(0)  # it waits
            loop.add_reader(now, reading.cancel)
            shell.send(b"an answer")
            trigger.send(b".")  # so both are seen at once, the answer first
            with pytest.raises(asyncio.CancelledError):
                await reading
            loop.remove_reader(now)
            async with asyncio.timeout(60):
                assert await receive(answers) == b"an answer"

    asyncio.run(work())
