"""The arrows in ARCHITECTURE.md, checked."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "hutch"

# A unit is a package, a module beside them, or a package inside one that is listed by itself. It
# may import itself and the units that are listed. Siblings do not know each other.
MAY_IMPORT = {
    "errors": ["types"],  # for a type only
    "types": ["errors"],
    "operations": ["types"],
    "serving": ["operations", "types"],
    "pidfile": [],
    "docker_logins": [],
    "extras": [],
    "lines": ["errors"],
    "codec": ["errors", "types", "operations", "serving"],
    "settings": ["errors", "types", "serving", "server", "client"],
    "wire": [],  # with guest, it is copied into boxes: standard library only
    "tar": [],  # so is this
    "tree": [],
    "guest": ["wire", "tar"],
    "kernel": [],  # it is mounted into boxes under another name: nothing of ours but itself
    # Installers run in a confined process, which the embedded backend knows how to make.
    "images": ["errors", "types", "lines", "serving", "images.oci", "backends.namespaces"],
    "images.oci": [
        "errors",
        "types",
        "lines",
        "serving",
        "tar",
        "tree",
        "docker_logins",
        "images",
        "backends.namespaces",
    ],
    "backends": ["errors", "types"],
    "backends.linux": ["errors", "types"],
    # The zygote of the embedded backend is forked into a guest, so the launcher loads it.
    "backends.namespaces": [
        "errors",
        "types",
        "pidfile",
        "guest",
        "tar",
        "tree",
        "backends",
        "backends.linux",
        "__version__",
    ],
    "backends.docker": [
        "errors",
        "types",
        "pidfile",
        "docker_logins",
        "guest",
        "serving",
        "backends",
        "backends.linux",
    ],
    "backends.kubernetes": [
        "errors",
        "types",
        "guest",
        "backends",
        "backends.linux",
        "__version__",
    ],
    "engine": ["errors", "types", "operations", "wire", "backends"],
    "server": ["errors", "types", "operations", "serving", "wire", "tree", "backends", "engine"],
    # A connection into a box is a byte stream of its backend's.
    "server.http": ["errors", "types", "operations", "serving", "codec", "server", "backends"],
    # Of the tools, for a type only: `box.tools` has one. `local` says where they are.
    "client": ["errors", "types", "operations", "serving", "codec", "tools", "tree"],
    "tools": ["errors", "types", "operations", "client", "tools.condense"],
    "tools.condense": ["errors"],
    "adapters": ["errors", "extras", "types", "operations", "client", "tools", "compat"],
    "mcp": ["errors", "types", "operations", "client", "tools"],
    # Of adapters, what they share.
    "compat": ["errors", "types", "pidfile", "client", "images", "tools", "adapters"],
    # Images of an engine's are built from what this machine can get.
    "recipes": [
        "errors",
        "types",
        "serving",
        "backends",
        "backends.docker",
        "backends.linux",
        "images",
    ],
    # What carries them out is given to them; what they need is kept as images are.
    "projects": ["errors", "types", "lines", "operations", "client", "images", "tar", "tree"],
    "testing": ["errors", "types", "wire", "backends", "engine"],
}
# They put the rest together.
ROOTS = {"__init__", "local", "server.daemon", "server.peers", "factory", "cli", "__main__"}


def unit_of(module: str) -> str:
    """The longest name in the tables that a dotted module, without `hutch.`, is or is in."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in MAY_IMPORT or name in ROOTS:
            return name
    return parts[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module of ours, statement inside a function?) for each import in one file.

    `import_module("...")` counts, where it is written out which module; it is meant to be late.
    """
    tree = ast.parse(path.read_text())
    package = ["hutch", *path.relative_to(ROOT).parts[:-1]]
    inner = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        late = id(node) in inner
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # What is imported may be a module itself, and then it is in that unit.
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif name := loaded_by(node):
            names, late = [name if not name.startswith(".") else ".".join(package) + name], False
        else:
            continue
        for name in names:
            if name.startswith("hutch."):
                yield node.lineno, name.removeprefix("hutch."), late


LOADERS = {"import_module", "_load", "docker"}  # the last two are factory.py's


def loaded_by(node: ast.AST) -> str | None:
    """The module that such a call names."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    which = node.args[0]
    if name in LOADERS and isinstance(which, ast.Constant):
        return str(which.value)
    return None


FILES = sorted(ROOT.rglob("*.py"))


def test_imports_go_one_way() -> None:
    wrong = []
    for path in FILES:
        unit = unit_of(module_of(path))
        if unit in ROOTS:
            continue
        for line, target, _ in imports(path):
            if unit_of(target) not in [unit, *MAY_IMPORT[unit]]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_what_is_loaded_by_its_name_is_there() -> None:
    modules = {f"hutch.{module_of(path)}" for path in FILES}
    for path in FILES:
        place = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text())):
            if (name := loaded_by(node)) and name.startswith((".", "hutch.")):
                own = ".".join(("hutch", *place.parts[:-1]))
                # `factory.docker` counts from its own package.
                full = {name} if name.startswith("hutch.") else {own + name, "hutch" + name}
                assert full & modules, f"{place}: no module {name}"


def test_nothing_of_ours_is_imported_inside_a_function() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] != "cli"  # it loads a command when it is asked for
        for line, target, lazy in imports(path)
        if lazy
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", ["wire", "guest", "tar.py", "tree.py"])
def test_what_goes_into_a_box_needs_only_the_standard_library(part: str) -> None:
    import sys

    for path in [*(ROOT / part).rglob("*.py")] or [ROOT / part]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or top == "hutch", f"{path}: {name}"


def test_no_module_is_longer_than_800_lines() -> None:
    long = {p.name: n for p in FILES if (n := len(p.read_text().splitlines())) > 800}
    assert not long


# Names that others gave: of the framework that an adapter serves, of IPython.display, and of the
# SDK that compat stands in for.
GIVEN = {"adapters", "kernel/hooks.py", "compat"}
# What the sync SDK calls a workspace, and what servers call its record in openapi.json.
PUBLIC_TWICE = {"Workspace"}


def test_no_two_public_classes_have_the_same_name() -> None:
    places: dict[str, set[str]] = {}
    for path in FILES:
        place = path.relative_to(ROOT)
        if {place.parts[0], str(place)} & GIVEN:
            continue
        # A sync client is generated from its async twin, with some classes of the same name.
        where = str(place).replace("_sync", "_async")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(where)
    assert {name for name, where in places.items() if len(where) > 1} == PUBLIC_TWICE


def test_no_folder_is_called_after_nothing() -> None:
    names = {p.name for p in ROOT.rglob("*") if p.is_dir()}
    assert not names & {"utils", "common", "core", "managers", "helpers"}


DOCS = ROOT.parent.parent


def test_the_map_names_every_package_and_module_at_the_top() -> None:
    tree = (DOCS / "ARCHITECTURE.md").read_text().split("## The tree")[1].split("```")[1]
    # Without __init__.py and __main__.py; of the dashboard only the build knows.
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith("_")}
    names -= {"py.typed"}
    assert not {name for name in names if not re.search(rf"\b{name}(?![\w.])", tree)}


def test_the_list_of_what_is_added_where_names_files_that_exist() -> None:
    """By the end of their path: `cli/stop.py` is `src/hutch/cli/stop.py`."""
    rows = (DOCS / "CONTRIBUTING.md").read_text().split("## Where do I add")[1].split("\n## ")[0]
    named = re.findall(r"`((?:[\w-]+/)*[\w.-]+\.(?:py|ts|tsx|md|toml|txt)|(?:[\w-]+/)+)`", rows)
    known = "".join(
        f"{path}/\n" if path.is_dir() else f"{path}\n"
        for folder in ("src/hutch", "tests", "docs", "packages/dashboard/src", "packages/sdk/src")
        for path in (DOCS / folder).rglob("*")
    )
    wrong = {name for name in named if f"/{name}\n" not in known and not (DOCS / name).exists()}
    assert named and not wrong
