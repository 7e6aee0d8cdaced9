//! Modes of the operator service.

use std::fmt;
use std::str::FromStr;

/// The service for operators: gRPC's `Admin` and, over HTTP, `/ui`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Admin {
    /// Not served.
    #[default]
    Off,
    /// Read-only calls are served; calls that change the cluster are refused.
    ReadOnly,
    /// All calls are served.
    On,
}

impl Admin {
    /// All modes.
    const ALL: [Self; 3] = [Self::Off, Self::ReadOnly, Self::On];
}

impl fmt::Display for Admin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Off => "off",
            Self::ReadOnly => "read-only",
            Self::On => "on",
        })
    }
}

impl FromStr for Admin {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|mode| mode.to_string() == name);
        found.ok_or_else(|| "not off, read-only or on".to_owned())
    }
}
