"""Folders with a name: made, shared, kept apart, measured, and removed whole."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from must_work import need

from hutch import BackendUnavailable, Conflict, InvalidRequest, NoSpace, NotFound, Sandbox
from hutch.errors import ServerUnavailable
from hutch.server.store import Store
from hutch.server.trees import FolderSizes
from hutch.server.workspaces import TRASH, Workspaces

Test = Callable[[Workspaces], Awaitable[None]]
MB = 1_000_000


def run(home: Path, test: Test, **options: Any) -> None:
    """With the workspaces below `home`, as a server that was just started has them."""

    async def main() -> None:
        store = await Store.open(home / "store")
        try:
            workspaces = Workspaces(home / "workspaces", store, **options)
            await workspaces.recover()
            async with asyncio.timeout(60):
                await test(workspaces)
            await workspaces.close()
        finally:
            await store.close()

    asyncio.run(main())


def trash(home: Path) -> list[Path]:
    folder = home / "workspaces" / TRASH
    return list(folder.iterdir()) if folder.exists() else []


async def swept(workspaces: Workspaces) -> None:
    await asyncio.gather(*workspaces._sweeps)


def test_one_is_made_listed_and_removed(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        made = await workspaces.make("ada", "data", {"team": "x"}, quota=5 * MB)
        assert (made.id, made.owner, made.labels, made.quota) == (
            "data",
            "ada",
            {"team": "x"},
            5 * MB,
        )
        folder = tmp_path / "workspaces" / "ada" / "data"
        assert folder.stat().st_mode & 0o7777 == 0o700
        assert folder.parent.stat().st_mode & 0o7777 == 0o700
        (folder / "file").write_bytes(b"x" * MB)
        found = await workspaces.get("ada", "data")
        assert found.size is not None and MB < found.size < 2 * MB and found.sessions == ()
        assert [w.id for w in await workspaces.list("ada")] == ["data"]
        with pytest.raises(Conflict, match="already"):
            await workspaces.make("ada", "data")
        await workspaces.remove("ada", "data")
        assert not folder.exists() and await workspaces.list("ada") == []
        with pytest.raises(NotFound, match="no workspace data"):
            await workspaces.get("ada", "data")
        with pytest.raises(NotFound):
            await workspaces.remove("ada", "data")
        await workspaces.make("ada", "data")
        assert not list(folder.iterdir()), "the name is free, and the new one empty"
        await swept(workspaces)

    run(tmp_path, test)
    assert not trash(tmp_path)


def test_owners_do_not_see_each_other_s(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        for owner in ("ada", "bob"):
            (await workspaces.use(owner, "data", f"s-{owner}")).joinpath(owner).touch()
        assert [w.owner for w in await workspaces.list("bob")] == ["bob"]
        assert [w.owner for w in await workspaces.list()] == ["ada", "bob"]
        assert workspaces.in_use("ada", "data") == ("s-ada",)
        workspaces.release("s-ada")
        await workspaces.remove("ada", "data")
        assert (tmp_path / "workspaces/bob/data/bob").exists()

    run(tmp_path, test)


@pytest.mark.parametrize(
    "name",
    ["", "x", "-ab", "ab-", "Ab", "a/b", "..", ".", "a.b", "a" * 65, "a b", "ab\n", "a\0b", "äb"],
)
def test_a_name_that_could_mean_something_else_is_refused(tmp_path: Path, name: str) -> None:
    async def test(workspaces: Workspaces) -> None:
        for work in (workspaces.make, workspaces.get, workspaces.remove):
            with pytest.raises(InvalidRequest, match="2 to 64"):
                await work("ada", name)
        with pytest.raises(InvalidRequest):
            await workspaces.use("ada", name, "s")
        for owner in ("", ".trash", "../x", "a/b", "A", "a" * 64, "a\n"):
            with pytest.raises(InvalidRequest, match="1 to 63"):
                await workspaces.make(owner, "data")
        assert not workspaces._uses and list((tmp_path / "workspaces").iterdir()) == []

    run(tmp_path, test)


def test_the_longest_and_the_shortest_name_are_fine(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        for id in ("ab", "0-9", "a" * 64):
            await workspaces.make("a" * 63, id)

    run(tmp_path, test)


def test_a_session_that_names_one_makes_it_and_several_may_share_it(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        folders = await asyncio.gather(*(workspaces.use("ada", "data", f"s{n}") for n in range(20)))
        assert len(set(folders)) == 1 and folders[0].is_dir()
        assert len(workspaces.in_use("ada", "data")) == 20
        assert len(await workspaces.list()) == 1
        with pytest.raises(Conflict, match="used by session s0, s1, s2 and 17 more"):
            await workspaces.remove("ada", "data")
        for number in range(20):
            workspaces.release(f"s{number}")
        workspaces.release("nobody")
        assert workspaces.in_use("ada", "data") == ()

    run(tmp_path, test)


def test_whoever_wants_it_alone_needs_nobody_in_and_keeps_others_out(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        await workspaces.use("ada", "data", "first")
        with pytest.raises(Conflict, match="used by session first"):
            await workspaces.use("ada", "data", "second", exclusive=True)
        assert workspaces.in_use("ada", "data") == ("first",)
        workspaces.release("first")
        await workspaces.use("ada", "data", "second", exclusive=True)
        with pytest.raises(Conflict, match="session second has exclusive use of workspace data"):
            await workspaces.use("ada", "data", "third")
        await workspaces.use("ada", "data", "second", exclusive=True)  # its own: again is fine
        workspaces.release("second")
        await workspaces.use("ada", "data", "third")

    run(tmp_path, test)


def test_of_many_that_want_it_alone_at_once_one_gets_it(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        tries = (workspaces.use("ada", "data", f"s{n}", exclusive=True) for n in range(10))
        done = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(answer, Path) for answer in done) == 1
        assert sum(isinstance(answer, Conflict) for answer in done) == 9
        assert len(workspaces.in_use("ada", "data")) == 1

    run(tmp_path, test)


def test_a_use_and_a_removal_that_meet_never_both_win(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        for number in range(20):
            await workspaces.make("ada", "data")
            pair = [workspaces.remove("ada", "data"), workspaces.use("ada", "data", "s")]
            first, second = pair if number % 2 else pair[::-1]
            done = await asyncio.gather(first, second, return_exceptions=True)
            assert sum(isinstance(answer, Conflict) for answer in done) == 1, done
            if workspaces.in_use("ada", "data"):
                workspaces.release("s")
                await workspaces.remove("ada", "data")
        assert await workspaces.list() == []

    run(tmp_path, test)


def test_a_use_that_is_cancelled_holds_nothing(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        task = asyncio.create_task(workspaces.use("ada", "data", "s", exclusive=True))
        await asyncio.sleep(0)
        assert workspaces.in_use("ada", "data") == ("s",)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert workspaces.in_use("ada", "data") == ()

    run(tmp_path, test)


def test_one_that_is_adopted_is_used_again_however_full_it_is(tmp_path: Path) -> None:
    async def before(workspaces: Workspaces) -> None:
        folder = await workspaces.use("ada", "data", "s", exclusive=True)
        (folder / "file").write_bytes(b"x" * MB)

    async def after(workspaces: Workspaces) -> None:
        assert workspaces.in_use("ada", "data") == ()
        folder = workspaces.adopt("ada", "data", "s", exclusive=True)
        assert (folder / "file").exists()
        with pytest.raises(Conflict, match="exclusive use of"):
            await workspaces.use("ada", "data", "t")

    run(tmp_path, before)
    run(tmp_path, after, default_quota=1000)


def test_one_that_is_full_takes_no_new_session_and_says_what_to_do(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        await workspaces.make("ada", "data", quota=MB)
        folder = await workspaces.use("ada", "data", "s")
        assert await workspaces.over_quota() == ()
        (folder / "file").write_bytes(b"x" * 2 * MB)
        workspaces._sizes.forget(folder)  # instead of waiting a second
        (over,) = await workspaces.over_quota()
        assert over[:2] == ("ada", "data") and over.size > 2 * MB and over.quota == MB
        assert over.sessions == ("s",)
        words = r"workspace data has 1\.9 MiB of 1\.0 MiB: remove files"
        with pytest.raises(NoSpace, match=words):
            await workspaces.use("ada", "data", "t")
        with pytest.raises(NoSpace, match=words):
            await workspaces.check_room("ada", "data")
        assert workspaces.in_use("ada", "data") == ("s",)
        workspaces.release("s")
        with pytest.raises(NoSpace, match=words):
            await workspaces.use("ada", "data", "t")
        await workspaces.use("ada", "data", "cleaner", room=False)
        (folder / "file").unlink()
        workspaces.release("cleaner")
        await workspaces.use("ada", "data", "t")

    run(tmp_path, test)


def test_one_that_was_full_takes_sessions_as_soon_as_somebody_who_passed_by_made_room(
    tmp_path: Path,
) -> None:
    async def test(workspaces: Workspaces) -> None:
        with pytest.raises(NotFound):
            await workspaces.place("ada", "data")
        folder = await workspaces.place("ada", "data", make=True)
        (folder / "file").write_bytes(b"x" * 2 * MB)
        for refused in (
            workspaces.use("ada", "data", "s"),
            workspaces.place("ada", "data", make=True),
        ):
            with pytest.raises(NoSpace):
                await refused
        assert await workspaces.place("ada", "data") == folder
        (folder / "file").unlink()
        await workspaces.use("ada", "data", "s")

    run(tmp_path, test, default_quota=MB)


def test_an_owner_has_so_much_in_all_of_them(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        for id in ("one", "two"):
            folder = await workspaces.use("ada", id, f"s-{id}")
            (folder / "file").write_bytes(b"x" * 700_000)
            workspaces.release(f"s-{id}")
        used = await workspaces.disk_used("ada")
        assert 1.4 * MB < used < 2 * MB
        with pytest.raises(NoSpace, match="the workspaces and sleeping sessions of ada have"):
            await workspaces.use("ada", "three", "s")
        for id in ("one", "two"):
            workspaces.adopt("ada", id, f"s-{id}")
        found = await workspaces.over_quota()
        assert {over.id for over in found} == {"one", "two"}
        assert found[0].why.startswith("the workspaces of ada together have 14")
        await workspaces.use("bob", "one", "t")
        assert [over.owner for over in await workspaces.over_quota()] == ["ada", "ada"]

    run(tmp_path, test, disk_quota={"ada": MB}.get)


def test_what_sleeps_refuses_new_sessions_and_ends_none(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        await workspaces.use("ada", "one", "s")
        workspaces.asleep_size = {"ada": 2 * MB}.__getitem__
        assert await workspaces.over_quota() == ()
        with pytest.raises(NoSpace, match="the workspaces and sleeping sessions of ada have"):
            await workspaces.use("ada", "two", "t")
        with pytest.raises(NoSpace, match="leaves too little"):
            await workspaces.check_disk("ada", 1)

    run(tmp_path, test, disk_quota={"ada": MB}.get)


def test_a_quota_of_nothing_is_refused(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        with pytest.raises(InvalidRequest, match="more than 0"):
            await workspaces.make("ada", "data", quota=0)

    run(tmp_path, test)


def test_a_quota_can_be_changed_and_counts_at_once(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        await workspaces.make("ada", "data", quota=MB)
        folder = await workspaces.use("ada", "data", "s")
        (folder / "much").write_bytes(b"x" * MB * 2)
        workspaces.release("s")
        with pytest.raises(NoSpace):
            await workspaces.use("ada", "data", "t")
        larger = await workspaces.set_quota("ada", "data", 3 * MB)
        assert larger.quota == 3 * MB and (larger.size or 0) >= 2 * MB
        await workspaces.use("ada", "data", "t")
        await workspaces.set_quota("ada", "data", MB)
        (over,) = await workspaces.over_quota()
        assert (over.id, over.quota, over.sessions) == ("data", MB, ("t",))
        usual = await workspaces.set_quota("ada", "data", None)
        assert usual.quota == 9 * MB
        for odd in (0, -1, 1 << 62):
            with pytest.raises(InvalidRequest, match="more than 0"):
                await workspaces.set_quota("ada", "data", odd)
        for owner, id in (("bob", "data"), ("ada", "none")):
            with pytest.raises(NotFound):
                await workspaces.set_quota(owner, id, MB)

    run(tmp_path, test, default_quota=9 * MB)


def test_sizes_that_many_ask_for_are_measured_once(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        folder = await workspaces.use("ada", "data", "s")
        for number in range(2000):
            (folder / str(number)).touch()
        many = await asyncio.gather(*(workspaces.get("ada", "data") for _ in range(50)))
        assert len({workspace.size for workspace in many}) == 1

    run(tmp_path, test)


def test_a_size_that_was_forgotten_while_it_was_measured_is_not_remembered(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "file").touch()
        workspaces = Workspaces(tmp_path, None)  # type: ignore[arg-type]
        sizes: FolderSizes = workspaces._sizes
        measuring = asyncio.create_task(sizes.now(tmp_path))
        await asyncio.sleep(0)  # now it is in its thread
        sizes.forget(tmp_path)
        assert await measuring > 0 and sizes.known(tmp_path) is None
        await sizes.now(tmp_path)
        assert sizes.known(tmp_path)
        await workspaces.close()
        with pytest.raises(ServerUnavailable, match="shutting down"):
            await sizes.now(tmp_path)

    asyncio.run(main())


CRASH = """
import asyncio, os, sys
from pathlib import Path
from hutch import tree
from hutch.server import trees
from hutch.server.store import Store
from hutch.server.workspaces import Workspaces

def die(*_, **__):
    os.kill(os.getpid(), 9)

async def main(home, step):
    store = await Store.open(home / "store")
    workspaces = Workspaces(home / "workspaces", store)
    await workspaces.recover()
    folder = await workspaces.use("ada", "data", "s")
    (folder / "deep/er").mkdir(parents=True)
    (folder / "deep/er/file").touch()
    workspaces.release("s")
    if step == "marked":
        trees.discard = die
    elif step == "discarded":
        store.remove_workspace = die
    elif step == "row gone":
        trees.sweep = die
    elif step == "half swept":
        tree._take_out = die
    elif step == "made":
        workspaces._make_folder = die
        await workspaces.make("ada", "other")
    await workspaces.remove("ada", "data")
    await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.parametrize("step", ["marked", "discarded", "row gone", "half swept"])
def test_a_removal_that_was_killed_at_any_step_is_finished_at_the_next_start(
    tmp_path: Path, step: str
) -> None:
    argv = [sys.executable, "-c", CRASH, str(tmp_path), step]
    done = subprocess.run(argv, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr

    async def after(workspaces: Workspaces) -> None:
        assert await workspaces.list() == []
        assert not (tmp_path / "workspaces/ada/data").exists()
        await swept(workspaces)
        assert not trash(tmp_path)
        await workspaces.make("ada", "data")

    run(tmp_path, after)


def test_one_that_was_killed_while_it_was_made_can_be_used(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CRASH, str(tmp_path), "made"]
    assert subprocess.run(argv, check=False, timeout=60).returncode == -9

    async def after(workspaces: Workspaces) -> None:
        assert [w.id for w in await workspaces.list()] == ["data", "other"]
        assert (await workspaces.use("ada", "other", "s")).is_dir()

    run(tmp_path, after)


def test_files_whose_store_was_lost_are_a_workspace_again(tmp_path: Path) -> None:
    async def before(workspaces: Workspaces) -> None:
        (await workspaces.use("ada", "data", "s")).joinpath("precious").touch()

    async def after(workspaces: Workspaces) -> None:
        (found,) = await workspaces.list("ada")
        assert found.id == "data"
        assert (await workspaces.use("ada", "data", "s")).joinpath("precious").exists()

    run(tmp_path, before)
    for path in tmp_path.glob("store*"):
        path.unlink()
    (tmp_path / "workspaces" / "ada" / "link").symlink_to("/")
    (tmp_path / "workspaces" / "ada" / "No Name").mkdir()
    run(tmp_path, after)


HOSTILE = r"""
set -e
echo x > file; ln -s /etc/passwd link; mkfifo pipe; ln file again
mkdir locked; echo x > locked/in; chmod 000 locked
printf 'x' > "$(printf 'new\nline')"; printf 'x' > "$(printf '\377\376')"
cat > nest.py <<'END'
import os
for _ in range(3_000):  # deeper than a path is long
    os.mkdir("d"); os.chdir("d")
open("bottom", "wb").write(b"x" * 3_000_000)
END
python3 nest.py
"""


def test_what_a_hostile_box_leaves_is_the_server_s_own_measured_and_removed(tmp_path: Path) -> None:
    async def test(workspaces: Workspaces) -> None:
        folder = await workspaces.use("ada", "data", "s")

        def fill() -> None:
            try:
                made = Sandbox.create(workspace=folder)
            except BackendUnavailable as exc:
                need("namespaces", str(exc))
            with made as box:
                box.shell.run(HOSTILE, check=True, timeout=60)

        await asyncio.to_thread(fill)
        me = (os.geteuid(), os.getegid())
        for name in ("file", "link", "pipe", "locked", "d", "d/d/d"):
            info = (folder / name).lstat()
            assert (info.st_uid, info.st_gid) == me, name
        found = await workspaces.get("ada", "data")
        assert found.size is not None and found.size > 3_000_000 + 3_000 * 256
        workspaces.release("s")
        await workspaces.remove("ada", "data")
        await swept(workspaces)
        assert not trash(tmp_path) and not folder.exists()

    run(tmp_path, test)
