//! The `inflight.v1.Admin` service: views of the live view as protobuf messages.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, stream};
use inflight_net::Peer;
use inflight_proto::v1;
use inflight_proto::v1::admin_server::Admin;
use prost::Message as _;
use tonic::{Extensions, Request, Response, Status};

use crate::clock;
use crate::live::view;
use crate::outcome::Outcome;
use crate::protocols::diagnosis::QUEUE_OBJECTIVE;
use crate::protocols::operations::Operations;
use crate::tenants::Caller;

/// Requests listed without a limit, and at most.
const LIMIT_DEFAULT: u32 = 1000;
const LIMIT_MAX: u32 = 10_000;
/// Updates a second, at most.
const RATE_MAX: u32 = 10;

/// Service for operators.
pub(crate) struct AdminService(pub(crate) Operations);

fn authorize(extensions: &Extensions) -> Result<(), Status> {
    Operations::authorize(extensions.get::<Caller>()).map_err(Outcome::into_status)
}

#[tonic::async_trait]
impl Admin for AdminService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WatchResponse, Status>> + Send>>;

    async fn list_requests(
        &self,
        request: Request<v1::ListRequestsRequest>,
    ) -> Result<Response<v1::ListRequestsResponse>, Status> {
        authorize(request.extensions())?;
        let v1::ListRequestsRequest { tenant, include_ended, limit } = request.into_inner();
        if limit > LIMIT_MAX {
            let reason = format!("limit is {limit}; it must be at most {LIMIT_MAX}");
            return Err(Outcome::field("limit", reason).into_status());
        }
        let limit = if limit == 0 { LIMIT_DEFAULT } else { limit } as usize;
        let (requests, omitted) = self.0.hub.list(&tenant, include_ended, limit, clock::now());
        let requests = requests.into_iter().map(request_message).collect();
        Ok(Response::new(v1::ListRequestsResponse { requests, omitted }))
    }

    async fn get_request(
        &self,
        request: Request<v1::GetRequestRequest>,
    ) -> Result<Response<v1::GetRequestResponse>, Status> {
        authorize(request.extensions())?;
        let v1::GetRequestRequest { number, request_id } = request.into_inner();
        if number == 0 && request_id.is_empty() {
            return Err(Outcome::field("number", "neither number nor request_id is given").into_status());
        }
        let life = self.0.hub.life(number, &request_id, clock::now());
        let life = life.ok_or_else(|| {
            Status::not_found("no such request is open or among the last that ended at this router")
        })?;
        let event = |event: view::LifeEventView| v1::LifeEvent {
            at_ms: event.at_ms,
            kind: event.kind.to_owned(),
            worker: text(&event.worker),
            detail: event.detail,
            iteration: event.iteration,
            at_us: event.at_us,
        };
        Ok(Response::new(v1::GetRequestResponse {
            request: Some(request_message(life.request)),
            events: life.events.into_iter().map(event).collect(),
            omitted_events: life.omitted_events,
            age_us: life.age_us,
            trace_id: life.trace_id,
            trace_url: life.trace_url,
        }))
    }

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        authorize(request.extensions())?;
        let caller = request.extensions().get::<Caller>().cloned();
        let peer = request.extensions().get::<Peer>().cloned();
        let v1::WatchRequest { updates_per_second, omit_iterations } = request.into_inner();
        if updates_per_second > RATE_MAX {
            let reason = format!("updates_per_second is {updates_per_second}; it must be at most {RATE_MAX}");
            return Err(Outcome::field("updates_per_second", reason).into_status());
        }
        let watching =
            self.0.watch(caller.as_ref(), peer.as_ref(), updates_per_second, !omit_iterations, "grpc");
        let watching = watching.map_err(Outcome::into_status)?;
        let updates = stream::unfold(Some(watching), |watching| async move {
            let mut watching = watching?;
            match watching.next().await {
                Ok(update) => {
                    let update = update_message(update);
                    watching.sent(update.encoded_len());
                    Some((Ok(update), Some(watching)))
                }
                Err(outcome) => Some((Err(outcome.into_status()), None)),
            }
        });
        Ok(Response::new(Box::pin(updates)))
    }

    async fn diagnose_cluster(
        &self,
        request: Request<v1::DiagnoseClusterRequest>,
    ) -> Result<Response<v1::DiagnoseClusterResponse>, Status> {
        authorize(request.extensions())?;
        let worker = request.into_inner().worker.unwrap_or_default();
        let workers = self.0.calls.diagnose(worker).await;
        let objective = match worker.queue_objective_us {
            0 => QUEUE_OBJECTIVE,
            given => Duration::from_micros(given),
        };
        let findings = self.0.hub.findings(clock::now(), objective).into_iter().map(|finding| v1::Finding {
            bottleneck: finding.bottleneck.to_owned(),
            window_share: finding.window_share,
            evidence: finding.evidence,
            advice: finding.advice.to_owned(),
        });
        Ok(Response::new(v1::DiagnoseClusterResponse { workers, findings: findings.collect() }))
    }
}

fn text(text: &Arc<str>) -> String {
    (**text).to_owned()
}

fn state(state: view::State) -> i32 {
    let state = match state {
        view::State::Unspecified => v1::RequestState::Unspecified,
        view::State::Queued => v1::RequestState::Queued,
        view::State::Waiting => v1::RequestState::Waiting,
        view::State::Prefill => v1::RequestState::Prefill,
        view::State::Decode => v1::RequestState::Decode,
        view::State::Preempted => v1::RequestState::Preempted,
        view::State::Swapped => v1::RequestState::Swapped,
        view::State::Retry => v1::RequestState::Retry,
        view::State::Quarantined => v1::RequestState::Quarantined,
        view::State::Paused => v1::RequestState::Paused,
        view::State::Ended => v1::RequestState::Ended,
    };
    state.into()
}

fn request_message(request: view::RequestView) -> v1::RequestView {
    v1::RequestView {
        number: request.number,
        request_id: text(&request.request_id),
        tenant: text(&request.tenant),
        model: text(&request.model),
        priority: request.priority,
        state: state(request.state),
        age_ms: request.age_ms,
        prompt_tokens: request.prompt_tokens,
        cached_tokens: request.cached_tokens,
        computed_tokens: request.computed_tokens,
        output_tokens: request.output_tokens,
        max_tokens: request.max_tokens,
        choices: request.choices,
        kv_blocks: request.kv_blocks,
        worker: text(&request.worker),
        attempts: request.attempts,
        waiting_reason: text(&request.waiting_reason),
        outcome: text(&request.outcome),
    }
}

fn update_message(update: view::WatchUpdate) -> v1::WatchResponse {
    v1::WatchResponse {
        number: update.number,
        unix_ms: update.unix_ms,
        cluster: Some(cluster_message(update.cluster)),
        workers: update.workers.into_iter().map(worker_message).collect(),
        tenants: update.tenants.into_iter().map(tenant_message).collect(),
        requests: update.requests.into_iter().map(request_message).collect(),
        skipped_updates: update.skipped_updates,
        diagnosis: update.diagnosis.as_deref().map(diagnosis_message),
    }
}

fn diagnosis_message(diagnosis: &view::DiagnosisView) -> v1::ClusterDiagnosis {
    let finding = |finding: &view::FindingView| v1::ClusterFinding {
        worker: text(&finding.worker),
        other_workers: finding.other_workers,
        bottleneck: text(&finding.bottleneck),
        window_share: finding.window_share,
        evidence: text(&finding.evidence),
        advice: text(&finding.advice),
    };
    v1::ClusterDiagnosis {
        findings: diagnosis.findings.iter().map(finding).collect(),
        undiagnosed_workers: diagnosis.undiagnosed_workers,
        omitted_findings: diagnosis.omitted_findings,
    }
}

fn percentiles(of: view::Percentiles) -> Option<v1::Percentiles> {
    let view::Percentiles { p50, p90, p99 } = of;
    Some(v1::Percentiles { p50, p90, p99 })
}

fn cluster_message(cluster: view::ClusterView) -> v1::ClusterView {
    v1::ClusterView {
        router: text(&cluster.router),
        version: cluster.version.to_owned(),
        routers: cluster.routers,
        open_requests: cluster.open_requests,
        queued_requests: cluster.queued_requests,
        in_flight_requests: cluster.in_flight_requests,
        retrying_requests: cluster.retrying_requests,
        output_tokens_per_second: cluster.output_tokens_per_second,
        prompt_tokens_per_second: cluster.prompt_tokens_per_second,
        ended_per_second: cluster.ended_per_second,
        first_token_ms: percentiles(cluster.first_token_ms),
        gap_ms: percentiles(cluster.gap_ms),
        queue_ms: percentiles(cluster.queue_ms),
        viewers: cluster.viewers,
        models: cluster.models,
        can_kill_workers: cluster.can_kill_workers,
    }
}

fn tenant_message(tenant: view::TenantView) -> v1::TenantView {
    v1::TenantView {
        tenant: text(&tenant.tenant),
        weight: tenant.weight,
        service_per_second: tenant.service_per_second,
        share: tenant.share,
        fair_share: tenant.fair_share,
        queued_requests: tenant.queued_requests,
        in_flight_requests: tenant.in_flight_requests,
        kv_blocks: tenant.kv_blocks,
    }
}

fn worker_message(worker: view::WorkerView) -> v1::WorkerView {
    let blocks = |of: view::TenantBlocks| v1::TenantBlocks { tenant: text(&of.tenant), blocks: of.blocks };
    v1::WorkerView {
        name: text(&worker.name),
        address: text(&worker.address),
        model: text(&worker.model),
        state: worker.state.map_or_else(String::new, |state| state.name().to_owned()),
        limits: Some(limits_message(&worker.limits)),
        load: Some(load_message(&worker.load)),
        kv_blocks_cached: worker.kv_blocks_cached,
        step_target_us: worker.step_target_us,
        requests: worker.requests,
        slots: worker.slots.into_iter().map(slot_message).collect(),
        iterations: worker.iterations.iter().map(|iteration| iteration_message(iteration)).collect(),
        skipped_iterations: worker.skipped_iterations,
        kv_by_tenant: worker.kv_by_tenant.into_iter().map(blocks).collect(),
        up_number: worker.up_number,
        facts: facts_message(&worker.facts),
    }
}

/// Returns what a worker said of itself; `None` of one that said nothing.
fn facts_message(facts: &view::FactsView) -> Option<v1::WorkerFacts> {
    let said = *facts != view::FactsView::default();
    said.then(|| v1::WorkerFacts {
        version: text(&facts.version),
        device: text(&facts.device),
        tensor_parallel: facts.tensor_parallel,
        memory_bytes: facts.memory_bytes,
        weight_bytes: facts.weight_bytes,
        kv_cache_bytes: facts.kv_cache_bytes,
        weight_encoding: text(&facts.weight_encoding),
        kv_encoding: text(&facts.kv_encoding),
    })
}

fn limits_message(limits: &view::LimitsView) -> v1::WorkerLimits {
    v1::WorkerLimits {
        vocab_size: limits.vocab_size,
        context_tokens: limits.context_tokens,
        block_tokens: limits.block_tokens,
        kv_blocks: limits.kv_blocks,
        max_sequences: limits.max_sequences,
        host_kv_blocks: limits.host_kv_blocks,
        kv_tokens: limits.kv_tokens,
    }
}

fn load_message(load: &view::LoadView) -> v1::Load {
    v1::Load {
        running_sequences: load.running_sequences,
        waiting_sequences: load.waiting_sequences,
        kv_blocks_used: load.kv_blocks_used,
        preemptions: load.preemptions,
        mean_iteration_us: load.mean_iteration_us,
        swapped_sequences: load.swapped_sequences,
        host_kv_blocks_used: load.host_kv_blocks_used,
        predicted_ttft_us: load.predicted_ttft_us,
        prefill_backlog_us: load.prefill_backlog_us,
        prefill_slowdown: load.prefill_slowdown,
        decode_iteration_us: load.decode_iteration_us,
    }
}

fn slot_message(slot: view::SlotView) -> v1::SlotView {
    v1::SlotView {
        slot: slot.slot,
        request: slot.request,
        tenant: text(&slot.tenant),
        choice: slot.choice,
        state: state(slot.state),
        kv_blocks: slot.kv_blocks,
        tokens: slot.tokens,
    }
}

fn iteration_message(iteration: &view::IterationView) -> v1::IterationView {
    let work = |work: &view::SlotWork| v1::SlotWork {
        slot: work.slot,
        request: work.request,
        prefill_tokens: work.prefill_tokens,
        drafted_tokens: work.drafted_tokens,
        generated_tokens: work.generated_tokens,
        tenant: text(&work.tenant),
    };
    v1::IterationView {
        number: iteration.number,
        duration_us: iteration.duration_us,
        predicted_us: iteration.predicted_us,
        target_us: iteration.target_us,
        work: iteration.work.iter().map(work).collect(),
        preempted: iteration.preempted,
        swapped: iteration.swapped,
    }
}
