"""A folder of a box as a tar, and back: how projects get in, and what is kept of them."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest

from hutch import Sandbox
from hutch import operations as op
from hutch.errors import InvalidRequest, NotFound


def perform(box: Sandbox, operation: op.Operation[Any]) -> Any:
    if isinstance(operation, op.StreamOperation):
        return b"".join(box._transport.stream(operation))
    return box._transport.perform(operation)


def test_a_folder_goes_from_one_place_to_another(box: Sandbox) -> None:
    box.shell.run(
        "mkdir -p /tmp/from/deep /tmp/to; echo 1 > /tmp/from/deep/one; ln -s x /tmp/from/l"
    )
    data = perform(box, op.PackFolder(box.id, "/tmp/from"))
    assert perform(box, op.UnpackFolder(box.id, data, "/tmp/to")) == 2
    assert box.shell.run("cat /tmp/to/deep/one; readlink /tmp/to/l").stdout == "1\nx\n"


def test_without_a_path_it_is_the_working_directory(box: Sandbox) -> None:
    box.files.write("a.txt", "a")
    with tarfile.open(fileobj=io.BytesIO(perform(box, op.PackFolder(box.id)))) as archive:
        assert archive.getnames() == ["a.txt"]


def test_a_folder_must_be_there(box: Sandbox) -> None:
    with pytest.raises(NotFound):
        perform(box, op.PackFolder(box.id, "/no/such"))
    with pytest.raises(NotFound):
        perform(box, op.UnpackFolder(box.id, b"", "/no/such"))


def test_what_is_no_tar_is_refused(box: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="not a tar"):
        perform(box, op.UnpackFolder(box.id, b"x" * 1024, "/tmp"))


def test_a_name_that_leads_out_is_left_out(box: Sandbox) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("../evil", "fine"):
            archive.addfile(tarfile.TarInfo(name))
    box.files.make_dir("/tmp/in")
    assert perform(box, op.UnpackFolder(box.id, buffer.getvalue(), "/tmp/in")) == 1
    assert box.files.exists("/tmp/in/fine") and not box.files.exists("/tmp/evil")
