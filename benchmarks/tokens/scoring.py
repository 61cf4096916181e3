"""What becomes of a sample: how long it is afterwards, and where its facts are."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from hutch.tools.condense import condense

from .samples import Sample, holds

RECALL = "k7f3"
Count = Callable[[str], int]


@dataclass(frozen=True)
class Score:
    sample: Sample
    family: str
    raw: int
    hutch: int
    rtk: int | None
    kept: int
    recallable: tuple[str, ...]  # what `recall` brings back, given a text
    lost: tuple[str, ...]

    @property
    def saved(self) -> float:
        return 1 - self.hutch / self.raw if self.raw else 0.0


def score(sample: Sample, count: Count, *, rtk: bool = False) -> Score:
    raw = sample.raw
    text = raw.decode(errors="replace")
    made = condense(sample.command, raw, sample.exit_code, recall=RECALL)
    gone = [fact for fact in sample.facts if not holds(made.text, fact)]
    can_ask = f'recall("{RECALL}")' in made.text
    recallable = tuple(fact for fact in gone if can_ask and _brought_back(text, fact))
    return Score(
        sample, made.family, count(text), count(made.text),
        _by_rtk(sample, count) if rtk else None,
        len(sample.facts) - len(gone), recallable,
        tuple(fact for fact in gone if fact not in recallable),
    )  # fmt: skip


def _brought_back(text: str, fact: str) -> bool:
    """`recall` gives the lines that contain a text: so the fact must be in one."""
    return any(holds(line, fact) for line in text.split("\n"))


def _by_rtk(sample: Sample, count: Count) -> int | None:
    """RTK runs commands itself; only versions with `rtk pipe` can be given what one printed."""
    if not (binary := shutil.which("rtk")):
        return None
    program = sample.command.split()[0]
    done = subprocess.run(
        [binary, "pipe", "--filter", program], input=sample.raw, capture_output=True, timeout=30
    )
    return count(done.stdout.decode(errors="replace")) if done.returncode == 0 else None
