//! Mutation tests: every fault injected into the kernels must fail some property.

use std::panic::{AssertUnwindSafe, catch_unwind};

use inflight_kernel_harness::{Harness, Mutant};

use crate::device::TestDevice;
use crate::{attention, delta, drafts, non_finite, product, sampling, sampling_split};

/// Returns whether the property, a test function, panics with the mutant active.
fn detects(property: fn(), mutant: Mutant) -> bool {
    crate::expecting_failure(|| mutant.within(|| catch_unwind(AssertUnwindSafe(property)).is_err()))
}

#[test]
fn every_mutant_of_a_kernel_fails_the_property_it_breaks() {
    if !TestDevice::is_harness() {
        return;
    }
    let exact: fn() = attention::attention_over_a_ragged_batch_is_exact_to_rounding;
    let skinny: fn() = product::skinny_gemm_is_correct_and_bits_depend_on_the_row_alone;
    for mutant in Mutant::ALL {
        let properties: &[(&str, fn())] = match mutant {
            Mutant::MissingWait => {
                &[("attention", exact), ("product", product::gemm_is_correct_and_batch_invariant)]
            }
            Mutant::MergeOrder => {
                &[("attention's bits", attention::rows_have_the_same_bits_for_any_key_splits)]
            }
            Mutant::SplitParts | Mutant::SplitBins | Mutant::SplitMasses => {
                &[("split rows", sampling_split::split_rows_yield_what_one_block_does)]
            }
            Mutant::InfiniteKeys => {
                &[("stored heads", non_finite::heads_with_an_element_that_is_not_finite_are_nan)]
            }
            Mutant::NonFiniteLogits => {
                &[("logits", non_finite::rows_of_logits_that_are_not_finite_are_marked_and_change_no_other)]
            }
            Mutant::DraftState | Mutant::LogSlot | Mutant::ResumedInputs => &[(
                "the delta rule",
                delta::bits_depend_on_no_chunk_draft_or_neighbour_and_agree_with_the_cpu,
            )],
            Mutant::DrawPosition => &[("sampling", sampling::tokens_and_logprobs_equal_those_of_the_cpu)],
            Mutant::NoKernelWait => &[
                ("attention", exact),
                ("product", product::gemm_is_correct_and_batch_invariant),
                ("sampling", sampling::tokens_and_logprobs_equal_those_of_the_cpu),
                ("drafts", drafts::tokens_that_count_equal_those_drawn_one_by_one),
                ("skinny product", skinny),
                ("the delta rule", delta::bits_depend_on_no_chunk_draft_or_neighbour_and_agree_with_the_cpu),
            ],
            Mutant::MissedBarrier if !Harness::CHECKED => continue,
            Mutant::MissedBarrier => &[
                ("attention", exact),
                ("product", product::gemm_is_correct_and_batch_invariant),
                ("the delta rule", delta::bits_depend_on_no_chunk_draft_or_neighbour_and_agree_with_the_cpu),
            ],
            Mutant::DraftPenalty | Mutant::DraftWord | Mutant::DraftMinimum | Mutant::RejectedCounts => {
                &[("drafts", drafts::tokens_that_count_equal_those_drawn_one_by_one)]
            }
            Mutant::EarlyRead | Mutant::LastWarp | Mutant::LastChunk => &[("skinny product", skinny)],
            Mutant::ScaleLine
            | Mutant::BlockEdge
            | Mutant::WindowEdge
            | Mutant::CausalEdge
            | Mutant::MergeMaximum => &[("attention", exact)],
        };
        for (name, property) in properties {
            assert!(detects(*property, mutant), "{mutant:?} is not found by the property of {name}");
        }
    }
}
