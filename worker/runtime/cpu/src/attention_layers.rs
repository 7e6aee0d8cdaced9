//! Layers with attention of a forward pass: their buffers, rotary tables, and the places of their keys and values.

use inflight_kernels::cpu::{
    Activations, Isa, KvLayout, KvPool, KvSlot, Pool, QkvShape, Ragged, RopeTable, attention, finish_qkv,
    inverse_frequencies, sigmoid_gate,
};
use inflight_models::{AttentionSpec, ModelConfig, Rope};
use inflight_runtime::sharding::Shard;
use inflight_runtime::{Batch, Capabilities, Error, KvPlan, LayerPlace};

use super::weights::Attention;

/// What the layers whose rows are in the same blocks share.
struct BlockView {
    /// Index of their group, and of the block among those of a span.
    group: usize,
    part: usize,
    ragged: Ragged,
    /// Block and offset of each row.
    places: Vec<KvSlot>,
}

impl BlockView {
    /// Sets the rows that the layers of the view see in a batch, which [`Batch::check`] has passed.
    fn set(&mut self, batch: &Batch, bounds: &Capabilities) {
        let (group, tables) = (bounds.shape.groups()[self.group], &batch.tables[self.group]);
        self.ragged.clear(group.window);
        for s in 0..batch.sequences() {
            let positions = &batch.positions[batch.starts[s] as usize..batch.starts[s + 1] as usize];
            let blocks = tables.of(s).iter().copied().skip(self.part).step_by(group.blocks as usize);
            let block_tokens = bounds.shape.block_tokens() as usize;
            self.ragged.push(positions, tables.first_spans[s], blocks, block_tokens);
        }
    }
}

/// Layers with attention of a rank.
pub(super) struct AttentionLayers {
    shape: QkvShape,
    norm_eps: f32,
    score_size: f64,
    /// Rotary tables, by index of [`ModelConfig::ropes`].
    ropes: Vec<RopeTable>,
    views: Vec<BlockView>,
    /// View and layout of the keys and values of each layer.
    kv_layers: Vec<(usize, KvLayout)>,
    /// Outputs of a query projection that has rows of gates; empty if it has none.
    projected: Vec<f32>,
    /// Gates of the outputs, likewise.
    gates: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
}

impl AttentionLayers {
    /// Creates buffers for batches of `rows` rows.
    pub(super) fn new(
        config: &ModelConfig,
        shard: &Shard,
        kv: &KvPlan,
        layout: KvLayout,
        rows: usize,
    ) -> Self {
        let Shard { head_dim, .. } = *shard;
        let shape = QkvShape { heads: shard.heads.len(), kv_heads: shard.kv_heads.len(), head_dim };
        let kv_shape = kv.shape();
        let groups = kv_shape.groups().iter().enumerate();
        let views: Vec<BlockView> = groups
            .flat_map(|(group, blocks)| (0..blocks.blocks as usize).map(move |part| (group, part)))
            .map(|(group, part)| BlockView {
                group,
                part,
                ragged: Ragged::default(),
                places: Vec::with_capacity(rows),
            })
            .collect();
        let view = |place: &LayerPlace| {
            views.iter().position(|view| (view.group, view.part) == (place.group, place.part)).unwrap_or(0)
        };
        let layer = |place: &LayerPlace| {
            (view(place), layout.within(kv.block_bytes() as usize, place.offset as usize))
        };
        let kv_layers = kv.places().iter().map(layer).collect();
        let rotated = config.rotated_dim;
        let table = |rope: &Rope| RopeTable::new(inverse_frequencies(rotated, rope.theta, &rope.scaling));
        let gates = if config.arithmetic.output_gate { shape.heads * head_dim } else { 0 };
        let projected = if gates > 0 { shape.width() + gates } else { 0 };
        Self {
            shape,
            norm_eps: config.norm_eps,
            score_size: config.arithmetic.score_size,
            ropes: config.ropes.iter().map(table).collect(),
            views,
            kv_layers,
            projected: vec![0.0; rows * projected],
            gates: vec![0.0; rows * gates],
            qkv: vec![0.0; rows * shape.width()],
            attended: vec![0.0; rows * shape.heads * head_dim],
        }
    }

    /// Computes block and offset of each row's key and value. `writes` notes that a block is written in this step, and returns true if
    /// it is already.
    ///
    /// # Errors
    /// [`Error::Malformed`] if two sequences write to one block.
    pub(super) fn place(
        &mut self,
        batch: &Batch,
        bounds: &Capabilities,
        mut writes: impl FnMut(u32) -> bool,
    ) -> Result<(), Error> {
        let block_tokens = bounds.shape.block_tokens();
        for view in &mut self.views {
            let (stride, tables) = (bounds.shape.groups()[view.group].blocks, &batch.tables[view.group]);
            view.places.clear();
            for s in 0..batch.sequences() {
                let (table, first) = (tables.of(s), tables.first_spans[s]);
                let positions = &batch.positions[batch.starts[s] as usize..batch.starts[s + 1] as usize];
                for (i, position) in positions.iter().enumerate() {
                    let span = (position / block_tokens - first) * stride;
                    let block = table[span as usize + view.part];
                    let offset = position % block_tokens;
                    if (i == 0 || offset == 0) && writes(block) {
                        return Err(Error::Malformed(format!("block {block} is written from two places")));
                    }
                    view.places.push(KvSlot { block, offset });
                }
            }
            view.set(batch, bounds);
        }
        Ok(())
    }

    /// Computes cosines and sines of all positions up to the largest of these.
    pub(super) fn ensure(&mut self, positions: &[u32]) {
        let longest = positions.iter().max().map_or(0, |last| *last as usize + 1);
        self.ropes.iter_mut().for_each(|rope| rope.ensure(longest));
    }

    /// Computes the layer `index`, counted among those with attention, of `normed`, the normalized hidden states of rows at `positions`, up
    /// to the inputs of its output projection.
    pub(super) fn run(
        &mut self,
        index: usize,
        (layer, spec): (&Attention, AttentionSpec),
        (positions, normed): (&[u32], &[f32]),
        kv: &mut KvPool,
        (pool, isa, activations): (&Pool, Isa, &mut Activations),
    ) -> &[f32] {
        self.write(index, (layer, spec), (positions, normed), kv, (pool, isa, &mut *activations));
        let (rows, shape) = (positions.len(), self.shape);
        let (view, layout) = &self.kv_layers[index];
        let ragged = &self.views[*view].ragged;
        let qkv = &self.qkv[..rows * shape.width()];
        let attended = &mut self.attended[..rows * shape.heads * shape.head_dim];
        attention(pool, isa, shape, qkv, ragged, kv, layout, self.score_size, attended);
        self.gate(rows, pool, isa)
    }

    /// Computes queries, keys and values of the layer `index`, and writes the latter two.
    pub(super) fn write(
        &mut self,
        index: usize,
        (layer, spec): (&Attention, AttentionSpec),
        (positions, normed): (&[u32], &[f32]),
        kv: &mut KvPool,
        (pool, isa, activations): (&Pool, Isa, &mut Activations),
    ) {
        let (rows, shape) = (positions.len(), self.shape);
        let qkv = &mut self.qkv[..rows * shape.width()];
        let queries = shape.heads * shape.head_dim;
        if self.gates.is_empty() {
            layer.qkv.apply(pool, normed, rows, qkv, activations);
        } else {
            let projected = &mut self.projected[..rows * (shape.width() + queries)];
            layer.qkv.apply(pool, normed, rows, projected, activations);
            part_gates(shape, projected, qkv, &mut self.gates);
        }
        let norms = layer.qk_norm.as_ref().map(|(q, k)| (q.as_slice(), k.as_slice(), self.norm_eps));
        let (view, layout) = &self.kv_layers[index];
        let (places, rope) = (&self.views[*view].places, &self.ropes[spec.rope]);
        finish_qkv(pool, isa, shape, qkv, norms, rope, positions, places, kv, layout);
    }

    /// Multiplies the outputs of attention with their gates, if there are some, and returns them.
    fn gate(&mut self, rows: usize, pool: &Pool, isa: Isa) -> &[f32] {
        let attended = &mut self.attended[..rows * self.shape.heads * self.shape.head_dim];
        if !self.gates.is_empty() {
            sigmoid_gate(pool, isa, &self.gates[..attended.len()], attended);
        }
        attended
    }

    /// Returns the blocks of a sequence of a batch with the keys and values of the layer `index`, which has full attention.
    pub(super) fn blocks<'b>(
        &self,
        index: usize,
        batch: &'b Batch,
        sequence: usize,
        bounds: &Capabilities,
    ) -> impl Iterator<Item = u32> + 'b {
        let BlockView { group, part, .. } = self.views[self.kv_layers[index].0];
        let stride = bounds.shape.groups()[group].blocks as usize;
        batch.tables[group].of(sequence).iter().copied().skip(part).step_by(stride)
    }

    /// Sets where the layer `index` finds and keeps a row of each of some sequences, at these positions and with these blocks, until the
    /// next batch is placed.
    pub(super) fn place_single(
        &mut self,
        index: usize,
        positions: &[u32],
        tables: &[Vec<u32>],
        block_tokens: u32,
    ) {
        let view = &mut self.views[self.kv_layers[index].0];
        view.places.clear();
        view.places.extend(positions.iter().zip(tables).map(|(position, table)| KvSlot {
            block: table[(position / block_tokens) as usize],
            offset: position % block_tokens,
        }));
    }

    /// Computes the layer `index` of the rows placed by [`AttentionLayers::place_single`], each of which sees its sequence from the second
    /// row on.
    pub(super) fn run_single(
        &mut self,
        index: usize,
        (layer, spec): (&Attention, AttentionSpec),
        (positions, tables, block_tokens): (&[u32], &[Vec<u32>], u32),
        normed: &[f32],
        kv: &mut KvPool,
        (pool, isa, activations): (&Pool, Isa, &mut Activations),
    ) -> &[f32] {
        self.write(index, (layer, spec), (positions, normed), kv, (pool, isa, &mut *activations));
        let (shape, queries) = (self.shape, self.shape.heads * self.shape.head_dim);
        let (view, layout) = &self.kv_layers[index];
        let ragged = &mut self.views[*view].ragged;
        for (row, (position, table)) in positions.iter().zip(tables).enumerate() {
            // Without the first row, by a window that begins behind it.
            ragged.clear(Some(*position));
            ragged.push(&[*position], 0, table.iter().copied(), block_tokens as usize);
            let qkv = &self.qkv[row * shape.width()..(row + 1) * shape.width()];
            let attended = &mut self.attended[row * queries..(row + 1) * queries];
            attention(pool, isa, shape, qkv, ragged, kv, layout, self.score_size, attended);
        }
        self.gate(positions.len(), pool, isa)
    }
}

/// Parts rows of a query projection with gates, [heads, (query, gate)] before keys and values, into rows of queries, keys and values
/// and those of gates.
fn part_gates(shape: QkvShape, projected: &[f32], qkv: &mut [f32], gates: &mut [f32]) {
    let QkvShape { heads, head_dim, .. } = shape;
    let queries = heads * head_dim;
    let rows = projected.chunks_exact(shape.width() + queries).zip(qkv.chunks_exact_mut(shape.width()));
    for ((projected, qkv), gates) in rows.zip(gates.chunks_exact_mut(queries)) {
        let (of_heads, rest) = projected.split_at(2 * queries);
        for (head, both) in of_heads.chunks_exact(2 * head_dim).enumerate() {
            qkv[head * head_dim..(head + 1) * head_dim].copy_from_slice(&both[..head_dim]);
            gates[head * head_dim..(head + 1) * head_dim].copy_from_slice(&both[head_dim..]);
        }
        qkv[queries..].copy_from_slice(rest);
    }
}
