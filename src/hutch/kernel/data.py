"""Tables by name: `save(df, "sales")`, `load("sales")`, `datasets()`, in every kernel with pandas.

A dataset is a Parquet file in one folder of the workspace. The three functions are builtins, so a
variable of the same name hides one, and `del` of it brings it back.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import tempfile
from typing import Any

FOLDER = "/workspace/data"
SUFFIX = ".parquet"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_LONGEST = 200
# Set in the attributes of a file that holds a Series, which Parquet itself does not know.
_SERIES = "hutch.series"


def install(builtins: dict[str, Any]) -> None:
    """Add the three functions, if pandas is installed."""
    try:
        has_pandas = importlib.util.find_spec("pandas") is not None
    except (ImportError, ValueError):
        has_pandas = False
    if has_pandas:
        builtins.update(load=load, save=save, datasets=datasets)


def load(name: str) -> Any:
    """The dataset of this name, as it was saved."""
    path = _path(name)
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no dataset {name!r}. {_nearest(name)}")
    table = importlib.import_module("pandas").read_parquet(path)
    series = table.attrs.pop(_SERIES, None)
    if series is None:
        return table
    return table.iloc[:, 0].rename(table.columns[0] if series == "named" else None)


def save(df: Any, name: str) -> None:
    """Save a table under a name, with its index. An existing one is replaced at once."""
    path = _path(name)
    table = _as_frame(df)
    os.makedirs(_folder(), exist_ok=True)
    # In the same folder, so that the last step is one rename; hidden until then.
    handle, temporary = tempfile.mkstemp(dir=_folder(), prefix=".", suffix=".part")
    try:
        os.close(handle)
        table.to_parquet(temporary)
        _make_durable(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    _make_durable(_folder())


def datasets() -> list[str]:
    """The names of all datasets."""
    try:
        files = os.listdir(_folder())
    except FileNotFoundError:
        return []
    names = [file[: -len(SUFFIX)] for file in files if file.endswith(SUFFIX)]
    return sorted(name for name in names if _NAME.fullmatch(name))


def _folder() -> str:
    return os.environ.get("HUTCH_DATA") or FOLDER


def _path(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a dataset is text, not {type(name).__name__}: save(df, name)")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ValueError(
            f"{name[:50]!r} cannot be the name of a dataset: use letters, digits, '_', '-' and '.',"
            " beginning with a letter or digit"
        )
    return os.path.join(_folder(), name + SUFFIX)


def _nearest(name: str) -> str:
    known = datasets()
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    if near:
        return f"Did you mean {', '.join(near)}?"
    if known:
        return f"There are: {', '.join(known[:20])}"
    return "None has been saved yet: save(df, name)"


def _as_frame(df: Any) -> Any:
    pandas = importlib.import_module("pandas")
    if isinstance(df, pandas.DataFrame):
        return df
    if isinstance(df, pandas.Series):
        frame = df.to_frame("values" if df.name is None else df.name)
        frame.attrs[_SERIES] = "unnamed" if df.name is None else "named"
        return frame
    if isinstance(df, dict) or (isinstance(df, list) and all(isinstance(r, dict) for r in df)):
        return pandas.DataFrame(df)
    if hasattr(df, "to_pandas"):  # Arrow, polars
        return df.to_pandas()
    raise TypeError(
        f"save() takes a DataFrame, a Series, a dict of columns, a list of dicts or an Arrow table,"
        f" not {type(df).__name__}"
    )


def _make_durable(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before
