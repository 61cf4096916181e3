"""Images in files: what kind they are is found out, and nothing of them is believed."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from must_work import need

from hutch.errors import HutchError, InvalidRequest, NoSpace
from hutch.images.oci import archive, plain
from hutch.images.oci.manifest import machine
from hutch.images.oci.reference import parse
from hutch.images.oci.store import StoredImage, bring
from oci_of_tests import (
    Made,
    data,
    digest_of,
    layout,
    left_in,
    make_image,
    make_index,
    saved,
    tar,
    unpacks,
    zstd,
)

__all__ = ["data", "unpacks"]  # fixtures
pytestmark = pytest.mark.usefixtures("data", "unpacks")


def take(path: Path, name: str = "mine") -> StoredImage:
    with archive.open_archive(path, parse(name)) as source:
        return bring(source, parse(name), lambda step: None)


def take_bytes(tmp_path: Path, content: bytes, name: str = "mine") -> StoredImage:
    path = tmp_path / "archive"
    path.write_bytes(content)
    return take(path, name)


def files(kept: StoredImage) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for folder in map(Path, kept.root().layers):
        found |= {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return found


@pytest.fixture
def image() -> Made:
    config = {"Env": ["A=1"], "User": "7"}
    return make_image({"a": b"1", "b": b"1"}, {"a": b"2"}, config=config)


def test_what_docker_save_wrote(image: Made, tmp_path: Path) -> None:
    found = take_bytes(tmp_path, saved({"mine:latest": image}))
    assert files(found) == {"a": b"2", "b": b"1"}
    assert found.digest == digest_of(image.config), "which is what the engine calls its id"
    root = found.root()
    assert (root.env, root.user) == ((("A", "1"),), "7")


def test_layers_that_are_equal_are_there_once_and_linked(image: Made, tmp_path: Path) -> None:
    assert files(take_bytes(tmp_path, saved({"mine": image}, link=True))) == {"a": b"2", "b": b"1"}


def test_an_oci_layout_in_a_folder(image: Made, tmp_path: Path) -> None:
    found = take(layout(tmp_path / "layout", image))
    assert files(found) == {"a": b"2", "b": b"1"} and found.digest == image.digest


def test_an_oci_layout_in_a_tar(image: Made, tmp_path: Path) -> None:
    folder = layout(tmp_path / "layout", image)
    packed = tmp_path / "layout.tar"
    with tarfile.open(packed, "w") as made:
        made.add(folder, ".")
    assert take(packed).digest == image.digest


def test_a_root_file_system(tmp_path: Path) -> None:
    content = tar({"a": b"1", "manifest.json": b'{"some": "app"}'})
    found = take_bytes(tmp_path, content)
    assert files(found)["a"] == b"1"
    assert found.layers == (digest_of(content),)
    assert take_bytes(tmp_path, content, "again").digest == found.digest


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_any_kind_of_tar(format: int, tmp_path: Path) -> None:
    long = "/".join(["x" * 60] * 3)
    assert take_bytes(tmp_path, tar({"a": b"1", long: b"2"}, format=format)).bytes > 0


def test_what_is_packed_as_a_whole(image: Made, tmp_path: Path) -> None:
    packed = gzip.compress(saved({"mine": image}))
    assert files(take_bytes(tmp_path, packed)) == {"a": b"2", "b": b"1"}
    twice = gzip.compress(saved({"mine": image})[:1000]) + gzip.compress(
        saved({"mine": image})[1000:]
    )
    assert files(take_bytes(tmp_path, twice + bytes(100))) == {"a": b"2", "b": b"1"}


@pytest.mark.parametrize("packed", [False, True])
def test_what_comes_through_a_pipe(image: Made, packed: bool, data: Path) -> None:
    content = saved({"mine": image})
    content = gzip.compress(content) if packed else content
    read, write = os.pipe()

    def pour() -> None:
        with open(write, "wb") as file:
            file.write(content)

    thread = threading.Thread(target=pour)
    thread.start()
    with open(read, "rb") as file, archive.open_stream(file, parse("mine")) as source:
        assert files(bring(source, parse("mine"), lambda step: None))["a"] == b"2"
    thread.join()
    assert len(left_in(data)) == 4


def test_of_several_images_one_has_to_be_named(image: Made, tmp_path: Path) -> None:
    both = saved({"one:1": image, "two:1": make_image({"c": b"3"})})
    assert files(take_bytes(tmp_path, both, "two:1")) == {"c": b"3"}
    with pytest.raises(InvalidRequest, match="one:1, two:1"):
        take_bytes(tmp_path, both, "three")


def test_a_layout_for_several_machines(tmp_path: Path) -> None:
    here, there = make_image({"a": b"here"}), make_image({"a": b"there"}, architecture="s390x")
    index = json.loads(make_index({"linux/s390x": there, f"linux/{machine()}": here}))
    folder = layout(tmp_path / "layout", here, manifests=index["manifests"])
    found = take(folder)
    assert files(found) == {"a": b"here"} and found.digest == here.digest


# --- what is not right -------------------------------------------------------------------


def refused(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        take_bytes(tmp_path, content)
    assert left_in(tmp_path / "data") == []


def save(files: Mapping[str, bytes], **entry: Any) -> bytes:
    return tar({**files, "manifest.json": json.dumps([entry]).encode()})


def test_archives_that_are_not_whole(image: Made, tmp_path: Path) -> None:
    content = saved({"mine": image})
    refused(tmp_path, content[:700], "ended early")
    refused(tmp_path, b"", "nothing in this tar")
    refused(tmp_path, b"hello", "not a tar")
    refused(tmp_path, os.urandom(4096), "not a tar")
    refused(tmp_path, gzip.compress(content)[:-20], "it is truncated")
    refused(tmp_path, b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 100, "not gzip")
    refused(tmp_path, zstd(content)[:-20], "it is truncated")
    refused(tmp_path, zstd(content)[:4] + b"\xff" * 100, "not zstd")
    refused(tmp_path, gzip.compress(gzip.compress(content)), "not a tar")


def test_packed_nothing_without_an_end_is_refused(image: Made, tmp_path: Path) -> None:
    content = gzip.compress(saved({"mine": image}))
    refused(tmp_path, gzip.compress(b"") * 2000 + content, "empty gzip members")
    take_bytes(tmp_path, gzip.compress(b"") * 10 + content)


def test_archives_that_zstd_packed(image: Made, tmp_path: Path) -> None:
    content = saved({"mine:latest": image})
    skipped = b"\x5a\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    parts = skipped + zstd(content[:5000]) + zstd(b"") + zstd(content[5000:]) + skipped
    for packed in (zstd(content), parts):
        found = take_bytes(tmp_path, packed)
        assert found.digest == digest_of(image.config)
        with (tmp_path / "archive").open("rb") as file:
            pipe = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
        with pipe, archive.open_stream(cast(BinaryIO, pipe.stdout), parse("mine")) as source:
            assert source.image.digest == found.digest


def test_zstd_that_wants_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(tmp_path, zstd(b"") * 2000, "not zstd, or needs more memory")
    for log, says in ((27, "not a tar"), (28, "not zstd, or needs more memory")):
        header = b"\x28\xb5\x2f\xfd\0" + bytes([(log - 10) << 3])  # with a window of that size
        refused(tmp_path, header + (5 << 3 | 3).to_bytes(3, "little") + b"a", says)
    monkeypatch.setattr(plain, "SMALL", 1 << 20)  # else it takes a quarter of a GiB to see it
    refused(tmp_path, zstd(bytes(200 << 20)), "unpacks to more than")


def test_archives_that_say_what_is_not_there(image: Made, tmp_path: Path) -> None:
    config = {"c.json": image.config}
    refused(tmp_path, save({}, Config="c.json", Layers=["a"]), "there is no 'c.json'")
    refused(tmp_path, save(config, Config="c.json", Layers=["a", "b"]), "there is no 'a'")
    refused(tmp_path, save(config, Config="c.json", Layers=["a"]), "another number of layers")
    refused(tmp_path, save(config, Config="c.json", Layers="a"), "broken")
    refused(tmp_path, save(config, Config="/etc/passwd", Layers=["a", "b"]), "there is no")
    refused(tmp_path, save(config, Config="../../etc/passwd", Layers=["a", "b"]), "there is no")
    wrong = "0" * 64 + ".json"
    refused(tmp_path, save({wrong: b"{}"}, Config=wrong, Layers=["a"]), "does not match its digest")


def test_a_link_in_an_archive_leads_nowhere_else(image: Made, tmp_path: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archived:
        for name, target in {
            "c.json": "/etc/passwd",
            "d.json": "e.json",
            "e.json": "d.json",
        }.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archived.addfile(member)
        for number, name in enumerate(["c.json", "d.json"]):
            says = json.dumps([{"Config": name, "Layers": []}]).encode()
            member = tarfile.TarInfo("manifest.json")
            member.size, member.mtime = len(says), number
            archived.addfile(member, io.BytesIO(says))
            refused(tmp_path, made.getvalue() + bytes(1024), f"there is no '{name}'")


def test_a_layer_of_an_archive_that_is_another_one_is_not_kept(image: Made, tmp_path: Path) -> None:
    other = make_image({"a": b"other"}, {"a": b"2"})
    image.layers[0] = other.layers[0]
    refused(tmp_path, saved({"mine": image}), "as it says; nothing was kept")


@pytest.mark.parametrize("which", ["layer", "config", "manifest"])
def test_a_layout_with_a_wrong_digest_is_refused(image: Made, tmp_path: Path, which: str) -> None:
    folder = layout(tmp_path / "layout", image)
    digests = {
        "layer": digest_of(image.packed[0]),
        "config": digest_of(image.config),
        "manifest": image.digest,
    }
    path = folder / "blobs/sha256" / digests[which][7:]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(InvalidRequest):
        take(folder)
    assert left_in(tmp_path / "data") == []


def test_a_layout_is_read_where_it_is_and_nothing_else(image: Made, tmp_path: Path) -> None:
    folder = layout(tmp_path / "layout", image)
    blob = folder / "blobs/sha256" / digest_of(image.packed[0])[7:]
    for spoil in (lambda: blob.symlink_to("/etc/passwd"), lambda: os.mkfifo(blob)):
        blob.unlink()
        spoil()
        with pytest.raises(InvalidRequest, match="incomplete image"):
            take(folder)
    with pytest.raises(InvalidRequest, match="not an OCI layout"):
        take(tmp_path)
    with pytest.raises(InvalidRequest, match="No such file"):
        take(tmp_path / "nothing")


def member(name: str, **options: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    for option, value in options.items():
        setattr(made, option, value)
    return made


SLIPS = [
    member("../x"), member("/etc/hutch-test-x"), member("a/../../x"),
    member("l", type=tarfile.SYMTYPE, linkname="/etc"), member("l/hutch-test-x"),
    member("h", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    member("h2", type=tarfile.LNKTYPE, linkname="../../../../etc/passwd"),
    member("d", type=tarfile.CHRTYPE, devmajor=1, devminor=3), member("s", mode=0o6755),
    member(".wh..."), member(".wh..wh..opq"), member("x/.wh.."), member(".wh..wh..x"),
]  # fmt: skip


def test_a_hostile_layer_stays_where_it_belongs(tmp_path: Path) -> None:
    for slip in [*([each] for each in SLIPS), SLIPS[3:5], SLIPS]:
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archived:
            archived.addfile(member("first"))
            for each in slip:
                archived.addfile(each)
        try:
            found = take_bytes(tmp_path, made.getvalue())
        except InvalidRequest:
            continue
        for folder in found.root().layers:
            for path in Path(folder).rglob("*"):
                about = path.lstat()
                assert not about.st_mode & 0o6000
                assert about.st_nlink == 1 or path.is_dir()
    assert not Path("/etc/hutch-test-x").exists() and not list(tmp_path.rglob("hutch-test-x.*"))
    assert {path.name for path in tmp_path.iterdir()} <= {"archive", "data", "docker"}


def bomb(size: int) -> bytes:
    """A layer that is small, and one large file of zeros."""
    packed = io.BytesIO()
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(member("zeros", size=size).tobuf())
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return packed.getvalue()


def test_what_is_made_to_be_large_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "SMALL", 1 << 20)
    content = bomb(64 << 20)
    assert len(content) < 400_000
    refused(tmp_path, content, "unpacks to more than")
    inner = {"c.json": make_image({"a": b""}).config, "layer": content}
    refused(tmp_path, save(inner, Config="c.json", Layers=["layer"]), "unpacks to more than")


def test_a_disk_that_is_nearly_full_is_left_alone(
    image: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "RESERVE", 1 << 60)
    with pytest.raises(NoSpace, match="HUTCH_DATA_DIR"):
        take_bytes(tmp_path, saved({"mine": image}))
    with pytest.raises(NoSpace):
        take_bytes(tmp_path, gzip.compress(saved({"mine": image})))
    assert left_in(tmp_path / "data") == []


FULL = """
import os, subprocess, sys
from hutch.errors import NoSpace
from hutch.images.oci import archive, store
from hutch.images.oci.reference import parse
folder, options, path = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "hutch-test", folder], check=True)
os.environ["HUTCH_DATA_DIR"] = folder + "/data"
try:
    with archive.open_archive(archive.Path(path), parse("mine")) as source:
        store.bring(source, parse("mine"), lambda step: None)
except NoSpace as exc:
    print(exc)
print([name for _, _, names in os.walk(folder + "/data") for name in names])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize(
    "options", ["size=16m", "size=320m", "size=1g,nr_inodes=99"], ids=["full", "bytes", "files"]
)
def test_a_full_disk_is_named_and_nothing_of_the_image_stays_on_it(
    tmp_path: Path, options: str
) -> None:
    disk, path = tmp_path / "disk", tmp_path / "root.tar"
    disk.mkdir()
    path.write_bytes(tar({"large": bytes(100 << 20)} | {f"f{n}": b"" for n in range(200)}))
    argv = ["unshare", "--mount", sys.executable, "-c", FULL, str(disk), options, str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    if "mount: " in done.stderr:
        need("namespaces", done.stderr)
    assert not done.returncode, done.stderr
    said, left = done.stdout.splitlines()
    assert said.startswith(f"no room for this image on the disk of {disk}/data (256 MiB and ")
    assert left == "[]"


def test_an_archive_with_many_members_needs_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "many.tar"
    with path.open("wb") as file:
        block = member("d/f").tobuf()
        for _ in range(40):
            file.write(block * 1000)
        file.write(bytes(1024))
    with path.open("rb") as file:
        assert len(archive.known_entries(file)) == 1
    with path.open("wb") as file:
        file.write(member("x", size=1 << 20, type=b"L").tobuf() + b"n" * (1 << 20))
        file.write(member("x").tobuf() + bytes(1024))
    with path.open("rb") as file:
        assert archive.known_entries(file) == {}
    with pytest.raises(InvalidRequest, match="headers of 2097152 bytes"):
        take_bytes(tmp_path, member("x", size=2 << 20, type=b"L").tobuf() + bytes(2 << 20))


@given(st.binary(max_size=2000), st.integers(0, 1500))
def test_any_bytes_are_an_archive_or_are_refused(noise: bytes, place: int) -> None:
    whole = saved({"mine": make_image({"a": b"1"})})
    content = whole[:place] + noise + whole[place + len(noise) :]
    with open(os.memfd_create("archive"), "wb+") as file:
        file.write(content)
        file.flush()
        try:
            with archive.open_stream(file, parse("mine")):
                pass
        except HutchError:
            pass


def test_what_the_machines_own_tar_writes(tmp_path: Path) -> None:
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/etc/name").write_text("x")
    for options in (["-cf"], ["-czf"]):
        path = str(tmp_path / "root.tar")
        subprocess.run(["tar", *options, path, "-C", str(tmp_path / "root"), "."], check=True)
        found = take(Path(path))
        assert Path(found.root().layers[0], "etc/name").read_text() == "x"
