//! Sizes of the unit tests. Under Miri, which interprets some 1,000 times slower, they are smaller: a few cases over shapes
//! that still cross every vector, panel and block boundary of the portable kernels.

use proptest::prelude::ProptestConfig;

/// Returns `size`, or `interpreted` under Miri.
pub(crate) const fn size(size: usize, interpreted: usize) -> usize {
    if cfg!(miri) { interpreted } else { size }
}

/// Configures a property of `count` cases; of two under Miri.
pub(crate) fn cases(count: u32) -> ProptestConfig {
    ProptestConfig {
        // A failure is printed with its input; there is no file system to keep it under Miri.
        failure_persistence: None,
        ..ProptestConfig::with_cases(if cfg!(miri) { 2 } else { count })
    }
}
