"""read, write, edit and delete, as a model calls them."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from hutch import BoxLost, Sandbox
from hutch.tools import Answer, Toolbox


@pytest.fixture
def tools(shared_box: Sandbox) -> Toolbox:
    """A conversation of its own in the box of all, which is empty."""
    shared_box.shell.run("cd /workspace; find . -mindepth 1 -delete")
    return Toolbox(shared_box)


def works(tools: Toolbox, tool: str, **arguments: Any) -> str:
    answer = tools.call(tool, arguments)
    assert not answer.failed and answer.exit_code == 0, answer.text
    return answer.text


def fails(tools: Toolbox, tool: str, **arguments: Any) -> str:
    answer = tools.call(tool, arguments)
    assert answer.failed and answer.exit_code == 1, answer.text
    return answer.text


# --- read ---


def test_lines_are_numbered_and_the_rest_can_be_asked_for(tools, shared_box):
    shared_box.files.write("f", "".join(f"line {n}\n" for n in range(10)))
    first = works(tools, "read", path="f", limit=3)
    assert first == "1\tline 0\n2\tline 1\n3\tline 2\n[7 more lines; for more: offset=3]"
    assert works(tools, "read", path="f", offset=8) == "9\tline 8\n10\tline 9"
    assert "has 10 lines: offset is at most 9" in fails(tools, "read", path="f", offset=10)
    assert "offset is 0 or more" in fails(tools, "read", path="f", offset=-1)


def test_a_last_line_without_an_end_is_a_line(tools, shared_box):
    shared_box.files.write("f", b"a\r\nb")
    assert works(tools, "read", path="f") == "1\ta\n2\tb"
    assert works(tools, "read", path="f", offset=1) == "2\tb"
    shared_box.files.write("empty", b"")
    assert works(tools, "read", path="empty") == "(the file is empty)"


def test_of_a_long_line_a_part_is_shown(tools, shared_box):
    shared_box.files.write("f", "é" * 500_000 + "\nend\n")
    long, end = works(tools, "read", path="f").split("\n")
    how = "sed -n 1p FILE | cut -c4001-6000"
    assert long == f"1\t{'é' * 2000}… [996,000 more bytes in this line; with bash: {how}]"
    assert end == "2\tend"
    assert tools.bash(how.replace("FILE", "f")).text == "é" * 1000 + "\n"


def test_of_very_much_text_a_part_is_shown(tools, shared_box):
    shared_box.files.write("f", ("x" * 1000 + "\n") * 500)
    text = works(tools, "read", path="f")
    assert len(text) < 110_000 and "; for more: offset=" in text
    offset = int(text.rsplit("=", 1)[1].rstrip("]"))
    assert works(tools, "read", path="f", offset=offset).startswith(f"{offset + 1}\txxx")


def test_a_huge_file_is_read_in_parts(tools, shared_box):
    # Of a gigabyte, all but the end costs no disk; what is not looked at may be zeros.
    shared_box.shell.run("yes 0123456 | head -c 40000000 > f; truncate -s 1G f")
    text = works(tools, "read", path="f", limit=2)
    assert text == (
        "1\t0123456\n2\t0123456\n[the file of 1,073,741,824 bytes goes on; for more: offset=2]"
    )
    far = works(tools, "read", path="f", offset=4_000_000, limit=1)
    assert far.startswith("4000001\t0123456\n[the file")
    shared_box.files.remove("f")


def png(noise: int = 0) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return len(data).to_bytes(4) + checked + zlib.crc32(checked).to_bytes(4)

    size = (1).to_bytes(4)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + size + b"\x08\0\0\0\0")
        + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"tEXt", b"x" * noise)
        + chunk(b"IEND", b"")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "mime"),
    [(png(), "image/png"), (b"GIF89a\2\0\3\0", "image/gif"),
     (b"\xff\xd8\xff\xe0\0\4JF\xff\xc0\0\x0b\x08\0\2\0\3\1\1\x11\0", "image/jpeg"),
     (b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\1\x2a\2\0\3\0", "image/webp"),
     (b"RIFF\0\0\0\0WEBPVP8X\0\0\0\0\0\0\0\0\2\0\0\3\0\0", "image/webp")],
)  # fmt: skip
def test_an_image_is_shown_as_one_whatever_it_is_called(tools, shared_box, content, mime):
    shared_box.files.write("picture.txt", content)
    answer = tools.read(path="picture.txt")
    assert [(p.data, p.mime) for p in answer.pictures] == [(content, mime)]
    assert mime in answer.text and not answer.failed


@pytest.mark.parametrize(
    "content",
    [b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\xff" * 30,
     b"\xff\xd8\xff\xe0\0\2\xff\xda", b"\xff\xd8\xff\xe0\0\0" * 9, b"GIF89a\0\0\0\0",
     b"RIFF\0\0\0\0WEBPVP8 "],
)  # fmt: skip
def test_what_only_begins_as_an_image_is_shown_to_no_model(tools, shared_box, content):
    shared_box.files.write("forged", content)
    said = fails(tools, "read", path="forged")
    assert "[not a valid picture: " in said or " cannot be shown: each side must be" in said


def test_of_an_image_that_is_too_large_it_is_said_what_to_do(tools, shared_box):
    shared_box.files.write("large.png", png(4_000_000))
    assert "thumbnail" in fails(tools, "read", path="large.png")


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"PK\x03\x04abc", "unzip"), (b"\x7fELF\x02\x01", "ELF"), (b"a\0b", "binary file of 3 bytes"),
     (b"\xff\xfea\0", "iconv")],
)  # fmt: skip
def test_a_binary_file_is_not_shown_but_named(tools, shared_box, content, said):
    shared_box.files.write("f", content)
    assert said in fails(tools, "read", path="f")


def test_what_is_not_there_is_guessed(tools, shared_box):
    shared_box.files.write("src/settings.py", "")
    assert "Did you mean src/settings.py?" in fails(tools, "read", path="src/setings.py")
    assert "list it with ls" in fails(tools, "read", path="src")
    assert "no folder nowhere either" in fails(tools, "read", path="nowhere/f")
    shared_box.shell.run("mkfifo p")
    assert "regular file" in fails(tools, "read", path="p")


def test_any_name_that_is_shown_can_be_given_back(tools, shared_box):
    names = [
        b"with space", b"two\nlines", b"\xff\xfe", b'"quoted"', b"back\\slash", b"tab\there",
        b"\\x41", "é\u2028".encode(),
    ]  # fmt: skip
    for name in names:
        shared_box.files.write(name.decode("utf-8", "surrogateescape"), b"x" * 9)
    listed = works(tools, "ls").split("\n")
    assert len(listed) == len(names) and '"two\\nlines"  9' in listed
    for line in works(tools, "find").split("\n"):
        line.encode()  # a model's provider takes only what is UTF-8
        works(tools, "read", path=line)
        works(tools, "delete", path=line)
    assert works(tools, "ls") == "(an empty directory)"


def test_what_is_told_of_a_name_that_is_no_text_is_text(tools, shared_box):
    shared_box.commands.run(["mkfifo", "p\udcff"])
    for tool, more in [("read", {}), ("edit", {"old_string": "a", "new_string": "b"})]:
        fails(tools, tool, path='"p\\xff"', **more).encode()
        fails(tools, tool, path="\udcff", **more).encode()


# --- write ---


def test_a_file_is_written_with_its_folders_and_keeps_its_mode(tools, shared_box):
    assert works(tools, "write", path="a/b/f", content="é\n") == "Wrote a/b/f: 1 line, 3 bytes"
    shared_box.shell.run("chmod 755 a/b/f")
    works(tools, "write", path="a/b/f", content="")
    assert (shared_box.files.read("a/b/f"), shared_box.files.stat("a/b/f").mode) == ("", 0o755)
    assert "a folder, not a file" in fails(tools, "write", path="a/b", content="")


def test_what_cannot_be_written_is_told_by_its_own_name(tools):
    said = fails(tools, "write", path="/proc/x", content="")
    assert said.endswith(": /proc/x")


def test_a_tilde_is_the_home_of_the_box_and_no_folder(tools, shared_box):
    home = shared_box.commands.run("printf %s ~").stdout
    assert works(tools, "write", path="~/d/f", content="a\n").startswith(f"Wrote {home}/d/f: ")
    assert works(tools, "edit", path="~/d/f", old_string="a", new_string="b")
    patch = "*** Begin Patch\n*** Update File: ~/d/f\n*** Move to: ~/d/g\n-b\n+c\n*** End Patch"
    works(tools, "apply_patch", patch=patch)
    assert shared_box.files.read(f"{home}/d/g") == "c\n"
    works(tools, "delete", path="~/d", recursive=True)
    works(tools, "write", path="./~", content="")
    assert works(tools, "ls") == "~  0"


# --- edit ---


def test_a_text_that_is_there_once_is_replaced_and_nothing_else(tools, shared_box):
    shared_box.files.write("f", b"one\r\ntwo\r\n\xff three", mode=0o750)
    assert works(tools, "edit", path="f", old_string="one\ntwo", new_string="1\n2") == (
        "Replaced 1 occurrence in f"
    )
    assert shared_box.files.read("f", "bytes") == b"1\r\n2\r\n\xff three"
    assert shared_box.files.stat("f").mode == 0o750


def test_a_text_that_is_there_more_often_needs_more_around_it(tools, shared_box):
    shared_box.files.write("f", "a\nb\na\n")
    said = fails(tools, "edit", path="f", old_string="a", new_string="c")
    assert "2 times" in said and "at lines 1, 3" in said and "replace_all" in said
    shared_box.files.write("one", "a a\n")
    said = fails(tools, "edit", path="one", old_string="a", new_string="c")
    assert "2 times in one, at line 1: " in said
    works(tools, "edit", path="f", old_string="a", new_string="c", replace_all=True)
    assert shared_box.files.read("f") == "c\nb\nc\n"


def test_a_text_that_is_not_there_is_answered_with_what_is_nearest(tools, shared_box):
    shared_box.files.write("f", "import os\n\ndef total(items):\n    return sum(items)\n")

    def said(old: str) -> str:
        return fails(tools, "edit", path="f", old_string=old, new_string="x")

    assert "The nearest: \n3\tdef total(items):" in said("def totals(item):")
    assert "white space differs. What is there: \n3\tdef total(items):\n4\t    return" in (
        said("def total(items):\n\treturn sum(items)")
    )
    assert "Leave out the line numbers" in said("3\tdef total(items):")
    assert "nothing like it" in said("@@@@@@@@")
    assert "is empty" in said("")
    assert "the same" in said("x")


def test_an_edit_of_a_file_that_changed_since_it_was_read_is_refused(tools, shared_box):
    shared_box.files.write("f", "a b\n")
    works(tools, "read", path="f")
    shared_box.shell.run("printf 'a c\n' > f")  # as long, and perhaps within the same tick
    change = {"path": "/workspace/./f", "old_string": "a", "new_string": "d"}
    assert "read it again" in fails(tools, "edit", **change)
    assert shared_box.files.read("f") == "a c\n"
    works(tools, "read", path="f", limit=1)
    works(tools, "edit", **change)
    works(tools, "edit", path="f", old_string="c", new_string="e")  # its own change is no other's
    assert shared_box.files.read("f") == "d e\n"


def test_a_file_that_was_only_touched_can_be_edited(tools, shared_box):
    works(tools, "write", path="f", content="a")
    shared_box.shell.run("touch -d 2001-01-01 f; chmod 600 f")
    works(tools, "edit", path="f", old_string="a", new_string="b")


def test_a_file_that_changes_while_it_is_edited_is_not_overwritten(shared_box):
    known = "0" * 64
    shared_box.files.write("f", "theirs")
    with pytest.raises(Exception, match="has changed"):
        shared_box.files.write("f", "ours", expect=known)
    with pytest.raises(Exception, match="a file already"):
        shared_box.files.write("f", "ours", expect="")
    with pytest.raises(Exception, match="any more"):
        shared_box.files.write("none", "ours", expect=known)
    assert shared_box.files.read("f") == "theirs"
    shared_box.files.write("new", "ours", expect="")


# --- delete ---


def test_a_file_or_an_empty_folder_is_deleted(tools, shared_box):
    shared_box.shell.run("mkdir -p d/e empty; touch f d/e/g; ln -s d l")
    for name in ("f", "empty/", "l"):
        works(tools, "delete", path=name)
    assert "1 entries: set recursive" in fails(tools, "delete", path="d")
    works(tools, "delete", path="d", recursive=True)
    assert shared_box.files.list() == []
    assert "there is no f" in fails(tools, "delete", path="f")


@pytest.mark.parametrize("path", ["/", "/workspace", ".", "/workspace/a/..", "//", "/workspace/"])
def test_the_workspace_itself_is_never_deleted(tools, path):
    assert "delete what is in it" in fails(tools, "delete", path=path, recursive=True)


# --- whatever a model may send ---


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [("read", {}, "read needs 'path'"), ("read", {"path": 1}, "'path' is a string"),
     ("read", {"path": ""}, "cannot be empty"), ("read", {"path": "a\0b"}, "NUL"),
     ("read", {"path": "\ud800"}, "half a character"), ("find", {"type": "x"}, "one of f, d"),
     ("read", {"file": "x"}, "no parameter 'file'"), ("nonesuch", {}, "no tool 'nonesuch'"),
     ("write", {"path": "f", "content": None}, "needs 'content'")],
)  # fmt: skip
def test_a_wrong_call_is_answered_with_what_would_be_right(tools, tool, arguments, said):
    answer: Answer = tools.call(tool, arguments)
    assert answer.failed and said in answer.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [('{"command": "echo hi"}', "hi\n"), ('{"command": ', "the arguments are not JSON: "),
     ("[1]", "the arguments are a JSON object, not list"), ("", "bash needs 'command'"),
     ([1], "the arguments are a JSON object, not list")],
)  # fmt: skip
def test_arguments_may_be_the_json_that_a_model_wrote(tools, arguments, said):
    assert tools.call("bash", arguments).text.startswith(said)


def test_in_python_the_arguments_may_go_without_their_names(tools):
    assert tools.bash("echo hi", 10, raw=True).text == "hi\n"
    with pytest.raises(TypeError, match="bash takes command, timeout, raw, and was given 4"):
        tools.bash("true", 1, True, 1)
    with pytest.raises(TypeError, match="bash was given 'command' twice"):
        tools.bash("true", command="false")


def test_a_box_that_is_gone_is_no_answer(box):
    box.kill()
    with pytest.raises(BoxLost):
        box.tools.call("read", {"path": "f"})
