"""What boxes with packages are forked from: warm, powerless, and no loss when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hutch import AsyncSandbox, Image, InvalidRequest, Sandbox
from hutch.backends.namespaces.zygote import MAX_FORKS


def processes(name: str) -> set[int]:
    """Those of this name below us."""
    parents, found = {}, set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", pid, "stat").read_text()
            head, _, tail = stat.rpartition(")")
            parents[int(pid)] = int(tail.split()[1])
            if head.partition("(")[2] == name:
                found.add(int(pid))
        except OSError:
            continue

    def ours(pid: int) -> bool:
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = parents.get(pid, 0)
        return False

    return {pid for pid in found if ours(pid)}


def newest(pids: set[int]) -> int:
    """The one that was started last, since pids start over now and then."""

    def started(pid: int) -> int:
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19])

    return max(pids, key=started)


def wheel(folder: Path, name: str, code: str) -> str:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return str(path)


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def counted(tmp_path: Path) -> Image:
    """An image whose package notes what it was when it was imported."""
    code = (
        "import os, random, time\nimported_by = os.getpid()\nmoment = time.time_ns()\n"
        "status = open('/proc/self/status').read()\n"
        "files = sorted(os.listdir('/'))\nenviron = dict(os.environ)\n"
        "def test(path):\n    try:\n        open(path).close()\n    except OSError as exc:\n"
        "        return exc.strerror\n    return 'read'\n"
        "hosts = test('/etc/shadow')\n"
    )
    return Image.python(packages=[wheel(tmp_path, "counted", code)], preload=["counted"])


@pytest.fixture
def box(counted: Image) -> Iterator[Sandbox]:
    with Sandbox.create(image=counted) as made:
        yield made


def test_boxes_share_what_was_imported_once(counted: Image, box: Sandbox) -> None:
    moment = box.run_code("import counted; counted.moment").text
    with Sandbox.create(image=counted) as other:
        assert other.run_code("import counted; counted.moment").text == moment


def test_packages_are_imported_without_rights_secrets_or_files(
    counted: Image, box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.run_code("import counted")
    status = box.run_code("print(counted.status)").logs.stdout
    assert "CapEff:\t0000000000000000" in status and "CapBnd:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert box.run_code("counted.hosts").text == "'No such file or directory'"
    assert "SECRET" not in str(box.run_code("counted.environ").text)
    names = box.run_code("counted.files").text
    assert names and "root" not in names and "work" not in names


def test_siblings_have_random_numbers_and_names_of_their_own(counted: Image) -> None:
    code = (
        "import random, tempfile, uuid, secrets, os\n"
        "(random.random(), tempfile.mktemp(), str(uuid.uuid4()), uuid.uuid1().node, "
        "secrets.token_hex(8), os.urandom(4).hex())"
    )
    seen = []
    for _ in range(3):
        with Sandbox.create(image=counted) as box:
            seen.append(eval(box.run_code(code).text or ""))
            context = box.create_code_context()
            seen.append(eval(box.run_code(code, context=context).text or ""))
    for column in zip(*seen, strict=True):
        assert len(set(column)) == len(seen), column


def test_the_death_of_a_preloaded_process_harms_no_box(counted: Image, box: Sandbox) -> None:
    box.run_code("x = 41")
    preloaded = newest(processes("hutch-preload"))
    os.kill(preloaded, signal.SIGKILL)
    assert box.run_code("x + 1").text == "42"
    assert box.shell.run("echo here").stdout == "here\n"
    with Sandbox.create(image=counted) as cold:  # made while there may be none
        assert cold.run_code("import counted; 6 * 7").text == "42"
    deadline = time.monotonic() + 120
    while not {pid for pid in processes("hutch-preload") if pid > preloaded}:
        assert time.monotonic() < deadline, "no other took its place"
        time.sleep(0.05)
    with Sandbox.create(image=counted) as after:
        assert after.run_code("import counted; 1").text == "1"
    assert box.run_code("x").text == "41"


def test_a_preloaded_process_that_was_forked_often_is_replaced_and_costs_no_box_anything() -> None:
    async def some(image: Image, count: int) -> None:
        for _ in range(count // 20):
            boxes = await asyncio.gather(*[AsyncSandbox.create(image=image) for _ in range(20)])
            await asyncio.gather(*[box.close() for box in boxes])

    async def main() -> None:
        image = Image.python(preload=["decimal"])
        async with await AsyncSandbox.create(image=image) as kept:
            await kept.run_code("x = 41")
            (before,) = processes("hutch-preload") - others
            await some(image, MAX_FORKS)
            deadline = time.monotonic() + 120
            while (now := processes("hutch-preload") - others) in ({before}, set()) or len(now) > 1:
                assert time.monotonic() < deadline, "no other took its place"
                await asyncio.sleep(0.05)
            assert (await kept.run_code("x + 1")).text == "42"
            async with await AsyncSandbox.create(image=image) as fresh:
                assert (await fresh.run_code("1")).text == "1"

    others = processes("hutch-preload")
    asyncio.run(main())


def test_a_preloaded_process_that_hangs_does_not_hang_a_box(counted: Image, box: Sandbox) -> None:
    preloaded = newest(processes("hutch-preload"))
    os.kill(preloaded, signal.SIGSTOP)
    with Sandbox.create(image=counted) as cold:
        assert cold.run_code("1 + 1").text == "2"
    deadline = time.monotonic() + 120
    while preloaded in processes("hutch-preload"):
        assert time.monotonic() < deadline, "it was of no use any more"
        time.sleep(0.05)


def test_a_module_that_cannot_be_imported_is_named_with_the_reason(tmp_path: Path) -> None:
    broken = wheel(tmp_path, "broken", "raise ValueError('not today')")
    image = Image.python(packages=[broken], preload=["broken"])
    with pytest.raises(InvalidRequest, match=r"broken.*not today"):
        Sandbox.create(image=image)
    with Sandbox.create(image=Image.python(packages=[broken])) as box:
        assert "not today" in box.run_code("import broken").error.value  # type: ignore[union-attr]


def test_a_package_that_starts_threads_is_refused(tmp_path: Path) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()"
    image = Image.python(packages=[wheel(tmp_path, "busy", code)], preload=["busy"])
    with pytest.raises(InvalidRequest, match="threads"):
        Sandbox.create(image=image)


def test_a_package_that_ends_the_process_is_told(tmp_path: Path) -> None:
    image = Image.python(
        packages=[wheel(tmp_path, "goner", "import os; os._exit(3)")], preload=["goner"]
    )
    before = processes("hutch-preload")
    with pytest.raises(InvalidRequest, match="ended"):
        Sandbox.create(image=image)
    assert not processes("hutch-preload") - before


FALLOCATE = """
import ctypes, os
libc, took = ctypes.CDLL(None, use_errno=True), set()
for fd in range(3, 300):
    try:
        is_swap = "deleted" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        continue
    if is_swap:
        took |= {libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(1 << 36))
                 for mode in (0, 1, 17)}
took
"""


def test_a_kernel_cannot_take_more_of_the_hosts_disk_than_it_may(box: Sandbox) -> None:
    assert box.run_code(FALLOCATE).text == "{-1}"


LOOK = """
needle, found = bytes(reversed(b"BACKWARDS")), 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        low, high = (int(number, 16) for number in line.split()[0].split("-"))
        if "rw" in line:
            try:
                memory.seek(low)
                found += memory.read(high - low).count(needle)
            except (OSError, OverflowError, MemoryError):
                pass
found - 1  # itself
"""


def test_a_box_knows_nothing_of_the_mounts_of_another(counted: Image, tmp_path: Path) -> None:
    name = os.urandom(12).hex()
    (tmp_path / name).mkdir()
    look = LOOK.replace("BACKWARDS", name[::-1])
    workspace = tmp_path / name
    with Sandbox.create(image=counted, workspace=workspace), Sandbox.create(image=counted) as other:
        assert int(other.run_code(look).text or 9) <= 0


def test_a_wheel_can_be_installed_in_a_box_and_is_gone_with_it(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    wheel(work, "extra", "value = 7")
    with Sandbox.create(image="python", workspace=work) as box:
        shown = box.run_code("%pip install --no-index ./extra-1.0-py3-none-any.whl")
        assert shown.error is None, shown.logs
        assert box.run_code("import extra; extra.value, extra.__file__").text == (
            "(7, '/home/user/.venv/lib/python3.11/site-packages/extra.py')"
        )
        assert box.shell.run("python3 -c 'import extra; print(extra.value)'").stdout == "7\n"
        assert "extra" in box.shell.run("pip list").stdout
    with Sandbox.create(image="python") as box:
        assert box.run_code("import extra").error.name == "ModuleNotFoundError"  # type: ignore[union-attr]
