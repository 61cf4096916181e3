"""What comes out of a box stays data: no code on the host could load, import or evaluate it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hutch

ROOT = Path(hutch.__file__).parent
INSIDE = ("guest", "kernel")  # what runs in boxes
LOADERS = {
    "pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "code",
    "codeop", "imp", "yaml", "copyreg",
}  # fmt: skip
EVALUATORS = {"eval", "exec", "compile", "__import__"}
FILES = [p for p in sorted(ROOT.rglob("*.py")) if p.relative_to(ROOT).parts[0] not in INSIDE]
ALLOWED = {
    "__init__.py": ["__import__"],  # of a name out of a table of ours
    "backends/kubernetes/address.py": ["yaml"],  # the user's own kubeconfig, with the safe loader
    "cli/kubernetes.py": ["yaml"],  # it writes manifests, and reads none
    "images/bundle.py": ["marshal"],  # it writes byte code, and reads none
    "projects/reading.py": ["yaml"],  # only with the safe loader, and no aliases
    # The operator's own file, and only with the safe loader; once more for its types.
    "settings/reading.py": ["yaml", "yaml"],
}


def found(source: str) -> list[str]:
    """Every word in it with which code could be made of data."""
    words = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            words += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            words.append((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in EVALUATORS:
            words.append(node.id)
    return [word for word in words if word in LOADERS | EVALUATORS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_host_has_no_way_to_run_what_a_box_said(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    assert found(path.read_text()) == ALLOWED.get(name, [])


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "import marshal.x", "eval(x)", "f = exec"],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert found(source)
