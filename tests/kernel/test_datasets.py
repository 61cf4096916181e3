"""`save`, `load` and `datasets`, as user code sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels_of_tests import Kernel


@pytest.fixture(scope="module")
def shared(data_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("datasets")
    with Kernel(folder, data_python, environ={"HUTCH_DATA": str(folder / "data")}) as kernel:
        run(kernel, "import numpy as np, os, pandas as pd, shutil")
        yield kernel


@pytest.fixture
def data(shared: Kernel) -> Iterator[Kernel]:
    yield shared
    run(shared, "shutil.rmtree(os.environ['HUTCH_DATA'], ignore_errors=True)")


def run(kernel: Kernel, code: str) -> None:
    ran = kernel.run(code)
    assert ran.error is None, ran.error["traceback"]


def error(kernel: Kernel, code: str) -> tuple[str, str]:
    failed = kernel.run(code).error
    assert failed is not None
    return failed["name"], failed["value"]


def test_a_frame_comes_back_with_its_index_and_its_types(data: Kernel) -> None:
    run(data, """
n = 6
df = pd.DataFrame({
    "f": np.random.rand(n), "s": list("abcdef"), "c": pd.Categorical(list("xyxyxy"), list("yxz")),
    "t": pd.date_range("2020", periods=n, tz="Europe/Paris"), "b": [True, False] * 3,
    "I": pd.array([1, None, 3] * 2, dtype="Int64"), "d": pd.to_timedelta(range(n), unit="s"),
    "o": [["list"], None, ["a", "b"]] * 2,
}, index=pd.MultiIndex.from_product([[1, 2], list("xyz")], names=["k", None]))
save(df, "all.kinds-1")
back = load("all.kinds-1")
pd.testing.assert_frame_equal(back.drop(columns="o"), df.drop(columns="o"))
assert [x if x is None else list(x) for x in back["o"]] == list(df["o"])
assert datasets() == ["all.kinds-1"]
""")  # fmt: skip


@pytest.mark.parametrize(
    "made",
    [
        "pd.Series([1.5, 2.5], index=['a', 'b'], name='x')",
        "pd.Series([1, 2, 3])",
        "pd.Series(pd.date_range('2020', periods=3), name='when')",
    ],
)
def test_a_series_comes_back_as_a_series(data: Kernel, made: str) -> None:
    run(data, f"s = {made}; save(s, 's'); pd.testing.assert_series_equal(load('s'), s)")
    run(data, "assert load('s').attrs == s.attrs == {}")


def test_dicts_lists_of_dicts_and_arrow_tables_are_taken_too(data: Kernel) -> None:
    run(data, "save({'a': [1, 2]}, 'one'); save([{'a': 1}, {'a': 2}], 'two')")
    run(data, "import pyarrow; save(pyarrow.table({'a': [1, 2]}), 'three')")
    run(data, "assert all(load(n)['a'].tolist() == [1, 2] for n in ['one', 'two', 'three'])")
    name, value = error(data, "save(5, 'x')")
    assert name == "TypeError" and "DataFrame" in value and "not int" in value


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../a", "a b", "ü", "x\\n", "a" * 300])
def test_names_that_could_be_paths_are_refused(data: Kernel, name: str) -> None:
    for call in (f"save(pd.DataFrame({{'a': [1]}}), '{name}')", f"load('{name}')"):
        kind, value = error(data, call)
        assert kind == "ValueError" and "name of a dataset" in value
    assert error(data, "load(7)")[0] == "TypeError"
    assert data.value("datasets()") == []


def test_an_unknown_name_is_answered_with_those_that_are_near(data: Kernel) -> None:
    kind, value = error(data, "load('sales')")
    assert kind == "FileNotFoundError" and "None has been saved yet" in value
    run(data, "save({'a': [1]}, 'sales_2024'); save({'a': [1]}, 'weather')")
    assert "Did you mean sales_2024?" in error(data, "load('sales_204')")[1]
    assert "sales_2024, weather" in error(data, "load('zzzz')")[1]


def test_a_save_that_fails_leaves_what_was_there(data: Kernel) -> None:
    run(data, "save({'a': [1]}, 'x')")
    assert data.run("save(pd.DataFrame({'a': [object(), 5]}), 'x')").error is not None
    run(data, "assert load('x')['a'].tolist() == [1]")
    run(data, "assert os.listdir(os.environ['HUTCH_DATA']) == ['x.parquet']")


def test_what_is_being_written_is_not_listed(data: Kernel) -> None:
    run(data, "save({'a': [1]}, 'x')")
    run(data, "for n in ['.y.parquet', 'z.txt', '.w.part']: "
              "open(os.environ['HUTCH_DATA'] + '/' + n, 'w').close()")  # fmt: skip
    assert data.value("datasets()") == ["x"]


def test_the_users_names_win_and_come_away_again(data: Kernel) -> None:
    run(data, "load = 5; assert load == 5; del load; save({'a': [1]}, 'x'); load('x')")
    run(data, "assert 'load' not in globals() and 'save' not in globals()")
    _, answer = data.save()
    assert not {"load", "save", "datasets"} & set(answer["kept"])


def test_without_pandas_they_are_not_there(kernel: Kernel, tmp_path: Path) -> None:
    failed = kernel.run("datasets()").error
    assert failed is not None and failed["name"] == "NameError"
