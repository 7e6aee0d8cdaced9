//! Output of `inflight generate`: streamed text, or events as JSON lines.

use std::io::{self, Write};

use inflight_proto::v1::{
    ChoiceFinished, FinishReason, GenerateResponse, GenerationCompleted, PositionLogprobs,
    PromptTokenLogprobs, TokenLogprob, generate_response::Event,
};
use serde_json::{Value, json};

/// Output format of the events of one Generate call.
pub trait Transcript {
    /// Writes an event.
    ///
    /// # Errors
    /// The output cannot be written, such as a closed pipe.
    fn show(&mut self, response: &GenerateResponse) -> io::Result<()>;
}

/// Transcript with one JSON object per event and line.
pub struct JsonTranscript<W>(pub W);

impl<W: Write> Transcript for JsonTranscript<W> {
    fn show(&mut self, response: &GenerateResponse) -> io::Result<()> {
        let Some(event) = &response.event else { return Ok(()) };
        let value = match event {
            Event::Started(started) => json!({
                "event": "started", "request_id": started.request_id, "model": started.model,
                "prompt_tokens": started.prompt_tokens, "seed": started.seed,
                "fingerprint": started.fingerprint,
            }),
            Event::FingerprintChanged(changed) => json!({
                "event": "fingerprint_changed", "fingerprint": changed.fingerprint, "tokens": changed.tokens,
            }),
            Event::PromptLogprobs(prompt) => json!({
                "event": "prompt_logprobs", "first_position": prompt.first_position,
                "positions": prompt.positions.iter().map(prompt_json).collect::<Vec<_>>(),
            }),
            Event::Delta(delta) => {
                let mut value = json!({ "event": "delta", "choice": delta.choice, "text": delta.text });
                if !delta.token_ids.is_empty() {
                    value["token_ids"] = json!(delta.token_ids);
                }
                if !delta.logprobs.is_empty() {
                    value["logprobs"] = delta.logprobs.iter().map(logprobs_json).collect();
                }
                value
            }
            Event::Finished(finished) => {
                let mut value = json!({ "event": "finished", "choice": finished.choice, "reason": finish_reason(finished) });
                if !finished.stop_string.is_empty() {
                    value["stop"] = json!(finished.stop_string);
                }
                if let Some(id) = finished.stop_token_id {
                    value["stop_token_id"] = json!(id);
                }
                value
            }
            Event::Completed(completed) => {
                let usage = completed.usage.clone().unwrap_or_default();
                let timings = completed.timings.unwrap_or_default();
                json!({
                    "event": "completed",
                    "usage": {
                        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
                        "cached_prompt_tokens": usage.cached_prompt_tokens, "fingerprint": usage.fingerprint,
                    },
                    "timings": {
                        "queue_seconds": timings.queue_seconds,
                        "time_to_first_token_seconds": timings.time_to_first_token_seconds,
                        "time_per_output_token_seconds": timings.time_per_output_token_seconds,
                        "total_seconds": timings.total_seconds,
                    },
                })
            }
        };
        writeln!(self.0, "{value}")?;
        self.0.flush()
    }
}

fn prompt_json(position: &PromptTokenLogprobs) -> Value {
    let token = |token: &TokenLogprob| json!({ "token_id": token.token_id, "logprob": token.logprob });
    json!({
        "token": position.token.as_ref().map(token), "rank": position.rank,
        "top": position.top.iter().map(token).collect::<Vec<_>>(),
    })
}

fn logprobs_json(position: &PositionLogprobs) -> Value {
    let token = |token: &TokenLogprob| json!({ "token_id": token.token_id, "logprob": token.logprob });
    json!({
        "chosen": position.chosen.as_ref().map(token),
        "top": position.top.iter().map(token).collect::<Vec<_>>(),
    })
}

fn finish_reason(finished: &ChoiceFinished) -> &'static str {
    match finished.reason() {
        FinishReason::Unspecified => "unspecified",
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Deadline => "deadline",
        FinishReason::Error => "error",
    }
}

/// Transcript with text on one output, usage and timings on another. Of several choices, the lowest
/// unfinished one is streamed; the others are buffered and follow, each under a heading.
pub struct TextTranscript<O, N> {
    output: O,
    notes: N,
    choices: Vec<ChoiceBuffer>,
    /// Index of the choice being streamed.
    current: usize,
}

#[derive(Default, Clone)]
struct ChoiceBuffer {
    buffered: String,
    logprobs: Vec<String>,
    ended: Option<&'static str>,
}

impl<O: Write, N: Write> TextTranscript<O, N> {
    /// Creates a transcript of `n` choices.
    pub fn new(output: O, notes: N, n: usize) -> Self {
        Self { output, notes, choices: vec![ChoiceBuffer::default(); n.max(1)], current: 0 }
    }

    fn advance(&mut self) -> io::Result<()> {
        let several = self.choices.len() > 1;
        while let Some(choice) = self.choices.get_mut(self.current) {
            self.output.write_all(choice.buffered.as_bytes())?;
            choice.buffered.clear();
            let Some(reason) = choice.ended else { break };
            writeln!(self.output)?;
            self.output.flush()?;
            for line in choice.logprobs.drain(..) {
                writeln!(self.notes, "{line}")?;
            }
            if several {
                writeln!(self.notes, "[choice {} ended: {reason}]", self.current)?;
            }
            self.current += 1;
            if self.current < self.choices.len() {
                self.heading()?;
            }
        }
        self.output.flush()
    }

    fn heading(&mut self) -> io::Result<()> {
        if self.choices.len() > 1 {
            writeln!(self.output, "── choice {} ──", self.current)?;
        }
        Ok(())
    }

    fn complete(&mut self, completed: &GenerationCompleted) -> io::Result<()> {
        let usage = completed.usage.clone().unwrap_or_default();
        let timings = completed.timings.unwrap_or_default();
        let speed = if timings.total_seconds > 0.0 {
            f64::from(usage.completion_tokens) / timings.total_seconds
        } else {
            0.0
        };
        let ended = match self.choices.as_slice() {
            [only] => format!(" ({})", only.ended.unwrap_or("unspecified")),
            _ => String::new(),
        };
        writeln!(
            self.notes,
            "\n{} prompt + {} output tokens{ended} · first token after {:.1} ms · {:.2} ms a token · {speed:.1} tokens/s",
            usage.prompt_tokens,
            usage.completion_tokens,
            timings.time_to_first_token_seconds * 1e3,
            timings.time_per_output_token_seconds * 1e3,
        )
    }
}

impl<O: Write, N: Write> Transcript for TextTranscript<O, N> {
    fn show(&mut self, response: &GenerateResponse) -> io::Result<()> {
        match &response.event {
            Some(Event::Started(_)) => self.heading(),
            Some(Event::PromptLogprobs(prompt)) => {
                let mut lines = (prompt.first_position..).zip(&prompt.positions);
                lines.try_for_each(|(at, position)| writeln!(self.notes, "{}", prompt_line(at, position)))
            }
            Some(Event::Delta(delta)) => {
                let Some(choice) = self.choices.get_mut(delta.choice as usize) else { return Ok(()) };
                choice.buffered.push_str(&delta.text);
                choice
                    .logprobs
                    .extend(delta.logprobs.iter().map(|position| logprob_line(delta.choice, position)));
                self.advance()
            }
            Some(Event::Finished(finished)) => {
                let Some(choice) = self.choices.get_mut(finished.choice as usize) else { return Ok(()) };
                choice.ended = Some(finish_reason(finished));
                self.advance()
            }
            Some(Event::Completed(completed)) => self.complete(completed),
            Some(Event::FingerprintChanged(changed)) => writeln!(
                self.notes,
                "note: the worker was lost, and another continues whose numerics differ (fingerprint {})",
                changed.fingerprint
            ),
            None => Ok(()),
        }
    }
}

fn prompt_line(at: u32, position: &PromptTokenLogprobs) -> String {
    let pair = |token: &TokenLogprob| format!("{}:{:.4}", token.token_id, token.logprob);
    let token = position.token.as_ref().map(pair).unwrap_or_default();
    let top: Vec<String> = position.top.iter().map(pair).collect();
    format!("logprob prompt={at} token={token} rank={} top={}", position.rank, top.join(" "))
}

fn logprob_line(choice: u32, position: &PositionLogprobs) -> String {
    let pair = |token: &TokenLogprob| format!("{}:{:.4}", token.token_id, token.logprob);
    let chosen = position.chosen.as_ref().map(pair).unwrap_or_default();
    let top: Vec<String> = position.top.iter().map(pair).collect();
    format!("logprob choice={choice} chosen={chosen} top={}", top.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_proto::v1::{GenerationDelta, GenerationStarted, Usage};

    fn delta(choice: u32, text: &str) -> GenerateResponse {
        let delta = GenerationDelta { choice, text: text.to_owned(), ..GenerationDelta::default() };
        GenerateResponse { event: Some(Event::Delta(delta)) }
    }

    fn finished(choice: u32) -> GenerateResponse {
        let reason = FinishReason::Stop.into();
        GenerateResponse {
            event: Some(Event::Finished(ChoiceFinished { choice, reason, ..Default::default() })),
        }
    }

    #[test]
    fn interleaved_choices_are_shown_one_after_the_other() {
        let (mut output, mut notes) = (Vec::new(), Vec::new());
        let mut text = TextTranscript::new(&mut output, &mut notes, 2);
        text.show(&GenerateResponse { event: Some(Event::Started(GenerationStarted::default())) }).unwrap();
        for response in
            [delta(1, "b1"), delta(0, "a1"), delta(1, "b2"), finished(1), delta(0, "a2"), finished(0)]
        {
            text.show(&response).unwrap();
        }
        let usage = Some(Usage { prompt_tokens: 3, completion_tokens: 4, ..Usage::default() });
        let completed = GenerationCompleted { usage, timings: None };
        text.show(&GenerateResponse { event: Some(Event::Completed(completed)) }).unwrap();
        assert_eq!(String::from_utf8(output).unwrap(), "── choice 0 ──\na1a2\n── choice 1 ──\nb1b2\n");
        assert!(String::from_utf8(notes).unwrap().contains("3 prompt + 4 output tokens"));
    }

    #[test]
    fn json_lines_omit_empty_fields() {
        let mut output = Vec::new();
        JsonTranscript(&mut output).show(&delta(0, "a\nb")).unwrap();
        assert_eq!(
            String::from_utf8(output).unwrap(),
            "{\"event\":\"delta\",\"choice\":0,\"text\":\"a\\nb\"}\n"
        );
    }
}
