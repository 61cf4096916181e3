"""Packages in git repositories are fetched confined, built in a box, and installed."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from git_of_tests import GitServer, package
from must_work import need
from projects_of_tests import WITH_PYTHON, run
from prompt import PATIENCE, boxes, start  # noqa: F401
from wheels_of_tests import make_wheel

from hutch import factory
from hutch import operations as op
from hutch.cli import project as cli_project
from hutch.cli.boxes import open_box
from hutch.errors import BackendUnavailable, InvalidRequest
from hutch.images import git as images_git
from hutch.images import store
from hutch.images.environment import Image
from hutch.projects import python
from hutch.projects.builds import Builder, BuildFailed
from hutch.projects.git import GitPackage, GitSource, NotFetched, from_url, from_uv_lock
from hutch.projects.needs import read_needs
from hutch.projects.package_cache import PackageCache
from hutch.projects.python import Interpreter
from hutch.projects.runtimes import own_runtimes

COMMIT = "0123456789" * 4
in_boxes = pytest.mark.usefixtures("boxes")


@pytest.fixture
def server(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitServer]:
    if images_git.find_git() is None:
        need("git", "there is no git here")
    with GitServer(tmp_path) as made:
        monkeypatch.setenv("GIT_SSL_CAINFO", str(made.certificate))
        yield made


def show(project: Path, name: str, *words: str) -> str:
    """What the module of a package has as VERSION."""
    script = f"import {name}; print({name}.VERSION)"
    done = run(project, *WITH_PYTHON, *words, "--", "python3", "-c", script)
    # How far it is is told to whom it takes too long, which depends on the machine.
    said = [line for line in done.stderr.splitlines() if not line.startswith(b"hutch: project: ")]
    assert (done.returncode, said) == (0, [])
    return done.stdout.decode().strip()


def ask_for(project: Path, *lines: str) -> None:
    (project / "requirements.txt").write_text("".join(f"{line}\n" for line in lines))


def installed(data: Path) -> list[str]:
    folder = data / "projects/installed"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# --- what works ----------------------------------------------------------------------------


@in_boxes
def test_a_package_in_a_repository_is_built_once_and_installed(
    project: Path, server: GitServer
) -> None:
    commit = server.add("one", package("one", "1.0"))
    ask_for(project, f"one @ git+{server.url}/one@{commit}")
    assert show(project, "one") == "1.0"
    asked = len(server.asked)
    assert show(project, "one") == "1.0"
    assert len(server.asked) == asked  # a commit does not change


@in_boxes
@pytest.mark.skipif(factory.default() != "namespaces", reason="builds an image of packages")
def test_a_package_is_built_again_for_an_image_that_has_changed(
    project: Path, server: GitServer, wheels: Path
) -> None:
    commit = server.add("one", package("one", "1.0"))
    ask_for(project, f"one @ git+{server.url}/one@{commit}")
    words = ("--image", "mine", "--", "python3", "-c", "import one; print(one.VERSION)")
    make_wheel(wheels, "pip")  # each image has it
    asked = []
    for version in ("1.0", "1.0", "2.0"):
        make_wheel(wheels, "tool", version)
        store.build(Image.python(["tool"], name="mine"))
        assert run(project, *words).stdout == b"1.0\n"
        asked.append(len(server.asked))
        if len(asked) == 2:
            store.remove("mine")
    assert 0 < asked[0] == asked[1] < asked[2]


@in_boxes
def test_a_branch_is_followed_and_a_tag_stays(project: Path, server: GitServer) -> None:
    server.add("one", package("one", "1.0"), tag="v1")
    for revision in ("", "@main", "@v1"):
        ask_for(project, f"one @ git+{server.url}/one{revision}")
        assert show(project, "one") == "1.0"
    server.add("one", package("one", "2.0"))
    assert show(project, "one") == "1.0"
    for revision in ("", "@main", "@refs/heads/main"):
        ask_for(project, f"one @ git+{server.url}/one{revision}")
        assert show(project, "one") == "2.0"


@in_boxes
def test_a_folder_of_a_repository_can_be_named_and_a_short_commit(
    project: Path, server: GitServer
) -> None:
    files = {f"libs/one/{path}": text for path, text in package("one", "1.0").items()}
    commit = server.add("many", files)
    server.add("many", {"more": "more"})
    ask_for(project, f"one @ git+{server.url}/many@{commit[:10]}#subdirectory=libs/one")
    assert show(project, "one") == "1.0"


@in_boxes
def test_what_a_package_needs_comes_from_the_index_and_from_other_repositories(
    project: Path, server: GitServer, wheels: Path
) -> None:
    make_wheel(wheels, "tool")
    make_wheel(wheels, "two", "9.0")  # of this name, there is another on the index
    server.add("two", package("two", "2.0", needs=("tool",)))
    server.add("one", package("one", "1.0", needs=(f"two @ git+{server.url}/two", "two[x]>=1")))
    ask_for(project, f"one @ git+{server.url}/one")
    script = "import one, two, tool; print(one.VERSION, two.VERSION, tool.VERSION)"
    done = run(project, *WITH_PYTHON, "--", "python3", "-c", script)
    assert done.stdout == b"1.0 2.0 1.0\n", done.stderr


@in_boxes
def test_what_a_build_asks_for_is_installed_for_it(
    project: Path, server: GitServer, wheels: Path
) -> None:
    make_wheel(wheels, "helper", "3.0")
    code = "import helper; VERSION = helper.VERSION"
    files = package("one", code=code)
    files["backend.py"] += "\ndef get_requires_for_build_wheel(settings=None): return ['helper']\n"
    server.add("one", files)
    ask_for(project, f"one @ git+{server.url}/one")
    assert show(project, "one") == "3.0"
    done = run(project, *WITH_PYTHON, "--", "python3", "-c", "import helper")
    assert b"No module named 'helper'" in done.stderr


@in_boxes
def test_a_setup_py_is_built_with_setuptools(
    project: Path, server: GitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_FIND_LINKS"):
        monkeypatch.delenv(name)  # from the real index
    setup = "from setuptools import setup\nsetup(name='one', version='1', py_modules=['one'])\n"
    server.add("one", {"setup.py": setup, "one.py": "VERSION = 1\n"})
    ask_for(project, f"one @ git+{server.url}/one")
    done = run(project, *WITH_PYTHON, "--", "python3", "-c", "import one; print(one.VERSION)")
    if b"cannot get packages" in done.stderr:
        need("index", "setuptools cannot be downloaded here")
    assert done.stdout == b"1\n", done.stderr


@in_boxes
def test_a_version_can_be_computed_from_tags(project: Path, server: GitServer) -> None:
    code = "import subprocess\nVERSION = subprocess.check_output(['git', 'describe'], text=True)"
    files = package("one", code=code)
    files["pyproject.toml"] += "[tool.setuptools_scm]\n"
    server.add("one", files, tag="v7")
    server.add("one", {"more": "more"})
    ask_for(project, f"one @ git+{server.url}/one")
    assert re.fullmatch(r"v7-1-g[0-9a-f]+", show(project, "one"))


@in_boxes
def test_the_commit_of_a_lock_file_is_the_one_that_is_built(
    project: Path, server: GitServer
) -> None:
    commit = server.add("one", package("one", "1.0"))
    server.add("one", package("one", "2.0"))
    (project / "uv.lock").write_text(
        f"""version = 1
[[package]]
name = "mine"
version = "0.1"
source = {{ virtual = "." }}
dependencies = [{{ name = "one" }}]
[[package]]
name = "one"
version = "1.0"
source = {{ git = "{server.url}/one?rev=main#{commit}" }}
"""
    )
    assert show(project, "one") == "1.0"


# --- what must not work --------------------------------------------------------------------


@in_boxes
def test_a_build_sees_neither_the_files_nor_the_network_of_this_machine(
    project: Path, server: GitServer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    port = int(server.url.rpartition(":")[2])
    code = f"""
import os, socket
found = []
for place in ({str(secret)!r}, {str(project)!r}, {str(Path.home())!r} + '/.bashrc', '/root/.ssh'):
    found += [place] if os.path.exists(place) else []
for address in (('127.0.0.1', {port}), ('8.8.8.8', 53)):
    try:
        socket.create_connection(address, 3).close()
        found.append(str(address))
    except OSError:
        pass
try:
    open({str(tmp_path / "owned")!r}, 'w')
    found.append('written')
except OSError:
    pass
VERSION = ' '.join(found) or 'nothing'
"""
    server.add("one", package("one", code=code))
    ask_for(project, f"one @ git+{server.url}/one")
    assert show(project, "one") == "nothing"
    assert not (tmp_path / "owned").exists()


@in_boxes
def test_neither_a_repository_nor_the_users_settings_make_git_run_anything(
    project: Path, server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = tmp_path / "owned"
    hooks = tmp_path / "home/template/hooks"
    hooks.mkdir(parents=True)
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {owned}\n")
        (hooks / name).chmod(0o755)
    (tmp_path / "home/.gitconfig").write_text(
        f"""[core]
    hooksPath = {hooks}
    fsmonitor = "touch {owned}"
    sshCommand = "touch {owned}"
[credential]
    helper = "!touch {owned}"
[filter "evil"]
    smudge = "touch {owned}; cat"
[init]
    templateDir = {hooks.parent}
[submodule]
    recurse = true
[protocol]
    allow = always
[url "ext::sh -c touch% {owned}"]
    insteadOf = {server.url}/one
"""
    )
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(hooks.parent))
    monkeypatch.setenv("GIT_ASKPASS", str(hooks / "post-checkout"))
    evil = f'[submodule "x"]\n\tpath = x\n\turl = "ext::sh -c touch% {owned}"\n'
    files = package("one", "1.0") | {".gitmodules": evil, ".gitattributes": "* filter=evil\n"}
    server.add("one", files)
    ask_for(project, f"one @ git+{server.url}/one")
    assert show(project, "one") == "1.0"
    assert not owned.exists()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("git+ssh://git@host/x", "only https repositories"),
        ("git+http://host/x", "only https repositories"),
        ("git+file:///etc", "only https repositories"),
        ("git+git://host/x", "only https repositories"),
        ("ext::sh -c touch% /tmp/x", "only https repositories"),
        ("git+https://u:secret@host/x", "password"),
        ("git+https://-oProxyCommand=x/x", "not the address"),
        ("git+https:///x", "not the address"),
        ("git+https://host", "not the address"),
        ("git+https://host/--upload-pack=x", "not the address"),
        ("git+https://host/x?y", "not the address"),
        ("git+https://host/a b", "not the address"),
        ("git+https://host:99999/x", "not a valid address"),
        ("git+https://host/x@--upload-pack=y", "not a revision"),
        ("git+https://host/x@a..b", "not a revision"),
        ("git+https://host/x@a%20b", "not a revision"),
        ("git+https://host/x@a%0ab", "characters"),
        ("git+https://host/x#subdirectory=../y", "not a folder"),
        ("git+https://host/x#subdirectory=/etc/../../y", "not a folder"),
        ("git+https://host/x#subdirectory=-y", "not a folder"),
    ],
)
def test_what_is_not_plainly_a_repository_over_https_is_not_fetched(
    address: str, says: str
) -> None:
    found = from_url(address)
    assert isinstance(found, NotFetched) and says in found.reason
    assert "secret" not in found.reason


def test_a_repository_is_read_in_all_of_its_spellings(project: Path) -> None:
    source = GitSource("https://host/a/x.git", "v1", "libs/x")
    assert from_url("git+https://git@HOST/a/x.git@v1#egg=x&subdirectory=libs/x") == source
    locked = from_uv_lock(f"https://host/a/x.git?subdirectory=libs%2Fx&rev=v1#{COMMIT}")
    assert locked == GitSource("https://host/a/x.git", COMMIT, "libs/x")
    assert from_url("git+https://host:8443/x@feat/a-b").url == "https://host:8443/x"  # type: ignore[union-attr]
    wanted = GitPackage("x", source, ("more",))
    table = "git = 'https://host/a/x.git', tag = 'v1', subdirectory = 'libs/x'"
    for name, text in {
        "requirements.txt": "x[more] @ git+https://host/a/x.git@v1#subdirectory=libs/x\n",
        "pyproject.toml": "[project]\ndependencies=['x[more]']\n"
        f"[tool.uv.sources]\nx = {{ {table} }}\n",
        "Pipfile": f"[packages]\nx = {{ {table.replace('tag', 'ref')}, extras = ['more'] }}\n",
    }.items():
        (project / name).write_text(text)
        needs = read_needs(project)
        assert needs.python and needs.python.git == (wanted,) and not needs.notes, name
        (project / name).unlink()
    poetry = f"[tool.poetry.dependencies]\nx = {{ {table}, extras = ['more'] }}\n"
    (project / "pyproject.toml").write_text(poetry)
    needs = read_needs(project)
    assert needs.python and needs.python.git == (wanted,) and not needs.notes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "poetry.lock",
            "[[package]]\nname = 'x'\nversion = '1'\n[package.source]\ntype = 'git'\n"
            f"url = 'https://host/x'\nreference = 'main'\nresolved_reference = '{COMMIT}'\n"
            "subdirectory = 'y'\n[metadata]\nlock-version = '2.1'\n",
        ),
        (
            "Pipfile.lock",
            json.dumps(
                {"default": {"x": {"git": "https://host/x", "ref": COMMIT, "subdirectory": "y"}}}
            ),
        ),
        (
            "pylock.toml",
            "lock-version = '1.0'\n[[packages]]\nname = 'x'\n[packages.vcs]\ntype = 'git'\n"
            f"url = 'https://host/x'\ncommit-id = '{COMMIT}'\nsubdirectory = 'y'\n",
        ),
    ],
)
def test_a_lock_file_names_the_commit(project: Path, name: str, text: str) -> None:
    (project / "pyproject.toml").write_text("[tool.poetry.dependencies]\nx = '*'\n")
    (project / name).write_text(text)
    for commit, why in ((COMMIT, ""), ("main", "the lock file names no commit")):
        (project / name).write_text(text.replace(COMMIT, commit))
        needs = read_needs(project).python
        assert needs
        wheels, notes = python.select(needs, Interpreter())
        source = GitSource("https://host/x", commit, "y")
        assert wheels.git == (() if why else (GitPackage("x", source),))
        assert all(why and why in note.reason for note in notes)


def test_hosts_can_be_limited(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUTCH_GIT_HOSTS", "one.example, two.example")
    assert isinstance(from_url("git+https://two.example/x"), GitSource)
    assert isinstance(from_url("git+https://three.example/x"), NotFetched)
    assert isinstance(from_url("git+https://two.example:8443/x"), NotFetched)
    assert isinstance(from_url("git+https://two.example:443/x"), GitSource)
    monkeypatch.setenv("HUTCH_GIT_HOSTS", "")
    ask_for(project, "x @ git+https://one.example/x", "six")
    needs = read_needs(project)
    assert needs.python and not needs.python.git and needs.python.left_out == ("x",)
    assert "HUTCH_GIT_HOSTS does not name one.example" in needs.notes[0].reason


def test_a_machine_without_git_says_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hutch.images.git._PLACES", "/nonexistent")
    ask_for(project, "x @ git+https://host/x")
    (note,) = read_needs(project).notes
    assert "there is no git on this machine: install git" in note.reason


def test_what_is_not_for_this_interpreter_is_not_built(project: Path) -> None:
    ask_for(project, "x @ git+https://host/x ; python_version < '3'", "six")
    needs = read_needs(project).python
    assert needs
    wheels, _ = python.select(needs, Interpreter())
    assert wheels.git == () and wheels.left_out == ("x",)


def test_where_each_package_has_a_hash_a_repository_has_a_commit(project: Path) -> None:
    ask_for(project, "--require-hashes", "x @ git+https://host/x@main")
    needs = read_needs(project).python
    assert needs
    with pytest.raises(InvalidRequest, match="x names no commit"):
        python.select(needs, Interpreter())


# --- what fails ----------------------------------------------------------------------------


def _fails(project: Path, data: Path, *words: str) -> str:
    done = run(project, *WITH_PYTHON, *words, "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (125, b""), done
    assert installed(data) == []
    return done.stderr.decode()


@in_boxes
@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            package("one", code="import sys; print('hello'); sys.exit('no \\x1b compiler')"),
            r"build: hello\n(.*\n)*hutch: build: no \? compiler\nhutch: one cannot be installed "
            r"from git: its build failed with exit code 1\n",
        ),
        (package("another"), r"made a wheel of another: ask for that"),
        (package("one", code="open(out + '/x', 'w')"), "its build made 2 files, not one wheel"),
        (package("one", inner="another"), "says that it is another package"),
        (package("one", needs=("x @ https://host/x.whl",)), "one needs x, but it comes from an"),
        (  # uv compares such a release as text, and would fetch it
            package("one", needs=("x @ http://10.0.0.1/x-1.whl ; platform_release >= '10'",)),
            "one needs x, but it comes from an",
        ),
        (
            package("one", needs=("x @ git+ssh://host/x",)),
            "one needs x, but .*only https repositories",
        ),
        ({"README": ""}, "neither pyproject.toml nor setup.py in its top folder"),
        (
            package("one", requires=("x @ git+https://host/x",)),
            "what it is built with: .*names a place",
        ),
        (package("one", requires=("nosuch",)), "there is no package nosuch"),
    ],
)
def test_a_build_that_fails_says_why_and_leaves_nothing(
    project: Path, data: Path, server: GitServer, files: dict[str, str], says: str
) -> None:
    server.add("one", files)
    ask_for(project, f"one @ git+{server.url}/one")
    if "one needs x" in says:  # the wheel itself is fine
        done = run(project, *WITH_PYTHON, "--", "true")
        assert done.returncode == 125 and re.search(says, done.stderr.decode())
    else:
        assert re.search(says, _fails(project, data))


@in_boxes
def test_a_build_cannot_fill_more_than_its_box(
    project: Path, data: Path, server: GitServer
) -> None:
    code = "open(out + '/x', 'wb').write(bytes(64 << 20))"
    server.add("one", package("one", code=code))
    ask_for(project, f"one @ git+{server.url}/one")
    assert "its build filled the disk of the box: give it more" in _fails(
        project, data, "--memory", "256m", "--disk", "32m"
    )


@in_boxes
def test_a_build_that_hangs_is_stopped(data: Path, server: GitServer) -> None:
    commit = server.add("one", package("one", code="import time; time.sleep(3600)"))
    wanted = GitPackage("one", GitSource(f"{server.url}/one", commit))

    async def build() -> None:
        image = op.OpenSession(image="host" if WITH_PYTHON else "")
        async with open_box(image, None) as (transport, _):
            with closing(PackageCache()) as depot:
                builder = Builder(depot, "test", timeout=2)
                builder.use(transport, image, "")
                await builder.build(python.Wheels((), git=(wanted,)), Interpreter())

    with pytest.raises(BuildFailed, match="its build was stopped after 2 seconds"):
        asyncio.run(build())
    assert installed(data) == []


def test_all_that_a_project_needs_has_one_deadline(
    project: Path, data: Path, server: GitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_project, "INSTALL_TIMEOUT", 1)
    server.add("one", package("one"))
    server.hangs.set()
    ask_for(project, f"one @ git+{server.url}/one")
    needs = read_needs(project, ())

    async def install() -> None:
        with closing(PackageCache()) as depot:
            builder = Builder(depot, "test", "")
            await cli_project._install(needs, own_runtimes(), "host", depot, builder)

    with pytest.raises(BackendUnavailable, match="took longer than 0 minutes, and was stopped"):
        asyncio.run(install())
    assert installed(data) == []


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("/nosuch", "there is no git repository at https://localhost"),
        ("/one@nosuch", "has no revision 'nosuch': name a branch"),
        (f"/one@{COMMIT}", f"has no revision '{COMMIT}'"),
        ("/one@0123456", "has no revision '0123456'"),
        ("refused", "does not exist, or needs a login"),
        ("unknown", "is not trusted: for an internal CA, set GIT_SSL_CAINFO or SSL_CERT_FILE"),
        ("https://code.invalid/x", "code.invalid cannot be reached"),
        ("https://localhost:1/x", "localhost:1 cannot be reached"),
    ],
)
@in_boxes
def test_a_repository_that_cannot_be_had_says_why_and_leaves_nothing(
    project: Path, data: Path, server: GitServer, monkeypatch: pytest.MonkeyPatch,
    place: str, says: str,
) -> None:  # fmt: skip
    server.add("one", package("one"))
    server.refuses = place == "refused"
    if place == "unknown":
        for name in ("GIT_SSL_CAINFO", "SSL_CERT_FILE", "SSL_CERT_DIR"):
            monkeypatch.delenv(name, raising=False)
    url = place if ":" in place else server.url + (place if "/" in place else "/one")
    ask_for(project, f"one @ git+{url}")
    said = _fails(project, data)
    assert says in said and said.count("\n") == 1, said


@in_boxes
@pytest.mark.parametrize("when", ["fetching", "building"])
def test_ctrl_c_leaves_nothing(project: Path, data: Path, server: GitServer, when: str) -> None:
    commit = server.add("one", package("one", code="import time; time.sleep(3600)"))
    ask_for(project, f"one @ git+{server.url}/one@{commit}")
    if when == "fetching":
        server.hangs.set()
    process = start("run", "--project", str(project), *WITH_PYTHON, "--", "true")
    end = time.monotonic() + PATIENCE
    try:
        while not (
            server.waiting.is_set()
            if when == "fetching"
            else [*data.glob("projects/installed/*.building/requires")]
        ):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode in (130, -signal.SIGINT)
    while installed(data):  # what was stopped is removed by a process of its own
        assert time.monotonic() < end, installed(data)
        time.sleep(0.05)
