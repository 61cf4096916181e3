"""What a project needs, read from its files without believing them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from wheels_of_tests import make_wheel

from hutch.errors import InvalidRequest
from hutch.projects.needs import Needs, read_needs


def packages(top: Path, *extras: str) -> tuple[str, ...]:
    needs = read_needs(top, extras).python
    return needs.packages if needs else ()


def requirements(top: Path, text: str, name: str = "requirements.txt") -> None:
    (top / name).parent.mkdir(parents=True, exist_ok=True)
    (top / name).write_text(text)


# --- requirements.txt ----------------------------------------------------------------------


def test_a_project_that_asks_for_nothing_needs_nothing(project: Path) -> None:
    assert read_needs(project) == Needs()


def test_requirements_are_read_as_pip_reads_them(project: Path) -> None:
    lines = ["# all of it", "Pandas >= 2 , <3  # tables", "", "httpx[http2] \\", " ==0.27",
             "six; python_version > '3'", "-r more/dev.txt", "--requirement=base.txt"]  # fmt: skip
    requirements(project, "\ufeff" + "\r\n".join(lines))
    requirements(project, "-r../base.txt\npytest\n", "more/dev.txt")
    requirements(project, "numpy\n", "base.txt")
    assert packages(project) == (
        "pandas<3,>=2", "httpx[http2]==0.27", 'six ; python_version > "3"', "numpy", "pytest",
    )  # fmt: skip


def test_files_that_name_each_other_are_read_once(project: Path) -> None:
    requirements(project, "-r b.txt\nsix\n")
    requirements(project, "-r requirements.txt\nnumpy\n", "b.txt")
    assert set(packages(project)) == {"six", "numpy"}


def test_bounds_are_not_asked_for_themselves(project: Path) -> None:
    requirements(project, "six\n-c bounds.txt\n")
    requirements(project, "numpy<2\n", "bounds.txt")
    needs = read_needs(project).python
    assert needs and (needs.packages, needs.bounds) == (("six",), ("numpy<2",))


def test_hashes_stay_with_their_package(project: Path) -> None:
    digest = "sha256:" + "0a" * 32
    requirements(project, f"six==1.16 \\\n    --hash={digest} \\\n    --hash {digest}\n")
    assert packages(project) == (f"six==1.16 --hash={digest} --hash={digest}",)


def test_a_wheel_in_the_project_counts_by_its_content(project: Path) -> None:
    (project / "wheels").mkdir()
    make_wheel(project / "wheels", "mine")
    requirements(project, "./wheels/mine-1.0-py3-none-any.whl\n")
    (one,) = packages(project)
    assert one.startswith("mine @ file://") and "#sha256=" in one


@pytest.mark.parametrize(
    ("line", "says"),
    [("--index-url http://elsewhere/", "does not decide where packages come from"),
     ("-i http://elsewhere/", "UV_DEFAULT_INDEX"),
     ("--extra-index-url=http://elsewhere/", "UV_INDEX"),
     ("-f /tmp", "UV_FIND_LINKS"),
     ("--config-settings x=y", "--config-settings is not allowed"),
     ("../../x-1.0-py3-none-any.whl", "no wheel"),
     ("six; python_version > '${HOME}'", "variables are not allowed"),
     ("six --install-option=x", "options and variables are not allowed"),
     ("-r ../other.txt", "not in the project"),
     ("-r /etc/passwd", "not in the project"),
     ("-r nope.txt", "does not exist"),
     ("no such name", "no package can be called")],
)  # fmt: skip
def test_what_is_not_a_name_and_a_version_is_refused(project: Path, line: str, says: str) -> None:
    requirements(project, f"numpy\n{line}\n")
    with pytest.raises(InvalidRequest, match=f"^requirements.txt.*({says})"):
        read_needs(project)


@pytest.mark.parametrize(
    ("line", "package", "says"),
    [("six @ https://elsewhere/six-1-py3-none-any.whl", "six", "from an address"),
     ("git+https://user:secret@elsewhere/x.git", "git+https", "it has no name: write it like"),
     ("x @ git+https://user:secret@elsewhere/x.git", "x", r"//\*\*\*@elsewhere.*password.*wheel"),
     ("x @ git+ssh://elsewhere/x.git@v1 ; os_name == 'posix'", "x", "only https repos.*wheel"),
     ("-e git+http://elsewhere/x.git#egg=x", "x", "only https repositories"),
     ("-e ./sub", "./sub", "its modules are on the path"),
     ("../sub", "../sub", "outside of the project"),
     ("/etc", "/etc", "outside of the project")],
)  # fmt: skip
def test_what_is_not_of_the_index_is_left_out_and_all_else_is_installed(
    project: Path, line: str, package: str, says: str
) -> None:
    (project / "sub").mkdir()
    requirements(project, f"numpy\n{line}\nsix\n")
    needs = read_needs(project)
    assert needs.python and needs.python.packages == ("numpy", "six")
    (note,) = needs.notes
    assert re.search(says, note.reason) and note.package.startswith(package), note
    assert "secret" not in str(note)
    assert needs.modules == (("sub",) if "./sub" in line and ".." not in line else ())


def test_nothing_is_read_through_a_link(project: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret stuff\n")
    (project / "requirements.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidRequest, match="is it a link") as caught:
        read_needs(project)
    assert "stuff" not in str(caught.value)


# --- pyproject.toml ------------------------------------------------------------------------

PYPROJECT = """
[project]
name = "My.Project"
dependencies = ["numpy>1"]
[project.optional-dependencies]
docs = ["sphinx"]
all = ["my-project[docs]", "rich"]
[dependency-groups]
dev = ["pytest", {include-group = "lint"}]
lint = ["ruff"]
slow = ["scipy"]
"""


def test_dependencies_and_the_group_dev_are_wanted(project: Path) -> None:
    (project / "pyproject.toml").write_text(PYPROJECT)
    assert packages(project) == ("numpy>1", "pytest", "ruff")


def test_a_project_with_nothing_but_extras_is_told_their_names(project: Path) -> None:
    extras = "[project.optional-dependencies]\ndocs = ['sphinx']\nall = ['rich']\n"
    text = f"[project]\nname = 'a'\n{extras}"
    (project / "pyproject.toml").write_text(text)
    (note,) = read_needs(project).notes
    assert str(note).endswith("--extra NAME installs one: docs, all")
    assert read_needs(project, ["docs"]).notes == ()


def test_extras_and_groups_are_wanted_when_they_are_named(project: Path) -> None:
    (project / "pyproject.toml").write_text(PYPROJECT)
    assert packages(project, "slow", "Docs")[3:] == ("scipy", "sphinx")
    with pytest.raises(InvalidRequest, match="no extra or group"):
        read_needs(project, ["nope"])


def test_the_project_itself_is_never_looked_for_in_an_index(project: Path) -> None:
    (project / "pyproject.toml").write_text(PYPROJECT)
    assert set(packages(project, "all")) == {"numpy>1", "pytest", "ruff", "sphinx", "rich"}
    requirements(project, "-e .[docs]\n-e .\n.\nmy_project\n")
    assert set(packages(project)) == {"numpy>1", "pytest", "ruff", "sphinx"}


def test_its_own_modules_are_found_where_installing_would_find_them(project: Path) -> None:
    assert read_needs(project).modules == ()
    (project / "pyproject.toml").write_text("")
    assert read_needs(project).modules == (".",)
    (project / "src").mkdir()
    assert read_needs(project).modules == ("src", ".")


@pytest.mark.parametrize(
    "text",
    ["[project", "project = 1", "[project]\ndependencies = 'six'", "[project]\ndependencies = [1]",
     "[dependency-groups]\ndev = [{include-group = 'dev'}]", "[dependency-groups]\ndev = [[]]"],
)  # fmt: skip
def test_a_broken_file_is_an_error_that_names_it(project: Path, text: str) -> None:
    (project / "pyproject.toml").write_text(text)
    with pytest.raises(InvalidRequest, match=r"^pyproject\.toml"):
        read_needs(project)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [("pyproject.toml", "[project]\ndynamic = ['dependencies']", "are computed when it is built"),
     ("pdm.lock", "", "is not read: the newest versions that the project allows"),
     ("setup.py", "import this", "cannot be read without running it")],
)  # fmt: skip
def test_what_is_not_read_is_told(project: Path, name: str, text: str, says: str) -> None:
    (project / name).write_text(text)
    (note,) = read_needs(project).notes
    assert says in str(note)


@pytest.mark.parametrize(
    "name",
    ["requirements-dev.txt", "dev-requirements.txt", "requirements_test.txt", "requirements.in",
     "requirements/base.txt", "requirements/dev.in"],
)  # fmt: skip
def test_requirements_that_nothing_names_are_told(project: Path, name: str) -> None:
    requirements(project, "six\n", name)
    needs = read_needs(project)
    (note,) = needs.notes
    assert needs.python is None
    assert str(note) == (
        f"{name}: not installed; to install one, write `-r {name}` in requirements.txt"
    )
    requirements(project, f"-r {name}\n")
    assert (packages(project), read_needs(project).notes) == (("six",), ())


def test_requirements_that_were_compiled_are_told_once(project: Path) -> None:
    for name in ("requirements.in", "requirements.txt", "dev-requirements.in",
                 "dev-requirements.txt"):  # fmt: skip
        requirements(project, "six\n", name)
    (note,) = read_needs(project).notes
    assert str(note).startswith("dev-requirements.txt: not installed;")


def test_requirements_beside_a_lock_are_told(project: Path) -> None:
    requirements(project, "six\n", "requirements-dev.txt")
    (project / "pylock.toml").write_text("lock-version = '1.0'\ncreated-by = 'x'\npackages = []\n")
    (note,) = read_needs(project).notes
    assert str(note) == "requirements-dev.txt: not read, for pylock.toml says what is installed"


def test_dependencies_of_an_environment_of_hatch_are_told(project: Path) -> None:
    text = "[tool.hatch.envs.default]\ndependencies = ['pytest']\n"
    (project / "pyproject.toml").write_text(text)
    (note,) = read_needs(project).notes
    assert "[tool.hatch.envs.default] are not installed" in str(note) and "--extra" in str(note)


# --- package.json --------------------------------------------------------------------------


def node(project: Path, package: Any, lock: Any = None) -> Needs:
    (project / "package.json").write_text(json.dumps(package))
    if lock is not None:
        (project / "package-lock.json").write_text(json.dumps(lock))
    return read_needs(project)


def test_of_package_json_only_names_and_versions_are_taken(project: Path) -> None:
    needs = node(project, {
        "name": "x", "scripts": {"preinstall": "touch owned"}, "publishConfig": {"registry": "x"},
        "dependencies": {"left-pad": "^1.3.0", "@types/node": ">=20 <23 || 24.x", "y": "npm:x@1"},
        "overrides": {"a": {".": "1", "b": "$left-pad"}},
    }).node  # fmt: skip
    assert needs and json.loads(needs.package) == {
        "name": "project", "version": "0.0.0", "private": True,
        "dependencies": {"left-pad": "^1.3.0", "@types/node": ">=20 <23 || 24.x", "y": "npm:x@1"},
        "overrides": {"a": {".": "1", "b": "$left-pad"}},
    }  # fmt: skip


def test_of_a_lock_file_addresses_are_not_taken(project: Path) -> None:
    entry = {"version": "1.0.0", "resolved": "http://elsewhere/x.tgz", "integrity": "sha512-x"}
    lock = {"lockfileVersion": 3, "packages": {"": {}, "node_modules/x": entry},
            "dependencies": {"x": entry}}  # fmt: skip
    needs = node(project, {"dependencies": {"x": "1"}}, lock).node
    assert needs and needs.lock and b"elsewhere" not in needs.lock
    kept = json.loads(needs.lock)["packages"]["node_modules/x"]
    assert kept == {"version": "1.0.0", "integrity": "sha512-x"}


@pytest.mark.parametrize(
    "asked",
    ["file:/etc", "link:../x", "git+ssh://git@h/x", "user/repo", "http://h/x.tgz", "github:a/b",
     "../x", "workspace:*", "npm:http://x", "..", ".", " ..", "npm:..", "npm:x@..",
     "x.tgz", "x.tar.gz", "npm:x@y.TAR"],
)  # fmt: skip
def test_a_package_from_elsewhere_is_left_out_and_told_of(project: Path, asked: str) -> None:
    needs = node(project, {"dependencies": {"x": asked, "y": "1"}})
    assert needs.node and json.loads(needs.node.package)["dependencies"] == {"y": "1"}
    (note,) = needs.notes
    assert note.package == "x" and "only packages of the registry" in note.reason


@pytest.mark.parametrize("asked", [1, None, ["1"]])
def test_a_version_that_is_no_text_is_refused(project: Path, asked: Any) -> None:
    with pytest.raises(InvalidRequest, match="by name and version"):
        node(project, {"dependencies": {"x": asked}})


@pytest.mark.parametrize(
    "packages",
    [{"node_modules/x": {"link": True, "resolved": "sub"}, "sub": {}},
     {"node_modules/x": {"resolved": "git+ssh://h/x"}},
     {"node_modules/x": {"resolved": "file:x.tgz"}},
     {"node_modules/x": {"link": True, "resolved": "../x"}, "../x": {}}],
)  # fmt: skip
def test_what_a_lock_file_takes_from_elsewhere_is_left_out_and_told_of(
    project: Path, packages: Any
) -> None:
    packages["node_modules/y"] = {"version": "1.0.0"}
    needs = node(project, {"dependencies": {"y": "1"}}, {"packages": packages})
    assert needs.node and needs.node.lock
    assert set(json.loads(needs.node.lock)["packages"]) == {"", "node_modules/y"}
    assert [note.package for note in needs.notes] == ["x"]


@pytest.mark.parametrize(
    "packages",
    [{"node_modules/../../x": {}}, {"node_modules/x": 1}, {"../x": {"link": True}},
     {"node_modules/x": {"version": "file:/etc"}}, {"node_modules/x": {"version": "https://h/x"}},
     {"node_modules/x": {"version": ".."}}, {"node_modules/x": {"version": ["1.0.0"]}},
     {"node_modules/x": {"version": "1.0.0", "integrity": "https://h"}}],
)  # fmt: skip
def test_a_lock_file_that_leads_elsewhere_is_refused(project: Path, packages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^package-lock\.json: "):
        node(project, {"dependencies": {"x": "1"}}, {"packages": packages})


@pytest.mark.parametrize(
    "entry",
    [{"dependencies": {"y": "file:/etc"}}, {"optionalDependencies": {"y": ".."}},
     {"peerDependencies": {"../y": "1"}}, {"dependencies": ["y"]}, {"name": "../x"},
     {"bin": {"x": "../../x"}}, {"bin": "/etc/x"}],
)  # fmt: skip
def test_what_a_lock_file_says_of_a_package_is_checked_as_package_json_is(
    project: Path, entry: Any
) -> None:
    packages = {"node_modules/x": {"version": "1.0.0", **entry}}
    with pytest.raises(InvalidRequest, match=r"^package-lock\.json: "):
        node(project, {"dependencies": {"x": "1"}}, {"packages": packages})


def test_what_lock_files_really_say_is_kept(project: Path) -> None:
    entry = {
        "version": "1.0.0-rc.1+build.5", "integrity": "sha1-aGk= sha512-aGk+/==", "dev": True,
        "dependencies": {"y": "npm:@s/y@^4.2.0", "z": "1.x || >=2.5.0 || 5.0.0 - 7.2.3", "t": ""},
        "peerDependencies": {"react": "^18 || ^19.0.0-rc"}, "bin": {"x": "./bin/x.js"},
    }  # fmt: skip
    needs = node(project, {"dependencies": {"x": "1"}}, {"packages": {"node_modules/x": entry}})
    assert needs.node and needs.node.lock
    assert json.loads(needs.node.lock)["packages"]["node_modules/x"] == entry


@pytest.mark.parametrize("text", ["{", "[]", '{"dependencies": []}', "[" * 100_000])
def test_a_broken_package_json_is_an_error_that_names_it(project: Path, text: str) -> None:
    (project / "package.json").write_text(text)
    if text == '{"dependencies": []}':
        assert read_needs(project).node is None
        return
    with pytest.raises(InvalidRequest, match=r"^package\.json"):
        read_needs(project)


def test_other_lock_files_and_workspaces_are_told_of(project: Path) -> None:
    (project / "yarn.lock").write_text("")
    (note,) = node(project, {"dependencies": {"x": "1"}}).notes
    assert "yarn.lock is not read" in str(note) and "npm install" in str(note)
    told = node(project, {"dependencies": {"x": "1"}, "workspaces": ["a"]})
    assert told.node is None and "workspaces" in str(told.notes[0])
