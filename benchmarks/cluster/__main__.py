"""`scripts/cluster`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from . import Cluster, default_folder, inside, pack_image, programs
from .config import DAEMONS
from .programs import ClusterFailed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster",
        description="A Kubernetes of one node on this machine, in namespaces of its own.",
    )
    parser.add_argument(
        "--folder", type=Path, default=default_folder(), help="of the cluster: %(default)s"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="build what is not built yet; `up` does it, too")
    commands.add_parser("up", help="start it, and print the path of its kubeconfig")
    commands.add_parser("status", help="print what runs; the exit code is 1 if it is not up")
    commands.add_parser("down", help="end it; nothing is left")
    image = commands.add_parser("image", help="give the node an image")
    image.add_argument("tar", type=Path, help="as `docker save` writes it, or an OCI layout")
    image.add_argument("--name", help="the tar is a root file system, to be an image of this name")
    run = commands.add_parser("run", help="run a command inside, with kubectl on its PATH")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    chosen = parser.parse_args()
    try:
        return _do(chosen, Cluster(chosen.folder))
    except ClusterFailed as exc:
        print(f"scripts/cluster: {exc}", file=sys.stderr)
        return 1


def _do(chosen: argparse.Namespace, cluster: Cluster) -> int:
    match chosen.command:
        case "build":
            programs.build_helm()
            print(*programs.build(), sep="\n")
        case "up":
            if not cluster.up():
                print("it is up", file=sys.stderr)
            print(cluster.kubeconfig)
        case "status":
            if not cluster.is_up():
                print("it is not up")
                return 1
            for name in DAEMONS:
                print(f"{name}: {'runs' if cluster.runs(name) else 'has ended'}")
            print(f"node: {'ready' if cluster.has_node() else 'not ready'}")
            print(f"kubeconfig: {cluster.kubeconfig}")
        case "down":
            print("it is down" if cluster.down() else "it was not up")
        case "image":
            if not chosen.name:
                cluster.import_image(chosen.tar)
                return 0
            with tempfile.TemporaryDirectory() as folder:
                archive = Path(folder, "image.tar")
                pack_image(chosen.name, chosen.tar, archive, {"Cmd": ["sh"]})
                cluster.import_image(archive)
        case "run":
            argv = chosen.argv[1:] if chosen.argv[:1] == ["--"] else chosen.argv
            if not argv:
                raise ClusterFailed("no command is given: scripts/cluster run -- kubectl get nodes")
            os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
            os.environ["KUBECACHEDIR"] = f"{cluster.folder}/kubectl"  # not in the user's home
            os.environ["PATH"] += f":{cluster.folder}/programs"
            script = 'cd "$0" && exec "$@"'
            argv = cluster.inside(["sh", "-c", script, os.getcwd(), *argv])
            os.execvp(argv[0], argv)
    return 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["init", _]:  # the folder is there for those who read the list of processes
            inside.init()
        case ["relay"]:
            inside.relay()
        case _:
            sys.exit(main())
