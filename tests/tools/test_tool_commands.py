"""Tool calls as commands. What is built is also run, in a real box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hutch import InvalidRequest, Result, Sandbox
from hutch.tools.commands import TOOL, CommandBuilder, Condensed, Native, tool_of


class WithLint(Native):
    schemas: ClassVar = {"lint": {"type": "object", "properties": {"path": {"type": "string"}}}}

    def build_lint(self, args: Mapping[str, Any]) -> list[str]:
        """Check a file."""
        return ["lint", args["path"]]


def run(box: Sandbox, name: str, /, **arguments: object) -> Result:
    return box.commands.run(Native().build(name, arguments), cwd="/workspace")


@pytest.fixture(scope="module")
def box(shared_box: Sandbox) -> Sandbox:
    lines = "".join(f"line {n}\n" for n in range(1, 21))
    names = ("twenty", "with space", "-n", "a=b", "it's $(touch /tmp/owned)")
    shared_box.files.write_files(dict.fromkeys(names, lines))
    return shared_box


@pytest.mark.parametrize("path", ["twenty", "with space", "-n", "a=b", "it's $(touch /tmp/owned)"])
def test_a_file_of_any_name_is_read_whole_and_in_part(box: Sandbox, path: str) -> None:
    assert run(box, "read", path=path).stdout.count("\n") == 20
    part = run(box, "read", path=path, offset=10, limit=3).stdout
    assert part == "    11\tline 11\n    12\tline 12\n    13\tline 13\n"
    assert run(box, "read", path=path, offset=18).stdout == "    19\tline 19\n    20\tline 20\n"
    assert not box.files.exists("/tmp/owned")


def test_a_file_that_is_not_there_fails_also_when_a_part_is_asked_for(box: Sandbox) -> None:
    assert run(box, "read", path="nothing").exit_code != 0
    assert run(box, "read", path="nothing", offset=1, limit=2).exit_code != 0


def test_a_type_is_not_ignored_and_patterns_are_extended(box: Sandbox) -> None:
    box.files.write_files({"t/a.py": "spam\n", "t/a.js": "spam\neggs\n", "t/b c.py": "ham\n"})
    found = run(box, "grep", pattern="spam|ham", path="t", type="py").stdout.splitlines()
    assert sorted(found) == ["./t/a.py:1:spam", "./t/b c.py:1:ham"]
    assert run(box, "grep", pattern="-e", path="t").exit_code == 1
    assert run(box, "find", path="t", name="* *", type="f").stdout == "./t/b c.py\n"


def test_listing_and_comparing_take_names_with_spaces(box: Sandbox) -> None:
    assert "with space" in run(box, "ls").stdout
    assert run(box, "ls", path="with space").exit_code == 0
    same = run(box, "diff", file_a="with space", file_b="-n")
    assert (same.exit_code, same.stdout) == (0, "")


def test_the_exit_code_of_a_command_is_its_own(box: Sandbox) -> None:
    assert run(box, "bash", command="echo out; echo err >&2; exit 7").exit_code == 7
    assert run(box, "git", args="log -1 --format='%h %s'").exit_code == 128


def test_native_commands_are_those_that_anybody_would_type() -> None:
    build = Native().build
    assert build("read", {"path": "/a b"}) == ["cat", "-n", "/a b"]
    assert build("ls", {}) == ["ls", "-la", "."]
    assert build("find", {"path": "/src", "name": "*.py"}) == ["find", "/src", "-name", "*.py"]
    assert build("git", {"args": "commit -m 'two words'"}) == ["git", "commit", "-m", "two words"]
    assert build("diff", {"file_a": "/a", "file_b": "/b"}) == ["diff", "-u", "/a", "/b"]
    assert build("bash", {"command": "ls | wc"}) == ["sh", "-c", "ls | wc"]


def test_what_no_builder_builds_is_a_call_of_our_own_tool_whatever_its_size() -> None:
    large = {"path": "a b", "content": "x" * 1_000_000}
    for builder in (Native(), Condensed()):
        assert tool_of(builder.build("write", large)) == ("write", large)
    assert Condensed().build("bash", {"command": "ls"})[0] == TOOL
    assert tool_of(["sh", "-c", "ls"]) is None


def test_a_subclass_changes_tools_and_adds_tools() -> None:
    builder = WithLint()
    assert builder.build("lint", {"path": "a b.py"}) == ["lint", "a b.py"]
    assert "lint" in builder.names() and "read" in builder.names()
    assert builder.definition("lint") == {
        "name": "lint", "description": "Check a file.", "parameters": WithLint.schemas["lint"],
    }  # fmt: skip


def test_what_cannot_be_built_says_why() -> None:
    for builder in (CommandBuilder(), Native(), Condensed()):
        with pytest.raises(InvalidRequest, match=r"there is no tool 'nmap', only .*bash"):
            builder.build("nmap", {})
    with pytest.raises(InvalidRequest, match="lint needs 'path'"):
        WithLint().build("lint", {"path": None})
    with pytest.raises(InvalidRequest, match="close the quote"):
        Native().build("git", {"args": "commit -m 'oops"})
    with pytest.raises(InvalidRequest, match="'offset' is a number"):
        Native().build("read", {"path": "a", "offset": "ten"})


def test_a_model_is_not_told_of_parameters_that_a_plain_command_does_not_heed() -> None:
    told = Native().definition("grep")["parameters"]
    assert list(told["properties"]) == ["pattern", "path", "type"]
    with pytest.raises(InvalidRequest, match="has no parameter 'glob'"):
        Native().build("grep", {"pattern": "x", "glob": "*.py"})
    assert "glob" in Condensed().definition("grep")["parameters"]["properties"]
