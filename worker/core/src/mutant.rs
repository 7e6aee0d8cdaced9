/// Ways to break the scheduler on purpose, to see that the tests notice. Only builds with the feature `mutants` can
/// choose one; in all others the compiler removes the question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// A swapped sequence's blocks are free before the copy to the host has reached its fence.
    FreeBeforeFence,
    /// The oldest gives way.
    VictimOldest,
    /// Decodes are not subtracted from the budget.
    BudgetIgnoresDecodes,
    /// One that has just come back gives way again before it got on, though others could.
    NoProgressForgotten,
    /// Who was marked to give way does, whether it is still needed or not.
    MarkNotRechecked,
    /// One that does not fit is passed without end.
    PassedForEver,
    /// The first in order gets nothing while others run.
    FirstSkipped,
}
