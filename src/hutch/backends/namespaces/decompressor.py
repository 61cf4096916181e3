"""Decompresses zstd in a process that could do no harm if the data took it over.

It is alone in its own namespaces, with an empty root, without capabilities or network, and under
the seccomp filter of a box. It reads stdin and writes stdout. The output is not trusted either: the
caller counts and hashes it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from importlib import import_module
from types import ModuleType

from hutch.backends import linux

from .launch import confine_parser
from .plan import STORE_BASE
from .rights import map_ids, take_mount_rights

PIECE = 256 * 1024
# Small, as the rest of a block is copied after each frame, and frames can be tiny.
READ = 16 * 1024
WINDOW_LOG = 27  # 128 MiB, the most that `zstd` itself accepts without being told to
MAX_MEMORY = 512 << 20
MAX_SECONDS = 3600  # of the processor
MAX_EMPTY = 1000  # frames without content, which cost time and give the caller nothing to count
BROKEN, CUT = 3, 4  # exit codes: not zstd, or too large a window; truncated
_STAGE = "/tmp"  # exists everywhere; only our own namespace sees what is mounted there


def main(library: str) -> None:
    """Decompress stdin to stdout in a child, wait for it, and end with its exit code.

    `library`: the folder of `backports`, if the standard library has no zstd.
    """
    if library:
        sys.path.append(library)
    zstd = import_module("backports.zstd" if library else "compression.zstd")
    ranged = take_mount_rights().ranged
    sync, theirs = socket.socketpair()
    pid = linux.clone(linux.ALL_NAMESPACES)
    if not pid:
        sync.close()
        _work(theirs, zstd, ranged)
    theirs.close()
    os.close(0)
    os.close(1)
    text = f"0 {STORE_BASE} 1" if ranged else "0 0 1"
    map_ids(pid, text, text, ranged)
    sync.send(b"m")
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) % 256)


def _work(sync: socket.socket, zstd: ModuleType, ranged: bool) -> None:
    """Run in the child. Never returns."""
    code = 1
    try:
        if sync.recv(1) != b"m":  # our user ids are mapped now
            os._exit(1)
        _confine(ranged)
        # Not before: a change of user ids clears this.
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        code = decompress(0, 1, zstd)
    except (zstd.ZstdError, MemoryError):
        code = BROKEN
    except BrokenPipeError:
        code = 0  # the caller has stopped reading
    except BaseException as exc:
        os.write(2, f"{exc!r}\n".encode()[:1000])
    os._exit(code)


def _confine(ranged: bool) -> None:
    if ranged:
        linux.take_root_ids()
    quiet = linux.NOSUID | linux.NODEV | linux.NOEXEC
    linux.mount("", "/", None, linux.REC | linux.PRIVATE)
    linux.mount("stage", _STAGE, "tmpfs", quiet | linux.RDONLY, "size=4k,nr_inodes=2,mode=755")
    linux.pivot(_STAGE)
    os.closerange(3, 1 << 20)
    confine_parser({"FSIZE": 0, "CPU": MAX_SECONDS, "AS": MAX_MEMORY}, (), [])


def decompress(packed: int, plain: int, zstd: ModuleType) -> int:
    """Decompress all frames. Returns an exit code. Raises ZstdError and MemoryError."""
    options = {zstd.DecompressionParameter.window_log_max: WINDOW_LOG}
    frame, is_empty, empty = zstd.ZstdDecompressor(options=options), True, 0
    data = os.read(packed, READ)
    while True:
        piece = frame.decompress(data, PIECE)
        is_empty = is_empty and not piece
        _write(plain, piece)
        if frame.eof:
            data = frame.unused_data or os.read(packed, READ)
            if not data:
                return 0
            empty += is_empty
            if empty > MAX_EMPTY:
                return BROKEN
            frame, is_empty = zstd.ZstdDecompressor(options=options), True
            continue
        data = b""
        if frame.needs_input:
            data = os.read(packed, READ)
            if not data:
                return CUT


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
