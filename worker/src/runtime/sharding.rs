//! How a model is cut into the shards of a tensor-parallel group.
//!
//! As in Megatron-LM (Shoeybi et al., 2019): queries, keys and values are cut by heads and gates and ups by columns of the
//! intermediate state, so that each rank goes from its own columns through attention or activation without the others;
//! the products after that are cut along the reduction, and their sums added over the ranks. The head is cut by rows of
//! the vocabulary. The embedding is not cut: one row a token is read, from a file that all ranks map.
//!
//! A group of query heads stays with its key and value head. Where there are more ranks than those, several ranks hold the
//! same one, each with a part of its query heads.

use std::ops::Range;

use crate::models::ModelConfig;

/// Most ranks of a group.
pub const RANKS_MAX: usize = 64;

/// What one rank holds of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Which rank's it is.
    pub rank: usize,
    /// Ranks of the group.
    pub ranks: usize,
    /// Query heads.
    pub heads: Range<usize>,
    /// Key and value heads.
    pub kv_heads: Range<usize>,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Columns of the intermediate state.
    pub intermediate: Range<usize>,
    /// Rows of the head.
    pub vocabulary: Range<usize>,
}

/// The matrices of a model that are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// Queries, keys and values, three matrices.
    Qkv,
    /// What goes from attention back to the hidden state.
    Output,
    /// Gates and ups, two matrices.
    GateUp,
    /// What goes from the intermediate back to the hidden state.
    Down,
    /// From the hidden state to logits.
    Head,
}

/// A rank's part of a matrix [outputs, inputs].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cut {
    /// Outputs, of each of the matrices that are one product. Biases go the same way.
    Outputs(Vec<Range<usize>>),
    /// Inputs: the product is a part of the sum. A bias is added by rank 0 alone.
    Inputs(Range<usize>),
}

/// How many neighbouring inputs of the matrices that are cut along them must stay together: those of a quantised group, of
/// a block in the file; 1 if each number stands for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grain {
    /// Of [`Matrix::Output`].
    pub output: usize,
    /// Of [`Matrix::Down`].
    pub down: usize,
}

/// A model that can't be cut into so many shards.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--tensor-parallel {world} can't divide this model: {fault}; {} would do", list(.works))]
pub struct Indivisible {
    /// Ranks asked for.
    pub world: usize,
    /// What is in the way.
    pub fault: Fault,
    /// Numbers of ranks that the model can be divided among.
    pub works: Vec<usize>,
}

/// Why not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Ranks would have unequal numbers of heads.
    #[error("its {0} attention heads are no multiple of it")]
    Heads(usize),
    /// A key and value head would be cut, or ranks would hold unequal numbers of them.
    #[error("its {0} key and value heads neither divide it nor are a multiple of it")]
    KvHeads(usize),
    /// Ranks would have unequal parts of the intermediate state.
    #[error("its intermediate size of {0} is no multiple of it")]
    Intermediate(usize),
    /// A rank would have no token.
    #[error("its vocabulary has {0} tokens only")]
    Vocabulary(usize),
    /// A group of numbers that share a scale would be cut.
    #[error(
        "a rank's {share} of the {inputs} inputs of {matrix} are not whole groups of {group} that share a scale"
    )]
    Group {
        /// The matrix's name.
        matrix: &'static str,
        /// Its inputs.
        inputs: usize,
        /// A rank's part of them.
        share: usize,
        /// Inputs that must stay together.
        group: usize,
    },
}

fn list(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// Cuts a model into `world` shards, by rank. Together they hold everything, and nothing twice but key and value heads
/// where there are fewer of those than ranks. `grain` knows what so many ranks must leave together.
///
/// # Errors
/// [`Indivisible`], with the numbers of ranks that would do.
pub fn shards(
    config: &ModelConfig,
    world: usize,
    grain: &dyn Fn(usize) -> Grain,
) -> Result<Vec<Shard>, Indivisible> {
    if let Some(fault) = fault(config, world, grain) {
        let works = (1..=RANKS_MAX).filter(|world| self::fault(config, *world, grain).is_none()).collect();
        return Err(Indivisible { world, fault, works });
    }
    let share = |whole: usize, rank: usize| whole * rank / world..whole * (rank + 1) / world;
    let shard = |rank: usize| Shard {
        rank,
        ranks: world,
        heads: share(config.heads, rank),
        kv_heads: match config.kv_heads < world {
            true => rank * config.kv_heads / world..rank * config.kv_heads / world + 1,
            false => share(config.kv_heads, rank),
        },
        head_dim: config.head_dim,
        intermediate: share(config.intermediate_size, rank),
        vocabulary: share(config.vocab_size, rank),
    };
    Ok((0..world).map(shard).collect())
}

fn fault(config: &ModelConfig, world: usize, grain: &dyn Fn(usize) -> Grain) -> Option<Fault> {
    let ModelConfig { heads, kv_heads, head_dim, intermediate_size, vocab_size, .. } = *config;
    let group = |matrix, inputs: usize, group: usize| {
        let share = inputs / world;
        let cut = world > 1 && !share.is_multiple_of(group);
        cut.then_some(Fault::Group { matrix, inputs, share, group })
    };
    match () {
        () if !heads.is_multiple_of(world) => Some(Fault::Heads(heads)),
        () if !kv_heads.is_multiple_of(world) && !world.is_multiple_of(kv_heads) => {
            Some(Fault::KvHeads(kv_heads))
        }
        () if !intermediate_size.is_multiple_of(world) => Some(Fault::Intermediate(intermediate_size)),
        () if vocab_size < world => Some(Fault::Vocabulary(vocab_size)),
        () => {
            let Grain { output, down } = grain(world);
            group("o_proj", heads * head_dim, output).or_else(|| group("down_proj", intermediate_size, down))
        }
    }
}

impl Shard {
    /// The configuration of a model that is what this rank computes between two sums.
    pub fn config(&self, whole: &ModelConfig) -> ModelConfig {
        ModelConfig {
            heads: self.heads.len(),
            kv_heads: self.kv_heads.len(),
            intermediate_size: self.intermediate.len(),
            ..whole.clone()
        }
    }

    /// This rank's part of a matrix.
    pub fn cut(&self, matrix: Matrix) -> Cut {
        let numbers = |heads: &Range<usize>| heads.start * self.head_dim..heads.end * self.head_dim;
        let (queries, keys) = (numbers(&self.heads), numbers(&self.kv_heads));
        match matrix {
            Matrix::Qkv => Cut::Outputs(vec![queries, keys.clone(), keys]),
            Matrix::Output => Cut::Inputs(queries),
            Matrix::GateUp => Cut::Outputs(vec![self.intermediate.clone(); 2]),
            Matrix::Down => Cut::Inputs(self.intermediate.clone()),
            Matrix::Head => Cut::Outputs(vec![self.vocabulary.clone()]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{ModelDir, ModelSource};
    use proptest::prelude::*;

    const PLAIN: Grain = Grain { output: 1, down: 1 };

    fn config(
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        intermediate: usize,
        vocab: usize,
    ) -> ModelConfig {
        let model = ModelDir::open(&ModelSource::Embedded).unwrap();
        let intermediate_size = intermediate;
        ModelConfig {
            heads,
            kv_heads,
            head_dim,
            intermediate_size,
            vocab_size: vocab,
            ..model.config().clone()
        }
    }

    /// The ranges, one after the other, are 0..`whole`.
    fn tile(whole: usize, mut ranges: impl Iterator<Item = Range<usize>>) -> bool {
        let mut at = 0;
        let mut next = |range: Range<usize>| std::mem::replace(&mut at, range.end) == range.start;
        ranges.all(&mut next) && at == whole
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn shards_hold_everything_once_and_queries_stay_with_their_keys(
            kv_heads in 1usize..9, group in 1usize..9, half_dim in 1usize..65, intermediate in 1usize..300,
            vocab in 1usize..400, world in 1usize..17, grain in prop::sample::select(vec![1, 8, 32, 64]),
        ) {
            let (heads, head_dim) = (kv_heads * group, 2 * half_dim);
            let config = config(heads, kv_heads, head_dim, intermediate, vocab);
            let grain = Grain { output: grain, down: grain };
            let shards = match shards(&config, world, &|_| grain) {
                Ok(shards) => shards,
                Err(refused) => {
                    prop_assert!(world > 1 && !refused.works.contains(&world));
                    for works in refused.works {
                        prop_assert!(self::shards(&config, works, &|_| grain).is_ok());
                    }
                    return Ok(());
                }
            };
            prop_assert_eq!(shards.len(), world);
            prop_assert!(tile(heads, shards.iter().map(|shard| shard.heads.clone())));
            prop_assert!(tile(intermediate, shards.iter().map(|shard| shard.intermediate.clone())));
            prop_assert!(tile(vocab, shards.iter().map(|shard| shard.vocabulary.clone())));
            for matrix in [Matrix::Output, Matrix::Down] {
                let inputs = |shard: &Shard| match shard.cut(matrix) {
                    Cut::Inputs(inputs) => inputs,
                    Cut::Outputs(_) => 0..0,
                };
                let whole = if matrix == Matrix::Output { heads * head_dim } else { intermediate };
                prop_assert!(tile(whole, shards.iter().map(inputs)));
                for shard in shards.iter().filter(|_| world > 1) {
                    prop_assert!(inputs(shard).start % grain.down == 0 && inputs(shard).len() % grain.down == 0);
                }
            }
            for shard in &shards {
                prop_assert_eq!(shard.heads.len(), heads / world);
                prop_assert!(!shard.vocabulary.is_empty());
                // By its place in the shard, a query finds the very key head that it has in the whole model.
                let own_group = shard.heads.len() / shard.kv_heads.len();
                prop_assert_eq!(shard.heads.len() % shard.kv_heads.len(), 0);
                for (place, head) in shard.heads.clone().enumerate() {
                    prop_assert_eq!(shard.kv_heads.start + place / own_group, head / group);
                }
                let Cut::Outputs(qkv) = shard.cut(Matrix::Qkv) else { panic!("rows are cut") };
                prop_assert_eq!(&qkv[0], &(shard.heads.start * head_dim..shard.heads.end * head_dim));
                prop_assert_eq!(&qkv[1], &qkv[2]);
            }
        }
    }

    #[test]
    fn what_can_not_be_divided_is_named_with_what_can() {
        let refused =
            |config: &ModelConfig, world, grain| shards(config, world, &|_| grain).unwrap_err().to_string();
        // Qwen2.5-0.5B and the demo model.
        let qwen = config(14, 2, 64, 4864, 151_936);
        let demo = config(6, 2, 32, 480, 2048);
        for (model, world, grain, clues) in [
            (&qwen, 4, PLAIN, ["--tensor-parallel 4", "14 attention heads", "1, 2 would do"]),
            (&qwen, 7, PLAIN, ["--tensor-parallel 7", "2 key and value heads", "1, 2 would do"]),
            (&qwen, 14, PLAIN, ["--tensor-parallel 14", "intermediate size of 4864", "1, 2 would do"]),
            (
                &demo,
                6,
                Grain { output: 64, down: 1 },
                ["32 of the 192 inputs of o_proj", "groups of 64", "1 would do"],
            ),
            (
                &demo,
                2,
                Grain { output: 32, down: 64 },
                ["240 of the 480 inputs of down_proj", "groups of 64", "1 would"],
            ),
            (&demo, 0, PLAIN, ["--tensor-parallel 0", "6 attention heads", "1, 2, 6 would do"]),
        ] {
            let message = refused(model, world, grain);
            for clue in clues {
                assert!(message.contains(clue), "{clue}: {message}");
            }
        }
    }
}
