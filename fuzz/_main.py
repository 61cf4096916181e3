"""What all targets have in common: run as a program, one writes its seeds and is fuzzed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def main(one_input: Callable[[bytes], None], seeds: Iterable[bytes]) -> None:
    """The arguments are atheris's; each folder among them gets the seeds."""
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris (wheels for Python 3.11)")
    inputs = list(seeds)
    for folder in (Path(name) for name in sys.argv[1:]):
        if folder.is_dir():
            for number, seed in enumerate(inputs):
                (folder / f"seed-{number}").write_bytes(seed)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
