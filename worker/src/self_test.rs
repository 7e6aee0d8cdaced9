//! Self-test: a request whose answer was recorded at the start and that runs again at intervals, beside those of routers.
//!
//! CPU kernels, and those of GPUs with `--deterministic`, compute the same bits under any schedule, so that any other bit shows a device, or
//! weights in its memory, that cannot be trusted any more.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{ModelLimits, Priority, SamplingSpec, Weight};
use inflight_worker_core::Time;

use crate::engine::{ChoiceEvent, Failure, Finish, Request, RequestKey, ResumedChoice, SessionId};

/// Tenant that self-tests are accounted to. Submissions of routers cannot name it.
pub(crate) const TENANT: &str = "inflight/self-test";

/// Prompt and output tokens, where the model's context has room for them.
const PROMPT_TOKENS: u32 = 24;
const OUTPUT_TOKENS: u32 = 4;

/// Failure of a self-test: the device is not to be trusted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SelfTestFailed {
    /// The logits were not finite.
    #[error("the self-test gave {0}: the device, or the weights in its memory, are broken")]
    NonFinite(Failure),
    /// The answer differs from the recorded one.
    #[error(
        "the self-test gave token {token} with log probability {logprob} at position {position}, and token {recorded_token} with \
         {recorded_logprob} at the start: the device, or the weights in its memory, are broken"
    )]
    Differs {
        /// Index of the output token.
        position: usize,
        token: u32,
        logprob: String,
        recorded_token: u32,
        recorded_logprob: String,
    },
}

/// Output tokens with the bits of their log probabilities.
type Answer = Vec<(u32, u32)>;

/// Schedule and recorded answer of the self-tests of a worker.
#[derive(Debug)]
pub(crate) struct SelfTest {
    interval: Duration,
    model: ModelLimits,
    /// Answer at the start.
    recorded: Option<Answer>,
    /// Answer of the test that runs, so far.
    running: Option<Answer>,
    due: Time,
    /// End of the last test.
    ended: Time,
    number: u64,
}

impl SelfTest {
    /// Pause after a test that found no room.
    const RETRY: Duration = Duration::from_secs(10);
    /// Minimum time between the end of a test and one that logits which are not finite have caused: requests that overflow cost one test
    /// in this time, not one each.
    const SUSPECTED_MIN: Duration = Duration::from_secs(10);

    /// Creates self-tests of a model, the first of which is due at once and recorded.
    pub fn new(interval: Duration, model: ModelLimits) -> Self {
        Self { interval, model, recorded: None, running: None, due: Time::ZERO, ended: Time::ZERO, number: 0 }
    }

    /// Returns when the next test is due; `None` while one runs.
    pub fn due(&self) -> Option<Time> {
        self.running.is_none().then_some(self.due)
    }

    /// Lets the next test follow soon, because logits of a request were not finite. Returns whether it has become earlier.
    pub fn suspect(&mut self, now: Time) -> bool {
        let soon = now.max(self.ended.after(Self::SUSPECTED_MIN.min(self.interval)));
        let earlier = self.running.is_none() && soon < self.due;
        if earlier {
            self.due = soon;
        }
        earlier
    }

    /// Returns the request of a test if one is due.
    pub fn start(&mut self, now: Time) -> Option<Request> {
        if self.due().is_none_or(|due| due > now) {
            return None;
        }
        self.running = Some(Answer::new());
        self.number += 1;
        let room = u32::try_from(u64::from(self.model.context_tokens).min(self.model.kv_tokens.into()))
            .unwrap_or(u32::MAX);
        let output = OUTPUT_TOKENS.min(room / 2).max(1);
        let prompt = PROMPT_TOKENS.min(room.saturating_sub(output)).max(1);
        // Any tokens do; these depend on nothing but the size of the vocabulary.
        let token = |at: u32| at.wrapping_add(1).wrapping_mul(0x9e37_79b1) % self.model.vocab_size.max(1);
        let sampling =
            SamplingSpec { temperature: 0.0, ignore_eos: true, logprobs: Some(0), ..SamplingSpec::default() };
        Some(Request {
            key: RequestKey { session: SessionId::SELF_TEST, request: self.number },
            attempt: 1,
            prompt: (0..prompt).map(token).collect(),
            max_tokens: output,
            // Constants, which are within the ranges of their parameters.
            sampling: Arc::new(sampling.validate().expect("the parameters of self-tests are valid")),
            choices: vec![ResumedChoice::default()],
            prompt_logprobs_received: 0,
            tenant: TENANT.into(),
            weight: Weight::default(),
            // Its 28 tokens delay no request by much; behind requests that never end it would find nothing.
            priority: Priority::MAX.get(),
            virtual_start_time: None,
            deadline: None,
            queued: None,
            grammar: None,
            span: tracing::Span::none(),
        })
    }

    /// Takes an event of the test that runs. Returns the outcome at its end: whether it had an answer.
    ///
    /// # Errors
    /// [`SelfTestFailed`]: the worker is to leave.
    pub fn take(&mut self, event: &ChoiceEvent, now: Time) -> Result<Option<bool>, SelfTestFailed> {
        let Some(answer) = &mut self.running else { return Ok(None) };
        if let Some(token) = event.token {
            let logprob = event.logprobs.as_ref().map_or(f32::NAN, |logprobs| logprobs.chosen.logprob);
            answer.push((token, logprob.to_bits()));
        }
        let Some(finish) = &event.finish else { return Ok(None) };
        let answer = std::mem::take(answer);
        let unanswered = matches!(finish, Finish::Failed(_));
        let pause = if unanswered { self.interval.min(Self::RETRY) } else { self.interval };
        (self.running, self.ended, self.due) = (None, now, now.after(pause));
        match finish {
            Finish::Failed(failure @ Failure::NonFinite(_)) => {
                Err(SelfTestFailed::NonFinite(failure.clone()))
            }
            // It had no room, or the worker drains.
            Finish::Failed(_) => Ok(Some(false)),
            Finish::Ended(_) => self.compare(answer).map(|()| Some(true)),
        }
    }

    fn compare(&mut self, answer: Answer) -> Result<(), SelfTestFailed> {
        let recorded = self.recorded.get_or_insert_with(|| answer.clone());
        let differs = recorded.iter().zip(&answer).position(|(recorded, now)| recorded != now);
        let Some(position) = differs else { return Ok(()) };
        let ((recorded_token, recorded_bits), (token, bits)) = (recorded[position], answer[position]);
        let number = |bits| format!("{:?}", f32::from_bits(bits));
        let (logprob, recorded_logprob) = (number(bits), number(recorded_bits));
        Err(SelfTestFailed::Differs { position, token, logprob, recorded_token, recorded_logprob })
    }
}

#[cfg(test)]
mod tests {
    use inflight_contract::{FinishReason, PositionLogprobs, TokenLogprob};

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn self_test() -> SelfTest {
        SelfTest::new(MINUTE, ModelLimits { vocab_size: 100, context_tokens: 64, kv_tokens: 64 })
    }

    fn at(seconds: u64) -> Time {
        Time::ZERO.after(Duration::from_secs(seconds))
    }

    fn event(request: &Request, answer: Option<(u32, f32)>, finish: Option<Finish>) -> ChoiceEvent {
        let logprobs = answer.map(|(token, logprob)| {
            Box::new(PositionLogprobs { chosen: TokenLogprob { token, logprob }, top: Vec::new() })
        });
        ChoiceEvent {
            key: request.key,
            attempt: 1,
            choice: 0,
            token: answer.map(|(token, _)| token),
            logprobs,
            prompt_logprobs: Vec::new(),
            computed_tokens: 0,
            finish,
        }
    }

    /// Runs a test that is due and has this answer.
    fn run(test: &mut SelfTest, now: Time, answer: (u32, f32)) -> Result<Option<bool>, SelfTestFailed> {
        let request = test.start(now).expect("it is due");
        assert_eq!(test.take(&event(&request, Some(answer), None), now), Ok(None));
        test.take(&event(&request, None, Some(Finish::Ended(FinishReason::Length))), now)
    }

    #[test]
    fn one_other_bit_than_at_the_start_fails_and_the_same_bits_pass_at_every_interval() {
        let mut test = self_test();
        assert_eq!(run(&mut test, at(0), (7, -1.5)), Ok(Some(true)));
        assert!(test.start(at(59)).is_none() && test.due() == Some(at(60)));
        assert_eq!(run(&mut test, at(61), (7, -1.5)), Ok(Some(true)));
        let failed = run(&mut test, at(121), (7, f32::from_bits((-1.5f32).to_bits() + 1))).unwrap_err();
        assert!(
            failed.to_string().contains("log probability -1.5000001 at position 0, and token 7 with -1.5"),
            "{failed}"
        );
        assert!(run(&mut test, at(181), (8, -1.5)).is_err());
    }

    #[test]
    fn logits_that_are_not_finite_fail_and_a_test_without_room_says_nothing() {
        let mut test = self_test();
        assert_eq!(run(&mut test, at(0), (7, -1.5)), Ok(Some(true)));
        let mut end = |now, failure| {
            let request = test.start(now).expect("it is due");
            test.take(&event(&request, None, Some(Finish::Failed(failure))), now)
        };
        assert_eq!(end(at(60), Failure::Overloaded("full".to_owned())), Ok(Some(false)));
        assert_eq!(end(at(120), Failure::Draining), Ok(Some(false)));
        let failed = end(at(180), Failure::NonFinite("in the prompt")).unwrap_err().to_string();
        assert!(failed.contains("infinite or NaN in the prompt"), "{failed}");
    }

    #[test]
    fn a_flood_of_requests_that_overflow_causes_one_test_in_ten_seconds() {
        let mut test = self_test();
        let mut runs = 0;
        for second in 0..100 {
            let _ = test.suspect(at(second));
            if test.due().is_some_and(|due| due <= at(second)) {
                assert_eq!(run(&mut test, at(second), (7, -1.5)), Ok(Some(true)));
                runs += 1;
            }
        }
        assert_eq!(runs, 10);
    }

    #[test]
    fn prompts_fit_any_context_and_vocabulary() {
        for (vocab_size, context_tokens) in [(1, 2), (2, 3), (7, 8), (200_000, 27), (200_000, 1 << 20)] {
            let mut test = SelfTest::new(MINUTE, ModelLimits { vocab_size, context_tokens, kv_tokens: 4096 });
            let request = test.start(at(0)).expect("it is due");
            assert!(!request.prompt.is_empty() && request.max_tokens > 0);
            assert!(request.prompt.len() as u32 + request.max_tokens <= context_tokens);
            assert!(request.prompt.iter().all(|token| *token < vocab_size));
        }
    }
}
