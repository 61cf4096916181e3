"""`hutch kubernetes`: what a cluster needs before boxes can be made there."""

from __future__ import annotations

import argparse
from pathlib import Path

from hutch import factory
from hutch.images.bundle_image import write

from .options import Parser, make_parser
from .program import Launcher


def build_parser() -> Parser:
    parser = make_parser(
        "hutch kubernetes",
        "hutch kubernetes image FILE [NAME]",
        "Write an image with what runs in every box: our Python and guest, 35 MB. Push it\n"
        "to a registry that your cluster pulls from, and set\n"
        "HUTCH_KUBERNETES_RUNTIME_IMAGE to its name there. Write another after\n"
        "each upgrade of hutch.",
        "exit codes: 0; 125 if hutch failed.\n"
        "\n"
        "example:\n"
        "  hutch kubernetes image hutch.tar registry.example.org/hutch/runtime:1\n"
        "  docker load -i hutch.tar && docker push registry.example.org/hutch/runtime:1",
    )
    parser.add_argument("action", choices=("image",), help=argparse.SUPPRESS)
    parser.add_argument("file", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("name", metavar="NAME", nargs="?", help=argparse.SUPPRESS)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    parser = build_parser()
    if not words:
        parser.print_help()
        return 0
    args = parser.parse_args(words)
    bundle = factory.bundle()
    name = args.name or f"hutch/runtime:{bundle.path.name[:12]}"
    write(bundle, name, Path(args.file))
    print(name)
    return 0
