"""`hutch doctor`: what it prints, and that its checks can fail."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from prompt import Terminal, boxes, hutch  # noqa: F401

from hutch import __version__
from hutch.cli.doctor import CHECKS, COUNT, PROGRAM, canary, judge, render
from hutch.types import Layer, Report, Status


@pytest.mark.usefixtures("boxes")
def test_it_says_that_boxes_can_be_made_and_how_well() -> None:
    done = hutch("doctor")
    text = done.stdout.decode()
    assert done.returncode == 0 and done.stderr == b""
    assert text.splitlines()[-1] and "(grade ns)" in text
    assert f"{COUNT}/{COUNT} held" in text or "not tried" in text


@pytest.mark.usefixtures("boxes")
def test_it_is_readable_in_80_columns_and_without_colours_in_a_file() -> None:
    lines = hutch("doctor").stdout.decode().splitlines()
    assert max(map(len, lines)) <= 80 and "\x1b" not in "".join(lines)


@pytest.mark.usefixtures("boxes")
def test_a_terminal_gets_colours_unless_it_wants_none() -> None:
    for no_colour in ("", "1"):
        with Terminal("doctor", NO_COLOR=no_colour) as terminal:
            assert terminal.end() == 0
            assert (b"\x1b[32mactive" in terminal.screen) is not bool(no_colour)


@pytest.mark.usefixtures("boxes")
def test_json_has_the_same() -> None:
    done = hutch("doctor", "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["version"], said["grade"]) == (0, __version__, "ns")
    for layer in said["layers"]:
        assert layer["status"] in ("active", "degraded", "missing") and layer["why"]
        assert layer["status"] == "active" or not layer["required"]


@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize(
    ("mode", "says"), [("measured", "not enforced by the kernel"), ("kernel", "kernel")]
)
def test_it_says_how_disk_quotas_are_kept(tmp_path: Path, mode: str, says: str) -> None:
    config = tmp_path / "hutch.toml"
    config.write_text(f'workspace.quota_mode = "{mode}"\n')
    done = hutch("doctor", "--json", env={**os.environ, "HUTCH_CONFIG": str(config)})
    (layer,) = [one for one in json.loads(done.stdout)["layers"] if "quotas" in one["name"]]
    assert says in layer["why"] and (mode == "kernel") == ("measured" not in layer["why"])
    assert not layer["required"]


@pytest.mark.parametrize("words", [["--jason"], ["now"]])
def test_it_takes_nothing_else(words: list[str]) -> None:
    done = hutch("doctor", *words)
    assert done.returncode == 125 and done.stderr.count(b"\n") == 1


# --- the checks from inside ----------------------------------------------------------------


def held(but: str = "") -> str:
    names = [line.split('"')[1] for line in CHECKS.splitlines()]
    return "".join(f"{'open' if name == but else 'held'} {name}\n" for name in names)


def test_one_open_wall_is_enough_for_no_grade() -> None:
    layer = judge(held(but="mounting"))
    assert layer.status is Status.MISSING and layer.required and "open: mounting" in layer.why


def test_walls_that_hold_are_counted() -> None:
    assert judge(held()).why.startswith(f"{COUNT}/{COUNT} held")
    assert "not tried: mounting" in judge(held().replace("held mounting", "untried mounting")).why


@pytest.mark.parametrize("said", ["", "held", "nonsense\n" * COUNT, held()[:-40]])
def test_a_box_that_did_not_answer_has_not_passed(said: str) -> None:
    assert judge(said).status is Status.MISSING


def test_the_checks_find_no_walls_where_there_are_none() -> None:
    async def outside() -> str:
        async with canary() as (file, token):
            argv = ["/bin/sh", "-c", PROGRAM, "sh", file, token[:8], token[8:]]
            done = await asyncio.to_thread(
                subprocess.run, argv, capture_output=True, text=True, timeout=60, check=False
            )
        return str(done.stdout)

    said = asyncio.run(outside()).splitlines()
    found_open = {line.removeprefix("open ") for line in said if line.startswith("open ")}
    assert len(said) == COUNT
    assert {"files of this machine", "processes outside", "new privileges"} <= found_open
    if os.geteuid() == 0:
        assert len(found_open) >= 14, sorted(found_open)


# --- the table -----------------------------------------------------------------------------


def test_a_fix_that_is_folded_is_still_one_command() -> None:
    fix = "sudo sysctl -w " + " ".join(f"kernel.setting_number_{n}=1" for n in range(9))
    table = render(
        Report("x", "ns", (Layer("a layer", Status.DEGRADED, "why " * 40, fix),)), colour=False
    )
    assert max(map(len, table.splitlines())) <= 80
    shown = table.partition("fix:")[2].partition("\n\n")[0]
    assert shlex.split(shown.replace("\\\n", " ")) == fix.split()


def test_what_is_missing_is_named_at_the_end_with_what_would_fix_it_once() -> None:
    layers = [Layer(name, Status.MISSING, "Operation not permitted", "sudo something")
              for name in ("mounts", "processes")]  # fmt: skip
    table = render(Report("x", "none", tuple(layers)), colour=False)
    assert table.splitlines()[-2:] == [
        "Do not use boxes here (grade none): mounts, processes missing.",
        "  fix: sudo something",
    ]
    assert table.count("sudo something") == 1
