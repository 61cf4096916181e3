"""What test_in_a_container.py runs in a container, where there is no pytest.

    python3 in_a_container.py {commands|boxes}

prints one JSON object: what `hutch` commands did there; or what boxes of the SDK were like, and
what the probes of tests/security found in them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from hutch import Sandbox
from hutch.backends.linux import NUMBERS

PROBES = Path("/opt/probes")
TRIES = 3  # an error that depends on who is first would show
OTHER = 1001  # the owner of a folder who is no user of this container
FORKS = "for i in $(seq 600); do sleep 20 & done; wait"


def hutch(*words: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "hutch", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    return {"code": done.returncode, "out": done.stdout, "error": done.stderr}


def commands() -> dict[str, Any]:
    runs = [hutch("run", "--", "id", "-u")]
    while runs[-1]["code"] and len(runs) < TRIES:
        runs.append(hutch("run", "--", "id", "-u"))
    return {"runs": runs, "doctor": hutch("doctor")}


def boxes() -> dict[str, Any]:
    canary = _make_canary()
    found: dict[str, Any] = {}
    for name, owner in (("nothing", None), ("root", 0), ("another", OTHER)):
        options: dict[str, Any] = {}
        folder = Path("/srv", name)
        if owner is not None:
            folder.mkdir(mode=0o700)
            os.chown(folder, owner, owner)
            options = {"workspace": str(folder), "mounts": [f"{_make_gift(folder)}:/srv/gift:ro"]}
        with Sandbox.create(pids=64, **options) as box:
            for path in PROBES.glob("*.py"):
                box.files.write(f"/tmp/probes/{path.name}", path.read_text())
            box.files.write("/tmp/canary.json", json.dumps(canary))
            probed = box.commands.run(["python3", "-m", "probes", "canary.json"], cwd="/tmp")
            search = f"grep -rls {canary['token']} /etc /root /run /srv /canary /dev/shm"
            found[name] = {
                "degraded": box.info.degraded,
                "probes": probed.stdout,
                "secrets": box.commands.run(search).stdout,
                "wrote": box.commands.run("echo new > /workspace/new").exit_code,
                "forked": box.commands.run(FORKS, timeout=10).stderr if owner != 0 else None,
            }
        if owner is not None:
            found[name]["owner"] = (folder / "new").stat().st_uid
    return found


def _make_canary() -> dict[str, Any]:
    """What lies outside of a box: the token in files of root, in a process, behind sockets."""
    token = "canary-" + secrets.token_hex(16)
    Path("/canary").mkdir(mode=0o700)
    files = ("/canary/file", f"/dev/shm/{token}", "/root/secret", "/etc/secret", "/etc/shadow")
    for path in files:
        Path(path).write_text(token)
        os.chmod(path, 0o600)
    sleeper = subprocess.Popen(["sleep", "1000"], env={"CANARY_API_KEY": token})
    port = _listen(socket.AF_INET, ("0.0.0.0", 0))[1]
    for address in ("/run/canary", f"\0{token}"):
        _listen(socket.AF_UNIX, address)
    device = os.stat("/").st_dev
    return {
        "token": token, "file": files[0], "shm_file": files[1], "pid": sleeper.pid, "port": port,
        "address": "127.0.0.1", "unix": "/run/canary", "shm_key": 1, "inside": True,
        "hostname": os.uname().nodename, "numbers": NUMBERS, "gift": "/srv/gift",
        "disk": (os.major(device), os.minor(device)),
    }  # fmt: skip


def _listen(family: int, address: Any) -> Any:
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen(64)
    return socket.socket(fileno=os.dup(listener.detach())).getsockname()


def _make_gift(beside: Path) -> Path:
    """Programs with rights and a device, in a folder that is mounted into a box."""
    folder = beside.with_name(f"gift-{beside.name}")
    folder.mkdir()
    for name in ("set-user-id", "capable"):
        shutil.copy("/bin/sleep", folder / name)
    (folder / "set-user-id").chmod(0o6755)
    chown = struct.pack("<5I", 0x02000001, 1 << 0, 0, 0, 0)  # CAP_CHOWN, permitted and effective
    os.setxattr(folder / "capable", "security.capability", chown)
    os.mknod(folder / "random", 0o020666, os.makedev(1, 9))
    return folder


print(json.dumps({"commands": commands, "boxes": boxes}[sys.argv[1]]()))
