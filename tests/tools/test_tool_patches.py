"""apply_patch: both formats, all or nothing."""

from __future__ import annotations

import difflib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hutch import Sandbox
from hutch.errors import Conflict, InvalidRequest
from hutch.tools import Toolbox, patching


@pytest.fixture
def tools(shared_box: Sandbox) -> Toolbox:
    shared_box.shell.run("cd /workspace; find . -mindepth 1 -delete")
    return Toolbox(shared_box)


def works(tools: Toolbox, patch: str) -> str:
    answer = tools.call("apply_patch", {"patch": patch})
    assert not answer.failed, answer.text
    return answer.text


def fails(tools: Toolbox, patch: str) -> str:
    answer = tools.call("apply_patch", {"patch": patch})
    assert answer.failed, answer.text
    return answer.text


def between(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def test_files_are_added_changed_moved_and_deleted_by_one_patch(tools, shared_box):
    shared_box.files.write(
        "src/a.py", "import os\n\ndef a():\n    return 1\n\ndef b():\n    return 1\n"
    )
    shared_box.files.write("old.sh", "#!/bin/sh\nexit 1\n", mode=0o755)
    shared_box.files.write("gone", "x")
    said = works(tools, between(
        "*** Add File: new/f.txt", "+one", "+", "+two",
        "*** Update File: src/a.py", "@@ def b():", "-    return 1", "+    return 2",
        "*** Update File: old.sh", "*** Move to: bin/new.sh", "@@", " #!/bin/sh", "-exit 1",
        "+exit 0",
        "*** Delete File: gone",
    ))  # fmt: skip
    assert said.split("\n") == [
        "Added new/f.txt", "Updated src/a.py (+1 -1)", "Moved old.sh to bin/new.sh (+1 -1)",
        "Deleted gone",
    ]  # fmt: skip
    assert shared_box.files.read("new/f.txt") == "one\n\ntwo\n"
    assert shared_box.files.read("src/a.py").endswith("return 1\n\ndef b():\n    return 2\n")
    moved = shared_box.files.stat("bin/new.sh")
    assert (shared_box.files.read("bin/new.sh"), moved.mode) == ("#!/bin/sh\nexit 0\n", 0o755)
    assert shared_box.files.glob("*") == ["/workspace/bin", "/workspace/new", "/workspace/src"]


def test_nothing_is_changed_if_a_part_does_not_fit(tools, shared_box):
    shared_box.files.write("a", "one\ntwo\nthree\n")
    said = fails(tools, between(
        "*** Add File: b", "+x",
        "*** Update File: a", "-one", "+1", "@@", " twoo", "-three", "+3", "@@ four", "+5",
        "*** Delete File: none", "*** Add File: a", "+y",
    ))  # fmt: skip
    assert "hunk 2 of a does not fit" in said and "The nearest: \n2\ttwo\n3\tthree" in said
    assert "hunk 3 of a does not fit: there is no line 'four'" in said
    assert "there is no file none" in said and "a is there already" in said
    assert said.endswith("Nothing was changed.")
    assert shared_box.files.read("a") == "one\ntwo\nthree\n" and not shared_box.files.exists("b")


def test_what_was_written_is_put_back_if_a_later_write_fails(tools, shared_box):
    shared_box.files.write("a", "one\n")
    shared_box.shell.run("mkdir locked; touch locked/f; chmod 500 locked")
    said = fails(tools, between(
        "*** Update File: a", "-one", "+1", "*** Add File: b", "+x", "*** Delete File: locked/f",
    ))  # fmt: skip
    assert said.endswith("Nothing was changed.")
    assert shared_box.files.read("a") == "one\n" and not shared_box.files.exists("b")
    assert shared_box.files.exists("locked/f")
    shared_box.shell.run("chmod 700 locked")


def test_a_unified_diff_is_applied_where_it_fits(tools, shared_box):
    shared_box.files.write("a", "x\n" * 50 + "one\ntwo\n" + "x\n" * 50 + "one\ntwo\n")
    shared_box.files.write("gone", "g\n")
    said = works(tools, """\
diff --git a/a b/a
index 123..456 100644
--- a/a
+++ b/a
@@ -101,3 +101,9 @@ def somewhere():
 x
 one
-two
+TWO
diff --git a/gone b/gone
deleted file mode 100644
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-g
--- /dev/null
+++ b/new file\t2026-01-01
@@ -0,0 +1 @@
+n
\\ No newline at end of file
""")  # fmt: skip
    assert said == "Updated a (+1 -1)\nDeleted gone\nAdded new file"
    assert shared_box.files.read("a") == "x\n" * 50 + "one\ntwo\n" + "x\n" * 50 + "one\nTWO\n"
    assert shared_box.files.read("new file") == "n"


def test_a_renamed_file_is_found_in_a_diff_of_git(tools, shared_box):
    shared_box.files.write("a", "one\n")
    works(tools, "diff --git a/a b/b\nsimilarity index 100%\nrename from a\nrename to b\n")
    works(
        tools,
        "diff --git a/b b/c\nrename from b\nrename to c\n--- a/b\n+++ b/c\n@@ -1 +1 @@\n-one\n+1\n",
    )
    assert shared_box.files.read("c") == "1\n" and len(shared_box.files.list()) == 1


def test_line_ends_and_bytes_that_are_no_text_are_kept(tools, shared_box):
    shared_box.files.write("a", b"one\r\n\xff\r\nthree")
    works(tools, between("*** Update File: a", "-one", "+1", "+2"))
    assert shared_box.files.read("a", "bytes") == b"1\r\n2\r\n\xff\r\nthree"
    works(tools, "--- a/a\n+++ b/a\n@@ -4 +4 @@\n-three\n\\ No newline at end of file\n+3\n")
    assert shared_box.files.read("a", "bytes") == b"1\r\n2\r\n\xff\r\n3\r\n"


def test_a_patch_is_forgiven_what_models_get_wrong(tools, shared_box):
    shared_box.files.write("a.py", "def f():\n\treturn “1”\n\nend\n")
    # In a fence, with spaces for the tab, other quotes, and a blank line too many.
    works(tools, "```diff\n" + between(
        "*** Update File: a.py", "@@ def f():", '-    return "1"', "+\treturn 2", " ", "",
    ) + "\n```\n")  # fmt: skip
    assert shared_box.files.read("a.py") == "def f():\n\treturn 2\n\nend\n"
    works(tools, between("*** Update File: a.py", "@@", "+appended"))
    works(tools, between("*** Update File: a.py", "@@ def f():", '+    """Text."""'))
    assert shared_box.files.read("a.py").startswith('def f():\n    """Text."""\n\treturn 2')
    assert shared_box.files.read("a.py").endswith("end\nappended\n")


@pytest.mark.parametrize(
    ("patch", "said"),
    [("hello", "this is not a patch"), (between(), "changes nothing"),
     (between("*** Update File: a"), "does not say what to change in a"),
     (between("*** Add File: a", "no plus"), "line 3 of the patch"),
     (between("*** Rename File: a"), "line 2 of the patch is '*** Rename File: a'"),
     ("--- a/x\n+++ b/x\n@@ -1 +1 @@\nBinary files a/x and b/x differ\n", "binary")],
)  # fmt: skip
def test_what_is_no_patch_is_answered_with_what_one_is(tools, patch, said):
    assert said in fails(tools, patch)


LINES = some.lists(
    some.sampled_from(["a", "b", "c", "", " d", "--- x", "+++ y", "@@ z"]), max_size=12
)


@settings(max_examples=100, deadline=None, database=None)
@given(LINES, LINES, some.booleans())
def test_a_unified_diff_of_any_two_texts_makes_the_one_the_other(
    before: list[str], after: list[str], ends: bool
) -> None:
    one, other = ("".join(f"{line}\n" for line in lines) for lines in (before, after))
    if not ends:
        one, other = one.removesuffix("\n"), other.removesuffix("\n")
    if one == other or not before or not after or not one:
        return
    lines: list[str] = []
    pairs = one.splitlines(keepends=True), other.splitlines(keepends=True)
    for line in difflib.unified_diff(*pairs, "a/f", "b/f"):
        lines.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    (change,) = patching.parse("".join(lines))
    assert patching.apply(one, change.hunks, "f") == other


@settings(max_examples=100, deadline=None, database=None)
@given(some.text(alphabet="ab \n\r@+-*\\\t—“", max_size=200), some.text(max_size=60))
def test_whatever_is_sent_is_a_patch_or_is_refused(patch: str, text: str) -> None:
    for begin in (
        "",
        "*** Begin Patch\n*** Update File: f\n",
        "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n",
    ):
        try:
            for change in patching.parse(begin + patch):
                patching.apply(text, change.hunks, change.path)
        except (InvalidRequest, Conflict):
            pass


def test_an_edit_by_a_model_is_what_python_would_replace(tools: Any, shared_box: Any) -> None:
    @settings(max_examples=15, deadline=None, database=None)
    @given(some.text("ab\n", min_size=1, max_size=20), some.text("ab\n", min_size=1, max_size=3),
           some.text("abé\n", max_size=3), some.booleans())  # fmt: skip
    def check(text: str, old: str, new: str, every: bool) -> None:
        shared_box.files.write("f", text)
        fresh = Toolbox(shared_box)
        answer = fresh.edit(path="f", old_string=old, new_string=new, replace_all=every)
        fits = old != new and (text.count(old) == 1 or (every and old in text))
        assert answer.failed is not fits
        assert shared_box.files.read("f") == (text.replace(old, new) if fits else text)

    check()
