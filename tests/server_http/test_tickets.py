"""A ticket opens a page once, and what it opens ends with what it came from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from http_of_tests import Answer, Running, eventually, read_all

from hutch.errors import Conflict, NotFound, NotPermitted, Unauthorized
from hutch.server.keys import CONFIGURED, LOCAL, OPEN, OPERATOR, Caller, KeyExpired, Keys
from hutch.server.quotas import RateLimited
from hutch.server.rules import Rules
from hutch.server.store import Store
from hutch.server.tickets import KEY_SECONDS, TICKET_SECONDS, Previews, Tickets
from hutch.serving import Key

RIGHTS = ("owner", "scope", "images", "workspaces", "expires_at")


class Clock:
    """A time of day that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1_900_000_000.0

    def __call__(self) -> float:
        return self.now


Test = Callable[[Keys, Tickets, Clock], Awaitable[None]]


def run(folder: Path, test: Test, configured: str | None = None) -> None:
    async def main() -> None:
        store, clock = await Store.open(folder / "hutch.db"), Clock()
        try:
            keys = await Keys.open(store, configured, clock=clock)
            await test(keys, Tickets(keys, clock), clock)
        finally:
            await store.close()

    asyncio.run(main())


def caller_of(keys: Keys, key: Key) -> Caller:
    assert key.key
    caller = keys.find(key.key)
    assert caller
    return caller


async def child_of(keys: Keys, tickets: Tickets, key: Key) -> Key:
    """The temporary key for a ticket that `key` asked for."""
    return await tickets.redeem(tickets.make(caller_of(keys, key)).ticket, "peer")


def test_a_ticket_opens_once_and_only_for_a_minute(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        asks = caller_of(keys, await keys.make("ada", "run"))
        ticket = tickets.make(asks)
        assert ticket.expires_at == clock.now + TICKET_SECONDS
        assert (await tickets.redeem(ticket.ticket, "peer")).key
        with pytest.raises(Unauthorized, match="was used, or is older than a minute"):
            await tickets.redeem(ticket.ticket, "peer")
        late = tickets.make(asks)
        clock.now += TICKET_SECONDS
        with pytest.raises(Unauthorized):
            await tickets.redeem(late.ticket, "peer")

    run(tmp_path, test)


def test_two_at_once_get_one_key_for_one_ticket(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        ticket = tickets.make(caller_of(keys, await keys.make("ada"))).ticket
        both = await asyncio.gather(
            *(tickets.redeem(ticket, "peer") for _ in range(2)), return_exceptions=True
        )
        assert sorted(type(each).__name__ for each in both) == ["Key", "Unauthorized"]

    run(tmp_path, test)


def test_neither_tickets_nor_their_keys_are_kept_in_clear(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        made = await keys.make("ada")
        ticket = tickets.make(caller_of(keys, made)).ticket
        assert len(ticket) >= 43 and ticket not in repr(vars(tickets))
        child = await tickets.redeem(ticket, "peer")
        assert child.key
        for file in tmp_path.iterdir():
            assert child.key.rpartition("_")[2].encode() not in file.read_bytes()

    run(tmp_path, test)


def test_a_tickets_key_has_exactly_the_rights_of_the_one_that_asked(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        asked = await keys.make("ada", "read", images=("python",), workspaces=("notes",))
        child = await child_of(keys, tickets, asked)
        was, got = caller_of(keys, asked), caller_of(keys, child)
        assert (got.owner, got.scope, got.images, got.workspaces) == (
            was.owner, "read", ("python",), ("notes",)
        )  # fmt: skip
        assert (child.label, child.parent) == ("dashboard", asked.id)
        assert child.expires_at == clock.now + KEY_SECONDS

    run(tmp_path, test)


def test_a_tickets_key_ends_when_the_one_that_asked_does(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        asked = await keys.make("ada", expires="1h")
        child = await child_of(keys, tickets, asked)
        assert child.key and child.expires_at == clock.now + 3600
        # Also if that is decided later, and who asks is told so.
        await keys.extend(asked.id, "20m")
        known = keys.get(child.id)
        assert known and known.expires_at == clock.now + 1200
        clock.now += 1200
        with pytest.raises(KeyExpired, match="log in again"):
            keys.find(child.key)
        await keys.extend(asked.id, "1h")
        assert keys.find(child.key)
        await keys.revoke(asked.id)
        assert keys.find(child.key) is None

    run(tmp_path, test)


def test_a_key_of_a_ticket_makes_no_chain_that_revoking_cannot_end(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        asked = await keys.make("ada")
        last = await child_of(keys, tickets, asked)
        with contextlib.suppress(NotPermitted):
            for _ in range(1100):
                last = await child_of(keys, tickets, last)
        ended: list[str] = []
        keys.watch(caller_of(keys, last), lambda: ended.append("last"))
        await keys.revoke(asked.id)
        assert last.key and keys.find(last.key) is None and ended == ["last"]
        assert last.parent == asked.id
        with pytest.raises(NotPermitted, match="a temporary key makes no tickets"):
            tickets.make(Caller("ada", "run", last.id))

    run(tmp_path, test)


def test_a_ticket_of_a_key_that_was_revoked_meanwhile_opens_nothing(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        asked = await keys.make("ada")
        ticket = tickets.make(caller_of(keys, asked)).ticket
        await keys.revoke(asked.id)
        with pytest.raises(Unauthorized, match="has ended"):
            await tickets.redeem(ticket, "peer")

    run(tmp_path, test)


def test_a_ticket_that_is_redeemed_while_its_key_is_revoked_opens_nothing(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        asked = await keys.make("ada")
        ticket = tickets.make(caller_of(keys, asked)).ticket
        redeemed, _ = await asyncio.gather(
            tickets.redeem(ticket, "peer"), keys.revoke(asked.id), return_exceptions=True
        )
        assert isinstance(redeemed, Unauthorized)
        assert all(key.revoked_at for key in keys.list())

    run(tmp_path, test)


def test_a_key_of_a_ticket_cannot_be_made_to_last(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        child = await child_of(keys, tickets, await keys.make("ada"))
        with pytest.raises(Conflict, match="a temporary one"):
            await keys.extend(child.id, "never")
        with pytest.raises(Conflict, match="a temporary one"):
            await keys.rotate(child.id)

    run(tmp_path, test)


def test_wrong_tickets_are_limited_and_right_ones_are_not(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        asks = caller_of(keys, await keys.make("ada"))

        async def refused() -> type[Exception]:
            try:
                await tickets.redeem("wrong", "peer")
            except (Unauthorized, RateLimited) as exc:
                return type(exc)
            raise AssertionError("a wrong ticket was right")

        tried = [await refused() for _ in range(40)]
        assert tried[0] is Unauthorized and tried[-1] is RateLimited
        assert (await tickets.redeem(tickets.make(asks).ticket, "peer")).key

    run(tmp_path, test)


def test_a_caller_who_asks_for_many_tickets_keeps_the_last_ones(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        asks = caller_of(keys, await keys.make("ada"))
        other = tickets.make(caller_of(keys, await keys.make("bob")))
        made = [tickets.make(asks) for _ in range(100)]
        with pytest.raises(Unauthorized):
            await tickets.redeem(made[0].ticket, "peer")
        assert (await tickets.redeem(made[-1].ticket, "peer")).owner == "ada"
        assert (await tickets.redeem(other.ticket, "peer")).owner == "bob"

    run(tmp_path, test)


def test_a_dashboard_that_is_opened_does_not_shut_an_open_server(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        anyone = Caller(OPERATOR, "admin", root=OPEN)
        child = await tickets.redeem(tickets.make(anyone).ticket, "peer")
        assert child.key and keys.is_open and keys.find(child.key)
        # The first real key shuts it, also for those who came before.
        await keys.make("ada")
        assert not keys.is_open and keys.find(child.key) is None

    run(tmp_path, test)


def test_keys_of_tickets_survive_a_restart_and_not_another_key_of_the_operators(
    tmp_path: Path,
) -> None:
    kept: dict[str, Key] = {}

    async def make(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        operator = keys.find("of-the-operator")
        assert operator and operator.root.startswith(CONFIGURED)
        kept["configured"] = await tickets.redeem(tickets.make(operator).ticket, "peer")
        local = Caller(OPERATOR, "admin", root=LOCAL)
        kept["local"] = await tickets.redeem(tickets.make(local).ticket, "peer")

    def found(*names: str) -> Test:
        async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
            assert tuple(n for n, key in kept.items() if keys.find(key.key or "")) == names

        return test

    run(tmp_path, make, "of-the-operator")
    run(tmp_path, found("configured", "local"), "of-the-operator")
    run(tmp_path, found("local"), "another-of-the-operator")
    run(tmp_path, found("local"))


def test_keys_of_tickets_are_forgotten_when_they_have_ended(tmp_path: Path) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        asked = await keys.make("ada")
        child = await child_of(keys, tickets, asked)
        await keys.forget_temporary()
        assert [key.id for key in keys.list()] == [asked.id, child.id]
        clock.now += 2 * KEY_SECONDS
        await keys.forget_temporary()
        assert [key.id for key in keys.list()] == [asked.id]
        assert child.key and keys.find(child.key) is None

    run(tmp_path, test)


def test_previews_of_a_key_that_is_forgotten_are_over_and_others_can_be_made(
    tmp_path: Path,
) -> None:
    async def test(keys: Keys, tickets: Tickets, clock: Clock) -> None:
        asked = await keys.make("ada")
        child = await child_of(keys, tickets, asked)
        previews = Previews(keys, lambda id: True, clock)
        token = previews.make("a", 80, caller_of(keys, child)).path.split("/")[2]
        assert previews.find(token, "").port == 80
        # Revoked at the time of day, which was set back, so that it seems long ago.
        await keys.revoke(child.id)
        await keys.forget_temporary()
        assert [key.id for key in keys.list()] == [asked.id]
        with pytest.raises(NotFound):
            previews.find(token, "")
        assert previews.make("a", 80, caller_of(keys, asked)).path

    run(tmp_path, test)


# --- over HTTP -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(
        tmp_path_factory.mktemp("local"),
        rules=Rules(no_dashboard="is switched off (dashboard.enabled)"),
    )
    yield running
    running.close()


def redeem(server: Running, ticket: str) -> Answer:
    return server.ask("POST", "/v1/tickets/redeem", {"ticket": ticket}, key=None)


def child(server: Running, key: str) -> dict[str, str]:
    ticket = server.ask("POST", "/v1/tickets", key=key)
    assert ticket.status == 200, ticket.body
    answer = redeem(server, ticket.json["ticket"])
    assert answer.status == 200, answer.body
    made: dict[str, str] = answer.json
    return made


def make_key(server: Running, **fields: object) -> dict[str, str]:
    made: dict[str, str] = server.ask("POST", "/v1/keys", {"owner": "ada", **fields}).json
    return made


def test_a_browser_without_a_key_gets_one_for_a_ticket(server: Running) -> None:
    asked = make_key(server, scope="read", images=["python"], expires="1h")
    made = child(server, asked["key"])
    who = server.ask("GET", "/v1/me", key=asked["key"]).json
    now = server.ask("GET", "/v1/me", key=made["key"]).json
    assert {name: now[name] for name in RIGHTS} == {name: who[name] for name in RIGHTS}
    assert (now["key"], now["label"]) == (made["id"], "dashboard")
    # What the first may not, the second may not either.
    assert server.ask("POST", "/v1/sessions", {}, key=made["key"]).status == 403
    assert server.ask("GET", "/v1/keys", key=made["key"]).status == 403


def test_who_asks_is_told_who_they_are(server: Running) -> None:
    metrics = make_key(server, scope="metrics", label="a monitor")
    who = server.ask("GET", "/v1/me", key=metrics["key"]).json
    assert (who["owner"], who["scope"], who["label"]) == ("ada", "metrics", "a monitor")
    assert server.ask("POST", "/v1/tickets", key=metrics["key"]).status == 403
    operator = server.ask("GET", "/v1/me").json
    assert (operator["owner"], operator["scope"], operator["key"]) == (OPERATOR, "admin", None)
    # Settings can give boxes parts of the machine, so a key over the network is not enough.
    assert operator["may_edit_settings"] is False and operator["is_local"] is False


def test_revoking_the_key_that_asked_ends_what_the_page_has_open(server: Running) -> None:
    asked = make_key(server, scope="admin")
    made = child(server, asked["key"])
    follow = (
        f"GET /v1/audit/follow HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {made['key']}"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as page:
        page.sendall(f"{follow}\r\nAccept: text/event-stream\r\n\r\n".encode())
        assert page.recv(12) == b"HTTP/1.1 200"
        assert server.ask("DELETE", f"/v1/keys/{asked['id']}").status == 200
        read_all(page)  # returns when the server hangs up
    assert server.ask("GET", "/v1/me", key=made["key"]).status == 401


@pytest.mark.parametrize("scope", ["read", "run"])
def test_a_temporary_key_revokes_itself_and_no_other(server: Running, scope: str) -> None:
    asked = make_key(server, scope=scope)
    made, other = child(server, asked["key"]), child(server, asked["key"])
    assert server.ask("GET", "/v1/me", key=made["key"]).json["is_temporary"] is True
    assert server.ask("GET", "/v1/me", key=asked["key"]).json["is_temporary"] is False
    for id in (asked["id"], other["id"], "zzzzzzzz"):
        refused = server.ask("DELETE", f"/v1/keys/{id}", key=made["key"])
        assert (refused.status, refused.error) == (403, "NOT_PERMITTED")
    # Nor does a key that an admin made: its other users would find it gone.
    assert server.ask("DELETE", f"/v1/keys/{asked['id']}", key=asked["key"]).status == 403
    assert server.ask("DELETE", f"/v1/keys/{made['id']}", key=made["key"]).status == 200
    assert server.ask("GET", "/v1/me", key=made["key"]).status == 401
    for key in (asked, other):
        assert server.ask("GET", "/v1/me", key=key["key"]).status == 200


def test_what_is_no_ticket_is_refused_and_recorded(server: Running) -> None:
    for body in ({}, {"ticket": 1}, {"ticket": "a", "more": 1}):
        assert server.ask("POST", "/v1/tickets/redeem", body, key=None).status == 400
    wrong = redeem(server, "x" * 43)
    assert (wrong.status, wrong.error) == (401, "UNAUTHORIZED")
    entries = eventually(
        lambda: server.ask("GET", "/v1/audit", event="auth_failed").json  # written by a thread
    )
    assert entries[-1]["outcome"] == "unknown ticket" and entries[-1]["peer"] == "127.0.0.1"
    statuses = [redeem(server, "x" * 43).status for _ in range(30)]
    assert set(statuses) <= {401, 429} and statuses[-1] == 429
    limited = redeem(server, "x" * 43)
    assert limited.headers["retry-after"] == "60"


def test_tickets_are_in_the_audit_log_without_their_secrets(server: Running) -> None:
    asked = make_key(server)
    ticket = server.ask("POST", "/v1/tickets", key=asked["key"]).json["ticket"]
    made = redeem(server, ticket).json
    lines = server.ask("GET", "/v1/audit", event="request", limit=10_000).json
    by_operation = {line["operation"]: line for line in lines}
    assert by_operation["MakeTicket"]["key"] == asked["id"]
    line = by_operation["RedeemTicket"]
    assert (line["owner"], line["key"], line["target"]) == ("ada", made["id"], made["id"])
    assert line["detail"]["parent"] == asked["id"]
    assert ticket not in json.dumps(lines) and made["key"] not in json.dumps(lines)


def test_pages_of_other_sites_cannot_redeem_a_ticket(server: Running) -> None:
    ticket = server.ask("POST", "/v1/tickets").json["ticket"]
    evil = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    answer = server.ask("POST", "/v1/tickets/redeem", {"ticket": ticket}, key=None, headers=evil)
    assert answer.status == 403
    assert redeem(server, ticket).status == 200, "and it was not used up"


def test_a_server_whose_dashboard_is_switched_off_makes_no_tickets(local: Running) -> None:
    answer = local.ask("POST", "/v1/tickets")
    assert answer.status == 409 and "dashboard.enabled" in answer.json["message"]
