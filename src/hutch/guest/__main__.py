"""`python -m hutch.guest --fd N`: run a guest on an open socket, outside a box."""

from __future__ import annotations

import argparse
import os
import socket
import sys

from .agent import GuestConfig
from .main import serve


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="hutch.guest", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the socket to the host")
    parser.add_argument("--listener", type=int, help="a socket that passes further connections")
    parser.add_argument("--workdir", default="/workspace")
    parser.add_argument("--private", default="/tmp", help="a folder that shells may write to")
    parser.add_argument("--lib", default=GuestConfig.lib, help="where kernels find hutch_kernel")
    chosen = parser.parse_args(arguments)
    loop = os.path.join(os.path.dirname(os.path.abspath(__file__)), "loop.sh")
    config = GuestConfig(
        workdir=chosen.workdir,
        user=str(os.getuid()),
        private=chosen.private,
        loop=loop,
        lib=chosen.lib,
    )
    listener = None if chosen.listener is None else socket.socket(fileno=chosen.listener)
    serve(socket.socket(fileno=chosen.fd), config, listener=listener)


if __name__ == "__main__":
    main(sys.argv[1:])
