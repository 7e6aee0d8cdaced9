//! What is asked, and when: a pure function of the seed.

use std::ops::Range;
use std::time::Duration;

use inflight_simulator::trace::{TRACED_BLOCK_TOKENS, TracedRequest};
use inflight_simulator::workload::Random;
use sha2::{Digest as _, Sha256};

use super::lengths::Lengths;
use super::tenants::Tenant;

/// What makes the streams of random numbers of one seed differ.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    Lengths = 1,
    Tenant = 2,
    Prompt = 3,
    Prefix = 4,
    Arrivals = 5,
    Jitter = 6,
    Block = 7,
    Prompts = 8,
}

/// A generator for one purpose and one place. The seed goes through the generator once for each, so that neighbours share
/// nothing.
fn random(seed: u64, purpose: Purpose, place: u64) -> Random {
    let purpose = Random::new(seed ^ (purpose as u64) << 56).bits();
    Random::new(Random::new(purpose ^ place).bits())
}

/// Where lengths come from.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// Two independent distributions.
    Drawn {
        /// Of the prompts.
        prompt: Lengths,
        /// Of the outputs.
        output: Lengths,
    },
    /// A trace, from its first request on, and again from there after its last. Not empty.
    Trace(Vec<TracedRequest>),
}

/// When requests are due.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// A Poisson process of this many requests a second.
    Poisson(f64),
    /// Evenly, this many a second.
    Constant(f64),
    /// As the trace says, this many times as fast.
    Trace {
        /// Factor.
        speed: f64,
        /// Each arrival is put off by up to this much, at random.
        jitter: Duration,
    },
}

/// A request without its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned<'a> {
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens to generate.
    pub output_tokens: u32,
    /// Its tenant's place in [`Workload::tenants`].
    pub tenant: usize,
    /// Names of the prompt's blocks, if the trace has them.
    blocks: &'a [u64],
}

/// Key of the prompts' random tokens: equal keys give equal prompts, request by request, and prompts of different keys have
/// nothing in common, so that no round finds another's prompts in a prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptKey(pub u64);

/// The prompt keys of one invocation: a hash of its options and of a nonce that no other invocation has.
#[derive(Debug, Clone)]
pub struct PromptKeys(Sha256);

impl PromptKeys {
    /// Of an invocation with these options, in any unambiguous form.
    pub fn new(options: &str, nonce: u64) -> Self {
        let options = Sha256::digest(options.as_bytes());
        Self(Sha256::new().chain_update(options).chain_update(nonce.to_le_bytes()))
    }

    /// The key of a round at a load point.
    pub fn key(&self, point: u64, round: u32) -> PromptKey {
        let hash = self.0.clone().chain_update(point.to_le_bytes()).chain_update(round.to_le_bytes());
        let hash: [u8; 32] = hash.finalize().into();
        PromptKey(hash.into_iter().take(8).fold(0, |key, byte| key << 8 | u64::from(byte)))
    }
}

/// An endless sequence of requests. Equal fields give equal requests; a request depends on its place alone.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Key of all random choices.
    pub seed: u64,
    /// Lengths.
    pub source: Source,
    /// Most tokens of a prompt and of an output: longer ones are cut.
    pub caps: (u32, u32),
    /// Who sends; not empty.
    pub tenants: Vec<Tenant>,
    /// Tokens that all prompts of a tenant begin with, as far as they are that long.
    pub shared_prefix: u32,
    /// Token ids that prompts are made of; not empty.
    pub ids: Range<u32>,
}

impl Workload {
    /// Request number `place`.
    pub fn plan(&self, place: u64) -> Planned<'_> {
        let traced = match &self.source {
            Source::Trace(requests) => requests.get((place % requests.len().max(1) as u64) as usize),
            Source::Drawn { .. } => None,
        };
        let (prompt, output) = match (&self.source, traced) {
            (Source::Drawn { prompt, output }, _) => {
                let mut random = random(self.seed, Purpose::Lengths, place);
                (prompt.sample(&mut random), output.sample(&mut random))
            }
            (_, Some(traced)) => (traced.prompt_tokens, traced.output_tokens),
            (Source::Trace(_), None) => (1, 1),
        };
        let tenant = match traced.and_then(|traced| traced.tenant) {
            Some(tenant) => tenant as usize % self.tenants.len(),
            None => {
                let shares: Vec<f64> = self.tenants.iter().map(|tenant| tenant.share).collect();
                random(self.seed, Purpose::Tenant, place).pick(&shares)
            }
        };
        Planned {
            prompt_tokens: prompt.min(self.caps.0),
            output_tokens: output.min(self.caps.1),
            tenant,
            blocks: traced.map_or(&[], |traced| &traced.blocks),
        }
    }

    /// Token ids of the prompt of request number `place`.
    pub fn prompt(&self, place: u64, key: PromptKey) -> Vec<u32> {
        let plan = self.plan(place);
        let tokens = plan.prompt_tokens as usize;
        let seed = random(self.seed, Purpose::Prompts, key.0).bits();
        let mut ids = Vec::with_capacity(tokens);
        if plan.blocks.is_empty() {
            let prefix = tokens.min(self.shared_prefix as usize);
            let mut shared = random(seed, Purpose::Prefix, plan.tenant as u64);
            ids.extend(self.ids_of(&mut shared).take(prefix));
        } else {
            for block in plan.blocks {
                let mut block = random(seed, Purpose::Block, *block);
                ids.extend(self.ids_of(&mut block).take(TRACED_BLOCK_TOKENS as usize));
            }
            ids.truncate(tokens);
        }
        let mut own = random(seed, Purpose::Prompt, place);
        ids.extend(self.ids_of(&mut own).take(tokens - ids.len()));
        ids
    }

    fn ids_of<'a>(&self, random: &'a mut Random) -> impl Iterator<Item = u32> + use<'a> {
        let (first, width) = (self.ids.start, u64::from(self.ids.end - self.ids.start));
        std::iter::repeat_with(move || first + (random.bits() % width) as u32)
    }

    /// When requests are due after the start, ascending, without end but for a trace's.
    pub fn arrivals(&self, arrivals: Arrivals) -> Box<dyn Iterator<Item = Duration> + Send + '_> {
        match arrivals {
            Arrivals::Constant(rate) => {
                Box::new((0u64..).map(move |place| Duration::from_secs_f64(place as f64 / rate)))
            }
            Arrivals::Poisson(rate) => {
                let mut random = random(self.seed, Purpose::Arrivals, 0);
                let mut at = 0.0;
                Box::new(std::iter::repeat_with(move || {
                    at += random.exponential(rate);
                    Duration::from_secs_f64(at)
                }))
            }
            Arrivals::Trace { speed, jitter } => {
                let Source::Trace(requests) = &self.source else { return Box::new(std::iter::empty()) };
                let mut dues: Vec<Duration> = requests
                    .iter()
                    .zip(0u64..)
                    .map(|(request, place)| {
                        let put_off = random(self.seed, Purpose::Jitter, place).unit() * jitter.as_secs_f64();
                        let at = (request.arrival_s.unwrap_or(0.0).max(0.0) + put_off) / speed;
                        Duration::try_from_secs_f64(at).unwrap_or(Duration::MAX)
                    })
                    .collect();
                dues.sort_unstable();
                Box::new(dues.into_iter())
            }
        }
    }

    /// The first of `places` requests whose prompt and output do not fit into `context` tokens together, and how many there are.
    pub fn too_long(&self, places: u64, context: u32) -> Option<(Planned<'_>, u64)> {
        let over = |plan: &Planned<'_>| {
            u64::from(plan.prompt_tokens) + u64::from(plan.output_tokens) > u64::from(context)
        };
        let mut long = (0..places).map(|place| self.plan(place)).filter(over);
        let first = long.next()?;
        Some((first, 1 + long.count() as u64))
    }
}

/// Token ids as text of about as many tokens, for servers that take no ids.
pub fn as_text(ids: &[u32]) -> String {
    const WORDS: [&str; 32] = [
        "time", "water", "house", "light", "stone", "river", "table", "green", "paper", "night", "world",
        "music", "small", "great", "field", "horse", "glass", "story", "north", "train", "bread", "cloud",
        "heart", "voice", "plant", "chair", "sound", "ocean", "metal", "point", "money", "earth",
    ];
    let mut text = String::with_capacity(ids.len() * 6);
    for (place, id) in ids.iter().enumerate() {
        if place > 0 {
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
            (1..20u32, 0..20u32).prop_map(|(least, more)| Lengths::Uniform(least, least + more)),
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
        ) -> Workload {
            let tenant = |(name, share): (usize, &f64)| Tenant { share: *share, ..Tenant::named(name.to_string()) };
            Workload {
                seed, source: Source::Drawn { prompt, output }, caps,
                tenants: shares.iter().enumerate().map(tenant).collect(),
                shared_prefix, ids: first..first + width,
            }
        }
    }

    fn whole(workload: &Workload, key: PromptKey, rate: f64) -> Vec<(Duration, u32, usize, Vec<u32>)> {
        let dues = workload.arrivals(Arrivals::Poisson(rate));
        let request = |(place, due)| {
            let plan = workload.plan(place);
            (due, plan.output_tokens, plan.tenant, workload.prompt(place, key))
        };
        (0..40).zip(dues).map(request).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn equal_seeds_give_equal_requests_in_whatever_order_they_are_asked(
            workload in workloads(), key: u64, rate in 0.1..1e4f64,
        ) {
            let once = whole(&workload, PromptKey(key), rate);
            // A second value, asked from the back.
            let again = workload.clone();
            for place in (0..40u64).rev() {
                let (due, output, tenant, prompt) = &once[place as usize];
                let plan = again.plan(place);
                prop_assert_eq!((plan.output_tokens, plan.tenant), (*output, *tenant));
                prop_assert_eq!(&again.prompt(place, PromptKey(key)), prompt);
                prop_assert_eq!(again.arrivals(Arrivals::Poisson(rate)).nth(place as usize), Some(*due));
                prop_assert!(prompt.len() as u32 == plan.prompt_tokens && plan.prompt_tokens >= 1);
                prop_assert!(plan.prompt_tokens <= workload.caps.0 && (1..=workload.caps.1).contains(output));
                prop_assert!(prompt.iter().all(|id| workload.ids.contains(id)));
            }
            prop_assert!(once.windows(2).all(|two| two[0].0 <= two[1].0), "arrivals ascend");
        }

        #[test]
        fn prompts_of_a_tenant_share_the_prefix_and_prompts_of_other_keys_share_nothing(
            seed: u64, key: u64, prefix in 0..30u32,
        ) {
            let fixed = Lengths::Fixed(64);
            let workload = Workload {
                seed, source: Source::Drawn { prompt: fixed, output: fixed }, caps: (1000, 1000),
                tenants: vec![Tenant::named("")], shared_prefix: prefix, ids: 0..1 << 30,
            };
            let prompt = |place, key| workload.prompt(place, PromptKey(key));
            let alike = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
            prop_assert_eq!(alike(&prompt(1, key), &prompt(2, key)), prefix as usize);
            prop_assert_eq!(alike(&prompt(1, key), &prompt(1, !key)), 0);
        }
    }

    #[test]
    fn every_option_the_nonce_the_point_and_the_round_make_another_key() {
        let key = |options, nonce, point, round| PromptKeys::new(options, nonce).key(point, round);
        let base = key("concurrency: [1]", 7, 0, 0);
        assert_eq!(base, key("concurrency: [1]", 7, 0, 0));
        for other in [
            key("concurrency: [2]", 7, 0, 0),
            key("concurrency: [1]", 8, 0, 0),
            key("concurrency: [1]", 7, 1, 0),
            key("concurrency: [1]", 7, 0, 1),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn a_poisson_process_has_its_rate_and_its_spread() {
        let fixed = Lengths::Fixed(1);
        let workload = Workload {
            seed: 3,
            source: Source::Drawn { prompt: fixed, output: fixed },
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
    fn a_trace_is_replayed_faster_with_its_lengths_tenants_and_shared_blocks() {
        let traced = |at: f64, tenant, blocks: &[u64]| TracedRequest {
            arrival_s: Some(at),
            tenant: Some(tenant),
            prompt_tokens: 700,
            output_tokens: 9,
            blocks: blocks.to_vec(),
        };
        let workload = Workload {
            seed: 3,
            source: Source::Trace(vec![traced(0.0, 0, &[5, 6]), traced(8.0, 1, &[5, 7])]),
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
        assert_eq!(workload.too_long(2, 658).map(|(_, count)| count), Some(2));
        assert_eq!(workload.too_long(2, 659), None);
    }
}
