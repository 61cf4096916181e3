"""Sandkasten's own SDK, as it is on PyPI, and ours by its names: both against `hutch serve`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import io
from collections.abc import Iterator
from types import ModuleType

import pytest
import sandkasten

from daemon_of_tests import Daemon
from hutch.compat import sandkasten as ours

BOTH = ["sandkasten", "hutch.compat.sandkasten"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as made:
        yield made


@pytest.fixture(params=BOTH)
def sdk(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


@pytest.fixture
def use(sdk: ModuleType, daemon: Daemon):
    """Run a coroutine function on a session of its own."""

    def run(act, **options):
        async def session():
            async with (
                sdk.SandboxClient(base_url=daemon.url, api_key=daemon.key) as client,
                await client.create_session(**{"image": "host", **options}) as made,
            ):
                return await act(client, made)

        return asyncio.run(asyncio.wait_for(session(), 120))

    return run


def status_of(exc: Exception) -> int | None:
    """Its own SDK raises what httpx raises; ours, what its own SDK says it would."""
    response = getattr(exc, "response", None)
    return response.status_code if response is not None else exc.status_code


async def fails_with(work, *statuses: int) -> None:
    with pytest.raises(Exception) as caught:
        await work
    assert status_of(caught.value) in statuses, caught.value


def test_the_names_and_signatures_are_the_same():
    for name in sandkasten.__all__:
        theirs, mine = getattr(sandkasten, name), getattr(ours, name)
        for method, function in inspect.getmembers(theirs, inspect.isfunction):
            if (method.startswith("_") and method != "__init__") or issubclass(theirs, Exception):
                continue
            shapes = [
                [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
                for f in (function, getattr(mine, method))
            ]
            assert shapes[0] == shapes[1], f"{name}.{method}"


def test_a_command_gives_its_output_its_exit_code_and_its_directory(use):
    async def act(client, session):
        result = await session.exec("echo out; echo err >&2; cd /tmp; exit 7")
        assert (result.exit_code, result.cwd) == (7, "/tmp")
        assert sorted(result.output.split()) == ["err", "out"]
        assert not result.truncated and result.duration_ms >= 0

    use(act)


def test_the_shell_is_kept(use):
    async def act(client, session):
        await session.exec("cd /tmp; export FOO=1; f() { echo f$FOO; }")
        result = await session.exec("f; pwd")
        assert (result.output, result.cwd) == ("f1\n/tmp\n", "/tmp")

    use(act)


def test_the_workspace_can_be_written_to_without_a_name(use):
    async def act(client, session):
        assert (await session.exec("touch /workspace/x && echo ok")).output == "ok\n"

    use(act)


def test_output_is_streamed_while_the_command_runs(use):
    async def act(client, session):
        chunks = []
        async for chunk in session.exec_stream(
            "echo one; while [ ! -e go ]; do sleep 0.05; done; echo two; false"
        ):
            if not chunks:
                await session.write("go", "x")  # it is still running
            chunks.append(chunk)
        *parts, last = chunks
        assert "".join(part.output for part in parts) == "one\ntwo\n"
        assert all(part.timestamp > 1_600_000_000_000 and not part.done for part in parts)
        assert (last.done, last.exit_code, last.cwd) == (True, 1, "/workspace")

    use(act)


def test_any_character_may_be_in_what_is_streamed(use):
    async def act(client, session):
        text = "ä\u2028b\x85c\r\nd"
        await session.write("f", text)
        chunks = [c async for c in session.exec_stream("cat f", raw_output=True)]
        assert "".join(chunk.output for chunk in chunks) == text

    use(act)


def test_colours_are_taken_out_unless_they_are_wanted(use):
    async def act(client, session):
        command = r"printf '\033[31mred\033[0m\r\n'"
        assert (await session.exec(command)).output == "red\n"
        raw = await session.exec(command, raw_output=True)
        assert raw.output == "\x1b[31mred\x1b[0m\r\n"

    use(act)


def test_a_timeout_kills_the_command_and_frees_the_shell(use, sdk):
    async def act(client, session):
        await session.exec("X=kept")
        await fails_with(session.exec("sleep 60", timeout_ms=300), 504)
        with pytest.raises(sdk.SandkastenStreamError):
            async for _ in session.exec_stream("sleep 60", timeout_ms=300):
                pass
        assert (await session.exec("echo $X")).output == "kept\n"
        assert (await session.exec("pgrep sleep | wc -l")).output.strip() == "0"

    use(act)


def test_leaving_a_stream_stops_the_command(use):
    async def act(client, session):
        stream = session.exec_stream("echo one; sleep 60")
        assert (await anext(stream)).output == "one\n"
        await stream.aclose()
        assert (await session.exec("echo free")).output == "free\n"

    use(act)


@pytest.mark.parametrize("content", ["text ä", b"\xff\x00\xfe", "", b"", "x" * 1_000_000])
def test_what_is_written_is_read(use, content):
    async def act(client, session):
        await session.write("deep/er/f", content)
        found = await session.read("deep/er/f")
        given = content.encode() if isinstance(content, str) else content
        assert (found.content, found.truncated) == (given, False)
        assert (await session.read("/workspace/deep/er/f")).content == given

    use(act)


def test_a_long_file_is_cut_where_one_says(use):
    async def act(client, session):
        await session.write("f", "0123456789")
        cut, whole = await session.read("f", max_bytes=4), await session.read("f", max_bytes=10)
        assert (cut.content, cut.truncated, cut.path) == (b"0123", True, "f")
        assert (whole.content, whole.truncated) == (b"0123456789", False)

    use(act)


def test_files_are_uploaded_by_path_and_by_handle(use, tmp_path):
    binary = bytes(range(256)) * 30_000  # 7.5 MB, and no text
    (tmp_path / "local.bin").write_bytes(binary)

    async def act(client, session):
        assert await session.upload(tmp_path / "local.bin") == ["/workspace/local.bin"]
        assert (await session.read("local.bin")).content == binary
        assert await session.upload(str(tmp_path / "local.bin"), dest_path="/workspace/data") == [
            "/workspace/data/local.bin"
        ]
        assert await session.upload(io.BytesIO(b"hi"), filename="a b.txt") == ["/workspace/a b.txt"]
        assert (await session.read("a b.txt")).content == b"hi"
        with open(tmp_path / "local.bin", "rb") as file:
            assert await session.upload(file, filename="x") == ["/workspace/x"]
        with pytest.raises(ValueError, match="filename"):
            await session.upload(io.BytesIO(b"hi"))

    use(act)


def test_stats_and_info_say_what_they_promise(use):
    async def act(client, session):
        stats = await session.stats()
        assert stats.memory_bytes >= 0 and stats.memory_limit > 0 and stats.cpu_usage_usec >= 0
        info = await session.info()
        assert (info.id, info.image, info.status) == (session.id, "host", "running")
        assert info.cwd == "/workspace" and info.created_at < info.expires_at
        assert info.created_at.endswith("Z") and info.workspace_id is None
        assert session.id in [each.id for each in await client.list_sessions()]
        assert (await client.get_session(session.id)).id == session.id

    use(act)


def test_a_deadline_of_ones_own_is_kept(use):
    async def act(client, session):
        before = (await session.info()).expires_at
        await session.exec("true")
        await session.write("f", "x")
        assert (await session.info()).expires_at == before

    use(act, ttl_seconds=600)


def test_a_workspace_outlives_its_session(use, sdk):
    name = "ws-" + sdk.__name__.replace(".", "-")

    async def first(client, session):
        await session.write("f", "kept")
        assert (await session.info()).workspace_id == name

    async def second(client, session):
        assert (await session.read("f")).content == b"kept"
        assert name in [each.id for each in await client.list_workspaces()]
        await session.destroy()
        await client.delete_workspace(name)
        assert name not in [each.id for each in await client.list_workspaces()]
        await fails_with(client.delete_workspace(name), 404)

    use(first, workspace_id=name)
    use(second, workspace_id=name)


def test_what_is_wrong_has_its_status(use, sdk, daemon):
    async def act(client, session):
        await fails_with(client.create_session(image="no-such-image"), 400, 404)
        await fails_with(client.get_session("00000000-0000"), 404)
        await fails_with(session.read("missing"), 404)
        await fails_with(session.exec(""), 400)
        await session.destroy()
        await fails_with(session.exec("true"), 410)
        assert (await session.info()).status == "destroyed"
        stranger = sdk.SandboxClient(base_url=daemon.url, api_key="wrong")
        await fails_with(stranger.list_sessions(), 401)
        await stranger.close()

    use(act)


def test_destroying_twice_is_no_error(use):
    async def act(client, session):
        await session.destroy()
        await session.destroy()

    use(act)


def test_one_may_do_many_things_at_once(use):
    async def act(client, session):
        results = await asyncio.gather(*(session.exec(f"echo {n}") for n in range(10)))
        assert [result.output for result in results] == [f"{n}\n" for n in range(10)]

    use(act)
