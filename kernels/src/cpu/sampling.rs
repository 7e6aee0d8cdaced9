//! Sampling of a token from a row of logits.
//!
//! All sums run in ascending token id in f64, and ties go to the lower id, so that a sample does not depend
//! on the vector width. Infinities are allowed; NaN must be removed first by [`mask_nan`], or excluded by [`all_finite`].

use super::isa::Isa;
use super::simd::{self, Kernel, Simd, exp, load_part, store_part};

/// Largest `count` for which [`best_keys`] scans once with a short sorted list.
const SHORT_LIST: usize = 64;
/// Candidates of the first top-p pass; quadrupled while they do not reach `top_p`.
const NUCLEUS_FIRST: usize = 256;

/// Temperature and truncation of a distribution before sampling. The fields apply in order, each to the
/// remaining tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Truncation {
    /// Divisor of the logits; above 0.
    pub temperature: f32,
    /// Number of most probable tokens to keep; 0 keeps all.
    pub top_k: usize,
    /// Probability mass to keep, by the fewest most probable tokens; 1 keeps all.
    pub top_p: f32,
    /// Minimum probability to keep, relative to the most probable token.
    pub min_p: f32,
}

/// Scratch buffers, reused between rows.
#[derive(Debug, Default, Clone)]
pub struct Workspace {
    weights: Vec<f32>,
    keys: Vec<u64>,
}

/// Returns whether no logit is infinite or NaN: else the arithmetic that led to them has overflowed or is broken, and a token chosen from
/// them has no meaning.
pub fn all_finite(isa: Isa, logits: &[f32]) -> bool {
    let mut poison = 0.0;
    simd::run(isa, Poison { logits, poison: &mut poison });
    poison == 0.0
}

/// Adds x * 0 over all logits: 0, or NaN if one is infinite or NaN.
struct Poison<'a> {
    logits: &'a [f32],
    poison: &'a mut f32,
}

impl Kernel for Poison<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        const WAYS: usize = 4;
        // SAFETY: the caller guarantees the instruction set, and whole vectors are loaded only from whole chunks.
        unsafe {
            let zero = S::splat(0.0);
            let mut sums = [zero; WAYS];
            let mut chunks = self.logits.chunks_exact(WAYS * S::LANES);
            for chunk in &mut chunks {
                for (way, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(S::load(chunk.as_ptr().add(way * S::LANES)), zero, *sum);
                }
            }
            for rest in chunks.remainder().chunks(S::LANES) {
                sums[0] = S::fma(load_part::<S>(rest.as_ptr(), rest.len(), 0.0), zero, sums[0]);
            }
            *self.poison = S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])));
        }
    }
}

/// Replaces NaN by negative infinity, so that such a token is never sampled.
pub fn mask_nan(logits: &mut [f32]) {
    for logit in logits {
        *logit = if logit.is_nan() { f32::NEG_INFINITY } else { *logit };
    }
}

/// Returns the token with the largest logit, the lowest id among equals. NaN counts as negative infinity.
pub fn argmax(isa: Isa, logits: &[f32]) -> u32 {
    let best = largest(isa, logits);
    logits.iter().position(|logit| *logit == best).unwrap_or(0) as u32
}

/// Returns ln sum e^logit. A token's log probability is its logit minus this.
pub fn log_sum_exp(isa: Isa, logits: &[f32], workspace: &mut Workspace) -> f64 {
    let best = largest(isa, logits);
    if best.is_infinite() {
        return f64::from(best);
    }
    softmax_weights(isa, logits, best, 1.0, &mut workspace.weights);
    let total: f64 = workspace.weights.iter().map(|weight| f64::from(*weight)).sum();
    f64::from(best) + libm::log(total)
}

/// Returns the `count` tokens with the largest logits, largest first, ties by lower id.
pub fn top<'a>(
    logits: &'a [f32],
    count: usize,
    workspace: &'a mut Workspace,
) -> impl Iterator<Item = (u32, f32)> + 'a {
    best_keys(logits, count, &mut workspace.keys);
    workspace.keys.iter().map(|key| (*key as u32, logits[*key as u32 as usize]))
}

/// Log probability of a given token.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Natural logarithm of the token's probability.
    pub logprob: f32,
    /// Place of the token among all, the most probable first, ties by lower id; from 1.
    pub rank: u32,
    /// Most probable tokens with their log probabilities, in the same order.
    pub top: Vec<(u32, f32)>,
}

/// Returns the log probability of a token by its logit and [`log_sum_exp`].
pub fn logprob(logit: f32, log_sum_exp: f64) -> f32 {
    match (f64::from(logit) - log_sum_exp) as f32 {
        // Infinity minus infinity: the token has all the probability mass, or there is none.
        logprob if logprob.is_nan() => 0.0,
        logprob => logprob,
    }
}

/// Scores `token`, which is in the vocabulary, with `count` alternatives.
pub fn score(isa: Isa, logits: &[f32], token: u32, count: usize, workspace: &mut Workspace) -> Score {
    let total = log_sum_exp(isa, logits, workspace);
    let logit = logits[token as usize];
    let own = key(token as usize, logit);
    let before = logits.iter().enumerate().filter(|(id, logit)| key(*id, **logit) < own).count();
    let top = top(logits, count, workspace).map(|(id, logit)| (id, logprob(logit, total))).collect();
    Score { logprob: logprob(logit, total), rank: before as u32 + 1, top }
}

/// Samples a token by inverse transform over the kept tokens in order of id; `uniform` is in [0, 1).
pub fn sample(
    isa: Isa,
    logits: &[f32],
    truncation: &Truncation,
    uniform: f64,
    workspace: &mut Workspace,
) -> u32 {
    let best = largest(isa, logits);
    // Weights are relative to the most probable token, whose weight is 1.
    softmax_weights(isa, logits, best, truncation.temperature, &mut workspace.weights);
    let Workspace { weights, keys } = workspace;
    let all = truncation.top_k == 0 || truncation.top_k >= logits.len();
    if all && truncation.top_p >= 1.0 {
        if truncation.min_p > 0.0 {
            for weight in weights.iter_mut() {
                *weight = if *weight < truncation.min_p { 0.0 } else { *weight };
            }
        }
        return pick(weights.iter().enumerate().map(|(id, weight)| (id as u32, *weight)), uniform);
    }
    let weight_of = |key: &u64| weights[*key as u32 as usize];
    if all {
        let total: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
        let mut count = NUCLEUS_FIRST;
        loop {
            best_keys(logits, count, keys);
            match nucleus(keys.iter().map(weight_of), f64::from(truncation.top_p) * total) {
                Some(kept) => {
                    keys.truncate(kept);
                    break;
                }
                None if keys.len() == logits.len() => break,
                None => count *= 4,
            }
        }
    } else {
        best_keys(logits, truncation.top_k, keys);
        if truncation.top_p < 1.0 {
            let total: f64 = keys.iter().map(|key| f64::from(weight_of(key))).sum();
            if let Some(kept) = nucleus(keys.iter().map(weight_of), f64::from(truncation.top_p) * total) {
                keys.truncate(kept);
            }
        }
    }
    keys.retain(|key| weight_of(key) >= truncation.min_p);
    keys.sort_unstable_by_key(|key| *key as u32);
    pick(keys.iter().map(|key| (*key as u32, weight_of(key))), uniform)
}

/// Returns the number of weights, largest first, that reach `target`; `None` if all do not.
fn nucleus(weights: impl Iterator<Item = f32>, target: f64) -> Option<usize> {
    let mut sum = 0.0;
    for (i, weight) in weights.enumerate() {
        sum += f64::from(weight);
        if sum >= target {
            return Some(i + 1);
        }
    }
    None
}

/// Returns the first token at which the cumulative weight exceeds `uniform` times the total.
fn pick(tokens: impl Iterator<Item = (u32, f32)> + Clone, uniform: f64) -> u32 {
    let total: f64 = tokens.clone().map(|(_, weight)| f64::from(weight)).sum();
    let target = uniform * total;
    let (mut sum, mut last) = (0.0, 0);
    for (id, weight) in tokens {
        if weight > 0.0 {
            sum += f64::from(weight);
            last = id;
            if sum > target {
                break;
            }
        }
    }
    last
}

/// Returns a sort key that orders tokens from best to worst: larger logits first, then lower ids.
fn key(id: usize, logit: f32) -> u64 {
    // Adding 0 makes -0 equal to 0. Flipping bits makes floats compare like unsigned integers.
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!ascending) << 32 | id as u64
}

/// Writes the keys of the `count` best tokens, sorted.
fn best_keys(logits: &[f32], count: usize, keys: &mut Vec<u64>) {
    keys.clear();
    let count = count.min(logits.len());
    if count == 0 {
        return;
    }
    if count <= SHORT_LIST {
        for (id, logit) in logits.iter().enumerate() {
            let candidate = key(id, *logit);
            if keys.len() == count {
                if candidate >= keys[count - 1] {
                    continue;
                }
                keys.pop();
            }
            keys.insert(keys.partition_point(|kept| *kept < candidate), candidate);
        }
        return;
    }
    keys.extend(logits.iter().enumerate().map(|(id, logit)| key(id, *logit)));
    if count < keys.len() {
        keys.select_nth_unstable(count - 1);
        keys.truncate(count);
    }
    keys.sort_unstable();
}

fn largest(isa: Isa, logits: &[f32]) -> f32 {
    let mut out = f32::NEG_INFINITY;
    simd::run(isa, LargestLogit { logits, out: &mut out });
    out
}

struct LargestLogit<'a> {
    logits: &'a [f32],
    out: &'a mut f32,
}

impl Kernel for LargestLogit<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller guarantees `S`'s instruction set, and loads are within the chunks.
        unsafe {
            let mut best = S::splat(f32::NEG_INFINITY);
            for chunk in self.logits.chunks(S::LANES) {
                let v = if chunk.len() == S::LANES {
                    S::load(chunk.as_ptr())
                } else {
                    load_part::<S>(chunk.as_ptr(), chunk.len(), f32::NEG_INFINITY)
                };
                // The second operand is returned where the first is NaN.
                best = S::max(v, best);
            }
            *self.out = S::largest(best);
        }
    }
}

/// Computes weights = e^((logit - best) / temperature).
fn softmax_weights(isa: Isa, logits: &[f32], best: f32, temperature: f32, weights: &mut Vec<f32>) {
    weights.resize(logits.len(), 0.0);
    simd::run(isa, SoftmaxWeights { logits, best, temperature, weights });
}

struct SoftmaxWeights<'a> {
    logits: &'a [f32],
    best: f32,
    temperature: f32,
    weights: &'a mut [f32],
}

impl Kernel for SoftmaxWeights<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (from, to) in self.logits.chunks(S::LANES).zip(self.weights.chunks_mut(S::LANES)) {
            // SAFETY: the caller guarantees `S`'s instruction set; accesses are within chunks of equal
            // length.
            unsafe {
                let (best, temperature) = (S::splat(self.best), S::splat(self.temperature));
                let whole = from.len() == S::LANES;
                let logit = if whole {
                    S::load(from.as_ptr())
                } else {
                    load_part::<S>(from.as_ptr(), from.len(), 0.0)
                };
                let scaled = S::div(S::sub(logit, best), temperature);
                // Infinity minus infinity is NaN, so logits equal to the best are not subtracted.
                let weight = exp::<S>(S::if_less(logit, best, scaled, S::splat(0.0)));
                if whole {
                    S::store(to.as_mut_ptr(), weight);
                } else {
                    store_part::<S>(to.as_mut_ptr(), to.len(), weight);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
