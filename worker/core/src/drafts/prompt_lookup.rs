//! Prompt lookup: drafts are what followed the last tokens where they occurred before, in prompt or output.

use super::DraftSource;

/// Tokens that must match before anything is drafted: the lengths of the two n-grams, the longer one first.
const ORDERS: [usize; 2] = [8, 3];
/// Maximum entries of a table, by its n-gram's hash: 128 KiB. Beyond it, older n-grams are overwritten.
const ENTRIES_MAX: usize = 1 << 15;
/// Minimum entries of a table.
const ENTRIES_MIN: usize = 1 << 10;
/// Maximum tokens indexed by a call, so that a long prompt does not delay an iteration: about 0.1 ms.
const INDEXED_MAX: usize = 1 << 14;

/// Index of a sequence's n-grams: for each the newest place where it ends.
///
/// Direct-mapped tables without chains: an update and a lookup take constant time, and a collision costs a draft,
/// not correctness, since the tokens at the place are compared.
#[derive(Debug, Default)]
pub struct PromptLookup {
    /// By order: position behind the newest n-gram with this hash; 0: none.
    tables: [Vec<u32>; ORDERS.len()],
    /// Tokens whose n-grams are in the tables. The n-gram that ends with the newest token is not: it would match
    /// itself.
    indexed: usize,
}

impl PromptLookup {
    /// Creates an empty index; it takes memory at the first call of [`DraftSource::propose`].
    pub fn new() -> Self {
        Self::default()
    }

    /// Indexes the n-grams that end before the newest token.
    fn index(&mut self, tokens: &[u32]) {
        let entries = tokens.len().next_power_of_two().clamp(ENTRIES_MIN, ENTRIES_MAX);
        if self.tables[0].len() < entries {
            // Larger tables place n-grams anew.
            self.tables.iter_mut().for_each(|table| {
                table.clear();
                table.resize(entries, 0);
            });
            self.indexed = tokens.len().saturating_sub(entries);
        }
        let last = tokens.len().saturating_sub(1).min(self.indexed + INDEXED_MAX);
        for end in self.indexed + 1..=last {
            for (table, order) in self.tables.iter_mut().zip(ORDERS) {
                if let Some(gram) = end.checked_sub(order).and_then(|start| tokens.get(start..end)) {
                    let bucket = bucket(gram, table.len());
                    table[bucket] = end as u32;
                }
            }
        }
        self.indexed = last.max(self.indexed);
    }

    /// Returns the position behind the newest earlier occurrence of the last tokens, of the longest n-gram that
    /// has one.
    fn lookup(&self, tokens: &[u32]) -> Option<usize> {
        self.tables.iter().zip(ORDERS).find_map(|(table, order)| {
            let gram = &tokens[tokens.len().checked_sub(order)?..];
            let end = *table.get(bucket(gram, table.len()))? as usize;
            let found = end.checked_sub(order).and_then(|start| tokens.get(start..end));
            (end < tokens.len() && found == Some(gram)).then_some(end)
        })
    }
}

impl DraftSource for PromptLookup {
    fn propose(&mut self, tokens: &[u32], max: usize, drafts: &mut Vec<u32>) {
        self.index(tokens);
        let Some(end) = self.lookup(tokens) else { return };
        let first = drafts.len();
        // Behind the newest token, a repetition continues with its own drafts.
        for at in end..end + max {
            let token = tokens.get(at).copied().unwrap_or_else(|| drafts[first + at - tokens.len()]);
            drafts.push(token);
        }
    }

    fn bytes(&self) -> usize {
        self.tables.iter().map(|table| table.len() * size_of::<u32>()).sum()
    }
}

/// Returns the table entry of an n-gram.
fn bucket(gram: &[u32], entries: usize) -> usize {
    let mix = |hash: u64, token: &u32| {
        let product = (hash ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        product ^ product >> 32
    };
    (gram.iter().fold(0x5851_f42d_4c95_7f2d, mix) >> 8) as usize & (entries.max(1) - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn propose(lookup: &mut PromptLookup, tokens: &[u32], max: usize) -> Vec<u32> {
        let mut drafts = Vec::new();
        lookup.propose(tokens, max, &mut drafts);
        drafts
    }

    /// What followed the newest earlier occurrence of the last tokens, found by comparing everywhere.
    fn reference(tokens: &[u32], max: usize) -> Vec<u32> {
        let newest = |order: usize| {
            let gram = tokens.get(tokens.len().checked_sub(order)?..)?;
            (order..tokens.len()).rev().find(|end| &tokens[end - order..*end] == gram)
        };
        let Some(end) = ORDERS.into_iter().find_map(newest) else { return Vec::new() };
        let mut all = tokens.to_vec();
        (end..end + max).for_each(|at| all.push(all[at]));
        all.split_off(tokens.len())
    }

    proptest! {
        #[test]
        fn drafts_follow_the_newest_longest_match(
            tokens in prop::collection::vec(0u32..3, 1..60), split in 1usize..60, max in 0usize..9,
        ) {
            // 3^8 n-grams in tables of 64 entries would collide; a table without collisions finds all.
            let mut lookup = PromptLookup {
                tables: [vec![0; ENTRIES_MAX], vec![0; ENTRIES_MAX]],
                indexed: 0,
            };
            for len in split.min(tokens.len())..=tokens.len() {
                let known = &tokens[..len];
                let drafts = propose(&mut lookup, known, max);
                // Collisions may still hide a match, but nothing else is drafted than what followed one.
                let expected = reference(known, max);
                let follows = ORDERS.into_iter().any(|order| {
                    (order..len).any(|end| {
                        let mut all = known.to_vec();
                        (end..end + max).for_each(|at| all.push(all[at]));
                        known[end - order..end] == known[len.max(order) - order..] && all[len..] == drafts
                    })
                });
                prop_assert!(drafts == expected || drafts.is_empty() || follows, "{known:?}: {drafts:?}");
            }
        }

        #[test]
        fn tables_of_any_size_propose_as_many_tokens_as_asked_or_none(
            tokens in prop::collection::vec(0u32..4, 0..300), max in 0usize..20,
        ) {
            let mut lookup = PromptLookup::new();
            for len in 0..=tokens.len() {
                let drafts = propose(&mut lookup, &tokens[..len], max);
                prop_assert!(drafts.is_empty() || drafts.len() == max);
            }
            prop_assert!(lookup.bytes() <= ORDERS.len() * ENTRIES_MAX * 4);
        }
    }

    #[test]
    fn a_copied_text_is_drafted_from_its_source() {
        let source: Vec<u32> = (100..200).collect();
        let mut lookup = PromptLookup::new();
        let mut tokens = source.clone();
        tokens.extend([7, 8, 9]);
        assert_eq!(propose(&mut lookup, &tokens, 4), [0; 0]);
        tokens.extend(&source[..3]);
        assert_eq!(propose(&mut lookup, &tokens, 4), source[3..7]);
        tokens.extend(&source[3..50]);
        assert_eq!(propose(&mut lookup, &tokens, 8), source[50..58]);
    }

    #[test]
    fn a_repetition_continues_with_its_own_drafts() {
        assert_eq!(propose(&mut PromptLookup::new(), &[1, 2, 1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
    }

    #[test]
    fn memory_is_bounded_and_a_long_prompt_is_indexed_over_several_calls() {
        let mut lookup = PromptLookup::new();
        let mut tokens: Vec<u32> = (0..200_000).collect();
        tokens.extend(199_000..199_010);
        let expected: Vec<u32> = (199_010..199_014).collect();
        let calls = (0..8).find(|_| propose(&mut lookup, &tokens, 4) == expected);
        assert!(calls.is_some_and(|calls| calls > 0), "found at call {calls:?}");
        assert_eq!(lookup.bytes(), ORDERS.len() * ENTRIES_MAX * 4);
    }
}
