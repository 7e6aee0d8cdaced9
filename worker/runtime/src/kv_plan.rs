//! Plan of the KV memory: which layers' rows are in which blocks.

use std::fmt;

use inflight_contract::{GROUPS_MAX, LayerGroup, MemoryShape, ShapeError};

/// Maximum blocks of a span in the first group: smaller blocks waste less memory and need longer tables.
const FIRST_GROUP_BLOCKS_MAX: u64 = 8;
/// Maximum part of the blocks that may be unused for larger blocks to be preferred.
const WASTE_MAX: f64 = 0.1;

/// What a layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerRows {
    /// Positions that a token sees, its own included; `None`: all up to its own.
    pub window: Option<u32>,
    /// Bytes of the rows of a span of `block_tokens` tokens; a multiple of 4.
    pub bytes: u64,
}

/// Where the rows of a layer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerPlace {
    /// Index of the layer's group.
    pub group: usize,
    /// Index of the block among those of a span in the group.
    pub part: usize,
    /// Bytes from the start of the block.
    pub offset: u64,
}

/// Place of an indivisible part of a recurrent state, such as that of a head, within one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatePlace {
    /// Index of the block among those of the state.
    pub part: usize,
    /// Bytes from the start of the block.
    pub offset: u64,
}

/// Bytes of the blocks of a sequence's state, for the plan's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StateMemory {
    blocks: u32,
    /// Bytes of its pieces.
    bytes: u64,
    /// Bytes of its blocks that hold nothing.
    unused: u64,
}

/// Bytes of a group's blocks, for operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupMemory {
    /// Number of layers.
    pub layers: usize,
    /// Group of the shape.
    pub group: LayerGroup,
    /// Bytes of the rows of a span.
    pub bytes: u64,
    /// Bytes of its blocks that hold no rows.
    pub unused: u64,
}

/// Plan of the KV memory of a model, or of a rank's shard: groups of layers, the size of a block, and the place of each layer.
///
/// Layers that see the same positions form a group. All blocks have one size: that of a span in the first group or, if this leaves
/// more than a tenth of the memory unused, a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvPlan {
    shape: MemoryShape,
    block_bytes: u64,
    places: Vec<LayerPlace>,
    groups: Vec<GroupMemory>,
    state_places: Vec<StatePlace>,
    state: Option<StateMemory>,
    snapshot_blocks: u32,
}

/// Layers whose rows cannot be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KvPlanError {
    /// Too many different windows.
    #[error(
        "the layers have {0} different sliding windows; up to {GROUPS_MAX} kinds of layers are supported"
    )]
    Windows(usize),
    /// The groups contradict each other.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

impl KvPlan {
    /// Plans the memory of these layers for sequences of up to `context_tokens` tokens; a window of that size or more never passes
    /// a position, so it counts as full attention.
    ///
    /// # Errors
    /// [`KvPlanError`] for no layers, too many different windows, or a window or span without tokens.
    pub fn new(block_tokens: u32, context_tokens: u32, layers: &[LayerRows]) -> Result<Self, KvPlanError> {
        Self::with_states(block_tokens, context_tokens, layers, &[], &[])
    }

    /// Plans the memory of layers as [`KvPlan::new`] beside the states of recurrent layers, which are in two parts: what a sequence resumes
    /// from, of which snapshots are kept, and the log behind it. `states` and `logs` are the bytes, multiples of 64, of what must not be
    /// divided, such as the state of a head. A block holds at least the largest piece, and no pieces of both parts.
    ///
    /// # Errors
    /// [`KvPlanError`], also for a state of too many blocks.
    pub fn with_states(
        block_tokens: u32,
        context_tokens: u32,
        layers: &[LayerRows],
        states: &[u64],
        logs: &[u64],
    ) -> Result<Self, KvPlanError> {
        let window = |layer: &LayerRows| layer.window.filter(|window| *window < context_tokens);
        let mut windows: Vec<Option<u32>> = layers.iter().map(window).collect();
        // From full attention to the smallest window.
        windows.sort_by_key(|window| std::cmp::Reverse(window.unwrap_or(u32::MAX)));
        windows.dedup();
        if windows.len() > GROUPS_MAX {
            return Err(KvPlanError::Windows(windows.len()));
        }
        let group_of =
            |layer: &LayerRows| windows.iter().position(|other| *other == window(layer)).unwrap_or(0);
        let first: u64 = layers.iter().filter(|layer| group_of(layer) == 0).map(|layer| layer.bytes).sum();
        let largest = layers.iter().map(|layer| layer.bytes).max().unwrap_or(0);
        let largest_piece = states.iter().chain(logs).copied().max().unwrap_or(0);
        let mut best: Option<(f64, Packed)> = None;
        for parts in 1..=FIRST_GROUP_BLOCKS_MAX {
            // Layers are not divided, so a block holds at least the largest one.
            let target = first.div_ceil(parts).max(largest);
            let packed = Packed::new(layers, &group_of, windows.len(), target, largest_piece);
            let waste = packed.waste(layers);
            if waste <= WASTE_MAX {
                best = Some((waste, packed));
                break;
            }
            if best.as_ref().is_none_or(|(least, _)| waste < *least) {
                best = Some((waste, packed));
            }
        }
        let packed = best.map(|(_, packed)| packed).ok_or(ShapeError::Groups(0))?;
        let groups: Vec<LayerGroup> = windows
            .iter()
            .zip(&packed.blocks)
            .map(|(window, blocks)| LayerGroup { blocks: *blocks, window: *window })
            .collect();
        let (mut state_places, snapshot_blocks) = pack_state(states, packed.block_bytes, 0);
        let (log_places, log_blocks) = pack_state(logs, packed.block_bytes, snapshot_blocks as usize);
        state_places.extend(log_places);
        let state_blocks = snapshot_blocks.saturating_add(log_blocks);
        let bytes = states.iter().chain(logs).sum();
        let unused = u64::from(state_blocks) * packed.block_bytes - bytes;
        let state = (state_blocks > 0).then_some(StateMemory { blocks: state_blocks, bytes, unused });
        let shape = MemoryShape::new(block_tokens, &groups)?.with_state(state_blocks)?;
        let memory = |(index, group): (usize, &LayerGroup)| {
            let of_group = layers.iter().filter(|layer| group_of(layer) == index);
            let (layers, bytes) = (of_group.clone().count(), of_group.map(|layer| layer.bytes).sum());
            let unused = u64::from(group.blocks) * packed.block_bytes - bytes;
            GroupMemory { layers, group: *group, bytes, unused }
        };
        let groups = groups.iter().enumerate().map(memory).collect();
        let Packed { block_bytes, places, .. } = packed;
        Ok(Self { shape, block_bytes, places, groups, state_places, state, snapshot_blocks })
    }

    /// Returns the groups, as the scheduler sees them.
    pub fn shape(&self) -> MemoryShape {
        self.shape
    }

    /// Returns the bytes of a block.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Returns the place of each layer.
    pub fn places(&self) -> &[LayerPlace] {
        &self.places
    }

    /// Returns the place of each piece of the states, then of each piece of the logs.
    pub fn state_places(&self) -> &[StatePlace] {
        &self.state_places
    }

    /// Returns the number of blocks that hold the states without the logs, the first ones of a sequence's state.
    pub fn snapshot_blocks(&self) -> u32 {
        self.snapshot_blocks
    }

    /// Returns the memory of each group.
    pub fn groups(&self) -> &[GroupMemory] {
        &self.groups
    }

    /// Returns the bytes that a sequence of `tokens` tokens holds while it generates.
    pub fn sequence_bytes(&self, tokens: u32) -> u64 {
        u64::from(self.shape.blocks(tokens, 1)) * self.block_bytes
    }
}

impl fmt::Display for KvPlan {
    /// Writes the groups, such as `4 layers with full attention, 1 block; 22 layers with a window of 1024, 6 blocks (8 % unused)`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, GroupMemory { layers, group, bytes, unused }) in self.groups.iter().enumerate() {
            let separator = if index > 0 { "; " } else { "" };
            let plural = |count: usize| if count == 1 { "" } else { "s" };
            write!(out, "{separator}{layers} layer{} with ", plural(*layers))?;
            match group.window {
                None => write!(out, "full attention")?,
                Some(window) => write!(out, "a window of {window}")?,
            }
            write!(out, ", {} block{}", group.blocks, plural(group.blocks as usize))?;
            if *unused > 0 {
                write!(out, " ({:.0} % unused)", 100.0 * *unused as f64 / (bytes + unused) as f64)?;
            }
        }
        if let Some(StateMemory { blocks, bytes, unused }) = self.state {
            write!(out, "; a state of {blocks} block{} a sequence", if blocks == 1 { "" } else { "s" })?;
            if unused > 0 {
                write!(out, " ({:.0} % unused)", 100.0 * unused as f64 / (bytes + unused) as f64)?;
            }
        }
        Ok(())
    }
}

/// Packs pieces of a state into blocks from the block `first` on: the largest piece first, each into the first block with room. Returns
/// their places and the number of blocks.
fn pack_state(pieces: &[u64], block_bytes: u64, first: usize) -> (Vec<StatePlace>, u32) {
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by_key(|piece| std::cmp::Reverse(pieces[*piece]));
    let mut places = vec![StatePlace { part: 0, offset: 0 }; pieces.len()];
    let mut used: Vec<u64> = Vec::new();
    for piece in order {
        let bytes = pieces[piece];
        let part = used.iter().position(|used| used + bytes <= block_bytes).unwrap_or_else(|| {
            used.push(0);
            used.len() - 1
        });
        places[piece] = StatePlace { part: first + part, offset: used[part] };
        used[part] += bytes;
    }
    (places, u32::try_from(used.len()).unwrap_or(u32::MAX))
}

/// Layers packed into blocks.
struct Packed {
    places: Vec<LayerPlace>,
    /// Blocks of a span by group.
    blocks: Vec<u32>,
    block_bytes: u64,
}

impl Packed {
    /// Packs the layers of each group, in order, into blocks of at most `target` bytes or, if that is more, of `least`.
    fn new(
        layers: &[LayerRows],
        group_of: &impl Fn(&LayerRows) -> usize,
        groups: usize,
        target: u64,
        least: u64,
    ) -> Self {
        let (mut used, mut blocks) = (vec![0u64; groups], vec![1u32; groups]);
        let target = target.max(least);
        let (mut places, mut block_bytes) = (Vec::with_capacity(layers.len()), least);
        for layer in layers {
            let group = group_of(layer);
            if used[group] + layer.bytes > target {
                (used[group], blocks[group]) = (0, blocks[group] + 1);
            }
            places.push(LayerPlace { group, part: blocks[group] as usize - 1, offset: used[group] });
            used[group] += layer.bytes;
            block_bytes = used[group].max(block_bytes);
        }
        Self { places, blocks, block_bytes }
    }

    /// Returns the part of the blocks of a span that holds no rows.
    fn waste(&self, layers: &[LayerRows]) -> f64 {
        let all = f64::from(self.blocks.iter().sum::<u32>()) * self.block_bytes as f64;
        1.0 - layers.iter().map(|layer| layer.bytes).sum::<u64>() as f64 / all.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows(window: Option<u32>) -> LayerRows {
        LayerRows { window, bytes: 64 }
    }

    #[test]
    fn layers_with_full_attention_share_a_block() {
        let plan = KvPlan::new(16, 4096, &[rows(None); 5]).unwrap();
        assert_eq!((plan.shape(), plan.block_bytes()), (MemoryShape::uniform(16), 320));
        assert_eq!(plan.places()[3], LayerPlace { group: 0, part: 0, offset: 192 });
        assert_eq!(plan.to_string(), "5 layers with full attention, 1 block");
        // A window as large as the context passes nothing.
        let plan = KvPlan::new(16, 4096, &[rows(Some(4096)), rows(None), rows(Some(9999))]).unwrap();
        assert_eq!(plan.shape(), MemoryShape::uniform(16));
    }

    /// Gemma 3: every sixth layer has full attention.
    fn gemma(layers: usize) -> Vec<LayerRows> {
        (1..=layers).map(|layer| rows((!layer.is_multiple_of(6)).then_some(1024))).collect()
    }

    #[test]
    fn windows_beside_full_attention_take_blocks_of_the_same_size() {
        let plan = KvPlan::new(16, 32_768, &gemma(26)).unwrap();
        let text =
            "4 layers with full attention, 1 block; 22 layers with a window of 1024, 6 blocks (8 % unused)";
        assert_eq!(plan.to_string(), text);
        assert_eq!(plan.block_bytes(), 4 * 64);
        assert_eq!(plan.places()[5], LayerPlace { group: 0, part: 0, offset: 0 });
        assert_eq!(plan.places()[6], LayerPlace { group: 1, part: 1, offset: 64 });
        // 62 layers: 10 in a block would leave 13 % unused, so a block has half of them.
        let plan = KvPlan::new(16, 32_768, &gemma(62)).unwrap();
        assert_eq!((plan.block_bytes(), plan.shape().groups()[0].blocks), (5 * 64, 2));
        assert_eq!(plan.shape().groups()[1].blocks, 11);
        // A sequence holds the rows of its window, not those of all its tokens.
        assert_eq!(plan.sequence_bytes(32_768), 5 * 64 * (2 * 2048 + 11 * 65));
    }

    #[test]
    fn sequences_of_real_models_take_the_bytes_of_their_windows() {
        // Layers, of which every sixth has full attention in Gemma 3, window, and bytes of a token of a layer in bf16.
        let models = [
            ("Gemma 3 1B", 26, 6, 512, 1024, [(26.0, 16.4), (208.0, 44.4), (832.0, 140.4)]),
            ("Gemma 3 27B", 62, 6, 1024, 8192, [(496.0, 520.0), (3968.0, 1086.9), (15_872.0, 3006.9)]),
            ("Mistral 7B v0.1", 32, 99, 4096, 4096, [(128.0, 128.0), (1024.0, 514.0), (4096.0, 514.0)]),
        ];
        let mib = |bytes: u64| (bytes as f64 / f64::from(1 << 20) * 10.0).round() / 10.0;
        for (name, count, full, window, bytes, expected) in models {
            let layer = |layer: usize, window| LayerRows {
                window: (!layer.is_multiple_of(full)).then_some(window),
                bytes: 16 * bytes,
            };
            let plan = |window| {
                let layers: Vec<LayerRows> = (1..=count).map(|index| layer(index, window)).collect();
                KvPlan::new(16, 32_768, &layers).unwrap()
            };
            for (tokens, expected) in [1024, 8192, 32_768].into_iter().zip(expected) {
                // A window as large as the context is full attention.
                let bytes = [plan(32_768), plan(window)].map(|plan| mib(plan.sequence_bytes(tokens)));
                assert_eq!((bytes[0], bytes[1]), expected, "{name} at {tokens} tokens");
            }
        }
    }

    #[test]
    fn states_of_heads_share_blocks_with_what_fits_beside_them() {
        // Eight heads of a state of 640 bytes and four small pieces; blocks of a span of 1,600 bytes hold two heads.
        let pieces = [[640; 8].as_slice(), &[64; 4]].concat();
        let plan =
            KvPlan::with_states(16, 4096, &[LayerRows { window: None, bytes: 1600 }], &pieces, &[]).unwrap();
        assert_eq!((plan.block_bytes(), plan.shape().state_blocks()), (1600, 4));
        assert_eq!(plan.state_places()[1], StatePlace { part: 0, offset: 640 });
        assert_eq!(plan.state_places()[8], StatePlace { part: 0, offset: 1280 });
        let text = "1 layer with full attention, 1 block; a state of 4 blocks a sequence (16 % unused)";
        assert_eq!(plan.to_string(), text);
        assert_eq!(plan.sequence_bytes(32), 1600 * (2 + 4));
        // A block is enlarged to the largest piece.
        let plan = KvPlan::with_states(16, 4096, &[rows(None); 3], &[640], &[64]).unwrap();
        assert_eq!((plan.block_bytes(), plan.shape().span_blocks()), (640, 1));
        // A log shares no block with the state before it, of which snapshots are kept.
        assert_eq!((plan.shape().state_blocks(), plan.snapshot_blocks()), (2, 1));
        assert_eq!(plan.state_places()[1], StatePlace { part: 1, offset: 0 });
    }

    #[test]
    fn too_many_windows_are_refused() {
        let layers: Vec<LayerRows> = (1..=5).map(|window| rows(Some(window))).collect();
        let error = KvPlan::new(16, 4096, &layers).unwrap_err();
        assert!(error.to_string().contains("5 different sliding windows"), "{error}");
        assert_eq!(KvPlan::new(16, 4096, &[rows(Some(0))]), Err(KvPlanError::Shape(ShapeError::Window)));
        assert_eq!(KvPlan::new(16, 4096, &[]), Err(KvPlanError::Shape(ShapeError::Groups(0))));
    }

    proptest! {
        #[test]
        fn every_layer_has_its_place(
            layers in prop::collection::vec((prop::sample::select(vec![None, Some(8), Some(64)]), 1u64..9), 1..40),
            pieces in prop::collection::vec(1u64..9, 0..40),
            logs in 0usize..40,
        ) {
            let layers: Vec<LayerRows> =
                layers.into_iter().map(|(window, size)| LayerRows { window, bytes: 4 * size }).collect();
            let pieces: Vec<u64> = pieces.into_iter().map(|size| 64 * size).collect();
            let (states, log) = pieces.split_at(pieces.len() - logs.min(pieces.len()));
            let plan = KvPlan::with_states(16, 4096, &layers, states, log).unwrap();
            let mut taken = std::collections::BTreeMap::new();
            for (layer, place) in layers.iter().zip(plan.places()) {
                let group = plan.shape().groups()[place.group];
                prop_assert_eq!(group.window, layer.window);
                prop_assert!(place.part < group.blocks as usize);
                prop_assert!(place.offset + layer.bytes <= plan.block_bytes());
                for at in (place.offset..place.offset + layer.bytes).step_by(4) {
                    prop_assert!(taken.insert((place.group, place.part, at), ()).is_none(), "layers overlap");
                }
            }
            taken.clear();
            for (bytes, place) in pieces.iter().zip(plan.state_places()) {
                prop_assert!(place.part < plan.shape().state_blocks() as usize);
                let of_state = taken.len() < states.iter().sum::<u64>() as usize / 64;
                prop_assert_eq!(place.part < plan.snapshot_blocks() as usize, of_state);
                prop_assert!(place.offset + bytes <= plan.block_bytes());
                for at in (place.offset..place.offset + bytes).step_by(64) {
                    prop_assert!(taken.insert((0, place.part, at), ()).is_none(), "pieces overlap");
                }
            }
            let bytes: u64 = plan.groups().iter().map(|group| group.bytes).sum();
            prop_assert_eq!(bytes, layers.iter().map(|layer| layer.bytes).sum::<u64>());
            let all = u64::from(plan.shape().span_blocks()) * plan.block_bytes();
            prop_assert_eq!(plan.groups().iter().map(|group| group.bytes + group.unused).sum::<u64>(), all);
        }
    }
}
