"""Every fuzz target holds for its seeds and for a bounded number of mutations of them.

The mutations are the same in every run. `HUTCH_FUZZ_INPUTS` sets how many there are per target;
fuzz/README.md says what a target has to define.
"""

from __future__ import annotations

import os
import random
import runpy
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TARGETS = sorted((Path(__file__).parents[1] / "fuzz").glob("[!_]*.py"))
INPUTS = int(os.environ.get("HUTCH_FUZZ_INPUTS", "300"))
MAX_INPUT = 64 * 1024
WORDS = (
    b"\0", b"\xff", b"\n", b"\r", b"\r\n", b" ", b"/", b"../", b"\\", b'"', b"'", b"{", b"}", b"[",
    b"]", b",", b":", b";", b"-", b"--", b"=", b"0", b"-1", b"1e999", b"NaN", b"null", b"true",
    b"99999999999999999999", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0\0\0\0\0",
    b"\\u0000", b"\\ud800", b"\xe2\x80\xa8", b"\xc0\x80", b"77777777777",
)  # fmt: skip


FAKE_ATHERIS = """
import contextlib
def instrument_imports(include): return contextlib.nullcontext()
def Setup(argv, one_input): one_input(b"")
def Fuzz(): print("fuzzing")
"""


def mutations(seeds: list[bytes], chance: random.Random) -> Iterator[bytes]:
    """Without end: seeds with some bytes changed, added, removed, repeated or exchanged."""
    while True:
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.choice((1, 1, 2, 3, 8, 30))):
            place = chance.randrange(len(data) + 1)
            size = chance.choice((1, 2, 4, 16, 100, 512, 513))
            match chance.randrange(7):
                case 0 if place < len(data):
                    data[place] ^= 1 << chance.randrange(8)
                case 1:
                    data[place : place + 1] = chance.randbytes(1)
                case 2:
                    data[place:place] = chance.choice(WORDS)
                case 3:
                    word = chance.choice(WORDS)
                    data[place : place + len(word)] = word
                case 4:
                    del data[place : place + size]
                case 5:
                    data[place:place] = data[place : place + size]
                case _:
                    other = chance.choice(seeds)
                    start = chance.randrange(len(other) + 1)
                    data[place : place + size] = other[start : start + size]
        if chance.random() < 0.1:
            del data[chance.randrange(len(data) + 1) :]
        yield bytes(data[:MAX_INPUT])


def loaded(path: Path) -> dict[str, Any]:
    return runpy.run_path(str(path), run_name=f"fuzz_{path.stem}")


def test_no_target_takes_the_name_of_a_standard_module() -> None:
    """`python fuzz/x.py` puts fuzz/ first on the path: others would import it instead."""
    assert TARGETS and not {path.stem for path in TARGETS} & sys.stdlib_module_names


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: path.stem)
def test_a_fuzz_target_is_a_program_that_writes_its_seeds_and_hands_over(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "atheris.py").write_text(FAKE_ATHERIS)
    done = subprocess.run(
        [sys.executable, str(path), str(tmp_path / "corpus")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "fuzzing\n"
    assert (tmp_path / "corpus" / "seed-0").read_bytes()


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: path.stem)
def test_a_fuzz_target_holds(path: Path) -> None:
    target = loaded(path)
    seeds = list(target["seeds"]())
    assert seeds and all(isinstance(seed, bytes) and seed for seed in seeds)
    mutated = mutations(seeds, random.Random(zlib.crc32(path.stem.encode())))
    for data in (b"", *seeds, *(next(mutated) for _ in range(INPUTS))):
        try:
            target["one_input"](data)
        except Exception as exc:
            exc.add_note(f"the input, for `python {path.name} FILE`: bytes.fromhex({data.hex()!r})")
            raise
