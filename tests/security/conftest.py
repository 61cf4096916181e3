"""Fixtures of the security tests: who runs Hutch, what is outside, and what the probes found."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hutch.backends.linux import NUMBERS
from hutch.errors import BackendUnavailable

from . import hosts
from .findings import PROBES, Findings, Found, parse, probe
from .hosts import NOBODY, WHO, FarThing, Operator


@pytest.fixture(scope="session", autouse=True)
def _folders_go() -> Iterator[None]:
    yield
    hosts.remove_folders()


@pytest.fixture(scope="session", params=list(WHO), ids=list(WHO.values()))
def who(request: pytest.FixtureRequest) -> str:
    hosts.possible(request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def operators() -> Iterator[dict[str, Operator]]:
    """The operators of this session that still live, by who they are."""
    made: dict[str, Operator] = {}
    yield made
    for operator in made.values():
        operator.close()


@pytest.fixture
def operator(who: str, operators: dict[str, Operator]) -> Operator:
    """Someone who uses Hutch. Many tests share it: a test that kills it makes its own."""
    if who not in operators or operators[who].process.poll() is not None:
        operators[who] = Operator(who)
    return operators[who]


@pytest.fixture
def box(operator: Operator) -> Iterator[FarThing]:
    """A fresh box of the operator's."""
    try:
        made = operator.box()
    except BackendUnavailable as exc:
        hosts.need(str(exc))
    with made:
        yield made


@pytest.fixture(scope="session")
def canary() -> Iterator[dict[str, Any]]:
    """What lies outside and must not be reached: a token in every place we can think of."""
    token = "canary-" + secrets.token_hex(16)
    folder = Path(tempfile.mkdtemp(prefix="canary-"))
    folder.chmod(0o755)
    (folder / "file").write_text(token)
    shared = Path("/dev/shm", token)
    shared.write_text(token)
    as_nobody = hosts.identity("user")
    sleeper = subprocess.Popen(["sleep", "1000"], env={"CANARY_API_KEY": token}, **as_nobody)
    listeners = [
        _listen(socket.AF_INET, ("0.0.0.0", 0)),
        _listen(socket.AF_UNIX, str(folder / "socket")),
        _listen(socket.AF_UNIX, "\0" + token),
    ]
    (folder / "socket").chmod(0o777)
    key, segment = _share(token)
    try:
        yield {
            "token": token, "file": str(folder / "file"), "shm_file": str(shared),
            "pid": sleeper.pid, "port": listeners[0].getsockname()[1], "address": _address(),
            "unix": str(folder / "socket"), "shm_key": key, "hostname": os.uname().nodename,
            "numbers": NUMBERS, "disk": _disk(), "gift": str(_wrap_gift(folder / "gift")),
        }  # fmt: skip
    finally:
        sleeper.kill()
        sleeper.wait()
        for listener in listeners:
            listener.close()
        shared.unlink()
        ctypes.CDLL(None).shmctl(segment, 0, None)
        shutil.rmtree(folder)


def _listen(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen(64)
    return listener


def _address() -> str:
    """An address of this machine that is not the loopback's, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing
            return str(sock.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _share(token: str) -> tuple[int, int]:
    """A segment of System V shared memory with the token in it, that everyone may read."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    key = secrets.randbelow(2**30) + 1
    segment = libc.shmget(key, 4096, 0o1666)
    address = ctypes.c_void_p(libc.shmat(segment, None, 0))
    ctypes.memmove(address, token.encode(), len(token))
    libc.shmdt(address)
    return key, segment


def _disk() -> tuple[int, int]:
    device = os.stat("/").st_dev
    return os.major(device), os.minor(device)


def _wrap_gift(folder: Path) -> Path:
    """A folder that a careless operator mounts into a box: programs with rights, and a device."""
    folder.mkdir()
    sleep = Path("/bin/sleep").resolve()
    for name in ("set-user-id", "capable"):
        shutil.copy(sleep, folder / name)
    if not os.geteuid():
        (folder / "set-user-id").chmod(0o6755)
        # CAP_CHOWN, permitted and effective (struct vfs_cap_data, revision 2).
        chown = struct.pack("<5I", 0x02000001, 1 << 0, 0, 0, 0)
        os.setxattr(folder / "capable", "security.capability", chown)
        os.mknod(folder / "random", 0o020666, os.makedev(1, 9))
        (folder / "random").chmod(0o666)
    return folder


@pytest.fixture(scope="session")
def findings(who: str, operators: dict[str, Operator], canary: dict[str, Any]) -> Findings:
    """Every probe, run once in a box into which its operator mounted a gift, where that can be."""
    if who not in operators or operators[who].process.poll() is not None:
        operators[who] = Operator(who)
    try:
        mounts = [] if who == "pod" else [f"{canary['gift']}:/srv/gift:ro"]
        box = operators[who].box(mounts=mounts)
    except BackendUnavailable as exc:
        hosts.need(str(exc))
    with box:
        return probe(box, canary)


@pytest.fixture(scope="session")
def controls(canary: dict[str, Any]) -> dict[str, Found]:
    """The same probes outside: as root, and as an ordinary user in a group too many."""
    found = {}
    careless = os.open("/", os.O_RDONLY | os.O_DIRECTORY)  # leaked to the probes
    program = hosts.folder_for("user")
    shutil.copytree(PROBES, f"{program}/probes", ignore=shutil.ignore_patterns("__pycache__"))
    Path(program, "canary.json").write_text(json.dumps(canary | {"inside": False}))
    for who in WHO:
        if who == "root" and os.geteuid():
            continue
        options = hosts.identity(who) and {"user": NOBODY, "group": NOBODY, "extra_groups": [4]}
        done = subprocess.run(
            [hosts.interpreter(who), "-m", "probes", "canary.json"],
            env={"CANARY_API_KEY": canary["token"]}, cwd=program, capture_output=True, text=True,
            start_new_session=True, pass_fds=[careless], check=False, **options,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[who] = parse(done.stdout)
    os.close(careless)
    return found
