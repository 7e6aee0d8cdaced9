//! Tests of the tests: with a fault in the kernels, some property must not hold.

use std::panic::{AssertUnwindSafe, catch_unwind};

use inflight_kernels::cuda::{Harness, Mutant};

use crate::machine::Machine;
use crate::{attention, product, sampling};

/// Whether the property, a test that panics where it does not hold, is found not to hold.
fn finds(property: fn(), mutant: Mutant) -> bool {
    crate::without_shrinking(|| mutant.within(|| catch_unwind(AssertUnwindSafe(property)).is_err()))
}

#[test]
fn every_fault_in_a_kernel_is_found_by_the_property_it_breaks() {
    if !Machine::is_harness() {
        return;
    }
    let exact: fn() = attention::attention_over_a_ragged_batch_is_exact_to_rounding;
    let skinny: fn() = product::products_of_few_rows_are_right_and_their_bits_depend_on_the_row_alone;
    for mutant in Mutant::ALL {
        let properties: &[(&str, fn())] = match mutant {
            Mutant::MissingWait => &[
                ("attention", exact),
                ("product", product::products_are_right_and_a_row_has_the_same_bits_alone_and_among_many),
            ],
            Mutant::MergeOrder => &[(
                "attention's bits",
                attention::rows_of_many_splits_have_the_same_bits_however_they_are_cut,
            )],
            Mutant::DrawPosition => {
                &[("sampling", sampling::tokens_and_log_probabilities_are_those_of_the_cpu)]
            }
            Mutant::NoKernelWait => &[
                ("attention", exact),
                ("product", product::products_are_right_and_a_row_has_the_same_bits_alone_and_among_many),
                ("sampling", sampling::tokens_and_log_probabilities_are_those_of_the_cpu),
                ("skinny product", skinny),
            ],
            Mutant::MissedBarrier if !Harness::CHECKED => continue,
            Mutant::MissedBarrier => &[
                ("attention", exact),
                ("product", product::products_are_right_and_a_row_has_the_same_bits_alone_and_among_many),
            ],
            Mutant::EarlyRead | Mutant::LastWarp | Mutant::LastChunk => &[("skinny product", skinny)],
            Mutant::ScaleLine
            | Mutant::BlockEdge
            | Mutant::WindowEdge
            | Mutant::CausalEdge
            | Mutant::MergeMaximum => &[("attention", exact)],
        };
        for (name, property) in properties {
            assert!(finds(*property, mutant), "{mutant:?} is not found by the property of {name}");
        }
    }
}
