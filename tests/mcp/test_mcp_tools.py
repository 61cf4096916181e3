"""What a client of the protocol can do in a box, whatever the transport."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from mcp import Client, MCPError, types
from must_work import need
from talk_of_tests import Loop, Talk, facts_of, text_of

from hutch import BackendUnavailable, errors, local
from hutch import operations as op
from hutch.client import transport
from hutch.mcp import catalog
from hutch.mcp.boxes import McpBoxes
from hutch.mcp.clients import McpClient, ToolOptions
from hutch.mcp.server import make_server
from hutch.tools import TOOLS, Answer, Picture

GONE = "is gone"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5Erk"
    "Jggg=="
)


class Desk(Talk):
    """A client in this process, and what the server behind it has."""

    boxes: McpBoxes
    caller: McpClient


@pytest.fixture(scope="module")
def desk(loop: Loop) -> Iterator[Desk]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Client]:
        Desk.caller = McpClient(transport.embedded_async)
        Desk.boxes = McpBoxes()
        try:
            async with Client(make_server(Desk.boxes, lambda context: Desk.caller)) as client:
                yield client
        finally:
            await Desk.boxes.close_made()
            await (await local.ENGINES.get()).close()

    with Desk(loop, opened) as talk:
        first = talk.call("bash", command="echo first")
        if first.is_error and facts_of(first)["error"] == BackendUnavailable.code:
            need("namespaces", text_of(first))
        yield talk


@pytest.fixture
def wishing(desk: Desk) -> Iterator[Any]:
    before = desk.caller

    def wish(**wishes: Any) -> None:
        Desk.caller = replace(before, options=ToolOptions(**wishes))

    yield wish
    Desk.caller = before
    desk.do(desk.client.list_tools())  # the client remembers what each promises


def test_every_tool_is_offered_and_takes_a_box(desk: Desk) -> None:
    tools = {tool.name: tool for tool in desk.do(desk.client.list_tools()).tools}
    assert set(tools) == {*TOOLS, "create_box", "list_boxes", "close_box"}
    for name in TOOLS:
        assert "box" in tools[name].input_schema["properties"]
        assert "box" not in tools[name].input_schema.get("required", [])
        assert tools[name].annotations.read_only_hint is TOOLS[name].only_reads
        assert tools[name].annotations.open_world_hint is False
    assert tools["bash"].annotations.destructive_hint is True


def test_the_box_is_named_by_the_first_call_and_no_other(desk: Desk) -> None:
    made = desk.call("create_box")
    assert facts_of(made)["box"] in text_of(made)
    desk.call("close_box", box=facts_of(made)["box"])
    again = desk.call("bash", command="echo again")
    assert text_of(again).strip() == "again" and facts_of(again)["box"]


def test_shell_and_files_are_there_in_the_next_call(desk: Desk) -> None:
    desk.bash("cd /tmp && export COLOUR=teal && echo 1 > kept")
    assert desk.bash("echo $COLOUR $PWD; cat kept").split() == ["teal", "/tmp", "1"]
    desk.bash("cd /workspace")


def test_a_command_that_fails_is_a_result(desk: Desk) -> None:
    result = desk.call("bash", command="exit 3")
    assert not result.is_error and facts_of(result)["exit_code"] == 3
    desk.bash("true")


def test_a_silent_command_still_says_something(desk: Desk) -> None:
    assert desk.bash("true").strip()


def test_wrong_arguments_are_explained_to_the_model(desk: Desk) -> None:
    result = desk.call("bash", comand="ls")
    assert result.is_error and "command" in text_of(result)
    assert desk.do(desk.client.call_tool("bash", {"command": "ls", "box": 7})).is_error


def test_a_tool_that_is_not_there_is_an_error_of_the_protocol(desk: Desk) -> None:
    with pytest.raises(MCPError, match="there is no tool 'fly'"):
        desk.call("fly")


def test_boxes_can_be_made_listed_used_and_closed(desk: Desk) -> None:
    other = facts_of(desk.call("create_box"))["box"]
    desk.bash("echo mine > /tmp/whose")
    desk.bash("echo other > /tmp/whose", box=other)
    assert desk.bash("cat /tmp/whose").strip() == "mine"
    assert desk.bash("cat /tmp/whose", box=other).strip() == "other"
    listed = text_of(desk.call("list_boxes"))
    assert other in listed and "(your own)" in listed
    desk.call("close_box", box=other)
    late = desk.call("bash", command="true", box=other)
    assert late.is_error and text_of(late).count(other) == 1
    assert other not in text_of(desk.call("list_boxes"))
    again = desk.call("close_box", box=other)
    assert again.is_error and "is closed" in text_of(again)


def test_a_box_that_never_was_is_named_once_and_no_tool_with_it(desk: Desk) -> None:
    answer = text_of(desk.call("bash", command="true", box="nope"))
    assert answer.startswith("There is no box nope") and answer.count("nope") == 1
    assert not any(f"{name}_box" in answer for name in ("create", "list", "close"))


def test_what_one_box_hid_is_not_recalled_from_another(desk: Desk) -> None:
    other = facts_of(desk.call("create_box"))["box"]
    desk.bash("seq 5000 9000")
    kept = facts_of(desk.call("bash", command="seq 4000", box=other))["kept"]
    wrong = desk.call("recall", id=kept)
    assert wrong.is_error and "if it was in another, name that one" in text_of(wrong)
    assert text_of(desk.call("recall", id=kept, limit=1, box=other)).startswith("1\n")
    desk.call("close_box", box=other)


def test_a_dead_box_is_told_apart_and_the_next_call_has_a_new_one(desk: Desk) -> None:
    own = desk.boxes.own(desk.caller)
    assert own
    before = own.context.box.id
    desk.do(own.context.box.close())
    lost = desk.call("bash", command="echo anybody there")
    assert lost.is_error and facts_of(lost)["error"] == errors.BoxLost.code
    assert before in text_of(lost) and GONE in text_of(lost)
    after = desk.call("bash", command="echo hello")
    assert "new box" in text_of(after) and facts_of(after)["box"] != before


def test_a_box_that_dies_under_a_command_says_so(desk: Desk) -> None:
    own = desk.boxes.own(desk.caller)
    assert own

    async def work() -> types.CallToolResult:
        heard = asyncio.Event()

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            heard.set()

        call = asyncio.ensure_future(
            desk.client.call_tool("bash", {"command": "sleep 60"}, progress_callback=hear)
        )
        await heard.wait()
        await own.context.box.close()
        return await call

    result = desk.do(work())
    assert result.is_error and GONE in text_of(result)
    assert "new box" in desk.bash("true")


def test_a_long_command_tells_how_it_gets_on(desk: Desk) -> None:
    async def work() -> tuple[list[str], types.CallToolResult]:
        said: list[str] = []
        heard = asyncio.Event()

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            said.append(message or "")
            if message == "step 2":
                heard.set()

        wait = "echo step 1; printf '\\033[1mstep 2\\033[0m\\n'; "
        wait += "until [ -e /tmp/go ]; do sleep 0.05; done"
        call = asyncio.ensure_future(
            desk.client.call_tool("bash", {"command": wait}, progress_callback=hear)
        )
        await heard.wait()
        own = desk.boxes.own(desk.caller)
        assert own
        await own.context.box.files.write("/tmp/go", "")
        return said, await call

    said, result = desk.do(work())
    assert "step 2" in said and not result.is_error


def test_nothing_is_told_of_a_call_that_was_answered(desk: Desk) -> None:
    async def work() -> bool:
        heard, ended = asyncio.Event(), asyncio.Event()

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            heard.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)  # it takes its time to end
                ended.set()

        wait = "until [ -e /tmp/went ]; do sleep 0.05; done"
        call = asyncio.ensure_future(
            desk.client.call_tool("bash", {"command": wait}, progress_callback=hear)
        )
        await heard.wait()
        own = desk.boxes.own(desk.caller)
        assert own
        await own.context.box.files.write("/tmp/went", "")
        await call
        return ended.is_set()

    assert desk.do(work())


def test_boxes_of_callers_at_a_server_stay_when_it_ends(desk: Desk) -> None:
    async def work() -> bool:
        boxes = McpBoxes()
        at_server = replace(desk.caller, name="key", owner="ann")
        theirs = await boxes.create(at_server, at_server.order)
        ours = await boxes.create(desk.caller, desk.caller.order)
        await boxes.close_made()
        lists = op.ListSessions("live", limit=100)
        live = [info.id for info in await desk.caller.transport.perform(lists)]
        await theirs.context.box.close()
        return theirs.context.box.id in live and ours.context.box.id not in live

    assert desk.do(work())


def test_cancelling_a_call_kills_all_that_it_started(desk: Desk) -> None:
    counting = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null"
    counting += " | grep -c '^sleep 4321'"

    async def work() -> int:
        own = desk.boxes.own(desk.caller)
        assert own

        async def sleepers(wanted: int) -> int:
            count = -1
            for _ in range(400):
                count = int((await own.context.box.commands.run(["sh", "-c", counting])).stdout)
                if count == wanted:
                    break
                await asyncio.sleep(0.05)
            return count

        command = "sleep 4321 & setsid sleep 4321 & sleep 4321"
        call = asyncio.ensure_future(desk.client.call_tool("bash", {"command": command}))
        assert await sleepers(3) == 3
        call.cancel()
        await asyncio.wait({call})
        return await sleepers(0)

    assert desk.do(work()) == 0
    assert desk.bash("echo still here").strip() == "still here"


def test_the_operator_bounds_how_long_a_command_runs(desk: Desk, wishing: Any) -> None:
    wishing(timeout=1)
    shown = {tool.name: tool.input_schema for tool in desk.do(desk.client.list_tools()).tools}
    assert shown["bash"]["properties"]["timeout"]["default"] == 1
    result = desk.call("bash", command="sleep 60", timeout=50)
    assert facts_of(result)["timed_out"] and facts_of(result)["exit_code"] == 124


def test_who_names_tools_gets_no_others(desk: Desk, wishing: Any) -> None:
    wishing(only=("bash",))
    names = [tool.name for tool in desk.do(desk.client.list_tools()).tools]
    assert names == ["bash", "recall"]  # who is shown less can see the rest
    with pytest.raises(MCPError):
        desk.call("create_box")
    wishing(only=("list_boxes", "read"))
    names = [tool.name for tool in desk.do(desk.client.list_tools()).tools]
    assert names == ["list_boxes", "read"] and not desk.call("list_boxes").is_error
    with pytest.raises(errors.InvalidRequest, match="fly"):
        ToolOptions(only=("fly",))
    assert ToolOptions.from_query({"only": ""}).tools() == {}


def test_results_are_json_for_whom_wants_it(desk: Desk, wishing: Any) -> None:
    assert desk.call("bash", command="echo plain").structured_content is None
    wishing(structured=True)
    found = desk.call("bash", command="echo both; exit 4").structured_content
    assert "both" in found["text"] and found["exit_code"] == 4 and found["box"]
    schema = desk.do(desk.client.list_tools()).tools[0].output_schema
    assert schema and set(schema["required"]) <= set(found)
    desk.bash("true")


def test_pictures_are_pictures_and_bytes_that_are_no_text_are_replaced() -> None:
    answer = Answer(
        "caf\udce9", pictures=(Picture(b"\x89PNG", "image/png"),), details={"x": "\udce9"}
    )
    result = catalog.result(answer, ToolOptions(structured=True), "1-2")
    text, picture = result.content
    assert isinstance(text, types.TextContent) and text.text == "caf?"
    assert isinstance(picture, types.ImageContent) and picture.mime_type == "image/png"
    assert base64.b64decode(picture.data) == b"\x89PNG"
    assert result.model_dump_json()


def test_a_picture_in_the_box_is_shown_as_one(desk: Desk) -> None:
    desk.bash(f"echo {PIXEL} | base64 -d > /tmp/pixel.png")
    pictures = [
        part for part in desk.call("read", path="/tmp/pixel.png").content
        if isinstance(part, types.ImageContent)
    ]  # fmt: skip
    assert [picture.mime_type for picture in pictures] == ["image/png"]


# --- files ------------------------------------------------------------------------------


def test_files_of_a_box_are_resources(desk: Desk) -> None:
    desk.bash(
        "cd /workspace; rm -rf *; echo text > 'a b.txt'; head -c 300 /dev/urandom > noise.bin"
    )
    desk.bash("mkdir sub; echo deep > sub/c; printf x > \"$(printf 'caf\\351')\"")
    found = {each.name: each for each in desk.do(desk.client.list_resources()).resources}
    text = desk.do(desk.client.read_resource(found["a b.txt"].uri)).contents[0]
    assert isinstance(text, types.TextResourceContents) and text.text == "text\n"
    assert text.mime_type == "text/plain" and found["a b.txt"].size == 5
    blob = desk.do(desk.client.read_resource(found["noise.bin"].uri)).contents[0]
    assert isinstance(blob, types.BlobResourceContents) and len(base64.b64decode(blob.blob)) == 300
    odd = desk.do(desk.client.read_resource(found["caf?"].uri)).contents[0]
    assert isinstance(odd, types.TextResourceContents) and odd.text == "x"
    folder = desk.do(desk.client.read_resource(found["sub"].uri)).contents[0]
    assert isinstance(folder, types.TextResourceContents) and folder.text.endswith(
        "/workspace/sub/c"
    )
    template = desk.do(desk.client.list_resource_templates()).resource_templates[0]
    assert template.uri_template == "box://{box}/{+path}"


@pytest.mark.parametrize(
    "path", ["workspace/../../../../etc/hostname", "%2e%2e/%2e%2e/proc/1/../self/cwd/none", "none"]
)
def test_a_path_leads_nowhere_but_into_the_box(desk: Desk, path: str) -> None:
    own = desk.boxes.own(desk.caller)
    assert own
    desk.bash("echo of the box > /tmp/etc; cat /etc/hostname 2>/dev/null; true")
    inside = desk.bash("cat /etc/hostname 2>/dev/null || echo none").strip()
    try:
        read = desk.do(desk.client.read_resource(f"box://{own.context.box.id}/{path}")).contents[0]
    except MCPError as exc:
        assert exc.code == types.INVALID_PARAMS
    else:
        assert isinstance(read, types.TextResourceContents) and read.text.strip() == inside


@pytest.mark.parametrize(
    "uri", ["box://00000000-0000/x", "file:///etc/passwd", "box:///x", "box://"]
)
def test_what_is_no_file_of_a_box_is_refused(desk: Desk, uri: str) -> None:
    with pytest.raises(MCPError):
        desk.do(desk.client.read_resource(uri))


def test_a_uri_can_be_completed(desk: Desk) -> None:
    own = desk.boxes.own(desk.caller)
    assert own
    id = own.context.box.id
    desk.bash("mkdir -p /workspace/deep; touch /workspace/deeper")
    ref = types.ResourceTemplateReference(uri="box://{box}/{+path}")
    boxes = desk.do(desk.client.complete(ref, {"name": "box", "value": id[:3]}))
    assert id in boxes.completion.values
    path = {"name": "path", "value": "workspace/dee"}
    found = desk.do(desk.client.complete(ref, path, {"box": id})).completion.values
    assert {"workspace/deep/", "workspace/deeper"} <= set(found)


# --- prompts ----------------------------------------------------------------------------


def test_prompts_are_filled_in(desk: Desk) -> None:
    names = {prompt.name for prompt in desk.do(desk.client.list_prompts()).prompts}
    assert {"solve", "fix_tests", "analyse"} <= names
    made = desk.do(desk.client.get_prompt("analyse", {"file": "/workspace/{x}.csv"}))
    content = made.messages[0].content
    assert isinstance(content, types.TextContent) and "/workspace/{x}.csv" in content.text
    with pytest.raises(MCPError, match="task"):
        desk.do(desk.client.get_prompt("solve", {}))
    with pytest.raises(MCPError, match="only solve"):
        desk.do(desk.client.get_prompt("sing", {}))
