"""A user's program that touches the whole public surface. Never run: `mypy --strict` reads it.

What is inferred is written down, so that a type that gets worse is an error here.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import assert_type

import hutch
from hutch import (
    AsyncHandle,
    AsyncSandbox,
    AsyncShell,
    AsyncTerminal,
    BackendUnavailable,
    BoxInfo,
    BoxLost,
    CellError,
    CellResult,
    Change,
    Chunk,
    CommandFailed,
    Context,
    Entry,
    Execution,
    Handle,
    HutchError,
    Limits,
    Logs,
    Match,
    Mount,
    Piece,
    Process,
    Result,
    Sandbox,
    Shell,
    Stats,
    Terminal,
    TimedOut,
    Variable,
)


def sync_use(folder: Path) -> None:
    with Sandbox.create(
        image="host", memory="512m", cpus=1, pids=64, disk=1 << 20, env={"A": "1"}, workdir="/tmp",
        user="user", workspace=folder, mounts=["/a:/b:ro", Mount("/c", "/d", read_only=True)],
        network="none", min_isolation="ns",
    ) as box:  # fmt: skip
        assert_type(box, Sandbox)
        assert_type(box.id, str)
        assert_type(box.info, BoxInfo)
        assert_type(box.info.limits, Limits)
        assert_type(box.stats(), Stats)
        assert_type(Sandbox.list(), list[BoxInfo])

        result = box.shell.run("x", timeout=1, check=True, on_stdout=print, on_stderr=print)
        assert_type(result, Result)
        assert_type(result.exit_code, int)
        assert_type(result.stdout, str)
        assert_type(result.stdout_bytes, bytes)
        assert_type(result.cwd, str | None)
        if result.kept:
            piece = box.read_output(result.kept, 0, 100)
            assert_type(piece, Piece)
            assert_type(piece.data, bytes)
        shell = box.shell.open("two", cwd="/", env={"B": "2"}, user="user")
        assert_type(shell, Shell)
        with shell.stream("x") as stream:
            for item in stream:
                assert_type(item, Chunk | Result)
                if isinstance(item, Chunk):
                    print(item.text, item.stream)
        shell.close()

        assert_type(
            box.commands.run(["ls", "-l"], stdin=b"x", cwd="/", env={}, user="user"), Result
        )
        handle = box.commands.run("sleep 1", background=True, timeout=2.5)
        assert_type(handle, Handle)
        assert_type(handle.pid, int)
        assert_type(handle.process, Process)
        assert_type(handle.stdout(), str)
        assert_type(handle.stderr(), str)
        handle.send_stdin("x")
        handle.send_stdin(b"x")
        handle.close_stdin()
        handle.signal(signal.SIGTERM)
        handle.signal(15)
        assert_type(handle.wait(timeout=1, check=True, on_stdout=print), Result)
        handle.kill()
        assert_type(box.commands.list(), list[Process])

        terminal = box.pty.open("top", columns=100, rows=30)
        assert_type(terminal, Terminal)
        terminal.resize(80, 24)
        terminal.send("q")
        assert_type(terminal.wait(), Result)

        sync_code(box)
        sync_files(box, folder)
        box.kill()
        box.close()


def sync_code(box: Sandbox) -> None:
    done = box.run_code(
        "1", context="main", timeout=2.5, on_stdout=print, on_stderr=print, on_result=shown,
        check=True,
    )  # fmt: skip
    assert_type(done, Execution)
    assert_type(done.results, tuple[CellResult, ...])
    assert_type(done.logs, Logs)
    assert_type(done.error, CellError | None)
    assert_type(done.text, str | None)
    assert_type(done.died, str | None)
    for result in done.results:
        assert_type(result.png, str | None)
        assert_type(result.bytes_of("png"), bytes)
        assert_type(result.formats(), tuple[str, ...])
    with box.stream_code("1") as stream:
        for item in stream:
            assert_type(item, Chunk | CellResult | Execution)
    context = box.create_code_context("two", cwd="/tmp", env={"A": "1"})
    assert_type(context, Context)
    assert_type(box.list_code_contexts(), list[Context])
    assert_type(box.restart_code_context(context), Context)
    assert_type(box.interrupt(context), bool)
    assert_type(box.variables(), list[Variable])
    box.remove_code_context(context)


def shown(result: CellResult) -> None:
    print(result.text, result.data, result.chart)


def sync_files(box: Sandbox, folder: Path) -> None:
    files = box.files
    assert_type(files.read("a"), str)
    assert_type(files.read("a", "text", offset=1), str)
    assert_type(files.read("a", "bytes", length=5), bytes)
    assert_type(files.read("a", format="bytes"), bytes)
    for piece in files.read("a", "stream"):
        assert_type(piece, bytes)
    assert_type(files.write("a", "text", mode=0o600), int)
    assert_type(files.write("a", b"bytes", append=True), int)
    assert_type(files.write("a", pieces()), int)
    files.write_files({"a": "x", "b": b"y"})
    assert_type(files.edit("a", "x", "y", replace_all=True), int)
    assert_type(files.list(".", depth=2), list[Entry])
    assert_type(files.stat("a"), Entry)
    assert_type(files.exists("a"), bool)
    assert_type(files.make_dir("d"), bool)
    files.move("a", "b", overwrite=True)
    files.remove("d", recursive=True)
    assert_type(files.search("x", ".", glob="*.py", ignore_case=True, limit=5), list[Match])
    assert_type(files.glob("**/*.py"), list[str])
    with files.watch(".", recursive=True) as changes:
        for change in changes:
            assert_type(change, Change)
    assert_type(files.upload(folder, "up"), int)
    assert_type(files.download("up", str(folder), limit=None), int)


def pieces() -> Iterator[bytes]:
    yield b"x"


async def async_pieces() -> AsyncIterator[bytes]:
    yield b"x"


async def async_use(folder: Path) -> None:
    async with await AsyncSandbox.create(workspace=str(folder)) as box:
        assert_type(box, AsyncSandbox)
        assert_type(await box.stats(), Stats)
        assert_type(await AsyncSandbox.list(), list[BoxInfo])
        assert_type(await box.shell.run("x", timeout=1), Result)
        assert_type(await box.read_output("o1"), Piece)
        assert_type(await box.run_code("1", on_result=shown), Execution)
        assert_type(await box.variables("main"), list[Variable])
        assert_type(await box.interrupt(), bool)
        async with await box.stream_code("1") as cell:
            async for part in cell:
                assert_type(part, Chunk | CellResult | Execution)
        shell = await box.shell.open()
        assert_type(shell, AsyncShell)
        async with await shell.stream("x", timeout=1) as stream:
            async for item in stream:
                assert_type(item, Chunk | Result)
        handle = await box.commands.run(["x"], background=True)
        assert_type(handle, AsyncHandle)
        assert_type(await handle.wait(), Result)
        assert_type(await handle.stdout(), str)
        async for item in await handle.stream():
            assert_type(item, Chunk | Result)
        terminal = await box.pty.open()
        assert_type(terminal, AsyncTerminal)
        await terminal.send("x")
        await terminal.kill()
        assert_type(await box.files.read("a"), str)
        assert_type(await box.files.read("a", "bytes"), bytes)
        async with await box.files.read("a", "stream") as content:
            async for piece in content:
                assert_type(piece, bytes)
        assert_type(await box.files.write("a", async_pieces()), int)
        assert_type(await box.files.write("a", pieces()), int)
        changes = await box.files.watch()
        assert_type(await anext(changes), Change)
        await changes.aclose()
        assert_type(await box.files.list(), list[Entry])
        assert_type(await box.files.upload(folder, "up"), int)


def errors() -> None:
    try:
        Sandbox.create()
    except (CommandFailed, TimedOut) as exc:
        assert_type(exc.result, Result)
        assert_type(exc.execution, Execution)
    except BoxLost:
        pass
    except BackendUnavailable as exc:
        print(exc.code, exc.status)
    except HutchError as exc:
        assert_type(exc.code, str)
    print(hutch.__version__)


def wrong(box: Sandbox) -> None:
    """What a type checker must refuse: an ignore that is not needed is an error in strict mode."""
    box.files.read("a", "lines")  # type: ignore[call-overload]
    box.commands.run("x", background=True, check=True)  # type: ignore[call-overload]
    Sandbox.create(network="host")  # type: ignore[arg-type]
    Sandbox.create(min_isolation="total")  # type: ignore[arg-type]
    box.shell.run(["ls"])  # type: ignore[arg-type]
    box.run_code(b"1")  # type: ignore[arg-type]
