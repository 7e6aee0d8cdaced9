//! System calls that the process of a request may make: those of memory, of its answer and of its end.

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// Calls of an allocator, of a panic, and of the answer. Anything else fails with "operation not permitted".
const ALLOWED: [i64; 24] = [
    libc::SYS_write,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_tgkill,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_getcwd,
    libc::SYS_restart_syscall,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Returns the filter for this machine; `None` where there is none for its architecture.
pub(crate) fn program() -> Option<BpfProgram> {
    let rules = ALLOWED.iter().map(|call| (*call, Vec::new())).collect::<BTreeMap<_, _>>();
    let (refused, allowed) = (SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow);
    let filter = SeccompFilter::new(rules, refused, allowed, ARCH.try_into().ok()?).ok()?;
    filter.try_into().ok()
}
