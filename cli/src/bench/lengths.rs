//! How many tokens a prompt or an output has.

use std::fmt;
use std::str::FromStr;

use inflight_simulator::workload::Random;

/// Most tokens that a length may ask for: beyond every context.
const TOKENS_MAX: u32 = 16 << 20;

/// A distribution of lengths in tokens: `128`, `100..200`, or `lognormal:mean=115,sigma=0.8,max=500`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lengths {
    /// Always this many.
    Fixed(u32),
    /// From the first up to and including the last, all equally likely.
    Uniform(u32, u32),
    /// The logarithm is normally distributed; what is over `max` becomes `max`.
    Lognormal {
        /// Mean, before `max` is applied.
        mean: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
        /// The most.
        max: u32,
    },
}

impl Lengths {
    /// A length of at least 1. Takes the same number of random bits whatever it yields.
    pub fn sample(&self, random: &mut Random) -> u32 {
        match *self {
            Self::Fixed(tokens) => tokens,
            Self::Uniform(least, most) => least + (random.unit() * (f64::from(most - least) + 1.0)) as u32,
            Self::Lognormal { mean, sigma, max } => {
                let tokens = (mean.ln() - sigma * sigma / 2.0 + sigma * random.normal()).exp();
                // Saturates: a length beyond u32 becomes `max` as well.
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
            Some((least, most)) => {
                let (least, most) = (tokens(least)?, tokens(most)?);
                if least > most {
                    return Err(format!("the range {text} is empty"));
                }
                Ok(Self::Uniform(least, most))
            }
            None => tokens(text).map(Self::Fixed),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(tokens) => tokens.fmt(out),
            Self::Uniform(least, most) => write!(out, "{least}..{most}"),
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
    fn lengths_are_read_as_written() {
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
    fn a_lognormal_has_its_mean_and_a_tail_that_ends_at_its_maximum() {
        let lengths: Lengths = "lognormal:mean=100,sigma=0.8,max=500".parse().unwrap();
        let mut random = Random::new(7);
        let drawn: Vec<u32> = (0..50_000).map(|_| lengths.sample(&mut random)).collect();
        let mean = drawn.iter().map(|tokens| f64::from(*tokens)).sum::<f64>() / drawn.len() as f64;
        assert!((95.0..101.0).contains(&mean), "{mean}");
        assert_eq!(drawn.iter().max(), Some(&500));
        let uniform = Lengths::Uniform(3, 5);
        let mut seen: Vec<u32> = (0..100).map(|_| uniform.sample(&mut random)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [3, 4, 5]);
    }
}
