//! Deliberate faults of the scheduler, for mutation testing.

/// Deliberate fault of the scheduler that the tests must detect. Selectable only with the feature `mutants`;
/// without it the check is a constant `false`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// Frees the blocks of a swapped-out sequence before the fence of the copy.
    FreeBeforeFence,
    /// Preempts the oldest sequence instead of the cheapest one.
    VictimOldest,
    /// Does not subtract decodes from the token budget.
    BudgetIgnoresDecodes,
    /// Preempts a resumed sequence again before it made progress, though others could be preempted.
    ProgressNotRequired,
    /// Preempts a marked sequence even if the beneficiary no longer needs its blocks.
    MarkNotRechecked,
    /// Admits sequences past one that does not fit without a bound.
    UnboundedBypass,
    /// Plans no token for the first sequence in policy order while others run.
    FirstSkipped,
}
