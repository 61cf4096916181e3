"""`hutch image`: build, pull, import and list images."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from hutch import factory
from hutch.errors import InvalidRequest
from hutch.images import store
from hutch.images.environment import BUILT_IN, Image
from hutch.images.oci import archive
from hutch.images.oci import store as oci
from hutch.images.oci.progress import LayerProgress, LayersDisplay
from hutch.images.oci.reference import Reference, parse
from hutch.images.oci.store import StoredImage, bring
from hutch.images.progress import Display

from .options import Parser, as_ls, make_parser
from .place import is_elsewhere, use_its_images
from .program import Launcher
from .screen import complain, print_table, size, visible

ACTIONS = {
    "build": ("--packages", "--requirements", "--preload"),
    "pull": ("--as",),
    "import": ("--from-docker",),
    "ls": ("--json", "--quiet"),
    "rm": (),
    "prune": (),
}
ONE_NAME = ("build", "pull", "rm")
OPTIONS = sorted({option for options in ACTIONS.values() for option in options})


def build_parser() -> Parser:
    parser = make_parser(
        "hutch image",
        "hutch image build NAME [--packages PACKAGE...] [--requirements FILE]\n"
        "                              [--preload MODULE...]\n"
        "       hutch image pull IMAGE [--as NAME]\n"
        "       hutch image import FILE|FOLDER|- NAME\n"
        "       hutch image import --from-docker IMAGE [NAME]\n"
        "       hutch image ls [--quiet | --json]\n"
        "       hutch image rm NAME\n"
        "       hutch image prune",
        "Manage the images of this machine: for boxes made here, and for the server of\n"
        "this machine. All boxes share one read-only copy. There are two kinds. Sets of\n"
        "Python packages are built on top of the /usr of this machine; only wheels are\n"
        "installed, so none of their code runs outside of a box. Whole root file systems\n"
        "are pulled from a registry or imported, without Docker; nothing of them ever\n"
        "runs outside of a box.\n"
        "\n"
        "  build    build an image, or replace it with other packages; python, data\n"
        "           (pandas and more) and chem (data and rdkit) have a fixed list\n"
        "  pull     get an image from a registry, by the name that Docker uses; your\n"
        "           credentials are taken from ~/.docker/config.json\n"
        "  import   import an image from a file or from stdin: the output of docker save,\n"
        "           an OCI layout (also a folder), or the tar of a root file system\n"
        "  ls       list them; those without a name were made by programs, or had a name\n"
        "           that now belongs to another image\n"
        "  rm       remove an image, unless a box uses it; build or pull it again to get\n"
        "           the newest version\n"
        "  prune    remove images without a name that no box uses",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch image build data\n"
        "  hutch image build frames --packages polars 'pyarrow>=17' --preload polars\n"
        "  hutch image pull alpine\n"
        "  hutch run --image alpine -- cat /etc/os-release\n"
        "  docker save mine:1 | hutch image import - mine:1",
    )
    parser.add_argument("action", choices=ACTIONS, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--packages",
        nargs="+",
        action="extend",
        metavar="PACKAGE",
        help="packages in pip's syntax: polars, 'pandas>=2', or a wheel: "
        "./mine-1.0-py3-none-any.whl",
    )
    parser.add_argument("--requirements", metavar="FILE", help="a list of packages, one per line")
    parser.add_argument(
        "--preload",
        nargs="+",
        action="extend",
        metavar="MODULE",
        help="modules to import before a box starts",
    )
    parser.add_argument("--as", metavar="NAME", help="its name on this machine (default: the same)")
    parser.add_argument(
        "--from-docker", metavar="IMAGE", help="import an image of the Docker engine"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only names")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument(
        "--backend",
        choices=("namespaces", "docker"),
        help="whose images: those of boxes made here, or those of a Docker engine "
        "(default: HUTCH_BACKEND, or namespaces)",
    )
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    parser = build_parser()
    if not words:
        parser.print_help()
        return 0
    words = as_ls(words)
    if _backend(words) == "kubernetes":
        raise InvalidRequest(
            "the nodes of a cluster pull images themselves: push yours to a registry (for images "
            "of this machine: --backend namespaces)"
        )
    if _backend(words) == "docker":
        code: int = factory.docker(".cli.engine_image").main(words, launcher)
        return code
    signal.signal(signal.SIGTERM, _leave)
    args = parser.parse_args(words)
    _check(args)
    data = use_its_images()
    if is_elsewhere(os.environ.get("HUTCH_URL"), data):
        complain(f"these are the images of this machine, in {data}; not those of HUTCH_URL")
    ACTS[args.action](args)
    return 0


def _backend(words: list[str]) -> str:
    """The backend whose images are meant. Found before the words are parsed."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == "--backend" or word.startswith("--backend="):
            return word.partition("=")[2] or after
    # A Docker engine pulls images itself; these two fill our own store.
    return factory.NAMES[0] if words[0] in ("pull", "import") else factory.default()


def _check(args: argparse.Namespace) -> None:
    action, names = args.action, args.names
    for option in OPTIONS:
        if getattr(args, option[2:].replace("-", "_")) and option not in ACTIONS[action]:
            raise InvalidRequest(f"hutch image {action} has no option {option}")
    if action in ONE_NAME and len(names) != 1:
        if names and action == "build":
            first, *packages = map(shlex.quote, map(visible, names))
            raise InvalidRequest(
                f"one image at a time. For packages: hutch image build {first} --packages "
                + " ".join(packages)
            )
        if names:
            raise InvalidRequest(f"one image at a time: {visible(' '.join(names))}")
        example = "alpine" if action == "pull" else "data"
        raise InvalidRequest(f"no image given. For example: hutch image {action} {example}")
    if action == "import" and len(names) not in ((0, 1) if args.from_docker else (2,)):
        raise InvalidRequest(
            "import needs a file and a name. For example: hutch image import mine.tar mine"
        )
    if action in ("ls", "prune") and names:
        raise InvalidRequest(f"hutch image {action} takes no name: {names[0]!r}")


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # an exception, so that a build removes what it has begun


# --- actions -----------------------------------------------------------------------------


def _build(args: argparse.Namespace) -> None:
    image = _image(args)
    with Display(args.names[0]) as display:
        store.build(image, display)


def _image(args: argparse.Namespace) -> str | Image:
    packages = list(args.packages or ())
    if args.requirements:
        packages += read_requirements(Path(args.requirements))
    name: str = args.names[0]
    if not packages and not args.preload:
        return name
    if name in BUILT_IN:
        raise InvalidRequest(f"the list of {name!r} is fixed; choose another name for yours")
    return Image.python(packages, args.preload or (), name)


def read_requirements(path: Path) -> list[str]:
    """The packages of a requirements file. Raises InvalidRequest for options and the like."""
    try:
        lines = path.read_text().split("\n")  # not `splitlines`, which ends comments early
    except (OSError, UnicodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not a text file"
        raise InvalidRequest(f"--requirements {path}: {why}") from None
    bare = [line.partition(" #")[0].strip() for line in lines]
    packages = [line for line in bare if line and not line.startswith("#")]
    for line in packages:
        if line.startswith("-") or line.endswith("\\"):
            raise InvalidRequest(
                f"--requirements {path}: only packages are allowed, one per line, not {line!r}"
            )
    return packages


def _pull(args: argparse.Namespace) -> None:
    from hutch.images.oci.registry import Registry  # slow to import, and only needed here

    (image,) = args.names
    name = parse(getattr(args, "as") or image)
    with LayersDisplay(name.familiar) as display, Registry(parse(image)) as source:
        stored = bring(source, name, display)
    _report(name, stored, getattr(args, "as") or image)


def _import(args: argparse.Namespace) -> None:
    given = args.names[-1] if args.names else args.from_docker
    name = parse(given)
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(LayersDisplay(name.familiar))
        if args.from_docker:
            spool = stack.enter_context(archive.spooled())
            asyncio.run(_export(args.from_docker, spool, display))
            source = archive.open_stream(spool.finish(), parse(args.from_docker))
        elif args.names[0] == "-":
            source = archive.open_stream(sys.stdin.buffer, name)
        else:
            source = archive.open_archive(Path(args.names[0]), name)
        stored = bring(stack.enter_context(source), name, display)
    _report(name, stored, given)


async def _export(image: str, spool: archive.Spool, display: LayersDisplay) -> None:
    """What `docker save` would write."""
    async with factory.docker(".backends.docker.images").opened() as engine:
        async for piece in engine.export(image):
            display(LayerProgress("", "reading", spool.write(piece)))


def _report(name: Reference, stored: StoredImage, given: str) -> None:
    complain(f"{name.familiar} is {stored.digest}, {size(stored.bytes)}")
    if given == "host" or store.look_up(given):
        complain(f"{given!r} alone means another image here: use --image {name.familiar}")


def _ls(args: argparse.Namespace) -> None:
    entries = [store.ImageEntry("host", (), True, 0, "machine"), *store.entries(), *oci.entries()]
    if args.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    if args.quiet:
        print("".join(f"{entry.name}\n" for entry in entries if entry.name), end="")
        return
    rows = [(entry.name or "-", entry.kind, _room(entry), _content(entry)) for entry in entries]
    print_table(("NAME", "KIND", "SIZE", "CONTENT"), rows, right=("SIZE",))


def _room(entry: store.ImageEntry) -> str:
    if entry.kind == "machine":
        return "-"  # its /usr
    return size(entry.bytes) if entry.built else "not built"


def _content(entry: store.ImageEntry) -> str:
    return entry.digest[:19] if entry.digest else " ".join(entry.packages)


def _rm(args: argparse.Namespace) -> None:
    (name,) = args.names
    if store.look_up(name) is None:
        oci.remove(name)
    elif not store.remove(name):
        complain(f"{name!r} is not built; there was nothing to remove")


def _prune(args: argparse.Namespace) -> None:
    removed = [*store.prune(), *oci.prune()]
    complain(f"removed {len(removed)}, {size(sum(entry.bytes for entry in removed))}")


ACTS = {
    "build": _build,
    "pull": _pull,
    "import": _import,
    "ls": _ls,
    "rm": _rm,
    "prune": _prune,
}
