"""Kernels as the guest attends them; and what a kernel can do to it, which is nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from direct import Guest, with_guest
from test_leaks import _settled

from hutch import wire
from hutch.errors import Conflict, HutchError, NotFound

# It keeps to the rules but for what a cell makes it do: a cell is Python that runs in its loop.
STAND_IN = """
import json, os, signal, socket, struct, sys, time

HEADER = struct.Struct("!Ic")
RESULT = {"mime": {"text/plain": "x"}, "main": False, "data": None, "chart": None, "files": {}}


def main(fd):
    sock = socket.socket(fileno=fd)

    def read(size):
        data = b""
        while len(data) < size:
            more = sock.recv(size - len(data))
            if not more:
                os._exit(0)
            data += more
        return data

    def put(kind, payload):
        sock.sendall(HEADER.pack(len(payload), kind) + payload)

    def say(kind, body):
        put(kind, json.dumps(body).encode())

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    names = {"put": put, "say": say, "sock": sock, "RESULT": RESULT, "HEADER": HEADER, "done": True}
    names |= {"os": os, "sys": sys, "time": time, "heard": [], "read": read}
    while True:
        size, kind = HEADER.unpack(read(HEADER.size))
        asked = json.loads(read(size)) if kind == b"R" else {"do": kind}
        names["heard"].append(asked["do"])
        if asked["do"] == "start":
            say(b"A", {"python": "3"})
        elif asked["do"] == "run":
            names["done"] = True
            exec(asked["code"], names)
            if names["done"]:
                say(b"A", {"count": 1, "error": None})
        else:
            exec(names.get("otherwise", "say(b'A', {'slept': [], 'bytes': 0, 'awake': []})"), names)
"""


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    """A folder with a kernel in it that does what a cell tells it to, on its very channel."""
    package = tmp_path / "lib" / "hutch_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "main.py").write_text(STAND_IN)
    return tmp_path / "lib"


# --- a kernel that says what makes no sense -----------------------------------------------

NONSENSE = {
    "a frame that is too large": "sock.sendall(HEADER.pack(1 << 30, b'N'))",
    "half a frame": "sock.sendall(b'\\0\\0'); os._exit(0)",
    "no kind of frame": "say(b'Z', {})",
    "no JSON": "put(b'N', b'nonsense')",
    "no object": "put(b'N', b'[]')",
    "no result": "say(b'N', {})",
    "a result of nothing": "say(b'N', {'result': {}})",
    "a result of the wrong type": "say(b'N', {'result': {**RESULT, 'main': 3}})",
    "a deep result": "put(b'N', b'{\"result\":' + b'[' * 90_000 + b']' * 90_000 + b'}')",
    "an answer of the wrong type": "say(b'A', {'count': None, 'error': None})",
    "a number that is too long": "put(b'A', b'{\"error\":null,\"count\":' + b'9' * 9000 + b'}')",
    "bytes that are no text": "put(b'N', b'\\xff\\xfe')",
    "a closed channel": "sock.close(); time.sleep(1000)",
    "a channel that is shut": "sock.shutdown(2); time.sleep(1000)",
    "a request": "say(b'R', {'do': 'run', 'code': '1'})",
}


@pytest.mark.parametrize(
    "code", NONSENSE.values(), ids=[name.replace(" ", "-") for name in NONSENSE]
)
def test_a_kernel_that_makes_no_sense_is_replaced(tmp_path: Path, lib: Path, code: str) -> None:
    async def work(guest: Guest) -> None:
        await guest.cell("")
        first, *_ = await guest.cell(code, 20)
        second, *_ = await guest.cell("", 20)
        assert first["died"] and not first["timed_out"]
        assert second["restarted"] and not second["died"]
        assert await guest.shell("echo fine", 20) == (0, "fine\n")

    with_guest(tmp_path, work, lib=lib)


def test_what_a_kernel_shows_between_two_cells_is_dropped(tmp_path: Path, lib: Path) -> None:
    async def work(guest: Guest) -> None:
        show = "import threading\n"
        show += "def late():\n    while not os.path.exists('go'): time.sleep(0.01)\n"
        show += "    say(b'N', {'result': RESULT}); os.rename('go', 'gone')\n"
        show += "threading.Thread(target=late).start()"
        assert (await guest.cell(show))[1] == []
        (tmp_path / "go").touch()
        while not (tmp_path / "gone").exists():
            await asyncio.sleep(0.01)
        await guest.shell("true")  # the guest has read what came before
        end, shown, _ = await guest.cell("say(b'N', {'result': RESULT})")
        assert len(shown) == 1 and not end["restarted"]

    with_guest(tmp_path, work, lib=lib)


def test_too_many_results_are_not_sent(tmp_path: Path, lib: Path) -> None:
    async def work(guest: Guest) -> None:
        large = "big = {'result': {**RESULT, 'mime': {'text/plain': 'x' * 10_000_000}}}\n"
        end, shown, _ = await guest.cell(large + "for _ in range(9): say(b'N', big)")
        assert len(shown) == 7 and end["died"] is None
        assert "more results" in shown[-1]["result"]["mime"]["text/plain"]
        assert len((await guest.cell("say(b'N', {'result': RESULT})"))[1]) == 1

    with_guest(tmp_path, work, lib=lib)


def test_a_host_that_does_not_read_holds_the_kernel_back_and_not_the_guest(
    tmp_path: Path, lib: Path
) -> None:
    async def work(guest: Guest) -> None:
        many = "big = {'result': {**RESULT, 'mime': {'text/plain': 'x' * 1_000_000}}}\n"
        many += "for n in range(30): say(b'N', big); open('sent', 'a').write('x')"
        call = guest.link.call(wire.RunCell("main", many))
        sent = tmp_path / "sent"
        async with asyncio.timeout(60):
            while not sent.exists():  # it has begun
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        assert sent.stat().st_size < 10
        assert await guest.shell("echo fine", 20) == (0, "fine\n")
        messages, shown = wire.Messages(), 0
        async with call:
            async for event in call:
                if isinstance(event, wire.Data):
                    shown += len(list(messages.feed(event.data)))
        assert shown == 30 and call.result["died"] is None

    with_guest(tmp_path, work, lib=lib)


def test_a_slow_host_does_not_cost_an_obedient_kernel_its_life(tmp_path: Path, lib: Path) -> None:
    async def work(guest: Guest) -> None:
        many = "import signal\nsignal.signal(2, signal.default_int_handler)\n"
        many += "big = {'result': {**RESULT, 'mime': {'text/plain': 'x' * 1_000_000}}}\n"
        many += "def show():\n    signal.pthread_sigmask(signal.SIG_BLOCK, [2])\n"
        many += "    say(b'N', big)\n    signal.pthread_sigmask(signal.SIG_UNBLOCK, [2])\n"
        many += "try:\n    for n in range(30): show()\n    time.sleep(1000)\n"
        many += "except KeyboardInterrupt: pass\nsignal.signal(2, signal.SIG_IGN)"
        call = guest.link.call(wire.RunCell("main", many, 0.3))
        await asyncio.sleep(4)  # which is longer than a kernel has to obey
        async with call:
            async for _ in call:
                pass
        assert call.result["timed_out"] and not call.result["killed"]

    with_guest(tmp_path, work, lib=lib)


def test_what_is_shown_and_what_is_printed_come_in_order(tmp_path: Path, lib: Path) -> None:
    async def work(guest: Guest) -> None:
        code = (
            "import fcntl, termios\n"
            "def unread(): return any(fcntl.ioctl(1, termios.FIONREAD, bytes(4)))\n"
            "for n in range(200):\n"
            "    os.write(1, b'%d\\n' % n)\n"
            "    while unread(): time.sleep(0)\n"
            "    say(b'N', {'result': {**RESULT, 'mime': {'text/plain': str(n)}}})\n"
        )
        heard, messages = "", wire.Messages()
        async with guest.link.call(wire.RunCell("main", code)) as call:
            async for event in call:
                if isinstance(event, wire.Data) and event.channel == wire.RESULTS:
                    for message in messages.feed(event.data):
                        heard += f"<{message['result']['mime']['text/plain']}>"
                elif isinstance(event, wire.Data):
                    heard += event.data.decode()
        assert heard == "".join(f"{n}\n<{n}>" for n in range(200))

    with_guest(tmp_path, work, lib=lib)


# --- starting ---------------------------------------------------------------------------


def test_a_kernel_that_cannot_start_says_why(tmp_path: Path, lib: Path) -> None:
    (lib / "hutch_kernel" / "main.py").write_text("raise SystemError('no such luck')")

    async def work(guest: Guest) -> None:
        for _ in range(2):
            with pytest.raises(HutchError, match="no such luck"):
                await guest.cell("1")

    with_guest(tmp_path, work, lib=lib)


def test_an_image_without_python_is_named_as_such(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.link.ask(wire.SetEnv({"PATH": str(tmp_path)}))
        with pytest.raises(NotFound, match="no python3, which run_code needs"):
            await guest.cell("1")
        await guest.link.ask(wire.SetEnv({}))
        assert (await guest.cell("1"))[0]["answer"]["count"] == 1

    with_guest(tmp_path, work)


def test_files_of_the_user_do_not_pass_for_ours(tmp_path: Path) -> None:
    for name in ("json.py", "hutch_kernel.py", "signal.py"):
        (tmp_path / name).write_text("raise SystemError('not ours')")

    async def work(guest: Guest) -> None:
        end, shown, _ = await guest.cell("6 * 7")
        assert shown[0]["result"]["mime"]["text/plain"] == "42" and end["died"] is None

    with_guest(tmp_path, work)


# --- sleeping ---------------------------------------------------------------------------


def test_an_idle_kernel_is_told_to_sleep_once_and_never_while_a_cell_runs(
    tmp_path: Path, lib: Path
) -> None:
    async def work(guest: Guest) -> None:
        await guest.link.ask(wire.SetIdle(2, 7, 8))
        slept = "say(b'A', {'slept': [], 'bytes': 0, 'awake': []}); open('asleep', 'w').close()"
        await guest.cell(f"otherwise = {slept!r}; time.sleep(3)")
        await guest.cell("open('first', 'w').write(' '.join(heard))")
        assert (tmp_path / "first").read_text() == "start run run"
        while not (tmp_path / "asleep").exists():
            await asyncio.sleep(0.02)
        await asyncio.sleep(3)  # in which it could be told again
        await guest.cell("open('second', 'w').write(' '.join(heard))")
        assert (tmp_path / "second").read_text() == "start run run sleep run"

    with_guest(tmp_path, work, lib=lib)


def test_a_cell_wakes_a_kernel_that_is_falling_asleep(tmp_path: Path, lib: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.link.ask(wire.SetIdle(0.1, 7, 8))
        await guest.cell(
            "import select\notherwise = '''\nopen('asleep', 'w').close()\n"
            "select.select([sock], [], [])\ntime.sleep(6)\n"
            "say(b'A', {'slept': [], 'bytes': 0, 'awake': []})'''"
        )
        while not (tmp_path / "asleep").exists():
            await asyncio.sleep(0.02)
        end, shown, _ = await guest.cell("say(b'N', {'result': RESULT})", 5)
        assert len(shown) == 1 and not end["timed_out"]  # the sleep was not the cell's

    with_guest(tmp_path, work, lib=lib)


# --- saving -----------------------------------------------------------------------------


async def save(guest: Guest, context: str = "main") -> tuple[bytes, dict[str, object]]:
    end, data = await guest.run(wire.SaveKernel(context))
    return data, end


async def load(guest: Guest, data: bytes, context: str = "main") -> dict[str, object]:
    async with guest.link.call(wire.LoadKernel(context)) as call:
        feeding = asyncio.create_task(call.feed(data))
        async for _ in call:
            pass
        await feeding
        return call.result


def test_what_a_kernel_holds_can_be_taken_to_another(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.cell("x = list(range(1000)); y = x; big = bytes(5_000_000)")
        data, saved = await save(guest)
        assert len(data) > 5_000_000 and {"x", "y", "big"} <= {*saved["kept"]}
        await guest.link.ask(wire.StartKernel("other"))
        loaded = await load(guest, data, "other")
        assert {"x", "y", "big"} <= {*loaded["kept"]} and loaded["lost"] == []
        _, shown, _ = await guest.cell("x is y and len(big) + len(x)", context="other")
        assert shown[0]["result"]["mime"]["text/plain"] == "5001000"

    with_guest(tmp_path, work)


def test_a_context_that_was_never_used_has_nothing_to_save(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        data, saved = await save(guest)
        assert (data, saved) == (b"", {"kept": [], "lost": []})

    with_guest(tmp_path, work)


def test_a_kernel_that_dies_while_it_is_saved_is_an_error(tmp_path: Path, lib: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.cell('otherwise = \'put(b"D", b"x" * 1000); os._exit(4)\'')
        with pytest.raises(Conflict, match="exited with code 4"):
            await save(guest)
        assert (await guest.cell(""))[0]["restarted"]

    with_guest(tmp_path, work, lib=lib)


def test_a_load_that_is_broken_off_ends_the_kernel(tmp_path: Path, lib: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.cell("otherwise = ''")
        call = guest.link.call(wire.LoadKernel("main"))
        await call.send(b"part of it")
        await asyncio.sleep(0.2)
        call.close()
        assert (await guest.cell("", 20))[0]["restarted"]

    with_guest(tmp_path, work, lib=lib)


# --- what is left -----------------------------------------------------------------------


def test_many_cells_and_kernels_leave_no_descriptor_and_no_process(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.warm()
        files, children = await _settled(guest), guest.children()
        for n in range(3):
            for _ in range(50):
                await guest.cell("print('x'); 1")
            await guest.cell("import time; time.sleep(99)", 0.05)
            await guest.cell("import subprocess; subprocess.Popen(['sleep', '99'])")
            await guest.cell(f"import os; os._exit({n})")
            await guest.cell("1")
            await guest.link.ask(wire.RestartKernel("main"))
            await guest.link.ask(wire.StartKernel("other"))
            await guest.link.ask(wire.EndKernel("other"))
            await guest.link.ask(wire.EndKernel("main"))
        await guest.warm()
        assert await _settled(guest) == files
        assert guest.children() == children

    with_guest(tmp_path, work, seconds=120)


@pytest.mark.parametrize(
    "request_",
    [wire.RunCell("main", "import time; time.sleep(99)"),
     wire.RunCell("main", "while True: print(1)"), wire.StartKernel("other"),
     wire.RestartKernel("main"), wire.Variables("main"), wire.SaveKernel("main"),
     wire.LoadKernel("main")],
    ids=["sleep", "flood", "open", "restart", "variables", "save", "load"],
)  # fmt: skip
def test_a_cancel_at_any_moment_leaves_nothing(tmp_path: Path, request_: object) -> None:
    async def work(guest: Guest) -> None:
        await guest.cell("1")
        await guest.link.ask(wire.EndKernel("main"))
        await guest.warm()
        files, children = await _settled(guest), guest.children()
        for n in range(12):
            call = guest.link.call(request_)
            await asyncio.sleep(n * n * 0.001)  # from at once to well after it runs
            call.close()
        _, shown, printed = await guest.cell("6 * 7", 30)
        assert shown[0]["result"]["mime"]["text/plain"] == "42" and printed == ""
        for context in (await guest.link.ask(wire.ListKernels()))["contexts"]:
            await guest.link.ask(wire.EndKernel(context["context"]))
        await guest.warm()
        assert await _settled(guest) == files
        assert guest.children() == children

    with_guest(tmp_path, work)


def test_a_guest_that_may_open_nothing_more_says_so_and_goes_on(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.cell("1")
        await guest.link.ask(wire.EndKernel("main"))
        await guest.warm()
        files = await _settled(guest)
        for allowed in range(len(files), len(files) + 10):
            limit = ["prlimit", f"--pid={guest.process.pid}", f"--nofile={allowed}:4096"]
            await (await asyncio.create_subprocess_exec(*limit)).wait()
            try:
                await guest.cell("1", 20)
                await guest.link.ask(wire.EndKernel("main"))
            except HutchError as exc:
                assert exc.code in ("limit_reached", "internal", "not_found"), exc
        limit[-1] = "--nofile=4096:4096"
        await (await asyncio.create_subprocess_exec(*limit)).wait()
        assert (await guest.cell("1", 20))[0]["died"] is None

    with_guest(tmp_path, work)


# --- forked kernels -----------------------------------------------------------------------

FORK = """
import hutch.guest.__main__ as entry, hutch.kernel.main as kernels, hutch.kernel.warm as warm
import colorsys  # stands for what is warm
warm.remember()

def serve(sock, config, listener, serve=entry.serve):
    from dataclasses import replace
    kernel = {"path": None, "prefix": None, "executable": "/usr/bin/python3"}
    call = lambda job: kernels.main(3, forked=True, environ=job["env"])
    serve(sock, replace(config, kernel=kernel, env={"IMAGE": "1"}), {"kernel": call})

entry.serve = serve
if os.getuid() == 0:
    os.setgroups([]); os.setgid(54321); os.setuid(54321)
"""


def test_a_forked_kernel_is_like_any_other_but_warm(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(parent.stat().st_mode | 0o055)

    async def work(guest: Guest) -> None:
        async def value(code: str, timeout: float | None = None) -> str:
            end, shown, _ = await guest.cell(code, timeout)
            assert end["answer"] and not end["answer"]["error"], end
            return shown[0]["result"]["mime"]["text/plain"]

        assert await value("import sys; 'colorsys' in sys.modules") == "True"
        assert await value("import os; os.environ['IMAGE'], sys.executable") == (
            "('1', '/usr/bin/python3')"
        )
        links = "os.popen('ls -l /proc/%d/fd' % os.getpid()).read().count('socket:')"
        assert await value(links) == "1"  # its channel, and nothing of the guest's
        assert await value("import asyncio; await asyncio.sleep(0, 'fine')") == "'fine'"
        assert await value("import signal; signal.getsignal(signal.SIGTERM).name") == "'SIG_DFL'"
        assert await value("sorted(map(int, os.listdir('/proc/self/fd')))[:3]") == "[0, 1, 2]"
        assert await value("open('/proc/self/comm').read()") == "'python3\\n'"
        assert await value("import subprocess; subprocess.run(['echo', 'x']).returncode") == "0"
        end, _, _ = await guest.cell("import time; time.sleep(99)", 0.3)
        assert end["timed_out"] and not end["killed"]
        one = await value("import random; random.random(), os.urandom(4)")
        await guest.link.ask(wire.RestartKernel("main"))
        assert await value("import random, os; random.random(), os.urandom(4)") != one
        assert (await guest.cell("os._exit(5)"))[0]["died"] == "exited with code 5"
        assert (await guest.cell("1"))[0]["restarted"]

    with_guest(tmp_path, work, before="import os\n" + FORK)
