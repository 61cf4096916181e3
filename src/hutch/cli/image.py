"""`hutch image`: sets of Python packages, built once and shared by all boxes that ask for them."""

from __future__ import annotations

import argparse
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from hutch.errors import HutchError, InvalidRequest
from hutch.images import store
from hutch.images.environment import BUILT_IN, Image
from hutch.images.progress import Display

from .options import Parser, make_parser
from .place import is_elsewhere, use_its_images
from .program import FAILED, Launcher
from .screen import complain, visible
from .tables import size

ACTIONS = {
    "build": ("--packages", "--requirements", "--preload"),
    "ls": ("--json",),
    "rm": (),
    "prune": (),
}
NAMED = ("build", "rm")


def parser() -> Parser:
    made = make_parser(
        "hutch image",
        "hutch image build NAME [--packages PACKAGE...] [--requirements FILE]\n"
        "                              [--preload MODULE...]\n"
        "       hutch image ls [--json]\n"
        "       hutch image rm NAME\n"
        "       hutch image prune",
        "Build sets of Python packages, on this machine: for boxes made here, and for the\n"
        "server of this machine. A box of such an image has them at once, also\n"
        "without network; all boxes share one copy, which none can change. Of packages\n"
        "only wheels are taken, so that none of their code runs outside of a box.\n"
        "\n"
        "  build    build an image, or replace it by one of another list; python, data\n"
        "           (pandas and the like) and chem (data and rdkit) have their list\n"
        "  ls       list them; those without a name were made by programs\n"
        "  rm       remove an image, unless a box uses it; built again, it gets the\n"
        "           newest versions\n"
        "  prune    remove those without a name that no box uses",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch image build data\n"
        "  hutch image build frames --packages polars 'pyarrow>=17' --preload polars\n"
        "  hutch run --image frames -- python3 -c 'import polars'",
    )
    made.add_argument("action", choices=ACTIONS, help=argparse.SUPPRESS)
    made.add_argument("name", nargs="?", help=argparse.SUPPRESS)
    made.add_argument("--packages", nargs="+", action="extend", metavar="PACKAGE",
                      help="packages as pip has them: polars, 'pandas>=2', or a wheel: "
                      "./mine-1.0-py3-none-any.whl")  # fmt: skip
    made.add_argument("--requirements", metavar="FILE",
                      help="a list of packages, one in a line")  # fmt: skip
    made.add_argument("--preload", nargs="+", action="extend", metavar="MODULE",
                      help="modules to import before a box is there")  # fmt: skip
    made.add_argument("--json", action="store_true", help="print the list as JSON")
    return made


def main(words: list[str], launcher: Launcher) -> int:
    made = parser()
    if not words:
        made.print_help()
        return 0
    signal.signal(signal.SIGTERM, _leave)
    try:
        chosen = made.parse_args(words)
        _check(chosen)
        data = use_its_images()
        if is_elsewhere(os.environ.get("HUTCH_URL"), data):
            complain(f"these are the images of this machine, in {data}; not those of HUTCH_URL")
        ACTS[chosen.action](chosen)
    except HutchError as exc:
        complain(str(exc))
        return FAILED
    return 0


def _check(chosen: argparse.Namespace) -> None:
    for option in ("--packages", "--requirements", "--preload", "--json"):
        if getattr(chosen, option[2:]) and option not in ACTIONS[chosen.action]:
            raise InvalidRequest(f"hutch image {chosen.action} has no option {option}")
    if chosen.action in NAMED and not chosen.name:
        raise InvalidRequest(f"which image? For example: hutch image {chosen.action} data")
    if chosen.action not in NAMED and chosen.name:
        raise InvalidRequest(f"hutch image {chosen.action} takes no name: {chosen.name!r}")


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # not at once: a build takes away what it has begun


# --- actions -----------------------------------------------------------------------------


def _build(chosen: argparse.Namespace) -> None:
    image = _image(chosen)
    with Display(chosen.name) as display:
        store.build(image, display)


def _image(chosen: argparse.Namespace) -> str | Image:
    packages = list(chosen.packages or ())
    if chosen.requirements:
        packages += read_requirements(Path(chosen.requirements))
    name: str = chosen.name
    if not packages and not chosen.preload:
        return name
    if name in BUILT_IN:
        raise InvalidRequest(f"the list of {name!r} is fixed; choose another name for yours")
    return Image.python(packages, chosen.preload or (), name)


def read_requirements(path: Path) -> list[str]:
    """The packages in a plain list. Raises InvalidRequest for more than that, such as options."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is no text"
        raise InvalidRequest(f"--requirements {path}: {why}") from None
    bare = [line.partition(" #")[0].strip() for line in lines]
    found = [line for line in bare if line and not line.startswith("#")]
    for line in found:
        if line.startswith("-") or line.endswith("\\"):
            raise InvalidRequest(f"--requirements {path}: only packages, one in a line: {line!r}")
    return found


def _ls(chosen: argparse.Namespace) -> None:
    entries = [store.Entry("host", (), True, 0), *store.entries()]
    if chosen.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    width = max(len(entry.name or "-") for entry in entries)
    print("NAME".ljust(width), "SIZE".rjust(9), "PACKAGES", sep="  ")
    for entry in entries:
        room = _room(entry)
        packages = visible(" ".join(entry.packages)) or "-"
        print((entry.name or "-").ljust(width), room.rjust(9), packages, sep="  ")


def _room(entry: store.Entry) -> str:
    if entry.name == "host":
        return "-"  # the /usr of this machine
    return size(entry.bytes) if entry.built else "not built"


def _rm(chosen: argparse.Namespace) -> None:
    if not store.remove(chosen.name):
        complain(f"{chosen.name!r} is not built; there was nothing to remove")


def _prune(chosen: argparse.Namespace) -> None:
    removed = store.prune()
    complain(f"removed {len(removed)}, {size(sum(entry.bytes for entry in removed))}")


ACTS = {"build": _build, "ls": _ls, "rm": _rm, "prune": _prune}
