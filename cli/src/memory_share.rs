//! Division of the host's memory among the workers of `inflight up`.

use std::ffi::OsString;

use inflight_worker::{ComputeOptions, Device};

/// Part of a worker's share of the memory for its pools; the rest is for weights and buffers.
const POOLS_PART: u64 = 2;
/// Minimum default size of a pool in bytes.
const POOL_BYTES_MIN: u64 = 16 << 20;

/// Pool of a worker.
struct PoolSize {
    /// Flag of the size.
    flag: &'static str,
    /// Size in bytes.
    bytes: u64,
    /// Whether the user gave the size.
    given: bool,
}

/// Returns flags that divide the host's memory among the workers' pools; `given` has the flags of the user, whose
/// sizes stay.
pub fn flags(compute: &ComputeOptions, given: &[OsString], workers: usize) -> Vec<OsString> {
    let limit = inflight_worker::host_memory_limit().unwrap_or(u64::MAX);
    let pool = |flag: &'static str, bytes| {
        let given = given.iter().any(|argument| argument.to_string_lossy().starts_with(flag));
        PoolSize { flag, bytes, given }
    };
    let pools = [
        pool("--kv-cache-bytes", compute.kv_cache_bytes),
        pool("--host-cache-bytes", compute.host_cache_bytes),
    ];
    match compute.device {
        // A simulated device has no pools.
        Device::Sim(_) => Vec::new(),
        Device::Auto | Device::Cpu | Device::Cuda(_) => pool_flags(&pools, workers, limit),
    }
}

/// Returns flags that shrink the pools whose size was not given, so that the pools of `workers` workers take at
/// most half of `limit` bytes; none if they fit.
fn pool_flags(pools: &[PoolSize], workers: usize, limit: u64) -> Vec<OsString> {
    let share = limit / workers.max(1) as u64 / POOLS_PART;
    let sum =
        |given: bool| pools.iter().filter(|pool| pool.given == given).map(|pool| pool.bytes).sum::<u64>();
    let (given, defaults) = (sum(true), sum(false));
    let left = share.saturating_sub(given);
    if defaults <= left {
        return Vec::new();
    }
    let scaled = |bytes: u64| u128::from(bytes) * u128::from(left) / u128::from(defaults);
    let sizes = pools.iter().filter(|pool| !pool.given).map(|pool| {
        let bytes = u64::try_from(scaled(pool.bytes)).unwrap_or(u64::MAX).max(POOL_BYTES_MIN);
        OsString::from(format!("{}={bytes}", pool.flag))
    });
    sizes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pools(kv: (u64, bool), host: (u64, bool)) -> [PoolSize; 2] {
        let pool = |flag, (bytes, given)| PoolSize { flag, bytes, given };
        [pool("--kv-cache-bytes", kv), pool("--host-cache-bytes", host)]
    }

    #[test]
    fn default_pools_shrink_until_those_of_all_workers_take_half_of_the_memory() {
        let defaults = || pools((1 << 30, false), (256 << 20, false));
        assert_eq!(pool_flags(&defaults(), 2, 5 << 30), Vec::<OsString>::new());
        let flags = pool_flags(&defaults(), 4, 5 << 30);
        assert_eq!(flags, ["--kv-cache-bytes=536870912", "--host-cache-bytes=134217728"], "half of each");
        let tiny = pool_flags(&defaults(), 256, 1 << 30);
        assert_eq!(tiny, ["--kv-cache-bytes=16777216", "--host-cache-bytes=16777216"]);
    }

    #[test]
    fn a_pool_whose_size_was_given_keeps_it() {
        let given = pools((1 << 30, true), (256 << 20, false));
        assert_eq!(pool_flags(&given, 2, 5 << 30), Vec::<OsString>::new());
        assert_eq!(pool_flags(&given, 4, 9 << 30), ["--host-cache-bytes=134217728"]);
        assert!(pool_flags(&pools((1 << 40, true), (1 << 40, true)), 4, 1 << 30).is_empty());
    }
}
