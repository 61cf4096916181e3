"""Reads conda's environment.yml: pip packages, and conda packages that the index has as well.

A name may mean different projects to conda and to a Python index: `nodejs` is Node for conda,
and an unrelated package on the index. So a conda package is taken from the index only if both
are known to be the same project.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .reading import InstallNote, ProjectFiles, items, line, plain_name, table, texts
from .versions import conda_specifier

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
    found = Environment(file)
    about = table(files.yaml(file), file)
    for each in items(about.get("dependencies"), f"{file}: dependencies"):
        if isinstance(each, dict):
            for kind, lines in each.items():
                if kind == "pip":
                    found.requires += texts(lines, f"{file}: pip")
                else:
                    found.notes.append(
                        InstallNote(f"{file}: only conda and pip packages are known", str(kind))
                    )
        else:
            _add(found, line(each, f"{file}: dependencies"))
    return found


def _add(found: Environment, text: str) -> None:
    _, _, text = text.rpartition("::")  # CHANNEL::NAME
    parts = _PARTS.fullmatch(text.strip())
    name, version = (parts[1].lower(), parts[2]) if parts else (text, "")
    specifier = conda_specifier(version)
    if name == "pip":
        return
    if name == "python" and specifier is not None:
        found.python = specifier
        return
    known = _RENAMED.get(name) or (plain_name(name) if plain_name(name) in _SAME else None)
    if known is None:
        why = f"it is a conda package: if the index has it, list it under `pip:` in {found.file}"
        found.notes.append(InstallNote(why, text))
    elif specifier is None:
        why = f"its version is not understood: list it under `pip:` in {found.file}"
        found.notes.append(InstallNote(why, text))
    else:
        found.requires.append(f"{known}{specifier}")
