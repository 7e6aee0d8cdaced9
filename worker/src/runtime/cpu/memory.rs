use std::fmt;
use std::path::{Path, PathBuf};

/// A number of bytes as people read it.
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

/// Bytes of memory that this process may use in all, and those that are free right now: the machine's or, if less,
/// its control group's. `None` where the system does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) total: u64,
    pub(super) available: u64,
}

pub(super) fn memory() -> Option<Memory> {
    let machine = parse_machine(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(group_files(&groups).fold(machine, |memory, (limit, usage)| {
        let number = |path: &Path| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let Some(limit) = number(&limit) else { return memory };
        let free = limit.saturating_sub(number(&usage).unwrap_or(0));
        Memory { total: memory.total.min(limit), available: memory.available.min(free) }
    }))
}

fn parse_machine(text: &str) -> Option<Memory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
    };
    Some(Memory { total: field("MemTotal:")?, available: field("MemAvailable:")? })
}

/// Files with limit and usage of the process's control group and of those above it, in both versions.
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
    fn the_machine_and_every_group_above_the_process_count() {
        let machine = "MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(parse_machine(machine), Some(Memory { total: 2 << 20, available: 1 << 20 }));
        assert_eq!(parse_machine("MemTotal: many\n"), None);
        let files = |groups| group_files(groups).map(|(limit, _)| limit).collect::<Vec<_>>();
        let levels =
            ["/sys/fs/cgroup/a/b/memory.max", "/sys/fs/cgroup/a/memory.max", "/sys/fs/cgroup/memory.max"];
        assert_eq!(files("0::/a/b\n"), levels.map(PathBuf::from));
        let first =
            ["/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        assert_eq!(files("3:cpu,cpuacct:/y\n4:memory:/x\n"), first.map(PathBuf::from));
        let here = memory().expect("this is Linux");
        assert!(here.available <= here.total && here.total > 0);
    }
}
