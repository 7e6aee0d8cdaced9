use std::path::PathBuf;
use std::time::Duration;

use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::{StrictCodec, v1};
use inflight_router::{Admin, DispatcherOptions, HttpOptions, Options, Router};
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt as _;

use crate::cluster::{Cluster, Generated, bounded, metrics, queue_of, text, tokens};
use crate::http_client::{Call, with_http};
use inflight_scripted::{ScriptedSession, ScriptedWorker, WorkerProfile, sequence};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;

/// Temporary folder, deleted on drop.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        let path = std::env::temp_dir().join(format!("inflight-router-{:016x}", rand::random::<u64>()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        // Atomic, because a watcher must never read a partial file.
        std::fs::write(self.0.join("next"), text).unwrap();
        std::fs::rename(self.0.join("next"), &path).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

pub fn digest(key: &str) -> String {
    Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a tenant's table for the file, with its name as its key.
pub fn tenant(name: &str, limits: &str) -> String {
    format!(
        "[tenants.{name}]\nlimits = {{ {limits} }}\nkeys = [{{ name = \"main\", sha256 = \"{}\" }}]\n",
        digest(name)
    )
}

pub fn with_key<T>(message: T, key: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    request
}

async fn generate(cluster: &Cluster, request: v1::GenerateRequest, key: &str) -> Result<Generated, Status> {
    let mut client = InferenceClient::new(cluster.channel.clone());
    Ok(Generated::from(client.generate(with_key(request, key)).await?.into_inner()))
}

fn pushback(metadata: &MetadataMap) -> Option<u64> {
    metadata.get("grpc-retry-pushback-ms")?.to_str().ok()?.parse().ok()
}

fn count(metric: &str) -> f64 {
    let text = metrics().render();
    let line = text.lines().find(|line| line.starts_with(metric));
    line.and_then(|line| line.rsplit(' ').next()).map_or(0.0, |value| value.parse().unwrap())
}

async fn until(mut holds: impl FnMut() -> bool) {
    while !holds() {
        tokio::task::yield_now().await;
    }
}

pub async fn started(tenants: &str, options: Options) -> (Cluster, ScriptedSession, Folder, ScriptedWorker) {
    let folder = Folder::new();
    let tenants_file = Some(folder.write("tenants.toml", tenants));
    let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
    let cluster = Cluster::start(&[&worker], Options { tenants_file, ..options }).await;
    let session = worker.session().await;
    cluster.handle.ready().await;
    (cluster, session, folder, worker)
}

#[tokio::test]
async fn an_expired_or_unknown_key_is_unauthenticated_and_probes_need_none() {
    bounded(async {
        let past = format!(
            "[tenants.past]\nkeys = [{{ name = \"old\", sha256 = \"{}\", expires = \"2020-01-01T00:00:00Z\" }}]\n",
            digest("past")
        );
        let file = tenant("acme", "") + &past;
        let (cluster, session, _folder, _worker) = started(&file, Options::default()).await;
        session.grant(8, 1000);
        for (key, words) in [("nobody", "is not known"), ("past", "\"old\" has expired")] {
            let status = generate(&cluster, text("a"), key).await.err().unwrap();
            assert_eq!(status.code(), Code::Unauthenticated);
            assert!(status.message().contains(words), "{status}");
            assert_eq!(status.get_details_error_info().unwrap().reason, "UNAUTHENTICATED");
        }
        let mut bare = InferenceClient::new(cluster.channel.clone());
        for answer in [
            bare.generate(text("a")).await.map(|_| ()).unwrap_err(),
            bare.list_models(v1::ListModelsRequest {}).await.map(|_| ()).unwrap_err(),
            bare.tokenize(v1::TokenizeRequest::default()).await.map(|_| ()).unwrap_err(),
        ] {
            assert_eq!(answer.code(), Code::Unauthenticated, "{answer}");
        }
        let mut health = HealthClient::new(cluster.channel.clone());
while health.check(HealthCheckRequest { service: "model/tiny".to_owned() }).await.is_err() {
            tokio::task::yield_now().await;
        }
        assert!(generate(&cluster, text("a"), "acme").await.is_ok());
    })
    .await;
}

#[tokio::test]
async fn a_tenant_runs_under_its_configured_name_weight_and_maximum_priority() {
    bounded(async {
        let file = tenant("acme", "weight = 3, priority_max = 5");
        let (cluster, mut session, _folder, _worker) = started(&file, Options::default()).await;
        session.grant(8, 1000);
        let asked = v1::GenerateRequest { weight: Some(1000.0), priority: 90, ..text("a") };
        let _stream = generate(&cluster, asked.clone(), "acme").await.unwrap();
        let submit = session.submit().await;
        assert_eq!((submit.tenant.as_str(), submit.weight, submit.priority), ("acme", 3.0, 5));
        let other = v1::GenerateRequest { tenant: "other".to_owned(), ..asked };
        let status = generate(&cluster, other, "acme").await.err().unwrap();
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    })
    .await;
}

#[tokio::test]
async fn a_tenant_goes_before_others_only_with_permission_and_may_go_after_them() {
    bounded(async {
        let file = "anonymous = \"guests\"\n[tenants.guests]\n".to_owned()
            + &tenant("acme", "weight = 2")
            + &tenant("vip", "priority_max = 5");
        let (mut cluster, mut session, _folder, _worker) = started(&file, Options::default()).await;
        session.grant(8, 1000);
        let asked = |priority| v1::GenerateRequest { priority, ..text("a") };
        let mut streams = Vec::new();
        for (priority, expected) in [(90, 0), (-3, -3)] {
            streams.push(cluster.generate(asked(priority)).await.unwrap());
            let submit = session.submit().await;
            assert_eq!((submit.tenant.as_str(), submit.priority), ("guests", expected));
            streams.push(generate(&cluster, asked(priority), "acme").await.unwrap());
            assert_eq!(session.submit().await.priority, expected);
        }
        streams.push(generate(&cluster, asked(90), "vip").await.unwrap());
        assert_eq!(session.submit().await.priority, 5);
    })
    .await;
}

#[tokio::test]
async fn equal_request_ids_of_two_tenants_do_not_interfere() {
    bounded(async {
        let file = tenant("a", "") + &tenant("b", "");
        let (cluster, mut session, _folder, _worker) = started(&file, Options::default()).await;
        session.grant(8, 1000);
        let asked = v1::GenerateRequest { request_id: "same".to_owned(), ..text("x") };
        let first = generate(&cluster, asked.clone(), "a").await.unwrap();
        let of_a = session.submit().await;
        let mut second = generate(&cluster, asked, "b").await.unwrap();
        let of_b = session.submit().await;
        assert_eq!((of_a.request_id.as_str(), of_b.request_id.as_str()), ("same", "same"));
        assert_ne!(of_a.submission_id, of_b.submission_id);
        drop(first);
        assert_eq!(session.cancel().await.submission_id, of_a.submission_id);
        session.finish(&of_a, 0, &[], v1::FinishReason::Cancelled);
        session.finish(&of_b, 0, &tokens("yes"), LENGTH);
        second.read_to_end().await.unwrap();
        assert_eq!((second.text[0].as_str(), second.started.unwrap().request_id.as_str()), ("yes", "same"));
    })
    .await;
}

#[tokio::test]
async fn limits_reject_with_quota_and_retry_delay_and_recover() {
    bounded(async {
        let file = tenant("few", "concurrent_requests = 1")
            + &tenant("slow", "requests_per_minute = 1")
            + &tenant("short", "tokens_per_minute = 600")
            + &tenant("queued", "queue_requests = 1")
            + &tenant("rare", "tokens_per_minute = 6");
        let (cluster, mut session, _folder, _worker) = started(&file, Options::default()).await;
        session.grant(8, 1000);
        let exhausted = |status: Status, subject: &str, quota: &str| {
            assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
            let violations = status.get_details_quota_failure().unwrap().violations;
            assert_eq!(
                (violations[0].subject.as_str(), violations[0].description.as_str()),
                (subject, quota)
            );
            let retry = status.get_details_retry_info().unwrap().retry_delay.unwrap();
            assert_eq!(pushback(status.metadata()), Some(retry.as_millis() as u64));
            assert_eq!(status.get_details_error_info().unwrap().domain, "inflight");
            retry
        };

        let mut first = generate(&cluster, text("a"), "few").await.unwrap();
        let submit = session.submit().await;
        let status = generate(&cluster, text("a"), "few").await.err().unwrap();
        exhausted(status, "tenant:few", "concurrent_requests");
        session.finish(&submit, 0, &tokens("b"), LENGTH);
        first.read_to_end().await.unwrap();
        drop(first);
        // The router observes the end of the call a moment later.
        let again = loop {
            match generate(&cluster, text("a"), "few").await {
                Ok(again) => break again,
                Err(status) => assert_eq!(status.code(), Code::ResourceExhausted),
            }
        };
        session.submit().await;
        drop(again);
        session.cancel().await;

        let _one = generate(&cluster, text("a"), "slow").await.unwrap();
        session.submit().await;
        let status = generate(&cluster, text("a"), "slow").await.err().unwrap();
        let retry = exhausted(status, "tenant:slow", "requests_per_minute");
        assert!(retry > Duration::from_secs(50) && retry <= Duration::from_secs(60), "{retry:?}");

        // Possible output counts until the actual output is known.
        let stop =
            |max_tokens| Some(v1::StopConditions { max_tokens: Some(max_tokens), ..Default::default() });
        let long = v1::GenerateRequest { stop: stop(200), ..text("a") };
        let mut long = generate(&cluster, long, "short").await.unwrap();
        let submit = session.submit().await;
        let brief = v1::GenerateRequest { stop: stop(20), ..text("a") };
        let status = generate(&cluster, brief.clone(), "short").await.err().unwrap();
        exhausted(status, "tenant:short", "tokens_per_minute");
        session.finish(&submit, 0, &tokens("b"), v1::FinishReason::Stop);
        long.read_to_end().await.unwrap();
        drop(long);
        loop {
            match generate(&cluster, brief.clone(), "short").await {
                Ok(_) => break,
                Err(status) => assert_eq!(status.code(), Code::ResourceExhausted),
            }
        }

        session.grant(0, 0);
        let mut open = Vec::new();
        // Some may still be dispatched until the grant is withdrawn.
        let status = loop {
            match generate(&cluster, text("a"), "queued").await {
                Ok(stream) => open.push(stream),
                Err(status) => break status,
            }
        };
        exhausted(status, "tenant:queued", "tenant_queue_requests");
        // A request cancelled while waiting costs no tokens: this prompt would use up minutes of the rate.
        let asked = text("a prompt of some dozens of tokens, each of which takes ten seconds");
        drop(generate(&cluster, asked.clone(), "rare").await.unwrap());
        loop {
            match generate(&cluster, asked.clone(), "rare").await {
                Ok(_) => break,
                Err(status) => assert_eq!(status.code(), Code::ResourceExhausted),
            }
        }
        assert!(count("inflight_router_tenant_rejections_total{tenant=\"slow\"") >= 1.0);
    })
    .await;
}

#[tokio::test]
async fn a_changed_file_is_reloaded_and_an_invalid_one_is_counted_and_ignored() {
    bounded(async {
        // The loop below fails with a key that is not known yet, more often than the throttle allows.
        let options = Options { key_failures_per_minute: 1_000_000, ..Options::default() };
        let (cluster, session, folder, _worker) = started(&tenant("a", ""), options).await;
        session.grant(8, 1000);
        let reloads = |result: &str| {
            count(&format!("inflight_file_reloads_total{{file=\"tenants\",result=\"{result}\"}}"))
        };
        let (errors, fine) = (reloads("error"), reloads("ok"));
        folder.write("tenants.toml", "[tenants.b\nthis is no TOML");
        until(|| reloads("error") > errors).await;
        assert!(generate(&cluster, text("x"), "a").await.is_ok());
        folder.write("tenants.toml", &tenant("b", ""));
        // Not only the count: other routers of this process share it.
        while generate(&cluster, text("x"), "b").await.is_err() {
            tokio::task::yield_now().await;
        }
        assert!(reloads("ok") > fine);
        let gone = generate(&cluster, text("x"), "a").await.err().unwrap();
        assert_eq!(gone.code(), Code::Unauthenticated);
    })
    .await;
}

#[tokio::test]
async fn a_file_changed_before_the_router_serves_is_reloaded() {
    bounded(async {
        let folder = Folder::new();
        let tenants_file = Some(folder.write("tenants.toml", &tenant("a", "")));
        let workers = vec!["127.0.0.1:1".to_owned()];
        let listen = "127.0.0.1:0".parse().unwrap();
        let router =
            Router::bind(Options { listen, workers, tenants_file, ..Options::default() }).await.unwrap();
        folder.write("tenants.toml", &(tenant("a", "") + &tenant("later", "")));
        let endpoint = Endpoint::from_shared(format!("http://{}", router.address())).unwrap();
        let serving = tokio::spawn(router.serve(CancellationToken::new()));
        let mut client = InferenceClient::new(endpoint.connect_lazy());
        while client.list_models(with_key(v1::ListModelsRequest {}, "later")).await.is_err() {
            tokio::task::yield_now().await;
        }
        serving.abort();
    })
    .await;
}

#[tokio::test]
async fn tenants_are_ordered_by_reported_service_and_pass_on_virtual_times() {
    bounded(async {
        let mut workers = [
            ScriptedWorker::start(WorkerProfile { incarnation: "one", ..WorkerProfile::default() }).await,
            ScriptedWorker::start(WorkerProfile { incarnation: "two", ..WorkerProfile::default() }).await,
        ];
        let mut cluster = Cluster::start(&[&workers[0], &workers[1]], Options::default()).await;
        let mut first = workers[0].session().await;
        let mut second = workers[1].session().await;
        while cluster
            .client
            .list_models(v1::ListModelsRequest {})
            .await
            .unwrap()
            .into_inner()
            .models
            .first()
            .is_none_or(|model| model.workers < 2)
        {
            tokio::task::yield_now().await;
        }
        let ask = |tenant: &str, name: &str| v1::GenerateRequest { tenant: tenant.to_owned(), ..text(name) };
        let mut streams = Vec::new();
        for (tenant, name) in [("heavy", "h1"), ("heavy", "h2"), ("light", "l1"), ("light", "l2")] {
            streams.push(cluster.generate(ask(tenant, name)).await.unwrap());
        }
        // The second worker served the heavy tenant and reports it twice: the repetition adds nothing.
        let charge = |tenant: &str, cost| v1::TenantServiceCounter {
            tenant: tenant.to_owned(),
            service: cost,
            baseline: 0,
        };
        for cost in [500, 1000, 1000, 700] {
            second.update(v1::Update { services: vec![charge("heavy", cost)], ..Default::default() });
        }
        second.update(v1::Update {
            grant: Some(v1::Grant { sequences: 1, kv_blocks: 100, priority_sequences: 0 }),
            ..Default::default()
        });
        let submit = second.submit().await;
        assert_eq!(
            (submit.prompt_token_ids[1..].to_vec(), submit.virtual_start_time),
            (tokens("l1"), Some(0))
        );
        first.grant(1, 100);
        let submit = first.submit().await;
        assert_eq!(submit.prompt_token_ids[1..], tokens("l2"));
        // The prompt of its tenant's first request is charged provisionally: no report covers it yet.
        assert_eq!(submit.virtual_start_time, Some(tokens("l1").len() as u64 * 1000 + 1000));
        first.update(v1::Update {
            sequences: vec![sequence(&submit, 0, &tokens("x"), LENGTH)],
            services: vec![charge("light", 3000)],
            ..Default::default()
        });
        let heavy = first.submit().await;
        assert_eq!(
            (heavy.prompt_token_ids[1..].to_vec(), heavy.virtual_start_time),
            (tokens("h1"), Some(1_000_000))
        );
        // The counters of a lost worker are sent to the remaining ones.
        second.break_stream();
        let told = first.services.recv().await.unwrap();
        assert_eq!((told.incarnation.as_str(), told.tenants), ("two", vec![charge("heavy", 1000)]));
    })
    .await;
}

#[tokio::test]
async fn bounds_are_divided_by_the_reported_number_of_routers() {
    bounded(async {
        let options = Options { dispatcher: queue_of(4), ..Options::default() };
        let file = tenant("t", "concurrent_requests = 100");
        let (cluster, mut session, _folder, mut worker) = started(&file, options).await;
        session.grant(1, 1000);
        let mut running = generate(&cluster, text("a"), "t").await.unwrap();
        let submit = session.submit().await;
        session.update(v1::Update { router_count: 2, ..Default::default() });
        // A later message on the session shows that it was applied.
        session.tokens(&submit, 0, &tokens("x"));
        running.until_text("x").await;
        let mut waiting = Vec::new();
        let status = loop {
            match generate(&cluster, text("a"), "t").await {
                Ok(stream) => waiting.push(stream),
                Err(status) => break status,
            }
        };
        assert_eq!((waiting.len(), status.code()), (2, Code::ResourceExhausted));
        assert_eq!(status.get_details_quota_failure().unwrap().violations[0].description, "queue_requests");
        // Without a report of the router count the last one stays: three wait now, of four for one router.
        session.break_stream();
        let _again = worker.session().await;
        let status = generate(&cluster, text("a"), "t").await.err().unwrap();
        assert_eq!(status.code(), Code::ResourceExhausted);
    })
    .await;
}

#[tokio::test]
async fn invalid_keys_are_throttled_and_a_valid_key_of_the_same_address_is_served() {
    bounded(async {
        // A burst of one, every minute.
        let options = Options { key_failures_per_minute: 1, ..Options::default() };
        let (cluster, session, _folder, _worker) = started(&tenant("acme", ""), options).await;
        session.grant(8, 1000);
        let first = generate(&cluster, text("a"), "guess 1").await.err().unwrap();
        assert_eq!(first.code(), Code::Unauthenticated);
        for guess in ["guess 2", "guess 3"] {
            let status = generate(&cluster, text("a"), guess).await.err().unwrap();
            assert_eq!(status.code(), Code::ResourceExhausted);
            assert!(status.message().contains("--key-failures-per-minute"), "{status}");
            let retry = pushback(status.metadata()).unwrap();
            assert!((1..=60_000).contains(&retry), "{retry} ms");
        }
        assert!(generate(&cluster, text("a"), "acme").await.is_ok());
        let mut bare = InferenceClient::new(cluster.channel.clone());
        let missing = bare.generate(text("a")).await.map(|_| ()).unwrap_err();
        assert_eq!(missing.code(), Code::Unauthenticated, "no guess of a key");
    })
    .await;
}

#[tokio::test]
async fn without_tenants_weight_and_priority_of_a_request_count_only_with_the_option() {
    bounded(async {
        for (anonymous_weights, expected) in [(false, (1.0, 0)), (true, (1000.0, 90))] {
            let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
            let options = Options { anonymous_weights, ..Options::default() };
            let mut cluster = Cluster::start(&[&worker], options).await;
            let mut session = worker.granted().await;
            cluster.handle.ready().await;
            let asked = v1::GenerateRequest { weight: Some(1000.0), priority: 90, ..text("a") };
            let _stream = cluster.generate(asked).await.unwrap();
            let submit = session.submit().await;
            assert_eq!((submit.weight, submit.priority), expected);
        }
    })
    .await;
}

#[tokio::test]
async fn in_a_full_queue_lower_priorities_are_displaced() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let options = Options { dispatcher: queue_of(2), anonymous_weights: true, ..Options::default() };
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.session().await;
        cluster.handle.ready().await;
        let ask = |priority, name| v1::GenerateRequest { priority, ..text(name) };
        let mut low = cluster.generate(ask(-1, "low")).await.unwrap();
        let _middle = cluster.generate(ask(0, "middle")).await.unwrap();
        let _high = cluster.generate(ask(1, "high")).await.unwrap();
        let status = low.advance().await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.get_details_error_info().unwrap().reason, "DISPLACED");
        assert!(pushback(status.metadata()).is_some());
        let full = cluster.generate(ask(0, "late")).await.err().unwrap();
        assert_eq!(full.get_details_error_info().unwrap().reason, "FULL");
        session.grant(8, 1000);
        assert_eq!(session.submit().await.prompt_token_ids[1..], tokens("high"));
        assert_eq!(session.submit().await.prompt_token_ids[1..], tokens("middle"));
    })
    .await;
}

#[tokio::test]
async fn a_small_request_bypasses_one_that_fits_on_no_worker() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut options = Options::default();
        options.dispatcher.queue.bypass_max = 1;
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.session().await;
        cluster.handle.ready().await;
        session.grant(8, 6);
        let _running = cluster.generate(text("running")).await.unwrap();
        let running = session.submit().await;
        let _large = cluster.generate(text(&"large ".repeat(30))).await.unwrap();
        let _small = cluster.generate(text("small")).await.unwrap();
        assert_eq!(session.submit().await.prompt_token_ids[1..], tokens("small"));
        // The next one waits until the large one was dispatched.
        let _second = cluster.generate(text("second")).await.unwrap();
        session.finish(&running, 0, &tokens("x"), LENGTH);
        session.grant(8, 1000);
        assert!(session.submit().await.prompt_token_ids.len() > 30);
        assert_eq!(session.submit().await.prompt_token_ids[1..], tokens("second"));
    })
    .await;
}

#[tokio::test]
async fn a_deadline_before_the_predicted_first_token_is_rejected_at_once() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.session().await;
        cluster.handle.ready().await;
        session.update(v1::Update {
            grant: Some(v1::Grant { sequences: 8, kv_blocks: 1000, priority_sequences: 0 }),
            load: Some(v1::Load {
                prefill_backlog_us: 5_000_000,
                prefill_slowdown: 1.0,
                ..Default::default()
            }),
            cost: Some(v1::CostCoefficients { step_s: 0.01, token_s: 0.001, ..Default::default() }),
            ..Default::default()
        });
        let asked = |milliseconds: u32| {
            let mut request = Request::new(text("a"));
            request.metadata_mut().insert("grpc-timeout", format!("{milliseconds}m").parse().unwrap());
            request
        };
        // The update arrives on another connection than the request.
        let status = loop {
            match cluster.client.generate(asked(2_000)).await {
                Ok(stream) => drop((session.submit().await, stream)),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        assert_eq!(status.get_details_error_info().unwrap().reason, "DEADLINE_INFEASIBLE");
        let retry = status.get_details_retry_info().unwrap().retry_delay.unwrap();
        assert!(retry >= Duration::from_secs(2) && retry <= Duration::from_secs(4), "{retry:?}");
        while session.try_command().is_some() {}
        // A feasible deadline is passed on as a duration, so that clocks need not agree.
        let _stream = cluster.client.generate(asked(60_000)).await.unwrap();
        let left = loop {
            if let inflight_scripted::Command::Submit(submit) = session.command().await {
                break submit.deadline_us.unwrap();
            }
        };
        assert!(left > 50_000_000 && left <= 60_000_000, "{left}");
    })
    .await;
}

#[tokio::test]
async fn a_model_without_workers_is_unavailable_and_not_unknown() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let other = ScriptedWorker::start(WorkerProfile { model: "other", ..WorkerProfile::default() }).await;
        let options = Options { dispatcher: DispatcherOptions { no_worker_timeout: Duration::from_millis(1), ..DispatcherOptions::default() }, ..Options::default() };
        let mut cluster = Cluster::start(&[&worker, &other], options).await;
        let session = worker.session().await;
        let ask = |model: &str| v1::GenerateRequest { model: model.to_owned(), ..text("a") };
        let serving = |cluster: &Cluster| {
            let mut client = cluster.client.clone();
            async move { client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models.len() }
        };
        while serving(&cluster).await < 2 {
            tokio::task::yield_now().await;
        }
        drop(worker);
        session.break_stream();
        while serving(&cluster).await > 1 {
            tokio::task::yield_now().await;
        }
        // For a moment requests may still wait for it.
        let away = match cluster.generate(ask("tiny")).await {
            Ok(mut stream) => stream.advance().await.unwrap_err(),
            Err(status) => status,
        };
        assert_eq!(away.code(), Code::Unavailable, "{away}");
        assert_eq!(cluster.generate(ask("nothing")).await.err().unwrap().code(), Code::NotFound);
    })
    .await;
}

/// gRPC methods that need no key.
const OPEN_METHODS: [&str; 2] =
    ["/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady"];

/// HTTP paths that need no key.
const OPEN_PATHS: [&str; 9] =
    ["/chat", "/health", "/livez", "/metrics", "/openapi.json", "/ready", "/readyz", "/ui", "/version"];

#[tokio::test]
async fn every_method_and_path_but_the_documented_ones_needs_a_key() {
    bounded(async {
        let http = HttpOptions { metrics: true, ..HttpOptions::default() };
        let options = Options { admin: Admin::On, ..with_http(http) };
        let (cluster, _session, _folder, _worker) = started(&tenant("acme", ""), options).await;
        // Both ports take both protocols.
        let http = cluster.http.unwrap();
        let at_http =
            tonic::transport::Endpoint::from_shared(format!("http://{http}")).unwrap().connect_lazy();
        let files = prost_types::FileDescriptorSet::decode(inflight_proto::FILE_DESCRIPTOR_SET).unwrap();
        for channel in [cluster.channel.clone(), at_http] {
            let mut open = Vec::new();
            for file in &files.file {
                for service in &file.service {
                    for method in &service.method {
                        let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                        let mut client = tonic::client::Grpc::new(channel.clone());
                        client.ready().await.unwrap();
                        let codec = StrictCodec::<v1::ListModelsRequest, v1::ListModelsRequest>::default();
                        let call = Request::new(v1::ListModelsRequest {});
                        let answer = client.unary(call, path.parse().unwrap(), codec).await;
                        if answer.err().is_none_or(|status| status.code() != Code::Unauthenticated) {
                            open.push(path);
                        }
                    }
                }
            }
            assert_eq!(open, OPEN_METHODS);
        }
        let guarded = [
            "/",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/tokenize",
            "/detokenize",
            "/tokenizer_info",
            "/v1/models",
            "/v1/models/tiny",
            "/ui/events",
            "/ui/requests/1",
            "/ui/workers/0/kill",
            "/health/",
            "//health",
            "/v1/../health",
            "/%68ealth",
        ];
        for (path, needs_key) in
            guarded.map(|path| (path, true)).into_iter().chain(OPEN_PATHS.map(|path| (path, false)))
        {
            for (method, address) in
                ["GET", "POST"].into_iter().flat_map(|method| [(method, http), (method, cluster.address)])
            {
                let mut call = Call::send(address, method, path, &[], b"").await;
                assert_eq!(call.head().await.0 == 401, needs_key, "{method} {path} at {address}");
            }
        }
    })
    .await;
}
