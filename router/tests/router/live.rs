//! The live view: requests followed through their lives, iterations joined with them, viewers and their limits.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use inflight_proto::v1;
use inflight_proto::v1::RequestState::{Decode, Ended, Preempted, Prefill, Queued, Waiting};
use inflight_proto::v1::admin_client::AdminClient;
use inflight_router::{Admin, HttpOptions, Options};
use serde_json::Value;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::cluster::{Cluster, bounded, queue_of, text, tokens};
use crate::http_client::{Call, HttpCluster, parse_events, with_http};
use inflight_scripted::{ScriptedObservation, ScriptedWorker, WorkerProfile};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;

fn on() -> Options {
    Options { admin: Admin::On, ..Options::default() }
}

pub fn operator(cluster: &Cluster) -> AdminClient<Channel> {
    AdminClient::new(cluster.channel.clone())
}

fn request(id: &str) -> v1::GenerateRequest {
    v1::GenerateRequest { request_id: id.to_owned(), ..text("abc") }
}

/// Viewer that merges the updates, as `top` and the page do.
pub struct Viewer {
    stream: Streaming<v1::WatchResponse>,
    requests: BTreeMap<u64, v1::RequestView>,
    iterations: Vec<v1::IterationView>,
    skipped_iterations: u64,
    pub last: v1::WatchResponse,
}

impl Viewer {
    pub async fn enter(cluster: &Cluster, omit_iterations: bool) -> Result<Self, Status> {
        let watch = v1::WatchRequest { updates_per_second: 10, omit_iterations };
        let stream = operator(cluster).watch(watch).await?.into_inner();
        let (requests, iterations, last) = Default::default();
        Ok(Self { stream, requests, iterations, skipped_iterations: 0, last })
    }

    pub async fn advance(&mut self) {
        let update = self.stream.message().await.unwrap().expect("a watch has no end");
        assert_eq!(update.number, self.last.number + 1);
        for request in &update.requests {
            self.requests.insert(request.number, request.clone());
        }
        for worker in &update.workers {
            self.iterations.extend(worker.iterations.iter().cloned());
            self.skipped_iterations += worker.skipped_iterations;
        }
        self.last = update;
    }

    pub async fn until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        let since = Instant::now();
        while !holds(self) {
            assert!(since.elapsed() < Duration::from_secs(20), "{what}: {:?} {:?}", self.requests, self.last);
            self.advance().await;
        }
    }

    fn named(&self, id: &str) -> Option<&v1::RequestView> {
        self.requests.values().find(|request| request.request_id == id)
    }

    /// Waits until a request is in a state, and returns it.
    async fn state(&mut self, id: &str, state: v1::RequestState) -> v1::RequestView {
        self.until(&format!("{id} {state:?}"), |viewer| {
            viewer.named(id).is_some_and(|request| request.state() == state)
        })
        .await;
        self.named(id).unwrap().clone()
    }

    pub fn worker(&self, name: &str) -> &v1::WorkerView {
        self.last.workers.iter().find(|worker| worker.name == name).unwrap()
    }
}

async fn life(cluster: &Cluster, id: &str) -> v1::GetRequestResponse {
    let get = v1::GetRequestRequest { number: 0, request_id: id.to_owned() };
    operator(cluster).get_request(get).await.unwrap().into_inner()
}

fn kinds(life: &v1::GetRequestResponse) -> Vec<&str> {
    life.events.iter().map(|event| event.kind.as_str()).collect()
}

#[tokio::test]
async fn a_request_is_followed_through_a_failover_to_its_end() {
    bounded(async {
        let named = |worker_id| WorkerProfile { worker_id, ..WorkerProfile::default() };
        let mut workers = [ScriptedWorker::start(named("a")).await, ScriptedWorker::start(named("b")).await];
        let mut cluster = Cluster::start(&[&workers[0], &workers[1]], on()).await;
        let (mut first, mut second) = (workers[0].session().await, workers[1].session().await);
        cluster.handle.ready().await;
        let mut viewer = Viewer::enter(&cluster, true).await.unwrap();
        let mut stream = cluster.generate(request("moved")).await.unwrap();
        let queued = viewer.state("moved", Queued).await;
        assert_eq!((queued.waiting_reason.as_str(), queued.worker.as_str()), ("no worker has room", ""));
        first.grant(64, 1000);
        let submit = first.submit().await;
        let waiting = viewer.state("moved", Waiting).await;
        assert_eq!((waiting.worker.as_str(), waiting.attempts, waiting.output_tokens), ("a", 1, 0));
        let output = tokens("ab");
        first.tokens(&submit, 0, &output);
        stream.until_text("ab").await;
        let decode = viewer.state("moved", Decode).await;
        assert_eq!((decode.output_tokens, decode.number), (output.len() as u32, queued.number));
        first.break_stream();
        viewer.state("moved", Queued).await;
        second.grant(64, 1000);
        let again = second.submit().await;
        second.finish(&again, 0, &tokens("c"), LENGTH);
        stream.read_to_end().await.unwrap();
        let ended = viewer.state("moved", Ended).await;
        assert_eq!((ended.number, ended.attempts), (queued.number, 2), "it stays the same request");
        assert_eq!((ended.worker.as_str(), ended.outcome.as_str()), ("b", "length"));

        let life = life(&cluster, "moved").await;
        let expected = [
            "arrived",
            "queued",
            "dispatched",
            "first_token",
            "lost",
            "queued",
            "dispatched",
            "resumed",
            "choice_ended",
            "ended",
        ];
        assert_eq!(kinds(&life), expected);
        assert!(life.events.is_sorted_by_key(|event| event.at_ms));
        let workers: Vec<_> = life.events.iter().map(|event| event.worker.as_str()).collect();
        assert_eq!(workers[2..7], ["a", "a", "a", "", "b"]);
        assert!(life.events[2].detail.starts_with("policy cost; 0 of 4 tokens"), "{:?}", life.events[2]);
        let listed = v1::ListRequestsRequest::default();
        assert!(
            operator(&cluster).list_requests(listed.clone()).await.unwrap().into_inner().requests.is_empty()
        );
        let listed = v1::ListRequestsRequest { include_ended: true, ..listed };
        let listed = operator(&cluster).list_requests(listed).await.unwrap().into_inner();
        assert_eq!(listed.requests.iter().map(|request| request.number).collect::<Vec<_>>(), [ended.number]);
        // One that its client leaves.
        drop(cluster.generate(request("left")).await.unwrap());
        assert_eq!(viewer.state("left", Ended).await.outcome, "cancelled");
        let unknown = v1::GetRequestRequest { number: 99, ..Default::default() };
        assert_eq!(operator(&cluster).get_request(unknown).await.unwrap_err().code(), Code::NotFound);
    })
    .await;
}

fn joined(sequence: u64, submit: &v1::Submit, incarnation: &str) -> v1::ObservedSequence {
    v1::ObservedSequence {
        sequence,
        router_id: "any".to_owned(),
        incarnation: incarnation.to_owned(),
        submission_id: submit.submission_id,
        attempt: submit.attempt,
        choice: 0,
        tenant: "other".to_owned(),
    }
}

fn state(sequence: u64, phase: v1::SequencePhase, slot: Option<u32>, blocks: u32) -> v1::SequenceState {
    v1::SequenceState {
        sequence,
        phase: phase.into(),
        slot,
        kv_blocks: blocks,
        tokens: 16 * blocks,
        ..Default::default()
    }
}

fn iteration(number: u64, work: &[(u64, u32, u32)]) -> v1::ObservedIteration {
    let work = work.iter().map(|(sequence, slot, prefill_tokens)| v1::ObservedWork {
        sequence: *sequence,
        slot: *slot,
        prefill_tokens: *prefill_tokens,
        drafted_tokens: 0,
        generated_tokens: 1,
    });
    v1::ObservedIteration {
        iteration: number,
        duration_us: 900,
        predicted_us: 1000,
        target_us: 5000,
        work: work.collect(),
        ..Default::default()
    }
}

fn send_state(observation: &ScriptedObservation, sequences: Vec<v1::SequenceState>, blocked: (u64, &str)) {
    let state = v1::ObservedState {
        sequences,
        omitted_sequences: 0,
        kv_blocks_cached: 5,
        blocked_sequence: blocked.0,
        blocked_by: blocked.1.to_owned(),
    };
    observation.send(v1::ObserveResponse { state: Some(state), ..Default::default() });
}

#[tokio::test]
async fn iterations_are_joined_with_the_requests_of_this_router_while_someone_watches() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let options = Options { incarnation: "mine".to_owned(), ..on() };
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let _stream = cluster.generate(request("seen")).await.unwrap();
        let submit = session.submit().await;
        let mut plain = Viewer::enter(&cluster, true).await.unwrap();
        plain.state("seen", Waiting).await;
        assert!(worker.try_observation().is_none(), "no viewer wants iterations");

        let mut viewer = Viewer::enter(&cluster, false).await.unwrap();
        let observation = worker.observation().await;
        let (own, foreign) = (joined(7, &submit, "mine"), joined(8, &submit, "another"));
        observation.send(v1::ObserveResponse { joined: vec![own, foreign], ..Default::default() });
        send_state(&observation, vec![state(7, v1::SequencePhase::Waiting, None, 0)], (7, "slots"));
        viewer
            .until("blocked", |viewer| viewer.named("seen").is_some_and(|r| r.waiting_reason == "slots"))
            .await;
        let own = viewer.named("seen").unwrap().number;
        // A sequence that has not ended is in every state.
        let both = |phase, slot, blocks| {
            vec![state(7, phase, slot, blocks), state(8, v1::SequencePhase::Decode, Some(1), 9)]
        };
        let foreign = vec![joined(8, &submit, "another")];
        let iterations = vec![iteration(41, &[(8, 1, 0), (7, 0, 3)]), iteration(42, &[(8, 1, 0)])];
        observation.send(v1::ObserveResponse { joined: foreign, iterations, ..Default::default() });
        send_state(&observation, both(v1::SequencePhase::Prefill, Some(0), 2), (0, ""));
        let prefill = viewer.state("seen", Prefill).await;
        assert_eq!((prefill.kv_blocks, prefill.computed_tokens), (2, 3));
        viewer.until("iterations", |viewer| viewer.iterations.len() == 2).await;
        let work = &viewer.iterations[0].work;
        let work: Vec<_> =
            work.iter().map(|work| (work.slot, work.request, &*work.tenant, work.prefill_tokens)).collect();
        assert_eq!(work, [(1, 0, "other", 0), (0, own, "", 3)], "only other routers' work has a tenant");
        let seen = viewer.worker("scripted");
        assert_eq!((seen.kv_blocks_cached, seen.step_target_us), (5, 5000));
        let slots: Vec<_> = seen.slots.iter().map(|slot| (slot.slot, slot.request, &*slot.tenant)).collect();
        assert_eq!(slots, [(Some(0), own, ""), (Some(1), 0, "other")]);
        let blocks: Vec<_> = seen.kv_by_tenant.iter().map(|of| (&*of.tenant, of.blocks)).collect();
        assert_eq!(blocks, [("other", 9), ("", 2)]);

        send_state(&observation, both(v1::SequencePhase::Preempted, None, 0), (0, ""));
        viewer.state("seen", Preempted).await;
        let slot = viewer.worker("scripted").slots.iter().find(|slot| slot.request == own).unwrap();
        assert_eq!((slot.slot, slot.state()), (None, Preempted));
        send_state(&observation, both(v1::SequencePhase::Decode, Some(3), 2), (0, ""));
        viewer.state("seen", Decode).await;
        let life = life(&cluster, "seen").await;
        assert_eq!(kinds(&life)[3..], ["admitted", "chunk", "preempted", "resumed"]);
        plain.advance().await;
        assert!(plain.worker("scripted").slots.is_empty() && plain.iterations.is_empty());

        // A lost session ends the observation; the next one starts from nothing.
        session.break_stream();
        observation.ended().await;
        let mut session = worker.granted().await;
        let again = session.submit().await;
        let observation = worker.observation().await;
        viewer.state("seen", Waiting).await;
        viewer.until("no slots", |viewer| viewer.worker("scripted").slots.is_empty()).await;
        let (own_again, iterations) = (vec![joined(7, &again, "mine")], vec![iteration(1, &[(7, 0, 4)])]);
        observation.send(v1::ObserveResponse { joined: own_again, iterations, ..Default::default() });
        viewer.until("iteration 1", |viewer| viewer.iterations.len() == 3).await;
        assert_eq!((viewer.iterations[2].number, viewer.iterations[2].work[0].request), (1, own));
        // A short request has ended before its iterations are reported, beside an older state.
        session.finish(&again, 0, &tokens("d"), LENGTH);
        viewer.state("seen", Ended).await;
        observation.send(v1::ObserveResponse {
            joined: vec![joined(9, &again, "mine")],
            iterations: vec![iteration(2, &[(9, 0, 0)])],
            state: Some(v1::ObservedState::default()),
            ..Default::default()
        });
        let iterations = vec![iteration(3, &[(9, 0, 0)])];
        observation.send(v1::ObserveResponse { iterations, ..Default::default() });
        viewer.until("iteration 3", |viewer| viewer.iterations.len() == 5).await;
        assert!(viewer.iterations[3..].iter().all(|iteration| iteration.work[0].request == own));
        assert_eq!(viewer.skipped_iterations, 0);
        drop(viewer);
        observation.ended().await;
    })
    .await;
}

#[tokio::test]
async fn a_slow_viewer_misses_the_oldest_iterations_and_is_told_how_many() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], on()).await;
        let _session = worker.granted().await;
        cluster.handle.ready().await;
        let mut viewer = Viewer::enter(&cluster, false).await.unwrap();
        let observation = worker.observation().await;
        viewer.advance().await;
        let (last, dropped) = (700, 50);
        for first in (1..=last).step_by(100) {
            let iterations = (first..first + 100).map(|number| iteration(number, &[])).collect();
            let dropped_iterations = if first == 1 { dropped } else { 0 };
            observation.send(v1::ObserveResponse { iterations, dropped_iterations, ..Default::default() });
        }
        viewer
            .until("the last iteration", |viewer| {
                viewer.iterations.last().is_some_and(|iteration| iteration.number == last)
            })
            .await;
        assert!(viewer.iterations.is_sorted_by_key(|iteration| iteration.number));
        assert_eq!(viewer.iterations.len() as u64 + viewer.skipped_iterations, last + dropped);
    })
    .await;
}

#[tokio::test]
async fn viewers_are_limited_over_both_protocols_and_a_place_is_taken_again() {
    bounded(async {
        let options = Options { viewers_max: 2, admin: Admin::ReadOnly, ..with_http(HttpOptions::default()) };
        let http = HttpCluster::start(options).await;
        let mut first = Viewer::enter(&http.cluster, true).await.unwrap();
        let mut page = Call::send(http.address, "GET", "/ui/events?rate=10", &[], b"").await;
        let (status, headers) = page.head().await;
        assert_eq!((status, headers["content-type"].as_str()), (200, "text/event-stream; charset=utf-8"));
        first
            .until("two viewers", |viewer| viewer.last.cluster.as_ref().is_some_and(|all| all.viewers == 2))
            .await;
        let refused = Viewer::enter(&http.cluster, true).await.err().unwrap();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        let refused = http.get("/ui/events").await;
        assert_eq!(
            (refused.status, &refused.json()["error"]["code"]),
            (429, &Value::from("rate_limit_exceeded"))
        );
        let wrong = http.get("/ui/events?rate=11").await;
        assert_eq!((wrong.status, &wrong.json()["error"]["param"]), (400, &Value::from("rate")));
        let event = &parse_events(&page.chunk().await.unwrap())[0];
        let update = event.json();
        assert_eq!((event.name.as_deref(), event.id.as_deref()), (Some("update"), Some("1")));
        assert_eq!((&update["number"], &update["workers"][0]["state"]), (&1.into(), &"connected".into()));
        assert_eq!((update["cluster"]["models"][0].as_str(), update.get("requests")), (Some("tiny"), None));
        assert_eq!(update["cluster"].get("canKillWorkers"), None, "not under `up`");
        drop(page);
        first
            .until("one viewer", |viewer| viewer.last.cluster.as_ref().is_some_and(|all| all.viewers == 1))
            .await;
        let mut third = Viewer::enter(&http.cluster, true).await.unwrap();
        third.advance().await;
        // A drain does not wait for viewers.
        http.cluster.drain.cancel();
        http.cluster.serving.await.unwrap().unwrap();
        assert_eq!(third.stream.message().await.err().map(|status| status.code()), Some(Code::Unavailable));
    })
    .await;
}

#[tokio::test]
async fn bytes_a_second_are_bounded_and_no_change_is_lost() {
    bounded(async {
        let rate = 128 << 10;
        let options = Options { viewer_bytes_per_second: rate, ..on() };
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], options).await;
        let session = worker.session().await;
        cluster.handle.ready().await;
        let mut streams = Vec::new();
        for number in 0..1000 {
            streams.push(cluster.generate(request(&format!("{number:0>100}"))).await.unwrap());
        }
        let begun = Instant::now();
        let mut viewer = Viewer::enter(&cluster, true).await.unwrap();
        let (mut bytes, mut largest, mut skipped) = (0, 0, 0);
        while viewer.requests.len() < 1000 {
            viewer.advance().await;
            let size = prost_len(&viewer.last);
            (bytes, largest) = (bytes + size, largest.max(size));
            skipped += viewer.last.skipped_updates;
        }
        let allowed = rate as f64 * begun.elapsed().as_secs_f64() + largest as f64;
        assert!(bytes as f64 <= allowed, "{bytes} bytes in {:?}", begun.elapsed());
        assert!(largest <= rate as usize, "an update has {largest} bytes");
        assert!(skipped > 0, "updates were due while nothing could be sent");
        // They all end while the viewer does not look.
        drop(streams);
        viewer
            .until("all ended", |viewer| viewer.requests.values().all(|request| request.state() == Ended))
            .await;
        assert_eq!(viewer.requests.len(), 1000);
        drop(session);
    })
    .await;
}

/// Size of an update on the wire.
fn prost_len(update: &v1::WatchResponse) -> usize {
    use prost::Message as _;
    update.encoded_len()
}

#[tokio::test]
async fn a_viewer_that_never_reads_holds_nobody_up_and_loses_its_place() {
    bounded(async {
        let stall_timeout = Duration::from_secs(1);
        let options = Options { viewers_max: 1, stall_timeout, ..on() };
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut streams = Vec::new();
        for number in 0..60 {
            streams.push(cluster.generate(request(&format!("{number:0>120}"))).await.unwrap());
        }
        let mut submits = Vec::new();
        for _ in 0..60 {
            submits.push(session.submit().await);
        }
        // On a connection of its own, whose window its updates soon fill.
        let endpoint =
            tonic::transport::Endpoint::from_shared(format!("http://{}", cluster.address)).unwrap();
        let endpoint = endpoint.initial_stream_window_size(65_535).initial_connection_window_size(65_535);
        let mut blind = AdminClient::new(endpoint.connect().await.unwrap());
        let watch = v1::WatchRequest { updates_per_second: 10, omit_iterations: true };
        let unread = blind.watch(watch).await.unwrap();
        let refused = Viewer::enter(&cluster, true).await.err().unwrap();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        // Meanwhile the streams go on, and each token is a change to be told.
        let mut place = Err(refused);
        while place.is_err() {
            for submit in &submits {
                session.tokens(submit, 0, &tokens("a"));
            }
            for stream in &mut streams {
                stream.advance().await.unwrap();
            }
            place = Viewer::enter(&cluster, true).await;
        }
        place.unwrap().until("an update", |_| true).await;
        drop(unread);
    })
    .await;
}

#[tokio::test]
async fn ten_thousand_requests_are_shown_and_more_are_counted() {
    bounded(async {
        let (open, shown) = (10_100, 10_000);
        let mut dispatcher = queue_of(open);
        dispatcher.queue.limits.tokens = u64::MAX;
        let options = Options {
            dispatcher,
            streams_max: open,
            connection_streams_max: u32::MAX,
            viewer_bytes_per_second: 8 << 20,
            ..on()
        };
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], options).await;
        let _session = worker.session().await;
        cluster.handle.ready().await;
        let mut streams = Vec::with_capacity(open);
        for number in 0..open {
            let mut client = cluster.client.clone();
            streams.push(client.generate(request(&number.to_string())).await.unwrap());
        }
        let mut viewer = Viewer::enter(&cluster, false).await.unwrap();
        while viewer.requests.len() < shown {
            viewer.advance().await;
            let size = prost_len(&viewer.last);
            assert!(size <= 1 << 20, "an update has {size} bytes");
        }
        let all = viewer.last.cluster.clone().unwrap();
        assert_eq!((all.open_requests, all.queued_requests), (open as u32, open as u32));
        let list = v1::ListRequestsRequest { limit: shown as u32, ..Default::default() };
        let listed = operator(&cluster).list_requests(list.clone()).await.unwrap().into_inner();
        assert_eq!((listed.requests.len(), listed.omitted as usize), (shown, open - shown));
        let list = v1::ListRequestsRequest { limit: shown as u32 + 1, ..list };
        assert_eq!(operator(&cluster).list_requests(list).await.unwrap_err().code(), Code::InvalidArgument);
        // Those that found no place follow when others end.
        drop(streams.drain(..100).collect::<Vec<_>>());
        viewer.until("the others", |viewer| viewer.requests.len() == open).await;
        let ended = viewer.requests.values().filter(|request| request.state() == Ended).count();
        assert_eq!(ended, 100);
    })
    .await;
}

#[tokio::test]
async fn hostile_names_arrive_as_they_are_and_break_nothing() {
    bounded(async {
        let options = Options { admin: Admin::On, ..with_http(HttpOptions::default()) };
        let mut http = HttpCluster::ungranted(WorkerProfile::default(), options).await;
        let hostile =
            "</script><img src=x onerror=alert(1)>\r\n\r\nevent: update\ndata: {}\u{1b}[2J\u{202e}\u{0}";
        let named = v1::GenerateRequest { tenant: hostile.to_owned(), ..request(hostile) };
        let _stream = http.cluster.generate(named).await.unwrap();
        let mut page = Call::send(http.address, "GET", "/ui/events", &[], b"").await;
        page.head().await;
        let chunk = page.chunk().await.unwrap();
        let events = parse_events(&chunk);
        assert_eq!(events.len(), 1, "{chunk:?}");
        let update = events[0].json();
        let shown = &update["requests"][0];
        assert_eq!((shown["requestId"].as_str(), shown["tenant"].as_str()), (Some(hostile), Some(hostile)));
        assert_eq!(update["tenants"][0]["tenant"].as_str(), Some(hostile));
        let number = shown["number"].as_u64().unwrap();
        let life = http.get(&format!("/ui/requests/{number}")).await.json();
        assert_eq!(life["request"]["requestId"].as_str(), Some(hostile));
        assert_eq!(life["events"][0]["kind"], "arrived");
        for path in
            ["/ui/requests/0", "/ui/requests/-1", "/ui/requests/x", "/ui/requests/99999999999999999999"]
        {
            assert_eq!(http.get(path).await.status, 404, "{path}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_diagnosis_of_the_cluster_has_every_worker_and_the_router() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let gone = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker, &gone], on()).await;
        let _session = worker.granted().await;
        drop(gone);
        cluster.handle.ready().await;
        let mut found = Vec::new();
        while found.is_empty() {
            let diagnosis = operator(&cluster).diagnose_cluster(v1::DiagnoseClusterRequest::default()).await;
            let diagnosis = diagnosis.unwrap().into_inner();
            let scripted = diagnosis.workers.iter().find(|worker| worker.worker == "scripted").unwrap();
            assert!(scripted.error.contains("nothing to diagnose"), "{scripted:?}");
            found = diagnosis.findings;
        }
        assert_eq!(found[0].bottleneck, "workers_disconnected");
    })
    .await;
}
