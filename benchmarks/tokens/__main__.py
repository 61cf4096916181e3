"""`benchmarks/tokens/run`: what the corpus costs a model, raw and shortened, and what is lost."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from statistics import median

from hutch.tools.condense import condense

from .counting import counter
from .samples import CORPUS, UNSEEN, samples
from .scoring import RECALL, Score, score

TARGET = 0.6
UNSEEN_TARGET = 0.35  # of ordinary outputs that no filter was written for
ORDINARY = 300, 2000  # tokens of an ordinary output


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/tokens/run", description=__doc__)
    parser.add_argument("only", nargs="*", help="names of samples, or families")
    parser.add_argument("--bytes", action="store_true", help="count bytes, whatever is installed")
    parser.add_argument("--json", action="store_true", help="print numbers for programs")
    parser.add_argument("--show", action="store_true", help="print what a model reads, too")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a promise is missed")
    parser.add_argument("--unseen", action="store_true", help="the corpus no filter was made for")
    parser.add_argument(
        "--totals", action="store_true", help="print no samples, only what it comes to"
    )
    chosen = parser.parse_args(arguments)
    unit, count = ("bytes", lambda t: len(t.encode())) if chosen.bytes else counter()
    wanted = [
        s
        for s in samples(UNSEEN if chosen.unseen else CORPUS)
        if not chosen.only or {s.name, s.family} & {*chosen.only}
    ]  # fmt: skip
    if not wanted:
        parser.error("no sample of this name")
    with_rtk = shutil.which("rtk") is not None
    scores = [score(sample, count, rtk=with_rtk) for sample in wanted]
    if chosen.json:
        print(json.dumps(as_json(unit, scores), indent=1))
    else:
        if not chosen.totals:
            tell(scores, with_rtk=with_rtk)
        tell_totals(unit, scores, with_rtk=with_rtk)
    if chosen.show:
        show(scores)
    ordinary = [s for s in scores if ORDINARY[0] <= s.raw <= ORDINARY[1]]
    short = total(ordinary) < UNSEEN_TARGET if chosen.unseen else total(scores) < TARGET
    missed = short or any(s.lost or s.hutch > s.raw for s in scores)
    return 1 if missed and chosen.strict else 0


def bands(scores: list[Score]) -> dict[str, list[Score]]:
    """By how long they were: of most that agents run, from 300 to 2,000 tokens."""
    few, many = ORDINARY
    return {
        f"below {few}": [s for s in scores if s.raw < few],
        f"{few} to {many}": [s for s in scores if few <= s.raw <= many],
        f"above {many}": [s for s in scores if s.raw > many],
    }


def total(scores: list[Score]) -> float:
    return 1 - sum(s.hutch for s in scores) / max(1, sum(s.raw for s in scores))


def tell(scores: list[Score], *, with_rtk: bool) -> None:
    print(f"{'sample':24} {'family':16} {'raw':>7} {'Hutch':>7} {'saved':>6}"
          f"{'    RTK' if with_rtk else ''}  facts: kept/recallable/lost")  # fmt: skip
    for s in scores:
        rtk = f" {s.rtk if s.rtk is not None else '-':>6}" if with_rtk else ""
        longer = "  LONGER" if s.hutch > s.raw else ""
        print(f"{s.sample.name:24} {s.family or '(as it is)':16} {s.raw:7} {s.hutch:7}"
              f" {s.saved:6.0%}{rtk}  {s.kept}/{len(s.recallable)}/{len(s.lost)}{longer}"
              f"{''.join(f'  LOST {fact}' for fact in s.lost)}")  # fmt: skip


def tell_totals(unit: str, scores: list[Score], *, with_rtk: bool) -> None:
    facts = sum(len(s.sample.facts) for s in scores)
    kept, lost = sum(s.kept for s in scores), sum(len(s.lost) for s in scores)
    worst = min(scores, key=lambda s: (s.saved, -s.raw))
    print(f"\n{len(scores)} samples, in {unit}: {sum(s.raw for s in scores)} raw,"
          f" {sum(s.hutch for s in scores)} with Hutch: {total(scores):.1%} fewer")  # fmt: skip
    print(f"{facts} facts: {kept} kept, {facts - kept - lost} recallable in one step, {lost} lost")
    print(f"half of the samples save {median(s.saved for s in scores):.0%} or more;"
          f" {sum(s.hutch == s.raw for s in scores)} are left as they are")  # fmt: skip
    print(f"worst: {worst.sample.name}, {worst.saved:.0%} fewer")
    for name, band in bands(scores).items():
        if band:
            print(f"{name}: {len(band)} samples, {total(band):.1%} fewer;"
                  f" half of them {median(s.saved for s in band):.0%} or more")  # fmt: skip
    if not with_rtk:
        print("RTK is not installed, so it is not measured.")


def show(scores: list[Score]) -> None:
    for s in scores:
        print(f"\n===== {s.sample.name}: {s.sample.command}")
        print(condense(s.sample.command, s.sample.raw, s.sample.exit_code, recall=RECALL).text)


def as_json(unit: str, scores: list[Score]) -> dict[str, object]:
    return {
        "unit": unit, "raw": sum(s.raw for s in scores), "hutch": sum(s.hutch for s in scores),
        "fewer": round(total(scores), 4),
        "samples": [
            {"name": s.sample.name, "family": s.family, "raw": s.raw, "hutch": s.hutch,
             "rtk": s.rtk, "facts": len(s.sample.facts), "kept": s.kept,
             "recallable": list(s.recallable), "lost": list(s.lost)}
            for s in scores
        ],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
