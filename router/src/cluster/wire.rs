//! Conversions between the session's protobuf messages and the dispatcher's types.

pub(crate) mod fuzz;

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{FinishReason, Service, ServiceCounter};
use inflight_proto::v1;
use inflight_proto::v1::kv_event::Event;
use inflight_proto::v1::observed_change::Change;
use inflight_proto::v1::session_request::Message;
use inflight_router_core::{
    CacheChange, CacheEvents, CacheSnapshot, Credits, FailureBlame, Grant, IncarnationCounters,
    ResumedChoice, SequenceEnd, SequenceUpdate, Submission, SubmissionId, TenantCounter, Tier, WorkerCommand,
    WorkerLoad, WorkerUpdate,
};
use tonic::Code;

use crate::clock;
use crate::dispatcher::WorkerMessage;
use crate::dispatcher::request::ActiveRequest;
use crate::live::display_text::display_text;
use crate::live::observation::{
    JoinedSequence, Observation, ObservedChange, ObservedChangeKind, ObservedIteration, ObservedPreemption,
    ObservedState, ObservedWork, SequenceState,
};
use crate::live::view::{FactsView, FindingView, LimitsView, LoadView, State};

/// Longest text of a worker about itself, in bytes.
const FACT_BYTES_MAX: usize = 128;
/// Longest text of a finding, in bytes.
pub(super) const FINDING_BYTES_MAX: usize = 512;

/// Converts an update of a worker.
pub(crate) fn update(update: v1::Update) -> WorkerUpdate {
    WorkerUpdate {
        sequences: update.sequences.into_iter().map(sequence).collect(),
        grant: update.grant.map(|grant| Grant {
            credits: Credits { sequences: grant.sequences, blocks: grant.kv_blocks },
            priority_sequences: grant.priority_sequences,
        }),
        draining: update.draining,
        cost: update.cost.map(Into::into),
        load: update.load.map(|load| {
            let seconds = |micros: u64| micros as f64 / 1e6;
            let slowdown = f64::from(load.prefill_slowdown);
            WorkerLoad::new(seconds(load.prefill_backlog_us), slowdown, seconds(load.decode_iteration_us))
        }),
        submissions_received: update.submissions_received,
        cache_snapshot: update.kv_snapshot.map(|piece| CacheSnapshot {
            first: piece.is_first,
            device: piece.device_block_hashes,
            host: piece.host_block_hashes,
            next_event: piece.next_event,
        }),
        cache_events: update.kv_events.map(|events| CacheEvents {
            first: events.first_event,
            changes: events
                .events
                .into_iter()
                .map(|event| event.event.map_or(CacheChange::Unknown, cache_change))
                .collect(),
        }),
        services: update.services.into_iter().map(counter).collect(),
        service_tables: update
            .service_tables
            .into_iter()
            .map(|table| IncarnationCounters {
                incarnation: table.incarnation,
                tenants: table.tenants.into_iter().map(counter).collect(),
            })
            .collect(),
        router_count: update.router_count,
        virtual_time: Service::from_thousandths(update.virtual_time),
    }
}

fn sequence(update: v1::SequenceUpdate) -> SequenceUpdate {
    let finish = match v1::FinishReason::try_from(update.finish_reason) {
        Ok(reason) => reason.to_contract(),
        // Reason of a newer protocol version: the choice has ended for an unknown reason.
        Err(_) => Some(FinishReason::Error),
    };
    let end = finish.map(|reason| match reason {
        FinishReason::Error => SequenceEnd::Failed {
            blame: blame(Code::from_i32(update.error_code)),
            code: update.error_code,
            message: update.error,
        },
        FinishReason::Stop if update.grammar_complete => SequenceEnd::Finished(FinishReason::Complete),
        reason => SequenceEnd::Finished(reason),
    });
    SequenceUpdate {
        submission: SubmissionId(update.submission_id),
        attempt: update.attempt,
        choice: update.choice,
        tokens: update.token_ids,
        // Entries without a chosen token are dropped; the journal then reports the wrong number.
        logprobs: update.logprobs.into_iter().filter_map(v1::PositionLogprobs::to_contract).collect(),
        // Likewise, the others then do not add up.
        prompt_logprobs: update
            .prompt_logprobs
            .into_iter()
            .filter_map(v1::PromptTokenLogprobs::to_contract)
            .collect(),
        end,
        computed_tokens: update.computed_tokens,
    }
}

/// Returns a worker's load for the live view.
pub(crate) fn load_view(load: &v1::Load) -> LoadView {
    let v1::Load {
        running_sequences,
        waiting_sequences,
        kv_blocks_used,
        preemptions,
        mean_iteration_us,
        swapped_sequences,
        host_kv_blocks_used,
        predicted_ttft_us,
        prefill_backlog_us,
        prefill_slowdown,
        decode_iteration_us,
    } = *load;
    LoadView {
        running_sequences,
        waiting_sequences,
        kv_blocks_used,
        preemptions,
        mean_iteration_us,
        swapped_sequences,
        host_kv_blocks_used,
        predicted_ttft_us,
        prefill_backlog_us,
        // JSON has no other numbers.
        prefill_slowdown: if prefill_slowdown.is_finite() { prefill_slowdown } else { 0.0 },
        decode_iteration_us,
    }
}

/// Returns what a worker has reported to its observer. `is_own`: whether a sequence was submitted by this router.
pub(crate) fn observation(
    response: v1::ObserveResponse,
    is_own: impl Fn(&v1::ObservedSequence) -> bool,
) -> Observation {
    let joined = |sequence: v1::ObservedSequence| JoinedSequence {
        sequence: sequence.sequence,
        submission: is_own(&sequence).then_some(SubmissionId(sequence.submission_id)),
        attempt: sequence.attempt,
        choice: sequence.choice,
        tenant: sequence.tenant,
    };
    let work = |work: v1::ObservedWork| ObservedWork {
        sequence: work.sequence,
        slot: work.slot,
        prefill_tokens: work.prefill_tokens,
        drafted_tokens: work.drafted_tokens,
        generated_tokens: work.generated_tokens,
    };
    let iteration = |iteration: v1::ObservedIteration| ObservedIteration {
        number: iteration.iteration,
        duration_us: iteration.duration_us,
        predicted_us: iteration.predicted_us,
        target_us: iteration.target_us,
        work: iteration.work.into_iter().map(work).collect(),
        preempted: iteration.preempted_sequences,
        swapped: iteration.swapped_sequences,
        completed_us: iteration.completed_us,
    };
    let state = |state: v1::ObservedState| ObservedState {
        sequences: state.sequences.into_iter().map(sequence_state).collect(),
        kv_blocks_cached: state.kv_blocks_cached,
        blocked: (!state.blocked_by.is_empty()).then_some((state.blocked_sequence, state.blocked_by)),
    };
    Observation {
        joined: response.joined.into_iter().map(joined).collect(),
        iterations: response.iterations.into_iter().map(iteration).collect(),
        dropped_iterations: response.dropped_iterations,
        state: response.state.map(state),
        changes: response.changes.into_iter().filter_map(observed_change).collect(),
        now_us: response.now_us,
    }
}

/// Returns a change; `None` for a kind of a newer worker.
fn observed_change(change: v1::ObservedChange) -> Option<ObservedChange> {
    let v1::ObservedChange { sequence, iteration, at_us, change } = change;
    let kind = match change? {
        Change::Admitted(v1::SequenceAdmitted { slot, cached_tokens, resumed }) => {
            ObservedChangeKind::Admitted { slot, cached_tokens, resumed }
        }
        Change::Preempted(preempted) => ObservedChangeKind::Preempted(ObservedPreemption {
            swapped: preempted.swapped,
            kv_blocks: preempted.kv_blocks,
            bytes: preempted.bytes,
            tokens: preempted.tokens,
            recompute_us: preempted.recompute_us,
            swap_us: preempted.swap_us,
            could_swap: preempted.could_swap,
            beneficiary: preempted.beneficiary,
        }),
    };
    Some(ObservedChange { sequence, iteration, at_us, kind })
}

fn sequence_state(sequence: v1::SequenceState) -> SequenceState {
    let state = match sequence.phase() {
        v1::SequencePhase::Unspecified => State::Unspecified,
        v1::SequencePhase::Waiting => State::Waiting,
        v1::SequencePhase::Prefill => State::Prefill,
        v1::SequencePhase::Decode => State::Decode,
        v1::SequencePhase::Preempted => State::Preempted,
        v1::SequencePhase::Swapped => State::Swapped,
    };
    let v1::SequenceState { sequence, slot, kv_blocks, tokens, waiting_for, .. } = sequence;
    SequenceState { sequence, state, slot, kv_blocks, tokens, waiting_for }
}

/// Returns what a worker says of itself, as text that is harmless and short.
pub(crate) fn facts_view(facts: &v1::WorkerFacts) -> FactsView {
    let text = |text: &str| display_text(text, FACT_BYTES_MAX);
    FactsView {
        version: text(&facts.version),
        device: text(&facts.device),
        tensor_parallel: facts.tensor_parallel,
        memory_bytes: facts.memory_bytes,
        weight_bytes: facts.weight_bytes,
        kv_cache_bytes: facts.kv_cache_bytes,
        weight_encoding: text(&facts.weight_encoding),
        kv_encoding: text(&facts.kv_encoding),
    }
}

/// Returns a finding of a worker, as text that is harmless and short.
pub(super) fn finding_view(worker: &Arc<str>, finding: &v1::Finding) -> FindingView {
    let text = |text: &str| display_text(text, FINDING_BYTES_MAX);
    let share = finding.window_share;
    FindingView {
        worker: worker.clone(),
        other_workers: 0,
        bottleneck: display_text(&finding.bottleneck, FACT_BYTES_MAX),
        window_share: if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 },
        evidence: text(&finding.evidence),
        advice: text(&finding.advice),
    }
}

/// Returns a worker's limits for the live view.
pub(crate) fn limits_view(limits: &v1::WorkerLimits) -> LimitsView {
    LimitsView {
        vocab_size: limits.vocab_size,
        context_tokens: limits.context_tokens,
        block_tokens: limits.block_tokens,
        kv_blocks: limits.kv_blocks,
        max_sequences: limits.max_sequences,
        host_kv_blocks: limits.host_kv_blocks,
        // Workers of 0.2.0 do not report it; none of their models frees the blocks outside a sliding window.
        kv_tokens: match limits.kv_tokens {
            0 => limits.kv_blocks.saturating_mul(limits.block_tokens),
            tokens => tokens,
        },
    }
}

/// Returns whose fault an error of a worker is.
fn blame(code: Code) -> FailureBlame {
    match code {
        Code::Unavailable | Code::Aborted => FailureBlame::Returned,
        Code::DataLoss => FailureBlame::NonFinite,
        Code::Unknown | Code::Internal | Code::Unimplemented | Code::Ok => FailureBlame::Worker,
        _ => FailureBlame::Request,
    }
}

fn cache_change(event: Event) -> CacheChange {
    match event {
        Event::Stored(block) => CacheChange::Stored(Tier::Device, block),
        Event::Removed(block) => CacheChange::Removed(Tier::Device, block),
        Event::StoredOnHost(block) => CacheChange::Stored(Tier::Host, block),
        Event::RemovedFromHost(block) => CacheChange::Removed(Tier::Host, block),
        Event::Cleared(_) => CacheChange::Cleared,
    }
}

fn counter(counter: v1::TenantServiceCounter) -> TenantCounter {
    let charged = ServiceCounter { cost: counter.service, base: counter.baseline };
    TenantCounter { tenant: counter.tenant, charged }
}

/// Converts a command for a worker.
pub(crate) fn command(message: WorkerMessage) -> v1::SessionRequest {
    let WorkerMessage { command, request } = message;
    let message = match command {
        // Without the request, its client has gone, and the cancel of the submission follows.
        WorkerCommand::Submit(submission) => match &request {
            Some(active) => Message::Submit(submit(*submission, active)),
            None => Message::Cancel(v1::Cancel { submission_id: submission.id.0, choice: None }),
        },
        WorkerCommand::Cancel { submission, choice } => {
            Message::Cancel(v1::Cancel { submission_id: submission.0, choice })
        }
        WorkerCommand::Backlog { waiting } => Message::Backlog(v1::Backlog { has_waiting_requests: waiting }),
        WorkerCommand::ServiceTable(IncarnationCounters { incarnation, tenants }) => {
            let tenants = tenants.into_iter().map(|TenantCounter { tenant, charged }| {
                v1::TenantServiceCounter { tenant, service: charged.cost, baseline: charged.base }
            });
            Message::ServiceTable(v1::ServiceTable { incarnation, tenants: tenants.collect() })
        }
        WorkerCommand::ResyncPrefixCache => Message::ResyncPrefixCache(v1::ResyncPrefixCache {}),
    };
    v1::SessionRequest { message: Some(message) }
}

fn submit(submission: Submission, active: &ActiveRequest) -> v1::Submit {
    let (call, trace) = (&active.call, active.trace());
    let micros = |left: Duration| u64::try_from(left.as_micros()).unwrap_or(u64::MAX);
    let has_output = submission.resumed.iter().any(|resumed| !resumed.tokens.is_empty());
    let queued = clock::now().saturating_duration_since(call.arrived);
    let resumed = submission.resumed.into_iter().map(|ResumedChoice { choice, tokens, finished }| {
        v1::ResumedChoice { choice, token_ids: tokens, finished }
    });
    v1::Submit {
        submission_id: submission.id.0,
        attempt: submission.attempt,
        request_id: call.request_id.clone(),
        prompt_token_ids: call.prompt.clone(),
        resumed: resumed.collect(),
        prompt_logprobs_received: submission.prompt_logprobs_received,
        sampling: Some(v1::SamplingParams::from(&*call.sampling)),
        stop: Some(v1::StopConditions::from_spec(&call.sampling, call.max_tokens)),
        tenant: call.tenant.clone(),
        weight: call.weight.get() as f32,
        priority: call.priority.get(),
        deadline_us: submission.deadline.map(micros),
        queued_us: (!has_output).then(|| micros(queued)),
        traceparent: trace.traceparent,
        tracestate: trace.tracestate,
        virtual_start_time: submission.virtual_start_time.map(Service::thousandths),
        min_waiting_virtual_time: submission.min_waiting_virtual_time.map(Service::thousandths),
    }
}
