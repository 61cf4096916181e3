"""How to install an optional part of Hutch, as it was installed here."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """The command that adds an extra; from a checkout, it names the checkout."""
    source, editable = _source()
    if source.startswith("/"):
        target = f"{source}[{extra}]"
    elif source:
        target = f"hutch[{extra}] @ {source}"
    else:
        target = f"hutch[{extra}]"
    # Brackets are a pattern in some shells, so they are quoted always.
    quoted = shlex.quote(target) if "'" in target else f"'{target}'"
    return f"pip install {'-e ' if editable else ''}{quoted}"


def _source() -> tuple[str, bool]:
    """Where this Hutch came from: a folder, a URL, or "" for a package index; and if editable."""
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
