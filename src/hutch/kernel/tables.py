"""Tables as structured data: the content of a DataFrame as JSON.

Supports pandas, polars and pyarrow without importing any of them: their objects can only exist
once they are loaded.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
from collections.abc import Iterable
from typing import Any

from .pretty import safe_repr

MOST_ROWS = 100
MOST_COLUMNS = 100
LONGEST_CELL = 1000
MOST_BYTES = 2 << 20

Table = dict[str, Any]


def as_data(thing: object) -> Table | None:
    """`thing` as columns and rows, or None if it is not a table. Raises what its library raises."""
    for library, convert in _CONVERTERS.items():
        module = sys.modules.get(library)
        if module is not None and (table := convert(module, thing)):
            return _fitted(table)
    return None


def as_frame(pandas: Any, thing: Any) -> Any:
    """`thing` as a DataFrame: one itself, a Series, or a Styler of one. None for anything else."""
    if _is(thing, pandas, "DataFrame"):
        return thing
    if _is(thing, pandas, "Series"):
        return thing.to_frame()
    if type(thing).__name__ == "Styler" and type(thing).__module__.startswith("pandas."):
        return thing.data
    return None


def _is(thing: object, module: Any, name: str) -> bool:
    """Whether it is of that class. A module that is still being imported may not have it yet."""
    return isinstance(thing, getattr(module, name, ()))


def plain(value: Any) -> Any:
    """`value` as JSON: NaN becomes null, and what JSON lacks becomes text."""
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind is str:
        return value if len(value) <= LONGEST_CELL else value[:LONGEST_CELL] + "…"
    if kind is int:
        return value if value.bit_length() <= 64 else safe_repr(value)
    if kind is float:
        return _number(value)
    if kind.__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value[:MOST_COLUMNS]]
    if kind.__module__ == "numpy" and not getattr(value, "shape", None):
        return _numpy(value)
    return plain(safe_repr(value) if isinstance(value, (dict, set)) else _text(value))


def _number(value: float) -> float | str | None:
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def _numpy(value: Any) -> Any:
    if value.dtype.kind in "mM":
        text = str(value)
        return None if text == "NaT" else text
    item = value.item()
    return plain(item) if type(item) is not type(value) else _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return safe_repr(value)


def _table(
    columns: Iterable[Any],
    dtypes: Iterable[Any],
    index: Iterable[Any] | None,
    by_column: list[list[Any]],
    shape: tuple[int, int],
) -> Table:
    rows = [[plain(value) for value in row] for row in zip(*by_column)]  # noqa: B905 (Python 3.9)
    return {
        "columns": [plain(name) for name in columns],
        "dtypes": [str(dtype) for dtype in dtypes],
        "index": list(range(len(rows))) if index is None else [plain(label) for label in index],
        "rows": rows,
        "shape": list(shape),
        "truncated": shape[0] > MOST_ROWS or shape[1] > MOST_COLUMNS,
    }


def _fitted(table: Table) -> Table:
    """Cut to as many rows as fit into MOST_BYTES."""
    while table["rows"] and len(json.dumps(table["rows"])) > MOST_BYTES:
        half = len(table["rows"]) // 2
        table.update(rows=table["rows"][:half], index=table["index"][:half], truncated=True)
    return table


def _pandas(pandas: Any, thing: Any) -> Table | None:
    frame = as_frame(pandas, thing)
    if frame is None:
        return None
    part = frame.iloc[:MOST_ROWS, :MOST_COLUMNS]
    # By position: names may occur twice.
    values = [part.iloc[:, place].tolist() for place in range(part.shape[1])]
    table = _table(part.columns.tolist(), part.dtypes, part.index.tolist(), values, frame.shape)
    if not values:
        table["rows"] = [[] for _ in range(len(part))]
    return table


def _polars(polars: Any, thing: Any) -> Table | None:
    if not _is(thing, polars, "DataFrame"):
        return None
    part = thing[:MOST_ROWS, :MOST_COLUMNS]
    values = [column.to_list() for column in part.get_columns()]
    return _table(part.columns, part.dtypes, None, values, thing.shape)


def _arrow(arrow: Any, thing: Any) -> Table | None:
    if not _is(thing, arrow, "Table"):
        return None
    part = thing.slice(0, MOST_ROWS).select(list(range(min(thing.num_columns, MOST_COLUMNS))))
    values = [column.to_pylist() for column in part.columns]
    return _table(part.column_names, part.schema.types, None, values, thing.shape)


_CONVERTERS = {"pandas": _pandas, "polars": _polars, "pyarrow": _arrow}
