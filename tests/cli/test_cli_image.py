"""`hutch image`, from the outside."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from must_work import need
from prompt import PATIENCE, Terminal, boxes, hutch, start

from hutch.extras import install_command

__all__ = ["boxes"]  # a fixture
PACKAGES = ("--packages", "iniconfig")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path))
    return tmp_path


def image(*words: str, code: int = 0) -> tuple[str, str]:
    done = hutch("image", *words)
    said = done.stderr.decode()
    if done.returncode == 125 and "cannot get packages" in said:
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
    assert len(lines) < 200, "and not one for each module"
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
    assert table[0].split() == ["NAME", "KIND", "SIZE", "CONTENT"]
    assert re.fullmatch(r"mine +packages +[\d.]+ MiB  iniconfig", table[5])
    assert re.match(r"data +packages +not built  matplotlib numpy", table[3])
    assert re.fullmatch(r"host +machine +-  -", table[1])


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
    assert re.search(r"removed 1, [\d.]+ MiB", image("prune")[1])
    assert None not in listed()


@pytest.mark.parametrize(
    ("words", "says"),
    [(["build"], "no image given"), (["rm"], "no image given"), (["ls", "mine"], "takes no name"),
     (["pull"], "no image given. For example: hutch image pull alpine"),
     (["pull", "a", "b"], "one image at a time"),
     (["pull", "--", "--x"], "cannot be the name"), (["pull", ";$(id)"], "cannot be the name"),
     (["pull", "mine", "--as", "A"], "cannot be the name"), (["rm", "a b"], "cannot be the name"),
     (["import", "x.tar"], "import needs a file and a name"),
     (["import"], "import needs a file and a name"),
     (["import", "/nowhere", "mine"], "No such file"),
     (["import", "--from-docker", "a", "b", "c"], "import needs a file and a name"),
     (["import", "-", "mine"], "nothing in this tar"), (["ls", "--as", "x"], "no option --as"),
     (["rm", "x", "--from-docker", "y"], "no option --from-docker"),
     (["bild", "x"], "build"), (["rm", "x", "--json"], "no option --json"),
     (["ls", "--packages", "six"], "no option --packages"),
     (["build", "x", "--pakages"], "did you mean --packages?"),
     (["build", "mine"], "hutch image build mine --packages"),
     (["build", "mine", "six", "a>=2"], "hutch image build mine --packages six 'a>=2'"),
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
    end = time.monotonic() + PATIENCE  # a process of its own removes what was stopped
    while any((data / "images/env").iterdir()):
        assert time.monotonic() < end
        time.sleep(0.02)


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


# --- images from elsewhere ---------------------------------------------------------------


@pytest.fixture
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `docker save` would write of a small image."""
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "os": "linux",
        "config": {"Env": ["WHO=me"]},
    }
    path = tmp_path_factory.mktemp("saved") / "saved.tar"
    busybox = shutil.which("busybox")
    if not busybox:
        need("busybox", "busybox is not installed (apt install busybox-static)")
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as made:
        made.add(busybox, "bin/busybox")
        for name in ("sh", "cat", "echo"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            made.addfile(link)
    config["rootfs"] = {"diff_ids": ["sha256:" + hashlib.sha256(layer.getvalue()).hexdigest()]}
    says = [{"Config": "c.json", "RepoTags": None, "Layers": ["layer.tar"]}]
    parts = {"layer.tar": layer.getvalue(), "c.json": config, "manifest.json": says}
    with tarfile.open(path, "w") as made:
        for name, part in parts.items():
            content = part if isinstance(part, bytes) else json.dumps(part).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.usefixtures("boxes")
def test_an_image_that_was_imported_is_run_listed_and_removed(saved: Path, data: Path) -> None:
    out, said = image("import", str(saved), "small:1")
    assert out == "" and "\x1b" not in said
    lines = said.splitlines()
    assert [line.split()[-1] for line in lines[:-1]] == ["unpacking", "done"]
    assert re.fullmatch(r"hutch: small:1 is sha256:[0-9a-f]{64}, [\d.]+ MiB", lines[-1])
    ran = hutch("run", "--image", "small:1", "--", "sh", "-c", "echo $WHO")
    assert (ran.returncode, ran.stdout) == (0, b"me\n"), ran.stderr
    entry = listed()["small:1"]
    assert entry["kind"] == "oci" and str(entry["digest"]) in lines[-1]
    table = image("ls")[0].splitlines()
    assert re.fullmatch(r"small:1 +oci +[\d.]+ MiB  sha256:[0-9a-f]{12}", table[-1])
    assert image("rm", "small:1") == ("", "")
    assert not [*(data / "images/layers").iterdir(), *(data / "images/oci").iterdir()]
    assert "`hutch image ls` lists them" in image("rm", "small:1", code=125)[1]
    missing = hutch("run", "--image", "small:1", "--", "true")
    assert missing.returncode == 125 and b"hutch image pull small:1" in missing.stderr


def test_an_image_can_come_through_a_pipe(saved: Path) -> None:
    done = hutch("image", "import", "-", "piped", input=gzip.compress(saved.read_bytes(), 1))
    assert done.returncode == 0, done.stderr
    assert listed()["piped:latest"]["kind"] == "oci"


def test_layers_have_lines_of_a_terminal_and_leave_it_clean(saved: Path) -> None:
    with Terminal("image", "import", str(saved), "small", columns=40) as terminal:
        terminal.expect("unpacking")
        assert terminal.end() == 0
        last = re.split(rb"\x1b\[[JK]", terminal.screen)[-1]
        assert last.startswith(b"hutch: small:latest is sha256:") and last.count(b"\n") == 1


def test_who_gives_an_image_a_name_that_packages_have_is_told(saved: Path) -> None:
    said = image("import", str(saved), "python")[1]
    assert said.endswith("'python' alone means another image here: use --image python:latest\n")


def test_what_a_name_stood_for_before_is_pruned(saved: Path, tmp_path: Path) -> None:
    image("import", str(saved), "mine")
    with tarfile.open(tmp_path / "other.tar", "w") as made:
        made.addfile(tarfile.TarInfo("other"))
    image("import", str(tmp_path / "other.tar"), "mine")
    assert listed()[None]["kind"] == "oci"
    assert re.search(r"removed 1, [\d.]+ MiB", image("prune")[1])
    assert None not in listed() and "mine:latest" in listed()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_pull_that_is_stopped_leaves_nothing(
    number: signal.Signals, code: int, data: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as registry:  # it takes calls, and never answers
        name = f"127.0.0.1:{registry.getsockname()[1]}/x"
        with start("image", "pull", name, env=os.environ) as process:
            registry.settimeout(PATIENCE)
            call, _ = registry.accept()
            with call:
                process.send_signal(number)
                assert process.wait(PATIENCE) == code
    assert not any(path.is_file() for path in data.rglob("*"))


def test_an_image_is_imported_for_boxes_made_here_whatever_makes_boxes_by_default(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUTCH_BACKEND", "docker")
    image("import", str(saved), "mine")
    monkeypatch.setenv("HUTCH_BACKEND", "namespaces")
    assert "mine" in image("ls")[0]


def test_an_engine_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    assert "docker" in image("import", "--from-docker", "x", code=125)[1].lower()


@pytest.mark.parametrize(
    "words",
    [
        ("ps", "--backend", "docker"),
        ("image", "ls", "--backend", "docker"),
        ("image", "import", "--from-docker", "x"),
        ("run", "--backend", "docker", "--", "true"),
        ("serve", "--backend", "docker", "--listen", "127.0.0.1:0"),
    ],
)
def test_without_a_client_for_engines_it_is_said_how_to_get_one(words: tuple[str, ...]) -> None:
    hidden = "import sys; sys.modules.update(aiodocker=None, aiohttp=None); "
    code = hidden + "from hutch.cli import main; sys.argv[0] = 'hutch'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    assert done.returncode == 125 and install_command("docker") in done.stderr
    assert "Traceback" not in done.stderr
