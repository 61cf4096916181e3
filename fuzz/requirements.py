"""Fuzz what a project needs: parsed or InvalidRequest, and uv and npm get no line of its own.

    pip install atheris                                  # has wheels for Python 3.11
    mkdir -p corpus && python fuzz/requirements.py -max_total_time=60 corpus

The first byte of an input says what the rest is: a requirement, or a file of a project.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import atheris
except ImportError:  # the target itself is still run by the tests
    atheris = None

if atheris:
    with atheris.instrument_imports(include=["hutch.images", "hutch.projects", "packaging"]):
        from hutch.errors import InvalidRequest
        from hutch.images.requirements import parse_requirement, requirements_file
        from hutch.projects.needs import Needs, read_needs
        from hutch.projects.python import Interpreter, select
else:
    from hutch.errors import InvalidRequest
    from hutch.images.requirements import parse_requirement, requirements_file
    from hutch.projects.needs import Needs, read_needs
    from hutch.projects.python import Interpreter, select

FILES = ("pyproject.toml", "requirements.txt", "package.json", "package-lock.json", "uv.lock",
         "poetry.lock", "Pipfile.lock", "pylock.toml", "Pipfile", "setup.py", "setup.cfg",
         "environment.yml")  # fmt: skip
HASHES = re.compile(r"( --hash=sha(256|384|512):[0-9a-f]+)*")
PACKAGE = b'{"dependencies": {"a": "1"}}'  # for a lock file to be looked at
POETRY = b"[tool.poetry.dependencies]\na = '*'\n"


def one_input(data: bytes) -> None:
    if not data:
        return
    kind, data = data[0] % (len(FILES) + 1), data[1:]
    if kind == len(FILES):
        check_requirement(data.decode(errors="surrogateescape"))
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "package.json").write_bytes(PACKAGE)
        (Path(folder) / "pyproject.toml").write_bytes(POETRY)
        (Path(folder) / FILES[kind]).write_bytes(data)
        try:
            needs = read_needs(Path(folder))
            check_needs(needs)
        except InvalidRequest as exc:
            assert one_line(str(exc)), exc


def check_requirement(text: str) -> None:
    try:
        spelled = parse_requirement(text)
    except InvalidRequest:
        return
    assert one_line(spelled), spelled
    assert not spelled.startswith("-") and " -" not in spelled.partition(" ; ")[0], spelled
    assert parse_requirement(spelled) == spelled, (text, spelled)


def check_needs(needs: Needs) -> None:
    assert all(one_line(str(note)) for note in needs.notes), needs.notes
    if needs.python:
        wheels, notes = select(needs.python, Interpreter("3.11", "x86_64-manylinux_2_17"))
        assert all(one_line(str(note)) for note in notes), notes
        for line in (*wheels.packages, *wheels.bounds):
            requirement, option, hashes = line.partition(" --hash=")
            assert HASHES.fullmatch(option and f"{option}{hashes}"), line
            check_requirement(requirement)
            # The project has no wheel, so none of its lines may name a place.
            assert " @ " not in requirement.partition(" ; ")[0], line
        try:
            written = requirements_file(wheels.packages)
        except InvalidRequest:  # a hash of the wrong length
            return
        assert written.splitlines() == [*wheels.packages]
    if needs.node:
        for text in (needs.node.package, needs.node.lock or b"{}"):
            for each in texts(json.loads(text)):
                assert one_line(each) and "://" not in each, each


def one_line(text: str) -> bool:
    return (len(text.splitlines()) == 1 and "\0" not in text) or text == ""


def texts(value: object) -> Iterator[str]:
    """Every name and range in a package.json or lock file that we wrote."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("license", "engines", "bin", "os", "cpu", "libc"):  # nothing to fetch
                yield key
                yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


def seeds() -> Iterator[bytes]:
    files = [
        b"[project]\nname = 'x'\ndependencies = ['six>=1,<2 ; python_version > \"3\"', 'a[b]']\n"
        b"[project.optional-dependencies]\nc = ['x[d]']\nd = ['e']\n"
        b"[dependency-groups]\ndev = ['f', {include-group = 'g'}]\ng = ['h']\n",
        b"# all\nsix==1.16 \\\n --hash=sha256:" + b"0a" * 32 + b"\n-c c.txt\n-e .[d]\n",
        b'{"dependencies": {"a": "^1", "@b/c": "npm:d@1"}, "overrides": {"e": {".": "$a"}}}',
        b'{"packages": {"node_modules/a": {"version": "1.0.0", "integrity": "sha512-x",'
        b'"bin": {"a": "a.js"}, "resolved": "https://h/a.tgz"}}}',
        b'version = 1\n[[package]]\nname = "x"\nversion = "1"\nsource = {virtual = "."}\n'
        b'dependencies = [{name = "a", marker = "os_name == \'posix\'", extra = ["e"]}]\n'
        b'[package.dev-dependencies]\ndev = [{name = "g"}]\n'
        b'[[package]]\nname = "a"\nversion = "1.0"\nsource = {registry = "https://h/"}\n'
        b"resolution-markers = [\"python_full_version > '3'\"]\n"
        b'wheels = [{url = "https://h/a.whl", hash = "sha256:' + b"0a" * 32 + b'"}]\n'
        b'[package.optional-dependencies]\ne = [{name = "a", version = "1.0"}]\n'
        b'[[package]]\nname = "g"\nsource = {git = "https://h/g"}\n',
        b'[[package]]\nname = "a"\nversion = "1.0"\nmarkers = "os_name == \'posix\'"\n'
        b'files = [{file = "a.whl", hash = "sha256:' + b"0a" * 32 + b'"}]\n'
        b'[package.dependencies]\nb = {version = "^1", optional = true}\n'
        b'[package.extras]\ne = ["b (>=1)"]\n[metadata]\nlock-version = "2.1"\n',
        b'{"default": {"a": {"version": "==1", "hashes": ["sha256:' + b"0a" * 32 + b'"],'
        b'"markers": "os_name == \'posix\'"}}, "develop": {"b": {"git": "https://h/b"}}}',
        b'lock-version = "1.0"\ndefault-groups = ["g"]\n[[packages]]\nname = "a"\nversion = "1"\n'
        b"marker = \"'g' in dependency_groups\"\n"
        b'wheels = [{hashes = {sha256 = "' + b"0a" * 32 + b'"}}]\n',
        b"[packages]\na = {version = '>=1', extras = ['e'], os_name = \"== 'posix'\"}\n"
        b"[requires]\npython_version = '3.11'\n",
        b"from setuptools import setup\nR = ['a>=1']\n"
        b"setup(install_requires=R + ['b'], extras_require={'e': ['c']}, python_requires='>=3')\n",
        b"[options]\ninstall_requires =\n    a>=1\n    b\n[options.extras_require]\ne = c\n",
        b"dependencies:\n- python=3.11\n- numpy=1.26\n- pip:\n  - six\n  - -r x.txt\n",
    ]
    places = [
        "six @ http:/u:p@127.0.0.1:9/six-9.9-py3-none-any.whl ; python_version > '3'",
        "six @ http:\\\\h/six-9.9-py3-none-any.whl ; python_version > '3'",
        "out @ file:/any/out-1.0-py3-none-any.whl ; python_version > '3'",
        "out @ file:/any/out-1.0-py3-none-any.whl#sha256=" + "0a" * 32,
    ]
    for place in places:
        yield bytes([FILES.index("requirements.txt")]) + place.encode()
        yield bytes([FILES.index("pyproject.toml")]) + (
            f"[dependency-groups]\ndev = {json.dumps([place])}".encode()
        )
        yield bytes([len(FILES)]) + place.encode()
    for number, content in enumerate(files):
        yield bytes([number]) + content
    for text in (
        "six ; python_version>'3'\r--find-links=/tmp\r--no-binary=x\rx",
        "httpx[http2,cli] (>=0.27, !=1.*) ; os_name == 'posix' and extra == 'x'",
        "a @ https://h/a-1-py3-none-any.whl ; python_version > '3'",
        "./a-1.0-py3-none-any.whl",
        "a===1.0+local",
    ):
        yield bytes([len(FILES)]) + text.encode()


if __name__ == "__main__":
    from _main import main

    main(one_input, seeds())
