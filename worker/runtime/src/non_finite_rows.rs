//! Rows of a step whose logits are not all finite.

/// Rows of a step whose logits are not all finite, before penalties, biases and masks: the arithmetic that led to them has overflowed or is
/// broken, and their samples and scores have no meaning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NonFiniteRows {
    /// Indices of the sample rows, ascending.
    pub samples: Vec<u32>,
    /// Indices of the scored rows, ascending.
    pub scores: Vec<u32>,
}

impl NonFiniteRows {
    /// Removes all rows.
    pub fn clear(&mut self) {
        self.samples.clear();
        self.scores.clear();
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty() && self.scores.is_empty()
    }
}
