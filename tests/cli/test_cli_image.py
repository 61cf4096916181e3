"""`hutch image`, from the outside."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from must_work import need
from prompt import PATIENCE, Terminal, hutch, start

PACKAGES = ("--packages", "iniconfig")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path))
    return tmp_path


def image(*words: str, code: int = 0) -> tuple[str, str]:
    done = hutch("image", *words)
    said = done.stderr.decode()
    if done.returncode == 125 and "gave no packages" in said:
        need("packages", said)
    assert done.returncode == code, said
    return done.stdout.decode(), said


def listed() -> dict[str | None, dict[str, object]]:
    return {entry["name"]: entry for entry in json.loads(image("ls", "--json")[0])}


def test_a_build_tells_its_stages_in_lines_and_is_quiet_the_second_time() -> None:
    out, said = image("build", "mine", *PACKAGES)
    assert out == ""
    lines = said.splitlines()
    assert all(line.startswith("hutch: mine: ") for line in lines) and "\x1b" not in said
    assert lines[0].endswith("choosing versions") and lines[-1].endswith("built")
    assert len(lines) < 20
    assert image("build", "mine", *PACKAGES) == ("", "")
    assert image("build", "mine") == ("", "")
    assert image("build", "other", *PACKAGES) == ("", "")


def test_a_build_has_one_line_of_a_terminal_and_leaves_it_clean() -> None:
    with Terminal("image", "build", "mine", *PACKAGES, columns=40) as terminal:
        terminal.expect("hutch: mine: choosing versions")
        terminal.expect("compiling")
        terminal.expect("hutch: mine: built")
        assert terminal.end() == 0
        assert terminal.screen == b"\r\x1b[K"


def test_no_line_is_wider_than_the_terminal() -> None:
    with Terminal("image", "build", "a-rather-long-name", *PACKAGES, columns=40) as terminal:
        assert terminal.end() == 0
        lines = re.split(rb"\r\x1b\[K", terminal.screen)
        assert len(lines) > 4 and max(map(len, lines)) <= 39


def test_images_are_listed_by_name() -> None:
    image("build", "mine", *PACKAGES, "--preload", "iniconfig")
    found = listed()
    assert list(found) == ["host", "python", "data", "chem", "mine"]
    assert found["mine"]["packages"] == ["iniconfig"] and found["mine"]["built"]
    assert not found["data"]["built"]
    table = image("ls")[0].splitlines()
    assert table[0].split() == ["NAME", "SIZE", "PACKAGES"]
    assert re.fullmatch(r"mine +[\d.]+ MB  iniconfig", table[5])
    assert re.match(r"data +not built  matplotlib numpy", table[3])
    assert re.fullmatch(r"host +-  -", table[1])


def test_a_list_can_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("# for tests\niniconfig>=2  # small\n\nsix\n")
    image("build", "mine", "--requirements", str(path), "--packages", "six")
    assert listed()["mine"]["packages"] == ["iniconfig>=2", "six"]
    path.write_text("-r other.txt\n")
    assert "only packages" in image("build", "it", "--requirements", str(path), code=125)[1]
    assert "No such file" in image("build", "it", "--requirements", "/nowhere", code=125)[1]


def test_an_image_is_removed_and_nothing_of_it_is_left(data: Path) -> None:
    image("build", "mine", *PACKAGES)
    assert image("rm", "mine") == ("", "")
    assert "mine" not in listed() and not any((data / "images/env").iterdir())
    assert "there is no image 'mine'" in image("rm", "mine", code=125)[1]
    assert "nothing to remove" in image("rm", "data")[1]


def test_what_has_no_name_any_more_is_pruned(data: Path) -> None:
    image("build", "mine", *PACKAGES)
    (data / "images/names/mine.json").unlink()
    assert listed()[None]["packages"] == ["iniconfig"]
    assert re.search(r"removed 1, [\d.]+ MB", image("prune")[1])
    assert None not in listed()


@pytest.mark.parametrize(
    ("words", "says"),
    [(["build"], "which image?"), (["rm"], "which image?"), (["ls", "mine"], "takes no name"),
     (["bild", "x"], "build"), (["rm", "x", "--json"], "no option --json"),
     (["ls", "--packages", "six"], "no option --packages"),
     (["build", "x", "--pakages"], "did you mean --packages?"),
     (["build", "mine"], "hutch image build mine --packages"),
     (["build", "data", "--packages", "six"], "choose another name"),
     (["build", "Mine", "--packages", "six"], "cannot be the name"),
     (["build", "mine", "--packages", "six>>1"], "'six>>1'"),
     (["build", "mine", "--packages", "hutchtest-nowhere"], "no package hutchtest-nowhere"),
     (["build", "mine", "--packages", "a\x1b[2J"], r"a\x1b[2J")],
)  # fmt: skip
def test_a_mistake_gives_125_and_one_line(words: list[str], says: str, data: Path) -> None:
    out, said = image(*words, code=125)
    complaint = said.splitlines()[-1]
    assert out == "" and complaint.startswith("hutch: ") and says in complaint
    assert "\x1b" not in said and not (data / "images/names").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_build_that_is_stopped_leaves_nothing(
    number: signal.Signals, code: int, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # it takes calls, and never answers
        monkeypatch.setenv("UV_INDEX", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        with start("image", "build", "mine", *PACKAGES, env=os.environ) as process:
            index.settimeout(PATIENCE)
            call, _ = index.accept()
            process.send_signal(number)
            assert process.wait(PATIENCE) == code
            with call:
                while call.recv(65536):
                    pass  # until uv, too, is gone
    assert not any((data / "images/env").iterdir())


def test_image_without_a_word_explains_itself() -> None:
    assert image()[0] == image("--help")[0]


def test_images_are_those_of_the_folder_that_the_config_file_names(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HUTCH_DATA_DIR")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(data / "config"))
    assert hutch("init", "--data-dir", str(data / "boxes")).returncode == 0
    image("build", "mine", *PACKAGES)
    assert (data / "boxes/images/names/mine.json").exists()
    ran = hutch("run", "--image", "mine", "--", "python3", "-c", "import iniconfig")
    assert ran.returncode == 0, ran.stderr


def test_who_names_a_server_is_told_that_these_are_the_images_of_this_machine(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUTCH_URL", "http://boxes.example.com")
    assert image("ls")[1] == (
        f"hutch: these are the images of this machine, in {data}; not those of HUTCH_URL\n"
    )
