"""The contract that every backend keeps. Subclass it, make your backend, and run it with pytest.

    class TestMine(BackendContract):
        def make_backend(self) -> Backend:
            return MyBackend()

Uses only the standard library, so that it runs wherever a backend does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace

from hutch import wire
from hutch.backends.base import Backend, Box, Spec
from hutch.engine.check import guest_field
from hutch.engine.link import GuestCall, Link
from hutch.errors import BoxLost, Conflict, HutchError, InvalidRequest, NotFound
from hutch.types import GRADES, Status

TIME_LIMIT = 60


@contextlib.asynccontextmanager
async def running(backend: Backend, spec: Spec | None = None) -> AsyncIterator[tuple[Box, Link]]:
    """A box and a link to its guest, for the length of a `with`."""
    box = await backend.start(spec or Spec())
    try:
        link = await Link.open(await box.connect())
        try:
            yield box, link
        finally:
            await link.close()
    finally:
        await box.kill()


async def sh(link: Link, script: str, *, timeout: float | None = None) -> tuple[int, bytes]:
    """Exit code and output of a script."""
    out = bytearray()
    async with link.call(wire.Exec(["sh", "-c", script], timeout=timeout)) as call:
        async for event in call:
            if isinstance(event, wire.Data):
                out += event.data
        return guest_field(call.result, "exit_code", int), bytes(out)


async def cell(
    link: Link, code: str, timeout: float | None = None
) -> tuple[dict[str, object], bytes]:
    """How a cell ended, and what it printed."""
    out = b""
    async with link.call(wire.RunCell("main", code, timeout)) as call:
        async for event in call:
            if isinstance(event, wire.Data) and event.channel != wire.RESULTS:
                out += event.data
        return call.result, out


@contextlib.contextmanager
def raises(error: type[HutchError]) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


class BackendContract(ABC):
    soon = 0.5  # seconds in which a program has started and printed a line

    @abstractmethod
    def make_backend(self) -> Backend:
        """A new backend, made in the event loop of a test.

        If boxes outlive the backend, a second call in the same test makes one that finds them.
        """

    def spec(self) -> Spec:
        """The boxes to test. Override it for a backend without an image `host`."""
        return Spec()

    def _with_backend(self, test: Callable[[Backend], Coroutine[object, object, None]]) -> None:
        async def body() -> None:
            backend = self.make_backend()
            try:
                async with asyncio.timeout(TIME_LIMIT):
                    await test(backend)
            finally:
                await backend.close()

        asyncio.run(body())

    def _with_box(self, test: Callable[[Box, Link], Coroutine[object, object, None]]) -> None:
        async def body(backend: Backend) -> None:
            async with running(backend, self.spec()) as (box, link):
                await test(box, link)

        self._with_backend(body)

    def test_a_command_gives_its_output_and_its_exit_code(self) -> None:
        async def test(box: Box, link: Link) -> None:
            assert await sh(link, "echo hi; exit 3") == (3, b"hi\n")

        self._with_box(test)

    def test_what_one_command_leaves_the_next_one_finds(self) -> None:
        async def test(box: Box, link: Link) -> None:
            await sh(link, "echo kept > note")
            assert await sh(link, "cat note") == (0, b"kept\n")

        self._with_box(test)

    def test_output_larger_than_any_buffer_arrives_whole(self) -> None:
        async def test(box: Box, link: Link) -> None:
            # 50 MiB: another project's Kubernetes sandbox once broke at 28.
            code, out = await sh(link, "head -c 52428800 /dev/zero")
            assert (code, len(out)) == (0, 52_428_800)

        self._with_box(test)

    def test_a_hundred_commands_at_once_all_answer(self) -> None:
        async def test(box: Box, link: Link) -> None:
            answers = await asyncio.gather(*(sh(link, f"echo {n}; exit {n}") for n in range(100)))
            assert answers == [(n, f"{n}\n".encode()) for n in range(100)]

        self._with_box(test)

    def test_a_signal_is_an_exit_code(self) -> None:
        async def test(box: Box, link: Link) -> None:
            assert (await sh(link, "kill -TERM $$"))[0] == 143

        self._with_box(test)

    def test_a_program_that_is_not_there_is_not_found(self) -> None:
        async def test(box: Box, link: Link) -> None:
            with raises(NotFound):
                await link.ask(wire.Exec(["/no/such/program"]))

        self._with_box(test)

    def test_a_shell_keeps_its_directory_and_variables(self) -> None:
        async def test(box: Box, link: Link) -> None:
            await link.ask(wire.ShellCommand("main", "cd /tmp; A=1"))
            said = await link.ask(wire.ShellCommand("main", "test $A = 1"))
            assert (said["exit_code"], said["cwd"]) == (0, "/tmp")

        self._with_box(test)

    def test_a_file_that_was_written_can_be_read(self) -> None:
        async def test(box: Box, link: Link) -> None:
            content = bytes(range(256)) * 4096
            async with link.call(wire.Write("data.bin")) as call:
                await call.send(content)
                call.end_input()
                async for _ in call:
                    pass
            assert await _read(link.call(wire.Read("data.bin"))) == content

        self._with_box(test)

    def test_a_deadline_ends_a_command_and_all_it_started(self) -> None:
        async def test(box: Box, link: Link) -> None:
            script = "setsid sleep 987 & echo begun; sleep 987"
            code, out = await sh(link, script, timeout=self.soon)
            assert (code, out) == (124, b"begun\n")
            assert await _gone(link, "sleep 987")

        self._with_box(test)

    def test_leaving_a_call_early_ends_what_it_started(self) -> None:
        async def test(box: Box, link: Link) -> None:
            async with link.call(wire.Exec(["sh", "-c", "echo go; sleep 876"])) as call:
                await anext(call)
            assert await _gone(link, "sleep 876")

        self._with_box(test)

    def test_a_reader_that_stops_reading_stops_the_program_not_the_host(self) -> None:
        async def test(box: Box, link: Link) -> None:
            async with link.call(wire.Exec(["yes"])) as call:
                await anext(call)
                assert await sh(link, "echo still here") == (0, b"still here\n")

        self._with_box(test)

    def test_a_killed_box_says_so_instead_of_answering(self) -> None:
        async def test(box: Box, link: Link) -> None:
            async with link.call(wire.Exec(["sh", "-c", "echo go; sleep 60"])) as call:
                await anext(call)
                await box.kill()
                with raises(BoxLost):
                    while True:
                        await anext(call)

        self._with_box(test)

    def test_a_start_that_is_cancelled_leaves_no_box(self) -> None:
        async def test(backend: Backend) -> None:
            await (await backend.start(self.spec())).kill()
            for pause in (0, 0.001, 0.005, 0.02):
                start = asyncio.create_task(backend.start(self.spec()))
                await asyncio.sleep(pause)
                start.cancel()
                for box in await asyncio.gather(start, return_exceptions=True):
                    if isinstance(box, Box):
                        await box.kill()  # it started before it could be cancelled
            await (await backend.start(self.spec())).kill()  # it is queued after those
            for _ in range(500):
                if not await backend.list():
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("a box is left")

        self._with_backend(test)

    def test_kill_can_be_called_twice(self) -> None:
        async def test(backend: Backend) -> None:
            box = await backend.start(self.spec())
            await box.kill()
            await box.kill()

        self._with_backend(test)

    def test_a_box_can_be_killed_twice_at_once_and_by_one_who_does_not_wait(self) -> None:
        async def test(backend: Backend) -> None:
            box = await backend.start(self.spec())
            await asyncio.gather(box.kill(), box.kill())
            box = await backend.start(self.spec())
            first = asyncio.create_task(box.kill())
            await asyncio.sleep(0)
            second = asyncio.create_task(box.kill())
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await second
            assert await backend.list() == []

        self._with_backend(test)

    def test_a_dead_box_cannot_be_connected_to(self) -> None:
        async def test(backend: Backend) -> None:
            box = await backend.start(self.spec())
            await box.kill()
            with raises(BoxLost):
                await box.connect()

        self._with_backend(test)

    def test_a_dead_box_has_no_statistics(self) -> None:
        async def test(backend: Backend) -> None:
            box = await backend.start(self.spec())
            await box.kill()
            with raises(BoxLost):
                await box.stats()

        self._with_backend(test)

    def test_only_boxes_that_live_are_listed(self) -> None:
        async def test(backend: Backend) -> None:
            one, two = await backend.start(self.spec()), await backend.start(self.spec())
            assert sorted(await backend.list()) == sorted([one.id, two.id])
            await one.kill()
            assert await backend.list() == [two.id]

        self._with_backend(test)

    def test_boxes_do_not_see_each_other_s_files(self) -> None:
        async def test(backend: Backend) -> None:
            async with (
                running(backend, self.spec()) as (_, one),
                running(backend, self.spec()) as (_, two),
            ):
                await sh(one, "echo mine > secret")
                assert (await sh(two, "cat secret"))[0] == 1

        self._with_backend(test)

    def test_an_image_that_is_not_there_is_not_found(self) -> None:
        async def test(backend: Backend) -> None:
            with raises(NotFound):
                await backend.start(replace(self.spec(), image="no-such-image"))
            assert await backend.list() == []

        self._with_backend(test)

    def test_closing_the_backend_kills_its_boxes(self) -> None:
        async def test(backend: Backend) -> None:
            box = await backend.start(self.spec())
            link = await Link.open(await box.connect())
            await backend.close()
            with raises(HutchError):
                await sh(link, "echo alive")
            await link.close()

        self._with_backend(test)

    def test_a_kernel_keeps_what_a_cell_leaves_and_is_replaced_when_it_dies(self) -> None:
        async def test(backend: Backend) -> None:
            async with running(backend, self.spec()) as (_, link):
                if (await sh(link, "command -v python3"))[0]:
                    return  # an image without Python has no kernels, and says so
                assert (await cell(link, "x = 41"))[1] == b""
                ended, out = await cell(link, "print(x + 1)")
                assert out == b"42\n" and not ended["restarted"] and ended["died"] is None
                ended, _ = await cell(link, "import os; os._exit(3)")
                assert ended["died"] == "exited with code 3"
                ended, out = await cell(link, "print('x' in globals())")
                assert ended["restarted"] and out == b"False\n"
                ended, _ = await cell(link, "while True: pass", timeout=0.2)
                assert ended["timed_out"] and not ended["killed"]

        self._with_backend(test)

    def test_a_box_can_be_connected_to_again_and_its_shell_has_not_noticed(self) -> None:
        async def test(backend: Backend) -> None:
            async with running(backend, self.spec()) as (box, link):
                await link.ask(wire.ShellCommand("main", "cd /tmp; A=1"))
                await link.close()
                again = await Link.open(await box.connect())
                said = await again.ask(wire.ShellCommand("main", "test $A = 1"))
                assert (said["exit_code"], said["cwd"]) == (0, "/tmp")
                await again.close()

        self._with_backend(test)

    def test_a_new_connection_takes_the_place_of_one_that_is_still_up(self) -> None:
        async def test(backend: Backend) -> None:
            async with running(backend, self.spec()) as (box, link):
                async with link.call(wire.Exec(["sh", "-c", "echo go; sleep 765"])) as call:
                    await anext(call)
                    again = await Link.open(await box.connect())
                    with raises(BoxLost):
                        while True:
                            await anext(call)
                assert await _gone(again, "sleep 765")
                await again.close()

        self._with_backend(test)

    def test_a_box_is_called_what_it_shall_be_called(self) -> None:
        async def test(backend: Backend) -> None:
            box = await backend.start(self.spec(), "my-box-1")
            assert box.id == "my-box-1" and await backend.list() == ["my-box-1"]
            with raises(Conflict):
                await backend.start(self.spec(), "my-box-1")
            for name in ("", "UP", "a/b", "..", "a" * 64, "a\n"):
                with raises(InvalidRequest):
                    await backend.start(self.spec(), name)
            await box.kill()
            await (await backend.start(self.spec(), "my-box-1")).kill()

        self._with_backend(test)

    def test_a_box_that_is_alive_can_be_adopted(self) -> None:
        async def test(backend: Backend) -> None:
            async with running(backend, self.spec()) as (box, link):
                await sh(link, "echo kept > note")
                await link.close()
                same = await backend.adopt(box.id)
                assert (same.id, same.isolation, same.degraded) == (
                    box.id,
                    box.isolation,
                    box.degraded,
                )
                assert not same.oom_kills() and await same.stats()
                link = await Link.open(await same.connect())
                assert await sh(link, "cat note") == (0, b"kept\n")
                await link.close()
                await same.kill()
                assert await backend.list() == []

        self._with_backend(test)

    def test_a_killed_box_cannot_be_adopted(self) -> None:
        async def test(backend: Backend) -> None:
            box = await backend.start(self.spec())
            await box.outlive(60)
            await box.kill()
            for id in (box.id, "never-there"):
                with raises(BoxLost):
                    await backend.adopt(id)

        self._with_backend(test)

    def test_what_a_backend_leaves_the_next_one_adopts_if_it_lasts(self) -> None:
        async def test(backend: Backend) -> None:
            box, other = await backend.start(self.spec()), await backend.start(self.spec())
            await box.outlive(60)
            link = await Link.open(await box.connect())
            await link.ask(wire.ShellCommand("main", "A=1"))
            await link.close()
            await backend.leave()
            after = self.make_backend()
            try:
                for id in (box.id, other.id) if not after.lasts else (other.id,):
                    with raises(BoxLost):
                        await after.adopt(id)
                if after.lasts:
                    assert await after.list() == [box.id]
                    link = await Link.open(await (await after.adopt(box.id)).connect())
                    said = await link.ask(wire.ShellCommand("main", "test $A = 1"))
                    assert said["exit_code"] == 0
                    await link.close()
            finally:
                await after.close()
                await backend.close()

        self._with_backend(test)

    def test_a_backend_that_was_left_or_closed_says_so(self) -> None:
        async def test(backend: Backend) -> None:
            box = await backend.start(self.spec())
            await backend.leave()
            await backend.close()
            with raises(BoxLost):
                await box.connect()

        self._with_backend(test)

    def test_the_report_tells_its_grade_and_why_a_layer_is_not_whole(self) -> None:
        async def test(backend: Backend) -> None:
            report = await backend.report()
            assert report.backend == backend.name and report.grade in GRADES
            assert all(layer.why for layer in report.layers if layer.status != Status.ACTIVE)

        self._with_backend(test)


async def _read(call: GuestCall) -> bytes:
    async with call:
        return b"".join([event.data async for event in call if isinstance(event, wire.Data)])


async def _gone(link: Link, command: str) -> bool:
    """Whether no process of the box has this command line, soon."""
    pattern = command.replace(" ", "[ ]")  # so that the search does not find itself
    script = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '{pattern}'"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if (await sh(link, script))[1].strip() == b"0":
            return True
        await asyncio.sleep(0.05)
    return False
