"""Where the server of this machine keeps everything, images among that."""

from __future__ import annotations

import os
from pathlib import Path

from hutch.pidfile import server_of


def data_folder() -> Path:
    """What the environment or the config file of the server says."""
    if os.environ.get("HUTCH_DATA_DIR"):
        return Path(os.environ["HUTCH_DATA_DIR"]).absolute()
    from hutch.images.store import data_dir  # this and the next take as long as to ask the server
    from hutch.settings.reading import find_file, load

    file = find_file(os.environ)
    return load(data_dir(), file=file).settings.data_dir if file else data_dir()


def use_its_images() -> Path:
    """Images of this machine are those of its server. Raises InvalidRequest."""
    data = data_folder()
    os.environ["HUTCH_DATA_DIR"] = str(data)
    return data


def is_elsewhere(url: str | None, data: Path) -> bool:
    """Whether a server is named, and it is not the one of this folder."""
    here = server_of(data)
    return bool(url) and (here is None or url not in (here.url, f"unix:{here.socket}"))
