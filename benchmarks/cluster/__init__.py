"""A Kubernetes of one node on this machine: for tests, for benchmarks, to try things.

Everything runs in namespaces of its own (processes, mounts, network), whose first process is in
`inside.py`. When that ends, however it does, the kernel ends all others, and undoes their mounts
and networks. What they write goes to one folder, or to memory: kubelet, containerd and the network
plugins also write below /run, /var/lib and /var/log, where something else is put over the
machine's.

Clients reach the API server from inside and outside with the same kubeconfig. Outside, a port of
127.0.0.1 leads to it: a relay runs inside, and has a socket that listens outside.

There is no kube-proxy and no DNS. Of all Services, Pods reach the API server's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..docker_engine import busybox_root, is_static
from . import programs
from .config import COVERED, DAEMONS, NODE, PAUSE, Config, ourselves
from .programs import ClusterFailed

PATIENCE = 180.0  # seconds for something to come up on a busy machine
ROOT = Path(__file__).parent.parent.parent
CGROUPS = Path("/sys/fs/cgroup")
OCI = "application/vnd.oci.image"

STATE, PARENT, STARTED = 0, 1, 19  # in /proc/PID/stat, after the name


def why_not() -> str:
    """Why no cluster can be started here, or nothing."""
    if os.geteuid() != 0:
        return "only root can start a cluster"
    if missing := programs.missing():
        return f"a cluster needs {', '.join(missing)}"
    busybox = shutil.which("busybox")
    if busybox and not is_static(busybox):
        return "a cluster needs a static busybox (Debian: busybox-static)"
    return ""


def default_folder() -> Path:
    """Of the cluster that `scripts/cluster` means: HUTCH_CLUSTER, or one of the user's state."""
    if named := os.environ.get("HUTCH_CLUSTER"):
        return Path(named).absolute()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base, "hutch", "cluster")


class Cluster:
    """`up` and `down`; between them, its daemons can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.config = Config(self.folder)
        self.kubeconfig = self.config.kubeconfig
        self._outside: subprocess.Popen[bytes] | None = None

    # --- up and down ---------------------------------------------------------------------

    def up(self, *, with_us: bool = False) -> bool:
        """Start it. False if it is up. `with_us`: it ends when the calling thread ends.

        Raises ClusterFailed, and leaves nothing then but logs.
        """
        if why := why_not():
            raise ClusterFailed(why)
        built = programs.build()
        for path in (self.folder, *built):
            if any(path.resolve().is_relative_to(hidden) for hidden in COVERED):
                raise ClusterFailed(f"{path} cannot be below {' or '.join(COVERED)}")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if self.is_up() and self._complete.exists():
                return False
            self._stop()
            self._remove()
            try:
                self._start(built, with_us)
                self._complete.touch()
            except BaseException:
                self._stop()
                self._remove(logs=False)
                raise
        return True

    def down(self) -> bool:
        """End it, and remove what it left. False if it was not up."""
        if not self.folder.exists():
            return False
        with self._alone():
            was_up = self.is_up()
            self._stop()
            self._remove()
        return was_up

    def is_up(self) -> bool:
        return self._init() is not None

    @property
    def _complete(self) -> Path:
        """Is there when `up` was not interrupted."""
        return self.folder / "complete"

    def _start(self, built: Sequence[Path], with_us: bool) -> None:
        self.folder.mkdir(mode=0o700)
        for name in ("etc", "logs", "pids", "cni", "etcd", "kubelet", "containerd", "programs"):
            (self.folder / name).mkdir()
        for program in (program for folder in built for program in folder.iterdir()):
            (self.folder / "programs" / program.name).symlink_to(program)
        self._make_groups()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.config.write(listener.getsockname()[1])
            self._unshare(with_us)
            self.start("etcd")
            self.start("containerd")
            self.start("relay", listener=listener)
        self.start("kube-apiserver")
        socket_of_containerd = Path(f"/proc/{self._init()}/root/run/containerd/containerd.sock")
        self.wait("containerd", socket_of_containerd.exists)
        self._import_pause()
        self.start("kubelet")
        self.wait("the API server", self._is_ready)
        self.start("kube-controller-manager")
        self.start("kube-scheduler")
        self.wait_until_ready()

    def _unshare(self, with_us: bool) -> None:
        """Make the namespaces. `unshare` waits outside, and kills the first process if it dies."""
        argv = [
            "unshare",
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--propagation",
            "slave",
            "--",
            *ourselves("init"),
            str(self.folder),
        ]
        if with_us:
            argv = ["setpriv", "--pdeathsig", "KILL", *argv]
        with open(self.folder / "logs/init.log", "wb") as log:
            self._outside = subprocess.Popen(
                argv,
                cwd="/",
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stderr=log,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert self._outside.stdout
        with self._outside.stdout as said:
            if not said.read(1):
                raise self._failed("the namespaces could not be made", "init")
        [pid] = [pid for pid in _pids() if _stat(pid)[PARENT] == str(self._outside.pid)]
        (self.folder / "init").write_text(f"{pid} {_stat(pid)[STARTED]}")

    def _init(self) -> int | None:
        """Its first process, as it is known outside, if it runs."""
        try:
            pid, started = (self.folder / "init").read_text().split()
            stat = _stat(int(pid))
        except (OSError, ValueError):
            return None
        return int(pid) if stat[STARTED] == started and stat[STATE] != "Z" else None

    def _stop(self) -> None:
        while (pid := self._init()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)  # the kernel keeps it until all others have ended
        if self._outside:
            self._outside.kill()  # if it was interrupted before the first process was known
            self._outside.wait()

    def _remove(self, *, logs: bool = True) -> None:
        """Remove its control groups and files. Processes, mounts and networks are gone."""
        deadline = time.monotonic() + PATIENCE
        while tops := [*CGROUPS.glob(self.config.group), *CGROUPS.glob(f"*/{self.config.group}")]:
            for top in tops:
                for group, _, _ in os.walk(top, topdown=False):
                    with contextlib.suppress(OSError):  # of a process that is just ending
                        os.rmdir(group)
            if time.monotonic() > deadline:
                raise ClusterFailed(f"control groups cannot be removed: {tops[0]}")
            time.sleep(0.01)
        if not self.folder.exists():
            return
        if self.folder.stat().st_uid != os.geteuid() or not (self.folder / "logs").is_dir():
            raise ClusterFailed(f"{self.folder} is not the folder of a cluster")
        for entry in self.folder.iterdir():
            if entry.is_symlink() or entry.is_file():
                entry.unlink()
            elif logs or entry.name != "logs":
                shutil.rmtree(entry)
        if logs:
            self.folder.rmdir()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        lock = os.open(self.folder.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _make_groups(self) -> None:
        """A control group for all Pods, in each hierarchy."""
        if (CGROUPS / "cgroup.controllers").exists():  # v2
            (CGROUPS / self.config.group).mkdir()
            for name in (CGROUPS / "cgroup.controllers").read_text().split():
                with contextlib.suppress(OSError):  # the kubelet says which it needs
                    (CGROUPS / "cgroup.subtree_control").write_text(f"+{name}")
            return
        for top in CGROUPS.iterdir():
            if top.is_symlink() or not (top / "cgroup.procs").exists():
                continue
            (top / self.config.group).mkdir()
            for name in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group: it may use none
                if (top / name).exists():
                    (top / self.config.group / name).write_text((top / name).read_text())

    # --- daemons -------------------------------------------------------------------------

    def start(self, name: str, *, listener: socket.socket | None = None) -> None:
        """Start a daemon that does not run. Its output is in `logs/NAME.log`."""
        pid_file = self.folder / "pids" / name
        pid_file.unlink(missing_ok=True)
        script = 'echo $$ > "$0.new" && mv "$0.new" "$0" && exec "$@"'
        argv = ["setsid", "--fork", "sh", "-c", script, str(pid_file), *self.config.command(name)]
        # Nothing of the caller's environment, as tests have much in it.
        path = f"{self.folder}/programs:{os.environ['PATH']}"
        env = {"PATH": path, "HOME": "/", "PYTHONPATH": str(ROOT)}
        inherited = []
        if listener:
            inherited = [listener.fileno()]
            env["LISTENER"] = str(listener.fileno())
        with open(self.folder / f"logs/{name}.log", "ab") as log:
            subprocess.run(
                self.inside(argv),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=inherited,
                check=True,
            )
        self.wait(name, pid_file.exists)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a daemon."""
        pid = (self.folder / "pids" / name).read_text().strip()
        subprocess.run(self.inside(["kill", f"-{int(number)}", pid]), check=False)

    def stop(self, name: str) -> None:
        """Kill a daemon. Returns when it has ended."""
        self.kill(name)
        while self.runs(name):
            time.sleep(0.01)
        (self.folder / "pids" / name).unlink()

    def runs(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            pid = (self.folder / "pids" / name).read_text().strip()
            # Through the root of the first process: its /proc has the numbers in the namespace.
            return Path(f"/proc/{self._init()}/root/proc/{pid}").exists()
        return False

    def wait(self, what: str, until: Callable[[], bool]) -> None:
        """Raises ClusterFailed if it takes too long, or if a daemon ends by itself."""
        deadline = time.monotonic() + PATIENCE
        while not until():
            if not self.is_up():
                raise self._failed("the cluster has ended", "init")
            for name in DAEMONS:
                if (self.folder / "pids" / name).exists() and not self.runs(name):
                    raise self._failed(f"{name} has ended", name)
            if time.monotonic() > deadline:
                raise ClusterFailed(f"{what} takes too long; see {self.folder}/logs")
            time.sleep(0.05)

    def wait_until_ready(self) -> None:
        """Until the API server answers, and Pods can be started."""
        self.wait("the API server", self._is_ready)
        self.wait("the node", self.has_node)

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The argv that runs a program inside, with / as its folder."""
        pid = self._init()
        if pid is None:
            raise ClusterFailed("the cluster is not up: scripts/cluster up")
        return ["nsenter", f"--target={pid}", "--net", "--mount", "--pid", "--", *argv]

    def _failed(self, what: str, log: str) -> ClusterFailed:
        path = self.folder / f"logs/{log}.log"
        lines = path.read_text(errors="replace").split("\n") if path.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return ClusterFailed(f"{what}: {last[:500]}\nits log is {path}")

    # --- the API -------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: object = None, *, kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """Make a request to the API server as the administrator. Returns status and body."""
        context = ssl.create_default_context(cafile=str(self.folder / "etc/ca.crt"))
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.config.port, timeout=60, context=context
        )
        headers = {"Authorization": f"Bearer {self.config.token}", "Content-Type": kind}
        with contextlib.closing(connection):
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def _is_ready(self) -> bool:
        try:
            return self.request("GET", "/readyz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def has_node(self) -> bool:
        """Whether Pods can be started: the node is ready, and they have a service account."""
        try:
            status, body = self.request("GET", f"/api/v1/nodes/{NODE}")
            account, _ = self.request("GET", "/api/v1/namespaces/default/serviceaccounts/default")
        except (OSError, http.client.HTTPException):
            return False
        if status != 200 or account != 200:
            return False
        node = json.loads(body)
        conditions = {each["type"]: each["status"] for each in node["status"].get("conditions", [])}
        return conditions.get("Ready") == "True" and not node["spec"].get("taints")

    # --- images --------------------------------------------------------------------------

    def import_image(self, archive: Path) -> None:
        """Give the node the images of an archive, as `pack_image` or `docker save` write it."""
        if not archive.is_file():
            raise ClusterFailed(f"{archive} is not a file")
        self._ctr("import", str(archive.absolute()))
        self._wait_for_images()

    def tag_image(self, name: str, *others: str) -> None:
        """Give an image other names, too. All of them are full ones, with host and tag."""
        self._ctr("tag", "--force", name, *others)
        self._wait_for_images()

    def _wait_for_images(self) -> None:
        """What serves the kubelet hears of them a little later."""
        self.wait("the image", lambda: self.images() == set(self._ctr("ls", "--quiet").split()))

    def images(self) -> set[str]:
        """The names of all images that Pods can use, and their digests."""
        return set(self._ctr("ls", "--quiet", 'labels."io.cri-containerd.image"==managed').split())

    def _ctr(self, *argv: str) -> str:
        ctr = [str(self.folder / "programs/ctr"), "--namespace=k8s.io", "images", *argv]
        ran = subprocess.run(self.inside(ctr), capture_output=True, text=True)
        if ran.returncode:
            said = ran.stderr.strip().rpartition("\n")[2]  # after warnings
            raise ClusterFailed(f"`ctr images {argv[0]}` failed: {said[:500]}")
        return ran.stdout

    def _import_pause(self) -> None:
        busybox = shutil.which("busybox")
        assert busybox
        layer, archive = self.folder / "pause.layer", self.folder / "pause.tar"
        layer.write_bytes(busybox_root(busybox, ["sleep"]))
        config = {"Entrypoint": ["/bin/sleep", "infinity"], "User": "65535:65535"}
        pack_image(PAUSE, layer, archive, config)
        self.import_image(archive)
        layer.unlink()
        archive.unlink()


def pack_image(name: str, root: Path, into: Path, config: Mapping[str, object]) -> None:
    """Write an archive of an image, of the tar of its root file system.

    `name`: in full, with host and tag. `config`: its `Env`, `Cmd`, `User` and so on.
    """
    with open(root, "rb") as layer, tarfile.open(into, "w") as archive:

        def add(path: str, content: bytes) -> None:
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

        def add_blob(kind: str, content: bytes) -> dict[str, object]:
            digest = hashlib.sha256(content).hexdigest()
            add(f"blobs/sha256/{digest}", content)
            return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

        digest = hashlib.file_digest(layer, "sha256").hexdigest()
        member = tarfile.TarInfo(f"blobs/sha256/{digest}")
        member.size = layer.seek(0, os.SEEK_END)
        layer.seek(0)
        archive.addfile(member, layer)
        image = {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine),
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": add_blob(f"{OCI}.config.v1+json", json.dumps(image).encode()),
            "layers": [
                {
                    "mediaType": f"{OCI}.layer.v1.tar",
                    "digest": f"sha256:{digest}",
                    "size": member.size,
                }
            ],
        }
        listed = add_blob(f"{OCI}.manifest.v1+json", json.dumps(manifest).encode())
        listed["annotations"] = {"io.containerd.image.name": name}
        add("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        add("index.json", json.dumps({"schemaVersion": 2, "manifests": [listed]}).encode())


# --- processes ---------------------------------------------------------------------------


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, after its name; much of nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [""] * 50
