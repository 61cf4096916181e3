"""A program that compiles all modules in a folder, and prints the name of each when it is done.

    python -I -S compile.py FOLDER NAME_IN_A_BOX PROCESSORS

It is started, not imported, so that the process that parses untrusted source holds nothing of
ours. If the process that started it ends, so do this one and its workers, and their output.
"""

from __future__ import annotations

import ctypes
import os
import py_compile
import sys
import warnings
from pathlib import Path

PR_SET_PDEATHSIG, SIGKILL = 1, 9


def compile_all(folder: Path, inner: str, workers: int) -> int:
    files = [str(path) for path in sorted(folder.rglob("*.py")) if path.is_file()]
    here = os.getpid()
    pids = []
    for number in range(workers):
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
            code = 1
            try:
                # Otherwise the parent died before prctl, and there will be no signal.
                if os.getppid() == here:
                    _compile(files[number::workers], folder, inner)
                    code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return max(os.waitpid(pid, 0)[1] for pid in pids)


def _compile(files: list[str], folder: Path, inner: str) -> None:
    for path in files:
        name = path[len(str(folder)) + 1 :]
        try:
            py_compile.compile(
                path,
                dfile=f"{inner}/{name}",
                doraise=True,
                quiet=2,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
        except py_compile.PyCompileError:
            pass  # some packages contain modules for another Python version; they stay uncompiled
        os.write(1, os.fsencode(name) + b"\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # about source that is not ours to fix
    sys.exit(compile_all(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])) != 0)
