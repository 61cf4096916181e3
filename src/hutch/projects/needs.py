"""What a project needs, read from its own files, and made harmless.

A project may have been written by the code that runs in boxes, and what it needs is fetched outside
of them. So only names and versions are taken: where packages come from is for the person to say,
and nothing of the project is ever run here. What cannot be taken is an error that says why.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hutch.client.disk import Item, Tree, errors_of_ours
from hutch.errors import InvalidRequest
from hutch.images.requirements import parse_requirement
from hutch.lines import single_line

from .node import NodeNeeds, read_node

LARGEST = 64 << 20  # bytes of a file that says what is needed
DEEPEST = 20  # files that name files
DEV = "dev"  # the group of dependencies that is always wanted

_OPTION = re.compile(r"(--?[A-Za-z][\w-]*)(?:[=\s]\s*|(?<=^-\w))?(.*)", re.DOTALL)
_CONTINUED, _LINE_END = re.compile(r"\\\r?\n"), re.compile(r"\r\n|\n|\r")
_COMMENT = re.compile(r"(^|\s)#.*\Z", re.DOTALL)
_HASH = re.compile(r"\s--hash[=\s]\s*(sha(?:256|384|512):[0-9a-f]{64,128})(?=\s|$)")
_ITSELF = re.compile(r"\.(?:/)?(?:\[([\w\s,.-]*)\])?")
_HARMLESS = ("--prefer-binary", "--only-binary", "--require-hashes", "--no-cache-dir")


@dataclass(frozen=True)
class PythonNeeds:
    """Packages, and bounds on what else comes with them, in pip's words and one spelling."""

    packages: tuple[str, ...]
    bounds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Needs:
    python: PythonNeeds | None = None
    node: NodeNeeds | None = None
    modules: tuple[str, ...] = ()  # folders of the project that Python imports from, "." among them
    notes: tuple[str, ...] = ()  # what a person should hear


def read_needs(top: Path, extras: Iterable[str] = ()) -> Needs:
    """What the project in this folder needs. Raises InvalidRequest."""
    with errors_of_ours(), Tree(top) as tree:
        files = Files(tree, top)
        reader = Reader(files)
        try:
            reader.read(list(extras))
            node, notes = read_node(files.read)
        except RecursionError:
            raise InvalidRequest("what the project needs is nested too deeply") from None
        return Needs(reader.needs(), node, reader.modules(), (*reader.notes, *notes))


class Files:
    """Files of the project by name, without following a link."""

    def __init__(self, tree: Tree, top: Path) -> None:
        self._tree, self.top = tree, top

    def read(self, name: str) -> bytes | None:
        parts = tuple(name.split("/"))
        try:
            source = self._tree.open(Item(parts, parts, False))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise InvalidRequest(f"{name} cannot be read: {exc.strerror} (is it a link?)") from None
        with source:
            data = bytearray()
            for piece in source.pieces():
                data += piece
                if len(data) > LARGEST:
                    raise InvalidRequest(f"{name} is too large to say what a project needs")
        return bytes(data)

    def text(self, name: str) -> str | None:
        data = self.read(name)
        try:
            return None if data is None else data.decode("utf-8-sig")
        except UnicodeDecodeError as exc:
            raise InvalidRequest(f"{name} is not UTF-8: {exc.reason}") from None

    def has(self, name: str) -> bool:
        return (self.top / name).is_file()


@dataclass
class Reader:
    """The needs of the Python in a project."""

    files: Files
    packages: dict[str, None] = field(default_factory=dict)
    bounds: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _about: dict[str, Any] = field(default_factory=dict)
    _opened: set[tuple[str, bool]] = field(default_factory=set)

    def needs(self) -> PythonNeeds | None:
        if not self.packages:
            return None
        return PythonNeeds(tuple(self.packages), tuple(self.bounds))

    def modules(self) -> tuple[str, ...]:
        """Where its own modules are, if it is a package: what installing it would have found."""
        if not any(map(self.files.has, ("pyproject.toml", "setup.py", "setup.cfg"))):
            return ()
        return ("src", ".") if (self.files.top / "src").is_dir() else (".",)

    def read(self, extras: list[str]) -> None:
        self._read_pyproject(extras)
        if (text := self.files.text("requirements.txt")) is not None:
            self._read_requirements("requirements.txt", text, self.packages, 0)
        if not self.packages and self.files.has("setup.py") and not self._about:
            self.notes.append(
                "setup.py is not run, so nothing is installed: say what it needs in "
                "requirements.txt or pyproject.toml"
            )

    # --- pyproject.toml -------------------------------------------------------------------

    def _read_pyproject(self, extras: list[str]) -> None:
        text = self.files.text("pyproject.toml")
        try:
            about = tomllib.loads(text or "")
        except (tomllib.TOMLDecodeError, RecursionError) as exc:
            raise InvalidRequest(f"pyproject.toml cannot be read: {exc}") from None
        self._about = _table(about, "project")
        groups = _table(about, "dependency-groups")
        for each in _texts(self._about, "dependencies"):
            self._add("pyproject.toml", each, self.packages)
        if DEV in groups:
            self._add_group(groups, DEV, ())
        for name in extras:
            if name in groups:
                self._add_group(groups, name, ())
            elif not self._add_extra(name):
                raise InvalidRequest(f"--extra {name}: pyproject.toml has neither extra nor group")
        dynamic = "dependencies" in _texts(self._about, "dynamic")
        poetry = "dependencies" in _table(_table(about, "tool"), "poetry")
        if (dynamic or (poetry and not self._about)) and not self.files.has("requirements.txt"):
            where = "to be computed" if dynamic else "in tool.poetry"
            self.notes.append(
                f"the dependencies in pyproject.toml are {where}, and not read: "
                "list them in [project], or in requirements.txt"
            )

    def _add_extra(self, name: str) -> bool:
        offered = _table(self._about, "optional-dependencies")
        wanted = _plain(name)
        found = [each for each in offered if _plain(each) == wanted]
        for key in found:
            for each in _texts(offered, key):
                self._add("pyproject.toml", each, self.packages)
        return bool(found)

    def _add_group(self, groups: dict[str, Any], name: str, outer: tuple[str, ...]) -> None:
        members = groups.get(name)
        if name in outer or not isinstance(members, list):
            raise InvalidRequest(f"pyproject.toml: the dependency group {name!r} makes no sense")
        if (f"group {name}", False) in self._opened:
            return  # groups that include each other twice would grow without bound
        self._opened.add((f"group {name}", False))
        for each in members:
            if isinstance(each, dict) and isinstance(each.get("include-group"), str):
                self._add_group(groups, each["include-group"], (*outer, name))
            elif isinstance(each, str):
                self._add("pyproject.toml", each, self.packages)
            else:
                raise InvalidRequest(f"pyproject.toml: {each!r} in group {name!r} makes no sense")

    # --- requirements.txt -----------------------------------------------------------------

    def _read_requirements(self, name: str, text: str, into: dict[str, None], depth: int) -> None:
        if depth > DEEPEST:
            raise InvalidRequest(f"{name}: files that name files that name files, without end")
        # Not `splitlines`: a line separator inside a comment would end the comment.
        for line in _LINE_END.split(_CONTINUED.sub(" ", text)):
            line = single_line(_COMMENT.sub("", line).strip(" \t\f"), name)
            if line.startswith("-"):
                self._follow(name, line, into, depth)
            elif line:
                self._add(name, line, into)

    def _follow(self, name: str, line: str, into: dict[str, None], depth: int) -> None:
        found = _OPTION.fullmatch(line)
        option, value = (found[1], found[2].strip()) if found else (line, "")
        if re.fullmatch(r"-[rce].+", line) and not line.startswith("--"):
            option, value = line[:2], line[2:].strip().removeprefix("=")
        if option in ("-r", "--requirement", "-c", "--constraint"):
            target = into if option in ("-r", "--requirement") else self.bounds
            inner = posixpath.normpath(posixpath.join(posixpath.dirname(name), value))
            if inner.startswith(("/", "..")):
                raise InvalidRequest(f"{name}: {value} is not in the project")
            if (inner, target is self.bounds) in self._opened:
                return
            self._opened.add((inner, target is self.bounds))
            text = self.files.text(inner)
            if text is None:
                raise InvalidRequest(f"{name} names {value}, which is not there")
            self._read_requirements(inner, text, target, depth + 1)
        elif option in ("-e", "--editable"):
            self._add(name, value, into)
        elif option not in _HARMLESS:
            raise InvalidRequest(
                f"{name}: {option} is not followed, for a project does not say where packages come "
                "from: set UV_DEFAULT_INDEX, UV_INDEX or UV_FIND_LINKS instead"
            )

    def _add(self, name: str, text: str, into: dict[str, None]) -> None:
        """A requirement, in any of the forms it may have."""
        single_line(text, name)
        itself = _ITSELF.fullmatch(text.strip())
        if itself:
            self._add_itself(name, (itself[1] or "").split(","))
            return
        text, hashes = _HASH.sub("", " " + text).strip(), _HASH.findall(" " + text)
        if " --" in text or "$" in text or "://" in text or text.startswith("git+"):
            raise InvalidRequest(
                f"{name}: {text!r}: only packages of the index are fetched, by name and version, "
                "and wheels (.whl) that are in the project"
            )
        is_wheel = text.endswith(".whl")
        if is_wheel:
            text = self._wheel(name, text)
        try:
            # Decided on the parsed requirement: `a @ http:/host/a.whl ; marker` is a URL as well.
            one = parse_requirement(text, wheels=is_wheel)
        except InvalidRequest as exc:
            raise InvalidRequest(f"{name}: {exc}") from None
        own = re.match(r"([a-z0-9-]+)(?:\[([^\]]*)\])?", one)
        if own and own[1] == _plain(str(self._about.get("name") or "")):
            self._add_itself(name, (own[2] or "").split(","))
            return
        into[" ".join([one, *(f"--hash={each}" for each in hashes)])] = None

    def _add_itself(self, name: str, extras: list[str]) -> None:
        """The project's own extras. Its dependencies are wanted anyway, and its code is there."""
        for extra in filter(None, map(str.strip, extras)):
            if (f"[{extra}]", False) in self._opened:
                continue
            self._opened.add((f"[{extra}]", False))
            if not self._add_extra(extra):
                raise InvalidRequest(f"{name}: the project has no extra {extra!r}")

    def _wheel(self, name: str, text: str) -> str:
        place = text.partition("@")[2].strip() or text
        inner = posixpath.normpath(posixpath.join(posixpath.dirname(name), place))
        path = (self.files.top / inner).resolve()
        if not path.is_relative_to(self.files.top) or not path.is_file():
            raise InvalidRequest(f"{name}: there is no wheel {place} in the project")
        return str(path)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _table(about: dict[str, Any], key: str) -> dict[str, Any]:
    found = about.get(key, {})
    if not isinstance(found, dict):
        raise InvalidRequest(f"pyproject.toml: {key} is a table, not {found!r:.60}")
    return found


def _texts(about: dict[str, Any], key: str) -> list[str]:
    found = about.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InvalidRequest(f"pyproject.toml: {key} is a list of texts, not {found!r:.60}")
    return found
