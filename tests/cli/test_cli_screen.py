"""What a terminal gets to see of a program's output. No box is needed for this."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch.cli.screen import Visible
from hutch.cli.shell import TerminalModes

ATTACKS = {
    b"\x1b]52;c;aGk=\x07": "^[]52;c;aGk=^G",  # fills the clipboard
    b"\x1b]0;title\x1b\\": "^[]0;title^[\\",
    b"\x1b]8;;http://x\x07y": "^[]8;;http://x^Gy",  # a link that goes elsewhere
    b"\x1b[?1049h": "^[[?1049h",  # another screen
    b"\x1b[6n": "^[[6n",  # has the terminal type an answer
    b"\x1bP$qm\x1b\\": "^[P$qm^[\\",
    b"\x9b31m": "\\x9b31m",  # a control sequence in one byte...
    b"\xc2\x9b31m": "\\x9b31m",  # ...and the same as UTF-8
    b"a\xe2\x80\xaeb": "a\\u202eb",  # from right to left
    b"\x00\x07\x08\x0b\x0c\x7f": "^@^G^H^K^L^?",
    b"hidden\rshown": "hidden\nshown",  # writes over itself
    b"\xf3\xa0\x81\x81": "\\U000e0041",  # cannot be seen at all
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_shown_and_not_obeyed(attack: bytes) -> None:
    assert Visible().feed(attack, last=True).decode() == ATTACKS[attack]


def test_text_passes_as_it_is() -> None:
    text = "one\ttwo\nzażółć gęślą jaźń 漢字 👩‍🚀 é\n".encode()
    assert Visible().feed(text) == text


def test_lines_of_other_systems_end_once() -> None:
    assert Visible().feed(b"one\r\ntwo\r\n") == b"one\ntwo\n"


def test_a_terminal_that_is_not_utf_8_gets_no_byte_it_could_obey() -> None:
    shown = Visible("iso8859-1").feed("ě é".encode())  # 0xC4 0x9B, and 0x9B is an escape there
    assert shown == b"\\u011b \xe9"


@given(st.binary(max_size=60), st.integers(0, 60))
def test_nothing_but_text_comes_out(data: bytes, _: int) -> None:
    shown = Visible().feed(data, last=True).decode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)


@given(st.lists(st.binary(max_size=5) | st.sampled_from([b"\r", b"\n", b"\xe2\x80", b"\xae"])))
def test_it_does_not_matter_where_the_output_was_cut(pieces: list[bytes]) -> None:
    whole, cut = Visible(), Visible()
    in_pieces = b"".join([*map(cut.feed, pieces), cut.feed(b"", last=True)])
    assert in_pieces == whole.feed(b"".join(pieces), last=True)


def test_what_was_switched_on_is_switched_off_even_if_cut_in_two() -> None:
    switches = TerminalModes()
    for piece in (b"x\x1b[?10", b"49h\x1b[?25l", b"y" * 100, b"\x1b[?2004h\x1b[?2004l"):
        switches.watch(piece)
    assert switches.back() == b"\x1b[?1049l\x1b[?25h\x1b[0m"


def test_a_terminal_that_was_left_alone_is_left_alone() -> None:
    switches = TerminalModes()
    switches.watch(b"just text")
    assert switches.back() == b""
