//! Requests generated from a seed.

use inflight_worker_core::Time;

use crate::Request;

/// A small generator of random numbers whose sequence never changes (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A time between two arrivals of a Poisson process, in seconds.
    pub fn exponential(&mut self, rate: f64) -> f64 {
        -(1.0 - self.unit()).ln() / rate
    }

    /// A number from the standard normal distribution (Box and Muller's transform).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// The place of a share, with these shares as weights.
    pub fn pick(&mut self, shares: &[f64]) -> usize {
        let mut left = self.unit() * shares.iter().sum::<f64>();
        for (place, share) in shares.iter().enumerate() {
            if left < *share {
                return place;
            }
            left -= share;
        }
        shares.len().saturating_sub(1)
    }
}

/// A distribution of lengths known by quantiles; between two of them, the logarithm is spread evenly.
#[derive(Debug, Clone, PartialEq)]
pub struct Lengths {
    quantiles: Vec<(f64, f64)>,
}

impl Lengths {
    /// From ascending (share, tokens), the first share being 0 and the last 1.
    pub fn new(quantiles: &[(f64, f64)]) -> Self {
        Self { quantiles: quantiles.to_vec() }
    }

    /// A length.
    pub fn sample(&self, random: &mut Random) -> u32 {
        let at = random.unit();
        let between = self.quantiles.windows(2).find(|two| at < two[1].0);
        let tokens = between.map_or(1.0, |two| {
            let ((p0, low), (p1, high)) = (two[0], two[1]);
            (low.ln() + (high.ln() - low.ln()) * (at - p0) / (p1 - p0)).exp()
        });
        (tokens.round() as u32).max(1)
    }
}

/// Requests of a set of tenants that arrive as one Poisson process.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Requests a second.
    pub rate: f64,
    /// Number of requests.
    pub requests: usize,
    /// Share of the requests that each tenant sends.
    pub shares: Vec<f64>,
    /// Tokens of the prompts.
    pub prompts: Lengths,
    /// Tokens generated.
    pub outputs: Lengths,
}

impl Workload {
    /// Like the chat trace of VTC: 27 tenants, of whom the first sends 19.7 % of the requests, the first three 50.5 %
    /// and the first six 67.3 %; 2.5 requests a second for ten minutes; prompts of 136 tokens on average and 40 in
    /// the median, outputs of 256 and 211.
    pub fn chat() -> Self {
        let mut shares = vec![19.7, 15.4, 15.4, 5.6, 5.6, 5.6];
        shares.resize(27, 32.7 / 21.0);
        Self {
            rate: 2.5,
            requests: 1500,
            shares,
            prompts: Lengths::new(&[(0.0, 1.0), (0.5, 40.0), (0.9, 432.0), (0.99, 902.0), (1.0, 1021.0)]),
            outputs: Lengths::new(&[(0.0, 20.0), (0.5, 211.0), (0.9, 513.0), (0.99, 785.0), (1.0, 977.0)]),
        }
    }

    /// Like VTC's overload: two tenants send 3 and 1.5 requests a second, each of 256 tokens in and 256 out.
    pub fn overload() -> Self {
        let fixed = Lengths::new(&[(0.0, 256.0), (1.0, 256.0)]);
        Self { rate: 4.5, requests: 2700, shares: vec![1.0, 2.0], prompts: fixed.clone(), outputs: fixed }
    }

    /// Like ShareGPT conversations of up to 8,192 tokens.
    pub fn conversations(requests: usize) -> Self {
        Self {
            rate: 1.0,
            requests,
            shares: vec![1.0],
            prompts: Lengths::new(&[
                (0.0, 30.0),
                (0.5, 1718.0),
                (0.9, 5661.0),
                (0.99, 7399.0),
                (1.0, 8141.0),
            ]),
            outputs: Lengths::new(&[(0.0, 20.0), (0.5, 409.0), (0.9, 833.0), (0.99, 998.0), (1.0, 1024.0)]),
        }
    }

    /// The requests of a seed, in order of arrival.
    pub fn generate(&self, seed: u64) -> Vec<Request> {
        let mut random = Random::new(seed);
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
