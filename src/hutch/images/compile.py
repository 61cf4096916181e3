"""A program: byte code for all modules in a folder; each is told when it is done.

    python -I -S compile.py FOLDER NAME_IN_A_BOX PROCESSORS

Started by itself, not imported, so that it holds nothing of ours while it reads what strangers
wrote. It and its workers end when the process that started them does, and so does their output.
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
                path, dfile=f"{inner}/{name}", doraise=True, quiet=2,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )  # fmt: skip
        except py_compile.PyCompileError:
            pass  # some packages have modules for another Python; they are left as they are
        os.write(1, os.fsencode(name) + b"\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # about modules that nobody here can mend
    sys.exit(compile_all(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])) != 0)
