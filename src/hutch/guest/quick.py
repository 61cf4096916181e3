"""Makes a guest start quickly: to be imported before all that it makes quick.

A dataclass writes its methods as text, and to compile that is a quarter of what the start of a
guest takes. The text is always the same, so a bundle has it compiled, in the file `methods`. And
nothing that is made while modules load is ever garbage: nobody needs to look for it. Whoever serves
after that turns the collector on again.

`python -m hutch.guest.quick` writes that file to its standard output.
"""

from __future__ import annotations

import dataclasses
import gc
import marshal
import sys
from importlib import import_module
from types import CodeType
from typing import Any

FILE = "methods"


def _use(codes: dict[str, CodeType]) -> None:
    def run(text: str, *names: dict[str, Any]) -> None:
        exec(codes.get(text, text), *names)

    vars(dataclasses)["exec"] = run


def _record() -> dict[str, CodeType]:
    codes: dict[str, CodeType] = {}

    def run(text: str, *names: dict[str, Any]) -> None:
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
        pass  # not from a bundle, or this is how that is made: only slower
