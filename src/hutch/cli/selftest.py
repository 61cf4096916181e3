"""Quick checks of a box's isolation, run inside a throw-away box.

Not a proof: tests/security is. They show whether isolation works on this machine, today.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hutch import operations as op
from hutch.errors import HutchError
from hutch.types import Layer, Status

from .boxes import open_box

NAME = "boundaries"
TIMEOUT = 30

# Each check is a harmless command that succeeds if isolation fails. If it needs a program that
# not every machine has, that comes first. $file and $token belong to the host.
CHECKS = """\
need - "files of this machine"     test -e "$file"
need - "password hashes"           test -e /etc/shadow
need - "home folders"              eval 'ls -A /root | grep .'
need - "the Docker socket"         eval 'test -e /run/docker.sock || test -e /var/run/docker.sock'
need - "devices of this machine"   eval 'ls /dev | grep -E "^(sd|vd|nvme|mem$|kvm$|fuse$)"'
need - "processes outside"         grep -l "$token" /proc/[0-9]*/cmdline
need - "environment outside"       grep -l "$token" /proc/[0-9]*/environ
need - "environment of the guest"  cat /proc/1/environ
need - "files of the guest"        ls /proc/1/fd/ /proc/1/root/
need - "descriptors outside"       eval 'ls /proc/self/fd | grep -v "^[0-3]$"'
need - "network interfaces"        eval "tail -n +3 /proc/net/dev | grep -Ev '^ *(lo|$down):'"
need - "network routes"            eval 'tail -n +2 /proc/net/route | grep .'
need - "capabilities"              grep -E '^Cap.*:.*[1-9a-f]' /proc/self/status
need - "new privileges"            eval '! grep -E "^NoNewPrivs:.1$" /proc/self/status'
need - "forbidden calls"           eval '! grep -E "^Seccomp:.2$" /proc/self/status'
need - "namespaces in a box"       eval 'grep -v "^0$" /proc/sys/user/max_user_namespaces'
need unshare "user namespaces"     unshare --user true
need mount "mounting"              eval 'mount -t tmpfs none $here && umount $here'
need chroot "another root"         chroot / true
need mknod "device nodes"          eval 'mknod $here/node b 8 0 && rm $here/node'
need chmod "set-user-ID files"     eval 'touch $here/id && chmod u+s $here/id'
need dmesg "kernel messages"       eval 'dmesg | grep .'
need - "kernel settings"           eval 'now=$(cat $panic) && echo $now > $panic'
need - "programs of this machine"  eval 'touch /usr/hutch-doctor && rm /usr/hutch-doctor'
need - "the root folder"           eval 'touch /hutch-doctor && rm /hutch-doctor'
"""
SCRIPT = """\
file=$1 token=$2$3 panic=/proc/sys/kernel/panic
here=$(mktemp -d)
down='tunl0|gre0|gretap0|erspan0|ip_vti0|ip6_vti0|sit0|ip6tnl0|ip6gre0|teql0'
need() {
  tool=$1 name=$2; shift 2
  if [ "$tool" != - ] && ! command -v "$tool" > /dev/null; then echo "untried $name"
  elif ("$@") > /dev/null 2>&1; then echo "open $name"
  else echo "held $name"; fi
}
"""
COUNT = len(CHECKS.splitlines())
PROGRAM = SCRIPT + CHECKS + 'rm -r "$here"\n'


async def try_boundaries() -> Layer:
    """Run the checks in a new box."""
    try:
        async with asyncio.timeout(TIMEOUT), canary() as (file, token):
            return judge(await _ask_a_box(file, token))
    except HutchError as exc:
        return Layer(NAME, Status.MISSING, f"could not be tried: {exc}")
    except TimeoutError:
        return Layer(NAME, Status.MISSING, f"could not be tried in {TIMEOUT} seconds")


def judge(said: str) -> Layer:
    """The verdict on what the script printed: one line per check."""
    verdicts = [line.partition(" ")[::2] for line in said.splitlines()]
    named = {
        verdict: [name for found, name in verdicts if found == verdict]
        for verdict in ("held", "open", "untried")
    }
    if len(verdicts) != COUNT or sum(map(len, named.values())) != COUNT:
        why = f"could not be tried: {len(verdicts)} of {COUNT} checks answered"
        return Layer(NAME, Status.MISSING, why)
    tried = COUNT - len(named["untried"])
    if named["open"]:
        why = f"{len(named['held'])}/{tried} held in a box; open: {', '.join(named['open'])}"
        return Layer(NAME, Status.MISSING, why, "please report this, with hutch doctor --json")
    untried = f"; not tried: {', '.join(named['untried'])}" if named["untried"] else ""
    return Layer(NAME, Status.ACTIVE, f"{tried}/{tried} held in a throw-away box{untried}")


async def _ask_a_box(file: str, token: str) -> str:
    # The token is given in halves: whole, the check would find it in its own arguments.
    words = ("/bin/sh", "-c", PROGRAM, "sh", file, token[:8], token[8:])
    async with open_box(op.OpenSession(), None) as (transport, info):
        program = op.RunProgram(info.id, words, timeout=TIMEOUT)
        return (await transport.perform(program)).stdout


@asynccontextmanager
async def canary() -> AsyncIterator[tuple[str, str]]:
    """A file and a process on the host that a box must not see: the file's name, the token."""
    token = secrets.token_hex(8)
    folder = tempfile.mkdtemp(prefix=f"hutch-{os.getpid()}-")
    file = f"{folder}/canary"
    try:
        os.chmod(folder, 0o755)
        with open(file, "w") as opened:
            opened.write(token)
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            "read line",
            token,
            env={"CANARY": token},
            stdin=asyncio.subprocess.PIPE,
        )
        try:
            yield file, token
        finally:
            process.kill()
            await process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
