//! Text of the followed request: what it is now, and its life.

use std::time::Duration;

use inflight_proto::v1::{LifeEvent, RequestView};

use super::model::Follow;
use super::state::{ClusterState, state_name};
use super::tables::Tone;
use super::text::{pad, span, width, wrap};

/// Columns of the time of an event.
const TIME_WIDTH: usize = 10;
/// Columns of the kind of an event: the longest is `choice_ended`.
const KIND_WIDTH: usize = 13;
/// Width below which the details of an event begin a line of their own.
const WIDE: usize = 60;

/// Text of a followed request, in lines.
#[derive(Debug, Default)]
pub struct LifeText {
    /// Lines about the request itself.
    pub head: Vec<(String, Tone)>,
    /// Lines about the request's events.
    pub events: Vec<(String, Tone)>,
}

/// Returns the text of a followed request in lines of at most `columns`.
pub fn text(follow: &Follow, state: &ClusterState, columns: usize) -> LifeText {
    let columns = columns.max(1);
    let mut text = LifeText::default();
    let listed = state.requests.get(&follow.number);
    let life = follow.life.as_ref();
    let view = life.and_then(|life| life.request.as_ref()).or(listed.map(|request| &request.view));
    let mut head = |line: String, tone: Tone| {
        text.head.extend(wrap(&line, columns).into_iter().map(|line| (line, tone)));
    };
    match view {
        Some(view) => {
            head(format!("request {} · number {}", view.request_id, view.number), Tone::Plain);
            let age = listed.map_or(Duration::from_millis(view.age_ms), |request| state.age(request));
            head(standing(view, age), Tone::Plain);
            head(work(view), Tone::Dim);
        }
        None => head(format!("request number {}", follow.number), Tone::Plain),
    }
    for trace in life.iter().flat_map(|life| [&life.trace_id, &life.trace_url]) {
        if !trace.is_empty() {
            head(format!("trace {trace}"), Tone::Dim);
        }
    }
    if let Some(error) = &follow.error {
        head(error.clone(), Tone::Bad);
    }
    match life {
        None if follow.error.is_none() => head("reading its life …".to_owned(), Tone::Dim),
        Some(life) if life.omitted_events > 0 => {
            head(
                format!("{} events between the first and the last ones are left out", life.omitted_events),
                Tone::Dim,
            );
        }
        _ => {}
    }
    for event in life.into_iter().flat_map(|life| &life.events) {
        add_event(event, columns, &mut text.events);
    }
    text
}

/// State, age, worker.
fn standing(view: &RequestView, age: Duration) -> String {
    let mut text = format!("{} · {}", state_name(view.state()), span(age));
    let mut add = |name: &str, value: &str| {
        if !value.is_empty() {
            text.push_str(&format!(" · {name}{value}"));
        }
    };
    add("", &view.outcome);
    add("waits for ", &view.waiting_reason);
    add("at ", &view.worker);
    add("tenant ", &view.tenant);
    add("model ", &view.model);
    text
}

/// Tokens, blocks, attempts.
fn work(view: &RequestView) -> String {
    let RequestView {
        prompt_tokens,
        cached_tokens,
        computed_tokens,
        output_tokens,
        max_tokens,
        choices,
        kv_blocks,
        attempts,
        priority,
        ..
    } = view;
    let mut text = format!("prompt {prompt_tokens} tokens, {cached_tokens} cached");
    if *computed_tokens > 0 {
        text.push_str(&format!(", {computed_tokens} computed"));
    }
    text.push_str(&format!(
        " · output {output_tokens} of at most {max_tokens} · choices {choices} · KV blocks {kv_blocks} · attempts {attempts} · \
         priority {priority}"
    ));
    text
}

fn add_event(event: &LifeEvent, columns: usize, lines: &mut Vec<(String, Tone)>) {
    let LifeEvent { at_ms, at_us, kind, worker, detail, .. } = event;
    // Of an older router, milliseconds only are known.
    let at_us = (*at_us).max(at_ms.saturating_mul(1000));
    let time = match at_us {
        ..1_000_000 => format!("{}.{:03} ms", at_us / 1000, at_us % 1000),
        _ => format!("{}.{:03} s", at_us / 1_000_000, at_us / 1000 % 1000),
    };
    let tone = match kind.as_str() {
        "lost" | "retry" | "quarantined" | "paused" => Tone::Bad,
        "preempted" | "swapped" | "queued" => Tone::Wait,
        "chunk" => Tone::Prefill,
        "first_token" | "continued" | "resumed" => Tone::Decode,
        _ => Tone::Plain,
    };
    let begin = format!("{} {}", pad(&time, TIME_WIDTH, true), pad(kind, KIND_WIDTH, false));
    let detail = match (worker.is_empty(), detail.is_empty()) {
        (true, _) => detail.clone(),
        (false, true) => worker.clone(),
        (false, false) => format!("{worker}: {detail}"),
    };
    let indent = if columns >= WIDE { width(&begin) + 1 } else { 2 };
    let mut rest = wrap(&detail, columns.saturating_sub(indent)).into_iter();
    if columns >= WIDE {
        let first = rest.next().unwrap_or_default();
        lines.push((format!("{begin} {first}").trim_end().to_owned(), tone));
    } else {
        lines.push((begin.trim_end().to_owned(), tone));
    }
    let further = rest.filter(|line| !line.is_empty());
    lines.extend(further.map(|line| (format!("{:indent$}{line}", ""), Tone::Dim)));
}
