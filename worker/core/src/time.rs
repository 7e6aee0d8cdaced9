//! Timestamps on the driver's clock.

use std::time::Duration;

/// Timestamp in nanoseconds since a fixed origin chosen by the driver. The core never reads a clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// Origin of the clock.
    pub const ZERO: Self = Self(0);

    /// Creates the timestamp `nanos` nanoseconds after the origin.
    pub fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Returns the nanoseconds since the origin.
    pub fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns this timestamp plus a duration, saturating at `u64::MAX` nanoseconds.
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Returns the duration since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}
