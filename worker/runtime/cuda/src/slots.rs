//! Sampling state of attached sequences, by slot.

use std::sync::Arc;

use inflight_contract::{SamplingParams, SamplingSpec};
use inflight_kernels::cuda::{
    DRAFTS_MAX, DeviceError, HistoryParams, RECENT_TOKENS, SamplingRow, SlotOutput, TOP_MAX, as_bytes,
    count_history,
};
use inflight_runtime::{Batch, Error, RecentTokens, SampleRow, Slot, SlotSetup, TokenMasks};

use super::buffers::SlotBuffers;
use super::gpu::{Gpu, GpuMemory, bytes_of};
use super::shapes::{BufferLimits, ModelShapes};

/// Maximum number of masked tokens: stop ids of the request and of the model.
const MASKED_MAX: usize = SamplingSpec::STOP_TOKEN_IDS_MAX + 64;
const ADJUSTMENTS_MAX: usize = SamplingSpec::LOGIT_BIAS_MAX + MASKED_MAX;

/// Returns the bytes of the logit biases and masks of `slots` slots.
pub(super) fn adjustment_bytes(slots: u64) -> u64 {
    slots * ADJUSTMENTS_MAX as u64 * 8
}

/// Entries of a slot's bad words: the start of each and the end of the last, then their tokens.
const WORDS_ENTRIES: usize = SamplingSpec::BAD_WORDS_MAX + 1 + SamplingSpec::BAD_WORDS_TOKENS_MAX;
/// Fallback of a row without one.
const NO_FALLBACK: u32 = u32::MAX;
const _: () = assert!(RECENT_TOKENS == inflight_runtime::RECENT_TOKENS, "the kernel has another ring");

/// Returns the bytes of the masks of allowed tokens of `rows` slots or sample rows.
pub(super) fn allowed_bytes(rows: u64, vocabulary: u64) -> u64 {
    rows * vocabulary.div_ceil(32) * 4
}

/// Returns the bytes of the bad words of `slots` slots.
pub(super) fn words_bytes(slots: u64) -> u64 {
    slots * WORDS_ENTRIES as u64 * 4
}

/// Returns the bytes of what is kept of the outputs of `slots` slots.
pub(super) fn output_bytes(slots: u64) -> u64 {
    slots * size_of::<SlotOutput>() as u64
}

/// Returns the bytes of the token histories of `slots` slots.
pub(super) fn history_bytes(slots: u64, vocabulary: u64) -> u64 {
    slots * vocabulary * 4
}

/// Sampling state by slot: parameters on the host; biases, masks, token counts, and number and last ones of the
/// generated tokens on the device. It alone knows which drafts stood when the next step is launched.
pub(super) struct GpuSlots<G: Gpu> {
    slots: Vec<Option<GpuSlot>>,
    vocabulary: u32,
    buffers: SlotBuffers<G::Memory>,
    context: usize,
    sampled_slots: Vec<Slot>,
    /// Token masks of the step's masked rows, while they are uploaded.
    mask_bits: Vec<u32>,
}

/// Sampling state of an attached sequence.
struct GpuSlot {
    sampling: Arc<SamplingParams>,
    choice: u32,
    biases: u32,
    /// Tokens masked until `min_tokens` are generated.
    masked: u32,
    /// Device address of its token history; 0: none.
    history: u64,
    /// Device address of its mask of allowed tokens; 0: none.
    allowed: u64,
    /// Number of its bad words.
    words: u32,
    /// Device address of its output; 0 if no mask depends on it.
    output: u64,
    fallback: u32,
}

impl<G: Gpu> GpuSlots<G> {
    /// Allocates the state of the slots, and masks for the sample rows.
    pub(super) fn new(
        gpu: &G,
        shapes: &ModelShapes,
        limits: &BufferLimits,
        vocabulary: u32,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            slots: (0..limits.slots).map(|_| None).collect(),
            vocabulary,
            buffers: SlotBuffers::alloc(gpu, shapes, limits)?,
            context: limits.context as usize,
            sampled_slots: Vec::new(),
            mask_bits: Vec::new(),
        })
    }

    /// Sets up a slot for a sequence, replacing the previous one.
    pub(super) fn attach(&mut self, gpu: &G, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        self.detach(slot);
        let slots = self.slots.len();
        let Some(entry) = self.slots.get_mut(slot as usize) else {
            return Err(Error::Malformed(format!("slot {slot} is out of range: there are {slots}")));
        };
        let sampling = Arc::clone(&setup.sampling);
        let mut list: Vec<u32> =
            sampling.logit_bias.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]).collect();
        let biases = list.len() as u32 / 2;
        if sampling.min_tokens > 0 {
            let own = setup.eos_token_ids.iter().filter(|_| !sampling.ignore_eos);
            list.extend(sampling.stop_token_ids.iter().chain(own).flat_map(|token| [*token, 0]));
        }
        list.truncate(ADJUSTMENTS_MAX * 2);
        let masked = list.len() as u32 / 2 - biases;
        if !list.is_empty() {
            let at = adjustment_bytes(slot.into()) as usize;
            gpu.upload(&self.buffers.adjustments, at, bytes_of(&list)).map_err(device_error)?;
        }
        let mut history = 0;
        if sampling.needs_history() {
            // A step in flight may still use it for the previous sequence, but was enqueued before the work
            // below.
            history = self.buffers.histories.address() + history_bytes(slot.into(), self.vocabulary.into());
            // A sequence longer than the context cannot run, so the rest of it does not matter.
            let prompt = &setup.prompt[..setup.prompt.len().min(self.context)];
            let generated = &setup.generated[..setup.generated.len().min(self.context - prompt.len())];
            gpu.upload(&self.buffers.tokens, 0, bytes_of(prompt)).map_err(device_error)?;
            gpu.upload(&self.buffers.tokens, prompt.len() * 4, bytes_of(generated)).map_err(device_error)?;
            let p = HistoryParams {
                history,
                tokens: self.buffers.tokens.address(),
                vocabulary: self.vocabulary,
                prompt: prompt.len() as u32,
                generated: generated.len() as u32,
                unused: 0,
            };
            // SAFETY: the history has an entry per vocabulary token, and the token list was just uploaded.
            unsafe { count_history(gpu, &p) }.map_err(device_error)?;
        }
        let mut state = GpuSlot {
            choice: setup.choice,
            biases,
            masked,
            history,
            allowed: 0,
            words: sampling.bad_word_token_ids.len() as u32,
            output: 0,
            fallback: NO_FALLBACK,
            sampling,
        };
        if state.words > 0 || state.masked > 0 {
            let (generated, at) = (setup.generated, output_bytes(slot.into()));
            let recent = *RecentTokens::new(generated).ring();
            let output = SlotOutput { generated: generated.len() as u32, recent };
            gpu.upload(&self.buffers.outputs, at as usize, as_bytes(&output)).map_err(device_error)?;
            state.output = self.buffers.outputs.address() + at;
        }
        if state.sampling.masks_tokens() {
            state.fallback = state.sampling.fallback_token(self.vocabulary).unwrap_or(NO_FALLBACK);
            let masks = SlotMasks { allowed: &self.buffers.allowed, words: &self.buffers.words };
            state.allowed = masks.upload(gpu, slot, self.vocabulary, setup).map_err(device_error)?;
        }
        *entry = Some(state);
        Ok(())
    }

    /// See [`SlotBuffers::poison`].
    pub(super) fn poison(&self, gpu: &G) -> Result<(), DeviceError> {
        self.buffers.poison(gpu)
    }

    pub(super) fn detach(&mut self, slot: Slot) {
        if let Some(state) = self.slots.get_mut(slot as usize) {
            *state = None;
        }
    }

    /// Checks that every sample row's slot is attached, and sampled again behind its drafts only.
    pub(super) fn check(&mut self, batch: &Batch) -> Result<(), Error> {
        self.sampled_slots.clear();
        for rows in slot_rows(batch) {
            if rows.len() > 1 + DRAFTS_MAX {
                let (slot, drafts) = (rows[0].slot, rows.len() - 1);
                return Err(Error::Malformed(format!(
                    "slot {slot} has {drafts} drafts, more than {DRAFTS_MAX}"
                )));
            }
            self.sampled_slots.push(rows[0].slot);
        }
        self.sampled_slots.sort_unstable();
        if let Some(pair) = self.sampled_slots.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Malformed(format!("slot {} is sampled from twice in one batch", pair[0])));
        }
        let free = |slot: &Slot| self.slots.get(*slot as usize).is_none_or(Option::is_none);
        match self.sampled_slots.iter().find(|slot| free(slot)) {
            Some(slot) => Err(Error::Malformed(format!("slot {slot} is sampled from but free"))),
            None => Ok(()),
        }
    }

    /// Fills the sampling parameters of each sample row. The batch was checked.
    pub(super) fn sampling_rows(&self, batch: &Batch, rows: &mut Vec<SamplingRow>) {
        rows.clear();
        let mut next_mask = self.buffers.step_masks.address();
        for samples in slot_rows(batch) {
            for (nth, sample) in samples.iter().enumerate() {
                let mut row = self.row(sample);
                (row.rows, row.nth) = (samples.len() as u32, nth as u32);
                // Its drafts are the input tokens behind its first sample row.
                row.draft = samples[0].row + 1;
                if sample.masked {
                    // The slot's own mask of allowed tokens is a part of it.
                    row.allowed = next_mask;
                    next_mask += allowed_bytes(1, self.vocabulary.into());
                }
                rows.push(row);
            }
        }
    }

    /// Uploads the token masks of a step, without the tokens that the slots' own masks leave out.
    pub(super) fn upload_masks(&mut self, gpu: &G, batch: &Batch, masks: &TokenMasks) -> Result<(), Error> {
        self.mask_bits.clear();
        let masked = batch.samples.iter().filter(|sample| sample.masked);
        for (at, sample) in masked.enumerate() {
            let start = self.mask_bits.len();
            self.mask_bits.extend_from_slice(masks.row(at));
            let state = self.slots.get(sample.slot as usize).and_then(Option::as_ref);
            if let Some(allowed) = state.map(|state| &state.sampling.allowed_token_ids)
                && !allowed.is_empty()
            {
                let own = allowed_bits(allowed, self.vocabulary);
                self.mask_bits[start..].iter_mut().zip(own).for_each(|(word, own)| *word &= own);
            }
        }
        gpu.upload(&self.buffers.step_masks, 0, bytes_of(&self.mask_bits)).map_err(device_error)
    }

    /// Returns the sampling parameters of a row without its place among the rows of its slot.
    fn row(&self, sample: &SampleRow) -> SamplingRow {
        let at = adjustment_bytes(sample.slot.into());
        let Some(Some(state)) = self.slots.get(sample.slot as usize) else {
            return SamplingRow::default();
        };
        let sampling = &*state.sampling;
        SamplingRow {
            history: state.history,
            adjustments: self.buffers.adjustments.address() + at,
            seed: sampling.seed,
            biases: state.biases,
            masked: state.masked,
            choice: state.choice,
            position: sample.position,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            top_k: sampling.top_k.max(0) as u32,
            repetition: sampling.repetition_penalty,
            frequency: sampling.frequency_penalty,
            presence: sampling.presence_penalty,
            logprobs: sampling.logprobs.map_or(0, |count| count.min(TOP_MAX as u32) + 1),
            allowed: state.allowed,
            words: if state.words > 0 {
                self.buffers.words.address() + words_bytes(sample.slot.into())
            } else {
                0
            },
            output: state.output,
            word_count: state.words,
            min_tokens: sampling.min_tokens,
            fallback: match state.fallback {
                // The token of a row whose masks leave none; the engine ends its sequence.
                NO_FALLBACK if sample.masked => 0,
                fallback => fallback,
            },
            ..SamplingRow::default()
        }
    }
}

/// Returns the sample rows of each slot: one, and one behind each of its drafts.
fn slot_rows(batch: &Batch) -> impl Iterator<Item = &[SampleRow]> {
    batch.samples.chunk_by(|_, next| next.drafted)
}

/// Returns the bits of the allowed tokens.
fn allowed_bits(allowed: &[u32], vocabulary: u32) -> Vec<u32> {
    let mut bits = vec![0u32; vocabulary.div_ceil(32) as usize];
    for id in allowed.iter().filter(|id| **id < vocabulary) {
        bits[*id as usize / 32] |= 1 << (id % 32);
    }
    bits
}

/// Device memory of all slots' masks.
struct SlotMasks<'a, M> {
    allowed: &'a M,
    words: &'a M,
}

impl<M: GpuMemory> SlotMasks<'_, M> {
    /// Uploads the masks of a slot. Returns the device address of its mask of allowed tokens; 0 if all are.
    fn upload<G: Gpu<Memory = M>>(
        &self,
        gpu: &G,
        slot: Slot,
        vocabulary: u32,
        setup: &SlotSetup<'_>,
    ) -> Result<u64, DeviceError> {
        let sampling = &*setup.sampling;
        let words = &sampling.bad_word_token_ids;
        if !words.is_empty() {
            let mut entries = vec![0];
            let mut end = 0;
            entries.extend(words.iter().map(|word| {
                end += word.len() as u32;
                end
            }));
            entries.extend(words.iter().flatten());
            gpu.upload(self.words, words_bytes(slot.into()) as usize, bytes_of(&entries))?;
        }
        if sampling.allowed_token_ids.is_empty() {
            return Ok(0);
        }
        let bits = allowed_bits(&sampling.allowed_token_ids, vocabulary);
        let at = allowed_bytes(slot.into(), vocabulary.into());
        gpu.upload(self.allowed, at as usize, bytes_of(&bits))?;
        Ok(self.allowed.address() + at)
    }
}

/// Converts a device error to a runtime error.
pub(super) fn device_error(error: DeviceError) -> Error {
    Error::Device(error.to_string())
}
