//! Tensor-parallel sharding: partition of a model's matrices among the ranks of a group.
//!
//! As in Megatron-LM (Shoeybi et al., 2019): the QKV projections are partitioned by heads, and the gate and
//! up projections by columns of the intermediate state (column parallel), so each rank computes attention or
//! activation on its own columns. The output and down projections are partitioned along the reduction (row
//! parallel), followed by an all-reduce. Recurrent layers are partitioned by heads, their output projection along the reduction. The LM head is partitioned by vocabulary. The embedding is not: one
//! row per token is read, from a file that all ranks map.
//!
//! A group of query heads stays with its KV head. With more ranks than KV heads, a KV head is replicated on
//! several ranks, each with a part of its query heads.

use std::ops::Range;

use inflight_models::{self as models, DeltaForm, DeltaSpec, Matrix, ModelConfig, StackedLinear};

/// Maximum ranks of a group.
pub const RANKS_MAX: usize = 64;

/// Part of a model that one rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Index of the rank.
    pub rank: usize,
    /// Number of ranks in the group.
    pub ranks: usize,
    /// Indices of the rank's query heads.
    pub heads: Range<usize>,
    /// Indices of the rank's KV heads.
    pub kv_heads: Range<usize>,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a hidden state, which all ranks have.
    pub hidden: usize,
    /// Rows of the query projection for an element of a query: 2 if it has those of gates, too.
    pub query_rows: usize,
    /// Gated delta rule of the recurrent layers, of the rank's heads.
    pub delta: Option<DeltaSpec>,
    /// Columns of the MLP's intermediate state.
    pub intermediate: Range<usize>,
    /// Rows of the LM head.
    pub vocabulary: Range<usize>,
}

/// Partition of a matrix [outputs, inputs] that one rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Partition {
    /// Column parallel: outputs of each stacked matrix, in one or several ranges. Biases are partitioned likewise.
    Outputs(Vec<Vec<Range<usize>>>),
    /// Row parallel: inputs, so each rank computes a partial sum. Only rank 0 adds the bias.
    Inputs(Range<usize>),
}

/// Alignment of row-parallel partitions in inputs: that of quantization groups and of blocks in the file; 1
/// without either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// Alignment of [`Matrix::Output`].
    pub output: usize,
    /// Alignment of [`Matrix::Down`].
    pub down: usize,
    /// Alignment of [`Matrix::DeltaOutput`].
    pub delta_output: usize,
}

/// Error for a tensor-parallel degree that the model can't be partitioned into.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--tensor-parallel {world} can't divide this model: {fault}; {} would do", list(.works))]
pub struct Indivisible {
    /// Requested number of ranks.
    pub world: usize,
    /// Obstacle.
    pub fault: IndivisibleCause,
    /// Supported numbers of ranks.
    pub works: Vec<usize>,
}

/// Obstacle to a tensor-parallel degree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IndivisibleCause {
    /// The heads of recurrent layers do not divide evenly among the ranks.
    #[error("the {0} key heads of its recurrent layers are no multiple of it")]
    Recurrent(usize),
    /// The heads of recurrent layers are in the order of GGUF files.
    #[error(
        "the value heads of its recurrent layers are in the order of GGUF files; safetensors can be divided"
    )]
    Tiled,
    /// The query heads do not divide evenly among the ranks.
    #[error("its {0} attention heads are no multiple of it")]
    Heads(usize),
    /// The KV heads do not divide evenly among the ranks, nor the ranks among them.
    #[error("its {0} key and value heads neither divide it nor are a multiple of it")]
    KvHeads(usize),
    /// The intermediate size does not divide evenly among the ranks.
    #[error("its intermediate size of {0} is no multiple of it")]
    Intermediate(usize),
    /// There are more ranks than tokens in the vocabulary.
    #[error("its vocabulary has {0} tokens only")]
    Vocabulary(usize),
    /// A partition would split a quantization group.
    #[error(
        "a rank's {share} of the {inputs} inputs of {matrix} are not whole groups of {group} that share a scale"
    )]
    Group {
        /// Name of the matrix.
        matrix: &'static str,
        /// Number of its inputs.
        inputs: usize,
        /// Inputs per rank.
        share: usize,
        /// Alignment in inputs.
        group: usize,
    },
}

fn list(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// Partitions a model into `world` shards, by rank. They are disjoint and complete, except that KV heads are
/// replicated if there are fewer of them than ranks. `alignment` returns the alignment for a number of ranks.
///
/// # Errors
/// [`Indivisible`], with the supported numbers of ranks.
pub fn shards(
    config: &ModelConfig,
    world: usize,
    alignment: &dyn Fn(usize) -> Alignment,
) -> Result<Vec<Shard>, Indivisible> {
    if let Some(fault) = fault(config, world, alignment) {
        let works =
            (1..=RANKS_MAX).filter(|world| self::fault(config, *world, alignment).is_none()).collect();
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
        hidden: config.hidden_size,
        query_rows: if config.arithmetic.output_gate { 2 } else { 1 },
        delta: config.delta.map(|delta| delta.of_rank(world)),
        intermediate: share(config.intermediate_size, rank),
        vocabulary: share(config.vocab_size, rank),
    };
    Ok((0..world).map(shard).collect())
}

/// Returns the first obstacle to partitioning among `world` ranks, if any.
fn fault(
    config: &ModelConfig,
    world: usize,
    alignment: &dyn Fn(usize) -> Alignment,
) -> Option<IndivisibleCause> {
    let ModelConfig { heads, kv_heads, head_dim, intermediate_size, vocab_size, .. } = *config;
    let key_heads = config.delta.map_or(0, |delta| delta.key_heads);
    let values = config.delta.map_or(0, |delta| delta.values());
    let misaligned = |matrix, inputs: usize, group: usize| {
        let share = inputs / world;
        let splits = world > 1 && !share.is_multiple_of(group);
        splits.then_some(IndivisibleCause::Group { matrix, inputs, share, group })
    };
    match () {
        () if !heads.is_multiple_of(world) => Some(IndivisibleCause::Heads(heads)),
        () if !kv_heads.is_multiple_of(world) && !world.is_multiple_of(kv_heads) => {
            Some(IndivisibleCause::KvHeads(kv_heads))
        }
        () if !intermediate_size.is_multiple_of(world) => {
            Some(IndivisibleCause::Intermediate(intermediate_size))
        }
        () if world > 1 && config.delta.is_some_and(|delta| delta.form == DeltaForm::Gguf) => {
            Some(IndivisibleCause::Tiled)
        }
        () if !key_heads.is_multiple_of(world) => Some(IndivisibleCause::Recurrent(key_heads)),
        () if vocab_size < world => Some(IndivisibleCause::Vocabulary(vocab_size)),
        () => {
            let Alignment { output, down, delta_output } = alignment(world);
            misaligned("o_proj", heads * head_dim, output)
                .or_else(|| misaligned("down_proj", intermediate_size, down))
                .or_else(|| misaligned("linear_attn.out_proj", values, delta_output))
        }
    }
}

impl Shard {
    /// Returns the configuration of the model that this rank computes between two all-reduces.
    pub fn config(&self, unsharded: &ModelConfig) -> ModelConfig {
        ModelConfig {
            heads: self.heads.len(),
            kv_heads: self.kv_heads.len(),
            intermediate_size: self.intermediate.len(),
            delta: self.delta,
            ..unsharded.clone()
        }
    }

    /// Returns this rank's partition of a matrix.
    pub fn partition(&self, matrix: Matrix) -> Partition {
        let rows = |heads: &Range<usize>| heads.start * self.head_dim..heads.end * self.head_dim;
        let (queries, keys) = (rows(&self.heads), rows(&self.kv_heads));
        // The rank's part of so many outputs or inputs a rank.
        let part = |each: usize| self.rank * each..(self.rank + 1) * each;
        let values = self.delta.map_or(0, |delta| delta.values());
        let value_heads = self.delta.map_or(0, |delta| delta.value_heads);
        match matrix {
            Matrix::Qkv => {
                let projected = queries.start * self.query_rows..queries.end * self.query_rows;
                Partition::Outputs(vec![vec![projected], vec![keys.clone()], vec![keys]])
            }
            Matrix::DeltaInputs if self.is_fused() => {
                Partition::Outputs(vec![(0..3).flat_map(|nth| self.fused_rows(nth)).collect()])
            }
            Matrix::DeltaGates if self.is_fused() => Partition::Outputs(vec![self.fused_rows(3)]),
            Matrix::DeltaScalars if self.is_fused() => Partition::Outputs(vec![self.fused_scalars()]),
            Matrix::DeltaInputs => Partition::Outputs(vec![self.delta_channels()]),
            Matrix::DeltaGates => Partition::Outputs(vec![vec![part(values)]]),
            Matrix::DeltaScalars => Partition::Outputs(vec![vec![part(value_heads)]; 2]),
            Matrix::DeltaOutput => Partition::Inputs(part(values)),
            // Every rank computes all of it: it is small, and its outputs are the layer's hidden states.
            Matrix::MtpInputs => Partition::Outputs(vec![vec![0..self.hidden]]),
            Matrix::Output => Partition::Inputs(queries),
            Matrix::GateUp => Partition::Outputs(vec![vec![self.intermediate.clone()]; 2]),
            Matrix::Down => Partition::Inputs(self.intermediate.clone()),
            Matrix::Head => Partition::Outputs(vec![vec![self.vocabulary.clone()]]),
        }
    }

    /// Returns the channels of this rank's part of a recurrent layer's convolution: of queries, keys and values.
    pub fn delta_channels(&self) -> Vec<Range<usize>> {
        let Some(delta) = self.delta else { return Vec::new() };
        let widths = [delta.key_heads * delta.key_dim, delta.key_heads * delta.key_dim, delta.values()];
        let mut first = 0;
        let range = |width: usize| {
            let start = first + self.rank * width;
            first += self.ranks * width;
            start..start + width
        };
        widths.into_iter().map(range).collect()
    }

    fn is_fused(&self) -> bool {
        self.delta.is_some_and(|delta| delta.form == DeltaForm::Fused)
    }

    /// Returns the rows of this rank's queries (0), keys (1), values (2) or gates (3) in a fused projection, which has those of one key head
    /// behind those of another.
    fn fused_rows(&self, nth: usize) -> Vec<Range<usize>> {
        let Some(delta) = self.delta else { return Vec::new() };
        let values = delta.group() * delta.value_dim;
        let widths = [delta.key_dim, delta.key_dim, values, values];
        let (before, all): (usize, usize) = (widths[..nth].iter().sum(), widths.iter().sum());
        let first = self.rank * delta.key_heads;
        let rows = |head: usize| head * all + before..head * all + before + widths[nth];
        (first..first + delta.key_heads).map(rows).collect()
    }

    /// Returns the rows of this rank's betas, then of its decays, in a fused projection.
    fn fused_scalars(&self) -> Vec<Range<usize>> {
        let Some(delta) = self.delta else { return Vec::new() };
        let (first, group) = (self.rank * delta.key_heads, delta.group());
        let rows = |nth: usize| {
            (first..first + delta.key_heads)
                .map(move |head| (2 * head + nth) * group..(2 * head + nth + 1) * group)
        };
        rows(0).chain(rows(1)).collect()
    }

    /// Returns this rank's part of a vector with an element for each value head of a recurrent layer.
    pub fn delta_heads(&self) -> Range<usize> {
        let heads = self.delta.map_or(0, |delta| delta.value_heads);
        self.rank * heads..(self.rank + 1) * heads
    }

    /// Returns outputs and inputs of this rank's partition of a linear layer.
    pub fn shape(&self, linear: &StackedLinear) -> (usize, usize) {
        match self.partition(linear.matrix) {
            Partition::Outputs(outputs) => (outputs.iter().flatten().map(Range::len).sum(), linear.inputs()),
            Partition::Inputs(inputs) => (linear.outputs(), inputs.len()),
        }
    }

    /// Reads this rank's part of a linear layer's bias; empty if it adds none.
    ///
    /// # Errors
    /// A weight file can't be read, or has changed.
    pub fn bias(&self, linear: &StackedLinear) -> Result<Vec<f32>, models::Error> {
        let mut bias = Vec::new();
        match self.partition(linear.matrix) {
            Partition::Outputs(outputs) => {
                for (part, ranges) in linear.biases.iter().zip(outputs) {
                    let whole = part.to_f32()?;
                    ranges.into_iter().for_each(|rows| bias.extend_from_slice(&whole[rows]));
                }
            }
            // Rank 0 alone adds it, since outputs are summed over ranks.
            Partition::Inputs(_) if self.rank > 0 => {}
            Partition::Inputs(_) => {
                for part in &linear.biases {
                    bias.extend(part.to_f32()?);
                }
            }
        }
        Ok(bias)
    }
}

#[cfg(test)]
mod tests {
    use inflight_models::{ModelDir, ModelSource};
    use proptest::prelude::*;

    use super::*;

    const UNALIGNED: Alignment = Alignment { output: 1, down: 1, delta_output: 1 };

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

    /// Returns whether the concatenated ranges are 0..`whole`.
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
            vocab in 1usize..400, world in 1usize..17, alignment in prop::sample::select(vec![1, 8, 32, 64]),
        ) {
            let (heads, head_dim) = (kv_heads * group, 2 * half_dim);
            let config = config(heads, kv_heads, head_dim, intermediate, vocab);
            let alignment = Alignment { output: alignment, down: alignment, delta_output: 1 };
            let shards = match shards(&config, world, &|_| alignment) {
                Ok(shards) => shards,
                Err(refused) => {
                    prop_assert!(world > 1 && !refused.works.contains(&world));
                    for works in refused.works {
                        prop_assert!(self::shards(&config, works, &|_| alignment).is_ok());
                    }
                    return Ok(());
                }
            };
            prop_assert_eq!(shards.len(), world);
            prop_assert!(tile(heads, shards.iter().map(|shard| shard.heads.clone())));
            prop_assert!(tile(intermediate, shards.iter().map(|shard| shard.intermediate.clone())));
            prop_assert!(tile(vocab, shards.iter().map(|shard| shard.vocabulary.clone())));
            for matrix in [Matrix::Output, Matrix::Down] {
                let inputs = |shard: &Shard| match shard.partition(matrix) {
                    Partition::Inputs(inputs) => inputs,
                    Partition::Outputs(_) => 0..0,
                };
                let whole = if matrix == Matrix::Output { heads * head_dim } else { intermediate };
                prop_assert!(tile(whole, shards.iter().map(inputs)));
                for shard in shards.iter().filter(|_| world > 1) {
                    prop_assert!(inputs(shard).start % alignment.down == 0 && inputs(shard).len() % alignment.down == 0);
                }
            }
            for shard in &shards {
                prop_assert_eq!(shard.heads.len(), heads / world);
                prop_assert!(!shard.vocabulary.is_empty());
                // A query head's index in the shard maps to the same KV head as in the unsharded model.
                let own_group = shard.heads.len() / shard.kv_heads.len();
                prop_assert_eq!(shard.heads.len() % shard.kv_heads.len(), 0);
                for (place, head) in shard.heads.clone().enumerate() {
                    prop_assert_eq!(shard.kv_heads.start + place / own_group, head / group);
                }
                let Partition::Outputs(qkv) = shard.partition(Matrix::Qkv) else { panic!("rows are cut") };
                let queries = shard.heads.start * head_dim..shard.heads.end * head_dim;
                prop_assert_eq!(qkv[0].as_slice(), std::slice::from_ref(&queries));
                prop_assert_eq!(&qkv[1], &qkv[2]);
            }
        }
    }

    #[test]
    fn unsupported_degrees_are_rejected_with_the_supported_ones() {
        let refused = |config: &ModelConfig, world, alignment| {
            shards(config, world, &|_| alignment).unwrap_err().to_string()
        };
        // Qwen2.5-0.5B and a small model.
        let qwen = config(14, 2, 64, 4864, 151_936);
        let small = config(6, 2, 32, 480, 2048);
        let form = DeltaForm::Checkpoint;
        let delta = DeltaSpec { key_heads: 4, value_heads: 8, key_dim: 16, value_dim: 16, taps: 4, form };
        let recurrent = ModelConfig { delta: Some(delta), ..config(8, 8, 32, 512, 2048) };
        for (model, world, alignment, clues) in [
            (&qwen, 4, UNALIGNED, ["--tensor-parallel 4", "14 attention heads", "1, 2 would do"]),
            (&qwen, 7, UNALIGNED, ["--tensor-parallel 7", "2 key and value heads", "1, 2 would do"]),
            (&qwen, 14, UNALIGNED, ["--tensor-parallel 14", "intermediate size of 4864", "1, 2 would do"]),
            (
                &small,
                6,
                Alignment { output: 64, ..UNALIGNED },
                ["32 of the 192 inputs of o_proj", "groups of 64", "1 would do"],
            ),
            (
                &small,
                2,
                Alignment { output: 32, down: 64, ..UNALIGNED },
                ["240 of the 480 inputs of down_proj", "groups of 64", "1 would"],
            ),
            (
                &recurrent,
                8,
                UNALIGNED,
                ["--tensor-parallel 8", "4 key heads of its recurrent", "1, 2, 4 would do"],
            ),
            (
                &recurrent,
                4,
                Alignment { delta_output: 64, ..UNALIGNED },
                ["32 of the 128 inputs of linear_attn.out_proj", "groups of 64", "1, 2 would do"],
            ),
            (&small, 0, UNALIGNED, ["--tensor-parallel 0", "6 attention heads", "1, 2, 6 would do"]),
        ] {
            let message = refused(model, world, alignment);
            for clue in clues {
                assert!(message.contains(clue), "{clue}: {message}");
            }
        }
    }
}
