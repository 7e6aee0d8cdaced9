//! Streaming search for stop strings (Knuth-Morris-Pratt).

/// Match of a stop string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StopMatch {
    /// Index of the stop string.
    pub(crate) stop: usize,
}

#[derive(Debug, Clone)]
struct Pattern {
    /// Index of the stop string.
    index: usize,
    bytes: Vec<u8>,
    /// Knuth-Morris-Pratt failure function: the longest proper border of each prefix.
    borders: Vec<usize>,
    /// Bytes of the pattern matched at the end of the text.
    matched: usize,
}

impl Pattern {
    fn new(index: usize, text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut borders = vec![0; bytes.len()];
        let mut border = 0;
        for at in 1..bytes.len() {
            while border > 0 && bytes[at] != bytes[border] {
                border = borders[border - 1];
            }
            border += usize::from(bytes[at] == bytes[border]);
            borders[at] = border;
        }
        Self { index, bytes, borders, matched: 0 }
    }

    /// Advances by one byte of the text. Returns whether the pattern ends there.
    fn step(&mut self, byte: u8) -> bool {
        if self.matched == self.bytes.len() {
            self.matched = self.borders[self.matched - 1];
        }
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }

    /// Returns the length of the longest suffix of the text that can still become a match.
    fn open(&self) -> usize {
        if self.matched == self.bytes.len() { self.borders[self.matched - 1] } else { self.matched }
    }
}

/// Finds stop strings in streamed text and releases only what cannot be part of one.
///
/// The match that is completed first wins; of several completed at the same byte the longest. The division of
/// the text into pieces has no effect. Cost: stop strings times bytes.
#[derive(Debug, Clone)]
pub(crate) struct StopMatcher {
    patterns: Vec<Pattern>,
    /// Longest suffix of the text that may still become part of a match.
    held: String,
}

impl StopMatcher {
    /// Creates a matcher; empty stop strings are ignored.
    pub(crate) fn new(stops: &[String]) -> Self {
        let wanted = stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        Self {
            patterns: wanted.map(|(index, stop)| Pattern::new(index, stop)).collect(),
            held: String::new(),
        }
    }

    /// Whether there are no stop strings; text then passes unchanged.
    pub(crate) fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Searches the next piece and appends the released text to `out`. With `armed` false, matches count as
    /// plain text. Nothing may be pushed after a match.
    pub(crate) fn push(&mut self, piece: &str, armed: bool, out: &mut String) -> Option<StopMatch> {
        if self.patterns.is_empty() {
            out.push_str(piece);
            return None;
        }
        let before = self.held.len();
        self.held.push_str(piece);
        for (at, byte) in piece.bytes().enumerate() {
            let mut longest: Option<(usize, usize)> = None;
            for pattern in &mut self.patterns {
                let len = pattern.bytes.len();
                if pattern.step(byte) && longest.is_none_or(|(_, most)| len > most) {
                    longest = Some((pattern.index, len));
                }
            }
            if let (Some((stop, len)), true) = (longest, armed) {
                // Text before a marker is released already.
                out.push_str(&self.held[..(before + at + 1).saturating_sub(len)]);
                self.held.clear();
                return Some(StopMatch { stop });
            }
        }
        let open = self.patterns.iter().map(Pattern::open).max().unwrap_or(0);
        let safe = self.held.len().saturating_sub(open);
        out.push_str(&self.held[..safe]);
        self.held.drain(..safe);
        None
    }

    /// Searches the next piece of text and a marker behind it, which is no part of the text but may be the end of a stop string, or
    /// within one. Appends all text before the marker, unless a match ends earlier.
    pub(crate) fn push_marker(
        &mut self,
        piece: &str,
        marker: &str,
        armed: bool,
        out: &mut String,
    ) -> Option<StopMatch> {
        let before = format!("{}{piece}", self.held);
        let mut released = String::new();
        let found = self.push(&format!("{piece}{marker}"), armed, &mut released);
        out.push_str(if found.is_some() { &released } else { &before });
        self.held.clear();
        found
    }

    /// Appends the held-back text: it has ended without a match.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reference: the earliest end of an armed stop string, and the longest one that ends there.
    fn naive(text: &str, stops: &[String], armed_from: usize) -> (String, Option<usize>) {
        for end in (armed_from..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let ends_here = |stop: &&(usize, &String)| text[..end].ends_with(stop.1.as_str());
            let matches: Vec<_> = stops.iter().enumerate().collect();
            // max_by_key returns the last of equals; the first of equal strings is expected.
            if let Some((index, stop)) = matches.iter().rev().filter(ends_here).max_by_key(|(_, s)| s.len()) {
                return (text[..end - stop.len()].to_owned(), Some(*index));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn equals_find_and_truncate_on_the_whole_text(
            text in "[abé]{0,60}", stops in proptest::collection::vec("[abé]{1,4}", 0..4),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..20), unarmed in 0usize..6) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1))
                .filter(|cut| text.is_char_boundary(*cut)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let mut matcher = StopMatcher::new(&stops);
            let mut out = String::new();
            let mut found = None;
            let armed_from = cuts[unarmed.min(cuts.len() - 1)];
            let (expected, stop) = naive(&text, &stops, armed_from + 1);
            for (i, pair) in cuts.windows(2).enumerate() {
                found = matcher.push(&text[pair[0]..pair[1]], i >= unarmed, &mut out);
                prop_assert!(expected.starts_with(&out), "what was shown never has to be taken back");
                if found.is_some() { break; }
            }
            if found.is_none() { matcher.finish(&mut out); }
            prop_assert_eq!(out, expected);
            prop_assert_eq!(found.map(|f| f.stop), stop);
        }

        #[test]
        fn markers_count_as_their_text_and_are_no_part_of_it(
            pieces in proptest::collection::vec(("[ab]{0,4}", proptest::option::of("[ab]{0,3}")), 0..12),
            stops in proptest::collection::vec("[ab]{1,6}", 1..4),
        ) {
            let mut matcher = StopMatcher::new(&stops);
            let (mut whole, mut plain, mut out, mut found) = (String::new(), String::new(), String::new(), None);
            for (piece, marker) in &pieces {
                whole += piece;
                plain += piece;
                match marker {
                    None => found = matcher.push(piece, true, &mut out),
                    Some(marker) => {
                        whole += marker;
                        found = matcher.push_marker(piece, marker, true, &mut out);
                        // All text before a marker is released, as the parser must process it before the marker.
                        prop_assert!(found.is_some() || out == plain);
                    }
                }
                if found.is_some() { break; }
            }
            if found.is_none() { matcher.finish(&mut out); }
            prop_assert_eq!(found.map(|found| found.stop), naive(&whole, &stops, 1).1);
            prop_assert!(found.is_some() || out == plain);
        }

        #[test]
        fn only_the_longest_suffix_that_could_become_a_match_is_held_back(
            text in "[ab]{0,30}", stops in proptest::collection::vec("[ab]{1,5}", 1..4)) {
            let mut matcher = StopMatcher::new(&stops);
            let mut out = String::new();
            if matcher.push(&text, true, &mut out).is_none() {
                let could = |held: &str| stops.iter().any(|stop| stop.len() > held.len() && stop.starts_with(held));
                let longest = (0..=text.len()).find(|from| could(&text[*from..])).unwrap_or(text.len());
                prop_assert_eq!(&out, &text[..longest]);
            }
        }
    }
}
