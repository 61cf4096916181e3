"""`hutch config`: show the settings of a server, and what is wrong with them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from hutch.errors import HutchError, InvalidRequest
from hutch.images import store
from hutch.settings import FIELDS, Settings
from hutch.settings.reading import Loaded, examine

from . import FAILED
from .options import Parser, make_parser
from .program import Launcher
from .screen import complain, print_table

NO_DEFAULT_IMAGE = 1  # exit code: the settings are valid, but most sessions would fail


def build_parser() -> Parser:
    parser = make_parser(
        "hutch config",
        "hutch config check [FILE] [--json]",
        "Read the settings of a server as `hutch serve` would: from FILE or the config\n"
        "file that it would find, and from variables. Show each value and where it comes\n"
        "from, or every mistake: the line, what is allowed there, and the closest valid\n"
        "key.",
        "exit codes: 0; 1 if the default image does not exist; 125 if a setting is wrong.",
    )
    parser.add_argument("action", choices=("check",), help=argparse.SUPPRESS)
    parser.add_argument("file", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    parser = build_parser()
    if not words:
        parser.print_help()
        return 0
    args = parser.parse_args(words)
    loaded, problems = examine(store.data_dir(), file=Path(args.file) if args.file else None)
    missing = _missing_images(loaded.settings) if loaded else {}
    notes = [*loaded.notes, *missing.values()] if loaded else []
    default = loaded.settings.default_image if loaded else ""
    lacks_default = default in missing
    if lacks_default:
        notes.append(f"{default} is the default image: sessions that name no image would fail")
    if args.json:
        print(json.dumps(_report(loaded, problems, notes), indent=2))
    else:
        for line in (*problems, *notes):
            complain(line)
        if loaded:
            print_table(
                ("KEY", "VALUE", "FROM"),
                [(key, show(loaded.settings, key), loaded.origins[key]) for key in FIELDS],
            )
    if loaded is None:
        return FAILED
    return NO_DEFAULT_IMAGE if lacks_default else 0


def show(settings: Settings, key: str) -> str:
    """A value as it could be written in a file. Secrets are masked."""
    setting = FIELDS[key]
    value = getattr(settings, setting.name)
    if key == "api_key":
        return "*****" if value else ""
    text: str = setting.metadata["kind"].show(value)
    return text


def _report(loaded: Loaded | None, problems: list[str], notes: list[str]) -> dict[str, object]:
    if loaded is None:
        return {"problems": problems}
    values = {
        key: {"value": show(loaded.settings, key), "from": loaded.origins[key]} for key in FIELDS
    }
    file = str(loaded.file) if loaded.file else None
    return {"file": file, "problems": [], "notes": notes, "settings": values}


def _missing_images(settings: Settings) -> dict[str, str]:
    """Images that the settings name and that do not exist, with the reason."""
    if settings.backend != "namespaces":
        return {}  # the engine pulls them
    os.environ["HUTCH_DATA_DIR"] = str(settings.data_dir)
    default = [settings.default_image] if settings.default_image else []
    named = {*default, *settings.allowed_images, *settings.pool_images} - {"host"}
    missing = {}
    for image in sorted(named):
        try:
            store.resolve(image)
        except InvalidRequest as exc:
            missing[image] = f"image {image}: {exc}"
        except HutchError as exc:
            missing[image] = str(exc)
    return missing
