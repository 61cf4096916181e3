"""Images made of packages: what they are called, how they are built, who may remove them."""

from __future__ import annotations

import csv
import functools
import os
import select
import signal
import ssl
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from must_work import need
from wheels_of_tests import Index, children, digest, make_source, make_wheel

from hutch.errors import BackendUnavailable, Conflict, HutchError, InvalidRequest, NotFound
from hutch.images import install, store
from hutch.images.environment import BUILT_IN, BuiltImage, Image
from hutch.images.install import Progress
from tls_of_tests import make_certificate

PATIENCE = 60
INSIDE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


@pytest.fixture(scope="module", autouse=True)
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packages come from the network, without which these tests have nothing to test."""
    with pytest.MonkeyPatch.context() as patch:
        # A cache of our own: uv takes it that a package of the same version is the same.
        patch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HUTCH_DATA_DIR", str(tmp_path_factory.mktemp("first")))
        try:
            store.build("python")
        except BackendUnavailable as exc:
            need("packages", str(exc))
        yield


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store."""
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def wheels(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where packages are looked for, beside the usual place."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuiltImage]:
    """One environment of a package from the network, and of one from this machine."""
    folder = tmp_path_factory.mktemp("shared")
    script = {"hutchtest_tool-1.0.data/scripts/greet": "#!python\nprint('hello')\n"}
    odd = {"hutchtest_bad.py": "print 1\n", "hutchtest_folder.py/readme": ""}
    wheel = make_wheel(folder, "hutchtest-tool", files=script | odd)
    mask = os.umask(0o077)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HUTCH_DATA_DIR", str(folder / "data"))
            yield store.build(Image.python(["iniconfig", str(wheel)], ["iniconfig"]))
    finally:
        os.umask(mask)


def left(data: Path) -> list[str]:
    folder = data / "images/env"
    return sorted(os.listdir(folder)) if folder.exists() else []


def wait_until_removed(data: Path) -> None:
    """A process of its own removes what was stopped."""
    end = time.monotonic() + PATIENCE
    while left(data):
        assert time.monotonic() < end, left(data)
        time.sleep(0.02)


# --- what an image is ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [(["a", "b"], ["b", "a"]), (["a"], ["a", " a "]), (["Py_Arrow >= 2, <3"], ["py-arrow<3,>=2"]),
     (["httpx[Http2,cli]"], ["HTTPX[cli, http2]"]), (["a (>=1)"], ["a>=1"]),
     (["a;python_version>'3'"], ["a ; python_version>'3'"])],
)  # fmt: skip
def test_the_same_list_is_the_same_folder(one: list[str], other: list[str]) -> None:
    assert Image.python(one) == Image.python(other)
    assert Image.python(one).key == Image.python(other).key


def test_another_list_is_another_folder() -> None:
    lists: list[list[str]] = [[], ["a"], ["b"], ["a", "b"], ["a>=1"], ["a[b]"], ["a-b"]]
    assert len({Image.python(names).key for names in lists}) == len(lists)


def test_what_is_preloaded_and_its_name_do_not_change_the_folder() -> None:
    assert Image.python(["a"], ["a", "a.b"], "x").key == Image.python(["a"]).key
    assert Image.python(["a"], ["b", "a", "b"]).preload == ("b", "a")


def test_of_a_wheel_the_content_counts_and_not_its_place(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        text = "same" if name != "three" else "other"
        make_wheel(tmp_path / name, "mine", files={"a.py": f"A = {text!r}\n"})
    one, two, three = (
        Image.python([str(tmp_path / name / "mine-1.0-py3-none-any.whl")])
        for name in ("one", "two", "three")
    )
    assert one.key == two.key != three.key
    assert one.described() == ["mine-1.0-py3-none-any.whl"]


@pytest.mark.parametrize(
    ("package", "says"),
    [("-r list.txt", "not options"), ("--index-url=https://x", "not options"), ("", "called ''"),
     ("a b", "called"), ("a>>1", "called"), ("a>=1<2", "called"), (".", "called"),
     ("../project", "not a wheel"), ("./mine.tar.gz", "not a wheel"), ("/etc", "not a wheel"),
     ("git+https://example.com/x", "not a wheel"), ("https://example.com/x.zip", "not a wheel"),
     ("x @ git+https://example.com/x", "never built from source"),
     ("x @ https://example.com/x.tar.gz", "never built from source"),
     ("x @ https://me:secret@example.com/x-1-py3-none-any.whl", "must not contain a password"),
     ("x @ file:///etc/passwd", "not the name of a wheel"), ("./x.whl", "not the name of a wheel"),
     ("./x-1.0-py3-none-any.whl", "cannot be read"), ("a\nb", "single line"), ("ä", "called")],
)  # fmt: skip
def test_what_is_not_a_package_is_refused(package: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        Image.python([package])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("module", ["", "a-b", "os; print()", ".a", "a..b", "1a"])
def test_what_is_not_a_module_cannot_be_preloaded(module: str) -> None:
    with pytest.raises(InvalidRequest, match="preload"):
        Image.python([], [module])


def test_a_word_where_a_list_belongs_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="lists"):
        Image.python("pandas")


def test_what_is_built_in_is_written_as_we_would_write_it() -> None:
    for name, image in BUILT_IN.items():
        assert Image.python(image.packages, image.preload, name) == image


# --- what is built -------------------------------------------------------------------------


def test_an_environment_is_laid_out_like_a_virtual_environment(shared: BuiltImage) -> None:
    assert (shared.site_packages / "iniconfig/__init__.py").is_file()
    assert (shared.site_packages / "pip").is_dir()
    assert shared.site_packages == shared.folder / INSIDE
    assert os.readlink(shared.folder / "bin/python3") == shared.python
    settings = (shared.folder / "pyvenv.cfg").read_text().splitlines()
    assert f"home = {os.path.dirname(shared.python)}" in settings
    assert "include-system-site-packages = false" in settings
    assert shared.preload == ("iniconfig",)


def test_everybody_may_read_an_environment_whatever_our_umask_is(shared: BuiltImage) -> None:
    for path in [shared.folder, *shared.folder.rglob("*")]:
        if not path.is_symlink():
            assert path.stat().st_mode & 0o777 == (
                0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644
            )


def test_nothing_in_an_environment_tells_where_it_was_built(shared: BuiltImage) -> None:
    places = [os.fsencode(shared.folder.parents[3]), os.fsencode(sys.base_prefix)]
    if sys.base_prefix == "/usr":
        del places[1]
    for path in shared.folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            assert not any(place in content for place in places), path


def test_the_lists_of_files_are_true(shared: BuiltImage) -> None:
    for record in shared.site_packages.glob("*.dist-info/RECORD"):
        with record.open(newline="") as file:
            for name, hashed, _ in csv.reader(file):
                content = (shared.site_packages / name).read_bytes()
                assert not hashed or hashed == digest(content), name


def test_a_module_for_another_python_is_left_as_it_is(shared: BuiltImage) -> None:
    assert (shared.site_packages / "hutchtest_bad.py").is_file()
    assert not list(shared.site_packages.glob("__pycache__/hutchtest_bad.*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_an_environment_works_where_a_box_sees_it(shared: BuiltImage) -> None:
    code = (
        "import sys, iniconfig, hutchtest_tool\n"
        "print(sys.prefix, iniconfig.IniConfig.parse.__code__.co_filename)"
    )
    steps = f"""
        mount -t tmpfs none /opt && mkdir /opt/env /opt/python
        mount --bind {shared.folder} /opt/env && mount --bind {shared.prefix} /opt/python
        export LD_LIBRARY_PATH=/opt/python/lib
        cd / && /opt/env/bin/python3 -I -c "$1" && /opt/env/bin/greet && /opt/env/bin/pip list
    """
    argv = ["unshare", "--mount", "sh", "-ec", steps, "sh", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    place, greeting, *listed = done.stdout.splitlines()
    assert place == f"/opt/env /opt/env/{INSIDE}/iniconfig/__init__.py" and greeting == "hello"
    assert {"iniconfig", "hutchtest-tool", "pip"} <= {line.split()[0] for line in listed}


def test_a_wheel_cannot_put_settings_of_its_own_in_place_of_ours(wheels: Path) -> None:
    top = "hutchtest_sly-1.0.data/data"
    files = {f"{top}/pyvenv.cfg": "home = /tmp\n", f"{top}/hutch.json": "{"}
    make_wheel(wheels, "hutchtest-sly", files=files)
    ready = store.build(Image.python(["hutchtest-sly"]))
    assert "home = /tmp" not in (ready.folder / "pyvenv.cfg").read_text()
    assert all(entry.bytes for entry in store.entries() if entry.built)


@pytest.mark.parametrize("name", ["lib", "lib64"])
@pytest.mark.parametrize("usual", ["lib", "lib64"])
def test_a_link_that_an_installer_left_in_place_of_the_libraries_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, usual: str
) -> None:
    monkeypatch.setattr(sys, "platlibdir", usual)
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    record = outside / INSIDE.removeprefix("lib/") / "x-1.dist-info/RECORD"
    record.parent.mkdir(parents=True)
    record.write_bytes(b"x,,\r\n")
    folder.mkdir()
    (folder / name).symlink_to(outside)
    install._take_out_what_tells_of_this_machine(folder)
    assert record.read_bytes() == b"x,,\r\n" and not os.listdir(folder)


def test_an_environment_without_libraries_is_an_invalid_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "pip_install", lambda *arguments, **options: None)
    with pytest.raises(InvalidRequest, match="no folder lib/"):
        install.install(Image.python([]), tmp_path, -1, lambda progress: None)


def test_the_second_name_of_the_libraries_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platlibdir", "lib64")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib64").symlink_to("lib")
    install._take_out_what_tells_of_this_machine(tmp_path)
    assert os.readlink(tmp_path / "lib64") == "lib"


RECORD = "hutchtest_odd-1.0.data/purelib/x-1.dist-info/RECORD"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (RECORD, b"caf\xe9,,\n"),
        (RECORD, b'"' + b"x" * 200_000 + b'",,\n'),
        (RECORD, b"x\0.dist-info/direct_url.json,,\n"),
        ("hutchtest_odd-1.0.data/data/.lock/x", b""),
        ("hutchtest_odd-1.0.data/data/bin/python3/x", b""),
        ("hutchtest_odd-1.0.data/data/pyvenv.cfg/x", b""),
        ("hutchtest_odd-1.0.data/data/hutch.json/x", b""),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_malformed_wheel_is_an_invalid_request(
    wheels: Path, data: Path, path: str, content: bytes
) -> None:
    wheel = make_wheel(wheels, "hutchtest-odd")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(path, content)
    with pytest.raises(InvalidRequest):
        store.build(Image.python([str(wheel)]))
    assert not [each for each in (data / "images/env").iterdir() if each.is_dir()]


def test_a_built_image_is_resolved_without_uv_and_without_a_process(shared: BuiltImage) -> None:
    code = (
        "import sys\n"
        "sys.addaudithook(lambda event, _: event in STARTS and sys.exit(event))\n"
        "STARTS = ('subprocess.Popen', 'os.fork', 'os.posix_spawn', 'os.exec')\n"
        "from hutch.images import store\n"
        "from hutch.images.environment import Image\n"
        "for resolve in (store.resolve, store.build):\n"
        "    print(resolve('shared').folder)\n"
        "assert 'uv' not in sys.modules\n"
    )
    wheel = next(shared.folder.parents[3].glob("*.whl"))
    store.build(Image.python(["iniconfig", str(wheel)], name="shared"))
    wheel.unlink()  # the name has all there is to know about it
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.stdout.split() == [str(shared.folder)] * 2, done.stderr


# --- what cannot be built ------------------------------------------------------------------


def make_all(folder: Path, ran: Path) -> None:
    make_wheel(folder, "hutchtest-a", needs=("hutchtest-b>=2",))
    make_wheel(folder, "hutchtest-b", "1.0")
    make_wheel(folder, "hutchtest-b", "2.0")
    make_wheel(folder, "hutchtest-other", tag="cp39-cp39-macosx_11_0_arm64")
    make_wheel(folder, "hutchtest-new", about="Requires-Python: >=3.99")
    make_source(folder, "hutchtest-source", f"open({str(ran)!r}, 'w')\n")
    reserved = {"hutchtest_sly-1.0.data/scripts/python3": "#!python\n"}
    make_wheel(folder, "hutchtest-sly", files=reserved)
    make_wheel(folder, "hutchtest-deep", needs=("hutchtest-source",))
    (folder / "hutchtest_broken-1.0-py3-none-any.whl").write_bytes(b"not a wheel")


@pytest.mark.parametrize(
    ("packages", "says"),
    [(["six", "hutchtest-nowhere"], "there is no package hutchtest-nowhere"),
     (["hutchtest-b>9"], "there is no hutchtest-b>9: only hutchtest-b<=2"),
     (["hutchtest-b==7"], "there is no hutchtest-b==7"),
     (["hutchtest-a", "hutchtest-b<2"], "do not go together.*hutchtest-b"),
     (["hutchtest-other"], "hutchtest-other==1.0 has no wheel for this machine"),
     (["hutchtest-new"], "hutchtest-new==1.0 needs Python >=3.99"),
     (["hutchtest-source"], "hutchtest-source comes as source only"),
     (["hutchtest-deep"], "hutchtest-source comes as source only"),
     (["hutchtest-sly"], "hutchtest-sly==1.0 cannot be installed: .*python3"),
     (["hutchtest-broken"], "hutchtest-broken==1.0 is not a wheel that can be read"),
     (["{}/hutchtest_broken-1.0-py3-none-any.whl"], "hutchtest-broken is not a wheel")],
)  # fmt: skip
def test_a_build_that_fails_names_the_package_and_leaves_nothing(
    packages: list[str], says: str, wheels: Path, data: Path
) -> None:
    ran = wheels.parent / "ran"
    make_all(wheels, ran)
    with pytest.raises(InvalidRequest, match=says):
        store.build(Image.python([name.format(wheels) for name in packages], name="mine"))
    assert left(data) == [] and not ran.exists()
    with pytest.raises(NotFound):
        store.find("mine")


def test_a_wheel_that_has_changed_since_it_was_described_is_refused(wheels: Path) -> None:
    image = Image.python([str(make_wheel(wheels, "hutchtest-mine"))])
    make_wheel(wheels, "hutchtest-mine", files={"more.py": ""})
    with pytest.raises(InvalidRequest, match="hutchtest-mine has changed"):
        store.build(image)


@pytest.mark.parametrize("variable", ["UV_DEFAULT_INDEX", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"])
def test_a_host_that_does_not_answer_is_named(
    variable: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://me:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(
        BackendUnavailable, match=r"cannot get packages from 127\.0\.0\.1:9"
    ) as caught:
        store.build(Image.python(["hutchtest-nowhere"]))
    assert left(data) == [] and "secret" not in str(caught.value)


def test_a_host_with_an_unknown_certificate_is_answered_with_what_makes_it_trusted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = make_certificate(tmp_path, is_authority=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    (tmp_path / "found").mkdir()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "found"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            host = f"127.0.0.1:{server.server_port}"
            monkeypatch.setenv("UV_DEFAULT_INDEX", f"https://{host}/simple")
            monkeypatch.setenv("UV_HTTP_RETRIES", "0")
            for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "PIP_CERT"):
                monkeypatch.delenv(name, raising=False)
            with pytest.raises(BackendUnavailable, match="is not trusted: ") as caught:
                store.build(Image.python(["hutchtest-nowhere"]))
            advice = str(caught.value)
            assert host in advice and "UV_SYSTEM_CERTS=1" in advice and "--" not in advice
            assert "SSL_CERT_FILE" in advice
            monkeypatch.setenv("SSL_CERT_FILE", str(cert))
            with pytest.raises(InvalidRequest, match="there is no package"):
                store.build(Image.python(["hutchtest-nowhere"]))
        finally:
            server.shutdown()
    assert left(data) == []


def test_packages_are_looked_for_where_pip_does(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(wheels, "hutchtest-mine")
    monkeypatch.delenv("UV_FIND_LINKS")
    monkeypatch.chdir(wheels.parent)
    monkeypatch.setenv("PIP_FIND_LINKS", wheels.name)
    assert (
        store.build(Image.python(["hutchtest-mine"])).site_packages / "hutchtest_mine.py"
    ).exists()


def test_uv_sees_nothing_of_the_environment_but_where_packages_are(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    before = set(children(os.getpid()))

    def look() -> None:
        supervisors = set(children(os.getpid())) - before
        for pid in (uv for supervisor in supervisors for uv in children(supervisor)):
            seen.append(Path(f"/proc/{pid}/environ").read_bytes())

    with Index("hutchtest-slow", look) as index:
        monkeypatch.setenv("UV_INDEX", index.url)
        for name in ("MY_TOKEN", "PYTHONPATH", "UV_TARGET", "UV_PUBLISH_TOKEN", "LD_LIBRARY_PATH"):
            monkeypatch.setenv(name, "/secret")
        index.answer.set()
        with pytest.raises(HutchError):
            store.build(Image.python(["hutchtest-slow"]))
    assert seen and all(b"UV_INDEX=" in env and b"/secret" not in env for env in seen)


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "file"))
    with pytest.raises(BackendUnavailable, match="set HUTCH_DATA_DIR"):
        store.build("python")


@pytest.mark.parametrize("name", ["Data", "a/b", "", "..", "host", "a" * 64, "-x"])
def test_a_bad_name_is_refused_before_anything_is_built(name: str, data: Path) -> None:
    with pytest.raises(InvalidRequest):
        store.build(Image(name=name) if name else Image.python([""]))
    assert left(data) == []


def test_what_is_built_in_cannot_be_replaced(data: Path) -> None:
    with pytest.raises(InvalidRequest, match="built in"):
        store.build(Image.python(["six"], name="data"))


# --- many at once, and sudden ends -----------------------------------------------------------

BUILD = (
    "import sys\n"
    "from hutch.images import store\n"
    "from hutch.images.environment import Image\n"
    "say = lambda progress: print(progress.stage, flush=True)\n"
    "print(store.build(Image.python(sys.argv[1:]), say).folder)\n"
)


def start(*packages: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, *packages], env=os.environ | env, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"it ended without {word!r}")


def test_who_builds_the_same_waits_and_gets_the_same(wheels: Path, data: Path) -> None:
    make_wheel(wheels, "hutchtest-slow")
    with Index("hutchtest-slow") as index, start("hutchtest-slow", UV_INDEX=index.url) as first:
        assert index.asked.wait(PATIENCE)
        with start("hutchtest-slow") as second, start("hutchtest-slow") as third:
            read_until(second, "waiting")
            read_until(third, "waiting")
            index.answer.set()
            said = [process.communicate(timeout=PATIENCE)[0] for process in (second, third)]
        said.append(first.communicate(timeout=PATIENCE)[0])
    folders = {text.splitlines()[-1] for text in said}
    assert len(folders) == 1 and "compiling" not in said[0] + said[1]
    key = os.path.basename(folders.pop())
    assert left(data) == [key, f"{key}.lock"]


def test_who_waited_for_a_build_that_failed_tries_again(wheels: Path, data: Path) -> None:
    with Index("hutchtest-slow") as index, start("hutchtest-slow", UV_INDEX=index.url) as first:
        assert index.asked.wait(PATIENCE)
        with start("hutchtest-slow") as second:
            read_until(second, "waiting")
            make_wheel(wheels, "hutchtest-slow")
            first.kill()
            out, _ = second.communicate(timeout=PATIENCE)
    assert out.splitlines()[-2] == "done" and len(left(data)) == 2


def test_a_killed_build_takes_its_programs_along_and_the_next_clears_up(
    wheels: Path, data: Path
) -> None:
    with Index("hutchtest-slow") as index, start("hutchtest-slow", UV_INDEX=index.url) as first:
        assert index.asked.wait(PATIENCE)
        (supervisor,) = children(first.pid)
        (uv,) = children(supervisor)
        watch = os.pidfd_open(uv)
        first.send_signal(signal.SIGKILL)
        ended, _, _ = select.select([watch], [], [], PATIENCE)
        os.close(watch)
        assert ended
    assert [name for name in left(data) if store.BUILDING in name]
    make_wheel(wheels, "hutchtest-b")
    ready = store.build(Image.python(["hutchtest-b"]))
    end = time.monotonic() + PATIENCE  # in the background
    while left(data) != [ready.key, f"{ready.key}.lock"]:
        assert time.monotonic() < end, left(data)
        time.sleep(0.02)


def test_an_exception_from_the_display_stops_a_build(data: Path) -> None:
    before = set(children(os.getpid()))
    for stage in ("resolving", "downloading", "compiling"):

        def stop(progress: Progress, stage: str = stage) -> None:
            if progress.stage == stage:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.build("python", stop)
        assert not set(children(os.getpid())) - before
        wait_until_removed(data)


# --- names, and who may remove what ----------------------------------------------------------


def test_an_image_that_a_box_uses_cannot_be_removed(wheels: Path, data: Path) -> None:
    make_wheel(wheels, "hutchtest-b")
    ready = store.build(Image.python(["hutchtest-b"], name="mine"))
    held = store.hold(ready)
    with pytest.raises(Conflict, match="a box uses mine"):
        store.remove("mine")
    assert store.resolve("mine") == ready
    os.close(held)
    assert store.remove("mine") and left(data) == []
    with pytest.raises(NotFound):
        store.hold(ready)
    with pytest.raises(NotFound, match="hutch image build mine"):
        store.resolve("mine")


def test_a_folder_with_two_names_goes_with_the_second(data: Path) -> None:
    store.build("python")
    store.build(Image.python(name="mine"))
    assert store.remove("mine") and len(left(data)) == 2
    assert store.remove("python") and left(data) == []
    assert not store.remove("python")
    assert [entry.built for entry in store.entries()] == [False] * len(BUILT_IN)


def test_a_name_can_be_given_to_another_list(wheels: Path, data: Path) -> None:
    make_wheel(wheels, "hutchtest-b")
    make_wheel(wheels, "hutchtest-c")
    store.build(Image.python(["hutchtest-c"], name="mine"))
    ready = store.build(Image.python(["hutchtest-b"], ["hutchtest_b"], "mine"))
    assert store.resolve("mine") == ready and left(data) == [ready.key, f"{ready.key}.lock"]
    again = store.build(Image.python(["hutchtest-b"], [], "mine"))
    assert (again.folder, again.preload) == (ready.folder, ())


def test_a_name_stands_for_what_it_did_if_the_new_list_fails(data: Path) -> None:
    ready = store.build(Image.python(name="mine"))
    with pytest.raises(InvalidRequest):
        store.build(Image.python(["hutchtest-nowhere"], name="mine"))
    assert store.resolve("mine") == ready


def test_only_what_has_no_name_and_no_user_is_pruned(wheels: Path, data: Path) -> None:
    make_wheel(wheels, "hutchtest-b")
    make_wheel(wheels, "hutchtest-c")
    store.build("python")
    used, unused = (store.build(Image.python([name])) for name in ("hutchtest-b", "hutchtest-c"))
    held = store.hold(used)
    assert [entry.packages for entry in store.prune()] == [("hutchtest-c",)]
    assert used.folder.is_dir() and not unused.folder.exists()
    os.close(held)
    assert [entry.name for entry in store.entries() if entry.built] == ["python", None]
