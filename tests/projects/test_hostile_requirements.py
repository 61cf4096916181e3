"""A project may be hostile: what it asks for is a name and a version, or it is refused."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from projects_of_tests import WITH_PYTHON, run
from wheels_of_tests import make_wheel

from hutch.errors import InvalidRequest
from hutch.images.environment import Image
from hutch.images.held_images import HeldImages
from hutch.images.requirements import local_wheels, parse_requirement, requirements_file
from hutch.lines import is_single_line
from hutch.projects.needs import read_needs
from hutch.serving import BuildImage

# All that some program takes for the end of a line, and what ends a C string.
SEPARATORS = [
    "\n",
    "\r",
    "\r\n",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x1d",
    "\x1e",
    "\x85",
    "\u2028",
    "\u2029",
    "\x00",
]
OPTIONS = ["--find-links=/tmp", "--no-binary=x", "evil ; python_version>'3'"]

every_separator = pytest.mark.parametrize("separator", SEPARATORS, ids=ascii)


def make_source_with_backend(folder: Path, name: str, code: str) -> None:
    """A source package that runs `code` when it is built, and needs nothing to be built."""
    about = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    about += f'[project]\nname = "{name}"\nversion = "1.0"\n'
    top = f"{name}-1.0"
    with tarfile.open(folder / f"{top}.tar.gz", "w:gz") as archive:
        for path, text in {"pyproject.toml": about, "backend.py": code, "PKG-INFO": ""}.items():
            member = tarfile.TarInfo(f"{top}/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def smuggle(separator: str) -> str:
    return separator.join(["six ; python_version>'3'", *OPTIONS])


@pytest.mark.parametrize("place", ["dependencies", "group"])
def test_a_project_cannot_run_its_code_on_this_machine(
    project: Path, wheels: Path, tmp_path: Path, place: str
) -> None:
    make_wheel(wheels, "six")
    code = f"open({str(tmp_path / 'owned')!r}, 'w')\n"
    make_source_with_backend(project, "evil", code)
    lines = [
        "six ; python_version>'3'",
        f"--find-links={project.as_uri()}",
        "--no-binary=evil",
        "evil ; python_version>'3'",
    ]
    text = json.dumps(["\r".join(lines)])
    tables = {
        "dependencies": f"[project]\nname = 'x'\ndependencies = {text}\n",
        "group": f"[dependency-groups]\ndev = {text}\n",
    }
    (project / "pyproject.toml").write_text(tables[place])
    done = run(project, *WITH_PYTHON, "--", "true")
    assert not (tmp_path / "owned").exists()
    assert done.returncode == 125 and b"control characters" in done.stderr, done.stderr


@every_separator
def test_no_separator_gets_into_a_list_of_packages(separator: str) -> None:
    asked = [
        smuggle(separator),
        f"a[b{separator}]",
        f"a[b,{separator}c]",
        f"a{separator}>=1",
        f"a>=1,{separator}<2",
        f"a>=1 ; python_version{separator}>'3'",
        f"a @{separator}https://h/x",
        f"a ; platform_version == 'x{separator}--pre'",
        f"a==={separator}1",
        f"./a-1{separator}x-py3-none-any.whl",
        f"a @ https://h/a-1-py3-none-any.whl{separator}#x",
    ]
    for text in asked:
        with pytest.raises(InvalidRequest):
            Image.python([text])
        with pytest.raises(InvalidRequest):
            requirements_file([text])
        with pytest.raises(InvalidRequest):
            Image.python([], [f"os{separator}sys"])


def needs_of(project: Path, name: str, text: str) -> tuple[str, ...]:
    (project / name).write_bytes(text.encode())
    needs = read_needs(project, ["more"] if "more" in text else []).python
    return (*needs.packages, *needs.bounds) if needs else ()


@every_separator
def test_no_separator_gets_from_a_project_into_a_line(project: Path, separator: str) -> None:
    text = json.dumps([smuggle(separator)])
    for table in (
        f"[project]\nname = 'x'\ndependencies = {text}\n",
        f"[project]\nname = 'x'\n[project.optional-dependencies]\nmore = {text}\n",
        f"[dependency-groups]\ndev = {text}\n",
        f"[dependency-groups]\nmore = {text}\n",
    ):
        with pytest.raises(InvalidRequest, match=r"^pyproject\.toml: .*control characters"):
            needs_of(project, "pyproject.toml", table)


@every_separator
def test_lines_of_a_requirements_file_stay_apart(project: Path, separator: str) -> None:
    (project / "c.txt").write_bytes(f"b{separator}--pre".encode())
    for line in (smuggle(separator), "a\n-c c.txt", f"-r {separator}x", f"a --hash=x{separator}"):
        try:
            taken = needs_of(project, "requirements.txt", f"numpy\n{line}\n")
        except InvalidRequest as exc:
            assert is_single_line(str(exc))
        else:
            assert all(map(is_single_line, taken)) and not any("--" in each for each in taken)


def test_a_comment_ends_with_its_line(project: Path) -> None:
    text = "six # fine\x0bevil\u2028evil\x1cevil\x85evil\n# none\x0cevil\nnumpy\n"
    assert needs_of(project, "requirements.txt", text) == ("six", "numpy")


@pytest.mark.parametrize(
    "asked",
    [{"a\n": "1"}, {"a": "1\n"}, {"a": "1\r\nb"}, {"a\u2028": "1"}, {"a": "1\x00"}],
    ids=ascii,
)
def test_names_and_ranges_of_node_packages_are_single_lines(project: Path, asked: Any) -> None:
    (project / "package.json").write_text(json.dumps({"dependencies": asked}))
    with pytest.raises(InvalidRequest):
        read_needs(project)


@pytest.mark.parametrize(
    "entry",
    [
        {"version": "1.0.0\n"},
        {"integrity": "sha512-x?\x00y"},
        {"integrity": "sha512-x\nsha1-y"},
        {"engines": {"node": ">=1\r\n"}},
        {"engines": {"no\x1cde": ">=1"}},
        {"engines\n": {}, "os": ["linux\u2028"]},
        {"bin": {"a\nb": "x"}},
        {"bin": {"../a": "x"}},
        {"bin": {"a": "x\x85"}},
        {"license": "\x1e"},
        {"dependencies": {"b\n": "1"}},
        {"name": "b\n"},
    ],
    ids=ascii,
)
def test_entries_of_a_lock_file_are_single_lines(project: Path, entry: Any) -> None:
    (project / "package.json").write_text(json.dumps({"dependencies": {"a": "1"}}))
    lock = {"packages": {"node_modules/a": {"version": "1.0.0", **entry}}}
    (project / "package-lock.json").write_text(json.dumps(lock))
    with pytest.raises(InvalidRequest):
        read_needs(project)


@every_separator
def test_what_a_lock_of_python_names_is_a_single_line(project: Path, separator: str) -> None:
    text = json.dumps(f"x{separator}y.whl")
    head = "version = 1\n[[package]]\nname = 'a'\nversion = '1'\n"
    for kind in ("registry", "git", "path"):
        (project / "uv.lock").write_text(f"{head}source = {{{kind} = {text}}}\n")
        with pytest.raises(InvalidRequest, match=r"^uv\.lock: .*control characters"):
            read_needs(project)


@pytest.mark.parametrize("separator", [each for each in SEPARATORS if each != "\0"], ids=ascii)
def test_names_of_files_and_folders_are_single_lines(project: Path, separator: str) -> None:
    name = f"x{separator}y"
    (project / name).mkdir()
    (project / "requirements.txt").write_text("six\n")
    (project / f"requirements-{name}.txt").write_text("numpy\n")
    assert all(is_single_line(str(note)) for note in read_needs(project).notes)
    head = "version = 1\n[[package]]\nname = 'a'\nversion = '1'\n"
    for folder, modules in (("plain", ("plain",)), (name, ())):
        (project / folder).mkdir(exist_ok=True)
        source = f"source = {{editable = {json.dumps(folder)}}}\n"
        (project / "uv.lock").write_text(head + source)
        assert read_needs(project).modules == modules


@pytest.mark.parametrize("key", ["a\n", "../a", "a@http://h/x", "a b", "@/a"])
def test_overrides_are_for_packages_of_the_registry(project: Path, key: str) -> None:
    package = {"dependencies": {"a": "1"}, "overrides": {key: "1"}}
    (project / "package.json").write_text(json.dumps(package))
    with pytest.raises(InvalidRequest):
        read_needs(project)


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("Pandas(>=2,<3)", "pandas<3,>=2"),
        ("a ( >= 1 , )", "a>=1"),
        ("a\t>=1", "a>=1"),
        ("A_b[X.y, c]===1", "a-b[c,x-y]===1"),
        ("a~=1.0;os_name=='nt'", 'a~=1.0 ; os_name == "nt"'),
        (
            "a @ https://h/a-1-py3-none-any.whl ; python_version > '3'",
            'a @ https://h/a-1-py3-none-any.whl ; python_version > "3"',
        ),
    ],
)
def test_a_requirement_is_written_from_what_was_parsed(text: str, spelled: str) -> None:
    assert parse_requirement(text) == spelled == parse_requirement(spelled)


@pytest.mark.parametrize(
    "text",
    [
        "a ; platform_version == '${UV_INDEX_X_PASSWORD}'",
        "a @ https://h/$X/a-1-py3-none-any.whl",
        "a ; " + "(" * 5000,
        "a" * 20_000,
        "a ; os_name == 'x' --pre",
        "a --pre",
        "a>=1 -r x",
        "a @ https://[/a-1-py3-none-any.whl",
        r"a ; platform_version == '\x0c--pre'",
        "a===/../../x-1-py3-none-any.whl,<2",
        "a===1\\",
    ],
    ids=lambda text: text[:40],
)
def test_what_uv_could_read_otherwise_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_requirement(text)


HASH = "#sha256=" + "0a" * 32
PLACES = [
    "six @ http:/u:p@127.0.0.1:9/six-9.9-py3-none-any.whl ; python_version > '3'",
    "six @ http:/127.0.0.1:9/six-9.9-py3-none-any.whl ; python_version > '3'",
    "six @ http:127.0.0.1:9/six-9.9-py3-none-any.whl ; python_version > '3'",
    "six @ http:\\\\h/six-9.9-py3-none-any.whl ; python_version > '3'",
    "six @ http:\\h/six-9.9-py3-none-any.whl" + HASH,
    "out @ file:{outside} ; python_version>'3'",
    "out @ file:{outside}" + HASH,
    "out @ file:{outside}" + HASH + " ; python_version>'3'",
    "out @ FILE:{outside} ; python_version>'3'",
    "out @ {outside} ; python_version>'3'",
    "out[x] @ file:{outside}#x",
]


@pytest.mark.parametrize("text", PLACES)
def test_a_project_cannot_say_where_a_package_comes_from(
    project: Path, tmp_path: Path, text: str
) -> None:
    outside = make_wheel(tmp_path, "out")
    text = text.format(outside=outside)
    table = f"[dependency-groups]\ndev = {json.dumps([text])}\n"
    for name, content in (("requirements.txt", text), ("pyproject.toml", table)):
        assert needs_of(project, name, content) == ()
        (note,) = read_needs(project).notes
        assert note.package in ("six", "out") and "u:p@" not in str(note)
        (project / name).unlink()


def test_a_project_may_use_a_wheel_of_its_own(project: Path) -> None:
    wheel = make_wheel(project, "mine")
    for text in (f"./{wheel.name}", f"mine @ {wheel.name}"):
        (taken,) = needs_of(project, "requirements.txt", text)
        assert taken.startswith(f"mine @ {wheel.as_uri()}#sha256=")


@pytest.mark.parametrize(
    "url",
    [
        "http:/u:p@127.0.0.1:9/a-1-py3-none-any.whl",
        "http:/h/a-1-py3-none-any.whl",
        "http:///a-1-py3-none-any.whl",
        "http://:80/a-1-py3-none-any.whl",
        "http://h:x/a-1-py3-none-any.whl",
        "http:\\\\h/a-1-py3-none-any.whl",
        "https://h\\@other/a-1-py3-none-any.whl",
        "https://u@h/a-1-py3-none-any.whl",
        "file://h/a-1-py3-none-any.whl" + HASH,
        "file:a-1-py3-none-any.whl" + HASH,
    ],
)
def test_the_url_of_a_wheel_names_a_host_and_no_password(url: str) -> None:
    for text in (f"a @ {url}", f"a @ {url} ; python_version > '3'"):
        with pytest.raises(InvalidRequest):
            parse_requirement(text)


def test_a_string_in_a_marker_shows_no_file_to_an_installer() -> None:
    taken = parse_requirement("a ; platform_version == ' @ file:///etc/shadow'")
    assert local_wheels([taken]) == []


def test_groups_that_include_each_other_many_times_are_read_once(project: Path) -> None:
    doubled = "\n".join(
        f"g{n} = [{{include-group = 'g{n + 1}'}}, {{include-group = 'g{n + 1}'}}]"
        for n in range(100)
    )
    text = f"[dependency-groups]\ndev = [{{include-group = 'g0'}}]\n{doubled}\ng100 = ['six']\n"
    assert needs_of(project, "pyproject.toml", text) == ("six",)


def test_what_is_nested_too_deeply_is_one_clear_error(project: Path) -> None:
    extras = "\n".join(f"e{n} = ['x[e{n + 1}]']" for n in range(1000))
    text = f"[project]\nname = 'x'\n[project.optional-dependencies]\nmore = ['x[e0]']\n{extras}\n"
    with pytest.raises(InvalidRequest):
        needs_of(project, "pyproject.toml", text)


@pytest.mark.parametrize(
    ("packages", "preload"), [(("six\r--pre",), ()), (("six",), ("os; import x",))], ids=ascii
)
def test_what_a_server_is_asked_to_build_is_checked_before_anything_is_done(
    data: Path, packages: tuple[str, ...], preload: tuple[str, ...]
) -> None:
    async def build() -> None:
        async for _ in HeldImages().build(BuildImage("mine", packages, preload)):
            pass

    with pytest.raises(InvalidRequest):
        asyncio.run(build())
    assert not data.exists()
