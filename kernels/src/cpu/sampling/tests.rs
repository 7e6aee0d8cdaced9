//! Property tests of sampling against an oracle that sorts all tokens.

use proptest::prelude::*;

use super::*;
use crate::test_size::size;

fn logits() -> impl Strategy<Value = Vec<f32>> {
    // A grid makes ties common; the rest covers what models and biases can produce.
    let logit = prop_oneof![
        6 => (-20i32..20).prop_map(|i| i as f32 / 4.0),
        3 => -30f32..30.0,
        1 => Just(f32::NEG_INFINITY),
    ];
    prop::collection::vec(logit, 1..size(400, 90))
}

fn truncation() -> impl Strategy<Value = Truncation> {
    let top_k = prop_oneof![Just(0usize), 1usize..10, 1usize..500];
    let top_p = prop_oneof![Just(1.0f32), 0.001f32..1.0, Just(1e-30f32)];
    let min_p = prop_oneof![Just(0.0f32), 0.0f32..=1.0];
    (prop_oneof![0.05f32..3.0, Just(1e-20f32), Just(100.0f32)], top_k, top_p, min_p)
        .prop_map(|(temperature, top_k, top_p, min_p)| Truncation { temperature, top_k, top_p, min_p })
}

/// Returns the kept tokens with their weights, by sorting everything.
fn oracle(logits: &[f32], truncation: &Truncation) -> Vec<(u32, f64)> {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| {
        if logit == best { 1.0 } else { libm::exp(f64::from((logit - best) / truncation.temperature)) }
    };
    let mut kept: Vec<(u32, f64)> =
        logits.iter().enumerate().map(|(id, l)| (id as u32, weight(*l))).collect();
    kept.sort_by(|a, b| {
        let by_logit = logits[b.0 as usize].partial_cmp(&logits[a.0 as usize]).unwrap();
        by_logit.then(a.0.cmp(&b.0))
    });
    if truncation.top_k > 0 {
        kept.truncate(truncation.top_k);
    }
    if truncation.top_p < 1.0 {
        let total: f64 = kept.iter().map(|(_, w)| w).sum();
        let mut sum = 0.0;
        let needed = kept.iter().position(|(_, w)| {
            sum += w;
            sum >= f64::from(truncation.top_p) * total
        });
        kept.truncate(needed.map_or(kept.len(), |at| at + 1));
    }
    kept.retain(|(_, w)| *w >= f64::from(truncation.min_p));
    kept.sort_by_key(|(id, _)| *id);
    kept
}

/// Returns whether the expected token depends on rounding: a truncation or sample close to a boundary.
fn close_call(logits: &[f32], truncation: &Truncation, uniform: f64) -> bool {
    const MARGIN: f64 = 1e-5;
    let with = |top_p: f32, min_p: f32| oracle(logits, &Truncation { top_p, min_p, ..*truncation });
    let margin = MARGIN as f32;
    let kept = oracle(logits, truncation);
    let ids = |kept: &[(u32, f64)]| kept.iter().map(|(id, _)| *id).collect::<Vec<_>>();
    let nudged = [
        with(truncation.top_p * (1.0 - margin), truncation.min_p),
        with((truncation.top_p * (1.0 + margin)).min(1.0), truncation.min_p),
        with(truncation.top_p, truncation.min_p * (1.0 - margin)),
        with(truncation.top_p, truncation.min_p * (1.0 + margin)),
    ];
    if truncation.min_p > 0.0 && truncation.min_p < 1.0 && nudged[2..].iter().any(|n| ids(n) != ids(&kept)) {
        return true;
    }
    if truncation.top_p < 1.0 && nudged[..2].iter().any(|n| ids(n) != ids(&kept)) {
        return true;
    }
    let total: f64 = kept.iter().map(|(_, w)| w).sum();
    let mut sum = 0.0;
    kept.iter().any(|(_, w)| {
        sum += w;
        (sum / total - uniform).abs() < MARGIN
    })
}

proptest! {
    #![proptest_config(crate::test_size::cases(2000))]

    #[test]
    fn a_sample_is_the_one_that_sorting_everything_gives(
        logits in logits(), truncation in truncation(), uniform in 0.0f64..1.0,
    ) {
        prop_assume!(logits.iter().any(|logit| logit.is_finite()));
        let kept = oracle(&logits, &truncation);
        let total: f64 = kept.iter().map(|(_, w)| w).sum();
        let mut sum = 0.0;
        let expected = kept.iter().find(|(_, w)| { sum += w; sum > uniform * total }).map(|(id, _)| *id);
        let mut workspace = Workspace::default();
        for isa in Isa::tested() {
            let token = sample(isa, &logits, &truncation, uniform, &mut workspace);
            prop_assert!(logits[token as usize] > f32::NEG_INFINITY, "a masked token was drawn");
            if !close_call(&logits, &truncation, uniform) {
                prop_assert_eq!(Some(token), expected, "{}", isa.name());
            }
            // What a request's `top_p` of 0 becomes.
            let greedy = Truncation { top_p: f32::MIN_POSITIVE, min_p: 0.0, ..truncation };
            let token = sample(isa, &logits, &greedy, uniform, &mut workspace);
            prop_assert_eq!(token, argmax(isa, &logits), "{}", isa.name());
        }
    }

    #[test]
    fn the_best_tokens_come_in_order_with_ties_by_lower_id(logits in logits(), count in 0usize..450) {
        let mut sorted: Vec<(u32, f32)> = logits.iter().enumerate().map(|(id, l)| (id as u32, *l)).collect();
        sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        let mut workspace = Workspace::default();
        for isa in Isa::tested() {
            prop_assert_eq!(argmax(isa, &logits), sorted[0].0);
            let total = log_sum_exp(isa, &logits, &mut workspace);
            let best = f64::from(sorted[0].1);
            if best.is_finite() {
                let exact = best + logits.iter().map(|l| (f64::from(*l) - best).exp()).sum::<f64>().ln();
                prop_assert!((total - exact).abs() < 1e-5);
            }
        }
        let ours: Vec<_> = top(&logits, count, &mut workspace).collect();
        sorted.truncate(count);
        prop_assert_eq!(ours, sorted);
    }

    #[test]
    fn arbitrary_logits_never_panic(
        mut logits in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 1..100), truncation in truncation(),
        uniform in 0.0f64..1.0,
    ) {
        let mut workspace = Workspace::default();
        for isa in Isa::tested() {
            prop_assert!((argmax(isa, &logits) as usize) < logits.len());
            mask_nan(&mut logits);
            prop_assert!((sample(isa, &logits, &truncation, uniform, &mut workspace) as usize) < logits.len());
            log_sum_exp(isa, &logits, &mut workspace);
            top(&logits, 5, &mut workspace).for_each(drop);
        }
    }
}

#[test]
fn one_infinite_or_nan_logit_anywhere_makes_a_row_not_finite() {
    for isa in Isa::tested() {
        for count in 0..140 {
            let mut logits: Vec<f32> =
                (0..count).map(|i| if i % 2 == 0 { f32::MAX } else { -1e-42 }).collect();
            assert!(all_finite(isa, &logits), "{} {count}", isa.name());
            for at in 0..count {
                let sound = logits[at];
                for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    logits[at] = broken;
                    assert!(!all_finite(isa, &logits), "{} {at} of {count}", isa.name());
                }
                logits[at] = sound;
            }
        }
    }
}

#[test]
fn nan_is_never_sampled() {
    for isa in Isa::tested() {
        for at in 0..40 {
            let mut logits = vec![f32::NAN; 40];
            logits[at] = -5.0;
            assert_eq!(argmax(isa, &logits), at as u32, "{}", isa.name());
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too long for an interpreter")]
fn tokens_are_sampled_as_often_as_they_are_probable() {
    let logits: Vec<f32> = (0..300).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
    let truncations = [
        Truncation { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
        Truncation { temperature: 0.7, top_k: 40, top_p: 0.9, min_p: 0.05 },
        Truncation { temperature: 1.5, top_k: 0, top_p: 0.8, min_p: 0.0 },
    ];
    const DRAWS: u32 = 200_000;
    for truncation in truncations {
        let kept = oracle(&logits, &truncation);
        let total: f64 = kept.iter().map(|(_, w)| w).sum();
        let mut counts = vec![0u32; logits.len()];
        let mut workspace = Workspace::default();
        for position in 0..DRAWS {
            let uniform = crate::RandomKey { seed: 99, choice: 0, position, draw: 0 }.uniform();
            counts[sample(Isa::detect(), &logits, &truncation, uniform, &mut workspace) as usize] += 1;
        }
        let drawn: u32 = kept.iter().map(|(id, _)| counts[*id as usize]).sum();
        assert_eq!(drawn, DRAWS, "a token that was truncated was sampled: {truncation:?}");
        // Chi-squared against its mean plus five standard deviations.
        let mut chi = 0.0;
        for (id, weight) in &kept {
            let expected = weight / total * f64::from(DRAWS);
            chi += (f64::from(counts[*id as usize]) - expected).powi(2) / expected;
        }
        let freedom = kept.len() as f64 - 1.0;
        assert!(
            chi < freedom + 5.0 * (2.0 * freedom).sqrt(),
            "chi^2 = {chi} for {freedom} degrees: {truncation:?}"
        );
    }
}
