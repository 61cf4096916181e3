"""The dependencies of a project, read from its files without trusting them.

A project may have been written by code in a box, while its dependencies are fetched outside
of boxes. So only names, versions, hashes and URLs of git repositories are taken; the user decides
where other packages come from. Nothing of the project is run here. A note is made of what
cannot be installed.

If there is a lock file, only it counts. Otherwise the declarations of all files are combined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hutch.client.disk import Tree, errors_of_ours
from hutch.errors import InvalidRequest
from hutch.lines import is_single_line

from .declarations import Declarations, own_folders
from .git import GitPackage
from .lock_files import NOT_READ, READERS, LockRequest
from .locks import Dependency, Lock
from .node import NodeNeeds, read_node
from .reading import InstallNote, ProjectFiles

MOST_EXTRAS = 10  # that a note names
# What a lock file replaces, beside the file that it was made from.
DECLARED = ("requirements.txt", "environment.yml", "environment.yaml", "Pipfile")
MOST_FILES = 5  # that a note names
_REQUIREMENTS = re.compile(r"(.+[-_.])?requirements([-_.].+)?\.(txt|in)", re.IGNORECASE)


@dataclass(frozen=True)
class PythonNeeds:
    """Packages, and constraints on their dependencies, in pip's syntax and normalized.

    With a lock, the lock says what is installed, and `declared` what it should contain.
    """

    packages: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    hashed: bool = False  # no package without a hash
    lock: Lock | None = None
    declared: tuple[Dependency, ...] = ()
    pythons: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (file, specifiers: one must hold)
    left_out: tuple[str, ...] = ()  # names that must not be taken from the index
    git: tuple[GitPackage, ...] = ()  # some of these, built from source


@dataclass(frozen=True)
class Needs:
    python: PythonNeeds | None = None
    node: NodeNeeds | None = None
    modules: tuple[str, ...] = ()  # folders of the project that Python imports from, "." among them
    files: tuple[str, ...] = ()  # where this comes from
    notes: tuple[InstallNote, ...] = ()  # on what was not taken


def read_needs(top: Path, extras: Iterable[str] = ()) -> Needs:
    """The dependencies of the project in this folder. Raises InvalidRequest."""
    with errors_of_ours(), Tree(top) as tree:
        files = ProjectFiles(tree, top)
        try:
            python = _read_python(files, list(extras))
            node = read_node(files.read)
            optional = () if python.python or extras else _note_extras(files)
        except RecursionError:
            raise InvalidRequest("the project's files are nested too deeply") from None
        return Needs(
            python.python,
            node.needs,
            python.modules,
            (*python.files, *node.files),
            (*python.notes, *optional, *node.notes),
        )


def _note_extras(files: ProjectFiles) -> tuple[InstallNote, ...]:
    """A note for a project that has optional dependencies only."""
    project = (files.toml("pyproject.toml") or {}).get("project")
    optional = project.get("optional-dependencies") if isinstance(project, dict) else None
    if not isinstance(optional, dict) or not optional:
        return ()
    names = ", ".join([*optional][:MOST_EXTRAS]) + ", ..." * (len(optional) > MOST_EXTRAS)
    return (
        InstallNote(
            f"pyproject.toml has optional dependencies only; --extra NAME installs one: {names}"
        ),
    )


def _read_python(files: ProjectFiles, extras: list[str]) -> Needs:
    locks = [name for name in READERS if files.has(name)]
    if locks:
        return _read_lock(files, locks, extras)
    declarations = Declarations(files, extras)
    declarations.read_pyproject()
    declarations.read_requirements()
    declarations.read_setup()
    declarations.read_pipfile()
    declarations.read_environment()
    declarations.check_extras()
    notes = list(declarations.notes)
    for name in filter(files.has, NOT_READ):
        newest = "the newest versions that the project allows are installed"
        notes.append(InstallNote(f"{name} is not read: {newest}"))
    notes += _note_requirements(files, declarations)
    notes += _note_hatch(files)
    needs = PythonNeeds(
        tuple(declarations.packages),
        tuple(declarations.bounds),
        declarations.hashed,
        pythons=tuple(declarations.pythons),
        left_out=tuple(dict.fromkeys(each.name for each in declarations.elsewhere)),
        git=tuple(each for packages in declarations.git.values() for each in packages),
    )
    modules = dict.fromkeys(own_folders(files, declarations.folders))
    is_empty = not (needs.packages or needs.git)
    return Needs(
        None if is_empty else needs, None, tuple(modules), tuple(declarations.used), tuple(notes)
    )


def _more_requirements(files: ProjectFiles, found: Declarations) -> list[str]:
    """Requirements files that nothing names: `requirements-dev.txt`, `requirements/base.txt`."""
    names = [name for name in files.names() if _REQUIREMENTS.fullmatch(name)]
    inner = files.names("requirements")
    names += [f"requirements/{name}" for name in inner if name.endswith((".txt", ".in"))]
    made_from = {name.removesuffix(".txt") + ".in" for name in names}  # by pip-compile
    return [
        name
        for name in names
        if name != "requirements.txt"
        and name not in made_from
        and is_single_line(name)
        and not found.has_read(name)
    ][:MOST_FILES]


def _note_requirements(files: ProjectFiles, found: Declarations) -> list[InstallNote]:
    more = _more_requirements(files, found)
    if not more:
        return []
    line = f"`-r {more[0]}` in requirements.txt"
    return [InstallNote(f"{', '.join(more)}: not installed; to install one, write {line}")]


def _note_hatch(files: ProjectFiles) -> list[InstallNote]:
    tool: object = files.toml("pyproject.toml") or {}
    for key in ("tool", "hatch", "envs", "default"):
        tool = tool.get(key) if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not (
        tool.get("dependencies") or tool.get("extra-dependencies")
    ):
        return []
    return [
        InstallNote(
            "pyproject.toml: the dependencies of [tool.hatch.envs.default] are not installed; "
            "those of [dependency-groups] are, with --extra NAME"
        )
    ]


def _read_lock(files: ProjectFiles, locks: list[str], extras: list[str]) -> Needs:
    name, *others = locks
    declarations = Declarations(files, extras)
    if name == "Pipfile.lock":
        declarations.read_pipfile()
    else:
        declarations.read_pyproject(of_poetry=name == "poetry.lock")
    if name != "pylock.toml":  # it may be the only file
        declarations.check_extras()
    declared = declarations.dependencies()
    lock = READERS[name](name, LockRequest(files, declared, extras, declarations.groups))
    source = "Pipfile" if name == "Pipfile.lock" else "pyproject.toml"
    others += [file for file in DECLARED if files.has(file) and file != source]
    notes = [InstallNote(f"{file} is not read: {name} says what is installed") for file in others]
    if more := _more_requirements(files, declarations):
        notes.append(InstallNote(f"{', '.join(more)}: not read, for {name} says what is installed"))
    notes += _note_hatch(files)
    needs = PythonNeeds(lock=lock, declared=tuple(declared), pythons=tuple(declarations.pythons))
    modules = dict.fromkeys(own_folders(files, lock.folders))
    return Needs(needs if lock.roots else None, None, tuple(modules), (name,), tuple(notes))
