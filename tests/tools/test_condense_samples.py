"""What the families make of what their programs print."""

from __future__ import annotations

import json
import re

import pytest
from benchmarks.tokens.samples import Sample, samples

from hutch.tools.condense import CondensedOutput, condense
from hutch.tools.condense.stream import Screen

STATUS = """\
On branch main
Your branch is ahead of 'origin/main' by 2 commits.
  (use "git push" to publish your local commits)

Changes to be committed:
  (use "git restore --staged <file>..." to unstage)
\tmodified:   src/app.py
\tnew file:   src/new.py

Changes not staged for commit:
  (use "git add/rm <file>..." to update what will be committed)
  (use "git restore <file>..." to discard changes in working directory)
\tdeleted:    old.py

Untracked files:
  (use "git add <file>..." to include in what will be committed)
""" + "".join(f"\tdocs/pictures/large/{name}.png\n" for name in "abcdefghijklmnopqrstuvwxyz")


def shown(command: str, text: str, code: int = 0) -> CondensedOutput:
    found = condense(command, text.encode(), code, recall="o1")
    assert len(found.text) < len(text)
    return found


def test_git_status_keeps_every_file_and_drops_the_advice() -> None:
    found = shown("git status", STATUS)
    assert found.hidden_lines == 0
    assert "staged:\n M src/app.py\n A src/new.py\nnot staged:\n D old.py\nuntracked:" in found.text
    assert "docs/pictures/large/: a.png b.png c.png" in found.text
    assert "(use" not in found.text and "ahead of 'origin/main' by 2" in found.text


def a_commit(number: int) -> str:
    return (
        f"commit {number:040x}\nAuthor: Ann Other <ann@example.org>\n"
        f"Date:   Tue Jan 2 12:0{number % 10}:00 2024 +0100\n\n    Change number {number}\n\n"
        f"    Because of {number} reasons,\n    which are long and never read.\n\n"
    )


def test_git_log_is_a_line_for_each_commit() -> None:
    found = shown("git log", "".join(map(a_commit, range(50))))
    lines = found.text.splitlines()
    assert lines[0].startswith("[50 lines of full hashes and times, days and authors as above hid")
    assert lines[1] == "000000000 2024-01-02 12:00 Ann Other <ann@example.org>: Change number 0"
    assert lines[8] == "000000000 12:07: Change number 7"
    assert lines[51] == "[100 lines of commit messages hidden]"


def test_of_a_long_git_log_every_commit_is_shown() -> None:
    text = shown("git log -90", "".join(map(a_commit, range(90)))).text
    assert [f": Change number {number}\n" in text for number in range(90)] == [True] * 90


def test_a_short_git_log_keeps_its_messages() -> None:
    found = shown("git log -5", "".join(map(a_commit, range(5))))
    assert "commit messages" not in found.text and "  Because of 4 reasons," in found.text


def test_a_bar_of_signs_is_told_as_numbers_that_are_true() -> None:
    bars = {
        "small.py  |  5 +++--": "small.py | 5 +3-2",
        "large.py  | 200 ++++++++++------": "large.py | 200 ~+125-75",
        "added.py  | 300 +++++++++++": "added.py | 300 +300",
        "gone.py   | 74 ----": "gone.py | 74 -74",
        "moved.py  |  0": "moved.py  |  0",
        "image.png | Bin 0 -> 99 bytes": "image.png | Bin 0 -> 99 bytes",
    }
    text = a_commit(1) * 4 + "".join(f" {line}\n" for line in bars)
    assert shown("git log --stat", text).text.splitlines()[-6:] == [
        f" {one}" for one in bars.values()
    ]


def test_three_commits_are_told_to_the_letter() -> None:
    text = "".join(map(a_commit, range(3))) + "    and on\n" * 40
    found = shown("git log -3", text)
    assert f"{1:040x} 2024-01-02 12:01:00 +0100 Ann Other: Change number 1\n" in found.text
    assert found.hidden_lines == 0


def test_an_author_with_two_addresses_is_told_with_the_right_one() -> None:
    other = a_commit(1).replace("ann@example.org", "ann@home.example")
    found = shown("git log -5", a_commit(0) + other + a_commit(2) * 2)
    assert [re.findall("<.*>", line) for line in found.text.splitlines() if "Change" in line] == [
        ["<ann@example.org>"], ["<ann@home.example>"], ["<ann@example.org>"], [],
    ]  # fmt: skip


def test_blame_says_once_who_wrote_lines_in_a_row() -> None:
    text = "".join(
        f"^abcdef1 src/a.py (Ann Other 2024-01-02 12:00:00 +0100 {n:3}) f(x) # {n}\n"
        for n in range(1, 40)
    )
    assert shown("git blame a.py", text).text.startswith(
        "^abcdef1 src/a.py (Ann Other 2024-01-02 12:00:00 +0100)\n1 f(x) # 1\n2 f(x) # 2\n"
    )


def a_diff(name: str, lines: int) -> str:
    head = (
        f"diff --git a/{name} b/{name}\nindex 1234567..89abcde 100644\n--- a/{name}\n+++ b/{name}\n"
    )
    return head + f"@@ -1,{lines} +1,{lines} @@\n" + "".join(
        f" context {n} before\n context {n} near\n-old {n}\n+new {n}\n context {n} after\n"
        f" context {n} after that\n" for n in range(lines)
    )  # fmt: skip


def test_git_diff_keeps_every_changed_line() -> None:
    found = shown("git diff", a_diff("src/app.py", 150))
    assert found.text.startswith("=== src/app.py\n@@ -2 +2 @@\n context 0 near\n-old 0\n+new 0\n")
    assert all(f"-old {n}\n+new {n}\n" in found.text for n in range(150))
    assert 'of unchanged context and headers hidden: recall("o1")]' in found.text


def test_each_part_of_a_diff_says_at_which_line_it_begins() -> None:
    _, *hunks = shown("git diff", a_diff("a.py", 20)).text.split("@@ -")
    for number, hunk in enumerate(hunks):
        # Five lines of the file for each change, and its second is the first that is shown.
        assert hunk.startswith(f"{5 * number + 2} +{5 * number + 2} @@\n context {number} near")


def test_of_a_file_that_is_deleted_the_name_and_the_number_of_lines_is_told() -> None:
    gone = (
        "diff --git a/old.py b/old.py\ndeleted file mode 100644\nindex 1234567..0000000\n"
        "--- a/old.py\n+++ /dev/null\n@@ -1,90 +0,0 @@\n"
    ) + "".join(f"-line {n}\n" for n in range(90))
    assert shown("git diff", gone).text == (
        "=== old.py\ndeleted file mode 100644\n"
        '[91 lines of deleted old.py (+0 -90) hidden: recall("o1")]\n'
    )


def test_what_a_machine_wrote_is_only_counted_in_a_diff() -> None:
    found = shown("git diff", a_diff("package-lock.json", 100) + a_diff("a.py", 2))
    assert (
        '[601 lines of machine-made package-lock.json (+100 -100) hidden: recall("o1")]'
        in found.text
    )
    assert "-old 1\n+new 1" in found.text


def test_a_push_that_was_refused_keeps_the_reason() -> None:
    text = "".join(f"Counting objects: {n}% ({n}/100)\n" for n in range(100)) + (
        "To example.org:a.git\n ! [rejected]        main -> main (fetch first)\n"
        "error: failed to push some refs to 'example.org:a.git'\n"
    )
    found = shown("git push", text, 1)
    assert "[100 lines of progress hidden" in found.text
    assert found.text.endswith(text[text.index("To example") :])


def test_a_long_listing_says_once_what_all_have() -> None:
    text = "total 400\n" + "".join(
        f"-rw-r--r-- 1 root root {n * 37:8} Jan  2 12:{n % 60:02} file-{n}.txt\n" for n in range(40)
    )
    found = shown("ls -la", text + "drwxr-xr-x 2 ann  ann      4096 Feb  3  2023 folder\n")
    assert found.text.startswith("[unless told otherwise: -rw-r--r-- 1 root root]\ntotal 400\n")
    assert "\n111 Jan 2 12:03 file-3.txt\n" in found.text
    assert "\ndrwxr-xr-x 2 ann ann 4096 Feb 3 2023 folder\n" in found.text


def test_paths_are_grouped_by_folder() -> None:
    text = "".join(f"./src/package/module/part_{n}.py\n" for n in range(60)) + "./setup.py\n"
    found = shown("find . -name '*.py'", text)
    assert found.text.startswith("./src/package/module/: part_0.py part_1.py ")
    assert found.text.endswith(" part_59.py\n./setup.py\n") and found.hidden_lines == 0


def test_a_tree_is_drawn_with_spaces() -> None:
    text = ".\n" + "".join(f"├── folder{n}\n│   ├── a.py\n│   └── b.py\n" for n in range(30))
    assert shown("tree", text + "└── end\n").text.startswith(
        ".\n folder0\n  a.py\n  b.py\n folder1"
    )


def test_matches_stand_below_their_file() -> None:
    text = "".join(f"src/module_{n // 5}.py:{n}:    value = {n}\n" for n in range(100))
    found = shown("grep -rn value src", text)
    assert found.text.startswith("src/module_0.py:\n0:    value = 0\n1:    value = 1\n")
    assert found.hidden_lines == 0 and "99:    value = 99" in found.text


def test_of_very_many_matches_every_file_is_named() -> None:
    text = "".join(f"src/module_{n // 50}.py:{n}:    error = {n}\n" for n in range(2000))
    found = shown("rg -n error", text)
    assert all(f"src/module_{n}.py:\n" in found.text for n in range(40))
    assert "[45 lines of matches in src/module_7.py hidden" in found.text


def test_json_says_its_keys_once() -> None:
    rows = [{"id": n, "name": f"n{n}", "tags": ["a", "b"], "ratio": 0.5} for n in range(60)]
    found = shown("curl -s x | jq .", json.dumps(rows, indent=2))
    lines = found.text.splitlines()
    assert lines[0] == "[60 objects, a line each, with the values of: id, name, tags, ratio]"
    assert lines[8] == '7,"n7",["a","b"],0.5' and found.hidden_lines == 0


def test_a_number_in_json_stays_as_it_was_written() -> None:
    text = json.dumps({f"key{n}": {"price": "P"} for n in range(80)}, indent=4)
    assert '"price": 1.10' in shown("jq . x", text.replace('"P"', "1.10")).text


def test_a_log_says_its_day_once_and_counts_what_repeats() -> None:
    text = "".join(
        f"2024-01-02 12:{n // 60:02}:{n % 60:02} INFO request {n} took {n % 7} ms\n"
        for n in range(600)
    )
    bad = "2024-01-02 12:30:00 ERROR disk sda1 is full\n"
    found = shown("cat app.log", text[:20_000] + "\n" + bad + text[20_000:])
    assert found.text.startswith("[all on 2024-01-02]\n12:00:00 INFO request 0 took 0 ms\n")
    assert "12:30:00 ERROR disk sda1 is full\n" in found.text
    assert "of messages like others here hidden" in found.text and len(found.text) < 1000


def test_a_file_is_shown_in_its_own_words() -> None:
    text = "".join(f"    x = {n}\n" for n in range(500))
    found = condense("cat a.py", text.encode())
    assert (found.text, found.family) == (text, "")


# What `git status` does without: its sections and changes have shorter names, its advice goes.
ADVICE = set(
    re.findall(
        r"\w+",
        "Changes not staged for commit to be committed Untracked files modified deleted renamed "
        "new file use git add restore rm pull update what will include in discard changes your "
        "local unstage working directory",
    )
)


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.name)
def test_no_word_goes_without_a_name_under_which_it_can_be_had_again(sample: Sample) -> None:
    found = condense(sample.command, sample.raw, sample.exit_code, recall="o1")
    screen = Screen()
    plain = b"\n".join([*screen.feed(sample.raw), *screen.end()]).decode("utf-8", "replace")
    gone = set(re.findall(r"\w+", plain)) - set(re.findall(r"\w+", found.text))
    assert 'recall("o1")' in found.text or not gone - ADVICE
