"""Many files: list, stat, make, move, remove, glob, search."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from hutch import (
    AsyncSandbox,
    Conflict,
    HutchError,
    InvalidRequest,
    IsFolder,
    NotFolder,
    NotFound,
    NotPermitted,
    Sandbox,
)

pytest_plugins = ["folders_of_tests"]
pytestmark = pytest.mark.usefixtures("shared_box")  # which skips where there can be none


def sh(box: Sandbox, command: str) -> str:
    return box.commands.run(command, check=True).stdout


def names(box: Sandbox, folder: str, **options) -> list[str]:
    return [entry.path.removeprefix(folder + "/") for entry in box.files.list(folder, **options)]


# --- list and stat ----------------------------------------------------------------------


def test_a_folder_is_listed_sorted_and_as_deep_as_asked(shared_box, folder):
    sh(shared_box, f"cd {folder} && mkdir -p b/c/d && touch a b/x b/c/y z")
    assert names(shared_box, folder) == ["a", "b", "z"]
    assert names(shared_box, folder, depth=2) == ["a", "b", "z", "b/c", "b/x"]
    assert names(shared_box, folder, depth=99) == ["a", "b", "z", "b/c", "b/x", "b/c/d", "b/c/y"]


def test_an_entry_tells_what_a_file_is(shared_box, folder):
    sh(
        shared_box,
        f"cd {folder} && printf abc > f && chmod 640 f && mkfifo p && ln -s f l && mkdir d",
    )
    found = {entry.name: entry for entry in shared_box.files.list(folder)}
    assert {name: entry.kind for name, entry in found.items()} == {
        "d": "dir", "f": "file", "l": "link", "p": "other",
    }  # fmt: skip
    assert (found["f"].size, found["f"].mode, found["l"].target) == (3, 0o640, "f")
    assert abs(found["f"].modified - time.time()) < 600
    assert shared_box.files.stat(f"{folder}/f") == found["f"]
    assert shared_box.files.stat(f"{folder}/l").kind == "link"


def test_paths_that_come_back_are_the_ones_that_can_be_used(shared_box, folder):
    sh(shared_box, f"cd {folder} && mkdir -p real/deep && touch real/f && ln -s real/deep link")
    for path in (f"{folder}//real/./f", f"/{folder}/real/deep/../f", f"{folder}/link/../f"):
        assert shared_box.files.stat(path).path == f"{folder}/real/f"
    assert all(entry.path.count("/") == 1 for entry in shared_box.files.list("/"))
    assert shared_box.files.stat("/").name == "/"


def test_something_exists_or_does_not(shared_box, folder):
    sh(shared_box, f"ln -s nowhere {folder}/broken; touch {folder}/f")
    for path, expected in (("f", True), ("broken", True), ("none", False), ("f/below", False)):
        assert shared_box.files.exists(f"{folder}/{path}") is expected


def test_what_cannot_be_listed_says_why(shared_box, folder):
    sh(shared_box, f"cd {folder} && touch f && mkdir -m 000 shut")
    with pytest.raises(NotFolder, match="not a folder"):
        shared_box.files.list(f"{folder}/f")
    with pytest.raises(IsFolder):
        shared_box.files.read(folder)
    with pytest.raises(IsFolder):
        shared_box.files.write(folder, "")
    with pytest.raises(NotFound):
        shared_box.files.list(f"{folder}/none")
    with pytest.raises(NotPermitted):
        shared_box.files.list(f"{folder}/shut")
    assert names(shared_box, folder, depth=9) == ["f", "shut"]  # and goes on elsewhere
    for depth in (0, -1, 1.5, "2", True):
        with pytest.raises(InvalidRequest, match="depth"):
            shared_box.files.list(folder, depth=depth)


# --- make, move, remove -----------------------------------------------------------------


def test_a_folder_is_made_once(shared_box, folder):
    assert shared_box.files.make_dir(f"{folder}/a/b/c") is True
    assert shared_box.files.make_dir(f"{folder}/a/b/c/") is False
    shared_box.files.write(f"{folder}/f", "")
    with pytest.raises(Conflict):
        shared_box.files.make_dir(f"{folder}/f")
    with pytest.raises((NotFound, Conflict)):
        shared_box.files.make_dir(f"{folder}/f/below")


def test_a_file_can_be_moved_and_nothing_is_overwritten_by_accident(shared_box, folder):
    shared_box.files.write_files({f"{folder}/a": "a", f"{folder}/b": "b"})
    with pytest.raises(Conflict, match="already"):
        shared_box.files.move(f"{folder}/a", f"{folder}/b")
    shared_box.files.move(f"{folder}/a", f"{folder}/new/c")
    shared_box.files.move(f"{folder}/new/c", f"{folder}/b", overwrite=True)
    assert shared_box.files.read(f"{folder}/b") == "a"
    with pytest.raises(NotFound):
        shared_box.files.move(f"{folder}/none", f"{folder}/d")


def test_a_folder_and_a_file_do_not_take_each_others_place(shared_box, folder):
    sh(shared_box, f"cd {folder} && mkdir d full && touch f full/x")
    for source, target in (("f", "d"), ("d", "f")):
        with pytest.raises(Conflict, match="folder"):
            shared_box.files.move(f"{folder}/{source}", f"{folder}/{target}", overwrite=True)
    with pytest.raises(Conflict):
        shared_box.files.move(f"{folder}/d", f"{folder}/full", overwrite=True)
    with pytest.raises(InvalidRequest):
        shared_box.files.move(f"{folder}/full", f"{folder}/full/inside")
    shared_box.files.move(f"{folder}/full", f"{folder}/d", overwrite=True)
    assert names(shared_box, folder, depth=2) == ["d", "f", "d/x"]


def test_a_move_to_another_file_system_keeps_everything(shared_box, folder):
    sh(
        shared_box,
        f"cd {folder} && mkdir -p t/sub && printf x > t/sub/f && chmod 741 t/sub/f"
        " && ln -s f t/sub/l && truncate -s 100M t/holes && touch -d @1000000000 t/sub/f"
        " && mkdir t/locked && touch t/locked/inner && chmod 555 t/locked",
    )
    shared_box.files.move(f"{folder}/t", "/dev/shm/t")
    assert not shared_box.files.exists(f"{folder}/t")
    found = {
        e.path.removeprefix("/dev/shm/t/"): e for e in shared_box.files.list("/dev/shm/t", depth=9)
    }
    assert found.keys() == {"holes", "locked", "locked/inner", "sub", "sub/f", "sub/l"}
    assert (found["sub/f"].mode, found["sub/f"].modified) == (0o741, 1_000_000_000)
    assert (found["sub/l"].target, found["locked"].mode) == ("f", 0o555)
    assert (found["holes"].size, sh(shared_box, "du -k /dev/shm/t/holes").split()[0]) == (
        100 << 20,
        "0",
    )
    shared_box.files.move("/dev/shm/t/sub/f", f"{folder}/f")
    assert shared_box.files.read(f"{folder}/f") == "x"
    shared_box.files.remove("/dev/shm/t", recursive=True)


@pytest.mark.parametrize(
    "trouble", ["mkfifo t/z", "mkdir -m 000 t/z", "head -c 80M /dev/zero > t/z"]
)
def test_a_move_that_fails_halfway_leaves_everything_where_it_was(shared_box, folder, trouble):
    sh(shared_box, f"cd {folder} && mkdir t && touch t/a && {trouble}")
    with pytest.raises(HutchError):
        shared_box.files.move(f"{folder}/t", "/dev/shm/t")
    assert names(shared_box, f"{folder}/t") == ["a", "z"]
    assert not shared_box.files.list("/dev/shm")


def test_files_links_and_empty_folders_can_be_removed(shared_box, folder):
    sh(
        shared_box,
        f"cd {folder} && mkdir d e && touch d/f g && ln -s d l && ln -s none b && mkfifo p",
    )
    for name in ("g", "l", "b", "p", "e"):
        shared_box.files.remove(f"{folder}/{name}")
    with pytest.raises(Conflict, match="not empty"):
        shared_box.files.remove(f"{folder}/d")
    assert names(shared_box, folder, depth=2) == ["d", "d/f"]
    shared_box.files.remove(f"{folder}/d", recursive=True)
    with pytest.raises(NotFound):
        shared_box.files.remove(f"{folder}/d", recursive=True)


def test_removing_a_folder_does_not_follow_links(shared_box, folder):
    sh(
        shared_box,
        f"cd {folder} && mkdir keep d && touch keep/f && ln -s ../keep d/l && ln -s keep top",
    )
    shared_box.files.remove(f"{folder}/d", recursive=True)
    shared_box.files.remove(f"{folder}/top/", recursive=True)
    assert names(shared_box, folder, depth=2) == ["keep", "keep/f"]


def test_the_root_of_a_box_cannot_be_removed(shared_box):
    for path in ("/", "//", "/..", "/usr/.."):
        with pytest.raises(InvalidRequest, match="root"):
            shared_box.files.remove(path, recursive=True)


def test_what_is_not_ours_cannot_be_removed(shared_box):
    for path in ("/usr/bin/env", "/etc"):
        with pytest.raises(NotPermitted):
            shared_box.files.remove(path, recursive=True)
    assert shared_box.files.exists("/usr/bin/env") and shared_box.files.exists("/etc/passwd")


def test_five_thousand_nested_folders_can_be_removed(shared_box, folder):
    code = (
        f"import os\nos.chdir('{folder}')\n"
        "for _ in range(5000):\n os.mkdir('d'); open('f','w').close(); os.chdir('d')"
    )
    shared_box.commands.run(["python3", "-c", code], check=True)
    assert len(shared_box.files.list(folder, depth=99)) == 198
    shared_box.files.remove(f"{folder}/d", recursive=True)
    assert names(shared_box, folder) == ["f"]


def test_a_hundred_thousand_files_can_be_listed_and_removed(shared_box, folder):
    sh(shared_box, f"mkdir {folder}/d && cd {folder}/d && seq 100000 | xargs touch")
    assert len(shared_box.files.list(f"{folder}/d")) == 100_000
    assert shared_box.files.glob(f"{folder}/d/7777?") == [f"{folder}/d/7777{n}" for n in range(10)]
    shared_box.files.remove(f"{folder}/d", recursive=True)


def test_folders_that_nobody_may_enter_can_be_removed_by_their_owner(shared_box, folder):
    sh(
        shared_box,
        f"cd {folder} && mkdir -p t/a/b/c && touch t/a/b/f && chmod 000 t/a/b t/a && chmod 555 t",
    )
    shared_box.files.remove(f"{folder}/t", recursive=True)
    assert names(shared_box, folder) == []


def test_a_folder_that_is_filled_while_it_is_removed_ends_somehow(shared_box, folder):
    sh(shared_box, f"mkdir {folder}/d")
    filler = shared_box.commands.run(
        f"while mkdir -p {folder}/d/$((i=i+1)) 2>/dev/null; do :; done", background=True
    )
    try:
        shared_box.files.remove(f"{folder}/d", recursive=True)
    except (Conflict, NotFound):
        pass
    finally:
        filler.kill()


def test_the_box_answers_while_a_large_folder_is_removed(shared_box, folder):
    sh(shared_box, f"mkdir {folder}/d && cd {folder}/d && seq 50000 | xargs touch")
    removing = threading.Thread(
        target=shared_box.files.remove, args=(f"{folder}/d",), kwargs={"recursive": True}
    )
    removing.start()
    answers = 0
    while removing.is_alive():
        assert shared_box.files.exists(folder)
        answers += 1
    assert answers > 3


# --- glob and search --------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(shared_box) -> str:
    top = "/tmp/tree"
    files = ["a.py", "b.txt", ".hidden.py", "src/a.py", "src/deep/b.py", "src/deep/c.txt", "[x].py",
             "src/a+b.py", "new\nline.py", "é.py", "a.pyc", "-rf", "sub/a.py/inside"]  # fmt: skip
    shared_box.files.write_files({f"{top}/{name}": name for name in files})
    return top


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("*.py", [".hidden.py", "[x].py", "a.py", "new\nline.py", "é.py"]),
        ("?.py", ["a.py", "é.py"]),
        ("[ab].*", ["a.py", "a.pyc", "b.txt"]),
        ("[!a-z].py", ["é.py"]),
        ("[[]x].py", ["[x].py"]),
        ("[x].py", []),
        ("[x", []),
        ("a.py", ["a.py"]),
        ("src/*.py", ["src/a+b.py", "src/a.py"]),
        ("src/a+b.py", ["src/a+b.py"]),
        ("*/a.py", ["src/a.py", "sub/a.py"]),
        ("**/b.*", ["b.txt", "src/deep/b.py"]),
        ("**/deep/*", ["src/deep/b.py", "src/deep/c.txt"]),
        ("src/**", ["src/a+b.py", "src/a.py", "src/deep", "src/deep/b.py", "src/deep/c.txt"]),
        ("**/**/c.txt", ["src/deep/c.txt"]),
        ("./src/./a.py", ["src/a.py"]),
        ("s**/a.py", ["src/a.py", "sub/a.py"]),
        ("*", [".hidden.py", "-rf", "[x].py", "a.py", "a.pyc", "b.txt", "new\nline.py", "src",
               "sub", "é.py"]),
        ("-*", ["-rf"]),
        ("src/../*.txt", ["b.txt"]),
        (".*", [".hidden.py"]),
    ],
)  # fmt: skip
def test_a_glob_gives_what_matches(shared_box, tree, pattern, expected):
    found = [path.removeprefix(tree + "/") for path in shared_box.files.glob(pattern, tree)]
    assert found == sorted(expected)
    assert shared_box.files.glob(f"{tree}/{pattern}") == sorted(
        f"{tree}/{name}" for name in expected
    )


def test_a_glob_that_cannot_be_is_refused(shared_box, tree):
    for pattern in ("", "/", "*/../x", "a\0b", 5):
        with pytest.raises(InvalidRequest):
            shared_box.files.glob(pattern, tree)
    with pytest.raises(NotFound):
        shared_box.files.glob("*", "/none")


def test_a_glob_with_many_stars_is_not_slow(shared_box, folder):
    shared_box.files.write(f"{folder}/{'a' * 250}", "")
    # Tried in every way, this would take longer than the age of the universe.
    assert shared_box.files.glob(f"{folder}/" + "*a" * 40 + "*b") == []
    assert len(shared_box.files.glob(f"{folder}/" + "*a" * 40)) == 1


def test_a_search_gives_lines_with_their_numbers(shared_box, folder):
    shared_box.files.write_files(
        {
            f"{folder}/a.txt": "one\ntwo hello\r\nthree",
            f"{folder}/sub/b.py": "def héllo(): pass\n",
            f"{folder}/bin": b"hello\0world",
            f"{folder}/odd": b"hello \xff\n",
        }
    )
    found = [(m.path.removeprefix(folder + "/"), m.line, m.text)
             for m in shared_box.files.search("h.llo", folder)]  # fmt: skip
    assert found == [("a.txt", 2, "two hello"), ("odd", 1, "hello \udcff"),
                     ("sub/b.py", 1, "def héllo(): pass")]  # fmt: skip


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"glob": "*.py"}, ["sub/b.py"]),
        ({"glob": "sub/*"}, ["sub/b.py", "sub/c.txt"]),
        ({"glob": "**/*.txt"}, ["a.txt", "sub/c.txt"]),
        ({"ignore_case": True}, ["a.txt", "d.TXT", "sub/b.py", "sub/c.txt"]),
        ({"limit": 1}, ["a.txt"]),
        ({"path": "/sub/b.py"}, ["sub/b.py"]),
        ({"path": "/link"}, ["link/b.py", "link/c.txt"]),
        ({"path": "/a.txt", "glob": "*.py"}, []),
    ],
)  # fmt: skip
def test_a_search_looks_where_it_is_told(shared_box, folder, options, expected):
    shared_box.files.write_files(
        {f"{folder}/{n}": "needle\n" for n in ("a.txt", "sub/b.py", "sub/c.txt")}
        | {f"{folder}/d.TXT": "NEEDLE"}
    )
    sh(shared_box, f"cd {folder} && ln -s sub link && ln -s a.txt other && mkfifo pipe")
    path = folder + options.pop("path", "")
    found = shared_box.files.search("needle", path, **options)
    assert [match.path.removeprefix(folder + "/") for match in found] == expected


def test_a_search_knows_the_whole_language_of_patterns(shared_box, folder):
    shared_box.files.write(f"{folder}/f", "Ünïcode 42\nsecond\n")
    for pattern in (
        r"\w{7} \d+$",
        r"\N{LATIN CAPITAL LETTER U WITH DIAERESIS}",
        r"(?i)ÜNÏCODE",
        "^Ü",
    ):
        assert [match.line for match in shared_box.files.search(pattern, folder)] == [1]


@pytest.mark.parametrize(
    "pattern", ["(", "[a", "*", "a{2,1}", "(?P<", "\\", "(" * 5000, "(?<=a*)b"]
)
def test_a_pattern_that_is_none_is_refused(shared_box, folder, pattern):
    with pytest.raises(InvalidRequest, match="regular expression"):
        shared_box.files.search(pattern, folder)


def test_a_search_of_what_cannot_be_read_says_why(shared_box, folder):
    sh(shared_box, f"mkfifo {folder}/p")
    with pytest.raises(InvalidRequest, match="regular file"):
        shared_box.files.search("x", f"{folder}/p")
    with pytest.raises(NotFound):
        shared_box.files.search("x", f"{folder}/none")
    for limit in (0, -1, 1.5):
        with pytest.raises(InvalidRequest, match="limit"):
            shared_box.files.search("x", folder, limit=limit)


def test_lines_of_any_length_are_searched_and_shown_in_part(shared_box, folder):
    shared_box.files.write(f"{folder}/f", b"x" * 5_000_000 + b"\nend\n")
    (match,) = shared_box.files.search("^x", folder)
    assert (match.line, len(match.text)) == (1, 4096)
    assert [match.line for match in shared_box.files.search("end", folder)] == [2]


def test_a_hopeless_search_dies_when_nobody_waits_for_it():
    async def processes(box: AsyncSandbox) -> int:
        return len((await box.commands.run("echo /proc/[0-9]*")).stdout.split())

    async def give_up() -> None:
        async with await AsyncSandbox.create() as box:
            await box.files.write("f", "a" * 60)
            before = await processes(box)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.files.search("(a+)+$b"), 0.5)
            deadline = time.monotonic() + 120
            while await processes(box) > before:
                assert time.monotonic() < deadline, "it goes on"
                await asyncio.sleep(0.05)

    asyncio.run(give_up())
