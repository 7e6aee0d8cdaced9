//! CPUs that threads are pinned to, one pool each.

#[cfg(target_os = "linux")]
mod linux {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    /// CPUs that nobody else claims while this lives.
    ///
    /// A claim is an abstract socket named after the CPU: the operating system knows who holds it, and lets go of it when
    /// the process ends, however it ends.
    pub(in super::super) struct Claim {
        cpus: Vec<usize>,
        _held: Vec<UnixDatagram>,
    }

    impl Claim {
        /// Claims `count` of the CPUs that this thread may run on; `None` if so many are not left.
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

        /// Keeps the calling thread on the claim's CPU number `index`.
        pub(in super::super) fn pin(&self, index: usize) {
            // SAFETY: the set is plain data, and the CPU is one that `sched_getaffinity` named. A refusal leaves the
            // thread where it was.
            unsafe {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(self.cpus[index], &mut set);
                libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
            }
        }
    }

    fn allowed() -> Vec<usize> {
        // SAFETY: the set is plain data of the size given.
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
mod elsewhere {
    /// There is no claiming here: threads go where the operating system puts them.
    pub(in super::super) struct Claim;

    impl Claim {
        pub(in super::super) fn new(_count: usize) -> Option<Self> {
            None
        }

        pub(in super::super) fn pin(&self, _index: usize) {}
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) use elsewhere::Claim;
#[cfg(target_os = "linux")]
pub(super) use linux::Claim;
