//! Workloads: prompts, output lengths, tenants and arrival times as a pure function of a seed.

use std::ops::Range;
use std::time::Duration;

use inflight_traces::SplitMix64;
use inflight_traces::{TRACED_BLOCK_TOKENS, TracedRequest};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::lengths::Lengths;
use crate::tenants::Tenant;

/// Independent random number streams of a seed.
#[derive(Debug, Clone, Copy)]
enum RandomStream {
    Lengths = 1,
    Tenant = 2,
    Prompt = 3,
    Prefix = 4,
    Arrivals = 5,
    Jitter = 6,
    Block = 7,
    Prompts = 8,
}

/// Returns the generator of a stream's element `index`. Stream and index each pass through a generator, which
/// decorrelates adjacent elements.
fn random(seed: u64, stream: RandomStream, index: u64) -> SplitMix64 {
    let stream_seed = SplitMix64::new(seed ^ (stream as u64) << 56).bits();
    SplitMix64::new(SplitMix64::new(stream_seed ^ index).bits())
}

/// Source of prompt and output lengths.
#[derive(Debug, Clone, PartialEq)]
pub enum LengthSource {
    /// Independent distributions.
    Drawn {
        /// Distribution of prompt lengths.
        prompt: Lengths,
        /// Distribution of output lengths.
        output: Lengths,
    },
    /// Requests of a trace, repeated cyclically. Not empty.
    Trace(Vec<TracedRequest>),
}

/// Arrival process of an open loop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// Poisson process of this rate in requests per second.
    Poisson(f64),
    /// Constant intervals at this rate in requests per second.
    Constant(f64),
    /// Arrivals of the trace.
    Trace {
        /// Replay speed relative to the trace.
        speed: f64,
        /// Maximum random delay added to each arrival.
        jitter: Duration,
    },
}

/// Request of a workload without the tokens of its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedRequest<'a> {
    /// Length of the prompt in tokens.
    pub prompt_tokens: u32,
    /// Number of tokens to generate.
    pub output_tokens: u32,
    /// Index of the tenant in [`BenchWorkload::tenants`].
    pub tenant: usize,
    /// Ids of the prompt's blocks, if the trace has them.
    blocks: &'a [u64],
}

/// Key of the random tokens of prompts. Equal keys give equal prompts; prompts of different keys share no
/// prefix, so that no round hits prompts of another one in a prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptKey(pub u64);

/// Derivation of prompt keys from a hash of the run's options and nonce.
#[derive(Debug, Clone)]
pub struct PromptKeys(Sha256);

impl PromptKeys {
    /// Creates the derivation for `options`, each with its name, in a fixed order, and `nonce`.
    pub fn new(options: &[(&str, Value)], nonce: u64) -> Self {
        let mut hash = Sha256::new();
        for (name, value) in options {
            for text in [*name, &value.to_string()] {
                hash.update((text.len() as u64).to_le_bytes());
                hash.update(text.as_bytes());
            }
        }
        Self(Sha256::new().chain_update(hash.finalize()).chain_update(nonce.to_le_bytes()))
    }

    /// Returns the key of a round of a load point.
    pub fn key(&self, point: u64, round: u32) -> PromptKey {
        let hash = self.0.clone().chain_update(point.to_le_bytes()).chain_update(round.to_le_bytes());
        let hash: [u8; 32] = hash.finalize().into();
        PromptKey(hash.into_iter().take(8).fold(0, |key, byte| key << 8 | u64::from(byte)))
    }
}

/// Infinite sequence of requests; each is a pure function of the fields and of its index.
#[derive(Debug, Clone, PartialEq)]
pub struct BenchWorkload {
    /// Seed of lengths, tenants, arrivals and, with a [`PromptKey`], prompts.
    pub seed: u64,
    /// Source of prompt and output lengths.
    pub source: LengthSource,
    /// Maximum tokens of a prompt and of an output; longer ones are truncated.
    pub caps: (u32, u32),
    /// Tenants that send the requests; not empty.
    pub tenants: Vec<Tenant>,
    /// Length in tokens of the common prefix of each tenant's prompts.
    pub shared_prefix: u32,
    /// Range of the token ids of prompts; not empty.
    pub ids: Range<u32>,
}

impl BenchWorkload {
    /// Returns request `index` without the tokens of its prompt.
    pub fn plan(&self, index: u64) -> PlannedRequest<'_> {
        let traced = match &self.source {
            LengthSource::Trace(requests) => requests.get((index % requests.len().max(1) as u64) as usize),
            LengthSource::Drawn { .. } => None,
        };
        let (prompt, output) = match (&self.source, traced) {
            (LengthSource::Drawn { prompt, output }, _) => {
                let mut random = random(self.seed, RandomStream::Lengths, index);
                (prompt.sample(&mut random), output.sample(&mut random))
            }
            (_, Some(traced)) => (traced.prompt_tokens, traced.output_tokens),
            (LengthSource::Trace(_), None) => (1, 1),
        };
        let tenant = match traced.and_then(|traced| traced.tenant) {
            Some(tenant) => tenant as usize % self.tenants.len(),
            None => {
                let shares: Vec<f64> = self.tenants.iter().map(|tenant| tenant.share).collect();
                random(self.seed, RandomStream::Tenant, index).pick(&shares)
            }
        };
        PlannedRequest {
            prompt_tokens: prompt.min(self.caps.0),
            output_tokens: output.min(self.caps.1),
            tenant,
            blocks: traced.map_or(&[], |traced| &traced.blocks),
        }
    }

    /// Returns the token ids of the prompt of request `index`.
    pub fn prompt(&self, index: u64, key: PromptKey) -> Vec<u32> {
        let plan = self.plan(index);
        let tokens = plan.prompt_tokens as usize;
        let seed = random(self.seed, RandomStream::Prompts, key.0).bits();
        let mut ids = Vec::with_capacity(tokens);
        if plan.blocks.is_empty() {
            let prefix = tokens.min(self.shared_prefix as usize);
            let mut shared = random(seed, RandomStream::Prefix, plan.tenant as u64);
            ids.extend(self.random_ids(&mut shared).take(prefix));
        } else {
            for block in plan.blocks {
                let mut block = random(seed, RandomStream::Block, *block);
                ids.extend(self.random_ids(&mut block).take(TRACED_BLOCK_TOKENS as usize));
            }
            ids.truncate(tokens);
        }
        let mut own = random(seed, RandomStream::Prompt, index);
        ids.extend(self.random_ids(&mut own).take(tokens - ids.len()));
        ids
    }

    fn random_ids<'a>(&self, random: &'a mut SplitMix64) -> impl Iterator<Item = u32> + use<'a> {
        let (first, width) = (self.ids.start, u64::from(self.ids.end - self.ids.start));
        std::iter::repeat_with(move || first + (random.bits() % width) as u32)
    }

    /// Returns the arrival times relative to the start, ascending; infinite except for a trace.
    pub fn arrivals(&self, arrivals: Arrivals) -> Box<dyn Iterator<Item = Duration> + Send + '_> {
        match arrivals {
            Arrivals::Constant(rate) => {
                Box::new((0u64..).map(move |index| Duration::from_secs_f64(index as f64 / rate)))
            }
            Arrivals::Poisson(rate) => {
                let mut random = random(self.seed, RandomStream::Arrivals, 0);
                let mut at = 0.0;
                Box::new(std::iter::repeat_with(move || {
                    at += random.exponential(rate);
                    Duration::from_secs_f64(at)
                }))
            }
            Arrivals::Trace { speed, jitter } => {
                let LengthSource::Trace(requests) = &self.source else { return Box::new(std::iter::empty()) };
                let mut dues: Vec<Duration> = requests
                    .iter()
                    .zip(0u64..)
                    .map(|(request, index)| {
                        let delay =
                            random(self.seed, RandomStream::Jitter, index).unit() * jitter.as_secs_f64();
                        let at = (request.arrival_s.unwrap_or(0.0).max(0.0) + delay) / speed;
                        Duration::try_from_secs_f64(at).unwrap_or(Duration::MAX)
                    })
                    .collect();
                dues.sort_unstable();
                Box::new(dues.into_iter())
            }
        }
    }

    /// Returns the first of `count` requests whose prompt and output together exceed `context` tokens, and
    /// the number of such requests; `None` if there are none.
    pub fn exceeding_context(&self, count: u64, context: u32) -> Option<(PlannedRequest<'_>, u64)> {
        let over = |plan: &PlannedRequest<'_>| {
            u64::from(plan.prompt_tokens) + u64::from(plan.output_tokens) > u64::from(context)
        };
        let mut long = (0..count).map(|index| self.plan(index)).filter(over);
        let first = long.next()?;
        Some((first, 1 + long.count() as u64))
    }
}

/// Converts token ids to text of about as many tokens, for servers that accept no token ids.
pub fn as_text(ids: &[u32]) -> String {
    const WORDS: [&str; 32] = [
        "time", "water", "house", "light", "stone", "river", "table", "green", "paper", "night", "world",
        "music", "small", "great", "field", "horse", "glass", "story", "north", "train", "bread", "cloud",
        "heart", "voice", "plant", "chair", "sound", "ocean", "metal", "point", "money", "earth",
    ];
    let mut text = String::with_capacity(ids.len() * 6);
    for (index, id) in ids.iter().enumerate() {
        if index > 0 {
            text.push(' ');
        }
        text.push_str(WORDS[*id as usize % WORDS.len()]);
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lengths() -> impl Strategy<Value = Lengths> {
        prop_oneof![
            (1..50u32).prop_map(Lengths::Fixed),
            (1..20u32, 0..20u32).prop_map(|(min, width)| Lengths::Uniform(min, min + width)),
            (1.0..60.0f64, 0.0..1.5f64).prop_map(|(mean, sigma)| Lengths::Lognormal {
                mean,
                sigma,
                max: 200
            }),
        ]
    }

    prop_compose! {
        fn workloads()(
            seed: u64, prompt in lengths(), output in lengths(), shares in prop::collection::vec(0.1..5.0f64, 1..4),
            shared_prefix in 0..20u32, first in 0..500u32, width in 1..5000u32, caps in (1..300u32, 1..300u32),
        ) -> BenchWorkload {
            let tenant = |(name, share): (usize, &f64)| Tenant { share: *share, ..Tenant::named(name.to_string()) };
            BenchWorkload {
                seed, source: LengthSource::Drawn { prompt, output }, caps,
                tenants: shares.iter().enumerate().map(tenant).collect(),
                shared_prefix, ids: first..first + width,
            }
        }
    }

    fn materialize(
        workload: &BenchWorkload,
        key: PromptKey,
        rate: f64,
    ) -> Vec<(Duration, u32, usize, Vec<u32>)> {
        let dues = workload.arrivals(Arrivals::Poisson(rate));
        let request = |(index, due)| {
            let plan = workload.plan(index);
            (due, plan.output_tokens, plan.tenant, workload.prompt(index, key))
        };
        (0..40).zip(dues).map(request).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn equal_seeds_give_equal_requests_in_any_order_of_evaluation(
            workload in workloads(), key: u64, rate in 0.1..1e4f64,
        ) {
            let once = materialize(&workload, PromptKey(key), rate);
            // An equal workload, evaluated backwards.
            let again = workload.clone();
            for index in (0..40u64).rev() {
                let (due, output, tenant, prompt) = &once[index as usize];
                let plan = again.plan(index);
                prop_assert_eq!((plan.output_tokens, plan.tenant), (*output, *tenant));
                prop_assert_eq!(&again.prompt(index, PromptKey(key)), prompt);
                prop_assert_eq!(again.arrivals(Arrivals::Poisson(rate)).nth(index as usize), Some(*due));
                prop_assert!(prompt.len() as u32 == plan.prompt_tokens && plan.prompt_tokens >= 1);
                prop_assert!(plan.prompt_tokens <= workload.caps.0 && (1..=workload.caps.1).contains(output));
                prop_assert!(prompt.iter().all(|id| workload.ids.contains(id)));
            }
            prop_assert!(once.windows(2).all(|two| two[0].0 <= two[1].0), "arrivals ascend");
        }

        #[test]
        fn prompts_of_a_tenant_share_the_prefix_and_those_of_other_keys_nothing(
            seed: u64, key: u64, prefix in 0..30u32,
        ) {
            let fixed = Lengths::Fixed(64);
            let workload = BenchWorkload {
                seed, source: LengthSource::Drawn { prompt: fixed, output: fixed }, caps: (1000, 1000),
                tenants: vec![Tenant::named("")], shared_prefix: prefix, ids: 0..1 << 30,
            };
            let prompt = |index, key| workload.prompt(index, PromptKey(key));
            let alike = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
            prop_assert_eq!(alike(&prompt(1, key), &prompt(2, key)), prefix as usize);
            prop_assert_eq!(alike(&prompt(1, key), &prompt(1, !key)), 0);
        }
    }

    #[test]
    fn prompt_keys_depend_on_options_nonce_point_and_round() {
        let key = |name, value: u32, nonce, point, round| {
            PromptKeys::new(&[(name, value.into())], nonce).key(point, round)
        };
        let base = key("concurrency", 1, 7, 0, 0);
        assert_eq!(base, key("concurrency", 1, 7, 0, 0));
        for other in [
            key("rate", 1, 7, 0, 0),
            key("concurrency", 2, 7, 0, 0),
            key("concurrency", 1, 8, 0, 0),
            key("concurrency", 1, 7, 1, 0),
            key("concurrency", 1, 7, 0, 1),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn a_poisson_process_has_its_rate_and_coefficient_of_variation() {
        let fixed = Lengths::Fixed(1);
        let workload = BenchWorkload {
            seed: 3,
            source: LengthSource::Drawn { prompt: fixed, output: fixed },
            caps: (1, 1),
            tenants: vec![Tenant::named("")],
            shared_prefix: 0,
            ids: 0..9,
        };
        let dues: Vec<f64> =
            workload.arrivals(Arrivals::Poisson(50.0)).take(20_001).map(|due| due.as_secs_f64()).collect();
        let gaps: Vec<f64> = dues.windows(2).map(|two| two[1] - two[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((mean * 50.0 - 1.0).abs() < 0.03, "{mean}");
        assert!(
            (variance.sqrt() / mean - 1.0).abs() < 0.05,
            "the coefficient of variation of a Poisson process is 1"
        );
    }

    #[test]
    fn a_trace_is_replayed_at_speed_with_its_lengths_tenants_and_blocks() {
        let traced = |at: f64, tenant, blocks: &[u64]| TracedRequest {
            arrival_s: Some(at),
            tenant: Some(tenant),
            prompt_tokens: 700,
            output_tokens: 9,
            blocks: blocks.to_vec(),
        };
        let workload = BenchWorkload {
            seed: 3,
            source: LengthSource::Trace(vec![traced(0.0, 0, &[5, 6]), traced(8.0, 1, &[5, 7])]),
            caps: (650, 1000),
            tenants: vec![Tenant::named("a"), Tenant::named("b")],
            shared_prefix: 0,
            ids: 0..1 << 30,
        };
        let replay = Arrivals::Trace { speed: 4.0, jitter: Duration::ZERO };
        assert_eq!(workload.arrivals(replay).collect::<Vec<_>>(), [Duration::ZERO, Duration::from_secs(2)]);
        assert_eq!((workload.plan(1).tenant, workload.plan(2).tenant), (1, 0));
        assert_eq!((workload.plan(0).prompt_tokens, workload.plan(0).output_tokens), (650, 9));
        let (a, b) = (workload.prompt(0, PromptKey(1)), workload.prompt(1, PromptKey(1)));
        assert_eq!(a[..512], b[..512]);
        assert_ne!(a[512..], b[512..]);
        assert_eq!(workload.exceeding_context(2, 658).map(|(_, count)| count), Some(2));
        assert_eq!(workload.exceeding_context(2, 659), None);
    }
}
