//! `--step-target`, `--slo-ttft` and `--slo-gap`.

use std::fmt;
use std::str::FromStr;

use inflight_worker::{LatencyObjectives, StepTarget};

use crate::exit::{CommandError, Exit};
use crate::worker::EngineArgs;
use inflight_options::Span;

/// Value of `--step-target`: `auto`, `off` or a duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepTargetArg {
    /// A multiple of the decodes' time.
    Auto,
    /// No target.
    Off,
    /// A duration.
    Fixed(Span),
}

impl FromStr for StepTargetArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => text.parse().map(Self::Fixed).map_err(|error| format!("{error}, or auto, or off")),
        }
    }
}

impl fmt::Display for StepTargetArg {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => out.write_str("auto"),
            Self::Off => out.write_str("off"),
            Self::Fixed(target) => target.fmt(out),
        }
    }
}

impl EngineArgs {
    /// Returns the step target of the options.
    ///
    /// # Errors
    /// An objective beside a target that is not `auto`, which would have no effect.
    pub fn step_target(&self) -> Result<StepTarget, CommandError> {
        let objectives = LatencyObjectives {
            first_token: self.slo_ttft.map(|objective| objective.0),
            gap: self.slo_gap.map(|objective| objective.0),
        };
        let given = objectives != LatencyObjectives::default();
        match self.step_target {
            StepTargetArg::Auto => Ok(StepTarget::Adaptive(objectives)),
            target if given => {
                let message = format!("--slo-ttft and --slo-gap need --step-target auto, not {target}");
                Err(CommandError::new(Exit::Usage, message))
            }
            StepTargetArg::Off => Ok(StepTarget::Unbounded),
            StepTargetArg::Fixed(target) => Ok(StepTarget::Fixed(target.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_target_is_auto_off_or_a_duration() {
        for text in ["auto", "off", "250ms"] {
            assert_eq!(text.parse::<StepTargetArg>().unwrap().to_string(), text);
        }
        assert!("fast".parse::<StepTargetArg>().unwrap_err().contains("auto"));
    }
}
