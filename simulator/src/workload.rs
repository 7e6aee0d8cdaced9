//! Synthetic workloads generated from a seed.

use inflight_traces::SplitMix64;
use inflight_worker_core::Time;

use crate::Request;

/// Distribution of lengths given by quantiles, log-linear between them.
#[derive(Debug, Clone, PartialEq)]
pub struct LengthDistribution {
    quantiles: Vec<(f64, f64)>,
}

impl LengthDistribution {
    /// Creates a distribution from ascending pairs (share, tokens); the first share is 0 and the last 1.
    pub fn new(quantiles: &[(f64, f64)]) -> Self {
        Self { quantiles: quantiles.to_vec() }
    }

    /// Draws a length in tokens; at least 1.
    pub fn sample(&self, random: &mut SplitMix64) -> u32 {
        let at = random.unit();
        let between = self.quantiles.windows(2).find(|two| at < two[1].0);
        let tokens = between.map_or(1.0, |two| {
            let ((p0, low), (p1, high)) = (two[0], two[1]);
            (low.ln() + (high.ln() - low.ln()) * (at - p0) / (p1 - p0)).exp()
        });
        (tokens.round() as u32).max(1)
    }
}

/// Lognormal distribution of lengths, as of chats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LognormalLengths {
    /// Mean length in tokens before the bound.
    pub mean: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
    /// Maximum length in tokens.
    pub max: u32,
}

impl LognormalLengths {
    /// Draws a length in tokens; at least 1.
    pub fn sample(&self, random: &mut SplitMix64) -> u32 {
        let logarithm = self.mean.ln() - self.sigma * self.sigma / 2.0 + self.sigma * random.normal();
        (logarithm.exp().round() as u32).clamp(1, self.max)
    }
}

/// Workload of several tenants with Poisson arrivals.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Requests per second.
    pub rate: f64,
    /// Number of requests.
    pub requests: usize,
    /// Share of requests by tenant.
    pub shares: Vec<f64>,
    /// Prompt lengths in tokens.
    pub prompts: LengthDistribution,
    /// Output lengths in tokens.
    pub outputs: LengthDistribution,
}

impl Workload {
    /// Returns a workload like the chat trace of VTC: 27 tenants; the first sends 19.7 % of the requests, the
    /// first three 50.5 %, the first six 67.3 %; 2.5 requests per second for ten minutes; prompts with a mean
    /// of 136 tokens and a median of 40, outputs with 256 and 211.
    pub fn chat() -> Self {
        let mut shares = vec![19.7, 15.4, 15.4, 5.6, 5.6, 5.6];
        shares.resize(27, 32.7 / 21.0);
        Self {
            rate: 2.5,
            requests: 1500,
            shares,
            prompts: LengthDistribution::new(&[
                (0.0, 1.0),
                (0.5, 40.0),
                (0.9, 432.0),
                (0.99, 902.0),
                (1.0, 1021.0),
            ]),
            outputs: LengthDistribution::new(&[
                (0.0, 20.0),
                (0.5, 211.0),
                (0.9, 513.0),
                (0.99, 785.0),
                (1.0, 977.0),
            ]),
        }
    }

    /// Returns a workload like VTC's overload: two tenants with 1.5 and 3 requests per second of 256 input
    /// and 256 output tokens.
    pub fn overload() -> Self {
        let fixed = LengthDistribution::new(&[(0.0, 256.0), (1.0, 256.0)]);
        Self { rate: 4.5, requests: 2700, shares: vec![1.0, 2.0], prompts: fixed.clone(), outputs: fixed }
    }

    /// Returns a workload like ShareGPT conversations of up to 8,192 tokens, one request per second.
    pub fn conversations(requests: usize) -> Self {
        Self {
            rate: 1.0,
            requests,
            shares: vec![1.0],
            prompts: LengthDistribution::new(&[
                (0.0, 30.0),
                (0.5, 1718.0),
                (0.9, 5661.0),
                (0.99, 7399.0),
                (1.0, 8141.0),
            ]),
            outputs: LengthDistribution::new(&[
                (0.0, 20.0),
                (0.5, 409.0),
                (0.9, 833.0),
                (0.99, 998.0),
                (1.0, 1024.0),
            ]),
        }
    }

    /// Generates the requests of a seed, in order of arrival.
    pub fn generate(&self, seed: u64) -> Vec<Request> {
        let mut random = SplitMix64::new(seed);
        let mut at = 0.0;
        (0..self.requests)
            .map(|_| {
                at += random.exponential(self.rate);
                let tenant = random.pick(&self.shares) as u32;
                let prompt = self.prompts.sample(&mut random);
                let output = self.outputs.sample(&mut random);
                Request::new(Time::from_nanos((at * 1e9).round() as u64), tenant, prompt, output)
            })
            .collect()
    }
}
