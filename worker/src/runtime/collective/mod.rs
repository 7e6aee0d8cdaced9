//! What the ranks of a tensor-parallel group tell each other within a step.
//!
//! All ranks of a group make the same calls in the same order. A sum is taken in the order of the ranks, first to last,
//! whoever comes first: its bits depend on the degree alone, never on timing. A group fails as one: what goes wrong
//! on one rank ends every call of the others, those under way included, with an error that names it.

mod shared_memory;
#[cfg(test)]
mod tests;

pub use shared_memory::SharedMemory;

/// A rank of the group failed, and with it the group: it can't be used any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} of the tensor-parallel group failed: {reason}")]
pub struct GroupFailed {
    /// Which.
    pub rank: usize,
    /// What went wrong on it.
    pub reason: String,
}

/// One rank's end of a group.
pub trait Collective: Send {
    /// Which of the ranks it is; below [`Collective::world`].
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// Replaces `numbers` on every rank by the sum over all ranks, taken in ascending order of the ranks in f32. As
    /// many on each rank.
    ///
    /// # Errors
    /// The group failed, or the ranks' numbers differ in length; what is in `numbers` is then undefined.
    fn all_reduce(&self, numbers: &mut [f32]) -> Result<(), GroupFailed>;

    /// Puts the columns of all ranks side by side. `part` is this rank's [rows, columns], of as many columns as it
    /// likes; each rank that gives `whole`, [rows, columns of all], gets there the columns of rank 0, then those of rank 1
    /// and so on.
    ///
    /// # Errors
    /// The group failed, or the shapes do not match; what is in `whole` is then undefined.
    fn gather(&self, part: &[f32], rows: usize, whole: Option<&mut [f32]>) -> Result<(), GroupFailed>;

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// The group failed.
    fn barrier(&self) -> Result<(), GroupFailed>;

    /// Fails the group on behalf of this rank. The first reason stays.
    fn fail(&self, reason: &str);

    /// Why the group failed, if it has.
    fn failure(&self) -> Option<GroupFailed>;
}

/// A group of one rank: everything is there already.
#[derive(Debug, Default, Clone, Copy)]
pub struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn all_reduce(&self, _numbers: &mut [f32]) -> Result<(), GroupFailed> {
        Ok(())
    }

    fn gather(&self, part: &[f32], _rows: usize, whole: Option<&mut [f32]>) -> Result<(), GroupFailed> {
        match whole {
            Some(whole) if whole.len() != part.len() => {
                let reason = format!("{} numbers are gathered into {}", part.len(), whole.len());
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

    // A failure of the only rank is its caller's already.
    fn fail(&self, _reason: &str) {}

    fn failure(&self) -> Option<GroupFailed> {
        None
    }
}

/// The ends of a group of `world` threads of this process, by rank.
pub fn host_group(world: usize) -> Vec<Box<dyn Collective>> {
    match world {
        1 => vec![Box::new(Alone)],
        _ => SharedMemory::group(world).into_iter().map(|end| Box::new(end) as Box<dyn Collective>).collect(),
    }
}
