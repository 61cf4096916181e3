"""Who may come in, and with which rights."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hutch.engine.clock import SteadyClock
from hutch.errors import Conflict, InvalidRequest, NotFound, ServerUnavailable
from hutch.server.keys import OPERATOR, Caller, KeyExpired, Keys, check_owner
from hutch.server.store import Store
from hutch.serving import SCOPES


def run(
    folder: Path, test: Callable[[Keys, Store], Awaitable[None]], configured: str | None = None
) -> None:
    async def main() -> None:
        store = await Store.open(folder / "hutch.db")
        try:
            await test(await Keys.open(store, configured), store)
        finally:
            await store.close()

    asyncio.run(main())


def test_a_key_opens_what_its_scope_allows(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store) -> None:
        made = await keys.make("ada", "run", "laptop")
        assert made.key and re.fullmatch(r"hutch_[a-z0-9]{8}_[A-Za-z0-9]{40}", made.key)
        assert made.key.startswith(made.prefix) and made.label == "laptop"
        caller = keys.find(made.key)
        assert caller == Caller("ada", "run", made.id)
        assert caller.may("read") and caller.may("run") and not caller.may("admin")

    run(tmp_path, test)


def test_each_scope_may_what_those_before_it_may() -> None:
    for n, scope in enumerate(SCOPES):
        assert [Caller("a", scope).may(needs) for needs in SCOPES] == [
            m <= n for m in range(len(SCOPES))
        ]


def test_the_key_itself_is_told_once_and_kept_nowhere(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store) -> None:
        made = await keys.make("ada")
        assert made.key
        assert [key.key for key in keys.list()] == [None]
        secret = made.key.rpartition("_")[2].encode()
        for file in tmp_path.iterdir():
            assert secret not in file.read_bytes()
        assert secret.decode() not in repr(vars(keys))

    run(tmp_path, test)


def test_keys_are_known_after_a_restart_and_a_revoked_one_stays_out(tmp_path: Path) -> None:
    texts: list[str] = []

    async def first(keys: Keys, store: Store) -> None:
        for owner in ("ada", "bob"):
            made = await keys.make(owner)
            texts.append(made.key or "")
        await keys.revoke(made.id)
        assert keys.find(texts[1]) is None
        await keys.revoke(made.id)  # twice is no error

    async def again(keys: Keys, store: Store) -> None:
        assert keys.find(texts[0]) and keys.find(texts[1]) is None
        assert [key.owner for key in keys.list()] == ["ada", "bob"]
        assert [key.revoked_at is None for key in keys.list()] == [True, False]
        with pytest.raises(NotFound):
            await keys.revoke("nothing")

    run(tmp_path, first)
    run(tmp_path, again)


def test_a_key_that_is_revoked_is_out_even_if_that_cannot_be_written_down(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store) -> None:
        made = await keys.make("ada")
        await store.close()
        with pytest.raises(ServerUnavailable):
            await keys.revoke(made.id)
        assert keys.find(made.key or "") is None

    run(tmp_path, test)


@pytest.mark.parametrize(
    "wrong",
    ["", " ", "hutch_", "Bearer x", "hutch_00000000_" + "a" * 40, "\udcff", "💥", "x" * 100_000],
    ids=range(8),
)
def test_what_is_no_key_opens_nothing(tmp_path: Path, wrong: str) -> None:
    async def test(keys: Keys, store: Store) -> None:
        made = await keys.make("ada")
        assert made.key
        assert keys.find(wrong) is None
        for near in (made.key[:-1], made.key + "x", made.key + "\n", made.key.upper(), made.prefix):
            assert keys.find(near) is None
        other = await keys.make("bob", "admin")
        assert other.key
        crossed = other.prefix + made.key[len(made.prefix) :]
        assert keys.find(crossed) is None

    run(tmp_path, test)


def test_a_configured_key_is_the_operators_and_is_not_stored(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store) -> None:
        assert keys.find("sk-of-old") == Caller(OPERATOR, "admin")
        assert keys.find("sk-of-ol") is None and keys.find("") is None
        assert not keys.is_open and keys.list() == [] and await store.list_keys() == []

    run(tmp_path, test, "sk-of-old")


def test_only_a_server_that_never_had_a_key_is_open(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store) -> None:
        assert keys.is_open and keys.find("anything") is None
        made = await keys.make("ada")
        assert not keys.is_open
        await keys.revoke(made.id)
        assert not keys.is_open

    async def again(keys: Keys, store: Store) -> None:
        assert not keys.is_open

    run(tmp_path, test)
    run(tmp_path, again)


def test_when_a_key_was_used_is_known_at_once_and_written_down_later(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store) -> None:
        made = await keys.make("ada")
        assert keys.list()[0].last_used_at is None
        keys.find(made.key or "")
        at = keys.list()[0].last_used_at
        assert at is not None and at >= made.created_at
        assert (await store.list_keys())[0][0].last_used_at is None
        await keys.write_down()
        assert (await store.list_keys())[0][0].last_used_at == at == keys.list()[0].last_used_at
        await keys.write_down()

    run(tmp_path, test)


@pytest.mark.parametrize("owner", ["a", "ada", "team-7", "a.b_c", "0", "x" * 63])
def test_names_of_owners(owner: str) -> None:
    assert check_owner(owner) == owner


@pytest.mark.parametrize(
    "owner", ["", "Ada", "-a", ".", "..", "a/b", "a b", "a\n", "ü", "x" * 64, "$(id)", "a\0"]
)
def test_what_is_no_name_of_an_owner_is_refused(tmp_path: Path, owner: str) -> None:
    async def test(keys: Keys, store: Store) -> None:
        with pytest.raises(InvalidRequest, match="an owner is"):
            await keys.make(owner)
        with pytest.raises(InvalidRequest, match="read, run, admin"):
            await keys.make("ada", "root")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="a label has"):
            await keys.make("ada", "run", "x\n")
        assert keys.is_open

    run(tmp_path, test)


def test_what_a_key_has_open_ends_with_it(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store) -> None:
        ended: list[str] = []
        one, other = await keys.make("ada"), await keys.make("ada")
        assert one.key and other.key
        ada, also_ada = keys.find(one.key), keys.find(other.key)
        assert ada and also_ada
        keys.watch(ada, lambda: ended.append("a terminal"))
        forget = keys.watch(ada, lambda: ended.append("what is over"))
        keys.watch(also_ada, lambda: ended.append("another key's"))
        keys.watch(Caller(OPERATOR, "admin"), lambda: ended.append("the operator's"))()
        forget()
        await keys.revoke(one.id)
        await keys.revoke(one.id)
        assert ended == ["a terminal"]

    run(tmp_path, test)


def test_what_is_over_is_not_remembered(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store) -> None:
        made = await keys.make("ada")
        assert made.key
        caller = keys.find(made.key)
        assert caller
        forget = keys.watch(caller, lambda: None)
        forget()
        assert not keys._open
        forget = keys.watch(caller, lambda: None)
        await keys.revoke(made.id)
        forget()
        assert not keys._open

    run(tmp_path, test)


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


DAY = 86_400


def with_clock(
    folder: Path,
    test: Callable[[Keys, Store, Clock], Awaitable[None]],
    default_ttl: float | None = None,
    max_ttl: float | None = None,
) -> None:
    clock = Clock()

    async def main(_: Keys, store: Store) -> None:
        opened = await Keys.open(store, default_ttl=default_ttl, max_ttl=max_ttl, clock=clock)
        await test(opened, store, clock)

    run(folder, main)


def test_a_key_opens_nothing_once_it_has_expired(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store, clock: Clock) -> None:
        made = await keys.make("ada", expires="30d")
        assert made.key and made.expires_at == clock.now + 30 * DAY
        clock.now += 30 * DAY - 1
        assert keys.find(made.key) == Caller("ada", "run", made.id)
        clock.now += 1
        for known in (keys, await Keys.open(store, clock=clock)):
            with pytest.raises(KeyExpired, match=r"expired at 2027-02-14T\d\d:00:00Z.*rotate"):
                known.find(made.key)
            assert known.find(made.key[:-1] + "?") is None
        await keys.extend(made.id, "1d")
        assert keys.find(made.key)

    with_clock(tmp_path, test)


def test_a_key_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store, clock: Clock) -> None:
        made = await keys.make("ada")
        assert made.key and made.expires_at is None
        clock.now += 100 * 365 * DAY
        strict = await Keys.open(store, default_ttl=1, max_ttl=1, clock=clock)
        assert strict.find(made.key)

    with_clock(tmp_path, test)


def test_new_keys_live_as_long_as_the_operator_says(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store, clock: Clock) -> None:
        assert (await keys.make("ada")).expires_at == clock.now + 7 * DAY
        made = await keys.make("ada", expires="30d")
        for wrong in ("31d", "never", "2100-01-01"):
            with pytest.raises(InvalidRequest, match=r"at most 30d here \(setting keys.max_ttl"):
                await keys.make("ada", expires=wrong)
            with pytest.raises(InvalidRequest, match="at most 30d"):
                await keys.extend(made.id, wrong)
        only_most = await Keys.open(store, max_ttl=30 * DAY, clock=clock)
        assert (await only_most.make("ada")).expires_at == clock.now + 30 * DAY

    with_clock(tmp_path, test, default_ttl=7 * DAY, max_ttl=30 * DAY)


def test_a_rotated_key_works_until_the_overlap_is_over(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store, clock: Clock) -> None:
        old = await keys.make(
            "ada", "read", "laptop", expires="30d", images=("host",), workspaces=("notes",)
        )
        new = await keys.rotate(old.id, "2h")
        assert new.key and old.key and new.key != old.key and new.id != old.id
        assert (new.owner, new.scope, new.label, new.images, new.workspaces, new.expires_at) == (
            ("ada", "read", "laptop", ("host",), ("notes",), old.expires_at)
        )
        clock.now += 2 * 3600 - 1
        assert keys.find(old.key) and keys.find(new.key)
        clock.now += 1
        again = await Keys.open(store, clock=clock)
        for known in (keys, again):
            with pytest.raises(KeyExpired):
                known.find(old.key)
            assert known.find(new.key) == Caller("ada", "read", new.id, ("host",), ("notes",))
        at_once = await keys.rotate(new.id, "0s", expires="never")
        assert keys.find(new.key) is None and at_once.key and keys.find(at_once.key)
        with pytest.raises(Conflict, match="was revoked"):
            await keys.rotate(new.id)
        with pytest.raises(Conflict, match="was revoked"):
            await keys.extend(new.id, "1d")
        for wrong in ("", "1", "-1h", "never", "31d"):
            with pytest.raises(InvalidRequest, match="overlap"):
                await keys.rotate(at_once.id, wrong)

    with_clock(tmp_path, test)


def test_a_key_that_is_revoked_while_it_is_rotated_has_no_successor(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store) -> None:
        old = await keys.make("ada")
        rotated, _ = await asyncio.gather(
            keys.rotate(old.id), keys.revoke(old.id), return_exceptions=True
        )
        assert isinstance(rotated, Conflict)
        for known in (keys, await Keys.open(store)):
            assert [key.revoked_at is None for key in known.list()] == [False, False]

    run(tmp_path, test)


def test_what_is_open_ends_with_its_expired_key_and_with_no_other(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store, clock: Clock) -> None:
        ended: list[str] = []
        for name, expires in (("short", "1h"), ("long", "1d"), ("forever", "never")):
            made = await keys.make("ada", expires=expires)
            caller = keys.find(made.key or "")
            assert caller
            keys.watch(caller, lambda name=name: ended.append(name))  # type: ignore[misc]
        keys.end_expired()
        assert ended == []
        clock.now += 3600
        keys.end_expired()
        keys.end_expired()
        assert ended == ["short"]

    with_clock(tmp_path, test)


def test_setting_the_clock_back_brings_no_key_back(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, boot = [1_800_000_000.0], [50.0]
    monkeypatch.setattr("hutch.engine.clock.time.time", lambda: wall[0])
    monkeypatch.setattr("hutch.engine.clock.since_boot", lambda: boot[0])
    clock = SteadyClock()
    boot[0] += 100
    wall[0] -= 86_400
    assert clock() == 1_800_000_100
    wall[0] += 2 * 86_400  # a clock that was ahead for a while is believed again afterwards
    assert clock() == wall[0]
    wall[0] = 1_800_000_101.0
    assert clock() == wall[0]


def test_only_keys_that_use_sessions_can_be_limited(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store) -> None:
        for scope in ("admin", "metrics"):
            with pytest.raises(InvalidRequest, match="only read and run keys"):
                await keys.make("ada", scope, images=("host",))  # type: ignore[arg-type]

    run(tmp_path, test)


@pytest.mark.parametrize("name", ["", "BAD NAME", "a\n", "../x", "-x", "x" * 256])
def test_a_key_is_not_limited_to_names_that_cannot_exist(tmp_path: Path, name: str) -> None:
    async def test(keys: Keys, store: Store) -> None:
        with pytest.raises(InvalidRequest, match="the name of a workspace has 2 to 64"):
            await keys.make("ada", workspaces=("notes", name))
        with pytest.raises(InvalidRequest, match="no image can be called"):
            await keys.make("ada", images=("python", name))
        for limits in ({"images": ("xx",) * 65}, {"workspaces": ("xx",) * 65}):
            with pytest.raises(InvalidRequest, match="at most 64"):
                await keys.make("ada", **limits)
        assert keys.list() == []

    run(tmp_path, test)


def test_a_key_can_be_limited_to_any_image_that_a_backend_could_have(tmp_path: Path) -> None:
    images = (
        "host", "python", "debian:12", "Registry.example:5000/org/tool:1.2_RC", "[::1]:5000/a/b",
        "ghcr.io/org/tool@sha256:" + "0" * 64, "sha256:" + "a" * 64,
    )  # fmt: skip

    async def test(keys: Keys, store: Store) -> None:
        assert (await keys.make("ada", images=images)).images == images

    run(tmp_path, test)


def test_no_key_is_made_that_has_expired_already(tmp_path: Path) -> None:
    async def test(keys: Keys, store: Store, clock: Clock) -> None:
        old = await keys.make("ada")
        for wrong in ("0s", "0d", "-1d", "999999999w", "2020-01-01", " "):
            with pytest.raises(InvalidRequest, match="expires"):
                await keys.make("ada", expires=wrong)
            with pytest.raises(InvalidRequest, match="expires"):
                await keys.rotate(old.id, expires=wrong)
        assert [key.id for key in keys.list()] == [old.id]
        await keys.extend(old.id, "0s")  # so one can be paused
        with pytest.raises(KeyExpired):
            keys.find(old.key or "")

    with_clock(tmp_path, test)
