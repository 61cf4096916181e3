"""What an import costs: `python -m benchmarks.imports httpcore httpcore,httpx typer`.

Each import is done in a fresh interpreter, in turns. Of names with commas between them, only the
last one is measured: `httpcore,httpx` is what httpx costs a program that has httpcore already.
CPU time is printed beside the wall clock: it depends less on what else the machine does. Memory is
what the process has for itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

CHILD = """
import sys, time
from importlib import import_module
def private():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private"))
*before, last = sys.argv[1].split(",")
for name in before:
    import_module(name)
modules, memory = len(sys.modules), private()
wall, cpu = time.perf_counter(), time.process_time()
import_module(last)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(cpu * 1000, wall * 1000, (private() - memory) / 1024, len(sys.modules) - modules)
"""


def measure(python: str, names: str) -> list[float]:
    """CPU and wall milliseconds, MiB of private memory, modules."""
    done = subprocess.run([python, "-c", CHILD, names], check=True, capture_output=True, text=True)
    return [float(word) for word in done.stdout.split()[-4:]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imports", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="[BEFORE,]MODULE")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has them")
    args = parser.parse_args()
    seen: dict[str, list[list[float]]] = {names: [] for names in args.names}
    for turn in range(args.turns + 1):
        for names, values in seen.items():
            value = measure(args.python, names)
            if turn:  # the first one may have compiled the modules
                values.append(value)
    print(f"{'CPU ms':>8} {'wall ms':>8} {'MiB':>6} {'modules':>8}")
    for names, values in seen.items():
        cpu, wall, memory, modules = (median(column) for column in zip(*values, strict=True))
        print(f"{cpu:8.1f} {wall:8.1f} {memory:6.1f} {modules:8.0f}  {names}")


if __name__ == "__main__":
    main()
