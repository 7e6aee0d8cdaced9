//! Sampling state of the running sequences: penalties, logit bias, masks.

use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_runtime::{Batch, Error, RecentTokens, Slot, SlotSetup};

/// Slot table.
pub(super) struct SamplingSlots {
    slots: Vec<Option<SlotState>>,
    /// Last batch that sampled from each slot.
    sampled_in: Vec<u64>,
    batches: u64,
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
    /// Last generated tokens, if bad words need them.
    recent: Option<RecentTokens>,
}

/// Token of a sequence and the number of times that it was generated.
struct TokenCount {
    token: u32,
    generated: u32,
}

impl SamplingSlots {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: (0..slots).map(|_| None).collect(), sampled_in: vec![0; slots], batches: 0 }
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

    /// Checks that every sample row's slot is attached, and that the rows of a slot are consecutive.
    pub(super) fn check(&mut self, batch: &Batch) -> Result<(), Error> {
        self.batches += 1;
        let mut last = None;
        for sample in &batch.samples {
            let slot = sample.slot;
            if self.get(slot).is_none() {
                return Err(Error::Malformed(format!("slot {slot} is sampled from but free")));
            }
            let before = std::mem::replace(&mut self.sampled_in[slot as usize], self.batches);
            if last.replace(slot) != Some(slot) && before == self.batches {
                return Err(Error::Malformed(format!("sample rows of slot {slot} are not consecutive")));
            }
        }
        Ok(())
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
        let recent = (!sampling.bad_word_token_ids.is_empty()).then(|| RecentTokens::new(&[]));
        let mut state = Self { sampling, choice: setup.choice, ending, generated: 0, history, recent };
        setup.generated.iter().for_each(|token| state.count(*token));
        state
    }

    fn count(&mut self, token: u32) {
        self.generated += 1;
        self.recent.iter_mut().for_each(|recent| recent.push(token));
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
        !self.history.is_empty()
            || !self.sampling.logit_bias.is_empty()
            || self.sampling.masks_tokens()
            || self.masks()
    }

    /// Returns the token that is generated where masks leave no other; `None` if the sequence has no masks
    /// but that of ending tokens. `masked`: the row has a token mask, too.
    pub(super) fn fallback_token(&self, vocab_size: usize, masked: bool) -> Option<u32> {
        let sampling = &*self.sampling;
        if masked || sampling.masks_tokens() { sampling.fallback_token(vocab_size as u32) } else { None }
    }

    /// Applies penalties, then biases, then masks, to the logits of one row; [vocab_size].
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
        self.mask_tokens(logits);
    }

    /// Masks all but the allowed tokens, and the last token of each bad word whose other tokens the output
    /// ends with.
    fn mask_tokens(&self, logits: &mut [f32]) {
        let mut next = 0;
        for id in &*self.sampling.allowed_token_ids {
            let id = (*id as usize).min(logits.len());
            logits[next..id].fill(f32::NEG_INFINITY);
            next = (id + 1).min(logits.len());
        }
        if next > 0 {
            logits[next..].fill(f32::NEG_INFINITY);
        }
        let Some(recent) = &self.recent else { return };
        for word in &self.sampling.bad_word_token_ids {
            let Some((last, before)) = word.split_last() else { continue };
            if let Some(logit) = logits.get_mut(*last as usize).filter(|_| recent.end_with(before)) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}
