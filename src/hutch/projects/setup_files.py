"""What setup.py and setup.cfg declare, read and never run."""

from __future__ import annotations

import ast
import configparser
import warnings
from collections import Counter
from dataclasses import dataclass, field

from hutch.errors import InvalidRequest

from .reading import LARGEST_SCRIPT, ProjectFiles

_DEEPEST = 50


@dataclass
class Setup:
    """Requirements of a file; `computed` names what only running it would tell."""

    file: str
    requires: list[str] = field(default_factory=list)
    extras: dict[str, list[str]] = field(default_factory=dict)
    python: str = ""
    computed: list[str] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)  # requirements files that it names


class _NotLiteral(Exception):
    pass


def read_setup_py(files: ProjectFiles) -> Setup | None:
    text = files.text("setup.py", LARGEST_SCRIPT)
    if text is None:
        return None
    setup = Setup("setup.py")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is odd in it is for its author
            tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_setup(node)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        setup.computed.append("install_requires")
        return setup
    if not calls:
        setup.computed.append("install_requires")
    names = _constants(tree)
    for word in (word for call in calls for word in call.keywords):
        try:
            if word.arg == "install_requires":
                setup.requires = _texts(word.value, names)
            elif word.arg == "extras_require":
                setup.extras = _tables(word.value, names)
            elif word.arg == "python_requires":
                setup.python = _text(word.value, names)
            elif word.arg is None:  # setup(**arguments)
                raise _NotLiteral
        except _NotLiteral:
            setup.computed.append(word.arg or "install_requires")
    return setup


def _is_setup(call: ast.Call) -> bool:
    called = call.func
    return (isinstance(called, ast.Name) and called.id == "setup") or (
        isinstance(called, ast.Attribute) and called.attr == "setup"
    )


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that the module assigns once, at its top, and never touches again."""
    nodes = list(ast.walk(tree))
    stored = (node for node in nodes if isinstance(node, ast.Name))
    written = Counter(node.id for node in stored if isinstance(node.ctx, ast.Store))
    # `names += [...]` and `names.append(...)` change a list that is assigned once.
    used = (node.value for node in nodes if isinstance(node, ast.Attribute))
    touched = {node.id for node in used if isinstance(node, ast.Name)}
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and written[target.id] == 1 and target.id not in touched
    }


def _texts(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> list[str]:
    if depth > _DEEPEST:
        raise _NotLiteral
    if isinstance(node, ast.Name) and node.id in names:
        return _texts(names[node.id], {}, depth + 1)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [each.strip() for each in node.value.split("\n") if each.strip()]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_texts(node.left, names, depth + 1), *_texts(node.right, names, depth + 1)]
    if isinstance(node, ast.List | ast.Tuple):
        return [_text(each, names) for each in node.elts]
    raise _NotLiteral


def _text(node: ast.expr, names: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Name) and node.id in names:
        return _text(names[node.id], {})
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _NotLiteral


def _tables(node: ast.expr, names: dict[str, ast.expr]) -> dict[str, list[str]]:
    if isinstance(node, ast.Name) and node.id in names:
        return _tables(names[node.id], {})
    if not isinstance(node, ast.Dict):
        raise _NotLiteral
    found = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            raise _NotLiteral
        found[_text(key, names)] = _texts(value, names)
    return found


def read_setup_cfg(files: ProjectFiles) -> Setup | None:
    text = files.text("setup.cfg", LARGEST_SCRIPT)
    if text is None:
        return None
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text, "setup.cfg")
    except configparser.Error as exc:
        raise InvalidRequest(f"setup.cfg cannot be read: {' '.join(str(exc).split())}") from None
    found = Setup("setup.cfg", python=parser.get("options", "python_requires", fallback=""))
    asked = parser.get("options", "install_requires", fallback="").strip()
    if asked.startswith("file:"):
        found.follows = [each.strip() for each in asked.removeprefix("file:").split(",")]
    elif asked.startswith("attr:"):
        found.computed.append("install_requires")
    else:
        found.requires = _lines(asked)
    if parser.has_section("options.extras_require"):
        found.extras = {key: _lines(value) for key, value in parser.items("options.extras_require")}
    return found


def _lines(text: str) -> list[str]:
    return [each.strip() for each in text.split("\n") if each.strip() and each.strip()[0] != "#"]
