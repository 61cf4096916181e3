"""The corpus: outputs of real commands, and what must still be known once they are shorter."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"


@dataclass(frozen=True)
class Sample:
    """What a command printed, stdout and stderr as they came."""

    name: str  # "pytest/failures"
    command: str
    exit_code: int
    facts: tuple[str, ...]  # texts that it holds, or "re:…" for what may be written another way
    made: str  # "box", "outside" (it needs the network), "engine" (of Docker), "hand"
    project: str  # the script in projects/ that makes the folder it runs in
    setup: str  # what happens there before, unseen

    @property
    def family(self) -> str:
        return self.name.split("/")[0]

    @property
    def path(self) -> Path:
        return CORPUS / f"{self.name}.txt"

    @property
    def raw(self) -> bytes:
        return self.path.read_bytes()


def samples() -> list[Sample]:
    text = (CORPUS / "samples.toml").read_text()
    return [
        Sample(
            one["name"],
            one["command"],
            one.get("exit", 0),
            tuple(one.get("facts", ())),
            one.get("made", "box"),
            one.get("project", "empty"),
            one.get("setup", ""),
        )
        for one in tomllib.loads(text)["sample"]
    ]


def holds(text: str, fact: str) -> bool:
    """A fact may stand anywhere, and be broken by nothing: a reader could find it with one look."""
    if fact.startswith("re:"):
        return re.search(fact[3:], text, re.MULTILINE) is not None
    return fact in text
