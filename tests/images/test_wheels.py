"""What a wheel says about itself, as we read it and as an installer would."""

from __future__ import annotations

import struct
import warnings
import zipfile
from pathlib import Path

import pytest
from wheels_of_tests import make_wheel

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
