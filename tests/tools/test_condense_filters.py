"""Filters of one's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hutch.errors import InvalidRequest
from hutch.tools.condense import condense, custom
from hutch.tools.condense.custom import load, own_filters, parse

FILE = """
[[filter]]
name = "plan"
match = '^terraform plan'
replace = [{ pattern = '(\\w+)-secret', with = '\\1' }]
strip = ['Refreshing']
max_lines = 6

[[filter]]
name = "quiet"
match = '^quiet'
keep = ['^wanted']
on_empty = "nothing of interest"
"""


def shown(command: str, *lines: str) -> str:
    data = "\n".join(lines).encode()
    return condense(command, data, recall="o1", filters=parse(FILE, "filters.toml")).text


def test_lines_are_stripped_replaced_and_counted() -> None:
    noise = [f"Refreshing state of number {n}" for n in range(9)]
    text = shown("terraform plan", *noise, "a-secret b", *noise, "Plan: 1 to add")
    assert text.splitlines() == [
        '[9 lines hidden: recall("o1")]', "a b", "[9 lines hidden]", "Plan: 1 to add",
    ]  # fmt: skip


def test_only_what_is_kept_is_shown_and_what_failed() -> None:
    text = shown("quiet", *["not this line, nor any like it"] * 9, "wanted: x", "error: y")
    assert text.splitlines() == ['[9 lines hidden: recall("o1")]', "wanted: x", "error: y"]


def test_what_is_left_of_nothing_is_said() -> None:
    text = shown("quiet", *[f"not this line, nor any like it {n}" for n in range(9)])
    assert text == 'nothing of interest\n[9 lines hidden: recall("o1")]'


def test_other_commands_are_not_touched() -> None:
    assert shown("echo", "wanted", "Refreshing") == "wanted\nRefreshing"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[filter]]\nname = 'a'\nmatch = '('", "f.toml, line 1: '(' is not a regular expression"),
        ("\n[[filter]]\nname = 'a'", "f.toml, line 2: a filter needs 'match'"),
        ("[[filter]]\nname='a'\nmatch='b'\nstip=[]", "'stip' is unknown; a filter has name, match"),
        ("[[filter]]\nname='a'\nmatch='b'\nhead='x'", "head is not a int"),
        ("[filters]", r"\[filters\] is unknown; filters are \[\[filter\]\]"),
        ("a = [\n", "f.toml: Invalid value"),
        (
            "[[filter]]\nname='a'\nmatch='b'\nreplace=[{pattern='x',with='\\2'}]",
            "invalid group reference 2",
        ),
        (
            "[[filter]]\nname='a'\nmatch='b'\nreplace=[{pattern='x',with='\\g<z>'}]",
            "does not fit 'x'",
        ),
        ("a=" + "[" * 5000, "f.toml is nested too deeply"),
    ],
)
def test_a_file_that_is_wrong_says_where(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said.replace("(' is", r"\(' is")):
        parse(text, "f.toml")


def test_the_users_own_file_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HUTCH_FILTERS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert own_filters() == ()
    (tmp_path / "hutch").mkdir()
    (tmp_path / "hutch/filters.toml").write_text(FILE)
    assert [each.name for each in own_filters()] == ["plan", "quiet"]
    monkeypatch.setenv("HUTCH_FILTERS", str(tmp_path / "gone.toml"))
    with caplog.at_level("WARNING", "hutch"):
        assert own_filters() == own_filters() == ()
    assert [r.getMessage() for r in caplog.records] == [
        f"filters are not used: {tmp_path}/gone.toml cannot be read (No such file or directory)"
    ]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="pipe is not a regular file"):
        load(tmp_path / "pipe")


@pytest.mark.parametrize("before", ["cd x && ", "FOO=1 ", "timeout 5 ", "sh -c '", "/opt/bin/"])
def test_a_filter_finds_its_program_behind_what_is_around_it(before: str) -> None:
    lines = [f"not this line, nor any like it {n}" for n in range(9)]
    end = "'" * before.endswith("'")
    assert shown(f"{before}quiet{end}", *lines).startswith("nothing of interest\n")


def test_a_filter_that_takes_too_long_is_not_used_and_that_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom, "SECONDS", -1)
    filters = parse("[[filter]]\nname='slow'\nmatch='^x'\nstrip=['(1+)+$']", "f.toml")
    data = b"".join(b"step %d of 500 done\n" % n for n in range(500))
    with caplog.at_level("WARNING", "hutch"):
        for _ in range(2):
            assert condense("x", data, filters=filters).text == condense("x", data).text
    assert [r.getMessage() for r in caplog.records] == [
        "filter 'slow' is not used: it takes more than -1 s"
    ]


def test_a_line_as_long_as_a_file_is_not_given_to_a_pattern() -> None:
    filters = parse("[[filter]]\nname='slow'\nmatch='^x'\nstrip=['(1+)+$', 'y']", "f.toml")
    found = condense("x", b"1" * 3000 + b"!\ny\nz\n", recall="o1", filters=filters)
    assert found.text.endswith('!\n[1 line hidden: recall("o1")]\nz\n') or found.family == ""
