//! Seeded random numbers and order statistics.

/// SplitMix64 random number generator.
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a uniform number in (0, 1).
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Returns a lognormal number, rounded and clamped to `within`.
    pub fn lognormal(&mut self, median: f64, sigma: f64, within: (u32, u32)) -> u32 {
        let (u, v) = (self.unit(), self.unit());
        let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
        ((median * (sigma * normal).exp()).round() as u32).clamp(within.0, within.1)
    }

    /// Returns `len` uniform token ids below `vocab`.
    pub fn tokens(&mut self, len: u32, vocab: u32) -> Vec<u32> {
        (0..len).map(|_| (self.next() % u64::from(vocab)) as u32).collect()
    }
}

/// Returns the nearest-rank quantile; 0 for no values.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or_default()
}

/// Returns the median of one result over runs.
pub fn median<T>(runs: &[T], figure: impl Fn(&T) -> f64) -> f64 {
    quantile(&runs.iter().map(figure).collect::<Vec<_>>(), 0.5)
}

/// Returns the one-minute load average, or "unknown".
pub fn machine_load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().filter(|load| !load.is_empty()).unwrap_or("unknown").to_owned()
}
