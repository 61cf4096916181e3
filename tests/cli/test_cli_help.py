"""What `hutch` says about itself, and that docs/reference/cli.md says the same."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from prompt import Terminal, hutch

from hutch import __version__
from hutch.cli import COMMANDS

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "cli.md"
WIDE = os.environ | {"COLUMNS": "80"}


def help_of(*words: str) -> str:
    done = hutch(*words, "--help", env=WIDE)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_reference_has_the_help_word_for_word(command: str) -> None:
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert help_of(*command.split()) in blocks


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_into_80_columns(command: str) -> None:
    assert max(map(len, help_of(*command.split()).splitlines())) <= 80


def test_every_option_is_explained() -> None:
    for line in help_of("run").splitlines():
        assert not re.fullmatch(r"  --\S+( \S+)?", line) or len(line) > 22


@pytest.mark.parametrize("words", [[], ["help"], ["-h"]])
def test_help_comes_without_being_asked_by_its_full_name(words: list[str]) -> None:
    assert hutch(*words).stdout.decode() == help_of()


def test_help_of_a_command_can_be_asked_both_ways() -> None:
    assert hutch("help", "run", env=WIDE).stdout.decode() == help_of("run")


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_version_is_told(word: str) -> None:
    assert hutch(word).stdout.decode() == f"hutch {__version__}\n"


@pytest.mark.parametrize(
    ("word", "says"),
    [("runn", "did you mean `hutch run`?"), ("docter", "`hutch doctor`"),
     ("rum", "`hutch run`"), ("rmm", "`hutch rm`"), ("sotp", "`hutch stop`"),
     ("cat", "hutch run -- cat"), ("rmi", "`hutch image rm`"), ("top", "`hutch stats`"),
     ("attach", "`hutch shell SESSION`"), ("sync", "`hutch run --project . -- COMMAND`"),
     ("pytest", "hutch run --"), ("--verison", "--verison"), ("sh\x1b[2J", "^[[2J")],
)  # fmt: skip
def test_an_unknown_command_gets_advice(word: str, says: str) -> None:
    done = hutch(word)
    message = done.stderr.decode()
    assert done.returncode == 125 and message.startswith("hutch: ") and says in message
    assert message.count("\n") == 1 and "\x1b" not in message


def test_help_survives_a_reader_that_leaves() -> None:
    with Terminal("--help") as terminal:
        terminal.expect("usage: hutch")
        assert terminal.end() == 0
