//! Distributions of prompt and output lengths.

use std::fmt;
use std::str::FromStr;

use inflight_traces::SplitMix64;

/// Maximum length in tokens: beyond the context of any model.
const TOKENS_MAX: u32 = 16 << 20;

/// Distribution of lengths in tokens, written `128`, `100..200` or `lognormal:mean=115,sigma=0.8,max=500`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lengths {
    /// Constant length.
    Fixed(u32),
    /// Uniform distribution between minimum and maximum, both inclusive.
    Uniform(u32, u32),
    /// Log-normal distribution, clamped to `max`.
    Lognormal {
        /// Mean in tokens, before clamping.
        mean: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
        /// Maximum in tokens.
        max: u32,
    },
}

impl Lengths {
    /// Samples a length of at least 1. The number of random bits used does not depend on the result.
    pub fn sample(&self, random: &mut SplitMix64) -> u32 {
        match *self {
            Self::Fixed(tokens) => tokens,
            Self::Uniform(min, max) => min + (random.unit() * (f64::from(max - min) + 1.0)) as u32,
            Self::Lognormal { mean, sigma, max } => {
                let tokens = (mean.ln() - sigma * sigma / 2.0 + sigma * random.normal()).exp();
                // The conversion saturates: a length beyond u32 is clamped to `max`, too.
                (tokens.round() as u32).clamp(1, max)
            }
        }
    }
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            "write a number of tokens (128), a range (100..200) or lognormal:mean=115,sigma=0.8,max=500"
                .to_owned()
        };
        let tokens = |text: &str| {
            let number: u32 = text.trim().parse().map_err(|_| wrong())?;
            let fits = (1..=TOKENS_MAX).contains(&number);
            fits.then_some(number).ok_or_else(|| format!("a length is from 1 to {TOKENS_MAX} tokens"))
        };
        if let Some(fields) = text.strip_prefix("lognormal:") {
            let (mut mean, mut sigma, mut max) = (None, None, TOKENS_MAX);
            for field in fields.split(',') {
                match field.split_once('=').ok_or_else(wrong)? {
                    ("mean", value) => mean = value.parse::<f64>().ok().filter(|mean| *mean >= 1.0),
                    ("sigma", value) => {
                        sigma = value.parse::<f64>().ok().filter(|s| (0.0..=10.0).contains(s))
                    }
                    ("max", value) => max = tokens(value)?,
                    _ => return Err(wrong()),
                }
            }
            let mean = mean.filter(|mean| mean.is_finite()).ok_or("the mean is a number of at least 1")?;
            let sigma = sigma.ok_or("sigma is a number from 0 to 10")?;
            return Ok(Self::Lognormal { mean, sigma, max });
        }
        match text.split_once("..") {
            Some((min, max)) => {
                let (min, max) = (tokens(min)?, tokens(max)?);
                if min > max {
                    return Err(format!("the range {text} is empty"));
                }
                Ok(Self::Uniform(min, max))
            }
            None => tokens(text).map(Self::Fixed),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(tokens) => tokens.fmt(out),
            Self::Uniform(min, max) => write!(out, "{min}..{max}"),
            Self::Lognormal { mean, sigma, max } if *max == TOKENS_MAX => {
                write!(out, "lognormal:mean={mean},sigma={sigma}")
            }
            Self::Lognormal { mean, sigma, max } => {
                write!(out, "lognormal:mean={mean},sigma={sigma},max={max}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_parse_and_round_trip_through_their_text() {
        for text in ["128", "100..200", "lognormal:mean=115,sigma=0.8,max=500", "lognormal:mean=60.5,sigma=1"]
        {
            let lengths: Lengths = text.parse().unwrap();
            assert_eq!(lengths.to_string(), text);
        }
        for text in
            ["", "0", "-1", "9..3", "lognormal:", "lognormal:mean=5", "lognormal:mean=nan,sigma=1", "many"]
        {
            assert!(text.parse::<Lengths>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_lognormal_distribution_has_its_mean_and_is_clamped_to_its_maximum() {
        let lengths: Lengths = "lognormal:mean=100,sigma=0.8,max=500".parse().unwrap();
        let mut random = SplitMix64::new(7);
        let drawn: Vec<u32> = (0..50_000).map(|_| lengths.sample(&mut random)).collect();
        let mean = drawn.iter().map(|tokens| f64::from(*tokens)).sum::<f64>() / drawn.len() as f64;
        assert!((95.0..101.0).contains(&mean), "{mean}");
        assert_eq!(drawn.iter().max(), Some(&500));
        let uniform = Lengths::Uniform(3, 5);
        let mut samples: Vec<u32> = (0..100).map(|_| uniform.sample(&mut random)).collect();
        samples.sort_unstable();
        samples.dedup();
        assert_eq!(samples, [3, 4, 5]);
    }
}
