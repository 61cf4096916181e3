"""What was saved is counted honestly, and counting it does no harm."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hutch.cli import gain
from hutch.errors import InvalidRequest
from hutch.tools import tokens, usage
from hutch.tools.condense import condense


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("HUTCH_GAIN", raising=False)
    return tmp_path


def note(command: str, output: str) -> None:
    usage.note_run(condense(command, output.encode(), recall="o1"), output)


def test_only_family_and_program_are_written_down(folder: Path) -> None:
    note("./deploy --token hunter2 /home/ann", "step 1 of 2 secret\n" * 400)
    text = (folder / "gain.jsonl").read_text()
    assert "deploy" in text
    assert not any(word in text for word in ("hunter2", "ann", "secret", "step"))


def test_what_agents_would_have_cut_is_not_called_saved() -> None:
    note("./run", "a line\n" * 1_000_000)
    (entry,) = usage.entries()
    assert entry.raw_bytes == usage.SHOWN_ANYWAY


def test_recalling_is_taken_off(capsys: pytest.CaptureFixture[str]) -> None:
    note("./run", "".join(f"item {n} is done\n" for n in range(500)))
    usage.note_recall("other", "run", "x" * 400)
    assert gain.main(["--json"], None) == 0
    told = json.loads(capsys.readouterr().out)
    total = told["total"]
    assert told["unit"] in ("bytes", "tokens")
    assert total["recalled"] > 0
    assert total["saved"] == total["printed"] - total["shown"] - total["recalled"]


def test_the_table_says_what_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    note("./run", "".join(f"item {n} is done\n" for n in range(500)))
    assert gain.main([], None) == 0
    told = capsys.readouterr().out
    header, row, *_ = (line.split() for line in told.splitlines())
    assert header[:3] == ["PROGRAM", "FAMILY", "CALLS"] and row[:3] == ["run", "other", "1"]
    assert "\nin bytes: " in told or "\nin tokens: " in told


def test_tokens_are_counted_by_a_tokenizer_that_needs_no_network(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tokens.found() is not None  # rs-bpe is among what tests need
    name, count = tokens.found()
    assert name == "rs_bpe o200k_base"
    assert (count(""), count("hello world"), count("half a character: \ud800")) == (0, 2, 5)
    note("./run", "hello world\n" * 3)
    (entry,) = usage.entries()
    assert (entry.raw_tokens, entry.shown_tokens, entry.counted_calls) == (9, 9, 1)
    assert gain.main([], None) == 0
    assert capsys.readouterr().out.endswith("\nin tokens: counted by rs_bpe o200k_base\n")


def test_each_program_and_family_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("git log", "git log", "./run"):
        note(command, "short\n")
    usage.note_recall("", "git", "x" * 400)
    assert gain.main(["--json"], None) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {(row["program"], row["family"]): row for row in told["programs"]}
    assert set(rows) == {("git", "none"), ("run", "none")}
    assert rows["git", "none"]["calls"] == 2 and rows["git", "none"]["recalled"] > 0
    assert told["total"]["calls"] == 3


def test_it_can_be_forgotten_and_turned_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note("./run", "x\n")
    assert gain.main(["--reset"], None) == 0
    assert usage.entries() == []
    monkeypatch.setenv("HUTCH_GAIN", "off")
    note("./run", "x\n")
    assert usage.entries() == []
    assert gain.main(["--since", "7"], None) == 0
    assert capsys.readouterr().out.startswith("nothing counted yet")


def test_the_file_stays_small_and_loses_no_count(folder: Path) -> None:
    big = usage.MAX_FILE // 60
    for _ in range(3):
        with (folder / "gain.jsonl").open("a") as file:
            file.write('{"day": "2024-01-02", "family": "ls", "program": "ls", "calls": 1}\n' * big)
        note("./run", "x\n")
    assert (folder / "gain.jsonl").stat().st_size < 1000
    assert sum(entry.calls for entry in usage.entries()) == 3 * big + 3
    assert sum(entry.calls for entry in usage.entries("2024-01-03")) == 3


def test_many_can_count_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: note("./run", "x\n"), range(200)))
    assert sum(entry.calls for entry in usage.entries()) == 200


def test_a_ledger_that_cannot_be_written_is_nobodys_trouble(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("HUTCH_DATA_DIR", str(folder / "file"))
    note("./run", "x\n")
    monkeypatch.setenv("HUTCH_DATA_DIR", str(folder))
    (folder / "gain.jsonl").write_bytes(b'{"day": 3\n\xff\n[]\n{"calls": "many"}\n')
    note("./run", "x\n")
    assert sum(entry.calls for entry in usage.entries()) == 1


def test_filters_are_checked_by_their_own_tests(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "[[filter]]\nname='a'\nmatch='b'\nstrip=['noise']\n[[filter.test]]\n"
    path = folder / "filters.toml"
    path.write_text(
        text + 'output = "a noise that is long enough\\nfact"\nshows = "[1 line hidden]\\nfact"'
    )
    assert gain.main(["--check-filters", str(path)], None) == 0
    path.write_text(text + 'output = "a noise that is long enough\\nfact"\nshows = "else"')
    assert gain.main(["--check-filters", str(path)], None) == 1
    assert "a, test 1: expected" in capsys.readouterr().out
    path.write_text("[[filter]]")
    with pytest.raises(InvalidRequest):
        gain.main(["--check-filters", str(path)], None)


def test_it_is_a_command_of_hutch(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "hutch", "gain"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing counted yet" in done.stdout
