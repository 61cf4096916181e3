"""The guest, from the bundle, in a root that holds a shell and nothing else: no bash, no Python."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hutch import wire
from hutch.backends.base import SocketStream
from hutch.engine.link import Link
from hutch.images.bundle import Bundle, build

BUSYBOX, DASH = Path("/bin/busybox"), Path("/bin/dash")
MISSING = (
    "needs root, to mount and to chroot"
    if os.getuid()
    else "needs busybox-static and dash: apt-get install them"
    if not (BUSYBOX.exists() and DASH.exists())
    else ""
)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

# The mounts are in a namespace of their own, which ends with the guest: that is its pid 1.
ENTER = """
mount --bind "$1" "$2/.hutch" && mount -o remount,bind,ro "$2/.hutch" || exit 99
mount -t proc proc "$2/proc" && mount --bind /dev/null "$2/dev/null" || exit 99
root=$2; shift 2; exec chroot --userspec=1000:1000 "$root" "$@"
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(params=["busybox", "dash"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A root whose /bin/sh is busybox, or is dash with the libraries that it needs."""
    root = tmp_path / "root"
    for name in ("bin", "proc", "dev", "tmp", "workspace", ".hutch"):
        (root / name).mkdir(parents=True)
    (root / "dev/null").touch()
    for name in ("tmp", "workspace"):
        (root / name).chmod(0o1777)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    for name in ("cat", "echo", "env", "sleep", "true"):
        (root / "bin" / name).symlink_to("busybox")
    if request.param == "busybox":
        (root / "bin/sh").symlink_to("busybox")
    else:
        shutil.copy(DASH, root / "bin/sh")
        needed = subprocess.run(["ldd", DASH], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"/\S+", needed):
            (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, root / library[1:])
    return root


@asynccontextmanager
async def guest(root: Path, bundle: Bundle) -> AsyncIterator[Link]:
    ours, theirs = socket.socketpair()
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"]
    start = bundle.command("hutch.guest", "--fd", str(theirs.fileno()), "--workdir", "/workspace")
    argv = [*unshare, str(bundle.path), str(root), *start]
    process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], env={"PATH": os.environ["PATH"]})
    theirs.close()
    link = await Link.open(SocketStream(ours))
    try:
        yield link
    finally:
        await link.close()
        process.wait(20)


async def run(link: Link, request: Any) -> tuple[dict[str, Any], str]:
    """Its result, and what it printed."""
    printed = b""
    async with link.call(request) as call:
        async for event in call:
            if isinstance(event, wire.Data):
                printed += event.data
        return call.result, printed.decode()


def with_guest(root: Path, bundle: Bundle, work: Callable[[Link], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), guest(root, bundle) as link:
            await work(link)

    asyncio.run(main())


def sh(command: str, timeout: float | None = None) -> wire.ShellCommand:
    return wire.ShellCommand("main", command, timeout)


def test_a_program_runs(root: Path, bundle: Bundle) -> None:
    async def work(link: Link) -> None:
        result, printed = await run(link, wire.Exec(["echo", "hello"]))
        assert (result["exit_code"], printed) == (0, "hello\n")
        result, _ = await run(link, wire.Exec(["sh", "-c", "exit 3"]))
        assert result["exit_code"] == 3

    with_guest(root, bundle, work)


def test_a_shell_keeps_its_directory_and_variables(root: Path, bundle: Bundle) -> None:
    async def work(link: Link) -> None:
        result, _ = await run(link, sh("cd /tmp; a=1; export B='x y'; f() { echo f; }; (exit 7)"))
        assert (result["exit_code"], result["cwd"]) == (7, "/tmp")
        _, printed = await run(
            link, sh('echo $? $a $PWD; f; env | while read l; do echo "$l"; done')
        )
        assert printed.startswith("7 1 /tmp\nf\n") and "B=x y\n" in printed

    with_guest(root, bundle, work)


def test_a_shell_that_ended_has_a_successor(root: Path, bundle: Bundle) -> None:
    async def work(link: Link) -> None:
        for ending, code in (("exit 3", 3), ("set -e; env false_", 127), ("kill -9 $$", 137)):
            result, _ = await run(link, sh('export B="it\'s"; cd /tmp'))
            result, _ = await run(link, sh(ending))
            assert result["exit_code"] == code
            result, printed = await run(link, sh("echo $B $PWD"))
            assert (printed, result["restarted"]) == ("it's /tmp\n", True)

    with_guest(root, bundle, work)


def test_a_shell_says_what_it_exported_in_its_last_command(root: Path, bundle: Bundle) -> None:
    async def work(link: Link) -> None:
        await run(link, sh("export B=2; cd /tmp; exit 3"))
        result, printed = await run(link, sh("echo $B $PWD"))
        assert (printed, result["restarted"]) == ("2 /tmp\n", True)

    with_guest(root, bundle, work)


@pytest.mark.parametrize(
    ("command", "said"),
    [("cat <<E\nso far\n", "so far\n"), ("echo so far; read x", "so far\n"), ("cat", "")],
)
def test_a_shell_survives(root: Path, bundle: Bundle, command: str, said: str) -> None:
    async def work(link: Link) -> None:
        await run(link, sh("a=kept"))
        async with asyncio.timeout(20):
            _, printed = await run(link, sh(command))
        assert printed == said
        assert (await run(link, sh("echo $a")))[1] == "kept\n"

    with_guest(root, bundle, work)


def test_a_shell_goes_on_after_a_syntax_error(root: Path, bundle: Bundle) -> None:
    async def work(link: Link) -> None:
        await run(link, sh("export a=kept"))
        result, _ = await run(link, sh("echo 'abc"))
        assert result["exit_code"] == 2
        assert (await run(link, sh("echo $a")))[1] == "kept\n"

    with_guest(root, bundle, work)


def test_a_timeout_ends_the_command_and_the_next_one_runs(root: Path, bundle: Bundle) -> None:
    async def work(link: Link) -> None:
        await run(link, sh("export a=kept; cd /tmp"))
        result, printed = await run(link, sh("echo so far; sleep 1000", 0.5))
        assert (result["timed_out"], result["exit_code"], printed) == (True, 124, "so far\n")
        assert (await run(link, sh("echo $a $PWD")))[1] == "kept /tmp\n"

    with_guest(root, bundle, work)


def test_files_can_be_written_and_read(root: Path, bundle: Bundle) -> None:
    async def work(link: Link) -> None:
        async with link.call(wire.Write("new/file")) as call:
            await call.send(b"\0\xff" * 100_000)
            call.end_input()
            async for _ in call:
                pass
        async with link.call(wire.Read("new/file")) as call:
            read = b"".join([event.data async for event in call if isinstance(event, wire.Data)])
        assert read == b"\0\xff" * 100_000

    with_guest(root, bundle, work)
