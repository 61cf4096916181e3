"""`hutch image --backend docker`: the images of Hutch in a Docker engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal

from hutch.backends.docker.images import PREFIX, EngineImage, ImageClient, opened
from hutch.errors import InvalidRequest, NotFound
from hutch.images.progress import Display
from hutch.images.uv import Progress
from hutch.recipes import short
from hutch.recipes.engine_images import listed
from hutch.recipes.making import FINGERPRINT, make

from .options import Parser, make_parser
from .program import Launcher
from .screen import complain, print_table, size

ACTIONS = ("build", "ls", "rm")


def build_parser() -> Parser:
    parser = make_parser(
        "hutch image --backend docker",
        "hutch image build --backend docker NAME\n"
        "       hutch image ls --backend docker [--json]\n"
        "       hutch image rm --backend docker NAME",
        "Build the images that come with Hutch, in the Docker engine: base (a Debian with\n"
        "git and curl), small (bash, git, curl and jq on busybox), python, data (pandas and\n"
        "more) and node. They are named hutch/base and so on. Any other image that the\n"
        "engine has, or can pull, can be used as it is.\n"
        "\n"
        "  build    build an image, on a Debian that the engine pulls; if it cannot, on\n"
        "           one that mmdebstrap makes on this machine\n"
        "  ls       list them\n"
        "  rm       remove an image, unless a box uses it; built again, it gets the\n"
        "           newest versions",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch image build --backend docker python\n"
        "  hutch run --backend docker --image hutch/python -- python3 --version",
    )
    parser.add_argument("action", choices=ACTIONS, help=argparse.SUPPRESS)
    parser.add_argument("name", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--backend", choices=["docker"], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    _check(args)
    asyncio.run(_act(args))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.json and args.action != "ls":
        raise InvalidRequest(f"hutch image {args.action} has no option --json")
    if args.action == "ls":
        if args.name:
            raise InvalidRequest(f"hutch image ls takes no name: {args.name!r}")
    elif args.name:
        short(args.name)
    else:
        raise InvalidRequest(
            f"no image given. For example: hutch image {args.action} --backend docker python"
        )


async def _act(args: argparse.Namespace) -> None:
    # On SIGTERM, cancel instead of exiting, so that a build removes what it has begun.
    task = asyncio.current_task()
    assert task
    is_stopped = False

    def end() -> None:
        nonlocal is_stopped
        is_stopped = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    try:
        async with opened() as images:
            await ACTS[args.action](images, args)
    except asyncio.CancelledError:
        if is_stopped:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise


# --- actions -----------------------------------------------------------------------------


async def _build(images: ImageClient, args: argparse.Namespace) -> None:
    name = short(args.name)
    with Display(PREFIX + name) as display:
        is_new = await make(images, name, lambda step: display(Progress(step)))
    tag = PREFIX + name
    if not is_new:
        complain(
            f"{tag} exists already; for newer versions, first run `hutch image rm --backend docker "
            f"{name}`"
        )
    elif built := await images.find(tag):
        complain(f"{tag} is built, {size(built.size)}")


async def _ls(images: ImageClient, args: argparse.Namespace) -> None:
    named = await listed(images)
    if args.json:
        entries = [
            {
                "name": name,
                "built": bool(image),
                "size": image.size if image else None,
                "id": image.id if image else None,
                "by_hutch": image is not None and _is_by_hutch(image),
            }
            for name, image in named.items()
        ]
        print(json.dumps(entries, indent=2))
        return
    rows = [
        [name, size(image.size), _short_id(image)] if image else [name, "not built", ""]
        for name, image in named.items()
    ]
    print_table(["NAME", "SIZE", "ID"], rows, right=["SIZE"])


def _short_id(image: EngineImage) -> str:
    short_id = image.id.removeprefix("sha256:")[:12]
    return short_id if _is_by_hutch(image) else f"{short_id} (not by hutch)"


def _is_by_hutch(image: EngineImage) -> bool:
    return FINGERPRINT in image.labels


async def _rm(images: ImageClient, args: argparse.Namespace) -> None:
    try:
        await images.remove(PREFIX + short(args.name))
    except NotFound:
        complain(f"{args.name!r} is not built; there was nothing to remove")


ACTS = {"build": _build, "ls": _ls, "rm": _rm}
