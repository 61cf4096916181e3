"""The system call filter of a box: the policy, and its translation for the kernel.

A policy is a decision tree. An int is a verdict, `BpfLoad` fetches a part of the call, `BpfBranch`
compares what was fetched last. `assemble` writes any such tree as classic BPF, the only language
for seccomp filters. Three properties of it shape what is below:

* It sees registers, never memory. A call that takes its arguments by pointer (clone3, openat2)
  cannot be checked, so it fails with ENOSYS, and every libc falls back to the older call.
* It sees 64-bit registers where the kernel reads an int. We look at the low half only, as the
  kernel does. A filter that compares all 64 bits can be bypassed by setting a bit in the upper half
  (CVE-2019-10063).
* It runs on every call that the kernel cannot clear beforehand. Since 5.11, the kernel finds out
  once which numbers are allowed whatever the arguments, and lets them through by a bitmap. Other
  calls, and all calls on older kernels, take seven comparisons to their verdict, not 290.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .syscalls import AARCH64, ALLOWED, X86_64

NATIVE = os.uname().machine

# The kernel's ids of ABIs, and our tables of their calls. An i386 program on x86_64 makes calls of
# another ABI, which have other numbers.
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
TABLES = {"x86_64": X86_64, "aarch64": AARCH64}

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
NOTIFY = 0x7FC00000  # ask the listener, which answers EPERM: see guest/denials.py
EPERM, ENOSYS, EAFNOSUPPORT, EPROTONOSUPPORT, EOPNOTSUPP = (
    0x00050000 | code
    for code in (
        errno.EPERM,
        errno.ENOSYS,
        errno.EAFNOSUPPORT,
        errno.EPROTONOSUPPORT,
        errno.EOPNOTSUPP,
    )
)

_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter: operation, jump if, jump if not, value
_LOAD, _AND, _JUMP, _RETURN = 0x20, 0x54, 0x05, 0x06
EQUALS, AT_LEAST, HAS_ANY_OF = 0x15, 0x35, 0x45

# Offsets in struct seccomp_data. Both of our architectures are little-endian: the low half of an
# argument comes first.
_NUMBER, _ARCH = 0, 4
_ARGUMENT = (16, 24, 32, 40, 48, 56)


class BpfLoad(NamedTuple):
    """Fetch 32 bits of the call, keep those in `mask`, and go on to `then`."""

    offset: int
    then: "Node"
    mask: int = 0xFFFFFFFF


class BpfBranch(NamedTuple):
    """Go on to `yes` if what was fetched last EQUALS, is AT_LEAST or HAS_ANY_OF `value`."""

    question: int
    value: int
    yes: "Node"
    no: "Node"


Node = int | BpfLoad | BpfBranch


def _one_of(values: Iterable[int], yes: Node, no: Node) -> Node:
    for value in values:
        no = BpfBranch(EQUALS, value, yes, no)
    return no


def _any_bit(argument: int, bits: int, yes: Node, no: Node) -> Node:
    return BpfLoad(_ARGUMENT[argument], BpfBranch(HAS_ANY_OF, bits, yes, no))


def _no_set_id(mode: int) -> Node:
    """Refuse to give a file the set-user-ID or set-group-ID bit; `mode` is the argument's index.

    Files of a workspace are on the host, and belong to a user of the host. In the box the bits
    have no effect (no_new_privs); on the host they would let everyone run the box's program as
    that user. mkdir needs no check, as the kernel drops both bits.
    """
    return _any_bit(mode, 0o6000, EPERM, ALLOW)


def _no_set_id_if_created(flags: int, mode: int) -> Node:
    # O_CREAT, and the one bit that only O_TMPFILE has. Without them the kernel ignores the mode:
    # a program need not pass one, and then the register has an arbitrary value.
    return _any_bit(flags, 0o100 | 0o20000000, _no_set_id(mode), ALLOW)


# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. CLONE_NEWTIME is not among
# them: its bit is part of the exit signal in clone, and means a namespace only in unshare.
_NEW_NAMESPACES = 0x7E020000

# CLONE_FS, CLONE_FILES, CLONE_SYSVSEM: what unshare may undo. This is an allowlist, because
# unshare still gets new flags: UNSHARE_EMPTY_MNTNS takes the bit of CLONE_PARENT_SETTID.
_NOT_NAMESPACES = 0x00000200 | 0x00000400 | 0x00040000

_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16

# (INET, PACKET) is an old spelling of AF_PACKET, which the kernel still accepts. The type
# shares its argument with SOCK_CLOEXEC and SOCK_NONBLOCK, hence the mask.
_SOCK_RAW, _SOCK_PACKET, _SOCK_TYPE_MASK = 3, 10, 0xF

# INET is allowed although a box may have no interface but lo, as programs test their servers on
# localhost. The network namespace decides what it can reach. Only these protocols are allowed: the
# default, ICMP, TCP, UDP, ICMPv6 and MPTCP. For others (SCTP, DCCP, L2TP, UDP-Lite), the call would
# load a module into the kernel. NETLINK is allowed for ROUTE (0) only, which getaddrinfo and node's
# networkInterfaces use; its other protocols are attack surface.
_INET_PROTOCOLS = (0, 1, 6, 17, 58, 262)


def _not_raw(then: Node) -> Node:
    raw = _one_of((_SOCK_RAW, _SOCK_PACKET), yes=EPERM, no=then)
    return BpfLoad(_ARGUMENT[1], raw, mask=_SOCK_TYPE_MASK)


def _protocols(allowed: Iterable[int]) -> Node:
    return BpfLoad(_ARGUMENT[2], _one_of(allowed, yes=ALLOW, no=EPROTONOSUPPORT))


_NETWORK_SOCKET = _one_of(
    (_AF_INET, _AF_INET6),
    yes=_not_raw(_protocols(_INET_PROTOCOLS)),
    no=BpfBranch(EQUALS, _AF_NETLINK, yes=_protocols((0,)), no=EAFNOSUPPORT),
)
_SOCKET = BpfLoad(
    _ARGUMENT[0], BpfBranch(EQUALS, _AF_UNIX, yes=_not_raw(ALLOW), no=_NETWORK_SOCKET)
)

# SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF and _REUSEPORT_EBPF: programs that the kernel compiles.
# It has 264 to 528 MB for those of all users together, including the filters of new boxes.
_SOL_SOCKET, _ATTACH = 1, (26, 50, 51, 52)

# The first two put input into a terminal, which a program outside of the box may read next. The
# third makes the kernel load drivers for old modems (CVE-2017-2636 in N_HDLC).
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423

# PER_LINUX and PER_LINUX32, each with and without UNAME26, and the query; the same as in Docker.
# Others turn off address randomisation or make every readable page executable.
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)

# If a box has only one uid, its guest has the same as user code. A limit of no open files, or the
# lowest priority, would silence the guest permanently. So these calls cannot be used on the guest,
# which is pid 1, or on all processes of a user; and a process can change only its own limits.
_GUEST, _PRIO_USER, _IOPRIO_WHO_USER = 1, 2, 3


def _not_the_guest(pid: int) -> Node:
    return BpfLoad(_ARGUMENT[pid], BpfBranch(EQUALS, _GUEST, EPERM, ALLOW))


def _not_of_a_user(which: int) -> Node:
    return BpfLoad(_ARGUMENT[0], BpfBranch(EQUALS, which, EPERM, _not_the_guest(1)))


# Allocating beyond the end of a file (KEEP_SIZE alone) is not limited by RLIMIT_FSIZE, so it could
# fill the host's disk through a file of the host. Allowed: plain, PUNCH_HOLE with KEEP_SIZE,
# COLLAPSE_RANGE, ZERO_RANGE and INSERT_RANGE.
_FALLOCATE = (0x0, 0x3, 0x8, 0x10, 0x20)


CHECKED: dict[str, Node] = {
    "fallocate": BpfLoad(_ARGUMENT[1], _one_of(_FALLOCATE, ALLOW, EOPNOTSUPP)),
    "clone": _any_bit(0, _NEW_NAMESPACES, EPERM, ALLOW),
    "unshare": _any_bit(0, 0xFFFFFFFF ^ _NOT_NAMESPACES, EPERM, ALLOW),
    "socket": _SOCKET,
    "socketpair": BpfLoad(_ARGUMENT[0], BpfBranch(EQUALS, _AF_UNIX, ALLOW, EAFNOSUPPORT)),
    "setsockopt": BpfLoad(
        _ARGUMENT[1],
        BpfBranch(
            EQUALS, _SOL_SOCKET, BpfLoad(_ARGUMENT[2], _one_of(_ATTACH, EPERM, ALLOW)), ALLOW
        ),
    ),
    "ioctl": BpfLoad(_ARGUMENT[1], _one_of((_TIOCSTI, _TIOCLINUX, _TIOCSETD), EPERM, ALLOW)),
    "personality": BpfLoad(_ARGUMENT[0], _one_of(_PERSONALITIES, ALLOW, EPERM)),
    "prlimit64": BpfLoad(_ARGUMENT[0], BpfBranch(EQUALS, 0, ALLOW, EPERM)),
    "setpriority": _not_of_a_user(_PRIO_USER),
    "ioprio_set": _not_of_a_user(_IOPRIO_WHO_USER),
    "sched_setaffinity": _not_the_guest(0),
    "sched_setattr": _not_the_guest(0),
    "sched_setparam": _not_the_guest(0),
    "sched_setscheduler": _not_the_guest(0),
    "chmod": _no_set_id(1),
    "fchmod": _no_set_id(1),
    "fchmodat": _no_set_id(2),
    "fchmodat2": _no_set_id(2),
    "creat": _no_set_id(1),
    "mknod": _no_set_id(1),
    "mknodat": _no_set_id(2),
    "open": _no_set_id_if_created(1, 2),
    "openat": _no_set_id_if_created(2, 3),
}

# Refused as if the kernel were older, because then programs fall back instead of giving up.
# io_setup is refused because it uses up fs.aio-max-nr, a small limit for the whole machine.
ABSENT = frozenset(
    {"clone3", "openat2", "io_setup", "io_uring_setup", "io_uring_enter", "io_uring_register"}
)


# For a program in the host's network namespace, where everyone can reach abstract sockets. A pair
# of streams is allowed, as it stays connected; one of datagrams could be connected elsewhere.
_SOCK_STREAM = 1
_NO_UNIX_SOCKETS: dict[str, Node] = {
    "socket": BpfLoad(_ARGUMENT[0], _NETWORK_SOCKET),
    "socketpair": BpfLoad(
        _ARGUMENT[0],
        BpfBranch(
            EQUALS,
            _AF_UNIX,
            yes=BpfLoad(
                _ARGUMENT[1], BpfBranch(EQUALS, _SOCK_STREAM, ALLOW, EPERM), mask=_SOCK_TYPE_MASK
            ),
            no=EAFNOSUPPORT,
        ),
    ),
}


# Refused calls that no ordinary program makes, but one that tries to escape does: reported where
# that is possible. The guest, which answers them, must never make one itself: it would wait for its
# own answer. Calls that programs probe and fall back from (ABSENT) are not worth reporting.
_REPORTED = """
acct add_key bpf chroot clock_settime delete_module fanotify_init finit_module fsconfig fsmount
fsopen fspick init_module ioperm iopl kcmp kexec_file_load kexec_load keyctl memfd_secret
modify_ldt mount mount_setattr move_mount name_to_handle_at open_by_handle_at open_tree
perf_event_open pidfd_getfd pivot_root process_madvise process_vm_readv process_vm_writev ptrace
quotactl reboot request_key setdomainname sethostname setns settimeofday swapoff swapon syslog
umount2 userfaultfd
"""
REPORTED = frozenset(_REPORTED.split())
_REPORTED_IF_REFUSED = ("clone", "unshare")  # into new namespaces


def build(arch: str = NATIVE, *, unix_sockets: bool = True, report: bool = False) -> bytes:
    """The filter of a box on `arch`, for `install`; with `report`, for `install_reporting`.

    Without `unix_sockets`, it refuses sockets of AF_UNIX, but for pairs of streams.

    A call of another ABI kills the process: it is an attack, or a binary that cannot run here. A
    number that we know and do not allow gives EPERM; one that we do not know gives ENOSYS, so that
    a libc newer than this table falls back. Raises ValueError for an architecture without a table.
    """
    if arch not in TABLES:
        raise ValueError(f"no system call table for {arch}, only for {' and '.join(TABLES)}")
    checked = CHECKED if unix_sockets else CHECKED | _NO_UNIX_SOCKETS
    calls = BpfLoad(_NUMBER, _search(_ranges(TABLES[arch], checked, report)))
    return assemble(BpfLoad(_ARCH, BpfBranch(EQUALS, AUDIT_ARCH[arch], yes=calls, no=KILL_PROCESS)))


def reported(arch: str = NATIVE) -> dict[int, str]:
    """The calls that a reporting filter leaves to its listener: names by number."""
    return {number: name for name, number in TABLES[arch].items() if _is_reported(name)}


def _is_reported(name: str) -> bool:
    return name in REPORTED or name in _REPORTED_IF_REFUSED


def _reporting(node: Node) -> Node:
    """The same decisions, but the listener answers what was EPERM."""
    if isinstance(node, BpfLoad):
        return node._replace(then=_reporting(node.then))
    if isinstance(node, BpfBranch):
        return node._replace(yes=_reporting(node.yes), no=_reporting(node.no))
    return NOTIFY if node == EPERM else node


def _verdict(name: str, checked: dict[str, Node], report: bool) -> Node:
    if name in ABSENT:
        return ENOSYS
    verdict = checked.get(name, ALLOW) if name in ALLOWED else EPERM
    return _reporting(verdict) if report and _is_reported(name) else verdict


def _ranges(
    table: dict[str, int], checked: dict[str, Node], report: bool
) -> list[tuple[int, Node]]:
    """Where the verdict changes: each (first number, verdict) holds until the next one.

    The last one is for everything above the table, including x32, which starts at 0x40000000.
    """
    verdicts = {number: _verdict(name, checked, report) for name, number in table.items()}
    ranges: list[tuple[int, Node]] = []
    for number in range(max(verdicts) + 2):
        verdict = verdicts.get(number, ENOSYS)
        if not ranges or ranges[-1][1] != verdict:
            ranges.append((number, verdict))
    return ranges


def _search(ranges: Sequence[tuple[int, Node]]) -> Node:
    """A binary search for the range of a number."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    return BpfBranch(
        AT_LEAST, ranges[middle][0], yes=_search(ranges[middle:]), no=_search(ranges[:middle])
    )


def assemble(root: Node) -> bytes:
    """Write a decision tree as BPF. Equal subtrees are written once."""
    # Last instruction first: BPF only jumps forward, so the target of a jump is always written
    # before the jump, and there are no addresses to fill in later.
    backwards: list[bytes] = []
    written: dict[Node, int] = {}

    def emit(operation: int, value: int, yes: int = 0, no: int = 0) -> None:
        backwards.append(_INSTRUCTION.pack(operation, yes, no, value))

    def distance(node: Node) -> int:
        return len(backwards) - written[node] - 1

    def write(node: Node) -> None:
        if isinstance(node, int):
            emit(_RETURN, node)
        elif isinstance(node, BpfLoad):
            write(node.then)  # even if it exists: execution continues right after a load
            if node.mask != 0xFFFFFFFF:
                emit(_AND, node.mask)
            emit(_LOAD, node.offset)
        else:
            bring_near(node.yes)
            bring_near(node.no)
            bring_near(node.yes)  # again, as `no` may have been long
            emit(node.question, node.value, distance(node.yes), distance(node.no))

    def bring_near(node: Node) -> None:
        """Make sure that the next branch can reach the node: its distances are one byte each."""
        if node not in written:
            write(node)
        elif distance(node) < 255:
            return
        elif isinstance(node, int):
            emit(_RETURN, node)
        else:
            emit(_JUMP, distance(node))
        written[node] = len(backwards) - 1

    write(root)
    return b"".join(reversed(backwards))


_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_TSYNC = 1
_SECCOMP_FILTER_FLAG_NEW_LISTENER = 8

_libc = ctypes.CDLL(None, use_errno=True)


def install(program: bytes) -> None:
    """Apply the filter to every thread of this process, and to all that it will ever start.

    Nothing removes it, neither exec nor root. Raises OSError, which names the step; then no thread
    is filtered, but no_new_privs may be set already.
    """
    # Without TSYNC, other threads that are already running would silently stay unfiltered.
    outside = _install(program, _SECCOMP_FILTER_FLAG_TSYNC)
    if outside < 0:
        raise _failed("seccomp")
    if outside:
        raise OSError(errno.EBUSY, f"seccomp: thread {outside} has a filter of its own")


def install_reporting(program: bytes) -> int:
    """Like `install`, for a reporting filter. Returns the descriptor of its listener.

    -1 if there can be no listener (before Linux 5.0, below a filter that has one, or with several
    threads): then the filter itself refuses what it would report. Raises OSError as `install` does.
    """
    # A listener and TSYNC exclude each other before Linux 5.7, so there must be one thread only.
    if len(os.listdir("/proc/self/task")) == 1:
        listener = _install(program, _SECCOMP_FILTER_FLAG_NEW_LISTENER)
        if listener >= 0:
            return listener
    install(_without_reports(program))
    return -1


def _without_reports(program: bytes) -> bytes:
    notify, refuse = (_INSTRUCTION.pack(_RETURN, 0, 0, verdict) for verdict in (NOTIFY, EPERM))
    instructions = (program[at : at + len(notify)] for at in range(0, len(program), len(notify)))
    return b"".join(refuse if item == notify else item for item in instructions)


def _install(program: bytes, flags: int) -> int:
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        raise _failed("no_new_privs")
    instructions = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions, and their address.
    header = struct.pack("@HP", len(program) // _INSTRUCTION.size, ctypes.addressof(instructions))
    return int(
        _libc.syscall(
            ctypes.c_long(TABLES[NATIVE]["seccomp"]),
            ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER),
            ctypes.c_ulong(flags),
            header,
        )
    )


def _failed(step: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{step}: {os.strerror(code)}")
