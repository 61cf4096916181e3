"""One file: read, write, edit."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from docker_of_tests import for_a_box
from hutch import (
    Conflict,
    InvalidRequest,
    LimitReached,
    NoSpace,
    NotFound,
    NotPermitted,
    Sandbox,
)

pytest_plugins = ["folders_of_tests"]
pytestmark = pytest.mark.usefixtures("shared_box")  # which skips where there can be none


def sh(box: Sandbox, command: str) -> str:
    return box.commands.run(command, check=True).stdout


def left_over(box: Sandbox, folder: str) -> list[str]:
    return [name for name in box.files.glob(f"{folder}/**") if ".hutch-" in name]


# --- reading ----------------------------------------------------------------------------


def test_a_file_can_be_read_as_text_bytes_and_stream(shared_box, folder):
    data = "hé\n".encode() + b"\xff" + b"x" * 3_000_000
    assert shared_box.files.write(f"{folder}/f", data) == len(data)
    assert shared_box.files.read(f"{folder}/f", "bytes") == data
    assert shared_box.files.read(f"{folder}/f").startswith("hé\n�x")
    with shared_box.files.read(f"{folder}/f", "stream") as stream:
        pieces = list(stream)
    assert b"".join(pieces) == data and len(pieces) > 3


@pytest.mark.parametrize(
    "offset, length, expected",
    [(0, 3, b"012"), (3, 3, b"345"), (8, 5, b"89"), (9, None, b"9"), (10, None, b""),
     (99, 5, b""), (0, 0, b""), (0, 1 << 61, b"0123456789"), (1 << 61, None, b"")],
)  # fmt: skip
def test_a_range_gives_the_bytes_that_are_there(shared_box, folder, offset, length, expected):
    shared_box.files.write(f"{folder}/f", "0123456789")
    assert (
        shared_box.files.read(f"{folder}/f", "bytes", offset=offset, length=length) == expected
    )  # fmt: skip


def test_an_empty_file_is_empty(shared_box, folder):
    shared_box.files.write(f"{folder}/f", "")
    assert shared_box.files.read(f"{folder}/f") == ""
    assert list(shared_box.files.read(f"{folder}/f", "stream")) == []


def test_files_in_proc_can_be_read_though_they_say_they_are_empty(shared_box):
    assert "processor" in shared_box.files.read("/proc/cpuinfo")


def test_relative_paths_start_at_the_working_directory(shared_box, folder):
    shared_box.files.write(f"{folder}/f", "here")
    assert shared_box.files.read(folder.removeprefix("/workspace/") + "/f") == "here"
    assert shared_box.files.stat(".").path == "/workspace"


def test_a_stream_that_is_left_early_holds_nothing_up(shared_box, folder):
    sh(shared_box, f"truncate -s 64M {folder}/f")
    for _ in range(3):
        with shared_box.files.read(f"{folder}/f", "stream") as stream:
            assert next(iter(stream))
    shared_box.files.read(f"{folder}/f", "stream").close()  # not even begun
    assert shared_box.files.read(f"{folder}/f", "bytes", length=3) == b"\0\0\0"


@pytest.fixture(scope="module")
def vast_box(tmp_path_factory) -> Iterator[Sandbox]:
    """A box whose workspace is a folder of ours, with a file of four terabytes of nothing."""
    workspace = tmp_path_factory.mktemp("vast")
    with open(workspace / "vast", "wb") as file:
        file.truncate(4 << 40)
    with Sandbox.create(workspace=str(for_a_box(workspace))) as box:
        yield box


@pytest.mark.parametrize("format, nothing", [("text", "\0"), ("bytes", b"\0")])
def test_four_terabytes_of_nothing_are_refused_at_once(vast_box, format, nothing):
    with pytest.raises(InvalidRequest, match='format="stream"'):
        vast_box.files.read("vast", format)
    assert vast_box.files.read("vast", format, offset=1 << 40, length=2) == nothing * 2
    assert vast_box.files.read("vast", format, offset=(4 << 40) - 5) == nothing * 5
    with vast_box.files.read("vast", "stream") as stream:
        assert len(next(iter(stream))) > 1000


def test_four_terabytes_of_nothing_are_not_downloaded_or_edited(vast_box, tmp_path):
    with pytest.raises(LimitReached, match="limit"):
        vast_box.files.download("vast", tmp_path / "vast")
    with pytest.raises(LimitReached, match="limit"):
        vast_box.files.download(".", tmp_path / "all")
    assert [path.name for path in tmp_path.rglob("*")] == ["all"]
    with pytest.raises(InvalidRequest, match="too large"):
        vast_box.files.edit("vast", "a", "b")


def test_a_search_passes_over_four_terabytes_of_nothing(vast_box):
    vast_box.files.write("small", "needle\n")
    assert [match.path for match in vast_box.files.search("needle")] == ["/workspace/small"]


def test_a_file_that_grows_while_it_is_read_has_an_end(shared_box, folder):
    shared_box.files.write(f"{folder}/f", b"x" * 4_000_000)
    grower = shared_box.commands.run(f"exec yes >> {folder}/f", background=True)
    try:
        sizes = [len(shared_box.files.read(f"{folder}/f", "bytes")) for _ in range(3)]
    finally:
        grower.kill()
    assert all(4_000_000 <= size <= shared_box.files.stat(f"{folder}/f").size for size in sizes)


# --- writing ----------------------------------------------------------------------------


def test_a_file_and_its_parents_are_made(shared_box, folder):
    assert shared_box.files.write(f"{folder}/a/b/c.txt", "hé") == 3
    said = sh(shared_box, f"cd {folder}/a && cat b/c.txt && stat -c '%a %U' . b/c.txt")
    assert said == "hé755 user\n644 user\n"


def test_a_program_can_use_what_was_written_and_the_other_way_round(shared_box, folder):
    shared_box.files.write(
        f"{folder}/run", "#!/bin/sh\necho made > $(dirname $0)/out\n", mode=0o755
    )
    sh(shared_box, f"{folder}/run")
    assert shared_box.files.read(f"{folder}/out") == "made\n"


def test_an_existing_file_keeps_its_mode_unless_one_is_given(shared_box, folder):
    path = f"{folder}/f"
    shared_box.files.write(path, "1", mode=0o600)
    shared_box.files.write(path, "2")
    assert shared_box.files.stat(path).mode == 0o600
    shared_box.files.write(path, "3", mode=0o755)
    assert shared_box.files.stat(path).mode == 0o755


def test_appending_adds_at_the_end(shared_box, folder):
    for text in ("a", "b", "c"):
        shared_box.files.write(f"{folder}/f", text, append=True)
    assert shared_box.files.read(f"{folder}/f") == "abc"
    shared_box.files.write(f"{folder}/f", "", append=True, mode=0o640)
    assert shared_box.files.stat(f"{folder}/f").mode == 0o640


def test_data_can_come_in_pieces(shared_box, folder):
    pieces = (bytes([65 + n % 26]) * 100_000 for n in range(50))
    assert shared_box.files.write(f"{folder}/f", pieces) == 5_000_000
    assert shared_box.files.read(f"{folder}/f", offset=99_999, length=2) == "AB"
    assert shared_box.files.write(f"{folder}/f", [b"x", bytearray(b"y"), memoryview(b"z")]) == 3
    assert shared_box.files.write(f"{folder}/f", []) == 0


def test_a_source_that_fails_leaves_the_old_content(shared_box, folder):
    def broken():
        yield b"new"
        raise ZeroDivisionError("of mine")

    shared_box.files.write(f"{folder}/f", "old")
    with pytest.raises(ZeroDivisionError, match="of mine"):
        shared_box.files.write(f"{folder}/f", broken())
    for pieces in (["text"], [b"x", None]):
        with pytest.raises(InvalidRequest, match="must be bytes, not"):
            shared_box.files.write(f"{folder}/f", pieces)
    assert shared_box.files.read(f"{folder}/f") == "old"
    assert not left_over(shared_box, folder)


def test_several_files_can_be_written(shared_box, folder):
    shared_box.files.write_files({f"{folder}/a": "1", f"{folder}/b/c": b"2"})
    assert shared_box.files.read(f"{folder}/b/c") == "2"


def test_a_reader_sees_the_old_content_or_the_new_and_nothing_between(shared_box, folder):
    old, new = b"a" * 1_000_000, b"b" * 1_000_000
    shared_box.files.write(f"{folder}/f", old)
    code = (
        f"import sys\nwhile True:\n d=open('{folder}/f','rb').read()\n"
        " if len(d) != 1000000 or len(set(d)) != 1: print('torn', len(d)); sys.exit(1)"
    )
    reader = shared_box.commands.run(["python3", "-c", code], background=True)
    for _ in range(30):
        shared_box.files.write(f"{folder}/f", new)
        shared_box.files.write(f"{folder}/f", old)
    assert shared_box.commands.list()[-1].exit_code is None, reader.stdout()
    reader.kill()


def test_concurrent_writers_leave_one_whole_content(shared_box, folder):
    contents = [bytes([65 + n]) * 500_000 for n in range(4)]
    writers = [
        threading.Thread(target=shared_box.files.write, args=(f"{folder}/f", content))
        for content in contents * 3
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert shared_box.files.read(f"{folder}/f", "bytes") in contents
    assert not left_over(shared_box, folder)


def test_through_a_link_the_file_is_written_and_not_the_link(shared_box, folder):
    shared_box.files.write(f"{folder}/real", "old", mode=0o640)
    sh(
        shared_box,
        f"ln -s real {folder}/link; ln -s none {folder}/broken; ln -s self {folder}/self",
    )
    shared_box.files.write(f"{folder}/link", "new")
    assert shared_box.files.read(f"{folder}/real") == "new"
    assert shared_box.files.stat(f"{folder}/link").kind == "link"
    shared_box.files.write(f"{folder}/broken", "made")
    assert shared_box.files.read(f"{folder}/none") == "made"
    with pytest.raises(InvalidRequest, match="symbolic links"):
        shared_box.files.write(f"{folder}/self", "x")


def test_a_full_disk_leaves_the_old_content_and_nothing_else():
    with Sandbox.create(memory="64m", disk="8m") as box:
        box.files.write("f", "old")
        with pytest.raises(NoSpace):
            box.files.write("f", b"x" * 20_000_000)
        assert box.files.read("f") == "old"
        assert [entry.name for entry in box.files.list(".")] == ["f"]
        box.files.write("g", b"y" * 1_000_000)  # the space is free again


def test_what_may_not_be_written_is_refused(shared_box, folder):
    for path in ("/usr/bin/evil", "/etc/passwd", "/proc/version", "/sys/x"):
        with pytest.raises((NotPermitted, NotFound)):
            shared_box.files.write(path, "x")
    shared_box.files.write(f"{folder}/locked", "old", mode=0o444)
    for append in (False, True):
        with pytest.raises(NotPermitted):
            shared_box.files.write(f"{folder}/locked", "new", append=append)
    sh(shared_box, f"mkdir {folder}/closed; chmod 555 {folder}/closed")
    with pytest.raises(NotPermitted):
        shared_box.files.write(f"{folder}/closed/f", "x")


def test_a_writable_file_in_a_folder_that_is_not_is_written_in_place(shared_box, folder):
    sh(shared_box, f"mkdir {folder}/d; echo old content > {folder}/d/f; chmod 555 {folder}/d")
    shared_box.files.write(f"{folder}/d/f", "new")
    assert shared_box.files.read(f"{folder}/d/f") == "new"
    assert [entry.name for entry in shared_box.files.list(f"{folder}/d")] == ["f"]


def test_a_mounted_file_can_be_written(tmp_path):
    (tmp_path / "notes.txt").write_text("a longer content than the new one")
    for_a_box(tmp_path / "notes.txt")
    with Sandbox.create(mounts=[f"{tmp_path}/notes.txt:/workspace/notes.txt"]) as box:
        box.files.write("notes.txt", "from the box")
        assert box.files.read("notes.txt") == "from the box"
        assert [entry.name for entry in box.files.list(".")] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "from the box"


def test_a_link_into_proc_does_not_let_the_guest_write_to_itself(shared_box, folder):
    for number, name in enumerate(("mem", "comm", "oom_score_adj", "attr/current")):
        sh(shared_box, f"ln -s /proc/self/{name} {folder}/{number}")
        for append in (False, True):
            with pytest.raises((NotPermitted, NotFound, InvalidRequest)):
                shared_box.files.write(f"{folder}/{number}", "1000", append=append)


@pytest.mark.parametrize(
    "make",
    [
        "mkfifo f",
        "mkdir f",
        "ln -s /dev/null f",
        "python3 -c \"import socket as s;s.socket(s.AF_UNIX).bind('f')\"",
    ],
)
def test_only_regular_files_are_written(shared_box, folder, make):
    sh(shared_box, f"cd {folder} && {make}")
    for append in (False, True):
        with pytest.raises((InvalidRequest, NotFound)):
            shared_box.files.write(f"{folder}/f", "x", append=append)


@pytest.mark.parametrize("mode", [-1, 0o4755, 0o2755, 0o7777, 1 << 70, True, "755", 0.5])
def test_a_mode_that_no_file_may_have_is_refused(shared_box, folder, mode):
    with pytest.raises(InvalidRequest, match="mode"):
        shared_box.files.write(f"{folder}/f", "x", mode=mode)
    assert not shared_box.files.exists(f"{folder}/f")


@pytest.mark.parametrize("data", [5, None, object(), {"a": 1}, [5]])
def test_data_that_is_no_data_is_refused(shared_box, folder, data):
    with pytest.raises(InvalidRequest, match="must be bytes"):
        shared_box.files.write(f"{folder}/f", data)


# --- editing ----------------------------------------------------------------------------


def test_an_edit_replaces_what_is_there_once(shared_box, folder):
    shared_box.files.write(f"{folder}/f", "one two three", mode=0o750)
    assert shared_box.files.edit(f"{folder}/f", "two", "2") == 1
    assert shared_box.files.read(f"{folder}/f") == "one 2 three"
    assert shared_box.files.stat(f"{folder}/f").mode == 0o750


def test_an_edit_that_cannot_be_made_changes_nothing(shared_box, folder):
    shared_box.files.write(f"{folder}/f", "a b a")
    with pytest.raises(NotFound, match="not in"):
        shared_box.files.edit(f"{folder}/f", "c", "d")
    with pytest.raises(Conflict, match="2 times"):
        shared_box.files.edit(f"{folder}/f", "a", "d")
    with pytest.raises(InvalidRequest, match="empty"):
        shared_box.files.edit(f"{folder}/f", "", "d")
    with pytest.raises(NotFound):
        shared_box.files.edit(f"{folder}/none", "a", "d")
    assert shared_box.files.read(f"{folder}/f") == "a b a"
    assert shared_box.files.edit(f"{folder}/f", "a", "d", replace_all=True) == 2
    assert shared_box.files.read(f"{folder}/f") == "d b d"


@pytest.mark.parametrize(
    "before, old, new, after",
    [
        (b"a\nb", "a\nb", "c\nd", b"c\nd"),  # no newline at the end: none is added
        (b"a\nb\n", "b", "c", b"a\nc\n"),
        (b"a\r\nb\r\n", "a\nb", "c\nd", b"c\r\nd\r\n"),
        (b"a\r\nb\r\n", "b", "b\nc", b"a\r\nb\r\nc\r\n"),
        (b"a\r\nb\r\n", "a\r\nb", "c\r\nd", b"c\r\nd\r\n"),
        (b"a\r\nb\nc\n", "b", "x\ny", b"a\r\nx\ny\nc\n"),  # mixed: left as it is
        (b"\xff\xfea", "a", "é", b"\xff\xfe\xc3\xa9"),
        (b"\xffx", "\udcff", "y", b"yx"),
        (b"x\0y", "\0", "-", b"x-y"),
    ],
)
def test_an_edit_keeps_line_endings_and_all_other_bytes(
    shared_box, folder, before, old, new, after
):
    shared_box.files.write(f"{folder}/f", before)
    shared_box.files.edit(f"{folder}/f", old, new)
    assert shared_box.files.read(f"{folder}/f", "bytes") == after


def test_a_file_too_large_to_edit_is_refused(shared_box, folder):
    sh(shared_box, f"truncate -s 100M {folder}/f; printf 'a%.0s' $(seq 100000) > {folder}/g")
    with pytest.raises(InvalidRequest, match="too large"):
        shared_box.files.edit(f"{folder}/f", "a", "b")
    with pytest.raises(InvalidRequest, match="too large"):
        shared_box.files.edit(f"{folder}/g", "a", "b" * 1000, replace_all=True)
    assert shared_box.files.edit(f"{folder}/g", "a", "b", replace_all=True) == 100_000
