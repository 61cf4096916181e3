"""`hutch kubernetes`: what a cluster needs for boxes, and for a server that makes them."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import hutch
from hutch import factory
from hutch.errors import InvalidRequest

from .options import Parser, make_parser
from .program import Launcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hutch.backends.kubernetes.install import Installation, Object

ACTIONS = ("image", "manifests")
# Settings that `manifests` makes itself, and what says them instead.
DECIDED = {
    "api_key": "the Secret hutch-key has it",
    "data_dir": "it is on the volume",
    "listen": "the Service leads there",
    "backend": "it is kubernetes",
    "allowed_hosts": "use --host",
    "runtime": "use --runtime",
    "mounts": "folders of a node cannot be mounted in a Pod",
    "tls.cert": "an ingress speaks TLS",
    "tls.key": "an ingress speaks TLS",
    "kubernetes.context": "it is the cluster that the server is in",
    "kubernetes.namespace": "use --boxes-namespace",
    "kubernetes.runtime_image": "use --runtime-image",
    "kubernetes.replica_url": "use --replicas",
}
HEAD = """\
# Hutch {version}: a server, and a namespace for its boxes. Made by `{command}`.
#
# The server's Pod waits for the key that clients need, which is not in here. Make one afterwards:
#
#   head -c 24 /dev/urandom | base64 | tr -d '+/=\\n' | kubectl --namespace {namespace} \\
#     create secret generic {secret} --from-file={key}=/dev/stdin
"""


def build_parser() -> Parser:
    parser = make_parser(
        "hutch kubernetes",
        "hutch kubernetes image [--server] FILE [NAME]\n"
        "       hutch kubernetes manifests --image IMAGE [--runtime-image IMAGE]\n"
        "                                  [--namespace NAME] [--boxes-namespace NAME]\n"
        "                                  [--boxes COUNT] [--replicas COUNT]\n"
        "                                  [--runtime NAME] [--host NAME...]\n"
        "                                  [--storage SIZE] [--storage-class NAME]\n"
        "                                  [--set KEY=VALUE...]",
        "Prepare a cluster for boxes, and for a server that makes them.\n"
        "\n"
        "  image      write an image with what runs in every box, our Python and guest;\n"
        "             push it to a registry that your cluster pulls from, set\n"
        "             HUTCH_KUBERNETES_RUNTIME_IMAGE to its name there, and write\n"
        "             another after each upgrade of hutch\n"
        "  manifests  print what runs `hutch serve` in a cluster, for kubectl apply -f -;\n"
        "             nothing is sent anywhere",
        "exit codes: 0; 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch kubernetes image hutch.tar registry.example.org/hutch/runtime:1\n"
        "  hutch kubernetes image --server hutch.tar registry.example.org/hutch/server:1\n"
        "  hutch kubernetes manifests --image registry.example.org/hutch/server:1",
    )
    parser.add_argument("action", choices=ACTIONS, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--server",
        action="store_true",
        help="write an image that also runs `hutch serve`; boxes may use it, too",
    )
    parser.add_argument("--image", metavar="IMAGE", help="written with --server, as nodes pull it")
    parser.add_argument(
        "--runtime-image", metavar="IMAGE", help="what boxes run from (default: that of --image)"
    )
    parser.add_argument("--namespace", metavar="NAME", help="of the server (default: hutch)")
    parser.add_argument(
        "--boxes-namespace", metavar="NAME", help="of the boxes (default: hutch-boxes)"
    )
    parser.add_argument(
        "--boxes", type=int, metavar="COUNT", help="the most at once (default: 100)"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="COUNT",
        help="servers, which share their sessions (default: 1, which keeps them itself)",
    )
    parser.add_argument(
        "--runtime", metavar="NAME", help="a RuntimeClass for all boxes, such as gvisor"
    )
    parser.add_argument(
        "--host",
        action="append",
        metavar="NAME",
        help="a name by which clients call the server, such as that of an ingress; may be repeated",
    )
    parser.add_argument(
        "--storage", metavar="SIZE", help="of the volume with a server's data (default: 10Gi)"
    )
    parser.add_argument(
        "--storage-class", metavar="NAME", help="of that volume (default: the cluster's)"
    )
    parser.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="another setting of the server: drain_seconds=60; may be repeated",
    )
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    parser = build_parser()
    if not words:
        parser.print_help()
        return 0
    args = parser.parse_args(words)
    return ACTS[args.action](args, words)


def _write_image(args: argparse.Namespace, words: list[str]) -> int:
    from hutch.images.bundle_image import write

    if not 1 <= len(args.names) <= 2:
        raise InvalidRequest("one FILE, and perhaps a NAME: hutch kubernetes image FILE [NAME]")
    bundle = factory.bundle()
    name = f"hutch/runtime:{bundle.path.name[:12]}"
    if args.server:
        name = f"hutch/server:{hutch.__version__}"
    file, name = [*args.names, name][:2]
    write(bundle, name, Path(file), server=args.server)
    print(name)
    return 0


def _print_manifests(args: argparse.Namespace, words: list[str]) -> int:
    from hutch.backends.kubernetes import install

    if args.names:
        raise InvalidRequest(f"hutch kubernetes manifests takes no name: {args.names[0]!r:.100}")
    chosen = _installation(args)
    head = HEAD.format(
        version=hutch.__version__,
        # One line: a comment ends with it.
        command=shlex.join(["hutch", "kubernetes", *words]).encode("unicode_escape").decode(),
        namespace=chosen.namespace,
        secret=install.SECRET,
        key=install.SECRET_KEY,
    )
    print(head + _as_yaml(chosen.objects()), end="")
    return 0


def _installation(args: argparse.Namespace) -> Installation:
    from hutch.backends.kubernetes.install import Installation
    from hutch.images.oci.reference import parse
    from hutch.settings import variable_of
    from hutch.settings.reading import NO_FILE, load

    if not args.image:
        raise InvalidRequest(
            "--image is missing: what `hutch kubernetes image --server` wrote, as nodes pull it"
        )
    for name in (args.image, args.runtime_image):
        parse(name or args.image)
    settings = _settings(args.set or ())
    variables = {variable_of(key): value for key, value in settings.items()}
    found = load(Path("/"), file=NO_FILE, env=variables).settings
    chosen = {
        name: getattr(args, name)
        for name in ("image", "runtime_image", "namespace", "boxes_namespace", "boxes",
                     "replicas", "runtime", "storage", "storage_class")
        if getattr(args, name) is not None
    }  # fmt: skip
    return Installation(
        **chosen, hosts=tuple(args.host or ()), drain=found.drain_seconds, settings=variables
    )


def _settings(given: Sequence[str]) -> dict[str, str]:
    from hutch.settings import FIELDS
    from hutch.settings.reading import unknown_key

    found = {}
    for text in given:
        key, is_one, value = text.partition("=")
        if not is_one or not value:
            raise InvalidRequest(f"--set {text!r:.100}: it has to be KEY=VALUE")
        if key in DECIDED:
            raise InvalidRequest(f"--set {key}: {DECIDED[key]}")
        if key not in FIELDS:
            raise InvalidRequest(f"--set: {unknown_key(key)}")
        found[key] = value
    return dict(sorted(found.items()))  # as Helm has them


def _as_yaml(objects: list[Object]) -> str:
    import yaml

    class Plain(yaml.SafeDumper):
        """Without anchors, which few people can read."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump_all(objects, Dumper=Plain, sort_keys=False, explicit_start=True)


ACTS = {"image": _write_image, "manifests": _print_manifests}
