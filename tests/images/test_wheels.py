"""What a wheel says about itself, as we read it and as an installer would."""

from __future__ import annotations

import struct
import warnings
import zipfile
from pathlib import Path

import pytest
from wheels_of_tests import make_wheel

from hutch.images import metadata
from hutch.images.metadata import read_metadata

INFO = "one-1.0.dist-info"


def add(wheel: Path, name: str, extra: bytes = b"") -> Path:
    info = zipfile.ZipInfo(name)
    info.extra = extra
    with warnings.catch_warnings(), zipfile.ZipFile(wheel, "a") as archive:
        warnings.simplefilter("ignore")  # about a name that is there already
        archive.writestr(info, "Name: other\n")
    return wheel


def test_the_metadata_of_a_wheel_is_read(tmp_path: Path) -> None:
    assert b"Name: one" in read_metadata(str(make_wheel(tmp_path, "one")))


@pytest.mark.parametrize(
    ("name", "extra", "says"),
    [
        (f"{INFO}/METADATA", b"", "two files of one name"),
        ("other-1.0.dist-info/METADATA", b"", "one .dist-info folder"),
        (f"{INFO.upper()}/metadata", b"", "one .dist-info folder"),
        (f"x/{INFO}/METADATA", b"", "one .dist-info folder"),
        (f"./{INFO}/METADATA", b"", "strange name"),
        (f"{INFO}//METADATA", b"", "strange name"),
        (f"{INFO}\\METADATA", b"", "strange name"),
        ("../x", b"", "strange name"),
        ("/x", b"", "strange name"),
        ("harmless", struct.pack("<HHBI", 0x7075, 6, 1, 0) + b"x", "two names"),
    ],
)
def test_a_wheel_that_two_readers_would_read_differently_is_refused(
    tmp_path: Path, name: str, extra: bytes, says: str
) -> None:
    wheel = add(make_wheel(tmp_path, "one"), name, extra)
    with pytest.raises(ValueError, match=says):
        read_metadata(str(wheel))


def rewrite_directory(wheel: Path, name: str, field: int, value: int) -> None:
    """Change a number of 32 bits in what the directory at the end of a wheel says of a file."""
    data = bytearray(wheel.read_bytes())
    at = data.rindex(name.encode()) - 46  # where its entry begins: bytes before the name
    assert data[at : at + 4] == b"PK\1\2"
    struct.pack_into("<I", data, at + field, value)
    wheel.write_bytes(data)


@pytest.mark.parametrize("shown", ["sizes", "overlap", "count"])
def test_a_wheel_that_says_that_it_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    wheel = make_wheel(tmp_path, "one", files={f"data-{n}": "x" for n in range(10)})
    if shown == "sizes":
        for n in range(10):
            rewrite_directory(wheel, f"data-{n}", 24, 0xFFFFFFF0)
        says = "more than 16 GiB"
    elif shown == "overlap":
        rewrite_directory(wheel, "data-0", 20, wheel.stat().st_size)
        says = "overlap"
    else:
        monkeypatch.setattr(metadata, "MOST_FILES", 10)
        says = "more than 10 files"
    with pytest.raises(ValueError, match=says):
        read_metadata(str(wheel))
