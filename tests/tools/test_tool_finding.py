"""ls, find, glob, grep and diff, as a model calls them; and what they do as git does."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hutch import InvalidRequest, Sandbox, TimedOut
from hutch.guest.compare import blocks, unified
from hutch.guest.folders import walk
from hutch.guest.search import Gitignore
from hutch.tools import Toolbox


@pytest.fixture
def tools(shared_box: Sandbox) -> Toolbox:
    shared_box.shell.run("cd /workspace; find . -mindepth 1 -delete")
    return Toolbox(shared_box)


def works(tools: Toolbox, tool: str, **arguments: Any) -> str:
    answer = tools.call(tool, arguments)
    assert not answer.failed, answer.text
    return answer.text


def fails(tools: Toolbox, tool: str, **arguments: Any) -> str:
    answer = tools.call(tool, arguments)
    assert answer.failed, answer.text
    return answer.text


def fill(box: Sandbox, files: dict[str, str]) -> None:
    for path, content in files.items():
        box.files.write(path, content)


def test_folders_are_listed_first_and_files_with_their_sizes(tools, shared_box):
    fill(shared_box, {"z/f": "", "b": "x" * 1234, "a": "xyz", ".hidden": ""})
    shared_box.shell.run("ln -s a c; mkfifo p; truncate -s 3M large")
    assert works(tools, "ls").split("\n") == [
        "z/", ".hidden  0", "a  3", "b  1.2K", "c -> a", "large  3.0M", "p  (special file)",
    ]  # fmt: skip
    assert works(tools, "ls", path="a") == "a  3"
    assert "there is no y" in fails(tools, "ls", path="y")


def test_files_are_found_by_name_and_type(tools, shared_box):
    fill(shared_box, {"src/a.py": "", "src/deep/b.py": "", "src/c.js": "", ".git/x.py": ""})
    shared_box.files.write(".gitignore", "*.py")
    assert works(tools, "find", name="*.py") == "src/a.py\nsrc/deep/b.py"
    assert works(tools, "find", path="src", type="d") == "src/deep"
    assert works(tools, "find", path="/workspace/src", type="f", limit=1) == (
        "src/a.py\n[2 more; narrow the search, or raise limit]"
    )
    assert works(tools, "find", path=".git") == ".git/x.py"
    assert "use glob" in fails(tools, "find", name="src/*.py")
    assert works(tools, "find", name="nonesuch") == "(nothing found)"


def test_a_glob_gives_the_newest_first_and_not_what_git_ignores(tools, shared_box):
    fill(shared_box, {"src/a.ts": "", "src/b.tsx": "", "c.ts": "", "dist/d.ts": "", "e.js": ""})
    shared_box.files.write(".gitignore", "dist/")
    shared_box.shell.run("touch -d 2001-01-01 src/a.ts; touch -d 2002-01-01 c.ts")
    assert works(tools, "glob", pattern="**/*.{ts,tsx}") == "src/b.tsx\nc.ts\nsrc/a.ts"
    assert "dist/d.ts" in works(tools, "glob", pattern="**/*.ts", ignored=True)
    assert works(tools, "glob", pattern="*.ts", path="src") == "src/a.ts"
    assert works(tools, "glob", pattern="**", limit=1).endswith(
        "[4 more; narrow the search, or raise limit]"
    )
    assert "256" in fails(tools, "glob", pattern="{a,b}" * 20)


def test_lines_are_found_by_file(tools, shared_box):
    fill(shared_box, {"a.py": "x = 1\ny = 2\nX = 3\n", "b.js": "x = 4\n", "bin": "x = \0"})
    assert works(tools, "grep", pattern=r"^x = \d") == "a.py\n1:x = 1\nb.js\n1:x = 4"
    assert (
        works(tools, "grep", pattern="x =", type="py", ignore_case=True) == "a.py\n1:x = 1\n3:X = 3"
    )
    assert works(tools, "grep", pattern="x", type="javascript") == "b.js\n1:x = 4"
    assert works(tools, "grep", pattern="x", glob="*.{js,jsx}") == "b.js\n1:x = 4"
    assert works(tools, "grep", pattern="y", path="a.py") == "a.py\n2:y = 2"
    assert works(tools, "grep", pattern="x", limit=1).endswith(
        "[more than 1 matches; narrow the search, or raise limit]"
    )
    assert "invalid regular expression" in fails(tools, "grep", pattern="(")
    assert "there is no c.py" in fails(tools, "grep", pattern="x", path="c.py")


def test_lines_around_a_match_are_shown_once(tools, shared_box):
    shared_box.files.write("f", "".join(f"{n}\n" for n in range(1, 21)))
    assert works(tools, "grep", pattern="^(4|6|15)$", context=1).split("\n") == [
        "f", "3-3", "4:4", "5-5", "6:6", "7-7", "--", "14-14", "15:15", "16-16",
    ]  # fmt: skip
    assert works(tools, "grep", pattern="^(4|5)$", context=2).split("\n")[1:] == [
        "2-2", "3-3", "4:4", "5:5", "6-6", "7-7",
    ]  # fmt: skip
    assert works(tools, "grep", pattern="^20$", context=20).count("\n") == 20
    (match,) = shared_box.files.search("^2$", context=2)
    assert (match.before, match.after) == (("1",), ("3", "4"))
    with pytest.raises(InvalidRequest, match="context"):
        shared_box.files.search("x", context=21)


def test_the_widest_lines_around_a_match_fit_into_an_answer(tools, shared_box):
    shared_box.files.write("f", ("𝄞" * 5000 + "\n") * 60)
    found = shared_box.files.search("𝄞", context=20)
    assert len(found) == 60 and len(found[30].before) == len(found[30].after) == 20


def test_what_git_ignores_is_searched_when_it_is_asked_for(tools, shared_box):
    fill(shared_box, {"a.py": "x", "build/b.py": "x", "sub/c.log": "x", "sub/.gitignore": "!c.log"})
    shared_box.files.write(".gitignore", "/build/\n*.log\n")
    assert works(tools, "grep", pattern="x") == "a.py\n1:x\nsub/c.log\n1:x"
    assert works(tools, "grep", pattern="x", path="sub") == "sub/c.log\n1:x"
    assert works(tools, "grep", pattern="x", path="build") == "build/b.py\n1:x"
    assert "build/b.py" in works(tools, "grep", pattern="x", ignored=True)


def test_a_hopeless_pattern_ends_with_advice(tools, shared_box, monkeypatch):
    shared_box.files.write("f", "a" * 60)
    monkeypatch.setattr("hutch.tools.finding.SECONDS", 0.3)
    assert "make the pattern simpler" in fails(tools, "grep", pattern="(a+)+$b")
    with pytest.raises(TimedOut, match="stopped"):
        shared_box.files.search("(a+)+$b", timeout=0.1)


# Rules of which no two mean the same. Git is asked what it makes of them.
RULES = [
    "*.log", "/a", "a/", "build/", "!a.log", "**/b", "a/**", "a/**/b", "*.p?", "[ab]", "[!a]*",
    "[^a]", "foo bar", "foo\\ bar ", "\\!z", "#x", "x#y", "/b/a", "b/*.log", "!/b/a.log", "*",
    "!*/", "!*.py", "a/b/", "**", "c.*", "no*de", "\\*", "[a-c].log", "", "/", "  ", "a\\ ",
    "**/build/**", "!build", "node\r", "**a", "a**b", "b/**/",
]  # fmt: skip
NAMES = ["a", "b", "a.log", "b.py", "build", "foo bar", "x#y", "!z", "c.txt", "node"]


def grow(folder: Path, depth: int, chance: random.Random) -> None:
    for name in chance.sample(NAMES, 4):
        if depth and chance.random() < 0.5:
            (folder / name).mkdir()
            grow(folder / name, depth - 1, chance)
        else:
            (folder / name).touch()
    if chance.random() < 0.5:
        rules = chance.sample(RULES, chance.randrange(1, 6))
        (folder / ".gitignore").write_text("\n".join(rules), newline="")


def test_what_is_ignored_is_what_git_ignores(tmp_path: Path) -> None:
    chance = random.Random(6)
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(tmp_path)}
    for number in range(20):
        top = tmp_path / str(number)
        subprocess.run(["git", "init", "-q", str(top)], check=True, env=env, timeout=60)
        grow(top, 2, chance)
        argv = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
        said = subprocess.run(argv, cwd=top, check=True, env=env, capture_output=True, timeout=60)
        wanted = sorted(os.fsdecode(name) for name in said.stdout.split(b"\0") if name)
        found = [entry["path"] for entry in walk(str(top), leave_out=Gitignore(str(top)))
                 if entry["kind"] == "file"]  # fmt: skip
        assert sorted(path[len(str(top)) + 1 :] for path in found) == wanted, number


# --- diff ---


def test_two_files_are_compared(tools, shared_box):
    lines = [f"{n}\n" for n in range(20)]
    fill(shared_box, {"a": "".join(lines), "b": "".join([*lines[:9], "new\n", *lines[10:], "end"])})
    assert works(tools, "diff", file_a="a", file_b="b") == (
        "--- a\n+++ b\n@@ -7,7 +7,7 @@\n 6\n 7\n 8\n-9\n+new\n 10\n 11\n 12\n"
        "@@ -18,3 +18,4 @@\n 17\n 18\n 19\n+end\n\\ No newline at end of file"
    )
    assert works(tools, "diff", file_a="a", file_b="./a") == "(the files are the same)"
    shared_box.files.write("c", b"\0")
    assert works(tools, "diff", file_a="a", file_b="c") == "Binary files a and c differ"
    assert "there is no file d" in fails(tools, "diff", file_a="a", file_b="d")
    assert "a folder" in fails(tools, "diff", file_a="a", file_b="/tmp")


def test_git_makes_of_a_diff_what_was_compared(tmp_path: Path) -> None:
    chance = random.Random(6)
    patch, wanted = "", {}
    for number in range(60):
        letters = "abcdefghijklmnop"[: chance.choice([1, 2, 3, 16])]
        one = [chance.choice(letters) + "\n" for _ in range(chance.randrange(1, 30))]
        other = list(one)
        for _ in range(chance.randrange(1, 8)):
            if other and chance.random() < 0.5:
                del other[chance.randrange(len(other))]
            else:
                other.insert(chance.randrange(len(other) + 1), "new\n")
        other[-1:] = [other[-1].rstrip() if number % 3 else other[-1]] if other else []
        if one == other or not other:
            continue
        (tmp_path / f"f{number}").write_text("".join(one))
        wanted[f"f{number}"] = "".join(other)
        patch += f"--- a/f{number}\n+++ b/f{number}\n" + "".join(unified(one, other, 3))
    (tmp_path / "patch").write_text(patch)
    subprocess.run(["git", "apply", "patch"], cwd=tmp_path, check=True, timeout=60)
    assert {name: (tmp_path / name).read_text() for name in wanted} == wanted


def test_hostile_files_are_compared_in_bounded_time() -> None:
    chance = random.Random(6)
    lines = [f"{n}\n" for n in range(20_000)]
    few = [chance.choice("ab") + "\n" for _ in range(20_000)]
    started = time.process_time()
    for one, other in [(lines, lines[::-1]), (lines, chance.sample(lines, len(lines))),
                       (few, few[::-1]), (few, chance.sample(few, len(few)))]:  # fmt: skip
        blocks(one, other)
    assert time.process_time() - started < 60  # without a bound, it is hours


def test_who_finds_nothing_is_told_only_what_may_be_why(tools, shared_box):
    shared_box.files.write_files({"a.py": "x\n", "app/[id]/page": ""})
    assert works(tools, "grep", pattern="none") == "(no matches)"
    assert "unless it is a known language" in works(tools, "grep", pattern="x", type="klingon")
    assert "write [[]" in works(tools, "glob", pattern="app/[id]/*")
    assert works(tools, "glob", pattern="app/[[]id]/*") == "app/[id]/page"
    assert works(tools, "glob", pattern="*.rs") == "(nothing found)"
    shared_box.files.write_files({".gitignore": "*.log\n", "d/b": ""})
    assert "set ignored" in works(tools, "grep", pattern="none", path="d")
    assert works(tools, "grep", pattern="none", path="a.py") == "(no matches)"
