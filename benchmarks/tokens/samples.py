"""The corpus: outputs of real commands, and what must still be known once they are shorter."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .facts import found

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
UNSEEN = HERE / "unseen"  # no filter is written for these


@dataclass(frozen=True)
class Sample:
    """What a command printed, stdout and stderr as they came."""

    name: str  # "pytest/failures"
    command: str
    exit_code: int
    facts: tuple[str, ...]  # texts that it holds, or "re:…" for what may be written another way
    made: str  # "box", "outside" (it needs the network), "engine" (of Docker), "hand"
    project: str  # the script in projects/ that makes the folder it runs in
    setup: str  # what happens there before
    folder: Path = CORPUS
    rules: tuple[str, ...] = ()  # what finds its facts, where they are not written down

    @property
    def family(self) -> str:
        return self.name.split("/")[0]

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.txt"

    @property
    def raw(self) -> bytes:
        return self.path.read_bytes()


def samples(folder: Path = CORPUS) -> list[Sample]:
    text = (folder / "samples.toml").read_text()
    return [_sample(one, folder) for one in tomllib.loads(text)["sample"]]


def _sample(one: dict[str, Any], folder: Path) -> Sample:
    sample = Sample(
        one["name"],
        one["command"],
        one.get("exit", 0),
        tuple(one.get("facts", ())),
        one.get("made", "box"),
        one.get("project", "empty"),
        one.get("setup", ""),
        folder,
        tuple(one.get("rules", ())),
    )
    if not sample.rules or not sample.path.exists():
        return sample
    return replace(sample, facts=found(sample.rules, sample.raw))


def holds(text: str, fact: str) -> bool:
    """A fact may stand anywhere, and be broken by nothing: a reader could find it with one look."""
    if fact.startswith("re:"):
        return re.search(fact[3:], text, re.MULTILINE) is not None
    return fact in text
