"""The corpus of real outputs: much shorter, nothing lost, nothing longer."""

from __future__ import annotations

import re

import pytest
from benchmarks.tokens.samples import CORPUS, Sample, holds, samples
from benchmarks.tokens.scoring import Score, score

SAMPLES = samples()
TARGET = 0.6  # so much less than raw


@pytest.fixture(scope="module")
def scores() -> list[Score]:
    return [score(sample, lambda text: len(text.encode())) for sample in SAMPLES]


def test_the_corpus_is_made_shorter_by_as_much_as_is_promised(scores: list[Score]) -> None:
    assert sum(s.hutch for s in scores) <= (1 - TARGET) * sum(s.raw for s in scores)


def test_no_sample_becomes_longer(scores: list[Score]) -> None:
    assert [s.sample.name for s in scores if s.hutch > s.raw] == []


def test_every_fact_is_kept_or_one_recall_away(scores: list[Score]) -> None:
    assert {s.sample.name: s.lost for s in scores if s.lost} == {}


def test_what_failed_is_there_without_recall(scores: list[Score]) -> None:
    # Sources of a diff are facts as well, and `exit 1` of diff and grep is no failure.
    failed = [s for s in scores if s.sample.exit_code and s.sample.family not in ("diff", "grep")]
    hidden = {s.sample.name: s.recallable for s in failed if s.recallable}
    told = {name for name, facts in hidden.items() if not all(map(_went_well, facts))}
    assert len(failed) > 25 and told == set()


def _went_well(fact: str) -> bool:
    return bool(re.search(r"PASSED|^TestToUintE$|test_the_bank|needs a bank", fact))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_sample_says_the_facts_it_is_asked_for(sample: Sample) -> None:
    text = sample.raw.decode()
    assert [fact for fact in sample.facts if not holds(text, fact)] == []


def test_every_file_of_the_corpus_is_a_sample() -> None:
    assert {*CORPUS.rglob("*.txt")} == {sample.path for sample in SAMPLES}


def test_the_corpus_tells_nothing_of_the_machine_it_was_made_on() -> None:
    # Packages come from hosts of their maker's machine, which stand in the corpus as one example.
    tells = re.compile(
        rb"/(?:root|tmp/corpus-|opt/kitchen)|https?://[\w.-]*(?:registry|proxy|index)"
    )
    assert [sample.name for sample in SAMPLES if _tells(tells, sample.raw)] == []


def _tells(pattern: re.Pattern[bytes], raw: bytes) -> bool:
    return bool(pattern.search(raw.replace(b"`/root`", b"")))  # a page of our docs names it
