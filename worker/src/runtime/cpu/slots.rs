use std::sync::Arc;

use inflight_contract::SamplingParams;

use super::super::{Batch, Error, Slot, SlotSetup};

/// What sampling knows of the running sequences.
pub(super) struct Slots {
    slots: Vec<Option<State>>,
}

/// What sampling knows of one sequence.
pub(super) struct State {
    pub(super) sampling: Arc<SamplingParams>,
    pub(super) choice: u32,
    /// Tokens that would end it, to be masked before `min_tokens`.
    ending: Vec<u32>,
    generated: u32,
    /// The tokens of prompt and output, if penalties need them: sorted by id, each with how often it was generated.
    /// Never more entries than the context has tokens.
    history: Vec<Seen>,
}

struct Seen {
    token: u32,
    generated: u32,
}

impl Slots {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: (0..slots).map(|_| None).collect() }
    }

    pub(super) fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        let slots = self.slots.len();
        let Some(place) = self.slots.get_mut(slot as usize) else {
            return Err(Error::Malformed(format!("slot {slot} is out of range: there are {slots}")));
        };
        *place = Some(State::new(setup));
        Ok(())
    }

    pub(super) fn detach(&mut self, slot: Slot) {
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = None;
        }
    }

    /// Checks that every sample row's slot is attached.
    pub(super) fn check(&self, batch: &Batch) -> Result<(), Error> {
        match batch.samples.iter().find(|sample| self.get(sample.slot).is_none()) {
            Some(sample) => Err(Error::Malformed(format!("slot {} is sampled from but free", sample.slot))),
            None => Ok(()),
        }
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&State> {
        self.slots.get(slot as usize).and_then(Option::as_ref)
    }

    pub(super) fn count(&mut self, slot: Slot, token: u32) {
        if let Some(Some(state)) = self.slots.get_mut(slot as usize) {
            state.count(token);
        }
    }
}

impl State {
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
            history.extend(prompt.into_iter().map(|token| Seen { token, generated: 0 }));
        }
        let mut state = Self { sampling, choice: setup.choice, ending, generated: 0, history };
        setup.generated.iter().for_each(|token| state.count(*token));
        state
    }

    fn count(&mut self, token: u32) {
        self.generated += 1;
        if self.sampling.needs_history() {
            match self.history.binary_search_by_key(&token, |seen| seen.token) {
                Ok(at) => self.history[at].generated += 1,
                Err(at) => self.history.insert(at, Seen { token, generated: 1 }),
            }
        }
    }

    fn masks(&self) -> bool {
        self.generated < self.sampling.min_tokens && !self.ending.is_empty()
    }

    /// Whether [`State::adjust`] would change anything.
    pub(super) fn adjusts(&self) -> bool {
        !self.history.is_empty() || !self.sampling.logit_bias.is_empty() || self.masks()
    }

    /// Applies penalties, then biases, then the mask of ending tokens.
    pub(super) fn adjust(&self, logits: &mut [f32]) {
        let sampling = &*self.sampling;
        for seen in &self.history {
            let Some(logit) = logits.get_mut(seen.token as usize) else { continue };
            let penalty = sampling.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            if seen.generated > 0 {
                *logit -= seen.generated as f32 * sampling.frequency_penalty;
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
