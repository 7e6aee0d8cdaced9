//! Collectives between the ranks of a tensor-parallel group.
//!
//! All ranks of a group make the same calls in the same order. Sums are taken in ascending order of the
//! ranks, so their bits depend on the degree alone, never on timing. A group fails as a whole: a failure of
//! one rank ends all calls of the others, including blocked ones, with an error that names it.

mod shared_memory;
#[cfg(test)]
mod tests;

pub use shared_memory::SharedMemory;

/// Failure of a rank, after which the group can't be used any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} of the tensor-parallel group failed: {reason}")]
pub struct GroupFailed {
    /// Index of the failed rank.
    pub rank: usize,
    /// Cause of the failure.
    pub reason: String,
}

/// Handle of one rank to its group.
pub trait Collective: Send {
    /// Index of this rank; below [`Collective::world`].
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// Replaces `elements` on every rank by their sum over all ranks, in f32 and in ascending order of the
    /// ranks. All ranks pass equally many.
    ///
    /// # Errors
    /// The group failed, or the lengths differ; `elements` is then undefined.
    fn all_reduce(&self, elements: &mut [f32]) -> Result<(), GroupFailed>;

    /// Concatenates the columns of all ranks in ascending order. `part` is this rank's [rows, columns]; the
    /// number of columns may differ by rank. Ranks that pass `whole`, [rows, columns of all ranks], receive
    /// the result.
    ///
    /// # Errors
    /// The group failed, or the shapes do not match; `whole` is then undefined.
    fn gather(&self, part: &[f32], rows: usize, whole: Option<&mut [f32]>) -> Result<(), GroupFailed>;

    /// Blocks until every rank has called it.
    ///
    /// # Errors
    /// The group failed.
    fn barrier(&self) -> Result<(), GroupFailed>;

    /// Fails the group on behalf of this rank. Only the first reason is kept.
    fn fail(&self, reason: &str);

    /// Returns the failure of the group, if it has failed.
    fn failure(&self) -> Option<GroupFailed>;
}

/// Group of one rank: every collective is a no-op or a copy.
#[derive(Debug, Default, Clone, Copy)]
pub struct SingleRank;

impl Collective for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn all_reduce(&self, _elements: &mut [f32]) -> Result<(), GroupFailed> {
        Ok(())
    }

    fn gather(&self, part: &[f32], _rows: usize, whole: Option<&mut [f32]>) -> Result<(), GroupFailed> {
        match whole {
            Some(whole) if whole.len() != part.len() => {
                let reason = format!("{} elements are gathered into {}", part.len(), whole.len());
                Err(GroupFailed { rank: 0, reason })
            }
            Some(whole) => {
                whole.copy_from_slice(part);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn barrier(&self) -> Result<(), GroupFailed> {
        Ok(())
    }

    // The only rank knows its own failure.
    fn fail(&self, _reason: &str) {}

    fn failure(&self) -> Option<GroupFailed> {
        None
    }
}

/// Returns the handles, by rank, of a group of `world` threads of this process.
pub fn host_group(world: usize) -> Vec<Box<dyn Collective>> {
    match world {
        1 => vec![Box::new(SingleRank)],
        _ => SharedMemory::group(world).into_iter().map(|end| Box::new(end) as Box<dyn Collective>).collect(),
    }
}
