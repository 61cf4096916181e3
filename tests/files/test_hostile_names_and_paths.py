"""A box in which every name and every path is meant badly (SECURITY.md, probes H01 to H06)."""

from __future__ import annotations

import time

import pytest

from hutch import HutchError, InvalidRequest, NotFound, Sandbox

pytest_plugins = ["folders_of_tests"]
pytestmark = pytest.mark.usefixtures("shared_box")  # which skips where there can be none

NAMES = [
    "a\nb", "tab\there", "\x1b[31mred", "\udcff\udcfe", "x" * 255, "-rf",
    "--checkpoint-action=exec=sh", " ", "  leading", "CON", "\u202etxt.exe",
    "<img src=x onerror=alert(1)>", "'; rm -rf *; '", "$(id)",
    "%2e%2e%2f", "..\\..\\x", "...", ".hutch", "*", "?", "[a]", "\\", '"', "é", "e\u0301",
    "\U0001f600", "\x7f", "\x01", "#", "~", "a:b", "\\u0000",
]  # fmt: skip
MARK = "host-secret-5d1f"


def sh(box: Sandbox, command: str) -> str:
    return box.commands.run(command, check=True).stdout


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_survives_every_use(shared_box, folder, tmp_path, name):
    path, files = f"{folder}/{name}", shared_box.files
    files.write(path, "content")
    assert files.read(path) == "content"
    assert [entry.name for entry in files.list(folder)] == [name]
    assert files.stat(path).name == name and files.exists(path)
    assert files.glob("*", folder) == [path]
    assert [match.path for match in files.search("content", folder)] == [path]
    assert files.edit(path, "content", "new") == 1
    assert files.download(folder, tmp_path / "out") == 1
    assert [f.name for f in (tmp_path / "out").iterdir()] == [name]
    assert files.upload(tmp_path / "out", f"{folder}/again") == 1
    assert files.read(f"{folder}/again/{name}") == "new"
    files.move(path, f"{folder}/again/{name[:250]}2")
    files.remove(f"{folder}/again", recursive=True)
    assert files.list(folder) == []


@pytest.mark.parametrize("name", NAMES[:8], ids=ascii)
def test_a_name_from_inside_the_box_can_be_used_outside(shared_box, folder, name):
    code = f"import os; open(os.fsencode({folder + '/' + name!a}), 'w').write('x')"
    shared_box.commands.run(["python3", "-c", code], check=True)
    (entry,) = shared_box.files.list(folder)
    assert entry.name == name and shared_box.files.read(entry.path) == "x"


@pytest.mark.parametrize(
    "path, message",
    [("", "empty"), ("a\0b", "NUL"), ("\0", "NUL"), ("a\ud800", "surrogate"),
     ("x" * 5000, "4096"), ("x" * 256, "too long"), (5, "must be text"), (None, "must be text"),
     (b"bytes", "must be text")],
    ids=ascii,
)  # fmt: skip
def test_what_is_no_path_is_refused_by_every_method(shared_box, tmp_path, path, message):
    files = shared_box.files
    (tmp_path / "f").write_text("x")
    for method in (
        lambda: files.read(path), lambda: files.read(path, "stream"),
        lambda: files.write(path, "x"), lambda: files.write_files({path: "x"}),
        lambda: files.edit(path, "a", "b"), lambda: files.list(path), lambda: files.stat(path),
        lambda: files.exists(path), lambda: files.make_dir(path),
        lambda: files.move(path, "x"), lambda: files.remove(path),
        lambda: files.search("x", path), lambda: files.glob("*", path),
        lambda: files.watch(path), lambda: files.download(path, tmp_path / "d"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=message):
            method()
    for source in (tmp_path, tmp_path / "f"):
        with pytest.raises(InvalidRequest, match=message):
            files.upload(source, path)


@pytest.fixture(scope="module")
def host_file(tmp_path_factory):
    """A file of the host's that no box was ever shown."""
    path = tmp_path_factory.mktemp("host") / "secret"
    path.write_text(MARK)
    return path


def test_h01_no_way_of_writing_a_path_leads_out(shared_box, folder, host_file):
    ups = "../" * 12
    for path in (f"{ups}etc/shadow", f"a/{ups}x", f"%2e%2e/{ups}", f"file://{host_file}",
                 "..\\..\\x", str(host_file), f"{ups}{host_file}", f"/proc/self/root{host_file}",
                 f"/proc/1/root{host_file}", f"/proc/1/cwd/{ups}{host_file}", ".", "/", "..",
                 f"/proc/self/fd/0/{ups}{host_file}"):  # fmt: skip
        with pytest.raises(HutchError):
            assert MARK not in shared_box.files.read(path)
            raise NotFound("it was a file of the box's own")
    assert "user:" in shared_box.files.read(f"{ups}etc/passwd")
    assert sh(shared_box, "cat /etc/passwd") == shared_box.files.read("/etc/passwd")


def test_h02_links_lead_to_the_box_and_not_to_the_host(shared_box, folder, host_file):
    sh(
        shared_box,
        f"cd {folder} && ln -s {host_file} abs && ln -s ../../../../../../..{host_file} rel && "
        f"ln -s /proc/self/root{host_file} magic && ln -s / root && ln -s loop loop && "
        f"ln -s /proc/1/root{host_file} first && ln -s /etc/shadow shadow",
    )
    for name in ("abs", "rel", "magic", "loop", "first", "shadow", f"root{host_file}"):
        with pytest.raises(HutchError):
            shared_box.files.read(f"{folder}/{name}")
    own = shared_box.files.read(f"{folder}/root/etc/hostname")
    assert own == sh(shared_box, "cat /etc/hostname")


@pytest.mark.parametrize(
    "make",
    ["mkfifo f", "mkdir f", "ln -s /dev/zero f", "ln -s /dev/tty f", "ln -s /dev/random f",
     "python3 -c \"import socket as s;s.socket(s.AF_UNIX).bind('f')\"", "ln -s /proc/self/fd/0 f",
     "ln -s /dev/stdin f", "ln -s /proc/kmsg f"],
)  # fmt: skip
def test_h03_what_is_no_regular_file_is_refused(shared_box, folder, tmp_path, make):
    sh(shared_box, f"cd {folder} && {make}")
    for format in ("text", "bytes", "stream"):
        with pytest.raises(HutchError):
            shared_box.files.read(f"{folder}/f", format)
    with pytest.raises(HutchError):
        shared_box.files.edit(f"{folder}/f", "a", "b")
    shared_box.files.search("x", folder)
    shared_box.files.download(folder, tmp_path / "out")
    assert list((tmp_path / "out").rglob("*")) == [tmp_path / "out" / "f"][: make == "mkdir f"]


def test_h06_a_folder_that_keeps_turning_into_a_link_leaks_nothing(shared_box, folder):
    code = f"""
import ctypes, os
os.chdir({folder!r})
os.mkdir('race'); open('race/shadow', 'w').write('mine'); os.symlink('/etc', 'link')
libc = ctypes.CDLL(None)
print('flipping', flush=True)
while True:
    libc.renameat2(-100, b'race', -100, b'link', 2)
"""
    flipper = shared_box.commands.run(["python3", "-c", code], background=True)
    try:
        deadline = time.monotonic() + 120
        while "flipping" not in flipper.stdout() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = set()
        for _ in range(500):
            try:
                seen.add(shared_box.files.read(f"{folder}/race/shadow"))
            except HutchError:
                seen.add("refused")
        assert seen <= {"mine", "refused"}
    finally:
        flipper.kill()
