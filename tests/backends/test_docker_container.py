"""What the engine is asked for: every layer is there, and each relaxation takes its own away."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hutch.backends.base import Spec
from hutch.backends.contained import OWN
from hutch.backends.docker.config import EngineAddress
from hutch.backends.docker.container import (
    ContainerImage,
    Surroundings,
    body,
    connector_for,
    degraded,
)
from hutch.backends.docker.doctor import unreachable
from hutch.backends.docker.engine import Facts, facts_of, in_our_words, translate
from hutch.backends.docker.images import (
    check_architecture,
    digest_of,
    image_of,
    is_own,
    repository_of,
)
from hutch.backends.docker.launch import no_runtime
from hutch.backends.docker.users import BoxUser
from hutch.backends.linux.mounts import FoundMount, give_away, open_mounts
from hutch.errors import (
    BackendUnavailable,
    Conflict,
    HutchError,
    InvalidRequest,
    NoCapacity,
    NotFound,
    StartFailed,
)
from hutch.types import RELAXATIONS, Limits, MiB, Mount, Relaxation

ID = "sha256:" + "a" * 64
FACTS = Facts("20.10", runtimes={"runc": "runc", "runsc": "/usr/bin/runsc"}, cpus=2)
IMAGE = ContainerImage("node:22", ID, ID, env=("PATH=/bin", "LD_PRELOAD=/evil.so"))
WHO = BoxUser(7, 8, is_own=True)
SPEC = Spec()


def command(module: str, *args: str, at: str) -> list[str]:
    return [f"{at}/python", "-m", module, *args]


def made(
    spec: Spec = SPEC,
    *,
    image: ContainerImage = IMAGE,
    facts: Facts = FACTS,
    who: BoxUser = WHO,
    mounts: tuple[FoundMount, ...] = (),
) -> dict[str, Any]:
    around = Surroundings(connector_for(facts, spec.runtime), "/bundle", "/boxes/b", mounts)
    return body(spec, image, who, facts, around, command, {"hutch.box": "b"})


def orders(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made["Entrypoint"][-1])
    return found


def test_a_box_is_hardened_by_default() -> None:
    found = made()
    host = found["HostConfig"]
    assert found["User"] == "7:8"
    assert found["Entrypoint"][:3] == ["/.hutch/python", "-m", "hutch.guest.contained"]
    assert found["Healthcheck"] == {"Test": ["NONE"]}
    assert host["CapDrop"] == ["ALL"] and "CapAdd" not in host and not host["Privileged"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["ReadonlyRootfs"] and host["NetworkMode"] == "none" and host["AutoRemove"]
    assert host["IpcMode"] == host["CgroupnsMode"] == "private"
    assert host["LogConfig"] == {"Type": "none"}
    assert {"/proc/kcore", "/proc/config.gz", "/sys"} <= set(host["MaskedPaths"])
    assert orders(found)["filter"] and not orders(found)["gain"] and not orders(found)["foreign"]
    for absent in ("Binds", "Devices", "PortBindings", "Links", "VolumesFrom", "PidMode"):
        assert absent not in host


def test_limits_bound_the_box_and_leave_the_guest_some_room() -> None:
    limits = Limits(memory=100 * MiB, cpus=1.5, pids=10, open_files=300)
    found = made(Spec(limits=limits))
    host = found["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 132 * MiB
    assert host["NanoCpus"] == 1_500_000_000 and host["PidsLimit"] == 74
    assert host["ShmSize"] == limits.shared_memory
    assert orders(found)["limits"]["NPROC"] == 10 and orders(found)["limits"]["NOFILE"] == 300


def test_what_has_ended_is_removed_by_the_engine_unless_that_would_end_it() -> None:
    def is_removed(version: str, *, live: bool, swept: bool) -> bool:
        facts = replace(FACTS, version=version, live_restore=live)
        around = Surroundings("meeting", "/bundle", "/boxes/b", is_swept=swept)
        made = body(SPEC, IMAGE, WHO, facts, around, command, {})
        return bool(made["HostConfig"]["AutoRemove"])

    assert not is_removed("20.10.24", live=True, swept=True)
    assert is_removed("20.10.24", live=True, swept=False)
    assert is_removed("20.10.24", live=False, swept=True)
    assert is_removed("25.0.1", live=True, swept=True)


def test_more_cpus_than_there_are_is_all_of_them() -> None:
    assert made(Spec(limits=Limits(cpus=64)))["HostConfig"]["NanoCpus"] == 2_000_000_000


def test_processes_of_a_shared_uid_are_not_counted_for_the_box_and_that_is_told() -> None:
    assert "NPROC" not in orders(made(who=BoxUser(1000, 1000)))["limits"]
    assert any("for the whole box" in each for each in degraded(SPEC, FACTS, BoxUser(1000, 1000)))
    assert not any("for the whole box" in each for each in degraded(SPEC, FACTS, WHO))


RELAXED: dict[Relaxation, dict[str, Any]] = {
    "user": {},
    "writable-root": {"ReadonlyRootfs": False},
    "capabilities": {"CapDrop": []},
    "new-privileges": {"SecurityOpt": []},
    "seccomp": {},
    "network": {"NetworkMode": "default"},
}


@pytest.mark.parametrize("name", RELAXATIONS)
def test_a_relaxation_takes_away_its_own_layer_and_no_other(name: Relaxation) -> None:
    whole, relaxed = made(), made(Spec(relax=(name,)))
    assert relaxed["HostConfig"] == {**whole["HostConfig"], **RELAXED[name]}
    before, after = orders(whole), orders(relaxed)
    changed = {key for key in before if before[key] != after[key]}
    expected = {"seccomp": {"filter"}, "new-privileges": {"filter", "gain"}}.get(name, set())
    assert changed == expected
    for each in (whole, relaxed):
        each.pop("HostConfig"), each.pop("Entrypoint")
    assert whole == relaxed


def test_what_a_relaxation_costs_beyond_itself_is_told() -> None:
    (said,) = degraded(Spec(relax=("new-privileges",)), FACTS, WHO)
    assert "ours needs no new privileges" in said
    assert degraded(Spec(), FACTS, WHO) == ()


def test_what_the_engine_cannot_bound_is_told() -> None:
    facts = replace(FACTS, unlimited=("swap",), has_seccomp=False)
    assert [each.partition(":")[0] for each in degraded(Spec(), facts, BoxUser(5, 5))] == [
        "limits", "system calls", "user ids", "limits"]  # fmt: skip


def test_a_root_that_nobody_asked_for_is_told() -> None:
    said = degraded(Spec(), replace(FACTS, is_rootless=True), BoxUser(0, 0))
    assert any("who runs the engine" in each for each in said)
    relaxed = degraded(Spec(relax=("user",)), FACTS, BoxUser(0, 0))
    assert not any("who runs the engine" in each for each in relaxed)


# --- nothing of a caller's or an image's gets where it could be taken for more -----------


def test_no_variable_of_the_image_reaches_the_guest_but_programs_get_them() -> None:
    found = made()
    assert found["Env"] == ["PATH", "LD_PRELOAD"]  # without a value: taken away
    assert orders(found)["env"]["LD_PRELOAD"] == "/evil.so"
    assert made(facts=replace(FACTS, is_podman=True))["Env"] == ["PATH=", "LD_PRELOAD="]


def test_odd_variables_of_an_image_are_left_out() -> None:
    found = made(image=replace(IMAGE, env=("=x", "A", "B=1=2")))
    assert found["Env"] == ["A", "B"]
    assert orders(found)["env"] == {"A": "", "B": "1=2", "HOME": "/home/user"}


def test_an_image_with_too_many_variables_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too many variables"):
        made(image=replace(IMAGE, env=(f"A={'x' * 200_000}",)))


def test_mounts_are_fields_and_never_texts() -> None:
    source = "/srv/a:b,readonly=false/../c"
    (found,) = made(mounts=(FoundMount(source, "/data", False, (7, 8)),))["HostConfig"]["Mounts"][
        4:
    ]
    assert (found["Source"], found["Target"], found["ReadOnly"]) == (source, "/data", False)
    assert found["Type"] == "bind" and found["BindOptions"]["Propagation"] == "rprivate"


def test_a_mount_that_is_read_only_shows_nothing_that_is_mounted_below_it() -> None:
    (found,) = made(mounts=(FoundMount("/srv", "/data", True, (0, 0)),))["HostConfig"]["Mounts"][4:]
    assert found["ReadOnly"] and found["BindOptions"]["NonRecursive"]


def test_a_mount_takes_the_place_of_a_room() -> None:
    found = made(mounts=(FoundMount("/srv", "/workspace", False, (7, 8)),))
    assert "/workspace" not in found["HostConfig"]["Tmpfs"]
    assert "/workspace" not in orders(found)["rooms"]


def test_rooms_belong_to_the_box_s_user_and_have_a_size() -> None:
    found = made()["HostConfig"]["Tmpfs"]
    assert set(found) == {"/workspace", "/tmp", "/var/tmp", "/home/user", "/run"}
    for options in found.values():
        assert {"nosuid", "nodev", "uid=7", "gid=8"} <= set(options.split(","))
        assert "size=" in options and "nr_inodes=" in options


@pytest.mark.parametrize("volumes", [(), tuple(f"/v{n}" for n in range(16))])
@pytest.mark.parametrize(
    "limits",
    [Limits(), Limits(memory=64 * MiB), Limits(memory=256 * MiB, disk=200 * MiB),
     Limits(disk=8 * MiB)],
)  # fmt: skip
def test_all_rooms_together_fit_into_the_memory(limits: Limits, volumes: tuple[str, ...]) -> None:
    def size_of(options: str) -> int:
        (size,) = [each[5:] for each in options.split(",") if each.startswith("size=")]
        return int(size)

    found = made(Spec(limits=limits), image=replace(IMAGE, volumes=volumes))["HostConfig"]
    sizes = {path: size_of(options) for path, options in found["Tmpfs"].items()}
    assert sizes["/workspace"] == limits.disk_size
    assert all(size <= limits.disk_size for path, size in sizes.items() if path != "/run")
    assert sum(sizes.values()) + found["ShmSize"] < found["Memory"]
    assert min(sizes.values()) >= MiB


def test_volumes_of_an_image_are_rooms_of_the_box() -> None:
    volumes = ("/data", "/etc/letsencrypt", "/tmp", "/srv")
    mounts = (FoundMount("/host", "/srv", True, (0, 0)),)
    found = made(image=replace(IMAGE, volumes=volumes), mounts=mounts)["HostConfig"]["Tmpfs"]
    assert set(found) - set(made()["HostConfig"]["Tmpfs"]) == {"/data", "/etc/letsencrypt"}
    assert "size=" in found["/data"] and "uid=7" in found["/data"]


@pytest.mark.parametrize(
    "path",
    ["/.hutch", "/.hutch/site", "/.hutch-host", "/.hutch-host/x", "/run/hutch", "//.hutch/site",
     "/a/../.hutch", "/.hutch/", "/./.hutch", "rel", "", "/", "//", "/x\n", "/a:b", "/a,b",
     "/proc/x", "/sys", "/dev/shm", "/etc", "/usr", "/bin", "/etc/passwd", "/etc/group"],
)  # fmt: skip
def test_an_image_with_a_volume_in_the_connector_for_a_box_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest, match="has a volume at"):
        made(image=replace(IMAGE, volumes=("/data", path)))


def test_an_image_with_more_volumes_than_a_box_has_rooms_is_refused() -> None:
    many = tuple(f"/v{n}" for n in range(17))
    made(image=replace(IMAGE, volumes=many[:16]))
    with pytest.raises(InvalidRequest, match="17 volumes"):
        made(image=replace(IMAGE, volumes=many))


@pytest.mark.parametrize(
    "name",
    ["--privileged", ";$(id)", "a\nb", "a b", "../containers/x", "a?b=c", "a#b", "A", "", "a:",
     "a@sha256:1", "/a", "a//b", "a%2e", "a" * 600, "x:y:z", ".a", "a/../b"],
)  # fmt: skip
def test_what_is_no_name_of_an_image_goes_nowhere(name: str) -> None:
    with pytest.raises(InvalidRequest, match="no image can be called"):
        repository_of(name)


@pytest.mark.parametrize(
    ("name", "repository"),
    [("alpine", "alpine"), ("node:22-slim", "node"), ("localhost:5000/a/b:t", "localhost:5000/a/b"),
     (f"r.example/x@{ID}", "r.example/x"), (f"x:t@{ID}", "x"), (ID, ""),
     ("hutch-test/debian", "hutch-test/debian")],
)  # fmt: skip
def test_names_of_images_are_docker_s(name: str, repository: str) -> None:
    assert repository_of(name) == repository


# --- images and engines -----------------------------------------------------------------


@pytest.mark.parametrize("listed", ["node", "docker.io/library/node"])
def test_a_tag_is_pinned_by_the_digest_of_its_registry(listed: str) -> None:
    digests = [f"other@sha256:{'b' * 64}", f"{listed}@sha256:{'c' * 64}"]
    for name in ("node:22", "docker.io/node", "index.docker.io/library/node:22"):
        assert digest_of(name, {"Id": ID, "RepoDigests": digests}) == f"sha256:{'c' * 64}"


def test_an_image_that_its_own_registry_does_not_know_is_pinned_by_its_id() -> None:
    elsewhere = [f"registry.example/other@sha256:{'b' * 64}"]
    assert digest_of("mine", {"Id": ID, "RepoDigests": elsewhere}) == ID
    assert digest_of(ID, {"Id": ID, "RepoDigests": elsewhere}) == ID
    assert digest_of("mine", {"Id": ID}) == ID


@pytest.mark.parametrize(
    "name", ["hutch/python", "hutch/x:1", "docker.io/hutch/python", "index.docker.io/hutch/x"]
)
def test_an_image_of_ours_is_known_by_any_of_its_names(name: str) -> None:
    assert is_own(name)


@pytest.mark.parametrize(
    "name", ["python", "hutch", "hutch-test/x", "r.example/hutch/x", "a/hutch"]
)
def test_what_others_call_theirs_is_not_ours(name: str) -> None:
    assert not is_own(name)


def test_a_runtime_that_is_missing_is_told_with_those_people_know() -> None:
    facts = replace(FACTS, runtimes={"runc": "runc", "io.containerd.runc.v2": "runc"})
    assert no_runtime(facts, "fast").endswith("'fast': there are runc")
    assert "install gVisor" in no_runtime(facts, "runsc")
    assert '"runsc": {"path"' in no_runtime(facts, "runsc")


@pytest.mark.parametrize(
    ("url", "advice"),
    [("unix:///x", "systemctl start docker"), ("tcp://localhost:2375", "systemctl start docker"),
     ("tcp://far.example:2375", "check that it runs there and can be reached")],
)  # fmt: skip
def test_what_to_do_depends_on_where_the_engine_is(url: str, advice: str) -> None:
    error = translate(900, "[refused]", EngineAddress(url, "test"))
    assert advice in str(error)
    assert isinstance(error, BackendUnavailable)
    is_here = "systemctl" in advice
    assert bool(unreachable("docker", error).layers[0].fix) == is_here


def test_an_image_without_a_config_will_do() -> None:
    found = image_of("x", {"Id": ID, "Config": None})
    assert (found.env, found.user, found.volumes, found.architecture) == ((), "", (), "")


def test_an_image_for_another_machine_is_refused_with_both_names() -> None:
    own = facts_of({}, {}, by_socket=True)
    other = "arm64" if own.architecture != "arm64" else "amd64"
    with pytest.raises(InvalidRequest, match=rf"{other}.*{own.architecture}"):
        check_architecture(replace(IMAGE, architecture=other), own)
    with pytest.raises(BackendUnavailable, match=rf"{other}.*{own.architecture}"):
        check_architecture(IMAGE, replace(own, architecture=other))


@pytest.mark.parametrize(
    ("runtime", "grade"),
    [("", "ns"), ("runc", "ns"), ("crun", "ns"), ("runsc", "gvisor"), ("runsc-kvm", "gvisor"),
     ("io.containerd.runsc.v1", "gvisor"), ("kata", "vm"), ("kata-fc", "vm"),
     ("io.containerd.kata.v2", "vm"), ("nvidia", "ns"), ("safe", "gvisor")],
)  # fmt: skip
def test_the_grade_follows_the_runtime(runtime: str, grade: str) -> None:
    facts = replace(FACTS, runtimes={**FACTS.runtimes, "safe": "/opt/bin/runsc"})
    assert facts.grade(runtime) == grade


def test_a_default_runtime_counts_as_if_it_were_asked_for() -> None:
    facts = replace(FACTS, default_runtime="runsc")
    assert facts.grade("") == "gvisor" and made(facts=facts)["HostConfig"]["Runtime"] == "runsc"


def test_a_socket_is_shared_with_our_own_kernel_only() -> None:
    assert connector_for(FACTS, "") == "meeting"
    assert connector_for(FACTS, "runsc") == "relay"
    assert connector_for(replace(FACTS, is_local=False), "") == "relay"
    assert orders(made(Spec(runtime="runsc")))["meeting"] is None


def test_an_engine_is_local_if_it_has_our_name_and_kernel() -> None:
    own = os.uname()
    info = {"Name": own.nodename, "KernelVersion": own.release}
    assert facts_of(info, {}, by_socket=True).is_local
    assert not facts_of(info, {}, by_socket=False).is_local
    assert not facts_of({**info, "KernelVersion": "5"}, {}, by_socket=True).is_local
    assert not facts_of({**info, "Name": "elsewhere"}, {}, by_socket=True).is_local


def test_what_an_engine_says_of_itself_is_understood() -> None:
    info = {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"], "NCPU": 3,
            "MemoryLimit": False, "PidsLimit": True, "Architecture": "aarch64"}  # fmt: skip
    version = {"Version": "5", "Components": [{"Name": "Podman Engine"}]}
    facts = facts_of(info, version, by_socket=True)
    assert facts.is_podman and facts.is_rootless and facts.has_seccomp and facts.cpus == 3
    assert facts.unlimited == ("memory",) and facts.architecture == "arm64"


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [(404, "no such container", NotFound), (409, "in use", Conflict), (500, "odd", StartFailed),
     (400, "odd", StartFailed), (900, "[x]", BackendUnavailable), (403, "no", BackendUnavailable),
     (500, "write /x: no space left on device", NoCapacity)],
)  # fmt: skip
def test_an_error_of_the_engine_s_is_one_of_ours(
    status: int, message: str, error: type[HutchError]
) -> None:
    assert type(translate(status, message, EngineAddress("unix:///x", "test"))) is error


def test_a_connection_that_takes_too_long_is_an_engine_that_does_not_answer() -> None:
    words = pytest.raises(BackendUnavailable, match="no answer in time")
    with words, in_our_words(EngineAddress("tcp://x:1", "test")):
        raise TimeoutError


def test_a_socket_that_is_closed_to_us_says_what_to_do() -> None:
    message = "Cannot connect [Cannot connect to unix socket /x ssl:default [Permission denied]]"
    assert "usermod -aG docker" in str(translate(900, message, EngineAddress("unix:///x", "test")))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders away")
@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT])
def test_a_folder_is_given_away_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    inner = tmp_path / "inner"
    (inner / "closed").mkdir(parents=True)
    opened = os.open

    def opens(path: str, *args: Any, **more: Any) -> int:
        if path == "closed":
            raise OSError(code, os.strerror(code), path)
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", opens)
    with open_mounts((Mount(str(inner), "/workspace"),), (str(inner),)) as found:
        if code == errno.ENOENT:  # another process has removed it
            assert give_away(found, OWN)[0].owner[0] == inner.stat().st_uid > 0
        else:
            with pytest.raises(PermissionError):
                give_away(found, OWN)
            assert inner.stat().st_uid == 0
