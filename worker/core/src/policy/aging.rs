//! Protection of waiting sequences against starvation, and a policy together with it.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::Duration;

use super::{Fair, Fcfs, PolicyKind, Priority, SchedulingPolicy, StaticBatch};

/// Aging of waiting sequences: parameters of [`Fair`] and [`Priority`]; other policies have none.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct Aging {
    /// Aging of --policy fair: queueing time after which a sequence goes before all that have
    /// waited less, whatever their priorities
    #[arg(
        id = "aging_threshold",
        long = "aging-threshold",
        value_name = "DURATION",
        default_value = "10m",
        value_parser = inflight_options::duration,
        env = "INFLIGHT_WORKER_AGING_THRESHOLD"
    )]
    pub threshold: Duration,
    /// Aging of --policy fair: service, in tokens of weight 1, forgiven per second of queueing
    #[arg(
        id = "aging_tokens_per_second",
        long = "aging-tokens-per-second",
        value_name = "TOKENS",
        default_value_t = 0.0,
        env = "INFLIGHT_WORKER_AGING_TOKENS_PER_SECOND"
    )]
    pub tokens_per_second: f64,
    /// Aging of --policy fair: maximum service forgiven; the fairness bound between two tenants grows by it
    #[arg(
        id = "aging_tokens_max",
        long = "aging-tokens-max",
        value_name = "TOKENS",
        default_value_t = 0.0,
        env = "INFLIGHT_WORKER_AGING_TOKENS_MAX"
    )]
    pub tokens_max: f64,
    /// Aging of --policy priority: queueing time per priority level gained
    #[arg(
        id = "aging_level_every",
        long = "aging-level-every",
        value_name = "DURATION",
        default_value = "10s",
        value_parser = inflight_options::duration,
        env = "INFLIGHT_WORKER_AGING_LEVEL_EVERY"
    )]
    pub level_every: Duration,
    /// Aging of --policy priority: maximum number of levels gained
    #[arg(
        id = "aging_levels_max",
        long = "aging-levels-max",
        value_name = "LEVELS",
        default_value_t = 10,
        env = "INFLIGHT_WORKER_AGING_LEVELS_MAX"
    )]
    pub levels_max: u32,
}

impl Default for Aging {
    fn default() -> Self {
        // Parsed once: recordings of the scheduler compare their options with it.
        static DEFAULT: LazyLock<Aging> = LazyLock::new(inflight_options::defaults);
        *DEFAULT
    }
}

/// A scheduling policy by name, with its parameters.
///
/// As text it is its name, followed by `,NAME=VALUE` for each parameter that is not the default; durations are
/// in nanoseconds. Recordings contain this text.
#[derive(Debug, Clone, Copy, PartialEq, Default, clap::Args)]
pub struct Policy {
    /// Scheduling policy: fair, fcfs, priority or static
    #[arg(
        id = "policy",
        long = "policy",
        value_name = "POLICY",
        default_value_t = PolicyKind::default(),
        env = "INFLIGHT_WORKER_POLICY"
    )]
    pub kind: PolicyKind,
    /// Aging of waiting sequences.
    #[command(flatten)]
    pub aging: Aging,
}

impl From<PolicyKind> for Policy {
    fn from(kind: PolicyKind) -> Self {
        Self { kind, aging: Aging::default() }
    }
}

impl Policy {
    /// Creates the policy.
    pub fn build(self) -> Box<dyn SchedulingPolicy> {
        let Aging { threshold, tokens_per_second, tokens_max, level_every, levels_max } = self.aging;
        match self.kind {
            PolicyKind::Fcfs => Box::new(Fcfs),
            PolicyKind::Priority => Box::new(Priority { level_every, levels_max }),
            PolicyKind::Fair => Box::new(Fair { tokens_per_second, tokens_max, wait_max: threshold }),
            PolicyKind::Static => Box::new(StaticBatch),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (aging, default) = (&self.aging, Aging::default());
        f.write_str(self.kind.name())?;
        if aging.threshold != default.threshold {
            write!(f, ",threshold={}", aging.threshold.as_nanos())?;
        }
        // The shortest decimal that is read as the same number.
        if aging.tokens_per_second != default.tokens_per_second {
            write!(f, ",tokens_per_second={}", aging.tokens_per_second)?;
        }
        if aging.tokens_max != default.tokens_max {
            write!(f, ",tokens_max={}", aging.tokens_max)?;
        }
        if aging.level_every != default.level_every {
            write!(f, ",level_every={}", aging.level_every.as_nanos())?;
        }
        if aging.levels_max != default.levels_max {
            write!(f, ",levels_max={}", aging.levels_max)?;
        }
        Ok(())
    }
}

/// Text that is no [`Policy`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no scheduling policy with its parameters")]
pub struct InvalidPolicy(String);

impl FromStr for Policy {
    type Err = InvalidPolicy;

    fn from_str(text: &str) -> Result<Self, InvalidPolicy> {
        Self::parse(text).ok_or_else(|| InvalidPolicy(text.to_owned()))
    }
}

impl Policy {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(',');
        let mut policy = Self::from(parts.next()?.parse::<PolicyKind>().ok()?);
        let aging = &mut policy.aging;
        for part in parts {
            let (name, value) = part.split_once('=')?;
            let nanoseconds = || value.parse().ok().map(Duration::from_nanos);
            let service = || value.parse::<f64>().ok().filter(|tokens| tokens.is_finite() && *tokens >= 0.0);
            match name {
                "threshold" => aging.threshold = nanoseconds()?,
                "tokens_per_second" => aging.tokens_per_second = service()?,
                "tokens_max" => aging.tokens_max = service()?,
                "level_every" => aging.level_every = nanoseconds()?,
                "levels_max" => aging.levels_max = value.parse().ok()?,
                _ => return None,
            }
        }
        Some(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn policies() -> impl Strategy<Value = Policy> {
        let kinds = prop::sample::select(PolicyKind::ALL.to_vec());
        let nanoseconds = || any::<u64>().prop_map(Duration::from_nanos);
        let aging = (nanoseconds(), 0.0..1e9, 0.0..1e9, nanoseconds(), any::<u32>()).prop_map(
            |(threshold, tokens_per_second, tokens_max, level_every, levels_max)| Aging {
                threshold,
                tokens_per_second,
                tokens_max,
                level_every,
                levels_max,
            },
        );
        (kinds, prop_oneof![Just(Aging::default()), aging]).prop_map(|(kind, aging)| Policy { kind, aging })
    }

    proptest! {
        #[test]
        fn the_text_of_a_policy_is_read_as_the_same_policy(policy in policies()) {
            prop_assert_eq!(policy.to_string().parse::<Policy>(), Ok(policy));
        }
    }

    #[test]
    fn a_policy_with_default_parameters_is_its_name_and_other_text_is_refused() {
        for kind in PolicyKind::ALL {
            assert_eq!(Policy::from(kind).to_string(), kind.name());
        }
        for text in
            ["", "sjf", "fair,", "fair,threshold", "fair,threshold=-1", "fair,tokens_max=NaN", "fair,x=1"]
        {
            assert!(text.parse::<Policy>().is_err(), "{text}");
        }
    }
}
