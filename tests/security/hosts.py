"""Who runs Hutch: root, with a range of uids per box, or an ordinary user, with one.

Or a user with a Docker engine or a cluster: then a box is a container, which has one uid, its own.

An operator is careless: there is an open folder, odd signals and secrets in his environment.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import packaging
import pytest

import hutch
from docker_of_tests import containers_of
from hutch import factory, types
from hutch.backends.linux import NUMBERS
from hutch.errors import from_code
from kubernetes_of_tests import default_boxes

HERE = Path(__file__).parent
NOBODY = 65534
PATIENCE = 60  # seconds for one request; a box that takes longer hangs

WHO = {"root": "as root", "user": "as an ordinary user"}
LAST_WORDS = "/.hutch/run"  # where shells leave them
if factory.default() != "namespaces":
    WHO = {"docker": "in a container"} if factory.default() == "docker" else {"pod": "in a Pod"}
    LAST_WORDS = "/run/hutch"
# What a shell itself, unlike its children, can tell: the file that it will leave them in.
LAST_WORDS_FILE = f"$(trap -p EXIT | grep -o '{LAST_WORDS}/[0-9a-f]*')"


MUST_WORK = os.environ.get("HUTCH_MUST_WORK", "").split(",")
_folders: list[str] = []


class Hang(AssertionError):
    """No answer. This is what a test of a hang fails with."""


class Far:
    """Something that lives in an operator's process: its methods are called over there."""

    def __init__(self, operator: Operator, number: int | None, path: str = "") -> None:
        self._operator, self._number, self._path = operator, number, path

    def __getattr__(self, name: str) -> Far:
        path = f"{self._path}.{name}" if self._path else name
        return Far(self._operator, self._number, path)

    def __call__(self, *args: Any, **options: Any) -> Any:
        ask = {"on": self._number, "call": self._path, "args": args, "options": options}
        return self._operator.ask(ask)


class FarThing(Far):
    """A box, shell or program over there."""

    def __init__(self, operator: Operator, number: int, id: str, pid: int) -> None:
        super().__init__(operator, number)
        self.id, self.pid = id, pid

    def __enter__(self) -> FarThing:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Operator:
    """A process that uses Hutch, as root or as an ordinary user."""

    def __init__(
        self, who: str, env: dict[str, str] | None = None, folder: str | None = None
    ) -> None:
        self.who = who
        self.ranged = who == "root"  # a box has a range of user ids
        self.bounded = who != "user"  # a box has a control group
        python, source = interpreter(who), source_of(who)
        # Of its own, so that what it leaves there can be told from what others leave.
        self.folder = folder or folder_for(who)
        path = {"PATH": os.environ["PATH"], "HOME": source, "TMPDIR": self.folder}
        if who == "docker":
            path |= {name: os.environ[name] for name in ("HUTCH_BACKEND", "DOCKER_HOST")}
        elif who == "pod":
            path |= default_boxes().variables
        careless = os.open("/", os.O_RDONLY | os.O_DIRECTORY)  # he leaks it to what he starts
        self.process = subprocess.Popen(
            [python, str(Path(source) / "operate.py")],
            env=path | {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"} | (env or {}),
            cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            pass_fds=[careless], preexec_fn=_odd_signals, **identity(who),
        )  # fmt: skip
        os.close(careless)

    @property
    def pid(self) -> int:
        return self.process.pid

    def box(self, **options: Any) -> FarThing:
        """A fresh box. Closed with the operator, or before."""
        made = Far(self, None).create(**options)
        assert isinstance(made, FarThing)
        return made

    def python(self, source: str) -> Any:
        """Run Python in the operator's process; the value of `answer`."""
        return self.ask({"python": source})

    def ask(self, request: dict[str, Any]) -> Any:
        self.tell(request)
        return self.hear()

    def tell(self, request: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        out = self.process.stdout
        assert out
        if not select.select([out], [], [], PATIENCE)[0]:
            self.kill()
            raise Hang(f"no answer in {PATIENCE} seconds")
        line = out.readline()
        assert line, "the operator's process died"
        answer = json.loads(line)
        if "error" in answer:
            raise from_code(answer["error"], answer["message"])
        assert "broken" not in answer, answer["broken"]
        return self._unpack(answer["value"])

    def kill(self) -> None:
        """SIGKILL: whatever it had is the launcher's to clean up."""
        self.process.kill()
        self._reap()

    def close(self) -> None:
        """An orderly end."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.kill()

    def _reap(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(OSError):
                pipe.close()

    def _unpack(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "bytes" in value:
            return base64.b64decode(value["bytes"])
        if "kept" in value:
            return FarThing(self, value["kept"], value["id"], value["pid"])
        if "type" in value:
            fields = {name: self._unpack(field) for name, field in value["fields"].items()}
            return getattr(types, value["type"])(**fields)
        return value

    # What of it is on the host. Only root sees all of this.

    def below(self) -> dict[int, str]:
        """Every process below this one, with its name, the nearest first."""
        return below(self.pid)

    def find(self, name: str) -> int:
        """The process of this name that is nearest to the top."""
        return next(pid for pid, its_name in self.below().items() if its_name == name)

    def guests(self) -> list[int]:
        """Pid 1 of each box, as the host counts, the oldest box first."""
        if self.who == "docker":
            return containers_of(os.environ["DOCKER_HOST"], self.pid)
        if self.who == "pod":
            return default_boxes().guests()  # no test has boxes of two operators at once
        return children(self.find("hutch-zygote"))

    def remains(self) -> list[str]:
        """What is there beside what is there as long as he lives."""
        if self.who == "docker":
            return [f"container with {pid}" for pid in self.guests()]
        if self.who == "pod":
            return [pod["metadata"]["name"] for pod in default_boxes().pods()]
        launcher, below = self.find("hutch-launcher"), self.below()
        # Groups of other tests come and go, at which rglob() fails.
        groups = [
            f"{folder}/{name}"
            for folder, names, _ in os.walk("/sys/fs/cgroup")
            for name in names
            if name.startswith(f"hutch-{launcher}-")
        ]
        return groups + [f"{pid} {name}" for pid, name in list(below.items())[2:]]

    def traces(self) -> Traces:
        return Traces(self)


class Traces:
    """What an operator has on this machine now, so that one can look whether it is gone."""

    def __init__(self, operator: Operator) -> None:
        self.who, self.folder = operator.who, operator.folder
        self._pids = operator.below()
        self._launchers = [pid for pid, name in self._pids.items() if name == "hutch-launcher"]

    def left(self) -> list[str]:
        """Processes, control groups, folders and mounts that are still there."""
        found = [f"process {pid} {name}" for pid, name in self._pids.items() if alive(pid)]
        for folder, names, _ in os.walk("/sys/fs/cgroup"):
            for launcher in self._launchers:
                found += [f"{folder}/{n}" for n in names if n.startswith(f"hutch-{launcher}-")]
        found += os.listdir(self.folder)
        mounts = Path("/proc/mounts").read_text().splitlines()
        return found + [line for line in mounts if self.folder in line]

    def are_gone(self, seconds: float = 120) -> bool:
        return wait_until(lambda: not self.left(), seconds)


def _odd_signals() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    ignore = struct.pack("=QQQQ", signal.SIG_IGN, 0, 0, 0)
    for number in (32, 33):  # as posix_spawn leaves them; sigaction(3) would refuse
        ctypes.CDLL(None).syscall(NUMBERS["rt_sigaction"], number, ignore, None, 8)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def identity(who: str) -> dict[str, Any]:
    """Arguments of subprocess for a process of this user."""
    if who != "user" or os.geteuid():
        return {}
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


@lru_cache
def interpreter(who: str) -> str:
    """A Python that this user may run: root's own may be in a folder that others may not enter."""
    if not identity(who):
        return sys.executable
    base = getattr(sys, "_base_executable", sys.executable)
    for python in (base, "/usr/bin/python3", "/usr/local/bin/python3"):
        new = "import sys; sys.exit(sys.version_info < (3, 11))"
        with contextlib.suppress(OSError):
            if not subprocess.run([python, "-c", new], cwd="/", check=False,
                                  capture_output=True, **identity(who)).returncode:  # fmt: skip
                return python
    return need("no Python 3.11 that an ordinary user may run")


@lru_cache
def source_of(who: str) -> str:
    """A folder with Hutch and the operator's program that this user may read. Also his home,
    where a copy of the code is kept for the next process."""
    folder = folder_for(who)
    for package in (hutch, packaging):
        source = Path(package.__file__).parent
        target = f"{folder}/{package.__name__}"
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "operate.py", folder)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    return folder


def folder_for(who: str) -> str:
    """A fresh folder of this user's, in which everyone may look. Goes with the tests."""
    folder = tempfile.mkdtemp(prefix="security-")
    _folders.append(folder)
    os.chmod(folder, 0o755)
    if identity(who):
        os.chown(folder, NOBODY, NOBODY)
    return folder


def remove_folders() -> None:
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def need(why: str) -> NoReturn:
    """Skip for a reason; where boxes must work, the skip is a failure."""
    if factory.default() in MUST_WORK:
        pytest.fail(f"{factory.default()} must work here: {why}")
    pytest.skip(why)


def possible(who: str) -> None:
    """Skip what this run of the tests cannot do."""
    if who == "root" and os.geteuid():
        pytest.skip("only root can run Hutch as root")


@contextlib.contextmanager
def operator(who: str, **env: str) -> Iterator[Operator]:
    possible(who)
    made = Operator(who, env)
    try:
        yield made
    finally:
        made.close()


def below(pid: int) -> dict[int, str]:
    """The descendants of a process, with their names, the nearest first."""
    found: dict[int, str] = {}
    todo = [pid]
    while todo:
        todo = [child for parent in todo for child in children(parent)]
        found |= {child: name_of(child) for child in todo}
    return found


def children(pid: int) -> list[int]:
    """In the order of their birth, which is not that of their numbers."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text()
            found += [int(child) for child in text.split()]
    return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(true: Callable[[], object], seconds: float) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def stop(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
