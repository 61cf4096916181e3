"""`hutch serve`: run a server, in the foreground or in the background."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import signal
import sys
from pathlib import Path

from hutch.errors import HutchError
from hutch.images.store import data_dir
from hutch.settings import Settings
from hutch.settings.reading import load
from hutch.settings.writing import SettingsFile

from . import FAILED
from .options import Parser, make_parser
from .place import log_file
from .program import Launcher
from .screen import complain

OPTIONS = {
    "listen": "listen",
    "backend": "backend",
    "data_dir": "data_dir",
    "drain": "drain_seconds",
    "tls_cert": "tls.cert",
    "tls_key": "tls.key",
}
MAX_LOG = 16 << 20  # bytes; a larger log is renamed when a server starts


def build_parser() -> Parser:
    parser = make_parser(
        "hutch serve",
        "hutch serve [--config FILE] [--listen HOST:PORT] [--data-dir DIR]\n"
        "                   [--tls-cert FILE --tls-key FILE] [--backend NAME]\n"
        "                   [--drain SECONDS] [--detach]",
        "Serve sessions over HTTP. Sessions outlive the server: if it is stopped or\n"
        "killed, and started again, they are still there, with all that runs in them.\n"
        "Options take precedence over variables (HUTCH_LISTEN), and variables over the\n"
        "config file: hutch.toml, hutch.yaml or sandkasten.yaml in this folder,\n"
        "hutch/hutch.toml in your config folder, or /etc/hutch/hutch.toml.",
        "exit codes: 0 after SIGTERM or Ctrl-C; 125 if it cannot be started.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a config file, in TOML or YAML (default: HUTCH_CONFIG, or one of the above)",
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="where to listen; port 0 is any free port"
    )
    parser.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="serve HTTPS with this certificate (PEM); read again when it changes",
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its private key (PEM)")
    parser.add_argument("--data-dir", metavar="DIR", help="where all data is stored")
    parser.add_argument(
        "--backend", metavar="NAME", help="what makes the boxes: namespaces, docker or kubernetes"
    )
    parser.add_argument(
        "--drain", metavar="SECONDS", help="how long to wait for running commands when it stops"
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="run it in the background, and return when it is ready; `hutch stop` ends it, "
        "`hutch logs --daemon` shows its log",
    )
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    settings, file = read(args)
    naming = _naming(args)
    return _detach(settings, file, naming) if args.detach else _serve(settings, file, naming)


def read(args: argparse.Namespace) -> tuple[Settings, SettingsFile]:
    """The settings, and where they come from. Prints notes about them."""
    options = {key: getattr(args, name) for name, key in OPTIONS.items() if getattr(args, name)}
    for key in ("data_dir", "tls.cert", "tls.key"):
        if key in options:
            options[key] = os.path.abspath(options[key])
    path = Path(args.config) if args.config else None
    loaded = load(data_dir(), options, path)
    for note in loaded.notes:
        complain(note)
    return loaded.settings, SettingsFile(loaded, data_dir(), options, path)


def _naming(args: argparse.Namespace) -> str:
    """The variable that other commands need to find this server; empty if they need none."""
    by_option = args.data_dir and f"HUTCH_DATA_DIR={shlex.quote(os.path.abspath(args.data_dir))} "
    by_file = args.config and f"HUTCH_CONFIG={shlex.quote(os.path.abspath(args.config))} "
    return by_option or by_file or ""


def _serve(settings: Settings, file: SettingsFile, naming: str) -> int:
    from hutch.server.daemon import run  # slow to import: mistakes are reported before it

    _log_to_stderr()

    def ready(url: str) -> None:
        _say(url)
        _tell_dashboard(settings, naming, url)

    return run(settings, ready, file)


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def _say(url: str) -> None:
    print(f"serving at {url}", flush=True)


def _tell_dashboard(settings: Settings, naming: str, url: str) -> None:
    from hutch.server.http.pages import is_built

    if not settings.dashboard_enabled:
        return
    if not is_built():
        complain(
            "it has no dashboard, because none was built when Hutch was installed: "
            f"{url}/ says how to get it"
        )
    else:
        complain(f"`{naming}hutch dashboard` opens its dashboard in a browser")


# --- in the background -------------------------------------------------------------------


def _detach(settings: Settings, file: SettingsFile, naming: str) -> int:
    from hutch.server.daemon import claimed, prepare

    # Before the log is opened: it may belong to a running server.
    with claimed(prepare(settings.data_dir)):
        pass
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        return _begin(settings, file, writer)
    os.close(writer)
    os.waitpid(child, 0)
    return _wait(settings, reader, naming)


def _begin(settings: Settings, file: SettingsFile, writer: int) -> int:
    """Run the server as a daemon: in a new session, without a terminal."""
    os.setsid()
    if os.fork():
        os._exit(0)
    for first, last in ((3, writer), (writer + 1, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(first, last)  # or we would hold a lock or a pipe of our caller for days
    _report(writer, pid=os.getpid())
    try:
        _to_log(log_file(settings.data_dir))
        os.chdir("/")
        from hutch.server.daemon import run

        _log_to_stderr()

        def ready(url: str) -> None:
            _report(writer, url=url)
            os.close(writer)

        return run(settings, ready, file)
    except (HutchError, OSError) as exc:
        complain(str(exc), error=True)
        _report(writer, error=str(exc))
        return FAILED


def _report(writer: int, **what: object) -> None:
    try:
        os.write(writer, json.dumps(what).encode() + b"\n")
    except OSError:
        pass  # the parent stopped waiting


def _to_log(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > MAX_LOG:
        path.replace(path.with_name("hutch.log.1"))
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    log, nothing = os.open(path, flags, 0o600), os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    os.dup2(nothing, 0)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    os.close(nothing)


def _wait(settings: Settings, reader: int, naming: str) -> int:
    status: dict[str, object] = {}
    try:
        with open(reader) as lines:
            for line in lines:
                status |= json.loads(line)
                if "url" in status or "error" in status:
                    break
    except KeyboardInterrupt:
        if isinstance(pid := status.get("pid"), int):
            os.kill(pid, signal.SIGTERM)
        raise
    if "url" not in status:
        log = log_file(settings.data_dir)
        complain(str(status.get("error", f"the server ended before it was ready: see {log}")))
        return FAILED
    _say(str(status["url"]))
    complain(
        f"its pid is {status['pid']}; `{naming}hutch stop` ends it, "
        f"`{naming}hutch logs --daemon` has its log"
    )
    _tell_dashboard(settings, naming, str(status["url"]))
    return 0
