"""What a box may ask of the kernel, said twice: by the filter, and here in plain words."""

import ctypes
import errno
import itertools
import mmap
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bpf import LONGEST, evaluate

from hutch.backends.linux import seccomp
from hutch.backends.linux.syscalls import AARCH64, ALLOWED, X86_64

ALLOW = 0x7FFF0000
KILL = 0x80000000
I386, ARM = 0x40000003, 0x40000028

TABLES = {"x86_64": X86_64, "aarch64": AARCH64}
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PROGRAMS = {name: seccomp.build(name) for name in TABLES}

# The policy from its other side: every name not here is allowed, at least with some arguments.
_REFUSED = """
    _sysctl acct add_key adjtimex afs_syscall bpf capset chroot clock_adjtime clock_settime
    create_module delete_module fanotify_init fanotify_mark file_getattr file_setattr finit_module
    fsconfig fsmount fsopen fspick get_kernel_syms getpmsg init_module ioperm iopl kcmp
    kexec_file_load kexec_load keyctl listmount lookup_dcookie lsm_get_self_attr lsm_list_modules
    lsm_set_self_attr memfd_secret migrate_pages modify_ldt mount mount_setattr move_mount
    move_pages name_to_handle_at nfsservctl open_by_handle_at open_tree open_tree_attr
    perf_event_open pidfd_getfd pivot_root process_madvise process_mrelease process_vm_readv
    process_vm_writev ptrace putpmsg query_module quotactl quotactl_fd reboot remap_file_pages
    request_key security set_mempolicy_home_node setdomainname setfsgid setfsuid sethostname setns
    settimeofday statmount swapoff swapon sysfs syslog tuxcall umount2 uprobe uretprobe uselib
    userfaultfd ustat vhangup vmsplice vserver
"""
REFUSED = frozenset(_REFUSED.split())
PRETENDED_ABSENT = {
    "clone3", "openat2", "io_setup", "io_uring_setup", "io_uring_enter", "io_uring_register"
}  # fmt: skip

CLONE = {
    "VM": 0x100, "FS": 0x200, "FILES": 0x400, "SIGHAND": 0x800, "VFORK": 0x4000, "THREAD": 0x10000,
    "SYSVSEM": 0x40000, "SETTLS": 0x80000, "PARENT_SETTID": 0x100000, "CHILD_CLEARTID": 0x200000,
}  # fmt: skip
CLONE_NEW = {
    "TIME": 0x80, "NS": 0x20000, "CGROUP": 0x2000000, "UTS": 0x4000000, "IPC": 0x8000000,
    "USER": 0x10000000, "PID": 0x20000000, "NET": 0x40000000,
}  # fmt: skip
A_THREAD = sum(CLONE.values()) - CLONE["VFORK"]

INET_PROTOCOLS = {"ICMP": 1, "TCP": 6, "UDP": 17, "ICMPv6": 58, "MPTCP": 262}
OTHER_PROTOCOLS = {"IGMP": 2, "DCCP": 33, "L2TP": 115, "SCTP": 132, "UDPLITE": 136, "SMC": 256}

O_CREAT, O_TMPFILE, O_CLOEXEC = 0o100, 0o20200000, 0o2000000


def expected(name: str | None, args: tuple[int, ...]) -> int:
    """The policy. A positive number is the errno it answers with, ALLOW is ALLOW."""
    a, b, c, d = args
    set_id = 0o6000
    match name:
        case None:
            return errno.ENOSYS
        case "clone":
            made = set(CLONE_NEW) - {"TIME"}
            return errno.EPERM if any(a & CLONE_NEW[what] for what in made) else ALLOW
        case "unshare":
            fine = {0, CLONE["FS"], CLONE["FILES"], CLONE["SYSVSEM"]}
            return ALLOW if all(a & 1 << bit in fine for bit in range(32)) else errno.EPERM
        case "socket" if a in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
            if b & ~(socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) & 0xF in (socket.SOCK_RAW, 10):
                return errno.EPERM
            fine = a == socket.AF_UNIX or c in (0, *INET_PROTOCOLS.values())
            return ALLOW if fine else errno.EPROTONOSUPPORT
        case "socket" if a == socket.AF_NETLINK:
            return ALLOW if c == 0 else errno.EPROTONOSUPPORT
        case "socket":
            return errno.EAFNOSUPPORT
        case "socketpair":
            return ALLOW if a == socket.AF_UNIX else errno.EAFNOSUPPORT
        case "setsockopt":
            return errno.EPERM if b == 1 and c in (26, 50, 51, 52) else ALLOW
        case "ioctl":
            return errno.EPERM if b in (0x5412, 0x541C, 0x5423) else ALLOW
        case "personality":
            return ALLOW if a in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF) else errno.EPERM
        case "fallocate":
            return ALLOW if b in (0, 3, 8, 16, 32) else errno.EOPNOTSUPP
        case "prlimit64":
            return ALLOW if a == 0 else errno.EPERM
        case "setpriority" | "ioprio_set":
            everything_of_a_user = {"setpriority": 2, "ioprio_set": 3}[name]
            return errno.EPERM if a == everything_of_a_user or b == 1 else ALLOW
        case "sched_setaffinity" | "sched_setattr" | "sched_setparam" | "sched_setscheduler":
            return errno.EPERM if a == 1 else ALLOW
        case "chmod" | "fchmod" | "creat" | "mknod":
            return errno.EPERM if b & set_id else ALLOW
        case "fchmodat" | "fchmodat2" | "mknodat":
            return errno.EPERM if c & set_id else ALLOW
        case "open":
            return errno.EPERM if b & (O_CREAT | 0o20000000) and c & set_id else ALLOW
        case "openat":
            return errno.EPERM if c & (O_CREAT | 0o20000000) and d & set_id else ALLOW
        case _ if name in PRETENDED_ABSENT:
            return errno.ENOSYS
        case _:
            return errno.EPERM if name in REFUSED else ALLOW


def interesting() -> Iterator[tuple[int, int, int, int]]:
    """Arguments at which some rule could change its mind."""
    modes = (0o644, 0o755, 0o1777, 0o2755, 0o4755, 0o6755, 0o100644, 0o104755)
    flags = (0, O_CLOEXEC, O_CREAT | 1, O_TMPFILE | 2)
    alone = {
        *modes, *flags, *CLONE.values(), *CLONE_NEW.values(), A_THREAD, signal.SIGCHLD,
        *range(48), 0x5411, 0x5412, 0x5413, 0x541C, 0x5423, 0x5424, 0x20000, 0x20008, 0x40000,
        0x80000000, 0xFFFFFFFF,
    }  # fmt: skip
    for value, place in itertools.product(alone, range(4)):
        args = [0, 0, 0, 0]
        args[place] = value
        yield args[0], args[1], args[2], args[3]
    for flag, mode in itertools.product(flags, modes):
        yield 0, flag, mode, 0
        yield 0, 0, flag, mode
    extras = (0, socket.SOCK_CLOEXEC, socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    protocols = {*INET_PROTOCOLS.values(), *OTHER_PROTOCOLS.values()}
    for family, kind, extra in itertools.product((1, 2, 10, 16, 17), range(11), extras):
        yield family, kind | extra, 0, 0
        yield family, kind | extra, 9, 0
    for family, protocol in itertools.product((1, 2, 10, 16), sorted(protocols)):
        yield family, socket.SOCK_STREAM, protocol, 0
    for level, option in itertools.product((0, 1, 6, 270), (2, 25, 26, 27, 49, 50, 51, 52, 53)):
        yield 3, level, option, 0
    for which, who in itertools.product(range(4), (0, 1, 2, 1000)):
        yield which, who, 10, 0
    for new in CLONE_NEW.values():
        yield new | signal.SIGCHLD, 0, 0, 0
        yield new | CLONE["FILES"], 0, 0, 0


def answer(program: bytes, nr: int, args: tuple[int, ...], arch: int) -> int:
    """The filter's verdict in the words of `expected`."""
    verdict = evaluate(program, nr, args, arch)
    return verdict & 0xFFFF if verdict & 0xFFFF0000 == 0x00050000 else verdict


@pytest.mark.parametrize("machine", TABLES)
def test_every_number_gets_the_answer_the_policy_states(machine: str) -> None:
    names = {number: name for name, number in TABLES[machine].items()}
    program, arch = PROGRAMS[machine], ARCHES[machine]
    vectors = list(interesting())
    wrong = [
        (nr, names.get(nr), args)
        for nr in range(601)
        for args in vectors
        if answer(program, nr, args, arch) != expected(names.get(nr), args)
    ]
    assert wrong == []


@pytest.mark.parametrize("machine", TABLES)
def test_the_upper_half_of_an_argument_changes_nothing(machine: str) -> None:
    program, arch = PROGRAMS[machine], ARCHES[machine]
    dice = random.Random(0)
    for name in seccomp.CHECKED.keys() & TABLES[machine].keys():
        nr = TABLES[machine][name]
        for args in interesting():
            dirty = tuple(value | dice.getrandbits(32) << 32 for value in args)
            assert evaluate(program, nr, dirty, arch) == evaluate(program, nr, args, arch)


@pytest.mark.parametrize("machine", TABLES)
def test_a_call_of_another_abi_kills_the_process(machine: str) -> None:
    for arch in {0, I386, ARM, *ARCHES.values()} - {ARCHES[machine]}:
        for nr in (0, 20, 172, 2**32 - 1):
            assert evaluate(PROGRAMS[machine], nr, (), arch) == KILL


@pytest.mark.parametrize("machine", TABLES)
def test_x32_and_numbers_from_the_future_look_unimplemented(machine: str) -> None:
    program, arch = PROGRAMS[machine], ARCHES[machine]
    x32 = (0x40000000 | nr for nr in range(600))
    for nr in (*range(470, 1024), *x32, 2**31, 2**32 - 1):
        assert answer(program, nr, (0, 0, 0, 0), arch) == errno.ENOSYS


@pytest.mark.parametrize("machine", TABLES)
def test_the_filter_stays_short(machine: str) -> None:
    # 185 and 175 instructions when this was written; a chain of comparisons took 661.
    assert len(PROGRAMS[machine]) // 8 < 200 < LONGEST


def test_an_architecture_without_a_table_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.build("riscv64")


def test_a_tree_wider_than_a_jump_is_still_walked_right() -> None:
    # Every leaf is a block of its own, so sharing does not help: 700 of them span 2,800
    # instructions, and a branch reaches 255.
    def leaf(nr: int) -> seccomp.Node:
        return seccomp.BpfLoad(16, seccomp.BpfBranch(seccomp.EQUALS, nr, nr, nr + 5000))

    def between(low: int, high: int) -> seccomp.Node:
        if high - low == 1:
            return leaf(low)
        middle = (low + high) // 2
        return seccomp.BpfBranch(
            seccomp.AT_LEAST, middle, yes=between(middle, high), no=between(low, middle)
        )

    program = seccomp.assemble(seccomp.BpfLoad(0, between(0, 700)))
    for nr in range(700):
        assert evaluate(program, nr, (nr,)) == nr
        assert evaluate(program, nr, (nr + 1,)) == nr + 5000


def test_a_verdict_farther_than_a_jump_is_repeated_nearer() -> None:
    chain: seccomp.Node = 1
    for nr in range(300):
        chain = seccomp.BpfBranch(seccomp.EQUALS, nr, 2, chain)
    program = seccomp.assemble(seccomp.BpfLoad(0, chain))
    assert [evaluate(program, nr) for nr in range(300)] == [2] * 300
    assert evaluate(program, 300) == 1


def test_the_lists_name_only_calls_that_exist() -> None:
    assert X86_64.keys() >= ALLOWED
    assert seccomp.CHECKED.keys() <= ALLOWED
    assert X86_64.keys() - ALLOWED >= seccomp.ABSENT


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_no_number_is_given_twice(table: dict[str, int]) -> None:
    assert len(set(table.values())) == len(table)


def test_the_newest_calls_of_linux_6_18_are_known() -> None:
    assert (X86_64["uretprobe"], X86_64["uprobe"]) == (335, 336)
    for table in TABLES.values():
        assert (table["open_tree_attr"], table["file_getattr"]) == (467, 468)
        assert max(table, key=table.__getitem__) == "file_setattr"
        assert table["file_setattr"] == 469


def test_aarch64_has_its_own_numbers_and_none_of_the_legacy_names() -> None:
    numbers = {
        "io_setup": 0, "fcntl": 25, "ioctl": 29, "mknodat": 33, "renameat": 38, "statfs": 43,
        "fstatfs": 44, "truncate": 45, "ftruncate": 46, "fchmod": 52, "fchmodat": 53, "openat": 56,
        "lseek": 62, "read": 63, "write": 64, "sendfile": 71, "newfstatat": 79, "fstat": 80,
        "personality": 92, "unshare": 97, "getrlimit": 163, "getpid": 172, "socket": 198,
        "socketpair": 199, "clone": 220, "execve": 221, "mmap": 222, "fadvise64": 223,
        "wait4": 260, "seccomp": 277, "rseq": 293, "kexec_file_load": 294,
        "pidfd_send_signal": 424, "clone3": 435, "memfd_secret": 447, "fchmodat2": 452,
    }  # fmt: skip
    assert {name: AARCH64[name] for name in numbers} == numbers
    assert not AARCH64.keys() & {"open", "stat", "fork", "pipe", "dup2", "chmod", "arch_prctl"}
    assert AARCH64.keys() <= X86_64.keys()


# What arch/arm64's unistd.h asks of the generic header.
ARM64_WANTS = "RENAMEAT NEW_STAT SET_GET_RLIMIT TIME32_SYSCALLS SYS_CLONE3 MEMFD_SECRET"


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler and kernel headers")
@pytest.mark.parametrize(
    ("table", "source"),
    [
        pytest.param(
            X86_64,
            "#include <asm/unistd.h>\n",
            marks=pytest.mark.skipif(seccomp.NATIVE != "x86_64", reason="x86_64 only"),
        ),
        (
            AARCH64,
            "#include <asm/bitsperlong.h>\n"
            + "".join(f"#define __ARCH_WANT_{what}\n" for what in ARM64_WANTS.split())
            + "#include <asm-generic/unistd.h>\n",
        ),
    ],
    ids=["x86_64", "aarch64"],
)
def test_the_tables_agree_with_the_kernel_headers(table: dict[str, int], source: str) -> None:
    preprocessed = subprocess.run(
        ["cc", "-E", "-dM", "-"], input=source, capture_output=True, text=True
    )
    if preprocessed.returncode:
        pytest.skip("no kernel headers here")
    macros = dict(re.findall(r"#define (__NR\w+) (\w+)", preprocessed.stdout))
    for name in ("__NR_syscalls", "__NR_arch_specific_syscall"):
        macros.pop(name, None)
    numbers: dict[str, int] = {}
    for name, number in macros.items():
        while number in macros:  # __NR_mmap is __NR3264_mmap is 222
            number = macros[number]
        if name.startswith("__NR_") and int(number) <= max(table.values()):
            numbers[name.removeprefix("__NR_")] = int(number)
    assert numbers.items() <= table.items()


# From here on the kernel is asked.

libc = ctypes.CDLL(None, use_errno=True)


def call(nr: int, *args: int | bytes) -> int:
    """Make a system call: 0 if it succeeded, its errno if not."""
    registers = [arg if isinstance(arg, bytes) else ctypes.c_long(arg) for arg in args]
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(nr), *registers) == -1 else 0


def named(name: str, *args: int | bytes) -> int:
    return call(TABLES[seccomp.NATIVE][name], *args)


def in_a_child(body: Callable[[], object], *, filtered: bool = True) -> tuple[int, str]:
    """What `body` returned, as text, in a fork under the filter; and the signal it died of."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if filtered:
                seccomp.install(PROGRAMS[seccomp.NATIVE])
            os.write(writer, repr(body()).encode())
        except BaseException as exc:
            os.write(writer, repr(exc).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as output:
        said = output.read()
    return os.WTERMSIG(os.waitpid(child, 0)[1]), said


def says(body: Callable[[], object]) -> str:
    died_of, said = in_a_child(body)
    assert died_of == 0
    return said


needs_a_table = pytest.mark.skipif(seccomp.NATIVE not in TABLES, reason="no table for this machine")


@needs_a_table
def test_the_filter_is_on_and_cannot_be_shaken_off() -> None:
    def status() -> dict[str, str]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return dict(line.split(":\t") for line in lines if line.startswith(("NoNew", "Seccomp:")))

    assert says(status) == repr({"NoNewPrivs": "1", "Seccomp": "2"})


@needs_a_table
def test_a_thread_that_was_already_running_is_filtered_too() -> None:
    def body() -> list[int]:
        import threading

        installed, answers = threading.Event(), list[int]()

        def late() -> None:
            installed.wait()
            answers.append(named("unshare", CLONE_NEW["USER"]))

        thread = threading.Thread(target=late)
        thread.start()
        seccomp.install(PROGRAMS[seccomp.NATIVE])
        installed.set()
        thread.join()
        return answers

    assert in_a_child(body, filtered=False) == (0, repr([errno.EPERM]))


@needs_a_table
def test_a_filter_the_kernel_refuses_is_an_error_that_names_the_step() -> None:
    died_of, said = in_a_child(lambda: seccomp.install(b"\xff" * 8), filtered=False)
    assert (died_of, said.split("(")[0]) == (0, "OSError")
    assert "seccomp: Invalid argument" in said


@needs_a_table
def test_ordinary_calls_still_work() -> None:
    assert says(lambda: named("getpid")) == "0"
    assert says(lambda: os.getpid() == os.getppid()) == "False"


@needs_a_table
@pytest.mark.parametrize("namespace", CLONE_NEW)
def test_a_box_cannot_make_a_namespace(namespace: str) -> None:
    flag = CLONE_NEW[namespace]
    assert says(lambda: named("unshare", flag)) == repr(errno.EPERM)
    if namespace != "TIME":
        assert says(lambda: named("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)) == repr(errno.EPERM)


@needs_a_table
def test_unsharing_what_is_no_namespace_is_allowed() -> None:
    assert says(lambda: named("unshare", CLONE["FILES"] | CLONE["FS"])) == "0"


@needs_a_table
@pytest.mark.parametrize("name", sorted(PRETENDED_ABSENT))
def test_a_call_that_cannot_be_judged_looks_unimplemented(name: str) -> None:
    assert says(lambda: named(name, 0, 0, 0, 0)) == repr(errno.ENOSYS)


@needs_a_table
def test_a_number_from_the_future_looks_unimplemented() -> None:
    assert says(lambda: call(600)) == repr(errno.ENOSYS)


@needs_a_table
@pytest.mark.parametrize(
    ("family", "kind", "protocol", "result"),
    [
        (socket.AF_UNIX, socket.SOCK_STREAM, 0, 0),
        (socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0, 0),
        (socket.AF_INET, socket.SOCK_DGRAM, 0, 0),
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, 0),
        (socket.AF_INET6, socket.SOCK_DGRAM, socket.IPPROTO_UDP, 0),
        (socket.AF_INET, socket.SOCK_STREAM, OTHER_PROTOCOLS["SCTP"], errno.EPROTONOSUPPORT),
        (socket.AF_INET, socket.SOCK_DGRAM, OTHER_PROTOCOLS["UDPLITE"], errno.EPROTONOSUPPORT),
        (socket.AF_INET6, socket.SOCK_DGRAM, OTHER_PROTOCOLS["L2TP"], errno.EPROTONOSUPPORT),
        (socket.AF_INET, socket.SOCK_RAW, 1, errno.EPERM),
        (socket.AF_INET, 10, 0x0300, errno.EPERM),
        (socket.AF_NETLINK, socket.SOCK_RAW, 0, 0),
        (socket.AF_NETLINK, socket.SOCK_RAW, 16, errno.EPROTONOSUPPORT),
        (socket.AF_PACKET, socket.SOCK_RAW, 0, errno.EAFNOSUPPORT),
        (socket.AF_ALG, socket.SOCK_SEQPACKET, 0, errno.EAFNOSUPPORT),
        (socket.AF_VSOCK, socket.SOCK_STREAM, 0, errno.EAFNOSUPPORT),
    ],
)
def test_a_box_gets_local_and_internet_sockets_only(
    family: int, kind: int, protocol: int, result: int
) -> None:
    assert says(lambda: named("socket", family, kind, protocol)) == repr(result)


@needs_a_table
def test_a_box_cannot_have_the_kernel_compile_a_program() -> None:
    def attempts() -> list[int | None]:
        answers = []
        for option in (26, 50, 51, 52):
            with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError) as refused:
                sock.setsockopt(socket.SOL_SOCKET, option, bytes(16))
            answers.append(refused.value.errno)
        return answers

    assert says(attempts) == repr([errno.EPERM] * 4)


@needs_a_table
def test_a_box_cannot_touch_the_limits_or_the_priority_of_its_guest() -> None:
    def attempts() -> list[int]:
        parent = os.getppid()  # of the same uid: the kernel itself would not mind
        limit = (2**64 - 1).to_bytes(8, "little") * 2
        return [
            named("prlimit64", parent, 7, limit, 0),
            named("setpriority", 2, 0, 19),
            named("setpriority", 0, 1, 19),
            named("ioprio_set", 3, 0, 0),
            named("sched_setscheduler", 1, 5, bytes(4)),
            named("sched_setaffinity", 1, 8, b"\xff" * 8),
        ]

    assert says(attempts) == repr([errno.EPERM] * 6)


@needs_a_table
def test_a_box_can_set_its_own_limits_and_priority() -> None:
    def own() -> tuple[tuple[int, int], int]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        os.setpriority(os.PRIO_PROCESS, 0, 10)
        os.sched_setaffinity(os.getpid(), os.sched_getaffinity(0))
        return resource.getrlimit(resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0)

    assert says(own) == repr(((64, 64), 10))


@needs_a_table
def test_a_box_cannot_type_on_a_terminal_or_load_a_driver_for_it() -> None:
    # On no terminal at all the kernel would say EBADF: it was the filter that answered.
    commands = (0x5412, 0x541C, 0x5423, 0xDEADBEEF_00005412)
    answers = says(lambda: [named("ioctl", -1, command, b"x") for command in commands])
    assert answers == repr([errno.EPERM] * 4)
    assert says(lambda: named("ioctl", -1, 0x5413, 0)) == repr(errno.EBADF)


@needs_a_table
def test_a_box_cannot_make_a_set_id_file(tmp_path: Path) -> None:
    file = tmp_path / "program"
    file.touch()

    def attempts() -> list[int | None]:
        def errno_of(action: Callable[[], object]) -> int | None:
            try:
                action()
            except OSError as exc:
                return exc.errno
            return 0

        here, there = bytes(file), bytes(tmp_path / "new")
        at = -100  # AT_FDCWD
        return [
            errno_of(lambda: file.chmod(0o4755)),
            errno_of(lambda: file.chmod(0o2755)),
            errno_of(lambda: os.fchmod(os.open(file, os.O_RDONLY), 0o4755)),
            named("fchmodat", at, here, 0o4755),
            named("fchmodat2", at, here, 0o4755, 0),
            errno_of(lambda: os.open(there, os.O_CREAT | os.O_WRONLY, 0o4755)),
            errno_of(lambda: os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY, 0o4755)),
            errno_of(lambda: os.mknod(there, 0o104755)),
        ]

    assert says(attempts) == repr([errno.EPERM] * 8)
    assert os.listdir(tmp_path) == ["program"]
    assert file.stat().st_mode & 0o6000 == 0


@needs_a_table
def test_a_box_can_set_every_other_mode(tmp_path: Path) -> None:
    def modes() -> list[str]:
        (tmp_path / "file").touch(0o600)
        (tmp_path / "file").chmod(0o755)
        (tmp_path / "folder").mkdir(0o700)
        (tmp_path / "folder").chmod(0o1777)
        os.mkfifo(tmp_path / "pipe", 0o640)
        return [oct((tmp_path / name).stat().st_mode) for name in ("file", "folder", "pipe")]

    os.umask(os.umask(0o022))
    assert says(modes) == repr(["0o100755", "0o41777", "0o10640"])


@needs_a_table
def test_mkdir_needs_no_rule_because_the_kernel_drops_the_bits(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "folder", 0o6755)
    assert (tmp_path / "folder").stat().st_mode & 0o6000 == 0


@pytest.mark.skipif(seccomp.NATIVE != "x86_64", reason="x86_64 machine code")
def test_a_call_through_the_i386_gate_kills_the_process() -> None:
    def getpid_by_int_80() -> int:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)())

    if in_a_child(getpid_by_int_80, filtered=False)[0]:
        pytest.skip("this kernel runs no i386 code")
    assert in_a_child(getpid_by_int_80) == (signal.SIGSYS, "")


@pytest.mark.skipif(seccomp.NATIVE != "x86_64", reason="only x86_64 has x32")
def test_a_call_as_x32_looks_unimplemented() -> None:
    assert says(lambda: call(0x40000000 | X86_64["getpid"])) == repr(errno.ENOSYS)


@needs_a_table
def test_the_kernel_reads_the_filter_as_we_do() -> None:
    # Arguments of -1 would be refused by every call, so one that got through did no harm.
    program, arch = PROGRAMS[seccomp.NATIVE], ARCHES[seccomp.NATIVE]
    verdicts = {nr: answer(program, nr, (-1,) * 6, arch) for nr in range(601)}
    # Newer kernels let uretprobe and uprobe past every filter: only their own trampolines may
    # make them, anyone else gets SIGILL (seen on 6.18).
    refused = {nr: code for nr, code in verdicts.items() if code != ALLOW and nr not in (335, 336)}
    assert len(refused) > 200
    assert says(lambda: {nr: call(nr, *[-1] * 6) for nr in refused}) == repr(refused)


def run_filtered(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        preexec_fn=lambda: seccomp.install(PROGRAMS[seccomp.NATIVE]),
        capture_output=True,
        text=True,
        timeout=60,
    )


PYTHON = """
import asyncio, multiprocessing, os, socket, sqlite3, subprocess, tempfile, threading

def square(n):
    return n * n

async def echo():
    async def serve(reader, writer):
        writer.write(await reader.readline())
        writer.close()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"localhost\\n")
    return (await reader.readline()).decode().strip()

if __name__ == "__main__":
    said = []
    threads = [threading.Thread(target=said.append, args=("thread",)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        said.append(pool.map(square, range(4)))
    said.append(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip())
    said.append(asyncio.run(echo()))
    with tempfile.NamedTemporaryFile() as file:
        said.append(sqlite3.connect(file.name).execute("select 1").fetchone())
    print(said)
"""


@needs_a_table
def test_python_can_use_threads_processes_and_localhost() -> None:
    done = run_filtered(sys.executable, "-c", PYTHON)
    said = [*["thread"] * 4, [0, 1, 4, 9], "child", "localhost", (1,)]
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{said}\n", "")


@needs_a_table
@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_can_run_a_pipeline_and_a_background_job() -> None:
    script = "seq 10 | grep -v 5 | sort -rn | head -2; cat <(echo hi); sleep 0 & wait $!; echo $?"
    done = run_filtered("bash", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "10\n9\nhi\n0\n", "")


@pytest.mark.parametrize("arch", TABLES)
def test_a_reporting_filter_decides_as_the_plain_one(arch: str) -> None:
    reporting = seccomp.build(arch, report=True)
    fallback = seccomp._without_reports(reporting)
    names, seen = seccomp.reported(arch), set()
    for nr, args in itertools.product(range(520), ((), (0x10000000,), (1 << 31,))):
        plain = evaluate(PROGRAMS[arch], nr, args, ARCHES[arch])
        verdict = evaluate(reporting, nr, args, ARCHES[arch])
        assert evaluate(fallback, nr, args, ARCHES[arch]) == plain
        if verdict == seccomp.NOTIFY:
            assert plain == seccomp.EPERM
            seen.add(names[nr])
        else:
            assert verdict == plain
    assert seen == set(names.values()) >= {"ptrace", "mount", "clone", "unshare"}


def test_no_call_is_reported_that_the_guest_makes_for_its_host() -> None:
    # It would wait for an answer that only it can give: a mode that the host chose, say.
    for name in ("chmod", "fchmod", "fchmodat", "open", "openat", "mknodat", "prlimit64", "socket"):
        assert name not in seccomp.reported().values()
