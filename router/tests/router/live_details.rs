//! What viewers see besides requests and iterations: findings of the diagnosis, facts of workers, traces.

use std::time::{Duration, Instant};

use inflight_proto::v1;
use inflight_router::{Admin, HttpOptions, Options};
use tonic::Request;

use crate::cluster::{Cluster, bounded, text};
use crate::http_client::{Call, HttpCluster, parse_events, with_http};
use crate::live::{Viewer, operator};
use inflight_scripted::{Script, ScriptedWorker, WorkerProfile};

/// Time between two diagnoses.
const INTERVAL: Duration = Duration::from_secs(5);

fn on() -> Options {
    Options { admin: Admin::On, ..Options::default() }
}

fn named(worker_id: &'static str) -> Script {
    Script::from(WorkerProfile { worker_id, ..WorkerProfile::default() })
}

fn finding(bottleneck: &str, window_share: f64, text: &str) -> v1::Finding {
    v1::Finding {
        bottleneck: bottleneck.to_owned(),
        window_share,
        evidence: text.to_owned(),
        advice: text.to_owned(),
    }
}

/// Waits for a viewer's next findings.
async fn findings(viewer: &mut Viewer) -> v1::ClusterDiagnosis {
    loop {
        viewer.advance().await;
        if let Some(diagnosis) = viewer.last.diagnosis.clone() {
            return diagnosis;
        }
    }
}

#[tokio::test]
async fn findings_are_made_while_someone_watches_and_once_for_all_viewers() {
    bounded(async {
        let hostile = "\u{1b}[2J\u{202e}".repeat(10_000);
        let answer = |findings| Some(v1::DiagnoseResponse { findings, ..v1::DiagnoseResponse::default() });
        let severe = vec![finding("queue_time", 0.9, "of b"), finding("made up", f64::NAN, &hostile)];
        let mut workers = [
            ScriptedWorker::start(Script {
                diagnosis: answer(vec![finding("queue_time", 0.4, "of a")]),
                ..named("a")
            })
            .await,
            ScriptedWorker::start(Script { diagnosis: answer(severe), ..named("b") }).await,
            ScriptedWorker::start(named("c")).await,
        ];
        let cluster = Cluster::start(&[&workers[0], &workers[1], &workers[2]], on()).await;
        let mut sessions = Vec::new();
        for worker in &mut workers {
            sessions.push(worker.granted().await);
        }
        cluster.handle.ready().await;
        assert_eq!(workers[0].try_diagnosis(), None, "nobody watches");
        let begun = Instant::now();
        let mut first = Viewer::enter(&cluster, true).await.unwrap();
        let mut found = findings(&mut first).await;
        // Sessions may have opened after the first diagnosis.
        while found.undiagnosed_workers == 0
            || found.findings.iter().all(|finding| finding.other_workers == 0)
        {
            found = findings(&mut first).await;
        }
        let asked = workers[0].diagnosis().await;
        assert_eq!((asked.age_max_us, asked.iterations), (60_000_000, 0), "of the last minute");
        let shown: Vec<_> = found
            .findings
            .iter()
            .filter(|finding| !finding.worker.is_empty())
            .map(|found| {
                (found.bottleneck.as_str(), found.worker.as_str(), found.other_workers, found.window_share)
            })
            .collect();
        assert_eq!(shown, [("queue_time", "b", 1, 0.9), ("made up", "b", 0, 0.0)]);
        assert_eq!(found.undiagnosed_workers, 1, "c has none");
        let last = found.findings.iter().find(|finding| finding.bottleneck == "made up").unwrap();
        let cleaned = last.advice.chars().all(|character| !character.is_control() && character != '\u{202e}');
        assert!(last.advice.len() <= 512 && last.evidence.len() <= 512 && cleaned, "{last:?}");
        // Further viewers get the same, which is sent to each once.
        let mut second = Viewer::enter(&cluster, true).await.unwrap();
        findings(&mut second).await;
        for _ in 0..5 {
            first.advance().await;
            second.advance().await;
        }
        let mut asked = 1;
        while workers[0].try_diagnosis().is_some() {
            asked += 1;
        }
        assert!(asked <= 1 + begun.elapsed().as_secs() / INTERVAL.as_secs(), "{asked} diagnoses");
    })
    .await;
}

#[tokio::test]
async fn facts_of_workers_are_shown_as_harmless_text_and_older_workers_have_none() {
    bounded(async {
        let facts = v1::WorkerFacts {
            version: "0.9.0".to_owned(),
            device: format!("GPU\u{1b}[2J {}", "x".repeat(10_000)),
            tensor_parallel: 4,
            memory_bytes: 1 << 40,
            weight_bytes: 1 << 34,
            kv_cache_bytes: u64::MAX,
            weight_encoding: "bf16".to_owned(),
            kv_encoding: "fp8".to_owned(),
        };
        let mut script = named("new");
        script.hello.facts = Some(facts.clone());
        let mut workers = [ScriptedWorker::start(script).await, ScriptedWorker::start(named("old")).await];
        let options = Options { admin: Admin::On, ..with_http(HttpOptions::default()) };
        let cluster = Cluster::start(&[&workers[0], &workers[1]], options).await;
        let mut sessions = Vec::new();
        for worker in &mut workers {
            sessions.push(worker.granted().await);
        }
        cluster.handle.ready().await;
        let mut viewer = Viewer::enter(&cluster, true).await.unwrap();
        let connected = |worker: &v1::WorkerView| worker.state == "connected";
        viewer
            .until("both are connected", |viewer| {
                viewer.last.workers.len() == 2 && viewer.last.workers.iter().all(connected)
            })
            .await;
        let shown = viewer.worker("new").facts.clone().unwrap();
        assert!(shown.device.starts_with("GPU\u{fffd}[2J xxx") && shown.device.len() <= 128, "{shown:?}");
        assert_eq!(v1::WorkerFacts { device: facts.device.clone(), ..shown }, facts);
        assert_eq!(viewer.worker("old").facts, None);
        // The page's data is the same.
        let mut page = Call::send(cluster.http.unwrap(), "GET", "/ui/events", &[], b"").await;
        page.head().await;
        let update = parse_events(&page.chunk().await.unwrap())[0].json();
        assert_eq!(update["workers"][0]["facts"]["tensorParallel"], 4);
        assert!(update["workers"][1]["facts"].is_null(), "{update}");
    })
    .await;
}

#[tokio::test]
async fn a_life_has_microseconds_and_the_id_and_address_of_its_trace() {
    bounded(async {
        let trace_url = Some("https://traces.example/{trace_id}?from=live".parse().unwrap());
        let options = Options { admin: Admin::On, trace_url, ..with_http(HttpOptions::default()) };
        let mut http = HttpCluster::ungranted(WorkerProfile::default(), options).await;
        for (id, flags, trace) in [
            ("traced", "01", "0af7651916cd43dd8448eb211c80319c"),
            ("unsampled", "00", "1af7651916cd43dd8448eb211c80319c"),
        ] {
            let mut request = Request::new(v1::GenerateRequest { request_id: id.to_owned(), ..text("abc") });
            let parent = format!("00-{trace}-b7ad6b7169203331-{flags}");
            request.metadata_mut().insert("traceparent", parent.parse().unwrap());
            let _stream = http.cluster.client.generate(request).await.unwrap();
            let get = v1::GetRequestRequest { number: 0, request_id: id.to_owned() };
            let life = operator(&http.cluster).get_request(get).await.unwrap().into_inner();
            let number = life.request.as_ref().unwrap().number;
            let json = http.get(&format!("/ui/requests/{number}")).await.json();
            let url = format!("https://traces.example/{trace}?from=live");
            if flags == "01" {
                assert_eq!((life.trace_id.as_str(), life.trace_url.as_str()), (trace, url.as_str()));
                assert_eq!(
                    (json["traceId"].as_str(), json["traceUrl"].as_str()),
                    (Some(trace), Some(url.as_str()))
                );
            } else {
                assert_eq!((life.trace_id.as_str(), life.trace_url.as_str()), ("", ""));
                assert!(json["traceId"].is_null() && json["traceUrl"].is_null(), "{json}");
            }
            assert!(life.age_us > 0 && life.events.iter().all(|event| event.at_ms == event.at_us / 1000));
            assert!(life.events.iter().all(|event| event.at_us <= life.age_us), "{life:?}");
        }
    })
    .await;
}
