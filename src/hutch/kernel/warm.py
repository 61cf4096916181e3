"""Warm processes: packages are imported and used once in advance, and kernels are forked from them.

A forked kernel starts where another would be after seconds. What it must not share with its
siblings (random numbers, temporary names) and what belongs to the warm process (handlers, loops,
paths) is undone here.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import io
import linecache
import os
import random
import signal
import site
import sys
import time
import uuid
from typing import Any

from . import charts, display, hooks
from .cells import Cells
from .pretty import error_text

_remembered: dict[str, list[Any]] = {}


def remember() -> None:
    """Remember how modules are found, before imports are forbidden, and which are the host's."""
    ours = __name__.rpartition(".")[0]
    hosts = [name for name in sys.modules if f"{name}.".startswith("hutch.")]
    kept = [name for name in hosts if f"{ours}.".startswith(f"{name}.") or f"{ours}." in name]
    _remembered.update(
        path=list(sys.path),
        meta_path=list(sys.meta_path),
        hosts=[name for name in hosts if name not in kept],
    )


def preload(modules: list[str]) -> list[tuple[str, str]]:
    """Import each module. Returns those that failed, and why."""
    hooks.install()
    if not hasattr(builtins, "exit"):  # this process may have been started without `site`
        site.setquit()
        site.sethelper()
    failed = []
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as exc:
            failed.append((name, error_text(exc)))
    return failed


# --- in a fork --------------------------------------------------------------------------


def part(environ: dict[str, str]) -> None:
    """Undo, in a fork, what belongs to the warm process and to the guest."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT}:
        if callable(signal.getsignal(number)) or signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as Python does at its start
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if events := sys.modules.get("asyncio.events"):
        events._set_running_loop(None)
        events.set_event_loop(None)
    gc.freeze()  # so that a collection does not touch, and so copy, objects of the guest
    gc.enable()
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    _differ()
    _drop_the_host()


def settle(start: dict[str, Any]) -> str | None:
    """Find modules as the box does. Returns the folder of its own packages, if it has one."""
    sys.meta_path[:] = _remembered.get("meta_path", sys.meta_path)
    sys.path[:] = start.get("path") or _remembered.get("path", sys.path)
    if start.get("executable"):
        sys.executable = start["executable"]
    if not start.get("prefix"):
        return None
    sys.prefix = sys.exec_prefix = start["prefix"]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return os.path.join(sys.prefix, "lib", version, "site-packages")


def use_packages(folder: str) -> None:
    """Add `folder` to sys.path before the packages of the image, as in a venv."""
    before = list(sys.path)
    site.addsitedir(folder)
    added = [path for path in sys.path if path not in before]
    shared = (at for at, path in enumerate(before) if path.endswith("-packages"))
    place = next(shared, len(before))
    sys.path[:] = [*before[:place], *added, *before[place:]]


def _differ() -> None:
    """Reseed what siblings must not share: random numbers, temporary names, UUIDs."""
    random.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int.from_bytes(os.urandom(7), "big"))
    if tempfile := sys.modules.get("tempfile"):
        vars(tempfile).update(_name_sequence=None, tempdir=None)
    vars(uuid).update(_last_timestamp=None, _node=None)


def _drop_the_host() -> None:
    """Hide modules of the host from user code.

    `remember` has collected their names: reading the name of every loaded module here would copy
    megabytes.
    """
    names = _remembered.get("hosts", ())
    # Hidden, not freed: freeing would write to, and so copy, every page they are on.
    _remembered["hidden"] = [sys.modules.pop(name) for name in names if name in sys.modules]


# --- in the warm process ----------------------------------------------------------------


def rehearse() -> None:
    """Do once what most first cells do: the first use of many libraries is slow.

    Never raises an Exception, and leaves no figure, file or thread.
    """
    display.stage.begin(0, lambda result: None)
    try:
        for act in (_cell, _tables, _pictures, _parquet, _learning):
            try:
                act()
            except Exception:
                pass  # it will fail again, visibly, in a cell
    finally:
        display.stage.end()
        charts.close_figures()
        gc.collect()


def _cell() -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    cells = Cells(names)
    cells.run("one = 1\n1 + 1")
    cells.run("[]\n{'a': [1, 2.5, None]}")
    linecache.cache.pop("<cell 0>", None)


def _tables() -> None:
    pandas, numpy = _loaded("pandas"), _loaded("numpy")
    frame = pandas.DataFrame(
        {
            "key": ["a", "b"] * 50,
            "value": numpy.arange(100) / 3,
            "day": pandas.date_range("2024-01-01", periods=100),
        }
    )
    grouped = frame.groupby("key").agg({"value": ["mean", "sum"]})
    for table in (frame, frame.head(), grouped, frame.describe(), frame["value"]):
        display.show(table)
    frame.merge(frame.head(), on="key").sort_values("value_x").pivot_table(
        index="key", values="value_x"
    )
    pandas.read_csv(io.StringIO(frame.to_csv(index=False)), parse_dates=["day"])


def _pictures() -> None:
    _loaded("matplotlib")
    pyplot = _loaded("matplotlib.pyplot")
    axes = pyplot.figure().add_subplot()
    axes.plot([1, 2, 3], [1, 4, 9], label="line")
    axes.scatter([1, 2], [2, 1])
    axes.bar([1, 2], [1, 2])
    axes.set(title="title", xlabel="x", ylabel="y")
    axes.legend()
    display.show_open_figures()


def _parquet() -> None:
    pandas, arrow = _loaded("pandas"), _loaded("pyarrow")
    frame = pandas.DataFrame({"number": [1, 2], "word": ["a", "b"]})
    table = arrow.Table.from_pandas(frame, nthreads=1)
    # Not read back: that always starts a thread, which would not survive a fork.
    _loaded("pyarrow.parquet").write_table(table, io.BytesIO())
    table.to_pandas(use_threads=False)


def _learning() -> None:
    linear = _loaded("sklearn.linear_model")
    numpy = _loaded("numpy")
    rows = numpy.arange(8.0).reshape(4, 2)
    linear.LinearRegression().fit(rows, rows[:, 0]).predict(rows)


def _loaded(name: str) -> Any:
    """A module that was preloaded. Raises KeyError if it was not."""
    return sys.modules[name]
