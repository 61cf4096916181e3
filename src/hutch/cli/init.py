"""`hutch init`: write a config file and create the first key."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from hutch.errors import Conflict, InvalidRequest
from hutch.images.store import data_dir
from hutch.pidfile import server_of
from hutch.server.audit import Audit
from hutch.server.keys import OPERATOR, Keys
from hutch.server.store import Store
from hutch.server.times import parse_expiry
from hutch.settings import FIELDS, SECTIONS, Settings
from hutch.settings.reading import NO_FILE, default_of, load
from hutch.settings.values import Kind

from .options import Parser, make_parser
from .program import Launcher, run_to_end

TOP = """\
# Settings of `hutch serve`. All are optional. A line that is commented out shows
# the default, or an example. `hutch config check` reports what is wrong in
# this file. Each key is also an environment variable: pool.images is
# HUTCH_POOL_IMAGES.
"""


def build_parser() -> Parser:
    parser = make_parser(
        "hutch init",
        "hutch init [--config FILE] [--data-dir DIR] [--listen HOST:PORT]\n"
        "                  [--expires WHEN] [--force]",
        "Write a config file in which every setting is explained, and make a key that may\n"
        "do everything. The key is shown only once: only a hash of it is stored.",
        "exit codes: 0, or 125 if hutch failed.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="where to write it (default: HUTCH_CONFIG, or hutch/hutch.toml in your config folder)",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where the server keeps everything")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="where it listens (default: 127.0.0.1:8080)"
    )
    parser.add_argument(
        "--expires",
        default="",
        metavar="WHEN",
        help="when the key expires: 12h, 90d, 2027-01-01 or never (default: "
        "HUTCH_KEYS_DEFAULT_TTL, or never); the server's socket needs no key",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an existing config file, and make another key",
    )
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    path = Path(os.path.abspath(args.config or os.environ.get("HUTCH_CONFIG") or own_file()))
    if path.suffix != ".toml":
        raise InvalidRequest(f"the config file must be named *.toml, not {path.name}")
    options = {}
    if args.data_dir:
        options["data_dir"] = os.path.abspath(args.data_dir)
    if args.listen:
        options["listen"] = args.listen
    if path.exists() and not args.force:
        raise Conflict(f"{path} exists already; --force replaces it")
    settings = load(data_dir(), options, file=NO_FILE).settings
    if args.expires:
        parse_expiry(args.expires, time.time())
    return run_to_end(_init(path, settings, options, args))


async def _init(
    path: Path, settings: Settings, options: dict[str, str], args: argparse.Namespace
) -> int:
    if server_of(settings.data_dir):
        raise Conflict(
            "a server is running on this data folder; use `hutch key create` to make a key"
        )
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = await Store.open(settings.database)
    try:
        keys = await Keys.open(
            store, default_ttl=settings.keys_default_ttl, max_ttl=settings.keys_max_ttl
        )
        key = await keys.make(OPERATOR, "admin", "made by hutch init", expires=args.expires)
    finally:
        await store.close()
    audit = Audit(settings.data_dir / "audit")
    audit.add(
        "request",
        owner=OPERATOR,
        operation="MakeKey",
        target=key.id,
        outcome="ok",
        peer="local",
        detail={"by": "hutch init", "scope": key.scope},
    )
    audit.close()
    _write(path, template(options))
    print(f"wrote {path}")
    print(f"made a key that may do everything; it is shown only once:\n\n  {key.key}\n")
    named = f" --config {path}" if args.config else ""
    print(f"next: hutch serve{named} --detach")
    return 0


def own_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home, "hutch", "hutch.toml")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(handle, "w") as file:
            file.write(text)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def template(given: dict[str, str]) -> str:
    """A config file with every key and its explanation; those in `given` are set."""
    lines = [TOP]
    for section in ("", *SECTIONS):
        keys = [key for key in FIELDS if key.rpartition(".")[0] == section]
        if section and keys:
            lines.append(f"\n[{section}]")
        for key in keys:
            name = key.rpartition(".")[2]
            lines.append(f"# {FIELDS[key].metadata['about']}")
            is_set = key in given
            value = json.dumps(given[key]) if is_set else sample(key)
            lines.append(f"{'' if is_set else '#'}{name} = {value}")
    return "\n".join(lines) + "\n"


def sample(key: str) -> str:
    """A value in TOML: the default, or an example."""
    setting = FIELDS[key]
    if setting.metadata["sample"]:
        return str(setting.metadata["sample"])
    kind: Kind[object] = setting.metadata["kind"]
    value = default_of(key)
    return f'"{kind.show(value)}"' if isinstance(value, str) else kind.show(value)
