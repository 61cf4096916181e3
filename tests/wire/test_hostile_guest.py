"""A guest that has been taken over says anything at all. The host's calls end, with an error
of ours or with a value; they never hang, and nothing else is ever raised."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_hostile_bytes import frames, json_values, mutated, names

from hutch import BoxLost, GuestMisbehaved, HutchError, Mount, wire
from hutch import operations as op
from hutch.backends.base import Backend, Box
from hutch.engine.engine import Engine
from hutch.engine.link import Link
from hutch.engine.outputs import Outputs
from hutch.engine.session import Numbers, Session
from hutch.types import BoxInfo, Limits, Result, Stats
from hutch.wire.events import to_frame
from hutch.wire.frames import encode

HELLO = wire.Connection(wire.GUEST).send(wire.Hello(wire.VERSION))


class Recording:
    """A guest that says what it was going to say, whatever it hears, and then hangs up."""

    def __init__(self, *said: bytes, last: OSError | None = None) -> None:
        self._said, self._last = list(said), last

    async def read(self, at_most: int) -> bytes:
        await asyncio.sleep(0)
        if self._said:
            return self._said.pop(0)
        if self._last:
            raise self._last
        return b""

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self._said.clear()


class Liar:
    """A guest that keeps to the protocol and answers every request with anything."""

    def __init__(self, lies: list[bytes]) -> None:
        self._connection = wire.Connection(wire.GUEST)
        self._lies = itertools.cycle(lies)
        self._out = asyncio.Queue[bytes]()
        self._out.put_nowait(HELLO)

    async def read(self, at_most: int) -> bytes:
        return await self._out.get()

    async def write(self, data: bytes) -> None:
        for event in self._connection.receive(data):
            if isinstance(event, wire.Open):
                for kind, body in json.loads(next(self._lies)):
                    self._out.put_nowait(lie(kind, event.stream, body))

    def close(self) -> None:
        self._out.put_nowait(b"")


def lie(kind: str, stream: int, body: object) -> bytes:
    match kind:
        case "data":
            return encode(to_frame(wire.Data(stream, str(body).encode("utf-8", "replace"))))
        case "results":
            data = json.dumps(body).encode()
            message = wire.LENGTH.pack(len(data)) + data
            return encode(to_frame(wire.Data(stream, message, wire.RESULTS)))
        case "garbage":
            garbage = str(body).encode("utf-8", "replace")
            return encode(to_frame(wire.Data(stream, garbage, wire.RESULTS)))
        case "note":
            return encode(to_frame(wire.Note(stream, {"pid": 3, **body} if stream % 2 else body)))
        case "fail":
            code, message = body
            return encode(to_frame(wire.Fail(stream, code, message)))
    return encode(to_frame(wire.End(stream, body)))


class LiarBox(Box):
    id, isolation = "liar", "ns"

    def __init__(self, stream: Liar) -> None:
        self._stream = stream

    async def connect(self) -> Liar:
        return self._stream

    async def kill(self) -> None:
        self._stream.close()

    async def stats(self) -> Stats:
        return Stats(None, None, None, None)


class LiarBackend(Backend):
    name = "liars"

    def __init__(self, lies: list[bytes]) -> None:
        self._lies = lies
        self._folder = tempfile.TemporaryDirectory(prefix="hutch-liar-")

    async def folder(self) -> str:
        return self._folder.name

    async def start(self, spec, id=None) -> Box:
        return LiarBox(Liar(self._lies))

    async def adopt(self, id: str) -> Box:
        raise NotImplementedError

    async def list(self) -> list[str]:
        return []

    async def report(self):
        raise NotImplementedError

    async def close(self) -> None:
        self._folder.cleanup()


async def drain(link: Link, request: object) -> None:
    async with link.call(request) as call:
        async for _ in call:
            pass


async def converse(stream: Recording) -> list[object]:
    """Everything a link can be asked, at once; what became of each."""
    try:
        link = await Link.open(stream)
    except HutchError as exc:
        return [exc]
    try:
        asked = (
            drain(link, wire.Exec(["cat"], stdin=True)), link.ask(wire.List(".")),
            drain(link, wire.Watch(".")), link.ask(wire.Stat("x")),
        )  # fmt: skip
        async with asyncio.timeout(120):
            return await asyncio.gather(*asked, return_exceptions=True)
    finally:
        await link.close()


def judge(outcomes: list[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, HutchError), repr(outcome)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=80) | frames | mutated(), max_size=6), st.booleans())
def test_a_link_survives_a_guest_that_says_anything(said, greets):
    judge(asyncio.run(converse(Recording(*([HELLO] if greets else []), *said))))


def test_a_guest_that_hangs_up_is_a_lost_box():
    (outcome,) = asyncio.run(converse(Recording()))
    assert isinstance(outcome, BoxLost)
    for outcome in asyncio.run(converse(Recording(HELLO, last=ConnectionResetError(104, "reset")))):
        assert isinstance(outcome, BoxLost)


def test_a_guest_that_breaks_the_protocol_is_named_and_shamed():
    garbage = Recording(HELLO, b"\xff" * 9)
    for outcome in asyncio.run(converse(garbage)):
        assert isinstance(outcome, GuestMisbehaved)


def test_calls_after_the_end_of_a_link_give_the_same_error():
    async def late() -> None:
        link = await Link.open(Recording(HELLO))
        for _ in range(3):
            with pytest.raises(BoxLost):
                await link.ask(wire.Stat("x"))
        assert "over" in repr(link)
        await link.close()

    asyncio.run(late())


OPERATIONS = [
    op.RunShell("liar", "echo"), op.OpenShell("liar"), op.CloseShell("liar", "main"),
    op.RunProgram("liar", ("true",), stdin=b"x"), op.StartProgram("liar", ("true",)),
    op.ListPrograms("liar"), op.WaitProgram("liar", "p1"), op.ReadFile("liar", "x"),
    op.WriteFile("liar", "x", b"data"), op.EditFile("liar", "x", "a", "b"),
    op.StatFile("liar", "x"), op.ListFiles("liar"), op.MakeDir("liar", "x"),
    op.MoveFile("liar", "a", "b"), op.RemoveFile("liar", "x"), op.SearchFiles("liar", "x"),
    op.GlobFiles("liar", "*"), op.DiffFiles("liar", "a", "b"), op.WatchFiles("liar"),
    op.RunCode("liar", "1"), op.InterruptCode("liar"), op.OpenContext("liar"),
    op.ListContexts("liar"), op.RestartContext("liar"), op.CloseContext("liar", "main"),
    op.GetVariables("liar"),
]  # fmt: skip
said_names = st.sampled_from(
    ["exit_code", "timed_out", "cwd", "restarted", "size", "written", "replaced", "created",
     "path", "kind", "mode", "modified", "uid", "gid", "target", "line", "text", "pid", "ready",
     "died", "killed", "interrupted", "contexts", "context", "busy", "count", "seconds",
     "offset", "ports", "files", "job", "shell", "eof"]
)  # fmt: skip
odd = json_values | st.sampled_from([10**400, -1, 2**63, "/", "../x", "file", "\udcff", 1e308])
FULL = {
    "exit_code": 0, "timed_out": False, "cwd": "/", "path": "/x", "kind": "file", "size": 1,
    "mode": 0o644, "modified": 1.5, "uid": 0, "gid": 0, "target": None, "line": 1, "text": "t",
    "pid": 3, "written": 4, "replaced": 1, "created": True, "restarted": False, "died": None,
    "killed": False, "interrupted": True, "context": "main", "busy": False, "count": 1,
    "contexts": [{"context": "main", "cwd": "/", "busy": False, "count": 1, "pid": 3}],
    "seconds": 1.5, "offset": 0, "ports": [[80, "::"]], "files": 1,
}  # fmt: skip
wrong = st.dictionaries(said_names | names, odd, max_size=9)
bodies = wrong | st.just(FULL) | wrong.map(lambda body: FULL | dict(list(body.items())[:2]))
RESULT = {"mime": {"text/plain": "2"}, "main": True, "data": None, "chart": None, "files": {}}
ANSWER = {
    "count": 1, "error": {"name": "E", "value": "v", "traceback": "t"},
    "variables": [{"name": "x", "type": "int", "shape": None, "length": None, "bytes": 28,
                   "preview": "1", "asleep": False}],
}  # fmt: skip
cell_names = st.sampled_from(
    ["mime", "main", "data", "chart", "files", "count", "error", "variables"]
)
cells = st.tuples(st.sampled_from(["result", "answer"]), st.dictionaries(cell_names, odd)).map(
    lambda lie: {lie[0]: {**(RESULT if lie[0] == "result" else ANSWER), **lie[1]}}
)
codes = st.sampled_from(
    ["not_found", "command_failed", "timed_out", "internal", "nonsense", "os.system", "box_lost"]
)
lies = st.tuples(
    st.lists(
        st.tuples(st.just("note"), bodies)
        | st.tuples(st.just("data"), st.text(max_size=30))
        | st.tuples(st.just("results"), cells)
        | st.tuples(st.just("garbage"), st.text(max_size=30)),
        max_size=3,
    ),
    st.tuples(st.just("end"), bodies)
    | st.tuples(st.just("fail"), st.tuples(codes, st.text(max_size=20))),
).map(lambda said: json.dumps([*said[0], said[1]]).encode())


async def perform_all(said: list[bytes]) -> None:
    engine = Engine(LiarBackend(said))
    try:
        await engine.perform(op.OpenSession())
        for operation in OPERATIONS:
            async with asyncio.timeout(120):
                try:
                    await engine.perform(operation)
                except HutchError:
                    pass
    finally:
        await engine.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(lies, min_size=1, max_size=8))
def test_every_operation_survives_a_guest_that_lies(said):
    asyncio.run(perform_all(said))


JOB = {
    "name": "p3", "argv": ["top"], "pid": 7, "tty": False, "started": 1.5, "input": True,
    "total": 0, "result": None,
}  # fmt: skip
job_names = st.sampled_from(sorted(JOB))
found = st.one_of(
    st.dictionaries(job_names, odd, max_size=2).map(lambda body: {"job": JOB | body}),
    st.dictionaries(st.sampled_from(["name", "user"]), odd).map(lambda body: {"shell": body}),
    st.dictionaries(st.sampled_from(["name", "cwd", "env"]), odd).map(lambda b: {"context": b}),
    wrong,
)
surveys = st.lists(found, max_size=4).map(
    lambda notes: json.dumps([*(["note", body] for body in notes), ["end", FULL]]).encode()
)


@asynccontextmanager
async def lied_to(said: list[bytes], kind: type[LiarBox] = LiarBox) -> AsyncIterator[Session]:
    box = kind(Liar(said))
    with tempfile.TemporaryDirectory() as folder:
        outputs = Outputs(Path(folder), 1 << 20, persistent=True)
        info = BoxInfo("liar", "liars", "host", "ns", Limits(), "/", "user", 0.0)
        link = await Link.open(await box.connect())
        session = Session(info, box, link, outputs, wire.SetIdle(None, 0, 0), Numbers())
        try:
            yield session
        finally:
            await session.close()
            outputs.close()


async def take_over(said: list[bytes]) -> None:
    async with lied_to(said) as session:
        asked = [
            session.adopt, session.list_ports, lambda: session.dial(80),
            lambda: session.untar(b"x"), lambda: _all(session.tar()),
            lambda: session.start_program(op.StartProgram("liar", ("true",))),
        ]  # fmt: skip
        for ask in asked:
            async with asyncio.timeout(120):
                try:
                    await ask()
                    for job in list(session._jobs.values()):
                        await job.wait()
                except HutchError:
                    pass


async def _all(stream: AsyncIterator[bytes]) -> None:
    async for _ in stream:
        pass


FAR_AWAY = [
    json.dumps([["note", {"job": JOB}], ["end", FULL]]).encode(),
    json.dumps([["note", {**FULL, "offset": 10**400}], ["end", FULL]]).encode(),
]


@settings(max_examples=100, deadline=None)
@example(FAR_AWAY)
@given(st.lists(surveys | lies, min_size=1, max_size=8))
def test_a_box_can_be_taken_over_from_a_guest_that_lies(said):
    asyncio.run(take_over(said))


def test_a_survey_that_makes_no_sense_is_refused():
    async def adopt(*notes: object) -> Session:
        said = json.dumps([*(["note", note] for note in notes), ["end", {}]]).encode()
        async with lied_to([said]) as session:
            await session.adopt()
            return session

    assert asyncio.run(adopt({"shell": {"name": "main", "user": None}})).shells == {"main": None}
    wrong: list[object] = [
        *({"job": JOB | each} for each in (
            {"name": "../p1"}, {"name": "p0"}, {"name": "p" + "9" * 10}, {"argv": []},
            {"argv": "x"}, {"pid": True}, {"started": 10**400}, {"total": -1}, {"tty": 1},
            {"result": {}}, {"result": []}, {"result": {"exit_code": 0, "seconds": -1.0}},
        )),
        {"shell": {"name": 3}}, {"shell": {"name": "x", "user": 3}}, {"shell": None},
        {"context": {"name": "x", "env": {"=": ""}}}, {"context": {"name": "x" * 300, "env": {}}},
    ]  # fmt: skip
    for note in wrong:
        with pytest.raises(GuestMisbehaved):
            asyncio.run(adopt(note))
    with pytest.raises(GuestMisbehaved):
        asyncio.run(adopt(*[{"shell": {"name": "main"}}] * 5000))


def test_a_description_of_a_file_that_makes_no_sense_is_refused():
    entry = {"path": "/x", "kind": "file", "size": 1, "mode": 0, "modified": 0, "uid": 0, "gid": 0}

    async def stat(**wrong: object) -> object:
        engine = Engine(LiarBackend([json.dumps([["end", {**entry, **wrong}]]).encode()]))
        await engine.perform(op.OpenSession(mounts=(Mount("/", "/x"),)))
        try:
            return await engine.perform(op.StatFile("liar", "x"))
        finally:
            await engine.close()

    assert asyncio.run(stat()).kind == "file"
    for wrong in ({"kind": "evil"}, {"modified": 10**400}, {"size": "1"}, {"size": True},
                  {"target": 3}, {"path": None}):  # fmt: skip
        with pytest.raises(GuestMisbehaved):
            asyncio.run(stat(**wrong))


class Unmeasured(LiarBox):
    """A box whose backend cannot count, so that the guest's word is taken."""

    def oom_kills(self) -> None:
        return None


def test_numbers_that_a_guest_tells_of_its_box_are_taken_or_refused_whole():
    async def stats(uses: object) -> Stats:
        async with lied_to([json.dumps([["end", {"programs": 0, "uses": uses}]])]) as session:
            return await session.stats()

    told = {"memory": 5, "pids": 2, "cpu_seconds": 0.5, "oom_kills": 1}
    assert asyncio.run(stats(told)) == Stats(5, 2, 0.5, 1)
    assert asyncio.run(stats({"pids": 2})) == Stats(None, 2, None, None)
    assert asyncio.run(stats({})) == Stats(None, None, None, None)
    for wrong in ("5", -1, True, [], 10**400, float("nan"), float("inf")):
        for name in told:
            with pytest.raises(GuestMisbehaved):
                asyncio.run(stats(told | {name: wrong}))
    with pytest.raises(GuestMisbehaved):
        asyncio.run(stats([]))


def test_a_guest_that_counts_tells_who_lacked_memory_and_one_that_is_counted_does_not():
    async def run(kind: type[LiarBox], **said: object) -> Result:
        answer = {"exit_code": 0, "timed_out": False, **said}
        async with lied_to([json.dumps([["end", answer]])], kind) as session:
            ran = await session.run_program(op.RunProgram("x", ["x"]))
            (result,) = [item async for item in ran if isinstance(item, Result)]
            return result

    assert asyncio.run(run(Unmeasured, oom_kills=2)).oom
    assert not asyncio.run(run(Unmeasured, oom_kills=0)).oom
    assert not asyncio.run(run(Unmeasured)).oom
    assert not asyncio.run(run(LiarBox, oom_kills=2)).oom
    for wrong in (True, "1", None, 1.0):
        with pytest.raises(GuestMisbehaved):
            asyncio.run(run(Unmeasured, oom_kills=wrong))


def run_code(*said: tuple[str, object]) -> object:
    """What `run_code` gives if its guest says this."""

    async def perform() -> object:
        engine = Engine(
            LiarBackend([json.dumps([["end", {}]]).encode(), json.dumps(said).encode()])
        )
        await engine.perform(op.OpenSession())
        try:
            return await engine.perform(op.RunCode("liar", "1"))
        finally:
            await engine.close()

    return asyncio.run(perform())


def test_a_result_that_makes_no_sense_is_refused():
    end = ("end", FULL)
    good = run_code(("results", {"result": RESULT}), ("results", {"answer": ANSWER}), end)
    assert good.text == "2" and good.error.name == "E"
    deep: object = []
    for _ in range(100):
        deep = [deep]
    for wrong in ({"mime": None}, {"mime": {"text/plain": 3}}, {"main": 1}, {"data": []},
                  {"data": {"rows": deep}}, {"chart": "x"}, {"files": {"text/html": None}},
                  {"mime": {f"x/{n}": "" for n in range(100)}}):  # fmt: skip
        with pytest.raises(GuestMisbehaved):
            run_code(("results", {"result": RESULT | wrong}), end)
    for answer in ({"count": "1"}, {"error": "E"}, {"error": {"name": 1}}, {"count": -1}):
        with pytest.raises(GuestMisbehaved):
            run_code(("results", {"answer": ANSWER | answer}), end)
    for fate in ({"died": 3}, {"timed_out": None}, {"restarted": "yes"}):
        with pytest.raises(GuestMisbehaved):
            run_code(("end", FULL | fate))
    with pytest.raises(GuestMisbehaved):
        run_code(("garbage", "\x7f\x7f\x7f\x7f"), end)


def test_half_a_character_from_a_guest_can_be_written_anywhere():
    result = RESULT | {"mime": {"text/plain": "a\ud800b", "x/\ud800": "\udfff"}}
    execution = run_code(("results", {"result": result}), ("end", FULL))
    assert execution.text.encode() == b"a?b"
    assert [*execution.results[0].extra.items()] == [("x/?", "?")]
