"""Speeds up the start of a guest. Import it before the modules of the guest.

A dataclass generates its methods as source, and compiling that takes a quarter of the start of a
guest. The source is always the same, so a bundle has it compiled, in the file `methods`. The
garbage collector is off while modules are loaded, as they create no garbage. Turn it on again
before serving.

`python -m hutch.guest.quick` writes that file to its standard output.
"""

from __future__ import annotations

import dataclasses
import gc
import marshal
import sys
from importlib import import_module
from types import CodeType

FILE = "methods"


def _use(codes: dict[str, CodeType]) -> None:
    def run(text: str, *names: dict[str, object]) -> None:
        exec(codes.get(text, text), *names)

    vars(dataclasses)["exec"] = run


def _record() -> dict[str, CodeType]:
    codes: dict[str, CodeType] = {}

    def run(text: str, *names: dict[str, object]) -> None:
        codes[text] = compile(text, "<string>", "exec")
        exec(codes[text], *names)

    vars(dataclasses)["exec"] = run
    import_module("hutch.guest.contained")
    return codes


if __name__ == "__main__":
    sys.stdout.buffer.write(marshal.dumps(_record()))
else:
    gc.disable()
    try:
        with open(f"{sys.prefix}/{FILE}", "rb") as file:
            _use(marshal.loads(file.read()))
    except OSError:
        pass  # not in a bundle, or the bundle is being built: only slower
