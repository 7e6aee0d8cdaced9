//! Options of the usage log.

use std::fmt;
use std::str::FromStr;

use inflight_options::bytes;

/// Requests while the usage log cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageLogPolicy {
    /// They are refused.
    Refuse,
    /// They are served; a line that cannot be kept is logged and counted.
    Serve,
}

impl fmt::Display for UsageLogPolicy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Refuse => "refuse",
            Self::Serve => "serve",
        })
    }
}

impl FromStr for UsageLogPolicy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = [Self::Refuse, Self::Serve].into_iter().find(|policy| policy.to_string() == name);
        found.ok_or_else(|| "not refuse or serve".to_owned())
    }
}

/// Files of the usage log beyond its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageLogExcess {
    /// The oldest are removed, collected or not.
    Remove,
    /// All are kept: at the limits the log cannot be written until files are taken away.
    Keep,
}

impl fmt::Display for UsageLogExcess {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Remove => "remove",
            Self::Keep => "keep",
        })
    }
}

impl FromStr for UsageLogExcess {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = [Self::Remove, Self::Keep].into_iter().find(|excess| excess.to_string() == name);
        found.ok_or_else(|| "not remove or keep".to_owned())
    }
}

/// Files of the usage log. By default up to 64 files of 64 MiB, about 10 million requests.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct UsageLogOptions {
    /// Size of a usage file after which a new one is started
    #[arg(
        id = "usage_log_bytes",
        long = "usage-log-bytes",
        value_name = "BYTES",
        default_value = "64MiB",
        value_parser = bytes::<u64>,
        env = "INFLIGHT_ROUTER_USAGE_LOG_BYTES"
    )]
    pub file_bytes_max: u64,
    /// Maximum usage files; --usage-log-excess says what happens beyond them
    #[arg(
        id = "usage_log_files",
        long = "usage-log-files",
        value_name = "N",
        default_value_t = 64,
        env = "INFLIGHT_ROUTER_USAGE_LOG_FILES"
    )]
    pub files_max: usize,
    /// The oldest usage files beyond --usage-log-files: remove, or keep (at --usage-log-files times --usage-log-bytes
    /// the log cannot be written until files are taken away, and --usage-log-on-error decides)
    #[arg(
        id = "usage_log_excess",
        long = "usage-log-excess",
        value_name = "WHAT",
        default_value_t = UsageLogExcess::Remove,
        env = "INFLIGHT_ROUTER_USAGE_LOG_EXCESS"
    )]
    pub excess: UsageLogExcess,
    /// Requests while the usage log cannot be written: refuse, or serve (lost lines are logged and counted)
    #[arg(
        id = "usage_log_on_error",
        long = "usage-log-on-error",
        value_name = "POLICY",
        default_value_t = UsageLogPolicy::Refuse,
        env = "INFLIGHT_ROUTER_USAGE_LOG_ON_ERROR"
    )]
    pub on_error: UsageLogPolicy,
}

impl Default for UsageLogOptions {
    fn default() -> Self {
        inflight_options::defaults()
    }
}
