"""The data folder of this machine's server, which holds its images."""

from __future__ import annotations

import os
from pathlib import Path

from hutch.pidfile import server_of


def data_folder() -> Path:
    """The folder named by the environment or by the server's config file."""
    if os.environ.get("HUTCH_DATA_DIR"):
        return Path(os.environ["HUTCH_DATA_DIR"]).absolute()
    from hutch.images.store import data_dir  # these two take as long to import as a request
    from hutch.settings.reading import find_file, load

    file = find_file(os.environ)
    return load(data_dir(), file=file).settings.data_dir if file else data_dir()


def log_file(data: Path) -> Path:
    """The log of a server that runs in the background on this data folder."""
    return data / "run" / "hutch.log"


def use_its_images() -> Path:
    """Use the images of this machine's server. Returns its data folder. Raises InvalidRequest."""
    data = data_folder()
    os.environ["HUTCH_DATA_DIR"] = str(data)
    return data


def is_elsewhere(url: str | None, data: Path) -> bool:
    """Whether `url` names a server other than the one of this data folder."""
    here = server_of(data)
    return bool(url) and (here is None or url not in (here.url, f"unix:{here.socket}"))
