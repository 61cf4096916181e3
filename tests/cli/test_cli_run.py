"""`hutch run`, from the outside."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from prompt import HUTCH, PATIENCE, Terminal, Traces, boxes, hutch, start  # noqa: F401

pytestmark = pytest.mark.usefixtures("boxes")

# --- what goes through -------------------------------------------------------------------


def test_a_command_gives_its_outputs_apart_and_its_exit_code() -> None:
    done = hutch("run", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 3)


def test_a_command_can_be_given_without_dashes() -> None:
    assert hutch("run", "--memory", "256m", "echo", "-n", "hi").stdout == b"hi"


def test_dashes_of_the_command_stay_with_it() -> None:
    done = hutch("run", "sh", "-c", 'echo "$@"', "--", "a", "--", "--json")
    assert done.stdout == b"a -- --json\n"


def test_output_is_byte_exact_when_nobody_watches() -> None:
    every = bytes(range(256)) * 100 + b"\xff\x1b[31m\r\n"
    assert hutch("run", "--stdin", "--", "cat", input=every).stdout == every


def test_arguments_need_not_be_text() -> None:
    assert hutch("run", "--", "printf", "%s", b"\xff\xe9 \xc3\xa9").stdout == b"\xff\xe9 \xc3\xa9"


def test_output_larger_than_any_buffer_arrives_whole() -> None:
    size = 64 * 1024 * 1024
    done = hutch("run", "--", "head", "-c", str(size), "/dev/zero")
    assert (len(done.stdout), done.returncode) == (size, 0)


def test_output_comes_as_it_is_made() -> None:
    talk = "echo first; read line; echo got $line"
    with start("run", "--stdin", "--", "sh", "-c", talk, stdin=subprocess.PIPE) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == b"first\n"
        process.stdin.write(b"it\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"got it\n"


UNREAD = b"hutch: your stdin was not passed on; to give it to the command: hutch run -i\n"


def test_stdin_is_empty_unless_asked_for_and_that_is_told(tmp_path: Path) -> None:
    done = hutch("run", "--", "cat", input=b"secret")
    assert (done.stdout, done.stderr) == (b"", UNREAD)
    (tmp_path / "f").write_bytes(b"secret")
    with (tmp_path / "f").open("rb") as file:
        assert hutch("run", "--", "cat", stdin=file).stderr == UNREAD
    assert hutch("run", "-i", "--", "cat", input=b"data").stderr == b""


def test_a_stdin_with_nothing_to_read_is_not_worth_a_word() -> None:
    assert hutch("run", "--", "cat", input=b"").stderr == b""


@pytest.mark.parametrize("words", [["--", "cat"], ["-i", "--", "true"]])
def test_a_pipe_that_nobody_closes_does_not_keep_it_waiting(words: list[str]) -> None:
    with start("run", *words, stdin=subprocess.PIPE) as process:
        assert process.wait(PATIENCE) == 0  # before the end of the `with` closes the pipe
        assert process.stderr and process.stderr.read() == b""


def test_a_loop_and_a_script_keep_what_they_have_to_read() -> None:
    command = f"{shlex.join(HUTCH)} run -- cat"
    loop = ["sh", "-c", f"while read line; do echo got $line; {command}; done"]
    script = f"{command}\necho the rest\n".encode()
    for argv, given, printed in (
        (loop, b"a\nb\n", b"got a\ngot b\n"),
        (["sh"], script, b"the rest\n"),
    ):
        done = subprocess.run(argv, input=given, capture_output=True, timeout=PATIENCE, check=False)
        assert (done.stdout, done.stderr) == (printed, b"")


def test_stdin_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(b"1\n" * 1_000_000)
    with path.open("rb") as file:
        assert hutch("run", "--stdin", "--", "wc", "-l", stdin=file).stdout == b"1000000\n"


def test_much_stdin_waits_for_a_slow_reader() -> None:
    done = hutch("run", "--stdin", "--", "sh", "-c", "sleep 1; wc -c", input=bytes(20_000_000))
    assert done.stdout == b"20000000\n"


def test_a_command_that_reads_no_stdin_ends_all_the_same() -> None:
    assert hutch("run", "--stdin", "--", "true", input=bytes(20_000_000)).returncode == 0


# --- exit codes --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_gives_128_and_its_number(number: signal.Signals) -> None:
    done = hutch("run", "--", "sh", "-c", f"kill -{number.value} $$")
    assert (done.returncode, done.stderr) == (128 + number, b"")


def test_a_timeout_gives_124_and_the_output_so_far() -> None:
    done = hutch("run", "--timeout", "500ms", "--", "sh", "-c", "echo begun; sleep 1000")
    assert (done.returncode, done.stdout) == (124, b"begun\n")
    assert done.stderr == b"hutch: timed out after 0.5 s, and stopped\n"


def test_a_program_that_is_not_there_gives_127() -> None:
    done = hutch("run", "--", "no-such-program")
    assert done.returncode == 127
    assert (
        done.stderr == b"hutch: cannot run no-such-program: there is no such program in the box\n"
    )


def test_a_line_for_a_shell_gets_the_advice_to_use_one() -> None:
    done = hutch("run", "--", "ls | wc -l")
    assert done.returncode == 127 and b"hutch run -- sh -c 'ls | wc -l'" in done.stderr


def test_a_limit_that_was_asked_for_and_does_not_hold_is_told() -> None:
    degraded = json.loads(hutch("run", "--json", "--", "true").stdout)["box"]["degraded"]
    done = hutch("run", "--cpus", "1", "--", "true")
    weak = any(why.startswith("cpu is not bounded") for why in degraded)
    assert done.stderr.startswith(b"hutch: --cpus is not enforced here") is weak
    assert hutch("run", "--", "true").stderr == b""


def test_a_program_that_cannot_be_executed_gives_126() -> None:
    done = hutch("run", "--", "/etc/passwd")
    assert done.returncode == 126 and b"Permission denied" in done.stderr


def test_a_missing_interpreter_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/no/such/interpreter\n")
    (tmp_path / "script").chmod(0o755)
    done = hutch("run", "--workspace", str(tmp_path), "--", "./script")
    assert done.returncode == 127 and b"interpreter" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no command given"),
        (["--"], "no command given"),
        (["--mem", "1g", "--", "true"], "did you mean --memory?"),
        (["--network", "host", "--", "true"], "boxes have no network yet"),
        (["--memory", "much", "--", "true"], "--memory"),
        (["--memory"], "--memory"),
        (["--cpus", "many", "true"], "--cpus"),
        (["--cpus", "nan", "true"], "cpus"),
        (["--pids", "inf", "true"], "--pids"),
        (["--pids", "1.5", "true"], "--pids"),
        (["--timeout", "soon", "true"], "--timeout"),
        (["--timeout", "0", "true"], "timeout"),
        (["--image", "nonsense", "true"], "nonsense"),
        (["--user", "nobody-at-all", "true"], "nobody-at-all"),
        (["--workdir", "../here", "true"], "is outside /workspace"),
        (["--workdir", "/not/there", "true"], "/not"),
        (["--workspace", "/not/there", "true"], "/not/there"),
        (["--mount", "/usr", "true"], "HOST:BOX"),
        (["--mount", "/usr:/proc", "true"], "/proc"),
        (["--env", "1=2", "true"], "'1'"),
        (["--env", "HUTCH_NOT_SET", "true"], "HUTCH_NOT_SET"),
        (["--min-isolation", "vm", "true"], "'vm'"),
        (["--min-isolation", "best", "true"], "'best'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_hutch_cannot_do_is_said_in_one_line_and_gives_125(
    words: list[str], says: str
) -> None:
    done = hutch("run", *words)
    message = done.stderr.decode()
    assert done.returncode == 125, message
    assert message.startswith("hutch: ") and message.count("\n") == 1 and says in message


def test_want_of_memory_ends_the_command_and_is_named() -> None:
    eat = "x = bytearray(200 << 20)"
    done = hutch("run", "--memory", "64m", "--", "python3", "-c", eat)
    assert done.returncode != 0
    if done.returncode == 137:  # killed for it, where a control group counts; else refused it
        assert b"--memory gives it more" in done.stderr


# --- the box -----------------------------------------------------------------------------


def test_variables_are_set_or_passed_on() -> None:
    env = os.environ | {"MINE": "b c"}
    done = hutch(
        "run", "--env", "A=x=y", "--env", "MINE", "--", "sh", "-c", "echo $A $MINE", env=env
    )
    assert done.stdout == b"x=y b c\n"


def test_nothing_else_of_the_environment_is_passed_on() -> None:
    done = hutch("run", "--", "env", env=os.environ | {"SECRET": "token"})
    assert b"token" not in done.stdout and b"SECRET" not in done.stdout


def test_workdir_and_user_are_as_asked_for() -> None:
    done = hutch("run", "--workdir", "/tmp", "--", "sh", "-c", "pwd; id -un")
    assert done.stdout == b"/tmp\nuser\n"


def test_a_workspace_is_shown_and_keeps_its_owner(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("yes")
    done = hutch(
        "run", "--workspace", str(tmp_path), "--", "sh", "-c", "cat given; echo made > new"
    )
    assert done.stdout == b"yes" and (tmp_path / "new").read_text() == "made\n"
    assert (tmp_path / "new").stat().st_uid == tmp_path.stat().st_uid


def test_a_mount_can_be_read_only(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("yes")
    mount = f"{tmp_path}:/given:ro"
    done = hutch("run", "--mount", mount, "--", "sh", "-c", "cat /given/given; touch /given/new")
    assert done.stdout == b"yes" and done.returncode != 0
    assert not (tmp_path / "new").exists()


def test_the_disk_has_the_size_that_was_asked_for() -> None:
    done = hutch("run", "--disk", "8m", "--", "sh", "-c", "head -c 16m /dev/zero > /tmp/big")
    assert done.returncode != 0
    assert b"No space" in done.stderr or b"File too large" in done.stderr


def test_the_number_of_processes_has_the_limit_that_was_asked_for() -> None:
    fork = "i=0; while [ $i -lt 40 ]; do sleep 5 & i=$((i+1)); done; echo all"
    done = hutch("run", "--pids", "16", "--", "sh", "-c", fork)
    assert b"all" not in done.stdout


# --- one object --------------------------------------------------------------------------


def test_json_is_one_object_with_all_there_is_to_know() -> None:
    done = hutch("run", "--json", "--", "sh", "-c", "echo out; printf '\\377\\033' >&2; exit 3")
    said = json.loads(done.stdout)
    assert done.returncode == said["exit_code"] == 3 and done.stderr == b""
    assert (said["stdout"], said["stderr"]) == ("out\n", "\ufffd\x1b")
    assert (said["timed_out"], said["truncated"], said["oom"]) == (False, False, False)
    assert said["total_bytes"] == 6 and said["duration_ms"] >= 0
    assert said["box"]["isolation"] == "ns" and said["box"]["id"]


def test_json_of_a_timeout_says_so() -> None:
    done = hutch("run", "--json", "--timeout", "0.3", "--", "sleep", "1000")
    assert done.returncode == 124 and json.loads(done.stdout)["timed_out"] is True


def test_json_of_much_output_is_cut_in_the_middle() -> None:
    done = hutch("run", "--json", "--", "head", "-c", "8m", "/dev/zero")
    said = json.loads(done.stdout)
    assert said["truncated"] is True and said["total_bytes"] == 8 * 1024 * 1024


def test_json_of_a_failure_has_the_error() -> None:
    done = hutch("run", "--json", "--", "no-such-program")
    assert done.returncode == 127 and json.loads(done.stdout)["error"]["code"] == "not_found"
    assert done.stderr.startswith(b"hutch: ")


@pytest.mark.parametrize("words", [["--workspace", "/not/there"], ["--cpus", "x"], ["--mem", "1"]])
def test_json_of_a_mistake_has_the_error_too(words: list[str]) -> None:
    done = hutch("run", "--json", *words, "--", "true")
    assert done.returncode == 125 and "code" in json.loads(done.stdout)["error"]


# --- being stopped -----------------------------------------------------------------------

TALK_FOR_EVER = ("sh", "-c", "echo up; sleep 1000 & setsid sleep 1000 & wait")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_it_and_nothing_is_left(number: signal.Signals) -> None:
    with start("run", "--", *TALK_FOR_EVER) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        traces = Traces(process.pid)
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
        assert traces.left() == []


def test_a_signal_at_any_moment_of_the_start_leaves_nothing() -> None:
    for delay in (0.05, 0.1, 0.15, 0.2, 0.3):
        with start("run", "--", *TALK_FOR_EVER) as process:
            time.sleep(delay)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            traces = Traces(process.pid) if children else None
            process.send_signal(signal.SIGINT)
            # -2, or a traceback: before hutch was more than a Python that starts.
            code = process.wait(PATIENCE)
            assert code == 130 or not traces
            assert traces is None or traces.are_gone_within(5), traces.left()
            assert process.stderr and (not traces or process.stderr.read() == b"")


def test_a_kill_leaves_nothing_either() -> None:
    with start("run", "--", *TALK_FOR_EVER) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        traces = Traces(process.pid)
        process.kill()
        assert traces.are_gone_within(5), traces.left()


def test_nohup_is_respected() -> None:
    command = ["run", "--stdin", "--", "sh", "-c", "echo up; read x; echo still"]
    argv = ["nohup", *HUTCH, *command]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGHUP)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"still\n"


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    with start("run", "--", "yes") as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == b"y\n"
        traces = Traces(process.pid)
        process.stdout.close()
        assert process.wait(PATIENCE) == 141
        assert process.stderr.read() == b"" and traces.left() == []


def test_it_can_be_stopped_while_nobody_takes_its_output() -> None:
    with start("run", "--", "yes") as process:
        assert process.stdout and process.stdout.readline() == b"y\n"
        time.sleep(0.5)  # until the pipe is full, and hutch waits for us
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130


def test_closed_descriptors_are_no_trouble() -> None:
    command = f"{HUTCH[0]} -m hutch run -- sh -c 'echo x >&2; exit 4' <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False, timeout=PATIENCE).returncode == 4


@pytest.mark.parametrize("where", [">/dev/full", ">&-"])
@pytest.mark.parametrize("words", ["run -- echo hi", "--version"])
def test_output_that_cannot_be_written_is_told_in_one_line(words: str, where: str) -> None:
    command = f"{HUTCH[0]} -m hutch {words} {where}"
    done = subprocess.run(["sh", "-c", command], check=False, timeout=PATIENCE, capture_output=True)
    assert done.returncode == 125
    assert done.stderr.startswith(b"hutch: ") and done.stderr.count(b"\n") == 1


def test_a_folder_that_was_deleted_under_us_is_told_in_one_line(tmp_path: Path) -> None:
    command = f'rmdir "$PWD"; exec {HUTCH[0]} -m hutch run --workspace . -- true'
    done = subprocess.run(
        ["sh", "-c", command], check=False, timeout=PATIENCE, capture_output=True, cwd=tmp_path
    )
    assert done.returncode == 125
    assert done.stderr.startswith(b"hutch: ") and done.stderr.count(b"\n") == 1


# --- at a terminal -----------------------------------------------------------------------


def test_escapes_are_shown_and_not_obeyed() -> None:
    steal = r"printf 'a\033]52;c;aGk=\007b\033[6n\302\233\233 caf\303\251\n'"
    with Terminal("run", "--", "sh", "-c", steal) as terminal:
        assert terminal.end() == 0
        assert terminal.screen.decode() == "a^[]52;c;aGk=^Gb^[[6n\\x9b\\x9b café\r\n"


def test_escapes_on_stderr_are_shown_too() -> None:
    with Terminal("run", "--", "sh", "-c", r"printf '\033[2J' >&2") as terminal:
        assert terminal.end() == 0 and terminal.screen == b"^[[2J"


def test_an_error_cannot_smuggle_escapes() -> None:
    with Terminal("run", "--", "no\x1b[2J\nsuch", NO_COLOR="1") as terminal:
        assert terminal.end() == 127
        assert b"\x1b" not in terminal.screen and terminal.screen.count(b"\n") == 1


def test_ctrl_c_stops_it() -> None:
    with Terminal("run", "--", *TALK_FOR_EVER) as terminal:
        terminal.expect("up")
        traces = Traces(terminal.pid)
        terminal.type("\x03")
        assert terminal.end() == 130 and traces.left() == []


def test_lines_that_are_typed_reach_it() -> None:
    with Terminal("run", "--stdin", "--", "sh", "-c", "echo up; cat; echo over") as terminal:
        terminal.expect("up")
        terminal.type("hello\n")
        terminal.expect("hello\r\nhello\r\n")  # what we typed, and what it says
        terminal.type("\x04")
        terminal.expect("over")
        assert terminal.end() == 0
