"""Hutch installed from wheels into a virtual environment of its own, to be replaced in place."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

import hutch

PACKAGE = Path(hutch.__file__).parent
METADATA = "Metadata-Version: 2.1\nName: hutch\nVersion: {version}\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

Change = tuple[str, str]  # what is in a file, and what is to replace it


class Installation:
    """A venv with Hutch in it. What Hutch needs is that of the venv that runs the tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._venv = folder / "venv"
        self._uv("venv", "-q", "--python", sys.executable, str(self._venv))
        tag = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self.packages = self._venv / "lib" / tag / "site-packages"
        (self.packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.program = [str(self._venv / "bin/python"), "-I", "-m", "hutch"]

    def install(self, version: str, changes: Mapping[str, Change] | None = None) -> None:
        """Install this version in the place of the one before.

        `changes`: in which it differs from the checkout, by file.
        """
        wheel = self._wheel(version, changes or {})
        python = str(self._venv / "bin/python")
        self._uv("pip", "install", "-q", "--python", python, "--no-deps", "--no-index",
                 "--reinstall", str(wheel))  # fmt: skip

    def _wheel(self, version: str, changes: Mapping[str, Change]) -> Path:
        edits = {"__init__.py": [(f'"{hutch.__version__}"', f'"{version}"')]}
        for name, change in changes.items():
            edits.setdefault(name, []).append(change)
        info = f"hutch-{version}.dist-info"
        files = {
            f"{info}/METADATA": METADATA.format(version=version).encode(),
            f"{info}/WHEEL": WHEEL.encode(),
        }
        for path in PACKAGE.rglob("*"):
            if path.is_file() and path.parent.name != "__pycache__":
                name = str(path.relative_to(PACKAGE))
                files[f"hutch/{name}"] = _edited(path.read_bytes(), edits.pop(name, []))
        assert not edits, f"no such file: {[*edits]}"
        record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n"
                         for name, data in files.items())  # fmt: skip
        files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
        made = self._folder / f"hutch-{version}-py3-none-any.whl"
        with zipfile.ZipFile(made, "w") as wheel:
            for name, data in files.items():
                wheel.writestr(name, data)
        return made

    def _uv(self, *words: str) -> None:
        env = {**os.environ, "UV_CACHE_DIR": str(self._folder / "cache"), "UV_OFFLINE": "1",
               "UV_LINK_MODE": "copy"}  # fmt: skip
        subprocess.run([sys.executable, "-m", "uv", *words], env=env, check=True, timeout=120)


def _edited(data: bytes, changes: list[Change]) -> bytes:
    for before, after in changes:
        assert data.count(before.encode()) == 1, f"not once: {before}"
        data = data.replace(before.encode(), after.encode())
    return data


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
