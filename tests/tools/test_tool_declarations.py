"""The tools as models and frameworks see them; and the one that runs Python."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from pathlib import Path

import pytest

from hutch import AsyncSandbox, InvalidRequest, Sandbox
from hutch.images.oci import archive
from hutch.images.oci.reference import parse
from hutch.images.oci.store import bring
from hutch.tools import PROMPT, TOOLS, AsyncToolbox, Toolbox, chosen
from layers_of_tests import busybox, tar_of

# As roomkit declares them: parameters and their types; those with a star are required.
ROOMKIT = {
    "read": "path*:string offset:integer limit:integer",
    "write": "path*:string content*:string",
    "edit": "path*:string old_string*:string new_string*:string",
    "ls": "path:string",
    "grep": "pattern*:string path:string type:string",
    "find": "path:string name:string type:string",
    "git": "args*:string",
    "diff": "file_a*:string file_b*:string",
    "delete": "path*:string",
    "bash": "command*:string timeout:integer",
}


def test_the_tools_that_roomkit_has_come_first_and_take_what_its_do() -> None:
    assert list(TOOLS)[:10] == list(ROOMKIT)
    for name, parameters in ROOMKIT.items():
        schema = TOOLS[name].parameters
        words = [word.split(":") for word in parameters.split()]
        assert schema.get("required", []) == [w[:-1] for w, _ in words if w.endswith("*")]
        for word, kind in words:
            assert schema["properties"][word.rstrip("*")]["type"] == kind, (name, word)


def test_every_tool_and_every_parameter_says_what_it_is() -> None:
    for tool in TOOLS.values():
        assert 20 < len(tool.description) < 900
        for name, schema in tool.parameters["properties"].items():
            assert len(schema["description"]) > 5, (tool.name, name)


def test_the_same_tools_serve_those_who_await_and_those_who_do_not(shared_box: Sandbox) -> None:
    async def awaited() -> tuple[str, str]:
        async with await AsyncSandbox.create() as box:
            tools = AsyncToolbox(box, only=["write", "read"])
            await tools.write(path="f", content="hi\n")
            refused = await tools.call("bash", {"command": "true"})
            return (await box.tools.read(path="f")).text, refused.text

    assert asyncio.run(awaited()) == ("1\thi", "there is no tool 'bash', only write, read")
    tools = Toolbox(shared_box)
    tools.write(path="f", content="hi\n")
    assert tools.read(path="f").text == "1\thi"


def test_every_path_says_where_it_starts_and_what_runs_something_that_there_is_no_network() -> None:
    for tool in TOOLS.values():
        for name, schema in tool.parameters["properties"].items():
            if name in ("path", "file_a", "file_b"):
                assert "relative to the workspace, wherever the shell is" in schema["description"]
    assert "relative to the workspace" in TOOLS["apply_patch"].description
    for text in (*(TOOLS[name].description for name in ("bash", "git", "python")), PROMPT):
        assert "no network" in " ".join(text.split())
    assert len(PROMPT.split()) <= 90


# --- python ---


def search(text: str, k: int = 1, key: str = "secret") -> list[str]:
    """Look for a text.

    Anywhere.
    """
    return [f"{text} {n}" for n in range(k)]


def test_code_calls_functions_of_those_who_gave_them_and_the_model_is_told(
    shared_box: Sandbox,
) -> None:
    tools = Toolbox(shared_box, functions={"search": search})
    said = tools.tools["python"].description
    assert said.endswith("(text: str, k: int = 1, key: str = ...) -> list[str]: Look for a text.")
    assert "search" not in TOOLS["python"].description
    assert tools.python("search('a', k=2)").text == "['a 0', 'a 1']"
    assert "NameError" in Toolbox(shared_box).python("search('a')").text
    with pytest.raises(InvalidRequest, match="not an identifier: 'a b'"):
        Toolbox(shared_box, functions={"a b": search})

    async def awaited() -> str:
        async def later(value: int) -> int:
            await asyncio.sleep(0)
            return value + 1

        async with await AsyncSandbox.create() as box:
            return (await AsyncToolbox(box, functions={"later": later}).python("later(1)")).text

    assert asyncio.run(awaited()) == "2"


def test_whoever_has_a_tool_that_hides_something_can_recall_it(shared_box: Sandbox) -> None:
    for name in ("bash", "git", "python"):
        assert list(Toolbox(shared_box, only=[name]).tools) == [name, "recall"]
    assert list(chosen(iter(["recall", "bash"]))) == ["recall", "bash"]
    assert list(chosen(["read", "diff"])) == ["read", "diff"]
    with pytest.raises(InvalidRequest, match="there is no tool 'nmap', only read"):
        chosen(["nmap"])


def test_who_reads_a_folder_is_told_to_list_it(shared_box: Sandbox) -> None:
    answer = Toolbox(shared_box).read(path="/etc")
    assert answer.text == "/etc is a folder: list it with ls"
    assert answer.details == {"error": "is_folder"}


def test_a_toolbox_knows_its_box(shared_box: Sandbox) -> None:
    assert Toolbox(shared_box).box is shared_box


def test_tools_are_loaded_by_whoever_asks_for_them_and_nobody_else() -> None:
    code = (
        "import hutch, sys; hutch.Sandbox, hutch.AsyncSandbox; print('hutch.tools' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_long_diff_is_shown_in_pages(shared_box: Sandbox) -> None:
    tools = Toolbox(shared_box)
    long = "".join(f"{n:08}\n" for n in range(20_000))
    shared_box.files.write_files({"d/a": "", "d/b": long, "d/c": "y" * 150_000})
    seen, offset = [], 0
    while True:
        *lines, last = tools.diff(file_a="d/a", file_b="d/b", offset=offset).text.split("\n")
        seen += lines
        if not last.startswith("["):
            break
        offset = int(last.rpartition("=")[2].rstrip("]"))
    assert [*seen, last][3:] == [f"+{n:08}" for n in range(20_000)]
    one_line = tools.diff(file_a="d/a", file_b="d/c", offset=3).text
    assert "y… [50,001 more characters in this line: see it with bash" in one_line
    assert "offset is at most" in tools.diff(file_a="d/a", file_b="d/b", offset=99_999).text


def test_python_shows_what_is_printed_what_comes_out_and_what_stays(shared_box: Sandbox) -> None:
    tools = Toolbox(shared_box)
    assert tools.python(code="x = 6\nprint('hi')\nx * 7").text == "hi\n42"
    assert tools.python(code="x").text == "6"
    assert tools.python(code="pass").text == "(no output)"
    raised = tools.python(code="print(1)\n1/0")
    assert raised.exit_code == 1 and not raised.failed
    assert raised.text.startswith("1\nTraceback") and "ZeroDivisionError" in raised.text
    for timeout in (2, 16, 128):  # a busy machine needs more to get to the first line
        late = tools.python(code="print('so far', flush=True)\nwhile True: pass", timeout=timeout)
        if "so far" in late.text:
            break
    assert late.exit_code == 124 and late.text.startswith("so far")
    assert f"interrupted after {timeout} seconds" in late.text
    assert tools.python(code="x").text == "6"
    long = tools.python(code="for n in range(20_000): print(n)")
    assert len(long.text) < 31_000 and f'hidden: recall("{long.details["kept"]}")' in long.text
    assert tools.recall(id=long.details["kept"], offset=9_999, limit=1).text.startswith("9999")
    value = tools.python(code="'x' * 100_000 + 'end'")
    assert "characters hidden: print(_), then recall what is hidden of that]" in value.text
    printed = tools.python(code="print(_)").details["kept"]
    assert "xxend" in tools.recall(id=printed, containing="xend").text


PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


def test_a_figure_is_shown_as_an_image(shared_box: Sandbox) -> None:
    code = f"""
class Figure:
    def _repr_png_(self):
        import base64
        return base64.b64decode({PIXEL!r})
Figure()"""
    answer = Toolbox(shared_box).python(code=code + "; [display(Figure()) for _ in range(9)]; None")
    assert len(answer.pictures) == 8 and "[figures not shown: 1. Save them" in answer.text
    (picture,) = Toolbox(shared_box).python(code=code).pictures
    assert (picture.mime, picture.data) == ("image/png", base64.b64decode(PIXEL))


@pytest.mark.parametrize("forged", ["'<script>'", "'AAAA'", "'iVBORw0KGgo='", "'é' * 100"])
def test_a_figure_that_is_none_is_told_of_and_what_was_printed_stays(
    shared_box: Sandbox, forged: str
) -> None:
    code = f"print('kept'); display({{'image/png': {forged}}}, raw=True)"
    answer = Toolbox(shared_box).python(code=code)
    assert answer.text.startswith("kept\n[not a valid picture") and not answer.pictures


def test_a_kernel_that_died_is_told_of(shared_box: Sandbox) -> None:
    tools = Toolbox(shared_box)
    assert "the session died" in tools.python(code="import os; os._exit(3)").text
    assert "variables are gone" in tools.python(code="1").text


# --- an image with nothing in it ---


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A box of an image that has busybox and no more."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("data")
        patch.setenv("HUTCH_DATA_DIR", str(folder))
        root = Path(folder, "root.tar")
        root.write_bytes(tar_of(*busybox()))
        with archive.open_archive(root, parse("bare")) as source:
            bring(source, parse("bare"), lambda step: None)
        with Sandbox.create(image="bare") as box:
            yield box


@pytest.mark.namespaces("images are kept here, and not in an engine")
def test_the_tools_need_nothing_of_an_image(bare: Sandbox) -> None:
    def works(tool: str, **arguments: object) -> str:
        answer = bare.tools.call(tool, arguments)
        assert not answer.failed, answer.text
        return answer.text

    works("write", path="a b/f.py", content="one\ntwo\n")
    works("write", path=".gitignore", content="*.log\n")
    works("write", path="x.log", content="two\n")
    assert works("read", path="a b/f.py") == "1\tone\n2\ttwo"
    works("edit", path="a b/f.py", old_string="one", new_string="1")
    assert works("ls") == "a b/\n.gitignore  6\nx.log  4"
    assert works("grep", pattern="two") == "a b/f.py\n2:two"
    assert works("find", name="*.py") == works("glob", pattern="**/*.py") == "a b/f.py"
    assert works("diff", file_a="x.log", file_b="a b/f.py").endswith("@@ -1 +1,2 @@\n+1\n two")
    works("apply_patch", patch="*** Begin Patch\n*** Update File: x.log\n-two\n+2\n*** End Patch")
    assert works("bash", command="cat x.log").startswith("2")
    works("delete", path="a b", recursive=True)
    refused = bare.tools.call("python", {"code": "1"})
    assert refused.failed and "no Python in this box" in refused.text
