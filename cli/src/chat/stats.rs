//! Figures of an answer: latency, speed and token counts as the client sees them.

use std::time::Duration;

use inflight_proto::v1::generate_response::Event;

/// Figures of one answer. Times are since the request was sent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AnswerStats {
    prompt_tokens: Option<u32>,
    cached_prompt_tokens: u32,
    output_tokens: u32,
    /// Time of the first tokens, and how many came at once.
    first: Option<(Duration, u32)>,
    /// Time of the last tokens.
    last: Duration,
    longest_pause: Duration,
}

impl AnswerStats {
    /// Takes an event of the answer.
    pub fn take(&mut self, at: Duration, event: &Event) {
        match event {
            Event::Started(started) => self.prompt_tokens = Some(started.prompt_tokens),
            Event::Delta(delta) if !delta.token_ids.is_empty() => {
                let tokens = u32::try_from(delta.token_ids.len()).unwrap_or(u32::MAX);
                match self.first {
                    None => self.first = Some((at, tokens)),
                    Some(_) => self.longest_pause = self.longest_pause.max(at.saturating_sub(self.last)),
                }
                self.last = at;
                self.output_tokens = self.output_tokens.saturating_add(tokens);
            }
            Event::Completed(completed) => {
                if let Some(usage) = &completed.usage {
                    // Stop tokens are in no delta.
                    self.output_tokens = usage.completion_tokens;
                    self.cached_prompt_tokens = usage.cached_prompt_tokens;
                }
            }
            _ => {}
        }
    }

    /// Returns the figures as a line. The speed is that after the first tokens.
    pub fn line(&self) -> String {
        let milliseconds = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
        let (first, speed) = match self.first {
            None => ("no token".to_owned(), String::new()),
            Some((at, tokens)) => {
                let elapsed = self.last.saturating_sub(at).as_secs_f64();
                let rest = f64::from(self.output_tokens.saturating_sub(tokens));
                let speed =
                    if elapsed > 0.0 { format!(" · {:.1} tokens/s", rest / elapsed) } else { String::new() };
                (format!("first token after {}", milliseconds(at)), speed)
            }
        };
        let prompt = self.prompt_tokens.map_or_else(|| "?".to_owned(), |tokens| tokens.to_string());
        format!(
            "{first}{speed} · {prompt} prompt tokens ({} cached) · {} output tokens · longest pause {}",
            self.cached_prompt_tokens,
            self.output_tokens,
            milliseconds(self.longest_pause)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_proto::v1::{GenerationCompleted, GenerationDelta, GenerationStarted, Usage};

    #[test]
    fn figures_are_those_of_the_events() {
        let at = Duration::from_millis;
        let delta = |tokens: usize| {
            Event::Delta(GenerationDelta { token_ids: vec![1; tokens], ..GenerationDelta::default() })
        };
        let mut stats = AnswerStats::default();
        assert!(stats.line().starts_with("no token · ? prompt tokens"), "{}", stats.line());
        stats.take(at(1), &Event::Started(GenerationStarted { prompt_tokens: 12, ..Default::default() }));
        for (time, tokens) in [(50, 1), (60, 2), (65, 0), (160, 3), (250, 5)] {
            stats.take(at(time), &delta(tokens));
        }
        // As far as an interrupted answer has come: 10 tokens in 200 ms after the first.
        assert_eq!(
            stats.line(),
            "first token after 50.0 ms · 50.0 tokens/s · 12 prompt tokens (0 cached) · 11 output tokens · longest pause 100.0 ms"
        );
        let usage = Usage { completion_tokens: 12, cached_prompt_tokens: 8, ..Usage::default() };
        stats.take(at(251), &Event::Completed(GenerationCompleted { usage: Some(usage), timings: None }));
        let line = stats.line();
        assert!(line.contains("(8 cached) · 12 output tokens"), "{line}");
    }
}
