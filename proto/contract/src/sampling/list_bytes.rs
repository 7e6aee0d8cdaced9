//! Bytes of the lists among sampling parameters.

use crate::Constraint;

/// Bytes of the lists that each request of a message has for itself.
pub(super) fn own_list_bytes(logit_bias: &[(u32, f32)], bad_word_token_ids: &[Vec<u32>]) -> usize {
    size_of_val(logit_bias) + bad_word_token_ids.iter().map(|word| size_of_val(&word[..])).sum::<usize>()
}

/// Bytes of the lists that the requests of a message share.
pub(super) fn shared_list_bytes(allowed_token_ids: &[u32], constraint: Option<&Constraint>) -> usize {
    let grammar = constraint.map_or(0, |one| one.grammar.texts().iter().map(String::len).sum());
    size_of_val(allowed_token_ids) + grammar
}
