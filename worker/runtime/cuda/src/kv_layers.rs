//! KV cache layout of a rank: the place of each layer's keys and values in a block, and the layer's attention plan.

use inflight_kernels::cuda::{ATTENTION_KEY_TILE, KvStore};
use inflight_models::{LayerSpec, ModelConfig};
use inflight_runtime::recurrent::RecurrentLayers;
use inflight_runtime::{GroupMemory, KvPlan, KvPlanError, LayerRows, StatePlace};

/// One of the blocks that a group of layers needs for a span of tokens. Its layers share KV indices and block tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvPart {
    /// Index of the group.
    pub(super) group: usize,
    /// Index of the block among those of a span.
    pub(super) part: usize,
}

/// Layers that share block tables and attention plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvView {
    /// Index of the part.
    pub(super) part: usize,
    /// Index of the attention plan.
    pub(super) plan: usize,
}

/// Attention plan: the layers of a group with one window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvWindow {
    /// Index of the group.
    pub(super) group: usize,
    /// Positions that a token sees, its own included; `None`: all up to its own.
    pub(super) window: Option<u32>,
}

/// Place of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KvLayer {
    view: usize,
    /// Byte offset of the layer's keys within its block.
    offset: u64,
}

/// KV memory of a rank's shard.
#[derive(Debug, Clone)]
pub(super) struct KvLayers {
    plan: KvPlan,
    store: KvStore,
    parts: Vec<KvPart>,
    windows: Vec<KvWindow>,
    views: Vec<KvView>,
    layers: Vec<KvLayer>,
    /// Places of the pieces of a state, by recurrent layer.
    state_places: Vec<Vec<StatePlace>>,
}

/// Returns the index of `item` in `items`, to which it is appended if it is not there.
fn index_of<T: PartialEq>(items: &mut Vec<T>, item: T) -> usize {
    items.iter().position(|known| *known == item).unwrap_or_else(|| {
        items.push(item);
        items.len() - 1
    })
}

impl KvLayers {
    /// Plans the KV memory of a shard's `config` for sequences of up to `context_tokens` tokens. `release`: sequences give up the
    /// blocks that the window of a group of layers has passed.
    ///
    /// # Errors
    /// [`KvPlanError`] if the model has more different windows than there may be groups of layers.
    pub(super) fn new(
        config: &ModelConfig,
        block_tokens: u32,
        context_tokens: u32,
        store: KvStore,
        release: bool,
    ) -> Result<Self, KvPlanError> {
        let bytes = store.layer_bytes(config.kv_heads as u64, block_tokens.into(), config.head_dim as u64);
        // Attention kernels read whole tiles of keys, so the blocks of the window's first tile are kept, too.
        let held = |window: u32| window.saturating_add(ATTENTION_KEY_TILE - 1);
        let rows = |window: Option<u32>| LayerRows { window: window.filter(|_| release).map(held), bytes };
        let windows = config.layers.iter().filter_map(LayerSpec::attention).map(|attention| attention.window);
        let of_layers: Vec<Option<u32>> = windows.collect();
        let all: Vec<LayerRows> = of_layers.iter().map(|window| rows(*window)).collect();
        let recurrent = RecurrentLayers::of(config);
        let plan = RecurrentLayers::plan(recurrent, block_tokens, context_tokens, &all)?;
        let state_places = recurrent.map_or_else(Vec::new, |layers| layers.places(&plan));
        let (mut windows, mut views) = (Vec::new(), Vec::new());
        let groups = plan.shape();
        let groups = groups.groups().iter().enumerate();
        let mut parts: Vec<KvPart> = groups
            .flat_map(|(group, blocks)| (0..blocks.blocks as usize).map(move |part| KvPart { group, part }))
            .collect();
        let layers = of_layers.iter().zip(plan.places()).map(|(window, place)| {
            let part = index_of(&mut parts, KvPart { group: place.group, part: place.part });
            let plan = index_of(&mut windows, KvWindow { group: place.group, window: *window });
            KvLayer { view: index_of(&mut views, KvView { part, plan }), offset: place.offset }
        });
        let layers = layers.collect();
        Ok(Self { plan, store, parts, windows, views, layers, state_places })
    }

    /// Plan of the blocks.
    pub(super) fn plan(&self) -> &KvPlan {
        &self.plan
    }

    /// KV memory by group of layers, for logs and metrics; empty for a model with a single group and no recurrent layers.
    pub(super) fn groups(&self) -> Vec<GroupMemory> {
        if self.plan.shape().is_uniform() { Vec::new() } else { self.plan.groups().to_vec() }
    }

    /// Storage format of keys and values.
    pub(super) fn store(&self) -> KvStore {
        self.store
    }

    /// Parts of a span, those of full attention first: each has KV indices and block tables of its own.
    pub(super) fn parts(&self) -> &[KvPart] {
        &self.parts
    }

    /// Attention plans.
    pub(super) fn windows(&self) -> &[KvWindow] {
        &self.windows
    }

    /// Pairs of a part and an attention plan: each has attention items of its own.
    pub(super) fn views(&self) -> &[KvView] {
        &self.views
    }

    /// Returns the blocks of a sequence's recurrent state.
    pub(super) fn state_blocks(&self) -> usize {
        self.plan.shape().state_blocks() as usize
    }

    /// Returns the maximum sequences of a batch of `rows` rows, as far as recurrent layers read which rows are whose; 0 without those.
    pub(super) fn sequences_max(&self, rows: usize) -> usize {
        if self.state_blocks() > 0 { rows } else { 0 }
    }

    /// Places of the pieces of a state, by recurrent layer.
    pub(super) fn state_places(&self) -> &[Vec<StatePlace>] {
        &self.state_places
    }

    /// Returns the maximum block copies of a step of `slots` sequences: a span that is shared and written to, and the snapshot that a
    /// sequence resumes from or leaves.
    pub(super) fn copies_max(&self, slots: u32) -> usize {
        let each = self.plan.shape().span_blocks() + self.plan.snapshot_blocks();
        (slots as usize).saturating_mul(each as usize)
    }

    /// Returns the view of a layer, counted among those with attention, its part, and the window of its attention.
    pub(super) fn of_layer(&self, layer: usize) -> (usize, usize, Option<u32>) {
        let view = self.layers[layer].view;
        let KvView { part, plan } = self.views[view];
        (view, part, self.windows[plan].window)
    }

    /// Returns the stride between blocks and the offset within a block of the keys of a layer, counted among those with attention, in elements
    /// as the kernels count them.
    pub(super) fn numbers(&self, layer: usize) -> (u64, u64) {
        (self.plan.block_bytes() / self.store.unit(), self.layers[layer].offset / self.store.unit())
    }

    /// Returns the maximum entries of the block tables of a batch: `slots` sequences of up to `context_tokens` tokens hold blocks for
    /// up to `rows` tokens of this batch, and as many of the one before.
    pub(super) fn table_entries(&self, slots: u32, context_tokens: u32, rows: u32) -> usize {
        let block_tokens = self.plan.shape().block_tokens();
        let [slots, rows] = [slots as usize, rows as usize];
        let entries = |part: &KvPart| {
            let group = self.plan.shape().groups()[part.group];
            let each = |ahead| group.spans(context_tokens, ahead, block_tokens) as usize;
            let ahead = (2 * rows).div_ceil(block_tokens as usize);
            slots.saturating_mul(each(1) + 1).saturating_add(ahead).min(slots.saturating_mul(each(u32::MAX)))
        };
        let all: usize = self.parts.iter().map(entries).fold(0, usize::saturating_add);
        let states = slots.saturating_mul(self.state_blocks());
        // Unused entries in front, if all groups have windows.
        all.saturating_add(states).saturating_add(context_tokens.div_ceil(block_tokens) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::models::with_windows as config;
    use super::*;

    #[test]
    fn blocks_are_contiguous_over_all_layers_unless_windows_release_them() {
        let windows = [Some(30), None, Some(30), None];
        let config = config(&windows);
        let layer_bytes = KvStore::Half.layer_bytes(config.kv_heads as u64, 16, config.head_dim as u64);
        let kept = KvLayers::new(&config, 16, 1000, KvStore::Half, false).unwrap();
        assert_eq!(kept.plan().block_bytes(), 4 * layer_bytes);
        assert_eq!((kept.parts().len(), kept.windows().len(), kept.views().len()), (1, 2, 2));
        for (layer, window) in windows.into_iter().enumerate() {
            assert_eq!(kept.numbers(layer), (2 * layer_bytes, layer as u64 * layer_bytes / 2));
            assert_eq!(kept.of_layer(layer), (layer % 2, 0, window));
        }
        let released = KvLayers::new(&config, 16, 1000, KvStore::Half, true).unwrap();
        assert_eq!(released.plan().block_bytes(), 2 * layer_bytes);
        assert_eq!((released.parts().len(), released.windows().len(), released.views().len()), (2, 2, 2));
        // The window, and the rest of the tile of keys in which it begins.
        assert_eq!(released.plan().shape().groups()[1].window, Some(30 + 63));
        assert_eq!(released.of_layer(2), (0, 1, Some(30)));
        assert_eq!(released.numbers(3), (layer_bytes, layer_bytes / 2));
    }

    #[test]
    fn block_tables_of_real_models_are_small_beside_a_step() {
        // Layers, of which every sixth has full attention in Gemma 3; KiB of the tables of 64 sequences of so many tokens.
        let models = [
            ("Llama 3 8B", 32, None, [16, 128, 512]),
            ("Mistral 7B v0.1", 32, Some((99, 4096)), [16, 65, 65]),
            ("Gemma 3 1B", 26, Some((6, 512)), [71, 183, 567]),
            ("Gemma 3 27B", 62, Some((6, 1024)), [208, 445, 1213]),
        ];
        for (name, layers, windows, expected) in models {
            let window =
                |layer: usize| windows.filter(|(full, _)| !layer.is_multiple_of(*full)).map(|(_, size)| size);
            let windows: Vec<Option<u32>> = (1..=layers).map(window).collect();
            let kv = KvLayers::new(&config(&windows), 16, 40_960, KvStore::Half, true).unwrap();
            let kib = |tokens: u32| {
                let group = |part: &KvPart| kv.plan().shape().groups()[part.group].spans(tokens, 1, 16);
                64 * 4 * kv.parts().iter().map(group).sum::<u32>() / 1024
            };
            assert_eq!([1024, 8192, 32_768].map(kib), expected, "{name}");
        }
    }

    #[test]
    fn a_window_that_passes_no_block_is_of_the_attention_alone() {
        let kv = KvLayers::new(&config(&[Some(950), None]), 16, 1000, KvStore::Half, true).unwrap();
        assert!(kv.plan().shape().is_uniform());
        assert_eq!((kv.parts().len(), kv.windows().len(), kv.views().len()), (1, 2, 2));
        assert_eq!(kv.of_layer(0).2, Some(950));
    }
}
