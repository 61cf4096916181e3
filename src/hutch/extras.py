"""How to install an optional part of Hutch, from the same source as Hutch itself."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """The pip command that installs an extra; for a checkout, it names the folder."""
    source, editable = _source()
    if source.startswith("/"):
        target = f"{source}[{extra}]"
    elif source:
        target = f"hutch[{extra}] @ {source}"
    else:
        target = f"hutch[{extra}]"
    # Brackets are a pattern in some shells, so always quote them.
    quoted = shlex.quote(target) if "'" in target else f"'{target}'"
    return f"pip install {'-e ' if editable else ''}{quoted}"


def _source() -> tuple[str, bool]:
    """Where Hutch was installed from, and whether it is editable.

    A folder, a URL, or "" for a package index.
    """
    try:
        record = distribution("hutch").read_text("direct_url.json")  # PEP 610
    except PackageNotFoundError:
        return str(Path(__file__).parent.parent.parent), False
    if record is None:
        return "", False
    origin = json.loads(record)
    url: str = origin["url"]
    if url.startswith("file:") and "dir_info" in origin:
        return unquote(urlsplit(url).path), bool(origin["dir_info"].get("editable"))
    if vcs := origin.get("vcs_info"):
        return f"{vcs['vcs']}+{url}@{vcs['commit_id']}", False
    return url, False
