"""A build that is stopped ends at once, whatever it waits for, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from must_work import need
from wheels_of_tests import Index, children, make_wheel

from hutch.backends.namespaces.foreign import remove_in_background
from hutch.errors import BackendUnavailable
from hutch.images import store
from hutch.images.environment import Image
from hutch.images.held_images import HeldImages
from hutch.images.stopping import WorkStopped

PATIENCE = 60
SLOW = "hutchtest-slow"
# The caller of the tests may ignore SIGINT.
SYNC = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from hutch import Image, Sandbox
Sandbox.create(image=Image.python([{SLOW!r}]))
"""
ASYNC = f"""
import asyncio, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from hutch import AsyncSandbox, Image
asyncio.run(AsyncSandbox.create(image=Image.python([{SLOW!r}])))
"""


@pytest.fixture
def data(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An empty store, and a folder where packages are looked for."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    return tmp_path / "data"


def left(data: Path) -> list[str]:
    return sorted(os.listdir(data / "images/env"))


def wait_until_removed(data: Path) -> None:
    """A process of its own removes what was stopped."""
    end = time.monotonic() + PATIENCE
    while left(data):
        assert time.monotonic() < end, left(data)
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(inner for each in found for inner in descendants(each))]


@pytest.mark.parametrize("program", [SYNC, ASYNC], ids=["sync", "async"])
def test_ctrl_c_ends_a_build_of_a_program_that_waits_for_the_network(
    program: str, tmp_path: Path, data: Path
) -> None:
    argv = [sys.executable, "-c", program]
    with Index(SLOW) as index:
        # The installer itself would wait for a day: what ends it is not its own patience.
        env = os.environ | {"UV_INDEX": index.url, "UV_HTTP_TIMEOUT": "86400"}
        process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)
        try:
            if not index.asked.wait(PATIENCE):
                process.kill()
                need("packages", process.communicate()[1])
            watched = [os.pidfd_open(pid) for pid in descendants(process.pid)]
            assert len(watched) >= 2, "there is an installer, and its supervisor"
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
        assert not index.answer.is_set(), "the index still holds its connections open"
        assert process.returncode == -signal.SIGINT
        for pidfd in watched:
            assert select.select([pidfd], [], [], PATIENCE)[0]
            os.close(pidfd)
    wait_until_removed(data)
    make_wheel(tmp_path, SLOW)
    ready = store.build(Image.python([SLOW]))
    assert left(data) == [ready.key, f"{ready.key}.lock"]


@pytest.mark.parametrize("program", [SYNC, ASYNC], ids=["sync", "async"])
def test_ctrl_c_ends_a_build_of_a_program_that_compiles(
    program: str, tmp_path: Path, data: Path
) -> None:
    make_wheel(tmp_path, SLOW)
    endless = tmp_path / "compile.py"
    endless.write_text("import time\ntime.sleep(86400)\n")
    swap = f"from hutch.images import install\ninstall.__file__ = {str(endless)!r}\n"
    process = subprocess.Popen([sys.executable, "-c", swap + program])
    try:
        end = time.monotonic() + PATIENCE
        while not any(str(endless) in words for words in map(cmdline, descendants(process.pid))):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        watched = [os.pidfd_open(pid) for pid in descendants(process.pid)]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == -signal.SIGINT
    finally:
        process.kill()
        process.wait()
    for pidfd in watched:
        assert select.select([pidfd], [], [], PATIENCE)[0]
        os.close(pidfd)
    wait_until_removed(data)


def cmdline(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def test_who_waits_for_another_process_that_builds_the_same_can_be_cancelled(data: Path) -> None:
    image = Image.python([SLOW])
    code = (
        "import sys; from hutch.images import store; from hutch.images.environment import Image\n"
        "store.build(Image.python(sys.argv[1:]))"
    )

    async def work() -> None:
        images = HeldImages()
        waiting = asyncio.create_task(images.find("", image.packages))
        try:
            await asyncio.wait([waiting], timeout=0.3)
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        finally:
            images.close()

    with Index(SLOW) as index:
        env = os.environ | {"UV_INDEX": index.url}
        process = subprocess.Popen([sys.executable, "-c", code, SLOW], env=env)
        try:
            assert index.asked.wait(PATIENCE)
            asyncio.run(work())
            assert process.poll() is None, "the other process still builds"
        finally:
            process.kill()
            process.wait()


def test_what_a_stopped_build_made_is_removed_behind_its_back(data: Path) -> None:
    before = set(children(os.getpid()))
    for stage in ("resolving", "compiling"):

        def stop(progress: store.Progress, stage: str = stage) -> None:
            if progress.stage == stage:
                raise WorkStopped

        try:
            with pytest.raises(WorkStopped):
                store.build("python", stop)
        except BackendUnavailable as exc:
            need("packages", str(exc))
        assert not set(children(os.getpid())) - before
        wait_until_removed(data)


def test_a_folder_is_removed_in_the_background_however_it_was_left(tmp_path: Path) -> None:
    folder = tmp_path / "-odd\nname"
    (folder / "inner/locked").mkdir(parents=True)
    (folder / "inner/locked/file").touch()
    (folder / "inner/locked").chmod(0)
    remove_in_background(folder)
    end = time.monotonic() + PATIENCE
    while folder.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
