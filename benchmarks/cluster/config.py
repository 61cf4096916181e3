"""What the daemons of a cluster are told: arguments, files, certificates."""

from __future__ import annotations

import hashlib
import json
import secrets
import subprocess
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

from .programs import ClusterFailed, plugins

NODE, NODE_IP = "node", "10.66.0.1"
PODS, SERVICES, API_SERVICE = "10.88.0.0/16", "10.96.0.0/16", "10.96.0.1"
PAUSE = "localhost/pause:1"  # holds the namespaces of a Pod

# Where programs write, whatever their configuration says. Inside, these are not the machine's.
COVERED = ("/run", "/var/lib", "/var/log")

# The kubelet wants these settings of the kernel, and would change them for the whole machine. It
# sees that they are so, in files that it alone has over the real ones.
SEEN_BY_KUBELET = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
KUBELET = """\
mount --make-private /proc
cd /run/sysctl
for setting in */*; do mount --bind $setting /proc/sys/$setting; done
exec "$@"
"""

# gVisor, by a RuntimeClass with this handler. It works without KVM, on every kernel.
RUNSC_HANDLER = "runsc"
RUNSC = """\
binary_name = "runsc"
root = "/run/runsc"
[runsc_config]
network = "none"
platform = "ptrace"
"""

CAP_SYS_RESOURCE = 1 << 24

# In the order in which they start.
DAEMONS = (
    "etcd",
    "containerd",
    "relay",
    "kube-apiserver",
    "kubelet",
    "kube-controller-manager",
    "kube-scheduler",
)

OPENSSL = f"""\
[req]
distinguished_name = name
[name]
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:127.0.0.1, IP:{NODE_IP}, IP:{API_SERVICE}, DNS:localhost
"""


class Config:
    """Of the cluster in this folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.group = "hutch-cluster-" + hashlib.sha256(bytes(folder)).hexdigest()[:12]

    @property
    def port(self) -> int:
        """Of the API server, inside and outside."""
        return int((self.folder / "etc/port").read_text())

    def write(self, port: int) -> None:
        """Write all files. `port`: of the API server."""
        etc, token = self.folder / "etc", secrets.token_hex(16)
        (etc / "port").write_text(str(port))
        (etc / "tokens").write_text(f'{token},admin,admin,"system:masters"\n')
        (etc / "openssl.cnf").write_text(OPENSSL)
        self._openssl("ca", "ca", "/CN=hutch-cluster", [])
        self.certificate("server", "kube-apiserver")
        self.certificate("admin", "admin", "system:masters")
        self._openssl("accounts", "leaf", "/CN=accounts", [])  # for its key
        self._write_kubeconfig({"token": token})
        (etc / "kubelet.json").write_text(json.dumps(self._kubelet()))
        (etc / "containerd.toml").write_text(self._containerd())
        (etc / "runsc.toml").write_text(RUNSC)
        network = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods",
                    "isGateway": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": PODS}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        (self.folder / "cni/pods.conflist").write_text(json.dumps(network))

    def certificate(self, file: str, user: str, *groups: str) -> tuple[Path, Path]:
        """Make a certificate for a user. Returns it and its key, which are named after `file`."""
        signed = ["-CA", f"{self.folder}/etc/ca.crt", "-CAkey", f"{self.folder}/etc/ca.key"]
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        return self._openssl(file, "leaf", subject, signed)

    def _openssl(
        self, file: str, kind: str, subject: str, signed: Sequence[str]
    ) -> tuple[Path, Path]:
        etc = self.folder / "etc"
        certificate, key = etc / f"{file}.crt", etc / f"{file}.key"
        argv = [
            "openssl",
            "req",
            "-x509",
            "-config",
            f"{etc}/openssl.cnf",
            "-extensions",
            kind,
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "30",
            "-subj",
            subject,
            "-keyout",
            str(key),
            "-out",
            str(certificate),
            *signed,
        ]
        ran = subprocess.run(argv, capture_output=True, text=True)
        if ran.returncode:
            raise ClusterFailed(f"openssl (3.0 or later) failed: {ran.stderr.strip()[-500:]}")
        return certificate, key

    def _write_kubeconfig(self, user: Mapping[str, str]) -> None:
        ca = b64encode((self.folder / "etc/ca.crt").read_bytes()).decode()
        server = {
            "server": f"https://127.0.0.1:{self.port}",
            "certificate-authority-data": ca,
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "hutch", "cluster": server}],
            "users": [{"name": "admin", "user": user}],
            "contexts": [{"name": "hutch", "context": {"cluster": "hutch", "user": "admin"}}],
            "current-context": "hutch",
        }
        self.kubeconfig.write_text(json.dumps(config, indent=2))  # JSON is YAML, too

    def _kubelet(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.group}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "protectKernelDefaults": True,
            "makeIPTablesUtilChains": False,
            "resolvConf": "",
            "podLogsDir": f"{self.folder}/pods",
            "volumePluginDir": f"{self.folder}/plugins",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{self.folder}/etc/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "maxPods": 250,
            "serializeImagePulls": False,
            "registryPullQPS": 0,
            # A disk or a memory that others fill would end Pods, and images would go.
            "evictionHard": dict.fromkeys(
                ("memory.available", "nodefs.available", "imagefs.available", "nodefs.inodesFree"),
                "0%",
            ),
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
        }

    def _containerd(self) -> str:
        # Overlays cannot be stacked on one, which a container has for its root.
        kind = subprocess.run(
            ["stat", "--file-system", "--format=%T", str(self.folder)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        snapshotter = "native" if kind == "overlayfs" else "overlayfs"
        # Without the capability, runc cannot give a container a lower score than itself.
        restrict = "false" if _capabilities() & CAP_SYS_RESOURCE else "true"
        return f"""\
version = 3
root = '{self.folder}/containerd'
state = '/run/containerd'
disabled_plugins = ['io.containerd.nri.v1.nri']

[plugins.'io.containerd.internal.v1.opt']
path = '{self.folder}/opt'

[plugins.'io.containerd.cri.v1.images']
snapshotter = '{snapshotter}'

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{PAUSE}'

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = {restrict}

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['{plugins()}']
conf_dir = '{self.folder}/cni'

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = '{self.folder}/programs/runc'

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.{RUNSC_HANDLER}]
runtime_type = 'io.containerd.runsc.v1'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.{RUNSC_HANDLER}.options]
TypeUrl = 'io.containerd.runsc.v1.options'
ConfigPath = '{self.folder}/etc/runsc.toml'
"""

    @property
    def token(self) -> str:
        """Of the administrator."""
        return (self.folder / "etc/tokens").read_text().partition(",")[0]

    def command(self, name: str) -> list[str]:
        """The argv of a daemon."""
        etc, built = self.folder / "etc", self.folder / "programs"
        api = ["--kubeconfig", str(self.kubeconfig)]
        match name:
            case "etcd":
                client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
                return [
                    "etcd",
                    f"--data-dir={self.folder}/etcd",
                    "--unsafe-no-fsync",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=default={peer}",
                ]
            case "containerd":
                return [f"{built}/containerd", f"--config={etc}/containerd.toml"]
            case "relay":
                return ourselves("relay")
            case "kube-apiserver":
                return [
                    f"{built}/kube-apiserver",
                    "--etcd-servers=http://127.0.0.1:2379",
                    f"--secure-port={self.port}",
                    f"--advertise-address={NODE_IP}",
                    "--endpoint-reconciler-type=none",
                    f"--service-cluster-ip-range={SERVICES}",
                    f"--tls-cert-file={etc}/server.crt",
                    f"--tls-private-key-file={etc}/server.key",
                    f"--client-ca-file={etc}/ca.crt",
                    f"--token-auth-file={etc}/tokens",
                    f"--kubelet-client-certificate={etc}/admin.crt",
                    f"--kubelet-client-key={etc}/admin.key",
                    "--kubelet-preferred-address-types=InternalIP",
                    "--service-account-issuer=https://kubernetes.default.svc",
                    f"--service-account-key-file={etc}/accounts.crt",
                    f"--service-account-signing-key-file={etc}/accounts.key",
                    "--authorization-mode=RBAC",
                    "--allow-privileged=true",
                ]
            case "kube-controller-manager":
                return [
                    f"{built}/{name}",
                    *api,
                    "--leader-elect=false",
                    "--bind-address=127.0.0.1",
                    f"--service-account-private-key-file={etc}/accounts.key",
                    f"--root-ca-file={etc}/ca.crt",
                    f"--flex-volume-plugin-dir={self.folder}/plugins",
                ]
            case "kube-scheduler":
                return [f"{built}/{name}", *api, "--leader-elect=false", "--bind-address=127.0.0.1"]
            case "kubelet":
                return [
                    "unshare",
                    "--mount",
                    "--propagation",
                    "unchanged",
                    "sh",
                    "-ec",
                    KUBELET,
                    "sh",
                    f"{built}/kubelet",
                    *api,
                    f"--config={etc}/kubelet.json",
                    f"--root-dir={self.folder}/kubelet",
                    f"--cert-dir={etc}/kubelet",
                    f"--hostname-override={NODE}",
                    f"--node-ip={NODE_IP}",
                ]
        raise ValueError(f"{name} is not one of {', '.join(DAEMONS)}")


def _capabilities() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("CapEff:")[2].split()[0], 16)


def ourselves(command: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.cluster", command]
