"""The harness runs and leaves no row out. What it measures is judged by people, not here."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from benchmarks.docker_engine import busybox_root, is_static
from benchmarks.load import Load
from benchmarks.measure import Contender, Promise, quantile, take_turns
from benchmarks.scenarios import SCENARIOS

from benchmarks import report

ROOT = Path(__file__).parents[2]
KEYS = [
    "create", "first", "cli", "import", "shell", "program", "many", "memory", "idle", "output",
    "condense", "growth", "write", "read", "kernel", "cell", "kernels", "wake", "asleep",
    "packages",
    "docker-create", "docker-shell", "docker-cell", "imported", "docker-in", "docker-out",
    "kubernetes-create", "kubernetes-shell", "kubernetes-end", "kubernetes-pool",
    "kubernetes-requests",
    "http-shell", "http-cell", "mcp", "http-pool", "http-cold", "http-many", "load", "load-p99",
    "sessions", "store", "adopt", "history-list", "history-page", "history-create",
]  # fmt: skip


PEERED = ("docker-", "kubernetes-")  # measured with a peer only


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """One tiny run without peers: what it printed, and its JSON."""
    file = tmp_path_factory.mktemp("benchmarks") / "all.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--tiny", "--peers", "", "--json", str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_every_scenario_has_its_row(measured: tuple[str, dict[str, Any]]) -> None:
    printed, values = measured
    assert [row["key"] for row in values["scenarios"]] == KEYS
    for row in values["scenarios"]:
        assert row["title"] in printed


def test_ours_is_measured_or_says_why_not(measured: tuple[str, dict[str, Any]]) -> None:
    for row in measured[1]["scenarios"]:
        ours = row["contenders"][0]
        if not ours["missing"]:
            assert ours["n"] == len(ours["values"]) > 0
            assert ours["values"][0] >= 0
        elif os.geteuid() == 0 and not row["key"].startswith(PEERED):
            pytest.fail(f"{row['key']}: {ours['missing']}")


def test_a_peer_that_is_not_here_is_named_with_the_reason(
    measured: tuple[str, dict[str, Any]],
) -> None:
    printed, values = measured
    docker = [c for r in values["scenarios"] for c in r["contenders"] if "docker" in c["name"]]
    assert docker and all(c["missing"] == "left out by --peers" for c in docker)
    assert "not measured: docker run --rm: left out by --peers" in printed


def test_every_promise_is_in_the_specification() -> None:
    text = (ROOT / "SPECIFICATION.md").read_text()
    assert [key for key in KEYS if f"`benchmarks/run {key}`" not in text] == []


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return 1.0

    take_turns([Contender("a", lambda: turn("a"), 4), Contender("b", lambda: turn("b"), 2)])
    assert order == ["a", "a", "b", "a", "a", "b"]


def test_a_quantile_is_a_value_that_was_seen() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([float(n) for n in range(100)], 0.95) == 95.0
    assert quantile([7.0], 0.95) == 7.0


def test_the_image_holds_busybox_and_its_names(tmp_path: Path) -> None:
    program = tmp_path / "busybox"
    program.write_bytes(b"not really")
    with tarfile.open(fileobj=io.BytesIO(busybox_root(str(program), ["true"]))) as tar:
        assert tar.getmember("bin/true").linkname == "busybox"
        assert tar.getmember("bin/busybox").mode == 0o755


def test_a_program_with_a_loader_is_not_static() -> None:
    assert not is_static(os.path.realpath(sys.executable))
    assert not is_static(__file__)


def test_a_promise_may_be_on_the_value_of_ours_in_another_way() -> None:
    ours, more = Contender("ours", None, values=[4.0]), Contender("more", None, values=[-0.5])
    more.promise = Promise(1.5, of_value=True)
    peer = Contender("peer", None, values=[8.0], promise=Promise(3, at_most=False))
    row = report.Row(SCENARIOS[0], [ours, more, peer])
    assert (row.ratio(more), row.ratio(peer)) == (None, 2.0)
    assert (row.verdict(more), row.verdict(peer)) == ("kept", "MISSED")


def test_one_failed_command_spoils_a_load() -> None:
    load = Load(2.0, [1.0, 3.0, 2.0, 9.0])
    assert (load.check().rate, load.p99) == (2.0, 9.0)
    load.errors.append("HTTP/1.1 503 Service Unavailable")
    with pytest.raises(RuntimeError, match="503"):
        load.check()


def test_imports_are_measured_on_top_of_what_is_loaded_before() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.imports", "--turns", "1", "json", "json,json"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    _, alone, again = done.stdout.splitlines()
    assert alone.endswith("  json") and again.endswith("  json,json")
    assert int(alone.split()[3]) > 0 and int(again.split()[3]) == 0  # modules
