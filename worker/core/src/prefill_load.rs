//! Prefill load: the device time that prompts take per device time of decodes.

use std::time::Duration;

/// Estimator of the ratio of prefill time to decode time, from decayed sums over recent steps, and of the
/// prefill time that a step with decodes should have.
///
/// Let `r` be the ratio: prompts need `r` seconds for each second of decodes, whatever the schedule. If a
/// step adds up to `k` times its decode time of prefill, a share `r / k` of the steps must be mixed, and
/// prompts wait as at a server with that utilization. So `k` must exceed `r`, and with `k` at several times
/// `r` prompts hardly wait for each other; larger values only lengthen the gaps. A prompt that computes takes
/// `1 + 1 / k` times as long as alone, which is little from `k = 3` on. So `k` is the larger of 3 and
/// `HEADROOM * r`. A single long prompt raises `r` although no other waits for it, so beyond the minimum, `k` is
/// bounded by the number of prompts.
///
/// If `r` is small, prompts are rare: a single prompt in one long step makes about 1 % of the gaps long, so it does not
/// determine their P99, and chunks would only make more gaps long. So a single prompt is computed in one step if that step
/// has at most `ALONE_SHARE / r` times its decode time of prefill.
///
/// Few long steps do not change the P99 of the gaps but finish prompts earlier, so a share of the steps may be
/// longer: each step earns a part of a credit, and a longer one costs a whole one. Only large prompts may spend credits,
/// since they have the highest TTFT and the most chunks. The minimum size adapts to the load: it grows with each credit
/// spent and shrinks while the credits are at their maximum.
#[derive(Debug, Clone)]
pub struct PrefillLoad {
    /// Decayed time of prefills in seconds.
    prefill_s: f64,
    /// Decayed time of decodes in seconds.
    decode_s: f64,
    /// Credits for longer steps.
    credits: f64,
    /// Minimum remaining prefill time, per decode time, of a prompt that may spend a credit.
    longer_min: f64,
}

impl Default for PrefillLoad {
    fn default() -> Self {
        Self { prefill_s: 0.0, decode_s: 0.0, credits: 0.0, longer_min: Self::FACTOR_LONGER / 2.0 }
    }
}

impl PrefillLoad {
    /// Prefill time per decode time of a step at low load.
    pub const FACTOR_MIN: f64 = 3.0;
    /// Minimum prefill time per decode time of a step with a single prompt.
    pub const FACTOR_ALONE: f64 = 2.7;
    /// `ALONE_SHARE / r` is the prefill time per decode time up to which a single prompt is computed in one step.
    pub const ALONE_SHARE: f64 = 0.6;
    /// Maximum prefill time per decode time of a step.
    pub const FACTOR_MAX: f64 = 8.0;
    /// Prefill time per decode time over the ratio of both on average: mixed steps are then at most a share of
    /// `1 / HEADROOM` of all.
    pub const HEADROOM: f64 = 3.3;
    /// Prefill time per decode time that each prompt beyond the second may add.
    pub const FACTOR_PER_PROMPT: f64 = 2.0;
    /// Prefill time per decode time of a longer step.
    pub const FACTOR_LONGER: f64 = 12.0;
    /// Share of the steps that may be longer; below 0.01, so that the P99 of the gaps does not change.
    pub const LONGER_SHARE: f64 = 0.009;
    /// Factor on the minimum size of prompts that may spend a credit, for each credit spent.
    const LONGER_GROWTH: f64 = 1.25;
    /// The same for each step with the maximum number of credits.
    const LONGER_DECAY: f64 = 0.99;
    /// Maximum number of credits for longer steps.
    pub const CREDITS_MAX: f64 = 2.0;
    /// Time constant in steps.
    const WINDOW: f64 = 256.0;

    /// Observes a step, of which `prefill_share` was the share of its prefills.
    pub fn observe(&mut self, took: Duration, prefill_share: f64) {
        let (took, keep) = (took.as_secs_f64(), 1.0 - 1.0 / Self::WINDOW);
        self.prefill_s = keep * self.prefill_s + took * prefill_share;
        self.decode_s = keep * self.decode_s + took * (1.0 - prefill_share);
    }

    /// Returns true if a step may be longer for a single prompt whose remaining prefill takes `needed` times the decode
    /// time. Steps with several prompts are never longer: each prompt would gain little, and more than 1 % of the gaps would
    /// be long.
    pub fn may_be_longer(&self, needed: f64) -> bool {
        self.credits >= 1.0 && needed >= self.longer_min
    }

    /// Earns the part of a credit of a step with decodes, and spends one if the step is longer.
    pub fn spend(&mut self, longer: bool) {
        self.credits += Self::LONGER_SHARE;
        if longer {
            self.credits -= 1.0;
            self.longer_min = (self.longer_min * Self::LONGER_GROWTH).min(Self::FACTOR_LONGER);
        } else if self.credits >= Self::CREDITS_MAX {
            self.credits = Self::CREDITS_MAX;
            self.longer_min = (self.longer_min * Self::LONGER_DECAY).max(Self::FACTOR_ALONE);
        }
    }

    /// Returns the prefill time per decode time.
    pub fn ratio(&self) -> f64 {
        if self.prefill_s > 0.0 { self.prefill_s / self.decode_s.max(1e-9) } else { 0.0 }
    }

    /// Returns the prefill time per decode time for a step while `prompts` prompts compute or wait.
    pub fn factor(&self, prompts: u32) -> f64 {
        let needed = (Self::HEADROOM * self.ratio()).min(Self::FACTOR_PER_PROMPT * f64::from(prompts));
        let min = if prompts <= 1 { Self::FACTOR_ALONE } else { Self::FACTOR_MIN };
        needed.clamp(min, Self::FACTOR_MAX)
    }

    /// Returns the prefill time per decode time up to which a single prompt is computed in one step.
    pub fn factor_undivided(&self) -> f64 {
        (Self::ALONE_SHARE / self.ratio().max(1e-3)).min(Self::FACTOR_MAX)
    }
}
