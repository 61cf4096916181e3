"""The programs of a Kubernetes: found on this machine, or built from source once.

Debian has etcd, gVisor's runsc and the network plugins. Its Kubernetes, its containerd and its runc
are too old or not there, and nothing has what connects containerd with runsc. So these are built
from their Go modules, into folders of the user's cache that are named by their versions: 6 to 12
minutes on two quiet cores, 650 MB.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KUBERNETES, CONTAINERD, HELM = "1.36.3", "2.2.9", "3.21.4"
RUNC, GVISOR = "1.3.5", "v0.0.0-20250205023644-9414b50a5633"
VERSION = f"kubernetes-{KUBERNETES}-containerd-{CONTAINERD}"
RUNTIMES = f"runc-{RUNC}-gvisor-{GVISOR.rpartition('-')[2]}"
BUILDING = ".building-"
PLUGINS = ("/usr/lib/cni", "/opt/cni/bin")  # where Debian has them, and where others do
FROM_DEBIAN = {
    "etcd": "etcd-server",
    "busybox": "busybox-static",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "openssl": "openssl",
}


class ClusterFailed(Exception):
    """A program is missing, or did not do its part. Says which, and which log to read."""


@dataclass(frozen=True)
class Module:
    """A Go module of which we build commands."""

    path: str
    version: str
    # Of the module, and of its go.mod. The go command refuses to use anything else. The go.sum in
    # the module has those of what it depends on, and what is in neither (the parts of Kubernetes
    # that are modules of their own) is checked by Go's checksum database.
    sums: tuple[str, str]
    commands: Mapping[str, str]  # by name: the package, below the module
    stamps: Mapping[str, str]  # what its own build writes into the version
    parts: str = ""  # the version of those that its go.mod replaces by a folder
    tags: str = ""
    has_c: bool = False
    change: tuple[str, str, str] | None = None  # a file, what is in it, and what we put there


def _in_cmd(*names: str) -> Mapping[str, str]:
    return {name: f"cmd/{name}" for name in names}


MODULES = (
    Module(
        "github.com/containerd/containerd/v2",
        f"v{CONTAINERD}",
        (
            "h1:ddw9THGOXhcKnHORjkKoXtazPjwtcPwmqk8AVyRpfZw=",
            "h1:lTw+wrjREio28N9+3umHS73C6Cs1mxrhczBcAliInuI=",
        ),
        _in_cmd("containerd", "containerd-shim-runc-v2", "ctr"),
        {"github.com/containerd/containerd/v2/version.Version": CONTAINERD},
        tags="no_btrfs,no_devmapper,no_zfs",
    ),
    Module(
        "k8s.io/kubernetes",
        f"v{KUBERNETES}",
        (
            "h1:qDQdoMiluAE2Eab6Fa52YV+WjiGz9mZFFoagEA6cI+o=",
            "h1:6oChkQeI7Yf6lV9lFpSdRzODdbY/ECp/4zUeBk8ONaw=",
        ),
        _in_cmd(
            "kube-apiserver", "kubelet", "kube-controller-manager", "kube-scheduler", "kubectl"
        ),
        {
            "k8s.io/component-base/version.gitVersion": f"v{KUBERNETES}",
            "k8s.io/component-base/version.gitMajor": KUBERNETES.split(".")[0],
            "k8s.io/component-base/version.gitMinor": KUBERNETES.split(".")[1],
        },
        parts=f"v0.{KUBERNETES.partition('.')[2]}",
    ),
)
RUNTIME_MODULES = (
    Module(
        "github.com/opencontainers/runc",
        f"v{RUNC}",
        (
            "h1:Pu5ptKOUfCtjukP3iWDVplLDpwrfd6VrgmMh77D0YJw=",
            "h1:o1wyv76EDlTkcf0KTFgN8bMWLPvgF/HfX709lDv+rr4=",
        ),
        {"runc": ""},
        {"main.version": RUNC},
        tags="seccomp",
        has_c=True,
    ),
    Module(
        "gvisor.dev/gvisor",
        GVISOR,
        (
            "h1:2gap+Kh/3F47cO6hAu3idFvsJ0ue6TRcEi2IUkv/F8k=",
            "h1:5DMfjtclAbTIjbXqO1qCe2K5GKKxWz2JHvCChuTcJEM=",
        ),
        {"containerd-shim-runsc-v1": "shim"},
        {},
        # It wants to be killed last for memory, which needs CAP_SYS_RESOURCE, and ends without.
        change=("pkg/shim/service.go", "oomScoreMaxKillable = -999", "oomScoreMaxKillable = 0"),
    ),
)
# Apart, as no cluster needs it: tests compare our chart with our manifests.
HELM_MODULE = Module(
    "helm.sh/helm/v3",
    f"v{HELM}",
    (
        "h1:T/GcIEXU/gNjJnkITlIZ3e9xqkZjhFTmISuStTZ6+Qg=",
        "h1:cS2FBb+xfLuaSqvEmbqIeKUVFgHdHVHtVeXb2epof3M=",
    ),
    _in_cmd("helm"),
    {"helm.sh/helm/v3/internal/version.version": f"v{HELM}"},
)


def cache() -> Path:
    """Where built programs are kept: HUTCH_CLUSTER_CACHE, or a folder of the user's cache."""
    if named := os.environ.get("HUTCH_CLUSTER_CACHE"):
        return Path(named).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "hutch", "cluster")


def built() -> list[Path]:
    """The folders with the programs of a cluster. Empty if some were not built."""
    folders = [cache() / VERSION, cache() / RUNTIMES]
    return folders if all(folder.is_dir() for folder in folders) else []


def plugins() -> Path | None:
    """The folder with the network plugins of Debian's containernetworking-plugins."""
    return next((Path(place) for place in PLUGINS if Path(place, "host-local").exists()), None)


def missing() -> list[str]:
    """What must be installed before a cluster can be started, as `program (Debian: package)`."""
    found = [
        f"{name} (Debian: {package})"
        for name, package in FROM_DEBIAN.items()
        if not shutil.which(name)
    ]
    if not plugins():
        found.append("network plugins (Debian: containernetworking-plugins)")
    return found


def build() -> list[Path]:
    """The folders with the programs, which are built if this version was not built before.

    Several processes may call this at once: one builds, the others wait. A build that fails or is
    killed leaves nothing at that name. The go command's own caches need 4 GB while it builds. They
    are kept for a build that was interrupted, and removed after one that was not; those that
    GOCACHE and GOMODCACHE name are used instead and kept.

    Raises ClusterFailed.
    """
    return [_built(VERSION, MODULES), _built(RUNTIMES, RUNTIME_MODULES)]


def built_helm() -> Path | None:
    """The helm command, if it was built."""
    command = cache() / f"helm-{HELM}" / "helm"
    return command if command.exists() else None


def build_helm() -> Path:
    """The helm command, which is built as the others are. Raises ClusterFailed."""
    return _built(f"helm-{HELM}", (HELM_MODULE,)) / "helm"


def _built(version: str, modules: Sequence[Module]) -> Path:
    finished = cache() / version
    if finished.is_dir():
        return finished
    if not shutil.which("go"):
        raise ClusterFailed("go is not installed, which builds Kubernetes (1.26 or later)")
    finished.parent.mkdir(parents=True, exist_ok=True)
    with _alone(finished.parent):
        if not finished.is_dir():
            _build(finished, modules)
    return finished


def _build(finished: Path, modules: Sequence[Module]) -> None:
    for left in finished.parent.glob(f"{BUILDING}*"):  # by a build that was killed
        shutil.rmtree(left)
    own = {"GOCACHE": finished.parent / "go-build", "GOMODCACHE": finished.parent / "go-mod"}
    env = {
        **{name: str(folder) for name, folder in own.items()},
        **os.environ,
        # -mod=mod: go.sum gets the sums of what is checked by the database.
        "GOFLAGS": "-mod=mod -modcacherw -trimpath -buildvcs=false",
        "GOWORK": "off",
    }
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=finished.parent) as name:
        programs = Path(name, "programs")
        programs.mkdir()
        for module in modules:
            source = Path(name, *module.path.split("/"))
            source.mkdir(parents=True)
            downloaded = _write_go_mod(module, source, env)
            _change(module, downloaded, source, env)
            _log(f"building {' '.join(module.commands)} {module.version}")
            stamps = " ".join(f"-X {name}={value}" for name, value in module.stamps.items())
            packages = [f"{module.path}/{path}".rstrip("/") for path in module.commands.values()]
            options = ["-tags", module.tags, "-ldflags", f"-s -w {stamps}", "-o", f"{programs}/"]
            c = {"CGO_ENABLED": "1" if module.has_c else "0"}
            _go(["build", *options, *packages], source, {**env, **c})
            for command, package in zip(module.commands, packages, strict=True):
                (programs / package.rpartition("/")[2]).rename(programs / command)
        programs.rename(finished)
    for folder in own.values():
        shutil.rmtree(folder, ignore_errors=True)


def _change(module: Module, downloaded: Path, into: Path, env: Mapping[str, str]) -> None:
    """Let a copy of the module be built, with our change."""
    if not module.change:
        return
    file, before, after = module.change
    shutil.copytree(downloaded, into / "changed")
    changed = into / "changed" / file
    text = changed.read_text()
    if before not in text:
        raise ClusterFailed(f"{file} of {module.path} {module.version} is not what we change")
    changed.write_text(text.replace(before, after))
    _go(["mod", "edit", f"-replace={module.path}=./changed"], into, env)


def _write_go_mod(module: Module, into: Path, env: Mapping[str, str]) -> Path:
    """Write the go.mod and go.sum of a module that depends on `module`, and on what it does.

    Returns the folder with its source. In the repository of Kubernetes, its parts are folders. They
    are also published, as modules.
    """
    (into / "go.mod").write_text("module cluster\n")
    downloaded = json.loads(
        _go(["mod", "download", "-json", f"{module.path}@{module.version}"], into, env)
    )
    if (downloaded["Sum"], downloaded["GoModSum"]) != module.sums:
        raise ClusterFailed(f"{module.path} {module.version} is not the one that was reviewed")
    described = json.loads(_go(["mod", "edit", "-json", downloaded["GoMod"]], into, env))
    parts = {entry["Old"]["Path"] for entry in described.get("Replace") or ()}
    needed = {entry["Path"]: entry["Version"] for entry in described["Require"]}
    needed |= {path: module.parts for path in parts} | {module.path: module.version}
    (into / "go.mod").write_text(
        "\n".join(
            [
                "module cluster",
                f"go {described['Go']}",
                *(f"require {path} {version}" for path, version in needed.items()),
                *(f"replace {path} => {path} {module.parts}" for path in sorted(parts)),
                "",
            ]
        )
    )
    of_module, of_go_mod = module.sums
    own = (
        f"{module.path} {module.version} {of_module}\n"
        f"{module.path} {module.version}/go.mod {of_go_mod}\n"
    )
    (into / "go.sum").write_text(own + Path(downloaded["Dir"], "go.sum").read_text())
    return Path(downloaded["Dir"])


def _go(argv: list[str], folder: Path, env: Mapping[str, str]) -> str:
    # It ends with us, as another build removes the folder that it writes to.
    argv = ["setpriv", "--pdeathsig", "KILL", "nice", "-n", "5", "go", *argv]
    ran = subprocess.run(argv, cwd=folder, env=dict(env), text=True, capture_output=True)
    if ran.returncode:
        # What it downloads comes first, and why it failed comes last.
        raise ClusterFailed(f"`{' '.join(argv[5:8])}…` failed: {ran.stderr.strip()[-2000:]}")
    return ran.stdout


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log("waiting for another build")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
