"""Tables as text, as HTML, and as data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kernels_of_tests import Kernel


@pytest.fixture
def kernel(data_kernel: Kernel) -> Iterator[Kernel]:
    data_kernel.run("%reset -f\nimport pandas as pd, numpy as np, datetime as dt, decimal")
    yield data_kernel


def shown(kernel: Kernel, code: str) -> dict[str, Any]:
    ran = kernel.run(code)
    assert ran.error is None, ran.error["traceback"]
    (result,) = ran.results
    return result


def test_a_frame_is_text_html_and_data(kernel: Kernel) -> None:
    result = shown(kernel, "pd.DataFrame({'a': [1, 2], 'b': ['x', None]}, index=['p', 'q'])")
    assert result["mime"]["text/plain"].split() == ["a", "b", "p", "1", "x", "q", "2", "NaN"] or (
        result["mime"]["text/plain"].split()[-1] == "None"
    )
    assert "<table" in result["mime"]["text/html"]
    data = result["data"]
    assert (data["columns"], data["index"]) == (["a", "b"], ["p", "q"])
    assert data["rows"] == [[1, "x"], [2, None]]
    assert (data["shape"], data["truncated"]) == ([2, 2], False)
    assert data["dtypes"][0] == "int64"


def test_a_series_is_a_table_of_one_column(kernel: Kernel) -> None:
    result = shown(kernel, "pd.Series([1.5, np.nan], name='s')")
    assert result["data"]["rows"] == [[1.5], [None]]
    assert "<table" in result["mime"]["text/html"]


def test_a_styled_frame_shows_its_data(kernel: Kernel) -> None:
    result = shown(kernel, "pd.DataFrame({'a': [1]}).style")
    assert result["data"]["rows"] == [[1]]
    assert "at 0x" not in result["mime"]["text/plain"]
    assert "<style" in result["mime"]["text/html"]


def test_every_value_is_one_that_json_has(kernel: Kernel) -> None:
    kernel.run(
        "class Bad:\n    def __str__(self): 1/0\n    __repr__ = __str__\n"
        "values = [np.nan, np.inf, pd.NaT, pd.NA, None, np.int64(3), np.float32(0.5),"
        " np.bool_(True), pd.Timestamp('2024-01-02 03:04'), np.datetime64('2024-01-02'),"
        " dt.date(2024, 1, 2), pd.Timedelta('1h'), decimal.Decimal('1.5'), b'x', (1, 2),"
        " {'a': 1}, np.arange(2), 10**5000, 'y' * 5000, Bad(), pd.Period('2024-01')]"
    )
    result = shown(kernel, "pd.DataFrame({'v': pd.Series(values, dtype=object)})")
    column = [row[0] for row in result["data"]["rows"]]
    assert column[:12] == [
        None, "inf", None, None, None, 3, 0.5, True,
        "2024-01-02T03:04:00", "2024-01-02", "2024-01-02", "0 days 01:00:00",
    ]  # fmt: skip
    assert column[12:17] == ["1.5", "b'x'", [1, 2], "{'a': 1}", "[0 1]"]
    assert "repr failed: ValueError" in column[17]
    assert len(column[18]) < 1100 and "repr failed" in column[19] and column[20] == "2024-01"
    json.dumps(result, allow_nan=False)


def test_names_may_be_anything_and_occur_twice(kernel: Kernel) -> None:
    data = shown(kernel, "pd.DataFrame([[1, 2]], columns=['a', 'a'])")["data"]
    assert (data["columns"], data["rows"]) == (["a", "a"], [[1, 2]])
    code = "pd.DataFrame([[1]], columns=[('x', 1)], index=[dt.date(2024, 1, 1)])"
    data = shown(kernel, code)["data"]
    assert (data["columns"], data["index"]) == ([["x", 1]], ["2024-01-01"])
    assert shown(kernel, "pd.DataFrame(index=[1, 2])")["data"]["rows"] == [[], []]
    assert shown(kernel, "pd.DataFrame()")["data"]["shape"] == [0, 0]


def test_a_large_frame_is_shown_in_part(kernel: Kernel) -> None:
    kernel.run("big = pd.DataFrame(np.zeros((1_000_000, 120)))")
    result = shown(kernel, "big")
    data = result["data"]
    assert (data["shape"], data["truncated"]) == ([1_000_000, 120], True)
    assert (len(data["rows"]), len(data["rows"][0])) == (100, 100)
    assert len(json.dumps(result)) < 500_000


def test_long_cells_leave_fewer_rows(kernel: Kernel) -> None:
    data = shown(kernel, "pd.DataFrame([['é' * 2000] * 100] * 100)")["data"]
    assert data["truncated"] and 0 < len(data["rows"]) < 100
    assert len(json.dumps(data["rows"])) <= 2 << 20


def test_wide_frames_are_printed_as_in_a_notebook(kernel: Kernel) -> None:
    ran = kernel.run("print(pd.DataFrame(np.zeros((1, 20)), columns=[f'c{i}' for i in range(20)]))")
    assert all(f"c{i}" in ran.out for i in range(20))


def test_an_arrow_table_is_data_too(kernel: Kernel) -> None:
    data = shown(kernel, "import pyarrow\npyarrow.table({'a': [1, None], 'b': ['x', 'y']})")["data"]
    assert (data["columns"], data["rows"]) == (["a", "b"], [[1, "x"], [None, "y"]])
    assert data["dtypes"] == ["int64", "string"]


def test_an_array_is_text(kernel: Kernel) -> None:
    result = shown(kernel, "np.arange(6).reshape(2, 3)")
    assert result["mime"] == {"text/plain": "array([[0, 1, 2],\n       [3, 4, 5]])"}
    assert result["data"] is None
