"""What is measured: one scenario per row of SPECIFICATION.md, with who takes part in it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hutch import Sandbox

from . import cells, condensing, containers, crowd, lasting, memory, pods, protocol, served
from .measure import Contender, Promise, absent, milliseconds
from .peers import BUBBLEWRAP, DOCKER_RUN, DOCKER_RUN_OFFLINE, Container, Peers, run

MB = 1_000_000  # speeds are decimal, as disks and networks are sold; memory is in MiB


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    turns: int = 100  # of what takes milliseconds
    slow: int = 20  # of what takes a process or a container
    bulk: int = 5  # of what takes seconds
    boxes: int = 100
    idle: int = 300
    output: int = 1 << 30
    file: int = 100 << 20
    sessions: int = 500  # idle, at a server
    history: int = 10_000  # sessions that a server remembers
    seconds: float = 5  # of load


TINY = Size(turns=2, slow=1, bulk=1, boxes=2, idle=3, output=1 << 20, file=1 << 20,
            sessions=3, history=20, seconds=0.2)  # fmt: skip

Contenders = Callable[[Size, Peers], AbstractContextManager[list[Contender]]]


@dataclass(frozen=True)
class Scenario:
    key: str
    title: str
    unit: str
    contenders: Contenders
    more_is_better: bool = False


def docker(why: str, name: str, work: Callable[[], float], n: int, bound: float = 0) -> Contender:
    promise = Promise(bound, at_most=False) if bound else None
    return absent(name, why, promise) if why else Contender(name, work, n, promise=promise)


def timed(argv: tuple[str, ...]) -> Callable[[], float]:
    return partial(milliseconds, partial(run, argv))


def start_peers(size: Size, peers: Peers, faster: float = 0) -> list[Contender]:
    """All that can start something isolated from the prompt, and the floor."""
    program = (*BUBBLEWRAP, "true")
    return [
        docker(peers.docker, "docker run --rm", timed((*DOCKER_RUN, "true")), size.slow, faster),
        docker(
            peers.docker, "docker run --rm --network none",
            timed((*DOCKER_RUN_OFFLINE, "true")), size.slow,
        ),
        docker(peers.bubblewrap, "bwrap", timed(program), size.turns),
        Contender("a plain process (no isolation)", timed(("true",)), size.turns),
    ]  # fmt: skip


def create(first: Callable[[Sandbox], object]) -> float:
    """Milliseconds from nothing to the end of the first command; the closing is not counted."""
    began = time.perf_counter()
    box = Sandbox.create()
    first(box)
    took = (time.perf_counter() - began) * 1000
    box.close()
    return took


@contextlib.contextmanager
def time_to_interactive(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    with Sandbox.create() as warm:  # the first box starts the launcher: that is `first_create`
        warm.commands.run(["true"])
        yield [
            Contender(
                "hutch", partial(create, lambda box: box.commands.run(["true"], check=True)),
                size.turns, promise=Promise(20),
            ),
            Contender(
                "hutch, a shell command first",
                partial(create, lambda box: box.shell.run("true", check=True)), size.turns,
            ),
            *start_peers(size, peers, faster=12),
        ]  # fmt: skip


FIRST = """
import time
from hutch import Sandbox
began = time.perf_counter()
box = Sandbox.create()
box.commands.run(["true"], check=True)
print((time.perf_counter() - began) * 1000)
box.close()
"""


@contextlib.contextmanager
def first_create(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    yield [Contender("hutch", partial(fresh_python, FIRST), size.slow)]


def fresh_python(code: str) -> float:
    """What a new interpreter prints."""
    argv = [sys.executable, "-c", code]
    return float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)


@contextlib.contextmanager
def command_line(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    argv, why = hutch_command()
    promise = Promise(250)
    ours = absent("hutch", why, promise)
    if not why:
        ours = Contender("hutch", timed((*argv, "run", "--", "true")), size.slow, promise=promise)
    yield [ours, *start_peers(size, peers, faster=1)]


def hutch_command() -> tuple[tuple[str, ...], str]:
    """The program that `pip install` made, or `python -m hutch`; or why neither works."""
    beside = Path(sys.executable).with_name("hutch")
    found = str(beside) if beside.exists() else shutil.which("hutch")
    if found:
        argv: tuple[str, ...] = (found,)
    elif importlib.util.find_spec("hutch.__main__"):
        argv = (sys.executable, "-m", "hutch")
    else:
        return (), "the hutch command is not installed"
    tried = subprocess.run([*argv, "run", "--", "true"], capture_output=True, text=True)
    last = (tried.stderr.strip().splitlines() or ["it says nothing"])[-1]
    return argv, f"`hutch run -- true` does not work here: {last}" if tried.returncode else ""


def importing(statement: str, before: str = "", clock: str = "perf_counter") -> Callable[[], float]:
    code = f"from time import {clock} as now; began = now(); {statement}; "
    return partial(fresh_python, f"{before}\n{code}print((now() - began) * 1000)")


@contextlib.contextmanager
def import_time(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    # `import hutch` loads next to nothing; what it puts off is measured beside it.
    yield [
        Contender(
            "hutch: import hutch", importing("import hutch"), size.slow, promise=Promise(100)
        ),
        Contender(
            "hutch: from hutch import Sandbox", importing("from hutch import Sandbox"), size.slow
        ),
        Contender("import asyncio (we need it)", importing("import asyncio"), size.slow),
        *(
            Contender(
                f"hutch: the {name} backend, beside what every box needs (CPU)",
                importing(f"import hutch.backends.{name}", "import hutch.local", "process_time"),
                size.slow, promise=Promise(50, of_value=True) if name == "kubernetes" else None,
            )
            for name in ("kubernetes", "namespaces")
        ),
    ]  # fmt: skip


@contextlib.contextmanager
def warm_shell(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    with Sandbox.create() as box, container(peers) as theirs:
        box.shell.run("true")
        execute = timed(("docker", "exec", theirs.id if theirs else "", "sh", "-c", "true"))
        yield [
            Contender(
                "hutch", partial(milliseconds, lambda: box.shell.run("true", check=True)),
                size.turns * 5, promise=Promise(1.5),
            ),
            docker(peers.docker, "docker exec", execute, size.slow, 40),
            Contender("sh -c, a plain process", timed(("sh", "-c", "true")), size.turns),
        ]  # fmt: skip


@contextlib.contextmanager
def warm_program(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    with Sandbox.create() as box, container(peers) as theirs:
        box.commands.run(["true"])
        execute = timed(("docker", "exec", theirs.id if theirs else "", "true"))
        yield [
            Contender(
                "hutch", partial(milliseconds, lambda: box.commands.run(["true"], check=True)),
                size.turns, promise=Promise(8),
            ),
            docker(peers.docker, "docker exec", execute, size.slow),
            docker(peers.bubblewrap, "bwrap", timed((*BUBBLEWRAP, "true")), size.turns),
            Contender("a plain process (no isolation)", timed(("true",)), size.turns),
        ]  # fmt: skip


@contextlib.contextmanager
def container(peers: Peers) -> Iterator[Container | None]:
    if peers.docker:
        yield None
        return
    made = Container()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def many_at_once(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    run_docker = partial(together, (*DOCKER_RUN, "true"), size.boxes)
    run_bubblewrap = partial(together, (*BUBBLEWRAP, "true"), size.boxes)
    promise = Promise(1.5 * size.boxes / 100)
    yield [
        Contender(f"hutch, {size.boxes} boxes", partial(crowd.start_at_once, size.boxes),
                  size.bulk, promise=promise),
        docker(peers.docker, f"docker run --rm, {size.boxes} times", run_docker, 1),
        docker(peers.bubblewrap, f"bwrap, {size.boxes} times", run_bubblewrap, size.bulk),
    ]  # fmt: skip


def together(argv: tuple[str, ...], count: int) -> float:
    """Seconds until `count` of a command, all started at once, have ended."""
    with ThreadPoolExecutor(count) as threads:
        began = time.perf_counter()
        for done in [threads.submit(run, argv) for _ in range(count)]:
            done.result()
        return time.perf_counter() - began


@contextlib.contextmanager
def idle_memory(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    if os.geteuid() != 0:
        why = "only root can read the memory of a box's processes"
        yield [absent("hutch", why, Promise(10))]
        return
    with container(peers) as theirs:
        yield [
            Contender("hutch, alone", partial(crowd.own_memory, False), 1, promise=Promise(10)),
            Contender("hutch, alone, with a shell", partial(crowd.own_memory, True), 1),
            Contender(f"hutch, one of {size.idle}", partial(crowd.shared_memory, size.idle), 1),
            Contender(
                f"hutch, one of {size.idle}: what the machine has less",
                partial(crowd.taken_memory, size.idle), 1,
            ),
            docker(
                peers.docker, "docker: sleep and its shim",
                lambda: memory.proportional(theirs.pids() if theirs else ()), 1,
            ),
            docker(peers.bubblewrap, "bwrap: sleep and its parents", bubblewrap_memory, 1),
        ]  # fmt: skip


def bubblewrap_memory() -> float:
    sleeper = subprocess.Popen([*BUBBLEWRAP, "sleep", "86400"], stdin=subprocess.DEVNULL)
    try:
        while len(pids := memory.below(sleeper.pid)) < 2:
            time.sleep(0.01)
        return memory.proportional({sleeper.pid, *pids})
    finally:
        sleeper.kill()
        sleeper.wait()


@contextlib.contextmanager
def many_idle(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    promise = Promise(size.idle, at_most=False)
    yield [Contender("hutch", partial(crowd.answering, size.idle), 1, promise=promise)]


@contextlib.contextmanager
def output_speed(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    argv = ("head", "-c", str(size.output), "/dev/zero")
    with Sandbox.create() as box:
        box.commands.run(["true"])
        yield [
            Contender("hutch", partial(output_of_box, box, argv), size.bulk,
                      promise=Promise(200, at_most=False)),
            docker(peers.docker, "docker run --rm", partial(piped, (*DOCKER_RUN, *argv)),
                   size.bulk),
            docker(peers.bubblewrap, "bwrap", partial(piped, (*BUBBLEWRAP, *argv)), size.bulk),
            Contender("a plain pipe (no isolation)", partial(piped, argv), size.bulk),
        ]  # fmt: skip


def output_of_box(box: Sandbox, argv: tuple[str, ...]) -> float:
    began = time.perf_counter()
    result = box.commands.run(argv, check=True)
    took = time.perf_counter() - began
    assert result.total_bytes == int(argv[2]), f"{result.total_bytes} bytes arrived"
    return result.total_bytes / MB / took


def piped(argv: tuple[str, ...]) -> float:
    """MB/s of a program whose output is read from a pipe and counted."""
    began = time.perf_counter()
    total = 0
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as program:
        assert program.stdout
        while piece := program.stdout.read1(1 << 18):  # type: ignore[attr-defined]
            total += len(piece)
    took = time.perf_counter() - began
    assert total == int(argv[-2]), f"{total} bytes arrived"
    return total / MB / took


@contextlib.contextmanager
def output_growth(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    argv = ("head", "-c", str(size.output), "/dev/zero")
    with Sandbox.create() as box:
        box.commands.run(["true"])
        yield [
            Contender("hutch", partial(growth, partial(output_of_box, box, argv)), size.bulk,
                      promise=Promise(32))
        ]  # fmt: skip


def growth(work: Callable[[], object]) -> float:
    """MiB by which this process was larger at its largest than before."""
    memory.forget_peak()
    before = memory.peak()
    work()
    return memory.peak() - before


@contextlib.contextmanager
def file_write(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    data = os.urandom(size.file)
    with Sandbox.create() as box, container(peers) as theirs, scratch(data) as (ours, copy):
        into = ("docker", "cp", str(ours), f"{theirs.id if theirs else ''}:/tmp/file")
        yield [
            Contender("hutch", speed(size, lambda: box.files.write("file", data)), size.bulk,
                      promise=Promise(200, at_most=False)),
            docker(peers.docker, "docker cp", speed(size, partial(run, into)), size.bulk),
            Contender("a plain file", speed(size, lambda: copy.write_bytes(data)), size.bulk),
        ]  # fmt: skip


@contextlib.contextmanager
def file_read(size: Size, peers: Peers) -> Iterator[list[Contender]]:
    data = os.urandom(size.file)
    with Sandbox.create() as box, container(peers) as theirs, scratch(data) as (ours, copy):
        box.files.write("file", data)
        assert box.files.read("file", "bytes") == data
        name = theirs.id if theirs else ""
        if theirs:
            run(("docker", "cp", str(ours), f"{name}:/tmp/file"))
        out = ("docker", "cp", f"{name}:/tmp/file", str(copy))
        yield [
            Contender("hutch", speed(size, lambda: box.files.read("file", "bytes")), size.bulk,
                      promise=Promise(200, at_most=False)),
            docker(peers.docker, "docker cp", speed(size, partial(run, out)), size.bulk),
            Contender("a plain file", speed(size, ours.read_bytes), size.bulk),
        ]  # fmt: skip


@contextlib.contextmanager
def scratch(data: bytes) -> Iterator[tuple[Path, Path]]:
    """A file with these bytes, and a name for another."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        ours = Path(folder, "ours")
        ours.write_bytes(data)
        yield ours, Path(folder, "copy")


def speed(size: Size, work: Callable[[], object]) -> Callable[[], float]:
    return lambda: size.file / MB / (milliseconds(work) / 1000)


SCENARIOS = (
    Scenario("create", "create + first command, embedded", "ms", time_to_interactive),
    Scenario("first", "the same, first in its process", "ms", first_create),
    Scenario("cli", "hutch run -- true, from the prompt", "ms", command_line),
    Scenario("import", "import", "ms", import_time),
    Scenario("shell", "shell command `true`, warm", "ms", warm_shell),
    Scenario("program", 'program ["true"], warm', "ms", warm_program),
    Scenario("many", "create + first command, many at once", "s", many_at_once),
    Scenario("memory", "memory of an idle box (PSS)", "MiB", idle_memory),
    Scenario("idle", "idle boxes that live together", "boxes", many_idle, more_is_better=True),
    Scenario("output", "output of a command, 1 GiB", "MB/s", output_speed, more_is_better=True),
    Scenario("condense", "condensing 1 MB of output", "ms", condensing.a_megabyte),
    Scenario("growth", "host growth during that output", "MiB", output_growth),
    Scenario("write", "file write, 100 MiB", "MB/s", file_write, more_is_better=True),
    Scenario("read", "file read, 100 MiB", "MB/s", file_read, more_is_better=True),
    Scenario("kernel", "new box to a pandas result", "ms", cells.new_kernel),
    Scenario("cell", "cell `1+1`, warm", "ms", cells.warm_cell),
    Scenario("kernels", "memory of a box with a pandas kernel (PSS)", "MiB", cells.kernel_memory),
    Scenario("wake", "wake from deep hibernation, 100 MiB frame", "ms", cells.wake_up),
    Scenario("asleep", "memory given back by gentle hibernation, 500 MiB frame", "%",
             cells.given_back, more_is_better=True),
    Scenario("packages", "second use of an environment, over the bare image", "ms",
             cells.second_use),
    Scenario("docker-create", "create + first command in a container: added to docker run", "ms",
             containers.first_command),
    Scenario("docker-shell", "shell command `true` in a container, warm", "ms",
             containers.warm_shell),
    Scenario("docker-cell", "cell `1+1` in a container, warm", "ms", containers.warm_cell),
    Scenario("imported", "create + first command, embedded, of an imported image", "ms",
             containers.imported),
    Scenario("docker-in", "file into a container, 100 MiB", "MB/s", containers.file_in,
             more_is_better=True),
    Scenario("docker-out", "file out of a container, 100 MiB", "MB/s", containers.file_out,
             more_is_better=True),
    Scenario("kubernetes-create", "create + first command in a Pod: added to kubectl run", "ms",
             pods.first_command),
    Scenario("kubernetes-shell", "shell command `true` in a Pod, warm", "ms", pods.warm_shell),
    Scenario("kubernetes-end", "end of a box that is a Pod", "ms", pods.end),
    Scenario("kubernetes-pool", "create + first command over HTTP, from a pool of Pods", "ms",
             pods.from_pool),
    Scenario("kubernetes-requests", "requests to the API server", "requests", pods.requests),
    Scenario("http-shell", "shell command `true`, warm: what HTTP adds", "ms",
             served.added_to_shell),
    Scenario("http-cell", "cell `1+1`, warm: what HTTP adds", "ms", served.added_to_cell),
    Scenario("mcp", "tool `bash` with `true`, warm: what MCP adds", "ms", protocol.added_to_tool),
    Scenario("http-pool", "create + first command over HTTP, from the pool", "ms",
             served.from_pool),
    Scenario("http-cold", "create + first command, pool drained: what HTTP adds", "ms",
             served.drained),
    Scenario("http-many", "create + first command over HTTP, many at once", "s", served.at_once),
    Scenario("load", "shell commands under load", "/s", served.rate, more_is_better=True),
    Scenario("load-p99", "shell commands under load, p99 of a run", "ms", served.p99),
    Scenario("sessions", "memory of a server with idle sessions", "MiB", lasting.idle_sessions),
    Scenario("store", "a session in the store", "KiB", lasting.store_size),
    Scenario("adopt", "start after kill -9", "s", lasting.adoption),
    Scenario("history-list", "list the sessions that live", "ms", lasting.listing_live),
    Scenario("history-page", "list a page of all sessions", "ms", lasting.listing_all),
    Scenario("history-create", "create over HTTP, with a history", "ms", lasting.creating),
)  # fmt: skip
