use std::path::Path;

use inflight_proto::v1;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_router::usage::{UsageRecord, read_usage};
use inflight_router::{Options, UsageLogOptions};
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::cluster::{Cluster, Generated, bounded, text, tokens};
use crate::tenants::{Folder, digest, with_key};
use inflight_scripted::{ScriptedWorker, WorkerProfile};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;

fn with_log(directory: &Path) -> Options {
    let usage_log = Some(directory.to_owned());
    Options { usage_log, ..Options::default() }
}

fn lines(directory: &Path) -> Vec<UsageRecord> {
    let (records, duplicates) = lines_and_duplicates(directory);
    assert_eq!(duplicates, 0);
    records
}

/// Returns the records of a log, each once, and the number of lines dropped because they were written again.
fn lines_and_duplicates(directory: &Path) -> (Vec<UsageRecord>, u64) {
    let mut records = Vec::new();
    let reading = read_usage(&[directory.to_owned()], None, |record| records.push(record)).unwrap();
    assert_eq!(reading.damaged, 0);
    (records, reading.duplicates)
}

#[tokio::test]
async fn a_request_has_one_line_whether_it_fails_over_is_cancelled_or_fails() {
    bounded(async {
        let folder = Folder::new();
        let mut workers = [
            ScriptedWorker::start(WorkerProfile::default()).await,
            ScriptedWorker::start(WorkerProfile::default()).await,
        ];
        let mut cluster = Cluster::start(&[&workers[0], &workers[1]], with_log(&folder.0)).await;
        let mut first = workers[0].granted().await;
        let mut second = workers[1].session().await;
        cluster.handle.ready().await;
        let named = |name: &str| v1::GenerateRequest {
            request_id: name.to_owned(),
            tenant: "acme".to_owned(),
            ..text("a")
        };

        let mut stream = cluster.generate(named("failover")).await.unwrap();
        let submit = first.submit().await;
        first.tokens(&submit, 0, &tokens("x"));
        stream.until_text("x").await;
        first.break_stream();
        second.grant(64, 1000);
        let again = second.submit().await;
        second.finish(&again, 0, &tokens("y"), LENGTH);
        stream.read_to_end().await.unwrap();
        let usage = stream.usage();

        let mut cancelled = cluster.generate(named("cancelled")).await.unwrap();
        let submit = second.submit().await;
        second.tokens(&submit, 0, &tokens("z"));
        cancelled.until_text("z").await;
        drop(cancelled);
        second.cancel().await;

        let mut failing = cluster.generate(named("failing")).await.unwrap();
        let submit = second.submit().await;
        second.fail(&submit, 0, Code::Internal);
        assert!(failing.read_to_end().await.is_err());

        cluster.drain.cancel();
        cluster.serving.await.unwrap().unwrap();
        let mut lines = lines(&folder.0);
        lines.sort_by(|one, other| other.request.cmp(&one.request));
        let found: Vec<_> = lines
            .iter()
            .map(|line| (line.request.as_str(), line.outcome.as_str(), line.completion_tokens))
            .collect();
        let z = tokens("z").len() as u64;
        let expected = [
            ("failover", "completed", u64::from(usage.completion_tokens)),
            ("failing", "worker_error", 0),
            ("cancelled", "cancelled", z),
        ];
        assert_eq!(found, expected);
        let line = &lines[0];
        assert_eq!(
            (line.tenant.as_str(), line.model.as_str(), line.fingerprint.as_str()),
            ("acme", "tiny", "f1")
        );
        assert_eq!(line.prompt_tokens, u64::from(usage.prompt_tokens));
        assert!(line.dispatched.is_some() && line.first_token.is_some() && line.arrived <= line.ended);
    })
    .await;
}

#[tokio::test]
async fn requests_are_refused_while_the_log_cannot_be_written_and_no_line_is_lost() {
    bounded(async {
        let folder = Folder::new();
        let (directory, moved) = (folder.0.join("usage"), folder.0.join("moved"));
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        // Every line needs a new file, which cannot be created in a directory that is gone.
        let usage_files = UsageLogOptions { file_bytes_max: 1, ..UsageLogOptions::default() };
        let options = Options { usage_log: Some(directory.clone()), usage_files, ..Options::default() };
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut served = 0;
        let mut is_away = false;
        let refused = loop {
            match cluster.generate(text("a")).await {
                Ok(mut stream) => {
                    let submit = session.submit().await;
                    session.finish(&submit, 0, &tokens("b"), LENGTH);
                    stream.read_to_end().await.unwrap();
                    served += 1;
                    if !is_away {
                        std::fs::rename(&directory, &moved).unwrap();
                        is_away = true;
                    }
                }
                Err(status) => break status,
            }
        };
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(refused.message().contains("could not bill"), "{refused}");
        assert_eq!(refused.get_details_error_info().unwrap().reason, "USAGE_LOG_UNAVAILABLE");
        std::fs::rename(&moved, &directory).unwrap();
        loop {
            match cluster.generate(text("a")).await {
                Ok(_) => break,
                Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
            }
        }
        cluster.drain.cancel();
        cluster.serving.await.unwrap().unwrap();
        // A line whose sync failed is written again under its id, which the reader counts once.
        let (records, _) = lines_and_duplicates(&directory);
        let completed = records.iter().filter(|line| line.outcome == "completed").count();
        assert_eq!(completed, served);
    })
    .await;
}

#[tokio::test]
async fn a_daily_budget_holds_across_restarts_of_the_router() {
    bounded(async {
        let folder = Folder::new();
        let directory = folder.0.join("usage");
        let file = format!(
            "[tenants.acme]\nlimits = {{ tokens_per_day = 64 }}\nkeys = [{{ name = \"main\", sha256 = \"{}\" }}]\n",
            digest("acme")
        );
        let tenants_file = Some(folder.write("tenants.toml", &file));
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let asked = |max_tokens| v1::GenerateRequest {
            stop: Some(v1::StopConditions { max_tokens: Some(max_tokens), ..Default::default() }),
            ..text("a")
        };
        for restarted in [false, true] {
            let options = Options { tenants_file: tenants_file.clone(), ..with_log(&directory) };
            let cluster = Cluster::start(&[&worker], options).await;
            let mut session = worker.granted().await;
            cluster.handle.ready().await;
            let mut client = InferenceClient::new(cluster.channel.clone());
            if !restarted {
                let stream = client.generate(with_key(asked(50), "acme")).await.unwrap();
                let mut stream = Generated::from(stream.into_inner());
                let submit = session.submit().await;
                session.finish(&submit, 0, &[tokens("b")[0]; 50], LENGTH);
                stream.read_to_end().await.unwrap();
                drop(stream);
            }
            let refused = client.generate(with_key(asked(30), "acme")).await.err().unwrap();
            assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
            assert!(refused.message().contains("more than 64 tokens a UTC day"), "{refused}");
            let quota = refused.get_details_quota_failure().unwrap().violations;
            assert_eq!(quota[0].description, "tokens_per_day");
            drop(client);
            cluster.drain.cancel();
            cluster.serving.await.unwrap().unwrap();
        }
        let lines = lines(&directory);
        assert_eq!(lines.len(), 1, "refused requests use nothing");
        assert_eq!((lines[0].key.as_str(), lines[0].completion_tokens), ("main", 50));
    })
    .await;
}
