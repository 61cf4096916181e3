"""KernelLite's scientific side: what is there from the start, datasets, and sleep without loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import Served, wait_until

from hutch import BackendUnavailable, InvalidRequest
from hutch.images import store

MB = 1_000_000


@pytest.fixture(scope="module", autouse=True)
def _image() -> None:
    try:
        store.build("data")
    except (BackendUnavailable, InvalidRequest) as exc:
        pytest.skip(f"no image with pandas can be had: {exc}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that leave it as they found it."""
    with Served(tmp_path_factory.mktemp("project"), image="data") as server:
        assert server.said, server.complaint()
        yield server


@pytest.fixture
def sleepy(tmp_path: Path) -> Iterator[Served]:
    """A server whose kernel sleeps after a second."""
    with Served(tmp_path, "--idle-hibernate=1", image="data") as server:
        assert server.said, server.complaint()
        yield server


def memory(served: Served) -> int:
    """Bytes that the server's boxes have in memory for themselves alone."""
    total, waiting = 0, [served.process.pid]
    while waiting:
        pid = waiting.pop()
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if "Private_" in line)
    return total * 1024


# --- from the start ------------------------------------------------------------------------


def test_the_scientific_names_are_there_from_the_start(data: Served) -> None:
    code = "[each.__name__ for each in (pd, np, pa, pq)], callable(load), callable(save)"
    assert data.exec(code)["stdout"] == (
        "(['pandas', 'numpy', 'pyarrow', 'pyarrow.parquet'], True, True)\n"
    )


def test_they_are_there_again_in_a_new_kernel(data: Served) -> None:
    data.exec("import os; os._exit(1)")
    answer = data.exec("int(pd.Series([1]).sum())")
    assert answer["restarted"] and answer["status"] == "[OK] exec", answer["stderr"]


def test_they_are_there_again_after_a_death_between_cells(data: Served) -> None:
    data.exec(
        "import os, pathlib, threading, time\n"
        "def die():\n"
        "    while not os.path.exists('die'): time.sleep(0.01)\n"
        "    pathlib.Path('dying').touch(); os._exit(1)\n"
        "threading.Thread(target=die).start()"
    )
    (data.project / "die").touch()
    data.wait_for("dying")
    answers = [data.exec("int(pd.Series([1]).sum())")]
    wait_until(lambda: "restarted" in answers[-1] or answers.append(data.exec("len(pd.__name__)")))
    assert answers[-1]["status"] == "[OK] exec", answers


def test_the_example_of_kernellites_readme_says_what_it_said(data: Served) -> None:
    code = "import pandas as pd; df=pd.DataFrame({'x':[1,2,3]}); print(df.shape)"
    answer = data.exec(code)
    assert (answer["status"], answer["stdout"]) == ("[OK] exec", "(3, 1)\n")
    code = "df=pd.DataFrame({'a':[1,2,3]}); save(df,'demo'); print(load('demo').shape)"
    assert data.exec(code)["stdout"] == "(3, 1)\n"


def test_a_table_as_last_value_is_shown_as_text(data: Served) -> None:
    assert data.exec("pd.DataFrame({'x': [1, 2]})")["stdout"] == "   x\n0  1\n1  2\n"


# --- datasets ------------------------------------------------------------------------------


def test_a_dataset_is_a_parquet_file_in_the_project_with_its_index(data: Served) -> None:
    answer = data.exec(
        "df = pd.DataFrame({'x': [1.5, None]}, index=pd.Index(['a', 'b'], name='key'))\n"
        "save(df, 'kept')\npd.testing.assert_frame_equal(load('kept'), df)"
    )
    assert answer["status"] == "[OK] exec", answer["stderr"]
    content = (data.project / "data/kept.parquet").read_bytes()
    assert content.startswith(b"PAR1") and content.endswith(b"PAR1")


def test_a_dataset_that_came_from_outside_can_be_loaded(data: Served) -> None:
    data.exec("save(pd.DataFrame({'x': [7]}), 'one')")
    (data.project / "data/one.parquet").rename(data.project / "data/two.parquet")
    assert data.exec("int(load('two').x[0])")["stdout"] == "7\n"


def test_saving_leaves_nothing_but_the_dataset(data: Served) -> None:
    data.exec("for i in range(3): save(pd.DataFrame({'x': [i]}), 'again')")
    names = [path.name for path in (data.project / "data").iterdir() if "again" in path.name]
    assert names == ["again.parquet"]


# --- sleep ---------------------------------------------------------------------------------


def test_what_sleeps_comes_back_by_itself_and_overwrites_no_dataset(sleepy: Served) -> None:
    sleepy.exec("save(pd.DataFrame({'mine': [1]}), 'big')")
    before = memory(sleepy)
    sleepy.exec(
        "big = pd.DataFrame(np.random.default_rng(7).random((5_000_000, 5)))\n"
        "total = float(big.sum().sum())"
    )
    assert memory(sleepy) - before > 150 * MB
    wait_until(lambda: memory(sleepy) - before < 50 * MB)
    answer = sleepy.exec("big.shape, float(big.sum().sum()) == total, list(load('big').columns)")
    assert answer["stdout"] == "((5000000, 5), True, ['mine'])\n"
    assert [path.name for path in (sleepy.project / "data").iterdir()] == ["big.parquet"]


def test_arrays_keep_their_dtype_and_order_when_they_sleep(sleepy: Served) -> None:
    before = memory(sleepy)
    sleepy.exec(
        "base = np.arange(60_000_000, dtype='int16')\n"
        "arrays = {'int16': base, 'fortran': np.asfortranarray(base.reshape(6000, 10000)),\n"
        "          'dates': np.arange(10_000_000).astype('datetime64[s]')}\n"
        "import zlib\n"
        "def describe():\n"
        "    return {k: (a.dtype.str, a.shape, a.strides, zlib.crc32(a.tobytes('A')))\n"
        "            for k, a in arrays.items()}\n"
        "was = describe()"
    )
    assert memory(sleepy) - before > 250 * MB
    wait_until(lambda: memory(sleepy) - before < 100 * MB)
    assert sleepy.exec("describe() == was, base is arrays['int16']")["stdout"] == "(True, True)\n"


def test_a_cell_longer_than_the_idle_limit_keeps_what_it_works_with(sleepy: Served) -> None:
    answer = sleepy.exec(
        "import time\nbig = np.ones(20_000_000)\nbefore = big.ctypes.data\n"
        "time.sleep(3)\nprint(big.sum(), big.ctypes.data == before)"
    )
    assert answer == {"status": "[OK] exec", "stdout": "20000000.0 True\n", "stderr": ""}
    assert sleepy.exec("float(big.sum())")["stdout"] == "20000000.0\n"
