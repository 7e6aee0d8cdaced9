use std::sync::Arc;

use inflight_contract::{SamplingParams, SamplingSpec};
use inflight_kernels::cuda::{DeviceError, HistoryParams, SamplingRow, TOP_MAX, count_history};

use super::gpu::{Gpu, Memory, bytes_of};
use crate::runtime::{Batch, Error, SampleRow, Slot, SlotSetup};

/// Tokens that may be masked: stop ids, and the model's own.
const MASKED_MAX: usize = SamplingSpec::STOP_TOKEN_IDS_MAX + 64;
const ADJUSTMENTS_MAX: usize = SamplingSpec::LOGIT_BIAS_MAX + MASKED_MAX;

/// Bytes of the biases and masks of so many slots.
pub(super) fn adjustment_bytes(slots: u64) -> u64 {
    slots * ADJUSTMENTS_MAX as u64 * 8
}

/// Bytes of the histories of so many slots.
pub(super) fn history_bytes(slots: u64, vocabulary: u64) -> u64 {
    slots * vocabulary * 4
}

/// What sampling knows of the running sequences: the small part here, the large part on the device.
pub(super) struct Slots<G: Gpu> {
    slots: Vec<Option<State>>,
    vocabulary: u32,
    /// Biases and masks of every slot, [slots, ADJUSTMENTS_MAX, 2].
    adjustments: G::Memory,
    /// Where the tokens of a history lie while they are counted.
    tokens: G::Memory,
    context: usize,
    /// How often each token occurs in the sequence of each slot that wants to know, [slots, vocabulary].
    histories: G::Memory,
    samples: Vec<Slot>,
}

struct State {
    sampling: Arc<SamplingParams>,
    choice: u32,
    /// Sampled so far, those of steps in flight included.
    generated: u32,
    biases: u32,
    masked: u32,
    /// Where it begins; 0: it has none.
    history: u64,
}

impl<G: Gpu> Slots<G> {
    pub(super) fn new(gpu: &G, slots: u32, vocabulary: u32, context: u32) -> Result<Self, DeviceError> {
        Ok(Self {
            slots: (0..slots).map(|_| None).collect(),
            vocabulary,
            adjustments: gpu.alloc(adjustment_bytes(slots.into()) as usize)?,
            tokens: gpu.alloc(context as usize * 4)?,
            context: context as usize,
            histories: gpu.alloc(history_bytes(slots.into(), vocabulary.into()) as usize)?,
            samples: Vec::new(),
        })
    }

    pub(super) fn attach(&mut self, gpu: &G, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        self.detach(slot);
        let slots = self.slots.len();
        let Some(place) = self.slots.get_mut(slot as usize) else {
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
            gpu.upload(&self.adjustments, at, bytes_of(&list)).map_err(device)?;
        }
        let mut history = 0;
        if sampling.needs_history() {
            // A step in flight may still use it for the sequence before, and was enqueued before what follows.
            history = self.histories.address() + history_bytes(slot.into(), self.vocabulary.into());
            // Of more than the context holds, only the end can matter to a sequence that still runs.
            let prompt = &setup.prompt[..setup.prompt.len().min(self.context)];
            let generated = &setup.generated[..setup.generated.len().min(self.context - prompt.len())];
            gpu.upload(&self.tokens, 0, bytes_of(prompt)).map_err(device)?;
            gpu.upload(&self.tokens, prompt.len() * 4, bytes_of(generated)).map_err(device)?;
            let p = HistoryParams {
                history,
                tokens: self.tokens.address(),
                vocabulary: self.vocabulary,
                prompt: prompt.len() as u32,
                generated: generated.len() as u32,
                unused: 0,
            };
            // SAFETY: the history has a number for each token of the vocabulary, the list was just written.
            unsafe { count_history(gpu, &p) }.map_err(device)?;
        }
        let generated = setup.generated.len() as u32;
        *place = Some(State { sampling, choice: setup.choice, generated, biases, masked, history });
        Ok(())
    }

    pub(super) fn detach(&mut self, slot: Slot) {
        if let Some(state) = self.slots.get_mut(slot as usize) {
            *state = None;
        }
    }

    /// Checks that every sample row's slot is attached, and none is sampled from twice.
    pub(super) fn check(&mut self, batch: &Batch) -> Result<(), Error> {
        self.samples.clear();
        self.samples.extend(batch.samples.iter().map(|sample| sample.slot));
        self.samples.sort_unstable();
        if let Some(pair) = self.samples.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Malformed(format!("slot {} is sampled from twice in one batch", pair[0])));
        }
        let free = |slot: &Slot| self.slots.get(*slot as usize).is_none_or(Option::is_none);
        match self.samples.iter().find(|slot| free(slot)) {
            Some(slot) => Err(Error::Malformed(format!("slot {slot} is sampled from but free"))),
            None => Ok(()),
        }
    }

    /// How each of the batch's sample rows is sampled; counts the tokens to come. The batch was checked.
    pub(super) fn rows(&mut self, batch: &Batch, rows: &mut Vec<SamplingRow>) {
        rows.clear();
        for sample in &batch.samples {
            rows.push(self.row(sample));
        }
    }

    fn row(&mut self, sample: &SampleRow) -> SamplingRow {
        let at = adjustment_bytes(sample.slot.into());
        let Some(Some(state)) = self.slots.get_mut(sample.slot as usize) else {
            return SamplingRow::default();
        };
        let sampling = &*state.sampling;
        let masks = state.generated < sampling.min_tokens;
        state.generated += 1;
        SamplingRow {
            history: state.history,
            adjustments: self.adjustments.address() + at,
            seed: sampling.seed,
            biases: state.biases,
            masked: if masks { state.masked } else { 0 },
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
            active: 1,
            unused: [0; 3],
        }
    }
}

/// A device's failure as a runtime's.
pub(super) fn device(error: DeviceError) -> Error {
    Error::Device(error.to_string())
}
