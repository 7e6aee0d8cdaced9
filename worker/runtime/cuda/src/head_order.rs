//! Order of the elements of a head on the device.
//!
//! Kernels rotate element i of a query or key together with element i + head_dim / 2. A partial rotary embedding rotates the first
//! elements alone, i together with i + rotated / 2. So the rows of the projections to queries and keys are reordered at load: such pairs
//! come to where kernels expect them, and the other elements, whose angles are 0, fill the places between. Scores do not depend on the order.

use std::ops::Range;

use inflight_models::ModelConfig;

/// Order of the elements of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadOrder {
    head_dim: usize,
    /// Elements that are rotated.
    rotated: usize,
}

impl HeadOrder {
    pub(super) fn of(config: &ModelConfig) -> Self {
        Self { head_dim: config.head_dim, rotated: config.rotated_dim }
    }

    /// Elements of a head.
    pub(super) fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Returns the elements of a head in the device's order, if its first one has the index `first`.
    pub(super) fn elements(&self, first: usize) -> [Range<usize>; 4] {
        let (half, pairs) = (self.head_dim / 2, self.rotated / 2);
        // Of the elements that are not rotated, as many in each half as there are places.
        let others = half - pairs;
        [
            first..first + pairs,
            first + self.rotated..first + self.rotated + others,
            first + pairs..first + self.rotated,
            first + self.rotated + others..first + self.head_dim,
        ]
    }

    /// Returns a vector with an element for each of a head in the device's order.
    pub(super) fn reorder(&self, vector: &[f32]) -> Vec<f32> {
        self.elements(0).into_iter().flat_map(|part| vector[part].iter().copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_a_partial_rotary_embedding_are_half_a_head_apart() {
        for (head_dim, rotated) in [(256, 64), (64, 64), (64, 2), (128, 96)] {
            let order = HeadOrder { head_dim, rotated };
            let elements: Vec<usize> = order.elements(1000).into_iter().flatten().collect();
            let mut sorted = elements.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (1000..1000 + head_dim).collect::<Vec<_>>());
            for i in 0..rotated / 2 {
                assert_eq!((elements[i], elements[i + head_dim / 2]), (1000 + i, 1000 + i + rotated / 2));
            }
        }
        let whole = HeadOrder { head_dim: 8, rotated: 8 };
        assert_eq!(
            whole.reorder(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]),
            [0., 1., 2., 3., 4., 5., 6., 7.]
        );
    }
}
