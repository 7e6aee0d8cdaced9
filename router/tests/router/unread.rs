//! Clients over HTTP/2 that leave responses unread and answer pings: what their streams hold, and for how long.

use std::time::Duration;

use inflight_proto::v1;
use inflight_proto::v1::generate_response::Event;
use inflight_router::Options;
use inflight_router::usage::{UsageRecord, read_usage};
use tonic::Code;

use crate::cluster::{Cluster, bounded, count, text, tokens};
use crate::http2_client::Frames;
use crate::tenants::Folder;
use inflight_scripted::{ScriptedSession, ScriptedWorker, WorkerProfile};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;

/// Starts a router with one worker, and a client whose streams have no window.
async fn cluster(options: Options) -> (Cluster, ScriptedWorker, ScriptedSession, Frames) {
    let profile = WorkerProfile { context_tokens: 1 << 20, ..WorkerProfile::default() };
    let mut worker = ScriptedWorker::start(profile).await;
    let cluster = Cluster::start(&[&worker], options).await;
    let session = worker.granted().await;
    cluster.handle.ready().await;
    let client = Frames::connect(&cluster, &Frames::NO_WINDOW).await;
    (cluster, worker, session, client)
}

/// Generates over another connection, once the router has a place for the call.
async fn serve_another(cluster: &mut Cluster, session: &mut ScriptedSession) {
    let mut other = loop {
        match cluster.generate(text("b")).await {
            Ok(stream) => break stream,
            Err(status) => assert_eq!(status.code(), Code::ResourceExhausted, "{status}"),
        }
        tokio::task::yield_now().await;
    };
    let submit = session.submit().await;
    session.finish(&submit, 0, &tokens("quick"), LENGTH);
    other.read_to_end().await.unwrap();
}

#[tokio::test]
async fn a_finished_stream_frees_its_place_before_its_last_message_is_read() {
    bounded(async {
        let hour = Duration::from_secs(3600);
        let options = Options { streams_max: 1, stall_timeout: hour, ..Options::default() };
        let (mut cluster, _worker, mut session, mut client) = cluster(options).await;
        client.generate(1, &[], &text("a")).await;
        let submit = session.submit().await;
        session.finish(&submit, 0, &tokens("b"), LENGTH);
        while cluster.handle.stats().in_flight > 0 {
            tokio::task::yield_now().await;
        }
        // The transport takes the rest, and waits.
        client.grant(1, 1).await;
        serve_another(&mut cluster, &mut session).await;
        client.grant(1, 1 << 20).await;
        let events = client.events(1).await;
        assert!(matches!(events[0], Event::Started(_)));
        assert!(matches!(events.last(), Some(Event::Completed(_))), "nothing is lost");
    })
    .await;
}

#[tokio::test]
async fn a_finished_stream_whose_client_stops_reading_in_the_middle_is_ended() {
    bounded(async {
        let options = Options {
            client_buffer_tokens: 1 << 20,
            streams_max: 1,
            stall_timeout: Duration::from_millis(300),
            ..Options::default()
        };
        let (mut cluster, _worker, mut session, mut client) = cluster(options).await;
        let sampling = Some(v1::SamplingParams { n: Some(2), ..Default::default() });
        let stop = Some(v1::StopConditions { max_tokens: Some(200_000), ..Default::default() });
        client.generate(1, &[], &v1::GenerateRequest { sampling, stop, ..text("a") }).await;
        let submit = session.submit().await;
        // Each choice is more than one frame of gRPC's encoder.
        let long = tokens(&"stall ".repeat(7000));
        for choice in 0..2 {
            session.finish(&submit, choice, &long, LENGTH);
        }
        while cluster.handle.stats().in_flight > 0 {
            tokio::task::yield_now().await;
        }
        client.grant(1, 1).await;
        serve_another(&mut cluster, &mut session).await;
        client.grant(0, 1 << 20).await;
        client.grant(1, 1 << 20).await;
        let events = client.events(1).await;
        assert!(!events.iter().any(|event| matches!(event, Event::Completed(_))), "it ends with an error");
    })
    .await;
}

fn lines(folder: &Folder) -> Vec<UsageRecord> {
    let mut records = Vec::new();
    read_usage(std::slice::from_ref(&folder.0), None, |record| records.push(record)).unwrap();
    records
}

#[tokio::test]
async fn an_unread_stream_has_its_usage_line_when_it_is_ended_and_sends_nothing_that_is_not_on_it() {
    bounded(async {
        let folder = Folder::new();
        let options = Options {
            stall_timeout: Duration::from_secs(2),
            usage_log: Some(folder.0.clone()),
            ..Options::default()
        };
        let (cluster, _worker, mut session, mut client) = cluster(options).await;
        let named = |name: &str| v1::GenerateRequest { request_id: name.to_owned(), ..text("a") };
        for (stream, more, name) in
            [(1, &[][..], "stalled"), (3, &[("grpc-timeout", "1S")][..], "past its deadline")]
        {
            client.generate(stream, more, &named(name)).await;
            let submit = session.submit().await;
            session.tokens(&submit, 0, &tokens("unread"));
        }
        let mut written = lines(&folder);
        while written.len() < 2 {
            tokio::task::yield_now().await;
            written = lines(&folder);
        }
        let mut found: Vec<_> = written
            .iter()
            .map(|line| (line.request.as_str(), line.outcome.as_str(), line.completion_tokens))
            .collect();
        found.sort_unstable();
        let expected = [("past its deadline", "deadline_exceeded", 0), ("stalled", "client_stalled", 0)];
        assert_eq!(found, expected);
        assert!(written.iter().all(|line| line.prompt_tokens > 0));
        for stream in [1, 3] {
            client.grant(stream, 1 << 20).await;
            let events = client.events(stream).await;
            assert!(matches!(&events[..], [Event::Started(_)]), "{events:?}");
        }
        drop(client);
        cluster.drain.cancel();
        cluster.serving.await.unwrap().unwrap();
        assert_eq!(lines(&folder).len(), 2, "one for each request");
    })
    .await;
}

#[tokio::test]
async fn a_connection_with_more_unread_responses_than_the_budget_is_closed_and_others_are_served() {
    bounded(async {
        let options = Options { unread_bytes_max: 32 << 10, ..Options::default() };
        let (mut cluster, _worker, _session, mut client) = cluster(options).await;
        let input = Some(v1::tokenize_request::Input::Text("unread ".repeat(200)));
        let request = v1::TokenizeRequest { input, ..Default::default() };
        for call in 0..16 {
            client.call(2 * call + 1, "/inflight.v1.Inference/Tokenize", &[], &request).await;
        }
        while client.read().await.is_some() {}
        assert!(count("inflight_connections_closed_total", "reason=\"unread\"") >= 1.0);
        cluster.client.tokenize(request).await.unwrap();
    })
    .await;
}
