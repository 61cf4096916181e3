"""System call numbers, and the calls that a box may make.

The numbers are the kernel's ABI and never change; new ones are only ever added. The tables are
complete up to Linux 6.18. A number that is in no table is treated as newer than we are (see
`seccomp`), so a table that is too short refuses too much, never too little.
"""


def _numbered(rows: str) -> dict[str, int]:
    """Parse a table: each row is a number, and the names of it and of those that follow."""
    table: dict[str, int] = {}
    for row in rows.splitlines():
        first, *names = row.split()
        table.update((name, number) for number, name in enumerate(names, int(first)))
    return table


# Since Linux 5.1 a new call gets the same number on every architecture.
_EVERYWHERE = """\
424 pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen
431 fsconfig fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2
440 process_madvise epoll_pwait2 mount_setattr quotactl_fd landlock_create_ruleset
445 landlock_add_rule landlock_restrict_self memfd_secret process_mrelease futex_waitv
450 set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake futex_wait
456 futex_requeue statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal
463 setxattrat getxattrat listxattrat removexattrat open_tree_attr file_getattr file_setattr
"""

X86_64 = _numbered(
    """\
0   read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction
14  rt_sigprocmask rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield
25  mremap msync mincore madvise shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm
38  setitimer getpid sendfile socket connect accept sendto recvfrom sendmsg recvmsg shutdown bind
50  listen getsockname getpeername socketpair setsockopt getsockopt clone fork vfork execve exit
61  wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock fsync
75  fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink
88  symlink readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage
99  sysinfo times ptrace getuid syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp
112 setsid setreuid setregid getgroups setgroups setresuid getresuid setresgid getresgid getpgid
122 setfsuid setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo
130 rt_sigsuspend sigaltstack utime mknod uselib personality ustat statfs fstatfs sysfs getpriority
141 setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler
146 sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall
152 munlockall vhangup modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot
162 sync acct settimeofday mount umount2 swapon swapoff reboot sethostname setdomainname iopl
173 ioperm create_module init_module delete_module get_kernel_syms query_module quotactl nfsservctl
181 getpmsg putpmsg afs_syscall tuxcall security gettid readahead setxattr lsetxattr fsetxattr
191 getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr
199 fremovexattr tkill time futex sched_setaffinity sched_getaffinity set_thread_area io_setup
207 io_destroy io_getevents io_submit io_cancel get_thread_area lookup_dcookie epoll_create
214 epoll_ctl_old epoll_wait_old remap_file_pages getdents64 set_tid_address restart_syscall
220 semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun timer_delete
227 clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill
235 utimes vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive
244 mq_notify mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set ioprio_get
253 inotify_init inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat fchownat
261 futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6
271 ppoll unshare set_robust_list get_robust_list splice tee sync_file_range vmsplice move_pages
280 utimensat epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime
288 accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev
297 rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init fanotify_mark prlimit64
303 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu process_vm_readv
311 process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom
319 memfd_create kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2
328 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq uretprobe uprobe
"""
    + _EVERYWHERE
)

# arm64 uses asm-generic, with the optional renameat, getrlimit, setrlimit and memfd_secret, and the
# 64-bit name wherever 32-bit and 64-bit kernels share a number (79 is newfstatat, 222 is mmap).
AARCH64 = _numbered(
    """\
0   io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr
9   lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr
17  getcwd lookup_dcookie eventfd2 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1
27  inotify_add_watch inotify_rm_watch ioctl ioprio_set ioprio_get flock mknodat mkdirat unlinkat
36  symlinkat linkat renameat umount2 mount pivot_root nfsservctl statfs fstatfs truncate ftruncate
47  fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat fchown openat close vhangup
59  pipe2 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv pwritev
71  sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync
83  fdatasync sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat acct capget
91  capset personality exit exit_group waitid set_tid_address unshare futex set_robust_list
100 get_robust_list nanosleep getitimer setitimer kexec_load init_module delete_module timer_create
108 timer_gettime timer_getoverrun timer_settime timer_delete clock_settime clock_gettime
114 clock_getres clock_nanosleep syslog ptrace sched_setparam sched_setscheduler sched_getscheduler
121 sched_getparam sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max
126 sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack
133 rt_sigsuspend rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo
139 rt_sigreturn setpriority getpriority reboot setregid setgid setreuid setuid setresuid getresuid
149 setresgid getresgid setfsuid setfsgid times setpgid getpgid getsid setsid getgroups setgroups
160 uname sethostname setdomainname getrlimit setrlimit getrusage umask prctl getcpu gettimeofday
170 settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid sysinfo mq_open
181 mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd
190 semget semctl semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept
203 connect getsockname getpeername sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg
213 readahead brk munmap mremap add_key request_key keyctl clone execve mmap fadvise64 swapon
225 swapoff mprotect msync mlock munlock mlockall munlockall mincore madvise remap_file_pages mbind
236 get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo perf_event_open accept4
243 recvmmsg
260 wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime
267 syncfs setns sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr
275 sched_getattr renameat2 seccomp getrandom memfd_create bpf execveat userfaultfd membarrier
284 mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents
293 rseq kexec_file_load
"""
    + _EVERYWHERE
)

# Docker's unconditional list, without what programs of agents do not need, but attackers use:
# ptrace, process_vm_*, modify_ldt, memfd_secret, vmsplice, name_to_handle_at, io_setup, and all
# that needs a capability. Added are the mempolicy calls, which numpy and the JVM probe. Some calls
# are allowed only with certain arguments: `seccomp.CHECKED` says which. x86_64 has all of them.
_ALLOWED = """
accept accept4 access alarm arch_prctl bind brk cachestat capget chdir chmod chown clock_getres
clock_gettime clock_nanosleep clone close close_range connect copy_file_range creat dup dup2 dup3
epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64
fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr
flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue futex_wait
futex_waitv futex_wake futimesat get_mempolicy get_robust_list get_thread_area getcpu getcwd
getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid
getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt
gettid gettimeofday getuid getxattr getxattrat inotify_add_watch inotify_init inotify_init1
inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_submit ioctl ioprio_get
ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr
link linkat listen listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat madvise
map_shadow_stack mbind membarrier memfd_create mincore mkdir mkdirat mknod mknodat mlock mlock2
mlockall mmap mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap
mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep newfstatat open openat
pause personality pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll
ppoll prctl pread64 preadv preadv2 prlimit64 pselect6 pwrite64 pwritev pwritev2 read readahead
readlink readlinkat readv recvfrom recvmmsg recvmsg removexattr removexattrat rename renameat
renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield
seccomp select semctl semget semop semtimedop sendfile sendmmsg sendmsg sendto set_mempolicy
set_robust_list set_thread_area set_tid_address setgid setgroups setitimer setpgid setpriority
setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr setxattrat shmat
shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 socket socketpair splice stat statfs
statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime
timerfd_settime times tkill truncate umask uname unlink unlinkat unshare utime utimensat utimes
vfork wait4 waitid write writev
"""
ALLOWED = frozenset(_ALLOWED.split())
