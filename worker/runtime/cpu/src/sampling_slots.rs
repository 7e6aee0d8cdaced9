//! Sampling state of the running sequences: penalties, logit bias, masks of ending tokens.

use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_runtime::{Batch, Error, Slot, SlotSetup};

/// Slot table.
pub(super) struct SamplingSlots {
    slots: Vec<Option<SlotState>>,
}

/// Sampling state of one sequence.
pub(super) struct SlotState {
    pub(super) sampling: Arc<SamplingParams>,
    pub(super) choice: u32,
    /// EOS and stop tokens, masked until `min_tokens` are generated.
    ending: Vec<u32>,
    generated: u32,
    /// Tokens of prompt and output, if penalties need them, sorted by id; at most as many as the context has
    /// tokens.
    history: Vec<TokenCount>,
}

/// Token of a sequence and the number of times that it was generated.
struct TokenCount {
    token: u32,
    generated: u32,
}

impl SamplingSlots {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: (0..slots).map(|_| None).collect() }
    }

    pub(super) fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        let slots = self.slots.len();
        let Some(entry) = self.slots.get_mut(slot as usize) else {
            return Err(Error::Malformed(format!("slot {slot} is out of range: there are {slots}")));
        };
        *entry = Some(SlotState::new(setup));
        Ok(())
    }

    pub(super) fn detach(&mut self, slot: Slot) {
        if let Some(entry) = self.slots.get_mut(slot as usize) {
            *entry = None;
        }
    }

    /// Checks that every sample row's slot is attached.
    pub(super) fn check(&self, batch: &Batch) -> Result<(), Error> {
        match batch.samples.iter().find(|sample| self.get(sample.slot).is_none()) {
            Some(sample) => Err(Error::Malformed(format!("slot {} is sampled from but free", sample.slot))),
            None => Ok(()),
        }
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&SlotState> {
        self.slots.get(slot as usize).and_then(Option::as_ref)
    }

    pub(super) fn count(&mut self, slot: Slot, token: u32) {
        if let Some(Some(state)) = self.slots.get_mut(slot as usize) {
            state.count(token);
        }
    }
}

impl SlotState {
    fn new(setup: &SlotSetup<'_>) -> Self {
        let sampling = Arc::clone(&setup.sampling);
        let mut ending = Vec::new();
        if sampling.min_tokens > 0 {
            ending.extend_from_slice(&sampling.stop_token_ids);
            if !sampling.ignore_eos {
                ending.extend_from_slice(setup.eos_token_ids);
            }
        }
        let mut history = Vec::new();
        if sampling.needs_history() {
            let mut prompt = setup.prompt.to_vec();
            prompt.sort_unstable();
            prompt.dedup();
            history.extend(prompt.into_iter().map(|token| TokenCount { token, generated: 0 }));
        }
        let mut state = Self { sampling, choice: setup.choice, ending, generated: 0, history };
        setup.generated.iter().for_each(|token| state.count(*token));
        state
    }

    fn count(&mut self, token: u32) {
        self.generated += 1;
        if self.sampling.needs_history() {
            match self.history.binary_search_by_key(&token, |entry| entry.token) {
                Ok(at) => self.history[at].generated += 1,
                Err(at) => self.history.insert(at, TokenCount { token, generated: 1 }),
            }
        }
    }

    /// Returns whether ending tokens are masked now.
    fn masks(&self) -> bool {
        self.generated < self.sampling.min_tokens && !self.ending.is_empty()
    }

    /// Returns whether [`SlotState::adjust`] changes logits.
    pub(super) fn adjusts(&self) -> bool {
        !self.history.is_empty() || !self.sampling.logit_bias.is_empty() || self.masks()
    }

    /// Applies penalties, then biases, then the mask of ending tokens, to the logits of one row;
    /// [vocab_size].
    pub(super) fn adjust(&self, logits: &mut [f32]) {
        let sampling = &*self.sampling;
        for entry in &self.history {
            let Some(logit) = logits.get_mut(entry.token as usize) else { continue };
            let penalty = sampling.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            if entry.generated > 0 {
                *logit -= entry.generated as f32 * sampling.frequency_penalty;
                *logit -= sampling.presence_penalty;
            }
        }
        for (token, bias) in &sampling.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        if self.masks() {
            for token in &self.ending {
                if let Some(logit) = logits.get_mut(*token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}
