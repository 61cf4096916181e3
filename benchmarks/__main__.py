"""`benchmarks/run`: measure every promise beside its peers, and print a table."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

from . import cluster_peer, docker_peer, peers, report
from .measure import take_turns
from .scenarios import SCENARIOS, TINY, Scenario, Size

QUIET = 0.5  # load below which the numbers mean something


def main(arguments: list[str]) -> int:
    keys = [scenario.key for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="SCENARIO", help=f"of: {' '.join(keys)}")
    parser.add_argument("--json", metavar="FILE", help="write every value there too")
    parser.add_argument("--tiny", action="store_true", help="see that it works; no numbers to use")
    parser.add_argument(
        "--peers", default="docker,bubblewrap,jupyter,kubernetes", help="who to compare with"
    )
    parser.add_argument("--start-engine", action="store_true",
                        help="start a Docker engine of our own for the run (root)")  # fmt: skip
    parser.add_argument("--start-cluster", action="store_true",
                        help="start a Kubernetes of our own for the run (root)")  # fmt: skip
    parser.add_argument("--wait", type=float, default=0, metavar="MINUTES",
                        help="wait this long at most until the machine is quiet")  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a promise is missed")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.only) - {*keys}:
        parser.error(f"no scenario {', '.join(sorted(unknown))}")
    wanted = [s for s in SCENARIOS if not chosen.only or s.key in chosen.only]

    wait_for_quiet(chosen.wait)
    found = report.machine()
    print(report.headline(found))
    if found["load"] > QUIET:
        print("The machine is busy: these numbers are worth little.")
    with contextlib.ExitStack() as stack:
        if chosen.start_engine and (why := stack.enter_context(docker_peer.engine())):
            print(f"no Docker engine: {why}", file=sys.stderr)
        if chosen.start_cluster and (why := stack.enter_context(cluster_peer.started())):
            print(f"no cluster: {why}", file=sys.stderr)
        rivals = peers.find({*chosen.peers.split(",")}, stack)
        rows = [measure(s, TINY if chosen.tiny else Size(), rivals) for s in wanted]
    print()
    print(report.table(rows))
    print(
        "\nratio: how many times better ours is. Promises are on the median; p95: one run in "
        "twenty is worse."
    )
    for line in report.missing(rows):
        print(f"not measured: {line}")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(report.as_json(found, rows), indent=1) + "\n")
    missed = [r for r in rows if any(r.verdict(c) == "MISSED" for c in r.contenders)]
    return 1 if missed and chosen.strict else 0


def measure(scenario: Scenario, size: Size, rivals: peers.Peers) -> report.Row:
    print(f"{scenario.title}...", file=sys.stderr, flush=True)
    with scenario.contenders(size, rivals) as contenders:
        take_turns(contenders)
    return report.Row(scenario, contenders)


def wait_for_quiet(minutes: float) -> None:
    deadline = time.monotonic() + minutes * 60
    while os.getloadavg()[0] > QUIET and time.monotonic() < deadline:
        time.sleep(5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
