"""Reads settings from a file, the environment and options, and remembers where each came from.

Options override variables, variables override the file, and the file overrides the defaults.
All problems are reported at once, each with its place, the allowed values and the nearest valid
key.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hutch.errors import InvalidRequest

from . import FIELDS, SANDKASTEN_KEYS, SECTIONS, Settings, contradictions, variable_of
from .values import Kind

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")

BUILT_IN = "default"
NO_FILE = Path(os.devnull)
# Variables that other parts of Hutch read.
NOT_SETTINGS = (
    "HUTCH_URL",
    "HUTCH_CONFIG",
    "HUTCH_MUST_WORK",
    "HUTCH_JUPYTER_PYTHON",
    "HUTCH_GAIN",
    "HUTCH_FILTERS",
    "HUTCH_INTEGRATIONS",
    "HUTCH_CLUSTER",
    "HUTCH_CLUSTER_CACHE",
    "HUTCH_BUNDLE",
)
KEYS = (*FIELDS, *SANDKASTEN_KEYS)
SYSTEM_WIDE = Path("/etc/hutch/hutch.toml")

_HEADER = re.compile(r"\s*\[([^\[\]]+)\]")
_PAIR = re.compile(r"\s*([\w.\"'-]+(?:\s*\.\s*[\w\"'-]+)*)\s*=")


@dataclass(frozen=True)
class Loaded:
    settings: Settings
    origins: Mapping[str, str]  # of each key
    file: Path | None
    notes: tuple[str, ...]  # warnings for the operator


@dataclass(frozen=True)
class Assignment:
    """A value that was set, and where."""

    key: str
    value: object
    place: str
    syntax: Literal["toml", "yaml", "text"] = "text"


@dataclass(frozen=True)
class Problem:
    key: str  # empty: of the whole file
    message: str  # with its place


def load(
    data_dir: Path,
    options: Mapping[str, str] | None = None,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Loaded:
    """The settings of a server; `data_dir` is the default data folder. Raises InvalidRequest.

    `options` are keys with their values as text. `file` replaces the file that would be found;
    NO_FILE means none.
    """
    loaded, problems = examine(data_dir, options, file, env)
    if loaded is None:
        first, more = problems[0], len(problems) - 1
        hint = f"; and {more} more: see `hutch config check`" if more else ""
        raise InvalidRequest(first + hint)
    return loaded


def examine(
    data_dir: Path,
    options: Mapping[str, str] | None = None,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[Loaded | None, list[str]]:
    """Like `load`, but returns all problems instead of raising; then nothing is loaded."""
    loaded, problems = examine_keys(data_dir, options, file, env)
    return loaded, [problem.message for problem in problems]


def examine_keys(
    data_dir: Path,
    options: Mapping[str, str] | None = None,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    *,
    text: str | None = None,
) -> tuple[Loaded | None, list[Problem]]:
    """Like `examine`. With `text`, that is read in place of the file's content."""
    env = os.environ if env is None else env
    file = file or find_file(env)
    if file == NO_FILE:
        file = None
    problems: list[Problem] = []
    notes: list[str] = []
    values: dict[str, Any] = {"data_dir": data_dir}
    origins = dict.fromkeys(FIELDS, BUILT_IN)
    try:
        in_file = list(_in_file(file, problems, text)) if file else []
    except InvalidRequest as exc:
        return None, [Problem("", str(exc))]
    for assignment in (*in_file, *_in_environment(env, notes), *_in_options(options or {})):
        try:
            if assignment.key in SANDKASTEN_KEYS:
                notes += _sandkasten_note(assignment)
            else:
                kind: Kind[object] = FIELDS[assignment.key].metadata["kind"]
                values[FIELDS[assignment.key].name] = _read(kind, assignment)
                origins[assignment.key] = assignment.place
        except InvalidRequest as exc:
            problems.append(Problem(assignment.key, str(exc)))
    if file and text is None:
        notes += _exposed(file, [assignment.key for assignment in in_file])
    if problems:
        # Stable: the others keep their order.
        return None, sorted(problems, key=lambda problem: _line_of(problem.message))
    settings = Settings(**values)
    problems = [
        Problem(key, f"{'' if origins[key] == BUILT_IN else origins[key] + ': '}{key}: {why}")
        for key, why in contradictions(settings)
    ]
    return (None if problems else Loaded(settings, origins, file, tuple(notes))), problems


def find_file(env: Mapping[str, str]) -> Path | None:
    """The config file to read if none is named: of this folder, this user or this machine."""
    if env.get("HUTCH_CONFIG"):
        return Path(env["HUTCH_CONFIG"])
    names = ("hutch.toml", "hutch.yaml", "sandkasten.yaml")
    for path in (*map(Path, names), own_file(env), SYSTEM_WIDE):
        if path.is_file():
            return path
    return None


def own_file(env: Mapping[str, str]) -> Path:
    """Where the config file of this user is, or would be."""
    return Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config", "hutch", "hutch.toml")


def default_of(key: str) -> object:
    """The default of a key. MISSING for the data folder, which depends on the user."""
    setting = FIELDS[key]
    default: object = setting.default
    if default is MISSING and setting.default_factory is not MISSING:
        default = setting.default_factory()
    return default


def _read(kind: Kind[T], given: Assignment) -> T:
    try:
        return kind.read(given.value)
    except ValueError:
        value = "this value" if given.key == "api_key" else as_written(given.value)
        example = kind.examples.get(given.syntax)
        allowed = f"{kind.allowed}: {example}" if example else kind.allowed
        raise InvalidRequest(f"{given.place}: {given.key} must be {allowed}, not {value}") from None


def as_written(value: object) -> str:
    """A value roughly as it is written in a file."""
    is_float = isinstance(value, float)
    text = str(value) if is_float else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _line_of(problem: str) -> float:
    line = re.match(r"\S.*?:(\d+): ", problem)
    return int(line[1]) if line else math.inf


def _sandkasten_note(given: Assignment) -> list[str]:
    key = SANDKASTEN_KEYS[given.key]
    try:
        why = key.says(_read(key.kind, given))
    except InvalidRequest as exc:
        message = str(exc)
        raise InvalidRequest(
            message if message.startswith(given.place) else f"{given.place}: {given.key}: {message}"
        ) from None
    return [f"{given.place}: {given.key} has no effect: {why}"] if why else []


# --- the places --------------------------------------------------------------------------


def _in_environment(env: Mapping[str, str], notes: list[str]) -> Iterator[Assignment]:
    names = {variable_of(key): key for key in KEYS}
    for name, value in env.items():
        if name in names and value:
            yield Assignment(names[name], value, name)
        elif name.startswith("HUTCH_") and name not in (*names, *NOT_SETTINGS):
            known = (*names, *NOT_SETTINGS)
            own = {other.removeprefix("HUTCH_"): other for other in known}
            word = name.removeprefix("HUTCH_")
            begin = [other for other in own if word and other.startswith(word)]
            near = begin or get_close_matches(word, own, n=1, cutoff=0.7)
            why = f"did you mean {own[near[0]]}?" if near else "there is no such setting"
            notes.append(f"{name} has no effect: {why}")


def _in_options(options: Mapping[str, str]) -> Iterator[Assignment]:
    for key, value in options.items():
        yield Assignment(key, value, "--" + re.sub("[_.]", "-", key.removesuffix("_seconds")))


def _in_file(path: Path, problems: list[Problem], text: str | None) -> Iterator[Assignment]:
    try:
        text = path.read_bytes().decode("utf-8") if text is None else text
    except OSError as exc:
        raise InvalidRequest(f"cannot read {path}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"cannot read {path}: it is not UTF-8") from None
    if path.suffix in (".yaml", ".yml"):
        values, lines = _yaml(path, text)
    elif path.suffix == ".toml":
        values, lines = _toml(path, text)
    else:
        raise InvalidRequest(f"{path}: a config file must be named *.toml or *.yaml")
    yield from _flat(values, "", path, lines, problems)


def _flat(
    values: Mapping[str, object],
    prefix: str,
    path: Path,
    lines: Mapping[str, int],
    problems: list[Problem],
) -> Iterator[Assignment]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        place = f"{path}:{_line(key, lines)}"
        if key in KEYS:
            yield Assignment(key, value, place, "toml" if path.suffix == ".toml" else "yaml")
        elif any(section == key or section.startswith(key + ".") for section in SECTIONS):
            if isinstance(value, dict):
                yield from _flat(value, key + ".", path, lines, problems)
            elif value is not None:  # in YAML, a section with nothing in it
                problems.append(
                    Problem(key, f"{place}: {key} is a section, not {as_written(value)}")
                )
        else:
            unknown = _unknown_section(key) if isinstance(value, dict) else unknown_key(key)
            problems.append(Problem(key, f"{place}: {unknown}"))


def _line(key: str, lines: Mapping[str, int]) -> int:
    while key not in lines and "." in key:
        key = key.rpartition(".")[0]
    return lines.get(key, 1)


def unknown_key(key: str) -> str:
    section, _, last = key.rpartition(".")
    same_name = [candidate for candidate in KEYS if candidate.rpartition(".")[2] == last]
    near = same_name or get_close_matches(key, KEYS, n=1, cutoff=0.8)
    if not near:
        # In another section: its name would weigh more than that of the key.
        by_last = {candidate.rpartition(".")[2]: candidate for candidate in KEYS}
        near = [by_last[name] for name in get_close_matches(last, by_last, n=1, cutoff=0.7)]
    if near:
        return f"unknown key {key}: did you mean {near[0]}?"
    allowed = [candidate for candidate in KEYS if candidate.rpartition(".")[0] == section]
    if not allowed:
        allowed = [*(candidate for candidate in KEYS if "." not in candidate), *SECTIONS]
    return f"unknown key {key}; known: {', '.join(allowed)}"


def _unknown_section(key: str) -> str:
    known = [
        section for section in SECTIONS if any(name.startswith(f"{section}.") for name in KEYS)
    ]
    near = get_close_matches(key, [*known, *KEYS], n=1)
    if near and near[0] in KEYS:
        return unknown_key(key)  # a table as a value
    if near:
        return f"unknown section [{key}]: did you mean [{near[0]}]?"
    return f"unknown section [{key}]; known: {', '.join(f'[{name}]' for name in known)}"


def _toml(path: Path, text: str) -> tuple[dict[str, object], dict[str, int]]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        line = re.search(r"\(at line (\d+)", str(exc))
        at = line[1] if line else text.count("\n") + 1
        why = _twice(text, int(at)) or f"invalid TOML: {str(exc).partition(' (at ')[0]}"
        raise InvalidRequest(f"{path}:{at}: {why}") from None
    lines: dict[str, int] = {}
    for number, name in _toml_names(text):
        while name:
            lines.setdefault(name, number)
            name = name.rpartition(".")[0]
    return values, lines


def _toml_names(text: str) -> Iterator[tuple[int, str]]:
    """The line of each section and key. A guess where a string spans several lines."""
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = _bare(header[1])
            yield number, section
        elif pair := _PAIR.match(line):
            yield number, f"{section}.{_bare(pair[1])}".lstrip(".")


def _twice(text: str, line: int) -> str | None:
    """The error for a name that was set in an earlier line, or None."""
    names = dict(_toml_names(text))
    first = [at for at, name in names.items() if at < line and name == names.get(line)]
    return f"{names[line]} was already set in line {first[0]}" if first else None


def _bare(key: str) -> str:
    return re.sub(r"[\s\"']", "", key)


def _yaml(path: Path, text: str) -> tuple[dict[str, object], dict[str, int]]:
    import yaml  # takes 20 ms, and few servers have such a file

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        raise InvalidRequest(f"{path}:{line}: invalid YAML: {exc.problem}") from None
    except (yaml.YAMLError, ValueError) as exc:
        raise InvalidRequest(f"{path}: invalid YAML: {exc}") from None
    if values is None:
        return {}, {}
    if not isinstance(values, dict) or not isinstance(root, yaml.MappingNode):
        raise InvalidRequest(f"{path}:1: expected keys and values, such as `listen: ...`")
    lines: dict[str, int] = {}
    _yaml_lines(path, root, "", lines)
    return {str(key): value for key, value in values.items()}, lines


def _yaml_lines(path: Path, node: yaml.MappingNode, prefix: str, lines: dict[str, int]) -> None:
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            raise InvalidRequest(f"{path}:{line}: {name} was already set in line {lines[name]}")
        lines[name] = line
        if value.id == "mapping":
            _yaml_lines(path, value, name + ".", lines)


def _exposed(path: Path, keys: list[str]) -> list[str]:
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH:
        return [f"{path} is writable by all users of this machine: chmod 600 {path}"]
    if "api_key" in keys and mode & (stat.S_IRGRP | stat.S_IROTH):
        return [f"{path} contains a key and is readable by others: chmod 600 {path}"]
    return []
