"""What users of docker, uv and gh type works here too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from prompt import Served, Terminal, boxes, hutch  # noqa: F401

from hutch import __version__
from hutch.cli.options import seconds, split
from hutch.cli.program import network_advice

pytestmark = pytest.mark.usefixtures("boxes")
WIDE = os.environ | {"COLUMNS": "80"}


def test_a_command_line_of_docker_is_understood(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("shown\n")
    words = ["--rm", "-m", "256m", "-e", "A", "-e", "B=2", "-v", f"{tmp_path}:/data:ro",
             "-w", "/data", "-u", "root"]  # fmt: skip
    script = "echo $A $B; cat f; id -u; echo no > f"
    done = hutch("run", *words, "--", "sh", "-c", script, env=os.environ | {"A": "1"})
    assert done.stdout == b"1 2\nshown\n0\n" and b"Read-only" in done.stderr
    assert done.returncode != 0 and (tmp_path / "f").read_text() == "shown\n"


def test_stdin_has_its_short_name() -> None:
    assert hutch("run", "-i", "cat", input=b"through").stdout == b"through"


def test_it_gives_a_terminal(served: Served) -> None:
    for words in (["run"], ["exec", served.session()[:9]]):
        command = [words[0], "-it", "-e", "A=5", *words[1:], "--", "sh", "-c", "tty; echo $A"]
        with Terminal(*command, **served.env) as it:
            it.expect("/dev/pts/")
            it.expect("5")
            assert it.end() == 0
    assert b"stdin is not a terminal" in hutch("run", "-t", "--", "true").stderr


def test_options_in_one_word_take_the_next_as_their_value() -> None:
    made = {"-e", "--env", "-v"}
    assert split(["-ite", "A=1", "sh"], made) == (["-ite", "A=1"], ["sh"])
    assert split(["-it", "sh", "-e"], made) == (["-it"], ["sh", "-e"])
    assert split(["-eit", "sh"], made) == (["-eit"], ["sh"])


def test_a_session_is_known_by_the_beginning_of_its_id(served: Served, tmp_path: Path) -> None:
    made = served.session()
    short = made[:9]  # eight digits: another begins so once in four thousand million
    assert served("exec", short, "--", "echo", "in") == "in\n"
    assert served("python", "--session", short, "-c", "6 * 7") == "42\n"
    (tmp_path / "f").write_text("copied")
    served("cp", str(tmp_path / "f"), f"{short}:/tmp/f")
    assert served("cp", f"{short}:/tmp/f", "-") == "copied"
    assert made in served("stats", short)
    assert served("rm", short) == f"{made}\n"
    assert "destroyed" in served("logs", short)  # also of one that ended


def test_the_last_entries_of_a_journal_are_shown(served: Served) -> None:
    made = served.session()
    for word in ("one", "two", "three"):
        served("exec", made, "--", "echo", word)
    whole = served("logs", made).splitlines()
    assert served("logs", "--tail", "2", made).splitlines() == whole[-2:]
    assert served("logs", "-n", "0", made) == "" and served("logs", "-n", "99", made)
    served("rm", made)
    ended = served("logs", made).splitlines()
    assert served("logs", "-f", "--tail", "1", made).splitlines() == ended[-1:]
    assert served("logs", "-f", "-n", "0", made) == ""


def test_a_folder_is_copied_with_the_options_of_cp(served: Served, tmp_path: Path) -> None:
    made = served.session()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "f").write_text("copied")
    served("cp", "-r", str(tmp_path / "folder"), f"{made}:/tmp/there")
    assert served("cp", "-a", f"{made}:/tmp/there/f", "-") == "copied"


def test_a_session_is_removed_with_force_as_a_container_is(served: Served) -> None:
    made = served.session()
    assert served("rm", "-f", made) == f"{made}\n"


def test_a_beginning_of_several_ids_names_them(served: Served) -> None:
    ids = [served.session()]
    while [made[0] for made in ids].count(ids[-1][0]) == 1:  # until two of them begin alike
        ids.append(served.session())
    letter = ids[-1][0]
    message = served("exec", letter, "--", "true", code=125)
    assert f"{letter!r} is ambiguous (" in message
    assert any(made in message for made in ids if made[0] == letter)
    assert "there is no session 'xyz'" in served("exec", "xyz", "--", "true", code=125)
    served("rm", "--all")


def test_lists_have_the_names_that_others_give_them(served: Served) -> None:
    assert served("image", "list") == served("image", "ls")
    assert served("workspace", "list") == served("workspace", "ls")
    assert served("key", "list").startswith("KEY ")
    assert served("ps", "-a").startswith("SESSION")
    assert served("version") == served("-v") == served("--version") == f"hutch {__version__}\n"


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_tables_and_errors_have_colour_on_a_terminal_that_wants_it(
    served: Served, no_colour: str
) -> None:
    served.session()
    with Terminal("ps", **served.env, NO_COLOR=no_colour) as terminal:
        assert terminal.end() == 0
        assert (b"\x1b[1mSESSION" in terminal.screen) is not bool(no_colour)
        assert (b"\x1b[32mrunning" in terminal.screen) is not bool(no_colour)
    with Terminal("ps", "--nonsense", **served.env, NO_COLOR=no_colour) as terminal:
        assert terminal.end() == 125
        assert (b"\x1b[31mhutch:\x1b[0m" in terminal.screen) is not bool(no_colour)
    assert "\x1b" not in served("ps") + served("ps", "--nonsense", code=125)


def test_a_time_may_be_in_days() -> None:
    assert seconds("3d") == 3 * 86_400 and seconds("1w") == 7 * 86_400 and seconds("1.5h") == 5400


@pytest.mark.parametrize(
    ("words", "has", "lacks"),
    [(["image", "build"], "--packages", "--from-docker"),
     (["key", "rotate"], "--overlap", "--owner"), (["workspace", "export"], "--owner", "--json"),
     (["config", "check"], "--json", "--url")],
)  # fmt: skip
def test_an_action_has_a_help_of_its_own(words: list[str], has: str, lacks: str) -> None:
    done = hutch(*words, "--help", env=WIDE)
    text = done.stdout.decode()
    assert done.returncode == 0 and text.startswith(f"usage: hutch {' '.join(words)} ")
    assert has in text and lacks not in text and "\n\n.\n" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert hutch("help", *words, env=WIDE).stdout.decode() == text


def test_a_pip_that_cannot_install_is_told_what_works() -> None:
    done = hutch("run", "--", "sh", "-c", "pip install six || python3 -m pip install six")
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode and last.startswith("hutch: a box has no network for pip.")
    assert "--project" in last and "--packages six" in last and "--relax network" in last
    assert b"hutch:" not in hutch("run", "--", "sh", "-c", "echo pip install; exit 3").stderr


def test_mounts_may_be_written_in_every_way_of_docker(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("shown")
    for words in (
        ["-v", f"{tmp_path}:/data:z"],
        ["-v", f"{tmp_path}:/data:ro,Z"],
        ["--mount", f"type=bind,source={tmp_path},target=/data"],
        ["--mount", f"type=bind,src={tmp_path},dst=/data,readonly"],
    ):
        script = "cat /data/f; touch /data/new && rm /data/new"
        done = hutch("run", *words, "--", "sh", "-c", script)
        assert done.stdout == b"shown"
        assert (b"Read-only" in done.stderr) is ("ro" in words[1].rpartition(":")[2].split(",")
                                                 or "readonly" in words[1])  # fmt: skip
    assert b"type=bind," in hutch("run", "--mount", "type=tmpfs,target=/x", "--", "true").stderr


def test_a_mount_of_a_project_may_be_written_so_too(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("shown")
    mount = f"type=bind,source={tmp_path},target=/data"
    done = hutch("run", "--project", str(tmp_path), "--mount", mount, "--", "cat", "/data/f")
    assert done.stdout == b"shown"


def test_a_user_with_a_group_is_told_what_works() -> None:
    assert hutch("run", "-u", "1000:1000", "--", "id", "-u").stdout == b"1000\n"
    assert b"use --user 1000\n" in hutch("run", "-u", "1000:50", "--", "id").stderr


def test_images_of_sandkasten_are_known_by_their_names() -> None:
    done = hutch("run", "--json", "--image", "sandbox-runtime:base", "--", "true")
    assert json.loads(done.stdout)["box"]["image"] == "host"
    message = hutch("run", "--image", "sandbox-runtime:nonsense", "--", "true").stderr.decode()
    assert "'nonsense'" in message and "sandbox-runtime" not in message


def test_a_relative_workdir_is_in_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    words = ["--workspace", str(tmp_path)]
    assert hutch("run", *words, "-w", "src", "pwd").stdout == b"/workspace/src\n"
    assert hutch("run", *words, "-w", "src/..", "pwd").stdout == b"/workspace\n"
    assert b"is outside /workspace" in hutch("run", "-w", "../etc", "--", "pwd").stderr
    message = hutch("run", "-w", "/app", "--", "pwd").stderr
    assert b"/app cannot be made in the box" in message and b"or mount a folder there" in message


def test_what_needs_a_network_is_told_what_works() -> None:
    done = hutch("run", "--", "git", "clone", "https://example.com/a.git")
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode and last.startswith("hutch: a box has no network for git. ")
    assert "--workspace DIR" in last and done.stderr.count(b"hutch:") == 1
    assert b"hutch:" not in hutch("run", "--", "git", "nonsense").stderr


def test_an_installer_that_is_not_in_the_box_is_told_what_works() -> None:
    done = hutch("run", "-e", "PATH=/nowhere", "--", "uv", "pip", "install", "six")
    said = done.stderr.decode()
    assert done.returncode == 127 and said.startswith("hutch: cannot run uv: there is no")
    assert "a box has no network for uv." in said and "--packages six," in said


@pytest.mark.parametrize(
    ("command", "output", "code", "says"),
    [
        ("npm install left-pad", "npm error code EAI_AGAIN", 1, "for npm. `hutch run --project .`"),
        ("uv pip install six", "dns error: failed to lookup", 2, "--packages six,"),
        ("wget https://a.b", "unable to resolve host address", 4, "for wget. Fetch it outside"),
        ("curl -s https://a.b", "", 6, "for curl. Fetch it outside"),
        ("wget -q https://a.b", "", 4, "for wget. Fetch it outside"),
        ("sh -c apt-get install jq", "E: Unable to locate package jq", 100, "hutch image pull"),
        ("uv pip install six", "", 127, "--packages six,"),
        ("sh -c uv sync", "sh: 1: uv: not found", 127, "for uv. `hutch run --project .`"),
        ("uv --version", "", 127, ""),
        ("npm test", "1 test failed", 1, ""),
        ("cat curl", "Could not resolve host", 1, ""),
        ("python3 git.py", "Could not resolve host", 1, ""),
    ],
)
def test_each_tool_has_its_own_advice(command: str, output: str, code: int, says: str) -> None:
    advice = network_advice(command.split(), code, output)
    assert says in advice and bool(advice) is bool(says)


@pytest.mark.parametrize(
    ("command", "packages"),
    [
        ("pip install -U 'six>=1' requests", "'six>=1' requests"),
        ("pip install six 2>&1 > log.txt", "six"),
        ("pip install -i https://a.b/simple ./x.whl", "./x.whl"),
        ("pip install -c bounds.txt -r requirements.txt six", "six"),
        ("pip install 'it is", "PACKAGE"),
        ("pip download six", "PACKAGE"),
        ("pip install -r requirements.txt", ""),
        ("pip install -e .[dev]", ""),
        ("pip install .", ""),
    ],
)
def test_only_packages_are_named_as_packages(command: str, packages: str) -> None:
    advice = network_advice(["sh", "-c", command], 1, "No matching distribution found")
    assert "`hutch run --project .` installs" in advice
    named = f"--packages {packages}, then hutch run --image mine; with network"
    assert named in advice if packages else "--packages" not in advice
