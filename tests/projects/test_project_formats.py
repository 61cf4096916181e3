"""The files by which Python projects say what they need: each is read, and locks are honoured."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from projects_of_tests import WITH_PYTHON, run
from prompt import boxes  # noqa: F401
from uv import find_uv_bin
from wheels_of_tests import Index, make_source, make_wheel

from hutch.errors import InvalidRequest
from hutch.images.environment import VERSION
from hutch.lines import is_single_line
from hutch.projects import locks, python
from hutch.projects.needs import Needs, read_needs
from hutch.projects.python import Interpreter
from hutch.projects.reading import InstallNote

OTHER = Interpreter("3.9", "aarch64-manylinux_2_17")


def chosen(
    project: Path, *extras: str, interpreter: Interpreter | None = None
) -> tuple[list[str], list[InstallNote]]:
    """What is installed, without hashes, and all notes."""
    needs = read_needs(project, extras)
    wheels, notes = python.Wheels(()), list[InstallNote]()
    if needs.python:
        wheels, notes = python.select(needs.python, interpreter or Interpreter())
    lines = [line.partition(" --hash=")[0] for line in wheels.packages]
    return lines, [*needs.notes, *notes]


def from_git(project: Path) -> dict[str, str]:
    """The packages that are built from a repository, and which."""
    needs = read_needs(project).python
    assert needs
    wheels, _ = python.select(needs, Interpreter())
    return {package.name: package.source.url for package in wheels.git}


def missed(notes: list[InstallNote]) -> dict[str, str]:
    return {note.package: note.reason for note in notes if note.package}


# --- real installs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of `tool`, where every lock names the older one; both need `other`."""
    folder = tmp_path_factory.mktemp("index")
    for version in ("1.0", "2.0"):
        make_wheel(folder, "tool", version, needs=("other",))
        make_wheel(folder, "other", version)
    make_source(folder, "sourced", "raise SystemExit('setup.py was run')\n")
    return folder


@pytest.fixture(scope="module")
def empty() -> Iterator[str]:
    with Index("none") as made:
        yield made.url


@pytest.fixture(autouse=True)
def installed_from(
    index: Path,
    empty: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", str(index))
    monkeypatch.setenv("UV_DEFAULT_INDEX", empty)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "formats-cache"))


def sha256(index: Path, name: str, version: str = "1.0") -> str:
    content = (index / f"{name}-{version}-py3-none-any.whl").read_bytes()
    return "sha256:" + hashlib.sha256(content).hexdigest()


def install(project: Path, folder: Path, *extras: str) -> tuple[dict[str, str], list[InstallNote]]:
    """Names and versions that are in the folder afterwards, and notes."""
    folder.mkdir()
    needs = read_needs(project, extras)
    assert needs.python
    wheels, notes = python.select(needs.python, Interpreter())
    lock = os.open(folder.parent / "lock", os.O_CREAT | os.O_RDWR)
    try:
        more = python.install(wheels, Interpreter(), "/opt", folder, lock, lambda progress: None)
    finally:
        os.close(lock)
    found = [path.name.removesuffix(".dist-info") for path in folder.glob("*.dist-info")]
    versions = dict(name.split("-") for name in found)
    return versions, [*needs.notes, *notes, *more]


def uv_package(index: Path, name: str, more: str = "", version: str = "1.0") -> str:
    wheel = f"{name}-{version}-py3-none-any.whl"
    return f"""
[[package]]
name = "{name}"
version = "{version}"
source = {{ registry = "https://index.invalid/simple" }}
{more}
wheels = [{{ url = "https://index.invalid/{wheel}", hash = "{sha256(index, name, version)}" }}]
"""


UV_TOP = """
version = 1
revision = 3
requires-python = ">=3.9"

[[package]]
name = "mine"
version = "0.1"
source = { virtual = "." }
dependencies = [{ name = "tool" }]
[package.optional-dependencies]
more = [{ name = "extra-one", marker = "sys_platform == 'win32'" }, { name = "lib" }]
[package.dev-dependencies]
dev = [{ name = "from-git" }]
"""
UV_LOCAL = """
[[package]]
name = "lib"
version = "0.1"
source = { editable = "packages/lib" }

[[package]]
name = "from-git"
version = "3.0"
source = { git = "https://code.invalid/x.git?rev=v1#0123" }
"""
PYPROJECT = """
[project]
name = "mine"
version = "0.1"
dependencies = ["tool"]
[project.optional-dependencies]
more = ["extra-one ; sys_platform == 'win32'", "lib"]
"""


def write_uv(project: Path, index: Path, top: str = UV_TOP) -> None:
    tool = uv_package(index, "tool", 'dependencies = [{ name = "other" }]')
    (project / "pyproject.toml").write_text(PYPROJECT)
    (project / "uv.lock").write_text(top + UV_LOCAL + tool + uv_package(index, "other"))


def write_poetry(project: Path, index: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.poetry.dependencies]\ntool = '>=1'\n")
    packages = "".join(
        f"""
[[package]]
name = "{name}"
version = "1.0"
optional = false
files = [{{file = "{name}-1.0-py3-none-any.whl", hash = "{sha256(index, name)}"}}]
{more}
"""
        for name, more in (("tool", "[package.dependencies]\nother = '*'\n"), ("other", ""))
    )
    (project / "poetry.lock").write_text(packages + '[metadata]\nlock-version = "2.1"\n')


def write_pipfile(project: Path, index: Path) -> None:
    (project / "Pipfile").write_text("[packages]\ntool = '*'\n")
    default = {name: {"version": "==1.0", "hashes": [sha256(index, name)]}
               for name in ("tool", "other")}  # fmt: skip
    (project / "Pipfile.lock").write_text(json.dumps({"default": default, "develop": {}}))


def write_pylock(project: Path, index: Path) -> None:
    packages = "".join(
        f"""
[[packages]]
name = "{name}"
version = "1.0"
wheels = [{{ name = "x.whl", hashes = {{ sha256 = "{sha256(index, name)[7:]}" }} }}]
"""
        for name in ("tool", "other")
    )
    (project / "pylock.toml").write_text('lock-version = "1.0"\n' + packages)


LOCKS = {
    "uv.lock": write_uv,
    "poetry.lock": write_poetry,
    "Pipfile.lock": write_pipfile,
    "pylock.toml": write_pylock,
}


@pytest.mark.parametrize("name", LOCKS)
def test_the_versions_of_a_lock_file_are_installed_and_no_others(
    project: Path, tmp_path: Path, index: Path, name: str
) -> None:
    LOCKS[name](project, index)
    assert read_needs(project).files == (name,)
    versions, notes = install(project, tmp_path / "into")
    assert versions == {"tool": "1.0", "other": "1.0"}
    assert set(missed(notes)) == ({"from-git 3.0"} if name == "uv.lock" else set())


@pytest.mark.parametrize("name", LOCKS)
def test_a_wheel_that_is_not_the_one_of_the_lock_file_is_refused(
    project: Path, tmp_path: Path, index: Path, name: str
) -> None:
    LOCKS[name](project, index)
    text = (project / name).read_text()
    wrong = sha256(index, "tool")[7:]
    (project / name).write_text(text.replace(wrong, "0" * 64))
    with pytest.raises(InvalidRequest, match=r"^tool 1\.0 is not the one that its hash names$"):
        install(project, tmp_path / "into")


DECLARED = {
    "pyproject.toml": "[tool.poetry.dependencies]\ntool = '^1.0'\n",
    "Pipfile": "[packages]\ntool = '==1.0'\n",
    "setup.py": "from setuptools import setup\nsetup(name='x', install_requires=['tool<2'])\n",
    "setup.cfg": "[options]\ninstall_requires =\n    tool<2\n",
    "environment.yml": "dependencies:\n- python>=3.9\n- pip:\n  - tool==1.0\n",
    "requirements.txt": "tool<2\n",
}


@pytest.mark.parametrize("name", DECLARED)
def test_what_a_project_declares_is_installed(project: Path, tmp_path: Path, name: str) -> None:
    (project / name).write_text(DECLARED[name])
    assert read_needs(project).files == (name,)
    assert install(project, tmp_path / "into") == ({"tool": "1.0", "other": "2.0"}, [])


def test_a_package_that_comes_as_source_is_left_out_and_all_else_is_installed(
    project: Path, tmp_path: Path
) -> None:
    (project / "requirements.txt").write_text("sourced\ntool==1.0\n")
    versions, notes = install(project, tmp_path / "into")
    assert versions == {"tool": "1.0", "other": "2.0"}
    assert missed(notes)["sourced"].endswith("and name the path of that in its place")


def test_with_require_hashes_no_package_comes_without_one(
    project: Path, tmp_path: Path, index: Path
) -> None:
    line = f"tool==1.0 --hash={sha256(index, 'tool')}\n"
    (project / "requirements.txt").write_text("--require-hashes\n" + line)
    with pytest.raises(InvalidRequest, match=r"^other has no hash, and each"):
        install(project, tmp_path / "into")


@pytest.mark.usefixtures("boxes")
def test_a_run_says_each_time_what_was_not_installed(
    project: Path, index: Path, tmp_path: Path
) -> None:
    write_uv(project, index)
    (project / "requirements.txt").write_text("tool==2.0\n")
    script = "import tool, other; print(tool.VERSION, other.VERSION)"
    command = ("--", "python3", "-c", script)
    (project / "sub").mkdir()
    make_source(project / "sub", "unused", "")
    for _ in range(2):
        done = run(project, *WITH_PYTHON, *command)
        assert done.stdout == b"1.0 1.0\n", done.stderr
        first, second = done.stderr.decode().splitlines()
        assert first == "hutch: requirements.txt is not read: uv.lock says what is installed"
        assert second.startswith(
            "hutch: from-git 3.0 is not installed: the lock file names no comm"
        )
    report = json.loads(run(project, *WITH_PYTHON, "--json", *command).stdout)["project"]
    assert report["needs"] == ["uv.lock"]
    assert [each["package"] for each in report["not_installed"]] == ["from-git 3.0"]
    assert report["notes"] == [first.removeprefix("hutch: ")]
    for name in ("uv.lock", "pyproject.toml"):
        (project / name).unlink()
    (project / "requirements.txt").write_text("sourced\ntool==1.0\n")
    for _ in range(2):  # the second time, nothing has to be installed
        done = run(project, *WITH_PYTHON, *command)
        assert done.stdout == b"1.0 2.0\n", done.stderr
        assert done.stderr.startswith(b"hutch: sourced is not installed: it has to be built")


# --- locks ---------------------------------------------------------------------------------


def test_members_of_a_workspace_are_on_the_path(project: Path, index: Path) -> None:
    write_uv(project, index)
    (project / "packages/lib/src").mkdir(parents=True)
    assert read_needs(project).modules == (".", "packages/lib/src", "packages/lib")
    lines, notes = chosen(project, "more")
    assert lines == ["other==1.0", "tool==1.0"] and set(missed(notes)) == {"from-git 3.0"}


def test_a_folder_outside_of_the_project_is_told_of(project: Path, index: Path) -> None:
    write_uv(project, index)
    text = (project / "uv.lock").read_text()
    (project / "uv.lock").write_text(text.replace("packages/lib", "../lib"))
    assert "outside of the project" in missed(chosen(project, "more")[1])["lib 0.1"]
    assert read_needs(project).modules == (".",)


def test_markers_are_those_of_the_interpreter_in_the_box(project: Path, index: Path) -> None:
    top = UV_TOP.replace(
        '{ name = "tool" }',
        """
    { name = "tool", version = "1.0", marker = "python_full_version >= '3.10'" },
    { name = "tool", version = "2.0", marker = "platform_machine == 'aarch64'" },
    """,
    )
    write_uv(project, index, top)
    with (project / "uv.lock").open("a") as file:
        file.write(uv_package(index, "tool", version="2.0"))
    assert chosen(project, interpreter=OTHER)[0] == ["tool==2.0"]
    same = Interpreter("3.12", "x86_64-manylinux_2_17")
    assert chosen(project, interpreter=same)[0] == ["other==1.0", "tool==1.0"]


def test_conflicting_extras_are_told_apart(project: Path, index: Path) -> None:
    top = UV_TOP.replace(
        '{ name = "tool" }',
        """
    { name = "tool", version = "1.0", marker = "extra == 'extra-4-mine-more'" },
    { name = "tool", version = "2.0", marker = "extra != 'extra-4-mine-more'" },
    """,
    )
    write_uv(project, index, top)
    with (project / "uv.lock").open("a") as file:
        file.write(uv_package(index, "tool", version="2.0"))
    assert chosen(project)[0] == ["tool==2.0"]
    assert chosen(project, "more")[0] == ["other==1.0", "tool==1.0"]


def test_a_lock_that_looks_out_of_date_is_used_and_told_of(project: Path, index: Path) -> None:
    for name in ("uv.lock", "poetry.lock"):
        LOCKS[name](project, index)
        declared = "dependencies = ['tool>=2', 'newer']"
        if name == "poetry.lock":
            (project / "uv.lock").unlink()
        (project / "pyproject.toml").write_text(f"[project]\nname = 'mine'\n{declared}\n")
        lines, notes = chosen(project)
        assert lines == ["other==1.0", "tool==1.0"]
        assert f"{name} does not have it" in missed(notes)["newer"]
        (note,) = [each.reason for each in notes if "out of date:" in each.reason]
        assert "it has tool 1.0, which is used, and the project asks for tool>=2" in note


def test_extras_and_groups_of_poetry_are_followed_in_its_lock(project: Path) -> None:
    names = ("a", "b", "c", "d", "e")
    of_extra = """f = {version = "*", optional = true, markers = 'extra == "x"'}"""
    needs = {"a": f'{of_extra}\nb = "^1"', "f": ""}
    (project / "pyproject.toml").write_text(
        textwrap.dedent("""
        [tool.poetry.dependencies]
        a = {version = "^1.0", extras = ["x"]}
        c = {version = "*", optional = true}
        [tool.poetry.extras]
        more = ["c"]
        [tool.poetry.group.test.dependencies]
        d = "*"
        [tool.poetry.group.docs]
        optional = true
        [tool.poetry.group.docs.dependencies]
        e = "*"
        """)
    )
    packages = "".join(
        f'[[package]]\nname = "{name}"\nversion = "1.0"\nfiles = []\n'
        f"[package.dependencies]\n{needs.get(name, '')}\n"
        f"[package.extras]\nx = ['f (>=1)']\n"
        for name in (*names, "f")
    )
    (project / "poetry.lock").write_text(packages + '[metadata]\nlock-version = "2.0"\n')
    assert chosen(project) == (["a==1.0", "b==1.0", "d==1.0", "f==1.0"], [])
    assert set(chosen(project, "more")[0]) == {f"{name}==1.0" for name in "abcdf"}
    assert set(chosen(project, "docs")[0]) == {f"{name}==1.0" for name in "abdef"}


def test_an_extra_of_a_package_in_a_poetry_lock_is_not_one_of_the_project(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        "[project]\nname = 'mine'\nversion = '1'\ndependencies = ['a[X_1]']\n"
        "[project.optional-dependencies]\ny = ['d']\n"
    )
    older = 'python_version < "3.2" and extra == "X_1"'
    needs = (
        """b = {version = "*", optional = true, markers = 'extra == "X_1" or extra == "y"'}\n"""
        """c = {version = "*", optional = true, markers = 'extra == "y"'}\n"""
        f"""d = {{version = "*", optional = true, markers = '{older}'}}\n"""
    )
    text = "".join(
        f'[[package]]\nname = "{name}"\nversion = "1.0"\nfiles = []\n'
        f"[package.dependencies]\n{needs if name == 'a' else ''}\n"
        f"[package.extras]\nX_1 = ['b', 'd']\ny = ['b', 'c']\n"
        for name in ("a", "b", "c", "d")
    )
    (project / "poetry.lock").write_text(text + '[metadata]\nlock-version = "2.1"\n')
    assert chosen(project) == (["a==1.0", "b==1.0"], [])
    assert chosen(project, "y") == (["a==1.0", "b==1.0", "d==1.0"], [])


def test_an_older_poetry_lock_has_its_hashes_in_another_place(project: Path, index: Path) -> None:
    write_poetry(project, index)
    hashes = "".join(
        f'{name} = [{{file = "{name}-1.0-py3-none-any.whl", hash = "{sha256(index, name)}"}}]\n'
        for name in ("tool", "other")
    )
    path = project / "poetry.lock"
    text = re.sub(r"files = .*\n", 'category = "main"\n', path.read_text())
    path.write_text(text.replace('"2.1"', '"1.1"') + f"[metadata.files]\n{hashes}")
    needs = read_needs(project).python
    assert needs
    assert python.select(needs, Interpreter())[0].packages == tuple(
        f"{name}==1.0 --hash={sha256(index, name)}" for name in ("other", "tool")
    )


def test_groups_of_the_standard_are_followed_in_a_poetry_lock(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        "[project]\nname = 'mine'\nversion = '1'\n[dependency-groups]\n"
        "lint = ['a']\nMy_Docs = ['b']\n"
        "[tool.poetry.group.my-docs]\noptional = true\n"
    )
    text = "".join(
        f'[[package]]\nname = "{name}"\nversion = "1.0"\nfiles = []\n' for name in ("a", "b")
    )
    (project / "poetry.lock").write_text(text + '[metadata]\nlock-version = "2.1"\n')
    assert chosen(project) == (["a==1.0"], [])
    assert chosen(project, "my-docs") == (["a==1.0", "b==1.0"], [])


@pytest.mark.parametrize(
    ("setting", "installed"),
    [("", ["tool"]), ('["My_Docs"]', ["other"]), ('"all"', ["other", "tool"]), ("[]", [])],
)
def test_the_default_groups_of_uv_are_installed(
    project: Path, index: Path, setting: str, installed: list[str]
) -> None:
    pyproject = "[project]\nname = 'mine'\n[dependency-groups]\ndev = ['tool']\n"
    pyproject += "My_Docs = ['other']\n"
    pyproject += f"[tool.uv]\ndefault-groups = {setting}\n" if setting else ""
    (project / "pyproject.toml").write_text(pyproject)
    assert sorted(chosen(project)[0]) == installed
    (project / "uv.lock").write_text(
        'version = 1\n[[package]]\nname = "mine"\nsource = { virtual = "." }\n'
        '[package.dev-dependencies]\ndev = [{ name = "tool" }]\nmy-docs = [{ name = "other" }]\n'
        + uv_package(index, "tool")
        + uv_package(index, "other")
    )
    assert chosen(project) == ([f"{name}==1.0" for name in installed], [])
    for name in ("My_Docs", "my-docs"):
        assert "other==1.0" in chosen(project, name)[0]


def test_what_pipenv_did_not_need_where_it_made_its_lock_is_not_installed(project: Path) -> None:
    default = {"tool": {"version": "==1.0"}, "other": {"version": "*"}, "more": {"version": "*"}}
    (project / "Pipfile.lock").write_text(json.dumps({"default": default, "develop": {}}))
    pipfile = "[packages]\ntool = '*'\nother = {version = '*', sys_platform = \"== 'win32'\"}\n"
    (project / "Pipfile").write_text(pipfile)
    lines, notes = chosen(project)
    assert lines == ["tool==1.0"] and set(missed(notes)) == {"more"}
    (project / "Pipfile").write_text(pipfile.replace("win32", "linux"))
    lines, notes = chosen(project)
    assert lines == ["tool==1.0"] and set(missed(notes)) == {"more", "other"}
    assert "Pipfile.lock does not have it" in missed(notes)["other"]


def test_a_lock_is_chosen_before_all_else_and_that_is_told(project: Path, index: Path) -> None:
    for write in LOCKS.values():
        write(project, index)
    (project / "requirements.txt").write_text("tool==2.0\n")
    write_uv(project, index)
    _, notes = chosen(project)
    told = [note.reason for note in notes if not note.package]
    assert told == [
        f"{name} is not read: uv.lock says what is installed"
        for name in ("pylock.toml", "poetry.lock", "Pipfile.lock", "requirements.txt", "Pipfile")
    ]


def test_groups_of_a_standard_lock_are_followed(project: Path) -> None:
    entries = {"always": "", "dev": "'dev' in dependency_groups", "docs": "'docs' in extras"}
    text = 'lock-version = "1.0"\ndefault-groups = ["dev"]\nextras = ["docs"]\n'
    for name, marker in entries.items():
        text += f'[[packages]]\nname = "{name}"\nversion = "1"\nwheels = [{{}}]\n'
        text += f'marker = "{marker}"\n' if marker else ""
    (project / "pylock.toml").write_text(text)
    assert chosen(project)[0] == ["always==1", "dev==1"]
    assert chosen(project, "Docs")[0] == ["always==1", "dev==1", "docs==1"]
    with pytest.raises(InvalidRequest, match=r"--extra dosc: pylock.toml has no extra or group"):
        chosen(project, "dosc")


@contextmanager
def served_index(folder: Path) -> Iterator[str]:
    """The URL of an index with the wheels in this folder, and their hashes."""
    site = folder / "site"
    for wheel in folder.glob("*.whl"):
        pages = site / wheel.name.split("-")[0].replace("_", "-")
        pages.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        with (pages / "index.html").open("a") as page:
            page.write(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>\n')
        wheel.rename(pages / wheel.name)

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("chosen_too", [[], ["Docs_1", "more"]])
def test_a_lock_that_uv_made_is_read_as_uv_reads_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen_too: list[str]
) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    of_extra = "of-extra ; extra == 'fast'"
    for version in ("1.0", "2.0"):
        make_wheel(folder, "tool", version, needs=("other", of_extra), about="Provides-Extra: fast")
        for name in ("other", "of-extra", "linter", "writer", "of-more"):
            make_wheel(folder, name, version)
    (project / "pyproject.toml").write_text(
        textwrap.dedent("""
        [project]
        name = "mine"
        version = "1"
        requires-python = ">=3.9"
        dependencies = ["tool[fast]<2", "other<2 ; python_version < '3'", "writer; os_name == 'nt'"]
        [project.optional-dependencies]
        more = ["of-more<2"]
        [dependency-groups]
        Lint_1 = ["linter<2"]
        Docs_1 = ["writer<2"]
        [tool.uv]
        default-groups = ["Lint_1"]
        """)
    )
    monkeypatch.delenv("UV_FIND_LINKS")
    uv = [find_uv_bin(), "--no-config", "--no-python-downloads", "--directory", str(project)]
    with served_index(folder) as url:
        lock = [*uv, "lock", "--default-index", url, "--python", sys.executable]
        subprocess.run(lock, check=True, capture_output=True)
    wanted = ["--group=Docs_1", "--extra=more"] if chosen_too else []
    form = ("--no-hashes", "--no-header", "--no-annotate", "--no-emit-project")
    export = [*uv, "export", "--frozen", *form, *wanted, "--python", sys.executable]
    told = subprocess.run(export, check=True, capture_output=True, text=True).stdout
    expected = [line for line in told.splitlines() if " ; os_name" not in line]
    lines, notes = chosen(project, *chosen_too)
    assert lines == sorted(expected) and "of-extra==2.0" in lines and "linter==1.0" in lines
    assert [note for note in notes if "UV_INDEX" not in note.reason] == []


# --- declarations --------------------------------------------------------------------------


def test_a_package_from_elsewhere_is_not_taken_from_the_index_for_another(
    project: Path, tmp_path: Path
) -> None:
    (project / "requirements.txt").write_text("tool\nother @ git+ssh://code.invalid/other\n")
    installed, notes = install(project, tmp_path / "folder")
    assert installed == {"tool": "2.0"}  # which needs `other`
    assert "other" in missed(notes)


def test_a_hash_is_kept_for_a_package_of_another_index(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.uv.sources]\ntool = { index = "x" }\n')
    (project / "requirements.txt").write_text(f"tool==1.0 --hash=sha256:{'0' * 64}\n")
    needs = read_needs(project, ())
    assert needs.python and needs.python.packages == (f"tool==1.0 --hash=sha256:{'0' * 64}",)


def test_a_lock_with_weak_hashes_only_is_refused(project: Path) -> None:
    default = {"tool": {"version": "==1.0", "hashes": ["md5:" + "0" * 32]}}
    (project / "Pipfile.lock").write_text(json.dumps({"default": default, "develop": {}}))
    with pytest.raises(InvalidRequest, match=r"the hashes of tool \(md5\) are too weak"):
        chosen(project)


@pytest.mark.parametrize("value", ["!!int ''", "!!timestamp x", "!!bool x"])
def test_a_malformed_value_of_yaml_is_said_to_be_that(project: Path, value: str) -> None:
    (project / "environment.yml").write_text(f"name: {value}\n")
    with pytest.raises(InvalidRequest, match=r"environment\.yml cannot be read"):
        chosen(project)


def test_a_package_that_poetry_takes_from_elsewhere_is_not_taken_from_the_index(
    project: Path,
) -> None:
    (project / "pyproject.toml").write_text(
        '[project]\nname = "x"\nversion = "1"\ndependencies = ["tool", "mine", "twice"]\n'
        '[tool.poetry.dependencies]\nmine = { git = "https://code.invalid/mine.git" }\n'
        'twice = [{ version = "1", python = "<3" }, { url = "https://code.invalid/t.whl" }]\n'
    )
    packages, notes = chosen(project)
    assert packages == ["tool"] and set(missed(notes)) == {"twice"}
    assert from_git(project) == {"mine": "https://code.invalid/mine.git"}


@pytest.mark.parametrize(
    ("written", "means"),
    [("^1.2.3", "<2,>=1.2.3"), ("^0.2.3", "<0.3,>=0.2.3"), ("^0.0.3", "<0.0.4,>=0.0.3"),
     ("^0.0", "<0.1,>=0.0"), ("^0", "<1,>=0"), ("^1.0.0a1", "<2,>=1.0.0a1"),
     ("~1.2.3", "<1.3,>=1.2.3"), ("~1.2", "<1.3,>=1.2"), ("~1", "<2,>=1"), ("~=1.2", "~=1.2"),
     ("1.2.*", "==1.2.*"), ("*", ""), ("1.2.3", "==1.2.3"), (">= 1, < 2", "<2,>=1"),
     (">=1 <2", "<2,>=1"), ("!=1.3.*", "!=1.3.*"), ("^1!2.0", "<1!3,>=1!2.0")],
)  # fmt: skip
def test_versions_of_poetry_become_those_of_pip(project: Path, written: str, means: str) -> None:
    text = f"[tool.poetry.dependencies]\npython = '^3.8'\nsix = '{written}'\n"
    (project / "pyproject.toml").write_text(text)
    assert chosen(project) == ([f"six{means}"], [])


def test_all_of_poetrys_table_is_installed_or_told_of(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        textwrap.dedent("""
        [tool.poetry.dependencies]
        python = "^3.99"
        a = [{version = "^1", python = "<3.9"}, {version = "^2", python = "^3.9"}]
        b = ">=1,<2 || ^3"
        c = {git = "https://code.invalid/c.git"}
        d = {version = "*", platform = "darwin"}
        e = {path = "sub"}
        """)
    )
    (project / "sub").mkdir()
    lines, notes = chosen(project)
    assert lines == [
        'a<2,>=1 ; python_full_version < "3.9"',
        'a<3,>=2 ; python_full_version < "4" and python_full_version >= "3.9"',
        'd ; sys_platform == "darwin"',
    ]
    assert set(missed(notes)) == {"b", "e"} and "sub" in read_needs(project).modules
    assert from_git(project) == {"c": "https://code.invalid/c.git"}
    assert any("requires Python <4,>=3.99, but the box has" in str(note) for note in notes)


def test_setup_py_is_read_and_never_run(project: Path, tmp_path: Path) -> None:
    (project / "setup.py").write_text(
        f"open({str(tmp_path / 'owned')!r}, 'w')\n"
        "from setuptools import setup\nREQUIRES = ['a>=1', 'b']\n"
        "setup(name='x', install_requires=REQUIRES + ['c'], extras_require={'test': ['d']},\n"
        "      python_requires='>=3.9')\n"
    )
    assert chosen(project, "test") == (["a>=1", "b", "c", "d"], [])
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "text",
    ["setup(install_requires=open('x').read().split())",
     "names = ['a']\nnames.append('b')\nsetup(install_requires=names)",
     "names = ['a']\nnames += ['b']\nsetup(install_requires=names)",
     "setup(**arguments)", "setup(install_requires=['a' for _ in x])", "setup(", "x = '\0'",
     "setup(install_requires=" + "(" * 90 + "'a'" + ")" * 90 + ")" + "+" * 2,
     "setup(install_requires=" + "-" * 100_000 + "1)"],
    ids=range(9),
)  # fmt: skip
def test_a_setup_py_that_computes_is_told_of(project: Path, text: str) -> None:
    (project / "setup.py").write_text(text)
    lines, notes = chosen(project)
    assert lines == [] and "cannot be read without running it" in str(notes[0])


def test_conda_packages_are_installed_if_the_index_has_the_same_or_told_of(project: Path) -> None:
    (project / "environment.yml").write_text(
        textwrap.dedent("""
        name: x
        channels: [conda-forge]
        dependencies:
          - python=3.99
          - numpy=1.26
          - conda-forge::pandas>=2,<3
          - scipy=1.11.4=py311_0
          - pytorch
          - nodejs=20
          - scikit-learn 1.4|1.5
          - pip
          - pip:
            - tool==1.0
            - -r more.txt
        """)
    )
    (project / "more.txt").write_text("six\n")
    lines, notes = chosen(project)
    assert lines == ["numpy==1.26.*", "pandas<3,>=2", "scipy==1.11.4", "torch", "tool==1.0", "six"]
    assert set(missed(notes)) == {"nodejs=20", "scikit-learn 1.4|1.5"}
    assert notes[-1].reason == (
        f"environment.yml requires Python ==3.99.*, but the box has {VERSION}"
    )


def test_sources_of_uv_are_followed_or_told_of(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        textwrap.dedent("""
        [project]
        name = "x"
        dependencies = ["a", "b", "c"]
        [tool.uv.sources]
        a = {git = "https://code.invalid/a"}
        b = {index = "internal"}
        """)
    )
    lines, notes = chosen(project)
    assert lines == ["b", "c"] and missed(notes) == {}
    assert from_git(project) == {"a": "https://code.invalid/a"}
    assert "set UV_INDEX" in notes[-1].reason


# --- hostile files -------------------------------------------------------------------------

UV_EVIL = 'version = 1\n[[package]]\nname = "x"\nsource = {{virtual = "."}}\n{more}\n'
UV_ONE = (
    "version = 1\n[[package]]\nname = {name}\nversion = {version}\nwheels = [{{hash = {hash}}}]\n"
)
UV_ONE += 'source = {{registry = "https://h/"}}\n'


def uv_one(name: str = "a", version: str = "1", hashed: str = "sha256:" + "0" * 64) -> str:
    quoted = {"name": json.dumps(name), "version": json.dumps(version), "hash": json.dumps(hashed)}
    return UV_ONE.format(**quoted)


@pytest.mark.parametrize(
    ("name", "text"),
    [("uv.lock", uv_one(name="a\r--pre")), ("uv.lock", uv_one(version="1\r--find-links=/tmp")),
     ("uv.lock", uv_one(version="1 --pre")), ("uv.lock", uv_one(version="1 @ https://h/x.whl")),
     ("uv.lock", uv_one(hashed="sha256:x --pre")), ("uv.lock", uv_one(hashed="md5:0\n--pre")),
     ("uv.lock", uv_one(name="-r/etc/passwd")), ("uv.lock", "version = 2"), ("uv.lock", "["),
     ("uv.lock", "version = 1\npackage = 1"), ("uv.lock", "version = 1\npackage = [1]"),
     ("uv.lock", "version = 1\nx = " + "[" * 100_000), ("uv.lock", "version = " + "1" * 10_000),
     ("uv.lock", UV_EVIL.format(more='dependencies = [{name = "x", marker = "a\\r b"}]')),
     ("uv.lock", UV_EVIL.format(more='dependencies = [{name = "x", marker = "nonsense"}]')),
     ("uv.lock", UV_EVIL.format(more=f'dependencies = [{{name="x", marker="{"(" * 5000}"}}]')),
     ("poetry.lock", '[[package]]\nname = "a"\nversion = "1"\n'),
     ("poetry.lock", '[[package]]\nname = "a"\nversion = "--pre"\n[metadata]\nlock-version="2.1"'),
     ("Pipfile.lock", '{"default": {"a": {"version": "==1 --pre"}}}'),
     ("Pipfile.lock", '{"default": {"a": {"version": ">=1"}}}'), ("Pipfile.lock", "[" * 100_000),
     ("Pipfile.lock", '{"default": {"a\\n": {"version": "==1"}}}'),
     ("Pipfile.lock", '{"default": {"a": {"file": "../x-1-py3-none-any.whl"}}}'),
     ("pylock.toml", 'lock-version = "2.0"'),
     ("environment.yml", "a: &a [x]\nb: *a"), ("environment.yml", "[" * 10_000),
     ("environment.yml", "dependencies: 1"), ("environment.yml", "dependencies: [1]"),
     ("environment.yml", 'dependencies: ["a\\r--pre"]'),
     ("environment.yml", "dependencies: [{pip: ['--index-url http://h/']}]"),
     ("environment.yml", "!!python/object/apply:os.system [touch owned]"),
     ("environment.yml", "dependencies: 2001-99-99"),
     ("setup.cfg", "install_requires = a"), ("setup.cfg", "[options]\ninstall_requires = a\x85b"),
     ("setup.py", "setup(install_requires=['a\\r--pre'])"),
     ("Pipfile", "[packages]\n'a ; x' = '*'"), ("Pipfile", "[packages]\na = 1"),
     ("Pipfile", "[packages]\na = {version = '*', markers = 'x --pre'}"),
     ("pyproject.toml", "[tool.poetry.dependencies]\na = {version = '1', extras = ['b] @ c']}"),
     ("pyproject.toml", "[tool.poetry.dependencies]\na = {version = '1', python = 'nonsense'}")],
    ids=range(40),
)  # fmt: skip
def test_a_hostile_file_is_refused_in_one_line(project: Path, name: str, text: str) -> None:
    (project / name).write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        chosen(project)
    assert is_single_line(str(caught.value)), caught.value
    assert not (project / "owned").exists()


@pytest.mark.parametrize("name", ["uv.lock", "Pipfile.lock", "environment.yml", "setup.py"])
def test_a_file_that_is_too_large_is_refused(project: Path, name: str) -> None:
    with (project / name).open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(InvalidRequest, match="too large"):
        read_needs(project)


def test_a_graph_with_circles_and_many_paths_is_followed_once(project: Path) -> None:
    count = 300
    text = 'version = 1\n[[package]]\nname = "n0"\nversion = "1"\nsource = {virtual = "."}\n'
    text += 'dependencies = [{name = "n1"}]\n'
    for number in range(1, count):
        others = [min(number + step, count - 1) for step in (1, 2, 3)]
        edges = ", ".join(f'{{name = "n{other}", extra = ["n0"]}}' for other in [1, *others])
        text += uv_one(f"n{number}").partition("\n")[2] + f"dependencies = [{edges}]\n"
    (project / "uv.lock").write_text(text)
    assert len(chosen(project)[0]) == count - 1


def test_a_lock_with_too_many_packages_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "MOST", 100)
    default = {f"n{number}": {"version": "==1"} for number in range(101)}
    (project / "Pipfile.lock").write_text(json.dumps({"default": default}))
    with pytest.raises(InvalidRequest, match="too many packages"):
        read_needs(project)


def test_a_lock_without_packages_needs_nothing(project: Path) -> None:
    (project / "Pipfile.lock").write_text("{}")
    assert read_needs(project) == Needs(files=("Pipfile.lock",))
