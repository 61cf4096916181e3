"""What a project needs is installed once, whole or not at all, and found by its commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from must_work import need
from projects_of_tests import WITH_PYTHON, Registry, run
from prompt import PATIENCE, boxes, start  # noqa: F401
from wheels_of_tests import Index, make_source, make_wheel

from hutch.images.installer import remove_tree

pytestmark = pytest.mark.usefixtures("boxes")

TOOL = {"tool-1.0.data/scripts/tool": "#!python\nimport tool\nprint('tool', tool.VERSION)\n"}


def installed(data: Path) -> list[str]:
    """All that lies where things are installed, but for the locks of what is there."""
    folder = data / "projects/installed"
    names = set(os.listdir(folder)) if folder.exists() else set()
    return sorted(name for name in names if name.removesuffix(".lock") not in names - {name})


# --- Python --------------------------------------------------------------------------------


def test_modules_and_programs_are_there_for_the_command(project: Path, wheels: Path) -> None:
    make_wheel(wheels, "tool", files=TOOL, needs=("other>=1",))
    make_wheel(wheels, "other")
    (project / "requirements.txt").write_text("tool==1.0\n")
    script = "tool; python3 -c 'import other; print(other.VERSION)'"
    done = run(project, *WITH_PYTHON, "--", "sh", "-c", script)
    assert (done.stdout, done.stderr) == (b"tool 1.0\n1.0\n", b"")


def test_a_wheel_of_the_project_fetches_nothing_from_an_address(project: Path) -> None:
    need = "x @ http://127.0.0.1:9/x-1-py3-none-any.whl ; platform_release >= '10'"
    wheel = make_wheel(project, "mine", needs=(need,))
    (project / "requirements.txt").write_text(f"./{wheel.name}\n")
    done = run(project, *WITH_PYTHON, "--", "true")
    assert done.returncode == 125
    assert b"mine-1.0-py3-none-any.whl needs x, but it comes from an address" in done.stderr


def test_they_are_installed_once_for_the_same_list(project: Path, wheels: Path, data: Path) -> None:
    make_wheel(wheels, "tool", files=TOOL)
    (project / "requirements.txt").write_text("tool\n")
    assert run(project, *WITH_PYTHON, "--", "tool").stdout == b"tool 1.0\n"
    (one,) = installed(data)
    shutil.rmtree(wheels)
    (project / "requirements.txt").write_text("# the same\nTool\n")
    assert run(project, *WITH_PYTHON, "--", "tool").stdout == b"tool 1.0\n"
    assert installed(data) == [one]


def test_another_list_is_installed_anew(project: Path, wheels: Path, data: Path) -> None:
    make_wheel(wheels, "tool", files=TOOL)
    make_wheel(
        wheels,
        "tool",
        "2.0",
        files={"tool-2.0.data/scripts/tool": TOOL["tool-1.0.data/scripts/tool"]},
    )
    for version in ("1.0", "2.0"):
        (project / "requirements.txt").write_text(f"tool=={version}\n")
        script = "import tool; print(tool.VERSION)"
        done = run(project, *WITH_PYTHON, "--", "python3", "-c", script)
        assert done.stdout.decode().strip() == version, done.stderr
    assert len(installed(data)) == 2


def test_a_package_with_a_src_folder_can_be_imported(project: Path) -> None:
    (project / "src/mine").mkdir(parents=True)
    (project / "src/mine/__init__.py").write_text("print('mine')\n")
    (project / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\n')
    done = run(project, *WITH_PYTHON, "--workdir", "/tmp", "--", "python3", "-c", "import mine")
    assert (done.stdout, done.stderr) == (b"mine\n", b"")


def test_variables_of_the_caller_stay_in_force(project: Path, wheels: Path) -> None:
    make_wheel(wheels, "tool", files=TOOL)
    (project / "requirements.txt").write_text("tool\n")
    words = ["--env", "PYTHONPATH=/x", "--env", "PATH=/usr/bin:/bin:/y", "--", "sh", "-c"]
    done = run(project, *WITH_PYTHON, *words, "echo $PYTHONPATH $PATH; tool")
    assert done.stdout == b"/opt/packages:/x /opt/packages/bin:/usr/bin:/bin:/y\ntool 1.0\n"


def test_no_code_of_a_package_runs_on_this_machine(
    project: Path, wheels: Path, tmp_path: Path
) -> None:
    make_source(wheels, "evil", f"open({str(tmp_path / 'owned')!r}, 'w')")
    (project / "setup.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    (project / "requirements.txt").write_text("-e .\nevil\n")
    done = run(project, *WITH_PYTHON, "--", "true")
    assert b"evil is not installed: it has to be built from source" in done.stderr
    assert not (tmp_path / "owned").exists()


def test_a_wheel_whose_hash_is_another_is_refused(project: Path, wheels: Path, data: Path) -> None:
    make_wheel(wheels, "tool", files=TOOL)
    (project / "requirements.txt").write_text(f"tool==1.0 --hash=sha256:{'00' * 32}\n")
    done = run(project, *WITH_PYTHON, "--", "true")
    assert done.returncode == 125 and b"tool" in done.stderr
    assert installed(data) == []


@pytest.fixture
def cleared(tmp_path: Path) -> Iterator[None]:
    """pytest cannot remove what is nested so deeply: uv's cache, or all that a failure leaves."""
    yield
    remove_tree(tmp_path / "cache")
    remove_tree(tmp_path / "data")


@pytest.mark.usefixtures("cleared")
def test_a_wheel_of_nested_folders_is_refused_and_harms_no_later_run(
    project: Path, wheels: Path, data: Path
) -> None:
    make_wheel(wheels, "deep", files={"d/" * 1400 + "x.py": ""})
    make_wheel(wheels, "tool", files=TOOL)
    (project / "requirements.txt").write_text("deep\n")
    done = run(project, *WITH_PYTHON, "--", "true")
    assert done.returncode == 125 and b"nested too deeply" in done.stderr, done.stderr
    assert done.stderr.count(b"\n") == 1 and installed(data) == []
    # What an earlier version may have left.
    place = data / "projects/installed/old.building"
    place.mkdir()
    top = os.open(place, os.O_RDONLY)
    for _ in range(1400):
        os.mkdir("d", dir_fd=top)
        inner = os.open("d", os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = inner
    os.close(top)
    (project / "requirements.txt").write_text("tool\n")
    assert run(project, *WITH_PYTHON, "--", "tool").stdout == b"tool 1.0\n"
    assert not place.exists()


@pytest.mark.parametrize("name", [".lock/x", "-r.txt/x"])
def test_a_wheel_with_a_folder_in_the_place_of_a_file_is_one_clear_line(
    project: Path, wheels: Path, data: Path, name: str
) -> None:
    make_wheel(wheels, "odd", files={name: ""})
    (project / "requirements.txt").write_text("odd\n")
    done = run(project, *WITH_PYTHON, "--", "true")
    assert done.returncode == 125 and done.stderr.count(b"\n") == 1, done.stderr
    assert b"HUTCH_DATA_DIR" not in done.stderr and b"uv could not" not in done.stderr, done.stderr


def test_a_package_that_is_not_there_is_one_clear_line(
    project: Path, wheels: Path, data: Path
) -> None:
    (project / "requirements.txt").write_text("no-such-package\n")
    done = run(project, *WITH_PYTHON, "--", "true")
    assert (done.stderr, done.returncode) == (b"hutch: there is no package no-such-package\n", 125)
    assert installed(data) == []


def test_no_network_is_one_clear_line(
    project: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    (project / "requirements.txt").write_text("six\n")
    done = run(project, *WITH_PYTHON, "--", "true")
    assert done.returncode == 125 and done.stderr.startswith(
        b"hutch: cannot get packages from 127.0.0.1:1"
    )
    assert done.stderr.count(b"\n") == 1 and installed(data) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_is_broken_off_is_swept_by_the_next(
    project: Path, data: Path, tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:  # fmt: skip
    make_wheel(wheels, "tool", files=TOOL)
    (project / "requirements.txt").write_text("slow-package\n")
    with Index("slow-package") as index, monkeypatch.context() as patch:
        patch.setenv("UV_DEFAULT_INDEX", index.url)
        words = ["run", "--project", str(project), *WITH_PYTHON, "--", "true"]
        with start(*words) as process:
            assert index.asked.wait(PATIENCE)
            process.send_signal(number)
            assert process.wait(PATIENCE) == (-9 if number == signal.SIGKILL else 130)
    if number == signal.SIGKILL:
        assert any("building" in name for name in installed(data))
    else:
        end = time.monotonic() + PATIENCE  # a process of its own removes what was stopped
        while installed(data):
            assert time.monotonic() < end, installed(data)
            time.sleep(0.02)
    (project / "requirements.txt").write_text("tool\n")
    assert run(project, *WITH_PYTHON, "--", "tool").stdout == b"tool 1.0\n"
    (one,) = installed(data)
    assert "building" not in one


def test_of_two_at_once_one_installs(project: Path, data: Path, wheels: Path) -> None:
    make_wheel(wheels, "tool", files=TOOL)
    (project / "requirements.txt").write_text("tool\n")
    words = ["run", "--project", str(project), *WITH_PYTHON, "--", "tool"]
    several = [start(*words) for _ in range(3)]
    for process in several:
        with process:
            out, said = process.communicate(timeout=PATIENCE)
            assert (out, said) == (b"tool 1.0\n", b"")
    assert len(installed(data)) == 1


@pytest.mark.namespaces("of its own image")
def test_a_python_project_gets_an_image_with_python_by_itself(project: Path) -> None:
    (project / "requirements.txt").write_text("iniconfig\n")
    script = "import iniconfig, json, sys; print(json.dumps([iniconfig.__file__, sys.prefix]))"
    done = run(project, "--", "python3", "-c", script)
    if b"cannot get packages" in done.stderr:
        need("packages", done.stderr.decode())
    assert json.loads(done.stdout) == ["/opt/packages/iniconfig/__init__.py", "/home/user/.venv"]


# --- Node ----------------------------------------------------------------------------------


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    if not shutil.which("npm"):
        need("npm", "there is no npm here")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    monkeypatch.setenv("npm_config_userconfig", "/dev/null")
    with Registry() as made:
        monkeypatch.setenv("npm_config_registry", made.url)
        yield made


node = pytest.mark.namespaces("of the Node of this machine")
SHOW = "console.log(require.resolve('pad'), require('pad'))"


def asks_for(project: Path, **packages: str) -> None:
    (project / "package.json").write_text(json.dumps({"dependencies": packages}))


@node
def test_packages_of_node_are_there_for_the_command(project: Path, registry: Registry) -> None:
    registry.add("deep")
    registry.add("pad", dependencies={"deep": "1"})
    asks_for(project, pad="^1.0.0")
    before = sorted(os.listdir(project))
    done = run(project, "--", "sh", "-c", f'pad; deep; node -e "{SHOW}"')
    said = b"pad 1.0.0\ndeep 1.0.0\n/node_modules/pad/index.js 1.0.0\n"
    assert (done.stdout, done.stderr) == (said, b"")
    assert sorted(os.listdir(project)) == before


@node
def test_packages_of_node_are_installed_once(project: Path, registry: Registry, data: Path) -> None:
    registry.add("pad")
    asks_for(project, pad="1")
    assert run(project, "--", "pad").stdout == b"pad 1.0.0\n"
    registry.asked.clear()
    assert run(project, "--mount", "--", "pad").stdout == b"pad 1.0.0\n"
    assert registry.asked == [] and len(installed(data)) == 1


@node
def test_a_lock_file_pins_versions_and_contents(project: Path, registry: Registry) -> None:
    registry.add("pad")
    registry.add("pad", "1.1.0")
    asks_for(project, pad="^1.0.0")
    entry = {"version": "1.0.0", "resolved": "http://127.0.0.1:1/pad.tgz",
             "bin": {"pad": "index.js"}, "integrity": registry.integrity("pad")}  # fmt: skip
    lock = {"lockfileVersion": 3, "packages": {"node_modules/pad": entry}}
    (project / "package-lock.json").write_text(json.dumps(lock))
    done = run(project, "--", "pad")
    assert (done.stdout, done.stderr) == (b"pad 1.0.0\n", b"")
    entry |= {"integrity": registry.integrity("pad", "1.1.0")}
    (project / "package-lock.json").write_text(json.dumps(lock))
    done = run(project, "--", "pad")
    assert done.returncode == 125 and b"not the one that the lock file names" in done.stderr


@node
def test_scripts_and_settings_are_not_heeded_on_this_machine(
    project: Path, registry: Registry, tmp_path: Path
) -> None:
    touch = {"preinstall": f"touch {tmp_path}/owned", "postinstall": f"touch {tmp_path}/owned"}
    registry.add("pad", scripts=touch)
    package = {"dependencies": {"pad": "1"}, "scripts": touch}
    (project / "package.json").write_text(json.dumps(package))
    (project / ".npmrc").write_text("registry=http://127.0.0.1:1/\nignore-scripts=false\n")
    done = run(project, "--", "pad")
    assert done.stdout == b"pad 1.0.0\n"
    assert b"are not run: pad\n" in done.stderr and done.stderr.count(b"\n") == 1
    assert not (tmp_path / "owned").exists()


@node
@pytest.mark.parametrize(
    ("asked", "says"), [({"nope": "1"}, b"no package nope"), ({"pad": "2"}, b"there is no pad@2")]
)
def test_a_package_of_node_that_is_not_there_is_one_clear_line(
    project: Path, registry: Registry, data: Path, asked: dict[str, str], says: bytes
) -> None:
    registry.add("pad")
    asks_for(project, **asked)
    done = run(project, "--", "true")
    assert done.returncode == 125 and says in done.stderr and done.stderr.count(b"\n") == 1
    assert installed(data) == []


@node
def test_a_machine_without_npm_says_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks_for(project, pad="1")
    monkeypatch.setenv("PATH", "/nonexistent")
    done = run(project, "--", "true")
    assert (
        done.returncode == 125
        and b"npm is not installed" in done.stderr
        and done.stderr.count(b"\n") == 1
    )
