"""`hutch doctor`: test the isolation of this machine, and say how to improve it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tempfile
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from hutch import __version__, factory
from hutch import operations as op
from hutch.errors import HutchError
from hutch.images.store import data_dir
from hutch.server.trees import sees_what_moves
from hutch.server.volumes import obstacle
from hutch.settings.reading import load
from hutch.types import GRADES, Layer, Report, Status, plain

from . import FAILED
from .boxes import open_box
from .options import Parser, make_parser
from .program import Launcher, run_to_end
from .screen import RED, coloured, visible

WIDTH = 80
NAME, STATUS = 19, 10
MEASURED = "measured, not enforced by the kernel"
COLOURS = {Status.ACTIVE: "32", Status.DEGRADED: "33", Status.MISSING: "31"}


def build_parser() -> Parser:
    parser = make_parser(
        "hutch doctor",
        "hutch doctor [--backend NAME] [--json]",
        "Try each layer of isolation on this machine, and show which hold, why others\n"
        "do not, and the command that would fix them. Nothing is changed, except that\n"
        "--backend docker removes containers whose owner is dead, and --backend\n"
        "kubernetes makes its network policies, and three Pods that it removes.",
        "exit codes: 0 if boxes can be made here (grade ns or better), 1 if not; 125 for\n"
        "a wrong option.",
    )
    parser.add_argument(
        "--backend",
        default="",
        metavar="NAME",
        help=f"what makes the boxes: {', '.join(factory.NAMES)} (default: "
        "HUTCH_BACKEND, or namespaces)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    code = run_to_end(_examine(args.backend or factory.default(), as_json=args.json))
    return 1 if code == FAILED else code


async def _examine(name: str, *, as_json: bool) -> int:
    backend = factory.backend(name)
    try:
        report = await backend.report()
    finally:
        await backend.close()
    if name == "namespaces":
        report = await _with_boundaries(report)
    report = replace(report, layers=(*report.layers, _quotas()))
    if as_json:
        print(json.dumps({"version": __version__, **plain(report)}, indent=2))
    else:
        print(render(report, colour=_wants_colour()))
    return 0 if GRADES.index(report.grade) >= GRADES.index("ns") else 1


async def _with_boundaries(report: Report) -> Report:
    if report.grade == "none":
        why = "could not be tried: no box can be made"
        return replace(report, layers=(*report.layers, Layer(BOUNDARIES, Status.MISSING, why)))
    boundaries = await try_boundaries()
    grade = "none" if boundaries.status is Status.MISSING else report.grade
    return replace(report, grade=grade, layers=(*report.layers, boundaries))


def _quotas() -> Layer:
    """How a server on this machine would enforce quotas of workspaces."""
    folder = data_dir()
    try:
        is_kernel = load(folder, {}).settings.workspace_quota_mode == "kernel"
    except HutchError:
        is_kernel = False  # `hutch serve` reports what is wrong with the settings
    while not folder.exists():
        folder = folder.parent
    name = "workspace quotas"
    try:
        with tempfile.TemporaryDirectory() as place:
            why_not = obstacle(Path(place))
    except OSError as exc:
        why_not = exc.strerror or str(exc)
    if is_kernel and why_not:
        fix = 'or set workspace.quota_mode = "measured"'
        return Layer(name, Status.MISSING, f"no kernel quotas: {why_not}", fix, required=False)
    if is_kernel:
        return Layer(
            name, Status.ACTIVE, "enforced by the kernel, in new workspaces", required=False
        )
    can = "cannot be enforced" if why_not else 'could be: workspace.quota_mode = "kernel"'
    if sees_what_moves(folder):
        why = f"{MEASURED} ({can}); removed files that are open and moved ones count"
        return Layer(name, Status.ACTIVE, why, required=False)
    why = f"{MEASURED} ({can}); files that are moved about may be missed"
    fix = "run the server as root" if os.geteuid() else ""
    return Layer(name, Status.DEGRADED, why, fix, required=False)


def _wants_colour() -> bool:
    return coloured("x", RED) != "x"


def render(report: Report, *, colour: bool) -> str:
    """A table of 80 columns, a line that sums it up, and fixes without which no box can be made.

    A fix that several layers share is printed once.
    """
    missing = [lay for lay in report.layers if lay.required and lay.status is Status.MISSING]
    printed = {layer.fix for layer in missing}
    rows = []
    for layer in report.layers:
        rows += _row(layer, colour=colour)
        if layer.fix not in printed:
            rows += _fix(layer.fix)
            printed.add(layer.fix)
    fixes = [row for fix in dict.fromkeys(layer.fix for layer in missing) for row in _fix(fix)]
    return "\n".join([*rows, "", _summary(report), *fixes])


def _row(layer: Layer, *, colour: bool) -> list[str]:
    status = layer.status.value.ljust(STATUS)
    if colour:
        status = f"\x1b[{COLOURS[layer.status]}m{status}\x1b[0m"
    first, *more = textwrap.wrap(visible(layer.why), WIDTH - NAME - STATUS) or [""]
    return [layer.name.ljust(NAME) + status + first, *(" " * (NAME + STATUS) + m for m in more)]


def _fix(text: str) -> list[str]:
    rows = []
    for number, line in enumerate(visible(text).splitlines()):
        rows += _folded("  fix: " if number == 0 else "       ", line)
    return rows


def _folded(before: str, line: str) -> list[str]:
    """A long command, split into lines with trailing backslashes."""
    parts = textwrap.wrap(
        line,
        WIDTH - len(before) - 2,
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent="  ",
    )
    indent = " " * len(before)
    ends = [" \\"] * (len(parts) - 1) + [""]
    return [
        (indent if number else before) + part + end
        for number, (part, end) in enumerate(zip(parts, ends, strict=True))
    ]


def _summary(report: Report) -> str:
    missing = [lay.name for lay in report.layers if lay.required and lay.status is Status.MISSING]
    weak = [lay.name for lay in report.layers if lay.status is not Status.ACTIVE]
    if missing:
        text = f"Do not use boxes here (grade none): {', '.join(missing)} missing."
    elif weak:
        text = f"Boxes can be made here (grade {report.grade}). Could be better: {', '.join(weak)}."
    else:
        text = f"Boxes can be made here (grade {report.grade}). Nothing is missing."
    return "\n".join(textwrap.wrap(text, WIDTH))


# --- boundaries --------------------------------------------------------------------------
#
# Quick checks of a box's isolation, run inside a throw-away box. Not a proof: tests/security is.
# They show whether isolation works on this machine, today.

BOUNDARIES = "boundaries"
CHECKS_TIMEOUT = 30  # seconds

# Each check is a harmless command that succeeds if isolation fails. If it needs a program that
# not every machine has, that comes first. $file and $token belong to the host.
CHECKS = """\
need - "files of this machine"     test -e "$file"
need - "password hashes"           test -e /etc/shadow
need - "home folders"              eval 'ls -A /root | grep .'
need - "the Docker socket"         eval 'test -e /run/docker.sock || test -e /var/run/docker.sock'
need - "devices of this machine"   eval 'ls /dev | grep -E "^(sd|vd|nvme|mem$|kvm$|fuse$)"'
need - "processes outside"         finds "$token" /proc/[0-9]*/cmdline
need - "environment outside"       finds "$token" /proc/[0-9]*/environ
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
# `finds` counts what grep prints: grep fails if a process ended before its file was read, whatever
# it found in others. Its arguments are expanded before it is started, so it does not find itself.
SCRIPT = """\
file=$1 token=$2$3 panic=/proc/sys/kernel/panic
finds() { grep -l "$@" | grep .; }
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
        async with asyncio.timeout(CHECKS_TIMEOUT), canary() as (file, token):
            return judge(await _ask_a_box(file, token))
    except HutchError as exc:
        return Layer(BOUNDARIES, Status.MISSING, f"could not be tried: {exc}")
    except TimeoutError:
        return Layer(BOUNDARIES, Status.MISSING, f"could not be tried in {CHECKS_TIMEOUT} seconds")


def judge(printed: str) -> Layer:
    """The verdict on what the script printed: one line per check."""
    verdicts = [line.partition(" ")[::2] for line in printed.splitlines()]
    named = {
        wanted: [name for verdict, name in verdicts if verdict == wanted]
        for wanted in ("held", "open", "untried")
    }
    if len(verdicts) != COUNT or sum(map(len, named.values())) != COUNT:
        why = f"could not be tried: {len(verdicts)} of {COUNT} checks answered"
        return Layer(BOUNDARIES, Status.MISSING, why)
    tried = COUNT - len(named["untried"])
    if named["open"]:
        why = f"{len(named['held'])}/{tried} held in a box; open: {', '.join(named['open'])}"
        fix = "please report this, with hutch doctor --json"
        return Layer(BOUNDARIES, Status.MISSING, why, fix)
    untried = f"; not tried: {', '.join(named['untried'])}" if named["untried"] else ""
    return Layer(BOUNDARIES, Status.ACTIVE, f"{tried}/{tried} held in a throw-away box{untried}")


async def _ask_a_box(file: str, token: str) -> str:
    # The token is given in halves: whole, the check would find it in its own arguments.
    words = ("/bin/sh", "-c", PROGRAM, "sh", file, token[:8], token[8:])
    async with open_box(op.OpenSession(), None) as (transport, info):
        program = op.RunProgram(info.id, words, timeout=CHECKS_TIMEOUT)
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
