//! Device buffers beside weights and KV pool, in one table: what is planned, allocated and poisoned is what it lists.

use inflight_kernels::cuda::{DeviceError, SAMPLING_SPLIT_BYTES, SAMPLING_SPLIT_ROWS, SamplingResult};
use inflight_runtime::SCORES_MAX;

use super::gpu::Gpu;
use super::shapes::{BufferLimits, DEPTH, ModelShapes, PARTIALS};
use super::slots::{adjustment_bytes, allowed_bytes, history_bytes, output_bytes, words_bytes};

/// Part of the memory plan: its name, and the CLI option that reduces it (empty: none).
pub(super) type Component = (&'static str, &'static str);

const ACTIVATIONS: Component = ("activations", "--max-batch-tokens");
const LOGITS: Component = ("logits", "--max-sequences");
const RESULTS: Component = ("results", "--max-sequences");
const SAMPLING: Component = ("biases and masks", "--max-sequences");
const PENALTIES: Component = ("penalties", "--max-sequences");
const METADATA: Component = ("metadata", "--max-sequences");
const ANGLES: Component = ("angles", "--max-context-tokens");
const ATTENTION: Component = ("attention", "");

/// What a buffer has before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Nothing that is read: each step writes what it reads. Zeros after load.
    Scratch,
    /// Scratch that is not zeroed at load.
    Unwritten,
    /// State of earlier steps or of the load, zeros after load.
    Zeroed,
    /// State of earlier steps or of the load; nothing after load.
    State,
}

/// Row of the table.
pub(super) struct BufferSpec {
    pub(super) component: Component,
    pub(super) content: Content,
    /// Times that it is allocated.
    pub(super) copies: u32,
    bytes: fn(&ModelShapes, &BufferLimits) -> u64,
}

impl BufferSpec {
    /// Bytes of one allocation. A buffer that a model does not need has the smallest.
    pub(super) fn bytes(&self, shapes: &ModelShapes, limits: &BufferLimits) -> u64 {
        (self.bytes)(shapes, limits).max(4)
    }

    fn alloc<G: Gpu>(
        &self,
        gpu: &G,
        shapes: &ModelShapes,
        limits: &BufferLimits,
    ) -> Result<G::Memory, DeviceError> {
        let memory = gpu.alloc(self.bytes(shapes, limits) as usize)?;
        if matches!(self.content, Content::Scratch | Content::Zeroed) {
            gpu.zero(&memory)?;
        }
        Ok(memory)
    }
}

/// Defines a struct of buffers by the rows of the table: component, content, and bytes by shapes and limits.
macro_rules! buffers {
    ($(#[$doc:meta])* $name:ident, $copies:expr, {
        $($(#[$field_doc:meta])* $field:ident: $component:ident, $content:ident, $bytes:expr;)*
    }) => {
        $(#[$doc])*
        pub(super) struct $name<M> {
            $($(#[$field_doc])* pub(super) $field: M,)*
        }

        impl<M> $name<M> {
            const SPECS: &[BufferSpec] = &[
                $(BufferSpec { component: $component, content: Content::$content, copies: $copies, bytes: $bytes },)*
            ];

            /// Allocates them.
            pub(super) fn alloc<G: Gpu<Memory = M>>(
                gpu: &G,
                shapes: &ModelShapes,
                limits: &BufferLimits,
            ) -> Result<Self, DeviceError> {
                $(let $field = BufferSpec {
                    component: $component, content: Content::$content, copies: $copies, bytes: $bytes,
                }.alloc(gpu, shapes, limits)?;)*
                Ok(Self { $($field,)* })
            }

            /// Fills those that a step writes before it reads them with bytes of which each number is NaN and each token id is beyond any
            /// vocabulary.
            pub(super) fn poison<G: Gpu<Memory = M>>(&self, gpu: &G) -> Result<(), DeviceError> {
                $(if matches!(Content::$content, Content::Scratch | Content::Unwritten) {
                    gpu.fill(&self.$field, POISON)?;
                })*
                Ok(())
            }
        }
    };
}

/// NaN in 16 and 32 bits.
const POISON: u8 = 0xff;

buffers! {
    /// Buffers of the forward pass and of sampling.
    ForwardBuffers, 1, {
        /// Cosines and sines of all positions, [rotary embeddings, context, head_dim / 2, 2].
        angles: ANGLES, State, |shapes, limits| shapes.ropes * limits.context * shapes.head_dim * 4;
        /// Residual, in f32.
        hidden: ACTIVATIONS, Scratch, |shapes, limits| limits.rows * shapes.hidden * 4;
        normed: ACTIVATIONS, Scratch, |shapes, limits| limits.rows * shapes.hidden * 2;
        /// Outputs of the first projections of a layer.
        projected: ACTIVATIONS, Scratch, |shapes, limits| limits.rows * shapes.qkv().max(shapes.projected()) * 2;
        /// Outputs of attention, or of the gated delta rule.
        mixed: ACTIVATIONS, Scratch, |shapes, limits| limits.rows * shapes.queries().max(shapes.delta_values()) * 2;
        /// Gates of the outputs of attention.
        gates: ACTIVATIONS, Scratch, |shapes, limits| limits.rows * shapes.gates() * 2;
        /// Queries, keys and values of recurrent layers behind their convolution, in f32.
        convolved: ACTIVATIONS, Scratch, |shapes, limits| limits.rows * shapes.delta_channels() * 4;
        /// Betas and decays, in f32.
        factors: ACTIVATIONS, Scratch, |shapes, limits| limits.rows * shapes.delta_factors() * 4;
        /// Places of the pieces of a state, by recurrent layer.
        state_places: ACTIVATIONS, State, |shapes, _| shapes.state_place_bytes();
        delta: ACTIVATIONS, Scratch, |shapes, limits| limits.rows * shapes.hidden * 2;
        gate_up: ACTIVATIONS, Scratch, |shapes, limits| limits.rows * 2 * shapes.inner * 2;
        gated: ACTIVATIONS, Scratch, |shapes, limits| limits.rows * shapes.inner * 2;
        sampled_hidden: LOGITS, Scratch, |shapes, limits| limits.samples * shapes.hidden * 2;
        logits: LOGITS, Scratch, |shapes, limits| limits.samples * shapes.logits * 4;
        /// Each rank's logits, [ranks, samples, stride], before they are merged; unused without collectives.
        gathered: LOGITS, Scratch, |shapes, limits| limits.samples * shapes.gathered * 4;
        /// Tokens of the last step, which the next one may take as its input.
        sampled: LOGITS, Zeroed, |_, limits| limits.samples * 4;
        /// What the parts of rows hand on while they are sampled, for at most [`SAMPLING_SPLIT_ROWS`] rows.
        split: LOGITS, Unwritten, |_, limits| limits.samples.min(SAMPLING_SPLIT_ROWS as u64) * SAMPLING_SPLIT_BYTES as u64;
        partial_sums: ATTENTION, Unwritten, |shapes, _| shapes.partial_bytes().0;
        partial_tops: ATTENTION, Unwritten, |shapes, _| shapes.partial_bytes().1;
        /// Pieces that are done, by partial result and key head: zeros between kernels.
        counters: ATTENTION, Zeroed, |shapes, _| PARTIALS as u64 * shapes.kv_heads * 4;
    }
}

buffers! {
    /// Buffers of the attached sequences' sampling state.
    SlotBuffers, 1, {
        /// Logit biases and masks by slot, [slots, ADJUSTMENTS_MAX, 2].
        adjustments: SAMPLING, State, |_, limits| adjustment_bytes(limits.slots);
        /// Bits of the allowed tokens by slot, [slots, vocabulary / 32].
        allowed: SAMPLING, State, |shapes, limits| allowed_bytes(limits.slots, shapes.logits);
        /// Bad words by slot, [slots, WORDS_ENTRIES].
        words: SAMPLING, State, |_, limits| words_bytes(limits.slots);
        /// Outputs by slot, [slots]. They stay on the device, as the next step may be launched before the host knows
        /// the tokens of this one.
        outputs: SAMPLING, State, |_, limits| output_bytes(limits.slots);
        /// Staging for the tokens of a history while they are counted.
        tokens: SAMPLING, State, |_, limits| limits.context * 4;
        /// Occurrences of each token in a slot's sequence, for penalties, [slots, vocabulary].
        histories: PENALTIES, State, |shapes, limits| history_bytes(limits.slots, shapes.logits);
        /// Token masks of the step's masked rows, [sample rows, vocabulary / 32].
        step_masks: SAMPLING, State, |shapes, limits| allowed_bytes(limits.samples, shapes.logits);
    }
}

buffers! {
    /// Buffers of a step in flight.
    StepBuffers, DEPTH, {
        /// Packed metadata.
        metadata: METADATA, State, |_, limits| limits.metadata;
        /// Results of the sampled rows.
        results: RESULTS, Unwritten, |_, limits| limits.samples * size_of::<SamplingResult>() as u64;
        /// Results of the scored rows, [SCORES_MAX].
        scores: RESULTS, Unwritten, |_, _| SCORES_MAX as u64 * size_of::<SamplingResult>() as u64;
    }
}

/// All buffers.
pub(super) fn specs() -> impl Iterator<Item = &'static BufferSpec> {
    ForwardBuffers::<()>::SPECS.iter().chain(SlotBuffers::<()>::SPECS).chain(StepBuffers::<()>::SPECS)
}
