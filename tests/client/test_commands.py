"""Shells, programs, handles and terminals, as a caller sees them."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from hutch import (
    AsyncSandbox,
    Chunk,
    CommandFailed,
    Conflict,
    InvalidRequest,
    NotFound,
    Result,
    Sandbox,
    TimedOut,
)

pytestmark = pytest.mark.usefixtures("shared_box")  # which skips where there can be none


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def alive(box: Sandbox, word: str) -> bool:
    """Whether a program with this word in its arguments runs in the box."""
    code = (
        "import glob,sys\n"
        "for p in glob.glob('/proc/[0-9]*/cmdline'):\n"
        " try: words = open(p,'rb').read().split(b'\\0')\n"
        " except OSError: continue\n"
        f" if {word.encode()!r} in words: print('alive')"
    )
    return "alive" in box.commands.run(["python3", "-c", code]).stdout


# --- results ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["shell", "commands"])
def test_a_result_has_everything(shared_box, way):
    result = getattr(shared_box, way).run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert sorted(result.output.splitlines()) == ["err", "out"]
    assert (result.total_bytes, result.truncated, result.timed_out) == (8, False, False)
    assert result.duration_ms >= 0 and not result.ok and result.kept is None
    assert (result.stdout_bytes, result.stderr_bytes) == (b"out\n", b"err\n")


def test_bytes_that_are_no_text_are_kept_as_bytes(shared_box):
    result = shared_box.commands.run(r"printf 'a\377b'")
    assert (result.stdout, result.stdout_bytes) == ("a�b", b"a\xffb")


def test_a_list_is_arguments_and_a_string_is_for_a_shell(shared_box):
    assert shared_box.commands.run(["echo", "$HOME", "*"]).stdout == "$HOME *\n"
    assert shared_box.commands.run("echo $((6 * 7)) | tr 4 5").stdout == "52\n"
    assert shared_box.commands.run(("printf", "%s|", "a b", "é", "\udcff")).stdout_bytes == (
        b"a b|\xc3\xa9|\xff|"
    )


def test_options_of_a_program(shared_box):
    run = shared_box.commands.run
    assert run("pwd", cwd="/usr/bin").stdout == "/usr/bin\n"
    assert run("pwd", cwd="..").stdout == "/\n"
    assert run('echo "$A"', env={"A": "é\n"}).stdout == "é\n\n"
    assert run("cat", stdin="text").stdout == "text"
    assert run("cat", stdin=b"\xff").stdout_bytes == b"\xff"
    assert run("cat").stdout == ""
    assert run("wc -c", stdin=b"x" * 5_000_000).stdout.strip() == "5000000"
    assert run("head -c 1", stdin=b"x" * 5_000_000).stdout == "x"


def test_every_box_has_a_python(shared_box):
    """Also where an image has only python3."""
    script = "#!/usr/bin/env python\nimport sys; print(sys.version_info[0])\n"
    shared_box.files.write("three", script, mode=0o755)
    for command in ("./three", "python three", "sh -lc ./three"):
        assert shared_box.shell.run(command, check=True).stdout == "3\n"
    assert shared_box.commands.run(["python", "three"], check=True).stdout == "3\n"


@pytest.mark.parametrize("way", ["shell", "commands"])
def test_check_turns_a_bad_result_into_an_error_that_has_it(shared_box, way):
    run = getattr(shared_box, way).run
    assert run("true", check=True).ok
    with pytest.raises(CommandFailed, match="exit code 3: oh no") as failed:
        run("echo so far; echo oh no >&2; exit 3", check=True)
    assert (failed.value.result.stdout, failed.value.result.exit_code) == ("so far\n", 3)
    with pytest.raises(TimedOut, match="timed out") as late:
        run("echo so far; sleep 1000", timeout=3, check=True)
    assert late.value.result.stdout == "so far\n" and late.value.result.timed_out


@pytest.mark.parametrize("way", ["shell", "commands"])
def test_a_timeout_is_a_result_with_the_output_so_far(shared_box, way):
    result = getattr(shared_box, way).run("echo so far; sleep 1001", timeout=3)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, 124, "so far\n")
    assert not result.ok and result.duration_ms >= 3000
    assert not alive(shared_box, "1001")


@pytest.mark.parametrize("way", ["shell", "commands"])
def test_output_arrives_while_the_command_runs(shared_box, way):
    heard: list[tuple[str, str]] = []
    ready = "/tmp/go-" + way
    run = threading.Thread(
        target=getattr(shared_box, way).run,
        args=(f"echo first; echo oops >&2; until [ -e {ready} ]; do sleep 0.01; done; echo last",),
        kwargs={
            "on_stdout": lambda text: heard.append(("out", text)),
            "on_stderr": lambda text: heard.append(("err", text)),
        },
    )
    run.start()
    wait_for(lambda: len(heard) == 2)
    assert sorted(heard) == [("err", "oops\n"), ("out", "first\n")]
    shared_box.files.write(ready, "")
    run.join(30)
    assert heard[-1] == ("out", "last\n")


def test_a_callback_that_fails_ends_the_command(shared_box):
    def fail(text: str) -> None:
        raise ZeroDivisionError(text)

    with pytest.raises(ZeroDivisionError, match="hi"):
        shared_box.commands.run("echo hi; exec sleep 1002", on_stdout=fail)
    wait_for(lambda: not alive(shared_box, "1002"))


@pytest.mark.parametrize("way", ["shell", "commands"])
def test_a_stream_gives_chunks_and_then_the_result(shared_box, way):
    *chunks, result = getattr(shared_box, way).stream("echo a; echo b >&2; exit 4")
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert {(chunk.stream, chunk.text) for chunk in chunks} == {
        ("stdout", "a\n"),
        ("stderr", "b\n"),
    }
    assert isinstance(result, Result) and result.exit_code == 4


@pytest.mark.parametrize("way", ["shell", "commands"])
def test_leaving_a_stream_early_stops_the_command(shared_box, way):
    with getattr(shared_box, way).stream("echo go; sleep 1003") as stream:
        assert next(stream).text == "go\n"
        assert alive(shared_box, "1003")
    wait_for(lambda: not alive(shared_box, "1003"))
    assert getattr(shared_box, way).run("echo fine").stdout == "fine\n"


def test_long_output_is_clipped_and_never_lost(shared_box):
    result = shared_box.commands.run("seq 400000")
    assert result.truncated and result.total_bytes == 2_688_895
    assert result.stdout.startswith("1\n2\n") and result.stdout.endswith("400000\n")
    assert "read_output" in result.stdout and len(result.stdout) < 1_200_000
    at, whole = 0, b""
    while at < result.total_bytes:
        piece = shared_box.read_output(result.kept, at, 1_000_000)
        assert (piece.start, piece.total, piece.ended) == (at, result.total_bytes, True)
        whole += piece.data
        at += len(piece.data)
    assert whole.split() == [str(n).encode() for n in range(1, 400_001)]
    assert shared_box.read_output(result.kept, at).text == ""
    with pytest.raises(NotFound):
        shared_box.read_output("o99999")
    for offset, length in ((-1, 5), (0, -1), (0.5, 1), ("0", 1)):
        with pytest.raises(InvalidRequest):
            shared_box.read_output(result.kept, offset, length)


# --- shells -----------------------------------------------------------------------------


def test_several_shells_are_apart(shared_box):
    one = shared_box.shell.open("one", cwd="/tmp", env={"A": "1"})
    two = shared_box.shell.open()
    shared_box.shell.run("A=main")
    assert (one.name, two.name != "one") == ("one", True)
    assert one.run("echo $A; pwd").stdout == "1\n/tmp\n"
    assert two.run("echo $A.; cd /usr").stdout == ".\n"
    assert two.run("pwd").cwd == "/usr"
    assert shared_box.shell.run("echo $A").stdout == "main\n"
    with pytest.raises(Conflict):
        shared_box.shell.open("one")
    one.close()
    two.close()


def test_commands_of_one_shell_queue_in_order(box):
    first = threading.Thread(
        target=lambda: box.shell.run("echo > started; sleep 0.5; echo 1 >> order")
    )
    first.start()
    wait_for(lambda: box.files.exists("started"))
    box.shell.run("echo 2 >> order")
    first.join()
    assert box.files.read("order") == "1\n2\n"


# --- handles ----------------------------------------------------------------------------


def test_a_program_in_the_background_can_be_talked_to(shared_box):
    handle = shared_box.commands.run(
        "read x; echo got $x; read y; echo oops >&2; exit 5", background=True
    )
    assert handle.pid > 1 and str(handle.pid) in repr(handle)
    assert sum(p.id == handle.id and p.exit_code is None for p in shared_box.commands.list()) == 1
    handle.send_stdin("one\n")
    wait_for(lambda: handle.stdout() == "got one\n")
    assert handle.stderr() == ""
    with pytest.raises(TimedOut, match="still running") as late:
        handle.wait(timeout=0.2)
    assert late.value.result.stdout == "got one\n"
    handle.close_stdin()
    result = handle.wait()
    assert (result.exit_code, result.stdout, result.stderr) == (5, "got one\n", "oops\n")
    assert handle.wait() == result
    with pytest.raises(CommandFailed):
        handle.wait(check=True)
    assert [p.exit_code for p in shared_box.commands.list() if p.id == handle.id] == [5]


def test_a_handle_can_be_used_after_its_program_has_ended(shared_box):
    handle = shared_box.commands.run("echo bye", background=True)
    handle.wait()
    handle.send_stdin("this is not read" * 100_000)
    handle.close_stdin()
    handle.signal(signal.SIGTERM)
    handle.kill()
    handle.kill()
    assert (handle.stdout(), handle.wait().exit_code) == ("bye\n", 0)


def test_input_after_its_end_is_a_conflict(shared_box):
    handle = shared_box.commands.run("cat; exec sleep 1000", background=True)
    handle.send_stdin("x")
    handle.close_stdin()
    handle.close_stdin()
    with pytest.raises(Conflict, match="closed"):
        handle.send_stdin(b"y" * 5_000_000)
    handle.kill()


def test_a_kill_ends_the_whole_tree(shared_box):
    handle = shared_box.commands.run(
        "setsid sleep 1004 & (trap '' TERM; sleep 1004) & exec sleep 1004", background=True
    )
    wait_for(lambda: alive(shared_box, "1004"))
    handle.kill()
    assert not alive(shared_box, "1004")
    assert handle.wait().exit_code == 137


def test_a_program_that_reads_no_input_can_be_killed(shared_box):
    handle = shared_box.commands.run(["sleep", "1005"], background=True)
    sending = threading.Thread(target=handle.send_stdin, args=(b"x" * 8_000_000,))
    sending.start()
    sending.join(0.5)
    assert sending.is_alive(), "there should be no room for all of it"
    handle.signal(signal.SIGCONT)
    handle.kill()
    sending.join(60)
    assert not sending.is_alive() and handle.wait().exit_code == 137


def test_a_program_whose_output_nobody_reads_can_be_killed(shared_box):
    handle = shared_box.commands.run(["yes"], background=True)
    stream = handle.stream()
    next(stream)
    handle.kill()
    *_, result = stream
    assert result.exit_code == 137


def test_a_signal_reaches_the_program_alone(shared_box):
    handle = shared_box.commands.run(
        "trap 'echo caught; exit 6' USR1; echo ready; while :; do sleep 0.01; done", background=True
    )
    wait_for(lambda: handle.stdout() == "ready\n")
    handle.signal(signal.SIGUSR1)
    result = handle.wait(timeout=30)
    assert (result.exit_code, result.stdout) == (6, "ready\ncaught\n")
    for number in (0, -1, 65, 1.5, "TERM"):
        with pytest.raises(InvalidRequest, match="signal"):
            handle.signal(number)


def test_a_handle_can_be_followed_from_the_start(shared_box):
    handle = shared_box.commands.run("echo a; read x; echo b", background=True)
    wait_for(lambda: handle.stdout() == "a\n")
    heard: list[str] = []
    with pytest.raises(TimedOut):
        handle.wait(on_stdout=heard.append, timeout=0.2)
    handle.send_stdin("\n")
    assert handle.wait(on_stdout=heard.append).exit_code == 0
    assert heard == ["a\n", "a\n", "b\n"] or "".join(heard) == "a\na\nb\n"
    chunks = [item.text for item in handle.stream() if isinstance(item, Chunk)]
    assert "".join(chunks) == "a\nb\n"


def test_a_handle_can_be_followed_from_any_byte(shared_box):
    handle = shared_box.commands.run(
        "yes abcdefg | head -c 3000000; touch /tmp/printed; read x; echo more", background=True
    )
    whole = b"abcdefg\n" * 375_000 + b"more\n"
    wait_for(lambda: shared_box.files.exists("/tmp/printed"))
    with handle.stream(offset=2_000_001) as stream:
        handle.send_stdin("\n")
        seen = b"".join(item.data for item in stream if isinstance(item, Chunk))
    assert seen == whole[2_000_001:]
    items = list(handle.stream(offset=len(whole) + 10))
    assert [item.exit_code for item in items] == [0]
    for offset in (-1, 1.5, "x"):
        with pytest.raises(InvalidRequest):
            list(handle.stream(offset=offset))


def test_leaving_a_followed_program_leaves_it_alone(shared_box):
    handle = shared_box.commands.run("echo a; read x; echo b", background=True)
    with handle.stream() as stream:
        assert next(stream).text == "a\n"
    handle.send_stdin("\n")
    assert handle.wait(timeout=30).stdout == "a\nb\n"


def test_a_background_program_has_a_timeout_too(shared_box):
    handle = shared_box.commands.run("echo so far; exec sleep 1006", background=True, timeout=3)
    result = handle.wait()
    assert (result.timed_out, result.exit_code, result.stdout) == (True, 124, "so far\n")


# --- terminals --------------------------------------------------------------------------


def test_a_terminal_is_one(shared_box):
    terminal = shared_box.pty.open("tty; stty size; echo err >&2", columns=100, rows=30)
    result = terminal.wait(timeout=30)
    assert result.stdout.splitlines()[1:] == ["30 100", "err"] and result.stderr == ""
    assert result.stdout.startswith("/dev/pts/")
    assert [p.tty for p in shared_box.commands.list() if p.id == terminal.id] == [True]


def test_a_terminal_can_be_typed_into_and_resized(shared_box):
    terminal = shared_box.pty.open(columns=80, rows=24)
    terminal.send("echo $((6*7)); stty size\n")
    wait_for(lambda: "24 80" in terminal.stdout() and "42" in terminal.stdout())
    terminal.resize(132, 43)
    terminal.send("stty size\n")
    wait_for(lambda: "43 132" in terminal.stdout())
    terminal.send("exit 7\n")
    assert terminal.wait(timeout=30).exit_code == 7


def test_a_terminal_passes_on_ctrl_c_and_ctrl_d(shared_box):
    terminal = shared_box.pty.open("cat; echo cat said $?; sleep 1007; echo never")
    terminal.send("hello\n")
    wait_for(lambda: terminal.stdout().count("hello") == 2)
    terminal.close_stdin()
    wait_for(lambda: "cat said 0" in terminal.stdout())
    terminal.send("\x03")
    result = terminal.wait(timeout=30)
    assert result.exit_code == 130 and "never" not in result.stdout


def test_a_terminal_can_be_killed(shared_box):
    terminal = shared_box.pty.open("sleep 1008 & cat")
    wait_for(lambda: alive(shared_box, "1008"))
    terminal.kill()
    assert terminal.wait().exit_code == 137 and not alive(shared_box, "1008")


def test_a_size_that_no_terminal_has_is_refused(shared_box):
    terminal = shared_box.pty.open("cat")
    for columns, rows in ((0, 24), (80, -1), (80.5, 24), ("80", 24), (1 << 20, 24), (None, 1)):
        with pytest.raises(InvalidRequest, match=r"terminal|columns|rows"):
            shared_box.pty.open("cat", columns=columns, rows=rows)
        with pytest.raises(InvalidRequest, match=r"terminal|columns|rows"):
            terminal.resize(columns, rows)
    terminal.kill()


# --- bad input --------------------------------------------------------------------------


BAD = [
    ("", {}, InvalidRequest, "empty command"),
    ("  \n", {}, InvalidRequest, "empty command"),
    ([], {}, InvalidRequest, "empty command"),
    ([""], {}, InvalidRequest, "empty command"),
    (["a", 5], {}, InvalidRequest, "must be text, not"),
    (["a\0b"], {}, InvalidRequest, "NUL"),
    ("echo \0", {}, InvalidRequest, "NUL"),
    ("echo \ud800", {}, InvalidRequest, "surrogate"),
    (5, {}, InvalidRequest, "list of texts"),
    (None, {}, InvalidRequest, "list of texts"),
    (b"true", {}, InvalidRequest, "list of texts"),
    (["no-such-program-here"], {}, NotFound, "no-such-program-here"),
    (["/etc/passwd"], {}, Exception, "passwd"),
    ("true", {"cwd": "/no/such/folder"}, NotFound, "working directory"),
    ("true", {"cwd": ""}, InvalidRequest, "empty"),
    ("true", {"cwd": "a\0"}, InvalidRequest, "NUL"),
    ("true", {"env": {"A B": "x"}}, InvalidRequest, "environment variable"),
    ("true", {"env": {"A": "\0"}}, InvalidRequest, "NUL"),
    ("true", {"env": ["A=1"]}, InvalidRequest, "env"),
    ("true", {"user": "nobody-here"}, InvalidRequest, "nobody-here"),
    ("true", {"user": "a\0"}, InvalidRequest, "NUL"),
    ("true", {"user": ""}, InvalidRequest, "user"),
    ("true", {"timeout": 0}, InvalidRequest, "timeout"),
    ("true", {"timeout": -1}, InvalidRequest, "timeout"),
    ("true", {"timeout": float("nan")}, InvalidRequest, "timeout"),
    ("true", {"timeout": float("inf")}, InvalidRequest, "timeout"),
    ("true", {"timeout": "5"}, InvalidRequest, "timeout"),
    ("true", {"timeout": True}, InvalidRequest, "timeout"),
    (["x" * 300_000], {}, InvalidRequest, "too long"),
    (["true", *["y" * 100] * 5000], {}, InvalidRequest, "too long"),
]  # fmt: skip


@pytest.mark.parametrize("command, options, error, message", BAD, ids=lambda o: repr(o)[:30])
@pytest.mark.parametrize("background", [False, True])
def test_a_program_that_cannot_be_is_refused_with_a_reason(
    shared_box, command, options, error, message, background
):
    with pytest.raises(error, match=message):
        shared_box.commands.run(command, background=background, **options)


@pytest.mark.parametrize("stdin", [5, ["x"], object()])
def test_input_that_is_none_is_refused(shared_box, stdin):
    with pytest.raises(InvalidRequest, match="expected text or bytes"):
        shared_box.commands.run("cat", stdin=stdin)


@pytest.mark.parametrize(
    "command, options, message",
    [("", {}, "empty command"), ("\n", {}, "empty command"), ("a\0", {}, "NUL"),
     (5, {}, "must be text"), ("echo \udfff\ud800", {}, "surrogate"), (["ls"], {}, "must be text"),
     ("true", {"timeout": -5}, "timeout"), ("x" * 1_048_577, {}, "too long")],
    ids=lambda o: repr(o)[:30],
)  # fmt: skip
def test_a_command_that_cannot_be_is_refused_with_a_reason(shared_box, command, options, message):
    with pytest.raises(InvalidRequest, match=message):
        shared_box.shell.run(command, **options)
    assert shared_box.shell.run("echo fine").stdout == "fine\n"


@pytest.mark.parametrize(
    "name, options, error",
    [("", {}, InvalidRequest), ("a\0", {}, InvalidRequest), (5, {}, InvalidRequest),
     ("x" * 300, {}, InvalidRequest), ("s", {"cwd": "/no/such"}, NotFound),
     ("s", {"env": {"1": "x"}}, InvalidRequest), ("s", {"user": "nobody-here"}, InvalidRequest)],
    ids=lambda o: repr(o)[:30],
)  # fmt: skip
def test_a_shell_that_cannot_be_is_refused(shared_box, name, options, error):
    with pytest.raises(error):
        shared_box.shell.open(name, **options)


# --- threads, tasks, interrupts ---------------------------------------------------------


def test_two_threads_can_use_one_box(shared_box):
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(20):
                assert shared_box.commands.run(f"echo {number}.{n}").stdout == f"{number}.{n}\n"
                shared_box.files.write(f"/tmp/thread-{number}", str(n))
                assert shared_box.files.read(f"/tmp/thread-{number}") == str(n)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


@pytest.mark.parametrize("way", ["shell", "commands"])
def test_ctrl_c_during_a_run_ends_the_command(shared_box, way):
    def press() -> None:
        wait_for(lambda: alive(shared_box, "1009"))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        getattr(shared_box, way).run("setsid sleep 1009 & sleep 1009")
    pressing.join()
    wait_for(lambda: not alive(shared_box, "1009"))
    assert getattr(shared_box, way).run("echo fine").stdout == "fine\n"


@pytest.mark.parametrize("way", ["shell", "commands"])
def test_cancelling_an_async_run_kills_its_tree(way):
    async def main() -> None:
        async with await AsyncSandbox.create() as box:
            run = asyncio.create_task(
                getattr(box, way).run("setsid sleep 1010 & sleep 1010", timeout=600)
            )
            code = "grep -lz '^1010$' /proc/[0-9]*/cmdline 2>/dev/null | wc -l"
            deadline = time.monotonic() + 120
            while int((await box.commands.run(code)).stdout) < 2:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            while int((await box.commands.run(code)).stdout):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert (await getattr(box, way).run("echo fine")).stdout == "fine\n"

    asyncio.run(main())


def test_the_async_twin_does_the_same():
    async def main() -> None:
        async with await AsyncSandbox.create(env={"A": "1"}) as box:
            await box.shell.run("cd /tmp; B=2")
            assert (await box.shell.run("echo $A$B; pwd")).stdout == "12\n/tmp\n"
            handle = await box.commands.run("read x; echo got $x", background=True)
            await handle.send_stdin("it\n")
            assert (await handle.wait(check=True)).stdout == "got it\n"
            terminal = await box.pty.open("stty size")
            assert "24 80" in (await terminal.wait()).stdout
            async with await box.shell.stream("echo a; sleep 1000") as stream:
                async for item in stream:
                    assert isinstance(item, Chunk) and item.text == "a\n"
                    break
            several = await asyncio.gather(*(box.commands.run(["echo", str(n)]) for n in range(20)))
            assert [result.stdout for result in several] == [f"{n}\n" for n in range(20)]
            assert box.id in [info.id for info in await AsyncSandbox.list()]
            changes = await box.files.watch("/tmp")
            await box.files.write("/tmp/f", "x")
            assert (await anext(changes)).path == "/tmp/f"
            await changes.aclose()
            pieces = [piece async for piece in await box.files.read("/tmp/f", "stream")]
            assert pieces == [b"x"]

            async def source():
                yield b"a"
                yield b"b"

            assert await box.files.write("/tmp/g", source()) == 2
            assert await box.files.write("/tmp/g", iter([b"c"])) == 1

    asyncio.run(main())
