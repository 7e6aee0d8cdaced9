//! Exclusive assignment of CPUs to pinned thread pools, across processes.

#[cfg(target_os = "linux")]
mod linux {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    /// Set of CPUs that no other process claims while this value lives.
    ///
    /// A claim is an abstract socket named after the CPU: the operating system releases it when the process
    /// ends or crashes.
    pub(in super::super) struct CpuClaim {
        cpus: Vec<usize>,
        _held: Vec<UnixDatagram>,
    }

    impl CpuClaim {
        /// Claims `count` of the CPUs that this thread may run on; `None` if not enough are free.
        pub(in super::super) fn new(count: usize) -> Option<Self> {
            let (mut cpus, mut held) = (Vec::new(), Vec::new());
            for cpu in allowed() {
                if cpus.len() == count {
                    break;
                }
                let name = SocketAddr::from_abstract_name(format!("inflight-cpu-{cpu}")).ok()?;
                if let Ok(socket) = UnixDatagram::bind_addr(&name) {
                    cpus.push(cpu);
                    held.push(socket);
                }
            }
            (cpus.len() == count).then_some(Self { cpus, _held: held })
        }

        /// Pins the calling thread to the claim's CPU number `index`.
        pub(in super::super) fn pin(&self, index: usize) {
            // SAFETY: `cpu_set_t` is plain data, and the CPU index came from `sched_getaffinity`, so it is in
            // range. On failure the thread stays unpinned.
            unsafe {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(self.cpus[index], &mut set);
                libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
            }
        }
    }

    /// Returns the CPUs that this thread may run on.
    fn allowed() -> Vec<usize> {
        // SAFETY: `cpu_set_t` is plain data, and the size passed is its own.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
                return Vec::new();
            }
            (0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &set)).collect()
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod unsupported {
    /// Stub for platforms without CPU pinning.
    pub(in super::super) struct CpuClaim;

    impl CpuClaim {
        pub(in super::super) fn new(_count: usize) -> Option<Self> {
            None
        }

        pub(in super::super) fn pin(&self, _index: usize) {}
    }
}

#[cfg(target_os = "linux")]
pub(super) use linux::CpuClaim;
#[cfg(not(target_os = "linux"))]
pub(super) use unsupported::CpuClaim;
