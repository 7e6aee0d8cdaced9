//! Memory limits of the process: the machine's, and those of its control groups.

use std::fmt;
use std::path::{Path, PathBuf};

/// Displays bytes in human-readable units.
pub struct Readable(pub u64);

impl fmt::Display for Readable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0x100_0000_0000.. => write!(out, "{:.2} TiB", bytes / (1u64 << 40) as f64),
            0x4000_0000.. => write!(out, "{:.2} GiB", bytes / f64::from(1 << 30)),
            0x10_0000.. => write!(out, "{:.1} MiB", bytes / f64::from(1 << 20)),
            _ => write!(out, "{} bytes", self.0),
        }
    }
}

/// Control group that a process's memory is charged to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryGroup {
    /// Namespace in which `path` is valid, such as `cgroup:[4026531835]`; containers usually have their own.
    pub namespace: String,
    /// Path in the hierarchy of the memory controller, such as `/system.slice/inflight.service`.
    pub path: PathBuf,
}

/// Limit of the memory of the processes in a scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Limit in bytes.
    pub bytes: u64,
    /// Control group whose members, those of its descendants included, share the limit; `None`: the machine.
    pub group: Option<PathBuf>,
}

impl MemoryLimit {
    /// Whether the memory of a group in the same namespace counts against the limit.
    pub fn covers(&self, path: &Path) -> bool {
        self.group.as_ref().is_none_or(|group| path.starts_with(group))
    }
}

/// Memory of the host, as far as this process may use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMemory {
    /// Available memory in bytes: the machine's or, if less, what the control groups leave.
    pub available: u64,
    /// All limits: the machine's memory first, then those of the control groups.
    pub limits: Vec<MemoryLimit>,
    /// Control group of this process.
    pub group: MemoryGroup,
}

impl HostMemory {
    /// Reads the limits from `/proc` and the control groups; `None` if the system does not report them.
    pub fn read() -> Option<Self> {
        let (total, available) = parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let namespace = std::fs::read_link("/proc/self/ns/cgroup").unwrap_or_default();
        let namespace = namespace.to_string_lossy().into_owned();
        let mut memory = Self {
            available,
            limits: vec![MemoryLimit { bytes: total, group: None }],
            group: MemoryGroup { namespace, path: PathBuf::from("/") },
        };
        let Some(hierarchy) = Hierarchy::of(&groups) else { return Some(memory) };
        memory.group.path.clone_from(&hierarchy.path);
        // Without a namespace of its own, a container sees its group's files at the root of the hierarchy.
        let mapped = !hierarchy.folder(&hierarchy.path).is_dir();
        let bytes = |path: PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        for level in hierarchy.path.ancestors() {
            let folder = hierarchy.folder(level);
            let Some(limit) = bytes(folder.join(hierarchy.limit)) else { continue };
            // The page cache counts as used, but is reclaimed on demand: weights that were read before are in it.
            let statistics = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
            let used = bytes(folder.join(hierarchy.usage)).unwrap_or(0);
            let used = used.saturating_sub(page_cache_bytes(&statistics));
            memory.available = memory.available.min(limit.saturating_sub(used));
            let group = if mapped { &hierarchy.path } else { level };
            memory.limits.push(MemoryLimit { bytes: limit, group: Some(group.to_owned()) });
        }
        Some(memory)
    }

    /// Returns the lowest of the limits in bytes.
    pub fn limit(&self) -> u64 {
        self.limits.iter().map(|limit| limit.bytes).min().unwrap_or(u64::MAX)
    }
}

/// Returns the bytes of the page cache in a control group's `memory.stat`: of cgroup v1 with descendants, else of v2.
fn page_cache_bytes(statistics: &str) -> u64 {
    let field = |name: &str| {
        let line = statistics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|bytes| bytes.trim().parse::<u64>().ok())
    };
    let of = |name: &str| field(&format!("total_{name}")).or_else(|| field(name)).unwrap_or(0);
    of("inactive_file").saturating_add(of("active_file"))
}

/// Returns total and available bytes of `/proc/meminfo`.
fn parse_meminfo(text: &str) -> Option<(u64, u64)> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
    };
    Some((field("MemTotal:")?, field("MemAvailable:")?))
}

/// Hierarchy of control groups with the memory controller, and the process's place in it.
#[derive(Debug, PartialEq, Eq)]
struct Hierarchy {
    root: &'static str,
    /// Names of the files with a control group's memory limit and memory usage.
    limit: &'static str,
    usage: &'static str,
    /// Path of the process's group.
    path: PathBuf,
}

impl Hierarchy {
    /// Finds the hierarchy in the text of `/proc/self/cgroup`: of cgroup v1 with the controller `memory`, else
    /// of v2.
    fn of(groups: &str) -> Option<Self> {
        let lines = || {
            groups.lines().filter_map(|line| {
                let mut parts = line.splitn(3, ':').skip(1);
                Some((parts.next()?, PathBuf::from(parts.next()?)))
            })
        };
        let v1 = lines().find(|(controllers, _)| controllers.split(',').any(|name| name == "memory"));
        if let Some((_, path)) = v1 {
            let (limit, usage) = ("memory.limit_in_bytes", "memory.usage_in_bytes");
            return Some(Self { root: "/sys/fs/cgroup/memory", limit, usage, path });
        }
        let (_, path) = lines().find(|(controllers, _)| controllers.is_empty())?;
        Some(Self { root: "/sys/fs/cgroup", limit: "memory.max", usage: "memory.current", path })
    }

    /// Returns the folder of a group's files.
    fn folder(&self, group: &Path) -> PathBuf {
        Path::new(self.root).join(group.strip_prefix("/").unwrap_or(group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_unit_that_keeps_them_short() {
        let texts = [1000, 3 << 20, 5 << 29, 100 << 40].map(|bytes| Readable(bytes).to_string());
        assert_eq!(texts, ["1000 bytes", "3.0 MiB", "2.50 GiB", "100.00 TiB"]);
    }

    #[test]
    fn limits_are_those_of_the_machine_and_all_ancestor_cgroups() {
        let machine = "MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(parse_meminfo(machine), Some((2 << 20, 1 << 20)));
        assert_eq!(parse_meminfo("MemTotal: many\n"), None);
        let v1 = "inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 40\n";
        assert_eq!([page_cache_bytes(v1), page_cache_bytes("active_file 2\ninactive_file 1\n")], [70, 3]);
        assert_eq!(page_cache_bytes("inactive_file_x 5\n"), 0);
        let files = |groups| {
            let hierarchy = Hierarchy::of(groups).unwrap();
            let levels = hierarchy.path.ancestors();
            levels.map(|level| hierarchy.folder(level).join(hierarchy.limit)).collect::<Vec<_>>()
        };
        let levels =
            ["/sys/fs/cgroup/a/b/memory.max", "/sys/fs/cgroup/a/memory.max", "/sys/fs/cgroup/memory.max"];
        assert_eq!(files("0::/a/b\n"), levels.map(PathBuf::from));
        let first =
            ["/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        assert_eq!(files("0::/z\n3:cpu,cpuacct:/y\n4:memory:/x\n"), first.map(PathBuf::from));
        assert_eq!(Hierarchy::of(""), None);
        let here = HostMemory::read().expect("this is Linux");
        assert!(here.available <= here.limit() && here.limit() > 0);
    }

    #[test]
    fn a_limit_covers_its_group_and_descendants_and_the_machine_covers_all() {
        let limit = |group: Option<&str>| MemoryLimit { bytes: 1, group: group.map(PathBuf::from) };
        for (group, path, covered) in [
            (None, "/a", true),
            (Some("/"), "/a", true),
            (Some("/a"), "/a", true),
            (Some("/a"), "/a/b", true),
            (Some("/a"), "/ab", false),
            (Some("/a/b"), "/a", false),
        ] {
            assert_eq!(limit(group).covers(Path::new(path)), covered, "{group:?} {path}");
        }
    }
}
