//! MemoryInfo limits of the process, from /proc/meminfo and control groups.

use std::fmt;
use std::path::{Path, PathBuf};

/// Displays bytes in human-readable units.
pub(super) struct Readable(pub(super) u64);

impl fmt::Display for Readable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0x4000_0000.. => write!(out, "{:.2} GiB", bytes / f64::from(1 << 30)),
            0x10_0000.. => write!(out, "{:.1} MiB", bytes / f64::from(1 << 20)),
            _ => write!(out, "{} bytes", self.0),
        }
    }
}

/// Total and available memory of this process in bytes: the machine's or, if less, its control groups'.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryInfo {
    pub(super) total: u64,
    pub(super) available: u64,
}

/// Reads the memory limits; `None` if the system does not report them.
pub(super) fn memory_info() -> Option<MemoryInfo> {
    let machine = parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(group_files(&groups).fold(machine, |memory, (limit, usage)| {
        let bytes = |path: &Path| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let Some(limit) = bytes(&limit) else { return memory };
        let free = limit.saturating_sub(bytes(&usage).unwrap_or(0));
        MemoryInfo { total: memory.total.min(limit), available: memory.available.min(free) }
    }))
}

fn parse_meminfo(text: &str) -> Option<MemoryInfo> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
    };
    Some(MemoryInfo { total: field("MemTotal:")?, available: field("MemAvailable:")? })
}

/// Returns limit and usage files of the process's control groups and their ancestors, for cgroup v1 and v2.
fn group_files(groups: &str) -> impl Iterator<Item = (PathBuf, PathBuf)> + '_ {
    groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        let (root, limit, usage) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            _ => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        };
        let relevant = controllers.is_empty() || controllers.split(',').any(|name| name == "memory");
        let levels = Path::new(path).ancestors().filter(move |_| relevant);
        levels.map(move |level| {
            let folder = Path::new(root).join(level.strip_prefix("/").unwrap_or(level));
            (folder.join(limit), folder.join(usage))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_those_of_the_machine_and_all_ancestor_cgroups() {
        let machine = "MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(parse_meminfo(machine), Some(MemoryInfo { total: 2 << 20, available: 1 << 20 }));
        assert_eq!(parse_meminfo("MemTotal: many\n"), None);
        let files = |groups| group_files(groups).map(|(limit, _)| limit).collect::<Vec<_>>();
        let levels =
            ["/sys/fs/cgroup/a/b/memory.max", "/sys/fs/cgroup/a/memory.max", "/sys/fs/cgroup/memory.max"];
        assert_eq!(files("0::/a/b\n"), levels.map(PathBuf::from));
        let first =
            ["/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        assert_eq!(files("3:cpu,cpuacct:/y\n4:memory:/x\n"), first.map(PathBuf::from));
        let here = memory_info().expect("this is Linux");
        assert!(here.available <= here.total && here.total > 0);
    }
}
