"""Kernels that are forks of a warm process: as good as fresh ones, and all different."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels_of_tests import SOURCE, Kernel

MODULES = ["numpy", "pandas", "matplotlib.pyplot", "pyarrow.parquet", "sklearn.linear_model"]
ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(tmp_path, forked=True, preload=["random", "uuid", "tempfile", "asyncio"]) as made:
        yield made


def test_a_fork_runs_cells(fork: Kernel) -> None:
    assert fork.run("x = 20\nx + 1").text == "21"
    assert fork.run("import asyncio\nawait asyncio.sleep(0, 5)").text == "5"
    assert fork.run("print('out')").out == "out\n"
    assert fork.run("import colorsys; colorsys.ONE_THIRD < 1").text == "True"


def test_a_fork_can_be_interrupted(fork: Kernel) -> None:
    fork.begin("print('go')\nwhile True: pass")
    fork.wait_for_output("go\n")
    fork.interrupt()
    ran = fork.finish()
    assert ran.error and ran.error["name"] == "KeyboardInterrupt"


def test_a_fork_has_the_environment_it_was_given(tmp_path: Path) -> None:
    environ = {"ONLY": "this", "TZ": "Asia/Tokyo"}
    with Kernel(tmp_path, forked=True, environ=environ) as kernel:
        assert kernel.run("import os; os.environ['ONLY']").text == "'this'"
        assert kernel.run("import time; time.tzname[0]").text == "'JST'"
        assert kernel.run("!echo $ONLY").out == "this\n"


def test_a_fork_sees_nothing_of_ours(fork: Kernel) -> None:
    ran = fork.run("import sys; [name for name in sys.modules if name.split('.')[0] == 'hutch']")
    assert ran.text == "[]"
    ran = fork.run("1/0")
    assert ran.error and ran.error["traceback"].count("File") == 1


def test_siblings_are_all_different(tmp_path: Path) -> None:
    code = (
        "import random, uuid, tempfile, os, secrets\n"
        "[random.random(), tempfile.mktemp(), secrets.token_hex(8), str(uuid.uuid4())]"
    )
    shown = []
    for name in "ab":
        (tmp_path / name).mkdir()
        with Kernel(tmp_path / name, forked=True, preload=["random", "tempfile"]) as kernel:
            shown += (kernel.run(code).text or "").split(",\n")
    assert len(shown) == len(set(shown)) > 1


def test_a_fork_finds_modules_where_the_box_has_them(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "of_the_box.py").write_text("x = 5")
    start = {"path": [*sys.path, str(tmp_path / "lib")], "executable": "/some/python"}
    with Kernel(tmp_path, forked=True, start=start) as kernel:
        assert kernel.run("import of_the_box; of_the_box.x").text == "5"
        assert kernel.run("import sys; sys.executable").text == "'/some/python'"
        (kernel.folder / "in_cwd.py").write_text("x = 6")
        assert kernel.run("import in_cwd; in_cwd.x").text == "6"


def test_packages_of_the_box_are_found_as_soon_as_there_are_any(tmp_path: Path) -> None:
    prefix = tmp_path / "venv"
    with Kernel(tmp_path, forked=True, start={"prefix": str(prefix)}) as kernel:
        ran = kernel.run("import of_the_venv")
        assert ran.error and ran.error["name"] == "ModuleNotFoundError"
        version = kernel.value("__import__('sys').version_info[:2]")
        site = prefix / "lib" / f"python{version[0]}.{version[1]}" / "site-packages"
        site.mkdir(parents=True)
        (site / "of_the_venv.py").write_text("x = 7")
        assert kernel.run("import of_the_venv; of_the_venv.x").text == "7"
        assert kernel.run("import sys; sys.prefix").text == repr(str(prefix))


def test_a_signal_that_ends_programs_ends_a_fork(fork: Kernel) -> None:
    ran = fork.run(
        "import signal\n"
        "[signal.getsignal(s) is signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGCHLD)]"
    )
    assert ran.text == "[True, True]"


# the data packages


def test_a_warm_fork_has_used_everything_once(data_python: str, tmp_path: Path) -> None:
    with Kernel(tmp_path, data_python, forked=True, preload=MODULES, environ=ONE_THREAD) as kernel:
        ran = kernel.run(
            "import pandas as pd, numpy as np, matplotlib.pyplot as plt\n"
            "plt.plot([1, 2]);\npd.DataFrame({'a': [1]})"
        )
        assert ran.error is None, ran.error["traceback"]
        assert ran.picture() and ran.text
        assert kernel.run("plt.get_fignums()").text == "[]"
        again = kernel.run("np.random.rand()").text
    (tmp_path / "second").mkdir()
    with Kernel(tmp_path / "second", data_python, forked=True, preload=["numpy.random"]) as other:
        assert other.run("import numpy as np; np.random.rand()").text != again


REHEARSAL = """
import os, sys, threading
sys.path.append({lib!r})
from hutch_kernel import warm
files = set(os.listdir('/tmp'))
failed = warm.preload({modules!r} + ['no_such_module'])
assert [name for name, why in failed] == ['no_such_module'], failed
warm.rehearse()
assert len(os.listdir('/proc/self/task')) == 1, os.listdir('/proc/self/task')
assert threading.active_count() == 1
import matplotlib.pyplot, linecache
assert not matplotlib.pyplot.get_fignums()
assert not [name for name in linecache.cache if name.startswith('<cell')]
assert '__main__' in sys.modules and 'one' not in vars(sys.modules['__main__'])
print('rehearsed')
"""


def test_a_rehearsal_leaves_no_thread_and_no_figure(data_python: str, tmp_path: Path) -> None:
    (tmp_path / "hutch_kernel").symlink_to(SOURCE, target_is_directory=True)
    done = subprocess.run(
        [data_python, "-W", "ignore", "-c", REHEARSAL.format(lib=str(tmp_path), modules=MODULES)],
        env={**os.environ, **ONE_THREAD, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.returncode) == ("rehearsed\n", 0), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hutch_kernel"]
