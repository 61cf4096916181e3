"""What the files of a Python project declare, in pip's syntax: names, versions and markers.

The user decides where packages come from. A requirement that names a git repository is built
from it. One that names another URL is not installed, and a note says so; a line that would
change where others come from is an error.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from hutch.errors import InvalidRequest
from hutch.images.requirements import LONGEST, parse_requirement
from hutch.lines import single_line

from .git import GitPackage, GitSource, NotFetched, from_table, from_url
from .lock_files import ELSEWHERE, NO_FOLDER, folder_inside, local_wheel
from .locks import Dependency, dependency
from .reading import (
    InstallNote,
    ProjectFiles,
    items,
    line,
    package_name,
    plain_name,
    table,
    texts,
)
from .setup_files import Setup, read_setup_cfg, read_setup_py
from .versions import alternatives, conda_specifier, python_marker, specifier

DEEPEST = 20  # levels of files that include files
DEV = "dev"  # the dependency group that is installed unless uv's settings name others
SOURCE_FOLDER = "its modules are on the path, but its dependencies are not installed"

_OPTION = re.compile(r"(--?[A-Za-z][\w-]*)(?:[=\s]\s*|(?<=^-\w))?(.*)", re.DOTALL)
_CONTINUED, _LINE_END = re.compile(r"\\\r?\n"), re.compile(r"\r\n|\n|\r")
_COMMENT = re.compile(r"(^|\s)#.*\Z", re.DOTALL)
_HASH = re.compile(r"\s--hash[=\s]\s*(sha(?:256|384|512):[0-9a-f]{64,128})(?=\s|$)")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_ITSELF = re.compile(r"\.(?:/)?(?:\[([\w\s,.-]*)\])?")
_HARMLESS = ("--prefer-binary", "--only-binary", "--no-cache-dir")
_PLACES = {"git", "url", "path", "file"}  # of a source, where it is not the index
_MARKERS = (
    "os_name",
    "sys_platform",
    "platform_machine",
    "platform_python_implementation",
    "platform_release",
    "platform_system",
    "platform_version",
    "python_version",
    "python_full_version",
    "implementation_name",
    "implementation_version",
)


@dataclass
class Declarations:
    """What a project declares. Each `read_` method adds what its file says."""

    files: ProjectFiles
    extras: list[str]
    packages: dict[str, None] = field(default_factory=dict)
    bounds: dict[str, None] = field(default_factory=dict)
    notes: list[InstallNote] = field(default_factory=list)
    used: dict[str, None] = field(default_factory=dict)  # files that declared something
    folders: list[str] = field(default_factory=list)  # of the project, with source of packages
    pythons: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)  # (file, alternatives)
    elsewhere: list[Dependency] = field(default_factory=list)  # named, and not of the index
    git: dict[str, list[GitPackage]] = field(default_factory=dict)  # by name
    hashed: bool = False  # --require-hashes
    groups: list[str] = field(default_factory=list)  # that are installed without being named
    _about: dict[str, object] = field(default_factory=dict)
    _sources: dict[str, object] = field(default_factory=dict)
    _opened: set[tuple[str, bool]] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)  # of `extras`

    def check_extras(self) -> None:
        for name in self.extras:
            if name not in self._known:
                raise InvalidRequest(
                    f"--extra {name}: the project has no extra or group of that name"
                )

    def dependencies(self) -> list[Dependency]:
        return [*map(dependency, self.packages), *self.elsewhere]

    # --- pyproject.toml -------------------------------------------------------------------

    def read_pyproject(self, *, of_poetry: bool = False) -> None:
        """`of_poetry`: with poetry.lock, all groups are installed but those that are optional."""
        name = "pyproject.toml"
        about = self.files.toml(name) or {}
        tool = table(about.get("tool"), f"{name}: tool")
        uv = table(tool.get("uv"), f"{name}: tool.uv")
        poetry = table(tool.get("poetry"), f"{name}: tool.poetry")
        # Beside [project], Poetry's table says where packages come from. If ignored, a package
        # of a repository would be taken from the index, where anyone may own its name.
        self._sources = {
            plain_name(key): source
            for key, value in table(poetry.get("dependencies"), f"{name}: tool.poetry").items()
            for source in (value if isinstance(value, list) else [value])
            if isinstance(source, dict) and not _PLACES.isdisjoint(source)
        }
        self._sources |= {
            plain_name(key): value
            for key, value in table(uv.get("sources"), f"{name}: tool.uv.sources").items()
        }
        self._about = table(about.get("project"), f"{name}: project")
        self._add_python(name, line(self._about.get("requires-python"), f"{name}: requires-python"))
        self._add_all(name, texts(self._about.get("dependencies"), f"{name}: dependencies"))
        groups = table(about.get("dependency-groups"), f"{name}: dependency-groups")
        by_name = {plain_name(group): group for group in groups}
        self.groups = self._default_groups(by_name, uv, poetry if of_poetry else None)
        for group in self.groups:
            if group in by_name:
                self._add_group(groups, by_name[group], ())
        for extra in self.extras:
            if plain_name(extra) in by_name:
                self._known.add(extra)
                self._add_group(groups, by_name[plain_name(extra)], ())
            elif self._add_extra(extra):
                self._known.add(extra)
        if poetry:
            self._read_poetry(poetry)
        if "dependencies" in texts(self._about.get("dynamic"), f"{name}: dynamic"):
            self._read_dynamic(tool)

    def _default_groups(
        self, known: Iterable[str], uv: dict[str, object], poetry: dict[str, object] | None
    ) -> list[str]:
        """The dependency groups that are installed without being named."""
        if poetry is not None:
            where = "pyproject.toml: tool.poetry.group"
            about = table(poetry.get("group"), where)
            optional = {
                plain_name(name)
                for name, group in about.items()
                if table(group, where).get("optional") is True
            }
            return [name for name in known if name not in optional]
        wanted = uv.get("default-groups", [DEV])
        if wanted == "all":
            return [*known, DEV]  # which may be in tool.uv.dev-dependencies
        return list(map(plain_name, texts(wanted, "pyproject.toml: tool.uv.default-groups")))

    def _read_dynamic(self, tool: dict[str, object]) -> None:
        """Dependencies that setuptools reads from requirements files."""
        where = "pyproject.toml: tool.setuptools.dynamic"
        dynamic = table(table(tool.get("setuptools"), where).get("dynamic"), where)
        file = table(dynamic.get("dependencies"), where).get("file", [])
        named = [file] if isinstance(file, str) else texts(file, where)
        for each in named:
            self._follow_file("pyproject.toml", each, self.packages, 0)
        others = ("setup.py", "setup.cfg", "requirements.txt")
        if not named and not any(map(self.files.has, others)):
            self.notes.append(
                InstallNote(
                    "the dependencies in pyproject.toml are computed when it is built, and are not "
                    "installed: list them in [project], or in requirements.txt"
                )
            )

    def _add_extra(self, name: str) -> bool:
        where = "pyproject.toml: optional-dependencies"
        offered = table(self._about.get("optional-dependencies"), where)
        wanted = plain_name(name)
        found = [each for each in offered if plain_name(each) == wanted]
        for key in found:
            self._add_all("pyproject.toml", texts(offered[key], where))
        return bool(found)

    def _add_group(self, groups: dict[str, object], name: str, outer: tuple[str, ...]) -> None:
        members = groups.get(name)
        if name in outer or not isinstance(members, list):
            raise InvalidRequest(f"pyproject.toml: the dependency group {name!r} is invalid")
        if (f"group {name}", False) in self._opened:
            return  # groups that include each other twice would grow without bound
        self._opened.add((f"group {name}", False))
        for member in members:
            if isinstance(member, dict) and isinstance(member.get("include-group"), str):
                self._add_group(groups, member["include-group"], (*outer, name))
            elif isinstance(member, str):
                self.add("pyproject.toml", member, self.packages)
            else:
                raise InvalidRequest(f"pyproject.toml: invalid entry {member!r} in group {name!r}")

    # --- Poetry's table, and Pipfile ------------------------------------------------------

    def _read_poetry(self, poetry: dict[str, object]) -> None:
        """What `poetry install` installs: all groups that are not optional, and the chosen extras.

        Beside [project], Poetry's table says only where packages come from: see read_pyproject.
        """
        where = "pyproject.toml: tool.poetry"
        main = table(poetry.get("dependencies"), f"{where}.dependencies")
        extras = {
            plain_name(key): set(map(plain_name, texts(value, f"{where}.extras")))
            for key, value in table(poetry.get("extras"), f"{where}.extras").items()
        }
        wanted = set[str]()
        for name in self.extras:
            if plain_name(name) in extras:
                self._known.add(name)
                wanted |= extras[plain_name(name)]
        if "dependencies" not in self._about:
            if isinstance(python := main.get("python"), str):
                self._add_pythons("pyproject.toml", alternatives(python))
            self._add_table(where, main, wanted, poetry=True)
        groups = table(poetry.get("group"), f"{where}.group")
        for name, value in groups.items():
            group = table(value, f"{where}.group")
            if name in self.extras:
                self._known.add(name)
            elif group.get("optional") is True:
                continue
            self._add_table(where, table(group.get("dependencies"), where), set(), poetry=True)
        older = table(poetry.get("dev-dependencies"), f"{where}.dev-dependencies")
        self._add_table(where, older, set(), poetry=True)

    def read_pipfile(self) -> None:
        about = self.files.toml("Pipfile") or {}
        for section in ("packages", "dev-packages", *self.extras):
            if section in about:
                self._known.add(section)
                self._add_table("Pipfile", table(about[section], section), set(), poetry=False)
        requires = table(about.get("requires"), "Pipfile: requires")
        if version := line(requires.get("python_version"), "Pipfile: python_version"):
            self._add_pythons("Pipfile", [f"=={version}.*"])

    def _add_table(
        self, where: str, packages: dict[str, object], wanted: set[str], *, poetry: bool
    ) -> None:
        """Packages as Poetry and Pipenv write them; optional ones if they are `wanted`."""
        file = where.partition(":")[0]
        for key, value in packages.items():
            if poetry and key == "python":
                continue
            name = package_name(key, file)
            for each in value if isinstance(value, list) else [value]:
                one = {"version": each} if isinstance(each, str) else each
                about = table(one, f"{file}: {name}")
                if about.get("optional") is not True or name in wanted:
                    self._add_entry(file, name, about, poetry)

    def _add_entry(self, file: str, name: str, about: dict[str, object], poetry: bool) -> None:
        where = f"{file}: {name}"
        markers = [line(about.get("markers"), where)]
        markers += [f"{key} {line(about[key], where)}" for key in _MARKERS if key in about]
        if "python" in about:
            condition = python_marker(line(about["python"], where))
            if condition is None:
                raise InvalidRequest(f"{where}: cannot parse its Python version")
            markers.append(condition)
        if platform := line(about.get("platform"), where):
            markers.append(f"sys_platform == '{platform}'")
        marker = " and ".join(f"({each})" for each in markers if each)
        extras = ",".join(package_name(each, where) for each in texts(about.get("extras"), where))
        if "git" in about:
            self._add_git(file, name, extras.split(","), marker, from_table(about, where))
            return
        place = about.get("url") or about.get("path") or about.get("file")
        if place is not None:
            self._skip(file, name, line(place, where), marker)
            return
        version = line(about.get("version"), where) or "*"
        allowed = specifier(version)
        if allowed is None:
            why = f"pip cannot express its version {version!r:.100}: list it in requirements.txt"
            self.notes.append(InstallNote(f"{file}: {why}", name))
            return
        text = f"{name}[{extras}]{allowed}" if extras else f"{name}{allowed}"
        self.add(file, f"{text} ; {marker}" if marker else text, self.packages)

    # --- setup.py, setup.cfg, environment.yml ---------------------------------------------

    def read_setup(self) -> None:
        for setup in (read_setup_cfg(self.files), read_setup_py(self.files)):
            if setup is None:
                continue
            self._add_python(setup.file, setup.python)
            self._add_all(setup.file, setup.requires)
            for file in setup.follows:
                self._follow_file(setup.file, file, self.packages, 0)
            self._add_setup_extras(setup)
            if setup.computed and "dependencies" not in self._about:
                self.notes.append(
                    InstallNote(
                        f"{', '.join(setup.computed)} of {setup.file} cannot be read without "
                        "running it, and is not installed: list it in requirements.txt or "
                        "pyproject.toml"
                    )
                )

    def _add_setup_extras(self, found: Setup) -> None:
        for wanted in self.extras:
            for key, lines in found.extras.items():
                if plain_name(key) == plain_name(wanted):
                    self._known.add(wanted)
                    self._add_all(found.file, lines)

    def read_environment(self) -> None:
        found = read_environment(self.files)
        if found:
            self.used[found.file] = None
            self.notes += found.notes
            self._add_python(found.file, found.python)
            for each in found.requires:
                self._read_line(found.file, single_line(each, found.file), self.packages, 0)

    # --- requirements.txt -----------------------------------------------------------------

    def read_requirements(self) -> None:
        if (text := self.files.text("requirements.txt")) is not None:
            self._read_requirements("requirements.txt", text, self.packages, 0)

    def _read_requirements(self, name: str, text: str, into: dict[str, None], depth: int) -> None:
        if depth > DEEPEST:
            raise InvalidRequest(f"{name}: requirements files are nested too deeply")
        # Not `splitlines`: a line separator inside a comment would end the comment.
        for each in _LINE_END.split(_CONTINUED.sub(" ", text)):
            self._read_line(name, each, into, depth)

    def _read_line(self, name: str, text: str, into: dict[str, None], depth: int) -> None:
        text = single_line(_COMMENT.sub("", text).strip(" \t\f"), name)
        if text.startswith("-"):
            self._follow(name, text, into, depth)
        elif text:
            self.add(name, text, into)

    def _follow(self, name: str, text: str, into: dict[str, None], depth: int) -> None:
        found = _OPTION.fullmatch(text)
        option, value = (found[1], found[2].strip()) if found else (text, "")
        if re.fullmatch(r"-[rce].+", text) and not text.startswith("--"):
            option, value = text[:2], text[2:].strip().removeprefix("=")
        if option in ("-r", "--requirement", "-c", "--constraint"):
            target = into if option in ("-r", "--requirement") else self.bounds
            self._follow_file(name, value, target, depth)
        elif option in ("-e", "--editable"):
            self.add(name, value, into)
        elif option == "--require-hashes":
            self.hashed = True
        elif option not in _HARMLESS:
            raise InvalidRequest(
                f"{name}: {option} is not allowed: a project does not decide where packages come "
                "from; set UV_DEFAULT_INDEX, UV_INDEX or UV_FIND_LINKS instead"
            )

    def _follow_file(self, name: str, file: str, target: dict[str, None], depth: int) -> None:
        single_line(file, name)
        inner = posixpath.normpath(posixpath.join(posixpath.dirname(name), file))
        if inner.startswith(("/", "..")):
            raise InvalidRequest(f"{name}: {file} is not in the project")
        if (inner, target is self.bounds) in self._opened:
            return
        self._opened.add((inner, target is self.bounds))
        text = self.files.text(inner)
        if text is None:
            raise InvalidRequest(f"{name} names {file}, which does not exist")
        self._read_requirements(inner, text, target, depth + 1)

    def has_read(self, name: str) -> bool:
        return name in self.used or any(name == file for file, _ in self._opened)

    # --- one requirement ------------------------------------------------------------------

    def _add_all(self, name: str, lines: Iterable[str]) -> None:
        for each in lines:
            self.add(name, each, self.packages)

    def add(self, name: str, text: str, into: dict[str, None]) -> None:
        """Add a requirement, in any form. Raises InvalidRequest."""
        single_line(text, name)
        self.used[name] = None
        itself = _ITSELF.fullmatch(text.strip())
        if itself:
            self._add_itself(name, (itself[1] or "").split(","))
            return
        text, hashes = _HASH.sub("", " " + text).strip(), _HASH.findall(" " + text)
        if " --" in text or "$" in text:
            raise InvalidRequest(
                f"{name}: {text!r:.200}: options and variables are not allowed in a requirement"
            )
        is_wheel = text.endswith(".whl") and "://" not in text
        if is_wheel:
            text = self._wheel(name, text)
        elif reference := _direct_reference(text):
            self._add_direct(name, reference, into)
            return
        try:
            # Decided on the parsed requirement: `a @ http:/host/a.whl ; marker` is a URL as well.
            one = parse_requirement(text, wheels=is_wheel)
        except InvalidRequest as exc:
            raise InvalidRequest(f"{name}: {exc}") from None
        own = re.match(r"([a-z0-9-]+)(?:\[([^\]]*)\])?", one)
        if own and own[1] == plain_name(str(self._about.get("name") or "")):
            self._add_itself(name, (own[2] or "").split(","))
        elif own and own[1] in self._sources and not is_wheel:
            self._add_from_source(name, own[1], one, hashes, into)
        else:
            into[" ".join([one, *(f"--hash={each}" for each in hashes)])] = None

    def _add_from_source(
        self, file: str, name: str, one: str, hashes: list[str], into: dict[str, None]
    ) -> None:
        """A package that uv or Poetry would take from elsewhere (tool.uv.sources, tool.poetry)."""
        where = f"{file}: the source of {name}"
        declared = self._sources[name]
        source = table(declared[0] if isinstance(declared, list) and declared else declared, where)
        marker = one.partition(" ; ")[2]
        if "index" in source:
            self.notes.append(
                InstallNote(
                    f"{name} comes from your index, and not from the one that {file} names, "
                    f"{line(source['index'], where)!r:.60}: set UV_INDEX to add an index"
                )
            )
            into[" ".join([one, *(f"--hash={each}" for each in hashes)])] = None
            return
        if "git" in source:
            extras = re.findall(r"[a-z0-9-]+", (re.match(r"[^\[]*\[([^\]]*)", one) or [""] * 2)[1])
            self._add_git(file, name, extras, marker, from_table(source, where))
            return
        place = next((source[each] for each in sorted(_PLACES & source.keys())), None)
        if place is None:
            self.notes.append(
                InstallNote("it is a member of a workspace: run the folder of all", name)
            )
            self.elsewhere.append(Dependency(name, marker))
        else:
            self._skip(file, name, line(place, where), marker)

    def _add_direct(self, file: str, reference: DirectReference, into: dict[str, None]) -> None:
        if not reference.address.startswith("git+"):
            self._skip(file, reference.name, reference.address, reference.marker)
            return
        source = from_url(reference.address)
        if not reference.name:
            source = NotFetched("it has no name: write it like name @ git+https://host/repository")
        elif into is self.bounds:
            source = NotFetched("a constraint that names a repository is not followed")
        name = reference.name or reference.address
        self._add_git(file, name, reference.extras, reference.marker, source)

    def _add_git(
        self,
        file: str,
        name: str,
        extras: Iterable[str],
        marker: str,
        source: GitSource | NotFetched,
    ) -> None:
        self.used[file] = None
        if isinstance(source, NotFetched):
            self.notes.append(InstallNote(source.reason, name))
        else:
            package = GitPackage(name, source, tuple(sorted(filter(None, extras))), marker)
            known = self.git.setdefault(name, [])
            if package not in known:
                known.append(package)
        if _NAME.fullmatch(name):
            self.elsewhere.append(Dependency(name, marker))

    def _skip(self, file: str, name: str, place: str, marker: str) -> None:
        """Skip a package that is not from the index; a folder of the project goes on the path."""
        folder = posixpath.normpath(posixpath.join(posixpath.dirname(file), place))
        self.used[file] = None
        if folder == ".":
            return  # the project itself
        if ":" in place or "\\" in place:
            why = ELSEWHERE
        elif folder_inside(self.files, folder):
            why = SOURCE_FOLDER
            self.folders.append(folder)
        else:
            why = NO_FOLDER
        self.notes.append(InstallNote(why, name or place))
        if name:
            self.elsewhere.append(Dependency(name, marker))

    def _add_itself(self, name: str, extras: list[str]) -> None:
        """Add the project's own extras. Its dependencies and its code are there anyway."""
        for extra in filter(None, map(str.strip, extras)):
            if (f"[{extra}]", False) in self._opened:
                continue
            self._opened.add((f"[{extra}]", False))
            if not self._add_extra(extra):
                raise InvalidRequest(f"{name}: the project has no extra {extra!r}")

    def _wheel(self, name: str, text: str) -> str:
        place = text.partition("@")[2].strip() or text
        try:
            return local_wheel(self.files, place, posixpath.dirname(name))
        except InvalidRequest as exc:
            raise InvalidRequest(f"{name}: {exc}") from None

    # --- the interpreter ------------------------------------------------------------------

    def _add_python(self, file: str, text: str) -> None:
        try:
            if text.strip():
                self._add_pythons(file, [str(SpecifierSet(text.strip()))])
        except InvalidSpecifier:
            self._add_pythons(file, None)

    def _add_pythons(self, file: str, found: list[str] | None) -> None:
        if found is None:
            self.notes.append(InstallNote(f"{file}: cannot parse the required Python version"))
        elif found != [""]:
            self.pythons.append((file, tuple(found)))


class DirectReference(NamedTuple):
    """A requirement that names a URL or path instead of a version (PEP 508)."""

    name: str
    address: str
    extras: tuple[str, ...] = ()
    marker: str = ""


def _direct_reference(text: str) -> DirectReference | None:
    if len(text) > LONGEST:
        return None
    try:
        parsed = Requirement(text)
        if parsed.url is None:
            return None
        extras = tuple(map(plain_name, parsed.extras))
        return DirectReference(
            plain_name(parsed.name), parsed.url, extras, str(parsed.marker or "")
        )
    except (InvalidRequirement, RecursionError):
        pass
    bare = text.partition(" ;")[0].strip()
    if "://" in bare or bare.startswith(("git+", "./", "../", "/", "~")):
        egg = re.search(r"#(?:.*&)?egg=([A-Za-z0-9][\w.-]*)", bare)
        return DirectReference(plain_name(egg[1]) if egg else "", bare)
    return None


def own_folders(files: ProjectFiles, folders: Iterable[str]) -> Iterator[str]:
    """Where Python finds the modules of the project and of packages in its folders."""
    if any(map(files.has, ("pyproject.toml", "setup.py", "setup.cfg"))):
        yield from files.modules(".")
    for folder in folders:
        if folder != ".":
            yield from files.modules(folder)


# Reads conda's environment.yml: pip packages, and conda packages that the index has as well.
#
# A name may mean different projects to conda and to a Python index: `nodejs` is Node for conda, and
# an unrelated package on the index. So a conda package is taken from the index only if both are
# known to be the same project.


NAMES = ("environment.yml", "environment.yaml")

# Conda name → name on the index, where they differ.
_RENAMED = {"pytorch": "torch", "pytables": "tables", "matplotlib-base": "matplotlib"}
_SAME = frozenset([
    "aiohttp", "altair", "anyio", "attrs", "beautifulsoup4", "black", "bokeh", "boto3",
    "celery", "certifi", "click", "cloudpickle", "cryptography", "cython", "dask", "django",
    "distributed", "fastapi", "flake8", "flask", "fsspec", "geopandas", "h5py", "httpx",
    "hypothesis", "ipykernel", "ipython", "ipywidgets", "isort", "jinja2", "joblib",
    "jsonschema", "jupyter", "jupyterlab", "keras", "lightgbm", "lxml", "markdown",
    "markupsafe", "matplotlib", "mpmath", "mypy", "nbconvert", "networkx", "nltk", "notebook",
    "numba", "numexpr", "numpy", "openpyxl", "orjson", "packaging", "pandas", "pillow",
    "plotly", "pluggy", "polars", "psutil", "pyarrow", "pydantic", "pydot", "pygments",
    "pylint", "pytest", "pytest-cov", "python-dateutil", "pytz", "pyyaml", "rdkit", "regex",
    "requests", "rich", "ruff", "scikit-image", "scikit-learn", "scipy", "seaborn",
    "setuptools", "six", "sphinx", "spacy", "sqlalchemy", "statsmodels", "sympy", "tabulate",
    "tensorflow", "tomli", "toolz", "torch", "tornado", "tqdm", "transformers",
    "typing-extensions", "urllib3", "uvicorn", "wheel", "xarray", "xgboost", "xlsxwriter",
    "zstandard",
])  # fmt: skip
_PARTS = re.compile(r"([A-Za-z0-9_.-]+)\s*(.*)", re.DOTALL)


@dataclass
class Environment:
    """The requirements of an environment.yml."""

    file: str
    # In pip's syntax, including the lines of its pip section.
    requires: list[str] = field(default_factory=list)
    python: str = ""  # a specifier
    notes: list[InstallNote] = field(default_factory=list)


def read_environment(files: ProjectFiles) -> Environment | None:
    """Raises InvalidRequest."""
    file = next((name for name in NAMES if files.has(name)), None)
    if file is None:
        return None
    environment = Environment(file)
    about = table(files.yaml(file), file)
    for entry in items(about.get("dependencies"), f"{file}: dependencies"):
        if isinstance(entry, dict):
            for kind, lines in entry.items():
                if kind == "pip":
                    environment.requires += texts(lines, f"{file}: pip")
                else:
                    environment.notes.append(
                        InstallNote(f"{file}: only conda and pip packages are known", str(kind))
                    )
        else:
            _add(environment, line(entry, f"{file}: dependencies"))
    return environment


def _add(environment: Environment, text: str) -> None:
    _, _, text = text.rpartition("::")  # CHANNEL::NAME
    parts = _PARTS.fullmatch(text.strip())
    name, version = (parts[1].lower(), parts[2]) if parts else (text, "")
    specifier = conda_specifier(version)
    if name == "pip":
        return
    if name == "python" and specifier is not None:
        environment.python = specifier
        return
    package = _RENAMED.get(name) or (plain_name(name) if plain_name(name) in _SAME else None)
    if package is None:
        why = "it is a conda package: if the index has it, list it under `pip:` in "
        why += environment.file
        environment.notes.append(InstallNote(why, text))
    elif specifier is None:
        why = f"its version is not understood: list it under `pip:` in {environment.file}"
        environment.notes.append(InstallNote(why, text))
    else:
        environment.requires.append(f"{package}{specifier}")
