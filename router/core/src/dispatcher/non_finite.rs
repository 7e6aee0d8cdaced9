//! Attempts of a request that ended because the model's logits were not finite.

/// Where an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    /// Index of the choice.
    pub choice: u32,
    /// Output tokens of the choice.
    pub tokens: u32,
    /// Prompt tokens whose log probabilities were received.
    pub scored: u32,
}

/// Attempts of a request that ended because the model's logits were not finite.
///
/// One such attempt shows that the worker is broken, or that the model overflows on this request. Another one that ends at the same position
/// shows the latter: workers that follow the same numbers end at the same one. The request ends then, and no worker is blamed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct NonFiniteAttempts {
    last: Option<Position>,
    count: u32,
}

impl NonFiniteAttempts {
    /// Maximum number of attempts that end so, wherever they do.
    pub const MAX: u32 = 4;

    /// Records that an attempt ended at `position`. Returns whether the request is to end, else it is resubmitted.
    pub fn record(&mut self, position: Position) -> bool {
        self.count += 1;
        let again = self.last.replace(position) == Some(position);
        again || self.count >= Self::MAX
    }

    /// Returns the number of attempts.
    pub fn count(&self) -> u32 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_position_twice_ends_the_request_and_so_does_the_fourth_attempt() {
        let at = |tokens| Position { choice: 0, tokens, scored: 0 };
        let mut attempts = NonFiniteAttempts::default();
        assert_eq!([at(5), at(5)].map(|position| attempts.record(position)), [false, true]);
        let mut attempts = NonFiniteAttempts::default();
        let ended = [at(5), at(6), at(5), at(7)].map(|position| attempts.record(position));
        assert_eq!((ended, attempts.count()), ([false, false, false, true], 4));
        let mut attempts = NonFiniteAttempts::default();
        let other = Position { choice: 1, ..at(5) };
        assert_eq!([at(5), other].map(|position| attempts.record(position)), [false, false]);
    }
}
