"""Who may say what, and when."""

from __future__ import annotations

import dataclasses

import pytest
from pair import Pair, asking, greeted

from hutch import wire
from hutch.wire.connection import CANCELLED, DONE, IDLE, OPEN, OVERHEAD, TRANSITIONS
from hutch.wire.events import to_frame
from hutch.wire.frames import encode

EXAMPLES = {
    "set_env": wire.SetEnv({"TOKEN": "secret"}),
    "exec": wire.Exec(["ls", "\udcff"], cwd="/tmp", env={"A": "1"}, user="user", stdin=True,
                      timeout=1.5, tty=[80, 24]),
    "shell": wire.ShellCommand("main", "echo 'hé\n'", timeout=3.0),
    "open_shell": wire.StartShell("two", cwd="/", env={"B": ""}, user="user"),
    "close_shell": wire.EndShell("two"),
    "read": wire.Read("a\nb", offset=3, length=5, limit=7),
    "write": wire.Write("notes", mode=0o600, append=True, expect="00ff"),
    "edit": wire.Edit("f", "old", "new", replace_all=True),
    "stat": wire.Stat("/"),
    "list": wire.List(".", depth=3),
    "make_dir": wire.Mkdir("a/b"),
    "move": wire.Move("a", "b", overwrite=True),
    "remove": wire.Remove("a", recursive=True),
    "search": wire.Search(".", "x+", "*.py", True, 2, "py", context=3, gitignore=True, timeout=1.5),
    "glob": wire.Glob(".", "**/*.py", kind="file", gitignore=True, newest=True),
    "diff": wire.Diff("a", "b", context=1),
    "watch": wire.Watch(".", recursive=True),
    "run_cell": wire.RunCell("main", "print('é')", 2.5, ["search"], awaitable=True),
    "answer_call": wire.ReplyToCall("main", 7, "{}"),
    "interrupt": wire.Interrupt("main"),
    "open_context": wire.StartKernel("two", cwd="/tmp", env={"A": "1"}),
    "list_contexts": wire.ListKernels(),
    "restart_context": wire.RestartKernel("two"),
    "close_context": wire.EndKernel("two"),
    "variables": wire.Variables("main"),
    "set_idle": wire.SetIdle(900.0, 20_000_000, 10_000_000),
    "sleep_context": wire.SleepKernel("main"),
    "save_context": wire.SaveKernel("main"),
    "load_context": wire.LoadKernel("main"),
    "activity": wire.Activity(), "pack": wire.Pack(),
    "unpack": wire.Unpack(),
    "start": wire.Start("p1", ["top"], cwd="/tmp", env={"A": "1"}, user="user", timeout=9.5,
                        tty=[80, 24]),
    "attach": wire.Attach("p1", offset=7),
    "forget": wire.Forget("p1"),
    "survey": wire.Survey(),
    "list_ports": wire.Ports(),
    "dial": wire.Connect(8080),
    "tar": wire.Tar("/workspace"), "untar": wire.Untar("/tmp"),
}  # fmt: skip


@pytest.fixture
def pair() -> Pair:
    return Pair()


def forged(event: wire.Event) -> bytes:
    """The bytes of an event, whether or not anybody may send it."""
    return encode(to_frame(event))


def test_there_is_an_example_of_every_request():
    assert EXAMPLES.keys() == wire.REQUESTS.keys()


@pytest.mark.parametrize("op", EXAMPLES)
def test_a_request_arrives_as_it_was_sent(pair, op):
    request = EXAMPLES[op]
    assert type(request) is wire.REQUESTS[op]
    assert all(getattr(request, f.name) is not None for f in dataclasses.fields(request))
    assert pair.open(request) == 1


def test_an_answer_arrives_as_it_was_sent(pair):
    stream = pair.open()
    pair.send(pair.guest, wire.Note(stream, {"pid": 7, "name": "\udcff é"}))
    pair.send(pair.guest, wire.Data(stream, b"\x00\xff", wire.STDERR))
    pair.send(pair.guest, wire.Data(stream, b""))
    pair.send(pair.guest, wire.End(stream, {"exit_code": 0}))
    stream = pair.open()
    pair.send(pair.guest, wire.Fail(stream, "not_found", "no such file"))


def test_the_host_can_send_input_its_end_and_a_signal(pair):
    stream = pair.open(wire.Exec(["cat"], stdin=True))
    pair.send(pair.host, wire.Data(stream, b"x", wire.STDIN))
    pair.send(pair.host, wire.Eof(stream))
    pair.send(pair.host, wire.Note(stream, {"signal": 9}))
    pair.send(pair.host, wire.Cancel(stream))


def test_several_streams_can_be_open_at_once(pair):
    first, second = pair.open(), pair.open()
    pair.send(pair.guest, wire.Data(second, b"b"))
    pair.send(pair.guest, wire.End(second, {}))
    pair.send(pair.guest, wire.Data(first, b"a"))
    assert repr(pair.host) == "<Connection host, 1 streams open>"
    assert pair.host.is_open(first) and not pair.host.is_open(second)


# --- the table --------------------------------------------------------------------------


def test_only_the_host_can_open_a_stream():
    openers = {who for row in TRANSITIONS.values() for who, event in row if event is wire.Open}
    assert openers == {wire.HOST}


def test_a_guest_can_say_nothing_on_a_stream_that_is_idle_or_done():
    for state in (IDLE, DONE):
        assert not [event for who, event in TRANSITIONS[state] if who == wire.GUEST]


def test_a_guest_can_always_end_a_stream_that_is_open():
    for state in (OPEN, CANCELLED):
        assert TRANSITIONS[state][wire.GUEST, wire.End] is DONE
        assert TRANSITIONS[state][wire.GUEST, wire.Fail] is DONE


def test_what_the_host_may_say_to_an_open_stream_it_may_say_to_one_that_just_ended():
    said = {event for who, event in TRANSITIONS[OPEN] if who == wire.HOST}
    late = {event for who, event in TRANSITIONS[DONE] if who == wire.HOST}
    assert said == late


EVENTS = {
    wire.Open: wire.Open(1, wire.Exec(["true"])), wire.Data: wire.Data(1, b"x"),
    wire.Eof: wire.Eof(1), wire.Note: wire.Note(1, {}), wire.Credit: wire.Credit(1, 0),
    wire.Cancel: wire.Cancel(1), wire.End: wire.End(1, {}), wire.Fail: wire.Fail(1, "a", "b"),
}  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("who", [wire.HOST, wire.GUEST])
@pytest.mark.parametrize("state", [IDLE, OPEN, CANCELLED, DONE])
def test_what_is_not_in_the_table_is_refused_by_both_sides(state, who, event):
    pair = Pair()
    if state is not IDLE:
        pair.open()
    if state is CANCELLED:
        pair.send(pair.host, wire.Cancel(1))
    if state is DONE:
        pair.send(pair.guest, wire.End(1, {}))
    speaker, listener = (
        (pair.host, pair.guest) if who == wire.HOST else (pair.guest, pair.host)
    )  # fmt: skip
    if (who, event) in TRANSITIONS[state]:
        pair.send(speaker, EVENTS[event])
        return
    with pytest.raises(wire.LocalProtocolError, match=f"{who} sent {event.__name__} on"):
        speaker.send(EVENTS[event])
    with pytest.raises(wire.RemoteProtocolError, match=f"{who} sent {event.__name__} on"):
        listener.receive(forged(EVENTS[event]))


# --- hello ------------------------------------------------------------------------------


def test_nothing_can_be_said_before_hello():
    with pytest.raises(wire.LocalProtocolError, match="before Hello"):
        wire.Connection(wire.HOST).send(wire.Open(1, wire.Exec(["true"])))
    with pytest.raises(wire.RemoteProtocolError, match="before Hello"):
        wire.Connection(wire.HOST).receive(forged(wire.End(1, {})))


@pytest.mark.parametrize("hello", [wire.Hello(1), wire.Hello(1, stream=3)])
def test_hello_cannot_be_said_twice_or_on_a_stream(hello):
    connection = greeted(wire.HOST) if hello.stream == 0 else wire.Connection(wire.HOST)
    with pytest.raises(wire.RemoteProtocolError, match="Hello twice"):
        connection.receive(forged(hello))


@pytest.mark.parametrize("version", [0, 2, -1, 10**4000])
def test_a_guest_of_another_version_is_refused(version):
    with pytest.raises(wire.RemoteProtocolError, match=r"speaks version .{1,30}we speak 1"):
        wire.Connection(wire.HOST).receive(forged(wire.Hello(version)))


def test_a_guest_of_another_version_is_not_told_that_it_broke_the_protocol():
    with pytest.raises(wire.OtherVersion):
        wire.Connection(wire.HOST).receive(forged(wire.Hello(2)))


@pytest.mark.parametrize(
    ("host", "guest", "spoken"),
    [((1, 3), (1, 2), 2), ((1, 2), (1, 3), 2), ((2, 3), (1, 2), 2), ((1, 2), (2, 2), 2)],
)
def test_the_newest_version_that_both_know_is_spoken(monkeypatch, host, guest, spoken):
    def speaks(versions):
        monkeypatch.setattr(wire.connection, "OLDEST", versions[0])
        monkeypatch.setattr(wire.connection, "VERSION", versions[1])

    speaks(guest)
    inside = wire.Connection(wire.GUEST)
    hello = inside.send(inside.hello())
    speaks(host)
    outside = wire.Connection(wire.HOST)
    outside.receive(hello)
    answer = outside.send(outside.hello())
    speaks(guest)
    inside.receive(answer)
    assert outside.version == inside.version == spoken


@pytest.mark.parametrize(("host", "guest"), [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((3, 4), (1, 2))])
def test_versions_that_have_nothing_in_common_are_refused(monkeypatch, host, guest):
    monkeypatch.setattr(wire.connection, "OLDEST", host[0])
    monkeypatch.setattr(wire.connection, "VERSION", host[1])
    with pytest.raises(wire.OtherVersion):
        wire.Connection(wire.HOST).receive(forged(wire.Hello(guest[1], oldest=guest[0])))


def test_a_hello_of_a_later_version_may_have_fields_that_are_not_known_yet():
    payload = b'{"version": 1, "mood": "fine"}'
    frame = wire.frames.Frame(1, 0, payload)
    assert wire.Connection(wire.HOST).receive(wire.frames.encode(frame)) == [wire.Hello(1)]


def test_what_an_older_guest_does_not_know_is_not_said_to_it(monkeypatch):
    monkeypatch.setattr(wire.connection, "VERSION", 2)
    monkeypatch.setitem(wire.events.SINCE, "tar", 2)
    monkeypatch.setitem(wire.events.SINCE, "list.depth", 2)
    host = wire.Connection(wire.HOST)
    host.receive(forged(wire.Hello(1)))
    host.send(host.hello())
    assert b"depth" not in host.send(wire.Open(1, wire.List("/tmp")))
    with pytest.raises(wire.TooNew, match="list with depth came with version 2"):
        host.send(wire.Open(2, wire.List("/tmp", depth=3)))
    with pytest.raises(wire.TooNew, match="tar came with version 2"):
        host.send(wire.Open(2, wire.Tar("/tmp")))
    assert host.next_stream() == 2  # nothing has changed


def test_a_role_is_host_or_guest():
    with pytest.raises(ValueError, match="HOST or GUEST"):
        wire.Connection("server")


# --- windows ----------------------------------------------------------------------------


@pytest.mark.parametrize("who", [wire.HOST, wire.GUEST])
def test_neither_side_can_overrun_its_window(pair, who):
    stream = pair.open(wire.Exec(["cat"], stdin=True))
    sender = pair.host if who == wire.HOST else pair.guest
    other = pair.guest if who == wire.HOST else pair.host
    while room := sender.room(stream):
        pair.send(sender, wire.Data(stream, b"x" * min(room, 65536), 0))
    late = wire.Data(stream, b"", 0)
    with pytest.raises(wire.LocalProtocolError, match=f"{who} overran"):
        sender.send(late)
    pair.send(other, wire.Credit(stream, wire.cost(wire.Data(stream, b"12345"))))
    assert sender.room(stream) == 5
    pair.send(sender, wire.Data(stream, b"12345", 0))
    with pytest.raises(wire.RemoteProtocolError, match=f"{who} overran"):
        other.receive(forged(late))


def test_what_was_sent_is_owed_until_it_is_paid_back(pair):
    stream = pair.open(wire.Exec(["cat"], stdin=True))
    assert pair.host.owed(stream) == 0
    data = wire.Data(stream, b"12345", 0)
    pair.send(pair.host, data)
    assert pair.host.owed(stream) == wire.cost(data)
    pair.send(pair.guest, wire.Credit(stream, wire.cost(data)))
    assert pair.host.owed(stream) == 0


def test_the_two_windows_of_a_stream_are_apart(pair):
    stream = pair.open()
    while room := pair.guest.room(stream):
        pair.send(pair.guest, wire.Data(stream, b"x" * min(room, 65536)))
    assert pair.host.room(stream) == wire.WINDOW - OVERHEAD - 1
    other = pair.open()
    assert pair.guest.room(other) == wire.WINDOW - OVERHEAD - 1


def test_a_guest_cannot_flood_with_empty_frames():
    host = asking(wire.Exec(["yes"]))
    empty = forged(wire.Data(1, b""))
    accepted = 0
    with pytest.raises(wire.RemoteProtocolError, match="overran"):
        while True:
            host.receive(empty)
            accepted += 1
    assert accepted == wire.WINDOW // (OVERHEAD + 1)


def test_a_guest_cannot_flood_with_notes():
    host = asking(wire.List("."))
    note = forged(wire.Note(1, {}))
    with pytest.raises(wire.RemoteProtocolError, match="overran"):
        for _ in range(wire.WINDOW // OVERHEAD):
            host.receive(note)


def test_the_host_can_signal_a_program_that_reads_no_input(pair):
    stream = pair.open(wire.Exec(["sleep", "9"], stdin=True))
    while room := pair.host.room(stream):
        pair.send(pair.host, wire.Data(stream, b"x" * min(room, 65536), 0))
    pair.send(pair.host, wire.Note(stream, {"signal": 9}))


def test_a_note_is_paid_back_at_the_size_it_had_on_the_wire():
    host = asking(wire.List("."))
    # Raw UTF-8 and not our own escapes: what we would write ourselves is much longer.
    payload = '{"body":{"path":"éééééééé"}}'.encode()
    frame = len(payload).to_bytes(4, "big") + b"\x09" + (1).to_bytes(4, "big") + payload
    (note,) = host.receive(frame)
    assert wire.cost(note) == len(payload) + OVERHEAD


@pytest.mark.parametrize("amount", [-1, 101, wire.WINDOW, 10**4000])
def test_a_guest_cannot_give_back_more_than_it_was_sent(amount):
    host = asking(wire.Exec(["cat"], stdin=True))
    host.send(wire.Data(1, b"x" * (100 - OVERHEAD - 1), wire.STDIN))
    with pytest.raises(wire.RemoteProtocolError, match="guest gave a credit"):
        host.receive(forged(wire.Credit(1, amount)))


# --- streams ----------------------------------------------------------------------------


def test_streams_are_numbered_in_order(pair):
    assert [pair.open() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(wire.LocalProtocolError, match="opened stream 5 after 3"):
        pair.host.send(wire.Open(5, wire.Exec(["true"])))
    with pytest.raises(wire.RemoteProtocolError, match="opened stream 5 after 3"):
        pair.guest.receive(forged(wire.Open(5, wire.Exec(["true"]))))


def test_a_connection_that_has_used_up_its_numbers_says_so():
    host = greeted(wire.HOST)
    host._last_opened = (1 << 32) - 1
    with pytest.raises(wire.LocalProtocolError, match="used up"):
        host.next_stream()


def test_a_stream_that_is_done_costs_nothing(pair):
    for _ in range(1000):
        pair.send(pair.guest, wire.End(pair.open(), {}))
    assert not pair.host._states and not pair.host._windows
    assert not pair.guest._states and not pair.guest._windows


def test_a_request_too_large_to_send_changes_nothing(pair):
    with pytest.raises(wire.LocalProtocolError, match="limit"):
        pair.host.send(wire.Open(1, wire.Exec(["x" * wire.MAX_PAYLOAD])))
    assert pair.open() == 1


def test_a_guest_that_broke_the_protocol_is_not_listened_to_again():
    host = asking(wire.Exec(["true"]))
    good = forged(wire.Data(1, b"x"))
    with pytest.raises(wire.RemoteProtocolError, match="idle") as first:
        host.receive(good + forged(wire.End(2, {})) + good)
    with pytest.raises(wire.RemoteProtocolError) as second:
        host.receive(good)
    assert second.value is first.value
