//! Streams that are cut off and resumed at another router.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use inflight_proto::v1;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::session_request::Message;
use inflight_router::usage::{UsageRecord, read_usage};
use inflight_router::{HttpOptions, Options};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::cluster::{Cluster, bounded, text, tokens};
use crate::http_client::{Call, Event as ServerEvent, with_http};
use crate::tenants::Folder;
use inflight_scripted::{ScriptedSession, ScriptedWorker, WorkerProfile, sequence};

/// Token id of `<|eot_id|>`.
const EOT: u32 = 284;
const KEY: &[u8] = b"a key that all routers of the cluster share";

/// Tokens of a choice for a seed: with a character split over tokens, and a stop string.
fn answer(seed: u64, choice: u32) -> Vec<u32> {
    let ending = if choice == 1 { "END and more" } else { "" };
    [tokens(&format!("{seed} \u{1f642} caf\u{e9} {choice} {ending}")), vec![EOT]].concat()
}

/// Choices of a session by submission and index: the submission and the tokens left to send.
type Running = BTreeMap<(u64, u32), (v1::Submit, Vec<u32>)>;

/// Plays a worker of several routers: sends every choice's tokens in updates of random size.
async fn play(mut worker: ScriptedWorker, mut random: StdRng, end: CancellationToken) {
    let mut sessions: Vec<(ScriptedSession, Running)> = Vec::new();
    while !end.is_cancelled() {
        tokio::select! {
            biased;
            session = worker.session() => {
                session.grant(64, 1 << 16);
                sessions.push((session, BTreeMap::new()));
            }
            () = tokio::task::yield_now() => {}
        }
        for (session, running) in &mut sessions {
            while let Some(command) = session.try_command() {
                match command {
                    Message::Submit(submit) => begin(&submit, running),
                    Message::Cancel(cancel) => running.retain(|(id, choice), (submit, _)| {
                        let ended =
                            *id == cancel.submission_id && cancel.choice.is_none_or(|only| only == *choice);
                        if ended {
                            session.finish(submit, *choice, &[], v1::FinishReason::Cancelled);
                        }
                        !ended
                    }),
                    other => panic!("a session does not get {other:?}"),
                }
            }
            for ((_, choice), (submit, left)) in running.iter_mut() {
                let now: Vec<u32> = left.drain(..random.random_range(0..=3).min(left.len())).collect();
                let last = left.is_empty();
                let reason = if last { v1::FinishReason::Stop } else { v1::FinishReason::Unspecified };
                session.sequence(sequence(submit, *choice, &now, reason));
            }
            running.retain(|_, (_, left)| !left.is_empty());
        }
    }
}

fn begin(submit: &v1::Submit, running: &mut Running) {
    let sampling = submit.sampling.as_ref().unwrap();
    for choice in 0..sampling.n.unwrap() {
        let whole = answer(sampling.seed.unwrap(), choice);
        let resumed = submit.resumed.iter().find(|resumed| resumed.choice == choice);
        let had = resumed.map_or(&[][..], |resumed| &resumed.token_ids);
        assert!(whole.starts_with(had), "a worker resumes from what workers sent");
        running.insert((submit.submission_id, choice), (submit.clone(), whole[had.len()..].to_vec()));
    }
}

/// Two routers with the same resume key over the same worker.
struct Pair {
    routers: [Cluster; 2],
    folder: Folder,
    end: CancellationToken,
    worker: tokio::task::JoinHandle<()>,
}

impl Pair {
    async fn start(seed: u64) -> Self {
        let folder = Folder::new();
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let options = |number: usize| Options {
            resume_keys: vec![KEY.to_vec()],
            usage_log: Some(folder.0.join(number.to_string())),
            ..with_http(HttpOptions::default())
        };
        let routers =
            [Cluster::start(&[&worker], options(0)).await, Cluster::start(&[&worker], options(1)).await];
        let end = CancellationToken::new();
        let worker = tokio::spawn(play(worker, StdRng::seed_from_u64(seed), end.clone()));
        for router in &routers {
            router.handle.ready().await;
        }
        Self { routers, folder, end, worker }
    }

    /// Ends the routers and returns the usage of each request. Checks that each of the calls has one line.
    async fn usage(self, calls: u64) -> Vec<UsageRecord> {
        for router in self.routers {
            router.drain.cancel();
            router.serving.await.unwrap().unwrap();
        }
        self.end.cancel();
        self.worker.await.unwrap();
        let directories = [0, 1].map(|number| self.folder.0.join(number.to_string()));
        let mut records = Vec::new();
        let reading = read_usage(&directories, None, |record| records.push(record)).unwrap();
        assert_eq!(reading.lines + reading.resumed, calls, "a line for each call");
        assert_eq!((reading.duplicates, reading.torn, reading.damaged), (0, 0, 0));
        records
    }
}

/// What a client has received, in one call or several.
#[derive(Debug, Clone, Default, PartialEq)]
struct Received {
    text: Vec<String>,
    token_ids: Vec<Vec<u32>>,
    finished: Vec<Option<(i32, String, Option<u32>)>>,
    usage: Option<v1::Usage>,
}

fn request(seed: u64) -> v1::GenerateRequest {
    v1::GenerateRequest {
        sampling: Some(v1::SamplingParams { n: Some(3), seed: Some(seed), ..Default::default() }),
        stop: Some(v1::StopConditions { stop: vec!["END".to_owned()], ..Default::default() }),
        resumable: true,
        ..text("a")
    }
}

/// Reads up to `most` messages of a call and returns the last cursor.
async fn read(
    router: &mut Cluster,
    request: v1::GenerateRequest,
    received: &mut Received,
    most: usize,
) -> Result<Option<Vec<u8>>, Status> {
    let mut stream = router.client.generate(request).await?.into_inner();
    let mut last = None;
    for _ in 0..most {
        let Some(message) = stream.message().await? else { break };
        match message.event.unwrap() {
            Event::Started(started) => last = Some(started.cursor),
            Event::Delta(delta) => {
                let choice = delta.choice as usize;
                received.text[choice].push_str(&delta.text);
                received.token_ids[choice].extend(delta.token_ids);
                last = Some(delta.cursor);
            }
            Event::Finished(v1::ChoiceFinished {
                choice,
                reason,
                stop_string,
                stop_token_id,
                cursor,
                ..
            }) => {
                let entry = &mut received.finished[choice as usize];
                assert!(entry.replace((reason, stop_string, stop_token_id)).is_none(), "a choice ends once");
                last = Some(cursor);
            }
            Event::Completed(completed) => received.usage = completed.usage,
            other => panic!("{other:?}"),
        }
    }
    Ok(last)
}

fn nothing() -> Received {
    let (text, token_ids, finished) = (vec![String::new(); 3], vec![Vec::new(); 3], vec![None; 3]);
    Received { text, token_ids, finished, usage: None }
}

fn resume(cursor: &[u8], received: &Received) -> v1::Resume {
    let choices = received.token_ids.iter().map(|ids| v1::TokenIds { ids: ids.clone() });
    v1::Resume { cursor: cursor.to_vec(), choices: choices.collect() }
}

#[tokio::test]
async fn a_stream_cut_anywhere_and_resumed_at_another_router_is_the_same_and_billed_once() {
    for seed in 1..=4 {
        println!("seed {seed}");
        bounded(async {
            let mut pair = Pair::start(seed).await;
            let mut random = StdRng::seed_from_u64(seed);
            let mut whole = nothing();
            read(&mut pair.routers[0], request(9), &mut whole, usize::MAX).await.unwrap();
            let usage = whole.usage.take().unwrap();
            let mut calls = 1;
            for _ in 0..25 {
                let (mut received, mut cursor, mut router) = (nothing(), None, 0);
                while received.usage.is_none() {
                    let resume = cursor.as_deref().map(|cursor| resume(cursor, &received));
                    let request = v1::GenerateRequest { resume, ..request(9) };
                    let most = random.random_range(1..9);
                    let last =
                        read(&mut pair.routers[router % 2], request, &mut received, most).await.unwrap();
                    cursor = last.or(cursor);
                    router += 1;
                    calls += 1;
                }
                let counts = received.usage.take().unwrap();
                assert_eq!(received, whole);
                assert_eq!(
                    (counts.prompt_tokens, counts.completion_tokens),
                    (usage.prompt_tokens, usage.completion_tokens)
                );
            }
            let records = pair.usage(calls).await;
            let found: Vec<_> =
                records.iter().map(|record| (record.prompt_tokens, record.completion_tokens)).collect();
            let once = (u64::from(usage.prompt_tokens), u64::from(usage.completion_tokens));
            assert_eq!(found, vec![once; 26], "one line for each stream, with all of its tokens");
        })
        .await;
    }
}

/// Endpoints with the rest of their bodies.
const ENDPOINTS: [(&str, &str); 4] = [
    (
        "/v1/chat/completions",
        r#"{"messages":[{"role":"user","content":"a"}],"n":3,"stop":"END","stream_options":{"include_usage":true}"#,
    ),
    ("/v1/completions", r#"{"prompt":"a","n":3,"stop":["END"],"echo":true,"max_tokens":99"#),
    ("/v1/responses", r#"{"input":"a""#),
    ("/v1/messages", r#"{"max_tokens":99,"messages":[{"role":"user","content":"a"}]"#),
];

async fn ask(
    address: SocketAddr,
    path: &str,
    ask: &str,
    cursor: Option<&str>,
) -> Result<Vec<ServerEvent>, (u16, Value)> {
    let body = format!(r#"{ask},"stream":true,"seed":9}}"#);
    let mut headers = vec![("x-request-id", "r")];
    headers.extend(cursor.map(|cursor| ("last-event-id", cursor)));
    let response = Call::send(address, "POST", path, &headers, body.as_bytes()).await.response().await;
    match response.status {
        200 => Ok(crate::http_client::parse_events(&response.body)),
        status => Err((status, response.json())),
    }
}

/// Returns the events without what depends on how output was divided into events: deltas of a choice are
/// joined, and times and numbers dropped.
fn normalized(events: &[ServerEvent]) -> Vec<String> {
    let mut joined: BTreeMap<String, String> = BTreeMap::new();
    let mut others = Vec::new();
    for event in events.iter().filter(|event| event.data != "[DONE]") {
        let mut value = event.json();
        for key in ["created", "created_at", "sequence_number", "timings"] {
            value.as_object_mut().unwrap().remove(key);
        }
        if let Some(response) = value.get_mut("response").and_then(Value::as_object_mut) {
            response.remove("created_at");
        }
        let delta = [
            ("/choices/0/delta/content", "/choices/0/index"),
            ("/choices/0/text", "/choices/0/index"),
            ("/delta/text", "/index"),
            ("/delta", "/content_index"),
        ];
        let text = delta.iter().find_map(|(text, index)| {
            let found = value.pointer(text)?.as_str()?.to_owned();
            Some((found, value.pointer(index).cloned().unwrap_or_default(), *text))
        });
        match text {
            Some((text, index, pointer)) if value.pointer("/choices/0/delta/role").is_none() => {
                joined.entry(index.to_string()).or_default().push_str(&text);
                *value.pointer_mut(pointer).unwrap() = Value::Null;
                if value.pointer("/choices/0/finish_reason").is_some_and(|reason| !reason.is_null()) {
                    others.push(value.to_string());
                }
            }
            _ => others.push(value.to_string()),
        }
    }
    // The order between choices is that of the updates.
    if events.iter().any(|event| event.data.contains("\"choices\"")) {
        others.sort();
    }
    others.extend(joined.into_iter().map(|(index, text)| format!("{index}: {text}")));
    others
}

#[tokio::test]
async fn events_after_the_last_event_id_are_those_that_were_missed() {
    for seed in 1..=2 {
        println!("seed {seed}");
        bounded(async {
            let pair = Pair::start(seed).await;
            let addresses = pair.routers.each_ref().map(|router| router.http.unwrap());
            let mut calls = 0;
            for (path, body) in ENDPOINTS {
                let whole = ask(addresses[0], path, body, None).await.unwrap();
                let done = whole.len() - usize::from(whole.last().unwrap().data == "[DONE]");
                let without = whole[..done].iter().find(|event| event.id.is_none());
                assert_eq!(without, None, "every event of {path} has an id");
                calls += 1 + done as u64;
                for cut in 1..=done {
                    let cursor = whole[cut - 1].id.as_deref();
                    let rest = ask(addresses[cut % 2], path, body, cursor).await.unwrap();
                    let events = [&whole[..cut], &rest[..]].concat();
                    assert_eq!(normalized(&events), normalized(&whole), "{path} cut after {cut} events");
                    if path == "/v1/responses" {
                        let numbers = events.iter().map(|event| event.json()["sequence_number"].clone());
                        let expected: Vec<Value> = (0..events.len()).map(|number| json!(number)).collect();
                        assert_eq!(numbers.collect::<Vec<_>>(), expected, "cut after {cut} events");
                    }
                }
            }
            assert_eq!(pair.usage(calls).await.len(), ENDPOINTS.len(), "each stream is billed once");
        })
        .await;
    }
}

#[tokio::test]
async fn forged_foreign_and_changed_cursors_are_refused() {
    bounded(async {
        let mut pair = Pair::start(1).await;
        let mut received = nothing();
        let cursor = read(&mut pair.routers[0], request(9), &mut received, 5).await.unwrap().unwrap();
        let router = &mut pair.routers[1];
        let refused = async |router: &mut Cluster, request: v1::GenerateRequest| {
            let status = read(router, request, &mut nothing(), 1).await.unwrap_err();
            (status.code(), status.get_details_error_info().unwrap().reason)
        };
        let valid = resume(&cursor, &received);
        let with = |resume: v1::Resume| v1::GenerateRequest { resume: Some(resume), ..request(9) };
        let mut forged = cursor.clone();
        forged[20] ^= 1;
        let mut other_tokens = received.clone();
        other_tokens.token_ids[0].push(7);
        let mut fewer = valid.clone();
        fewer.choices.pop();
        for changed in [
            resume(&forged, &received),
            resume(&[], &received),
            resume(&cursor, &other_tokens),
            resume(&cursor, &nothing()),
            fewer,
        ] {
            assert_eq!(refused(router, with(changed)).await, (Code::InvalidArgument, "INVALID".to_owned()));
        }
        let changes: [fn(&mut v1::GenerateRequest); 5] = [
            |request| request.input = text("b").input,
            |request| request.tenant = "other".to_owned(),
            |request| request.sampling.as_mut().unwrap().n = Some(2),
            |request| request.sampling.as_mut().unwrap().top_p = Some(0.5),
            |request| request.stop.as_mut().unwrap().stop.clear(),
        ];
        for change in changes {
            let mut request = with(valid.clone());
            change(&mut request);
            let reason = "CURSOR_REJECTED".to_owned();
            assert_eq!(refused(router, request).await, (Code::FailedPrecondition, reason));
        }
        // The seed is that of the cursor, whatever the request says.
        let mut request = with(valid.clone());
        request.sampling.as_mut().unwrap().seed = None;
        let mut rest = received.clone();
        read(router, request, &mut rest, usize::MAX).await.unwrap();
        assert!(rest.finished.iter().all(Option::is_some));
        let unary = router.client.generate_unary(with(valid)).await.unwrap_err();
        assert_eq!(unary.code(), Code::InvalidArgument);

        let address = pair.routers[0].http.unwrap();
        let (path, body) = ENDPOINTS[0];
        let events = ask(address, path, body, None).await.unwrap();
        let cursor = events[4].id.as_deref();
        for forged in ["", "x", "AAAA", &"A".repeat(300)] {
            let (status, error) = ask(address, path, body, Some(forged)).await.unwrap_err();
            assert_eq!(status, 400, "{forged}: {error}");
        }
        let other = body.replace("\"a\"", "\"b\"");
        let (status, error) = ask(address, path, &other, cursor).await.unwrap_err();
        assert_eq!((status, &error["error"]["code"]), (409, &json!("cursor_rejected")));
        let two = r#"{"prompt":["a","b"]"#;
        assert_eq!(ask(address, "/v1/completions", two, cursor).await.unwrap_err().0, 400);
        let several = ask(address, "/v1/completions", two, None).await.unwrap();
        assert!(
            several.iter().all(|event| event.id.is_none()),
            "responses to several prompts have no cursors"
        );
    })
    .await;
}

#[tokio::test]
async fn a_stream_is_resumed_with_the_same_tokens_or_not_at_all() {
    bounded(async {
        let options = || Options { resume_keys: vec![KEY.to_vec()], ..with_http(HttpOptions::default()) };
        let mut first = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut one = Cluster::start(&[&first], options()).await;
        let mut session = first.granted().await;
        one.handle.ready().await;
        let request = || v1::GenerateRequest { resumable: true, ..text("a") };
        let mut stream = one.client.generate(request()).await.unwrap().into_inner();
        let submit = session.submit().await;
        session.tokens(&submit, 0, &tokens("xy"));
        let mut cursor = Vec::new();
        let mut ids = Vec::new();
        while ids.len() < 2 {
            match stream.message().await.unwrap().unwrap().event.unwrap() {
                Event::Delta(delta) => {
                    ids.extend(delta.token_ids);
                    cursor = delta.cursor;
                }
                Event::Started(_) => {}
                other => panic!("{other:?}"),
            }
        }
        drop(stream);
        session.cancel().await;
        let again = || v1::GenerateRequest {
            resume: Some(v1::Resume {
                cursor: cursor.clone(),
                choices: vec![v1::TokenIds { ids: tokens("xy") }],
            }),
            ..request()
        };
        // The worker generates the last token again, but another one.
        let mut stream = one.client.generate(again()).await.unwrap().into_inner();
        let submit = session.submit().await;
        assert_eq!(submit.resumed[0].token_ids, tokens("x"));
        session.tokens(&submit, 0, &tokens("z"));
        let failed = loop {
            match stream.message().await {
                Ok(message) => assert!(matches!(message.unwrap().event, Some(Event::Started(_)))),
                Err(status) => break status,
            }
        };
        assert_eq!(
            (failed.code(), failed.get_details_error_info().unwrap().reason.as_str()),
            (Code::FailedPrecondition, "RESUME_DIVERGED")
        );
        // A cluster whose workers have another fingerprint.
        let mut other =
            ScriptedWorker::start(WorkerProfile { fingerprint: "f2", ..WorkerProfile::default() }).await;
        let mut two = Cluster::start(&[&other], options()).await;
        let _session = other.granted().await;
        two.handle.ready().await;
        let failed = two.client.generate(again()).await.unwrap_err();
        assert_eq!(
            (failed.code(), failed.get_details_error_info().unwrap().reason.as_str()),
            (Code::FailedPrecondition, "UNKNOWN_FINGERPRINT")
        );
        // A router with another key.
        let mut three = Cluster::start(&[&other], with_http(HttpOptions::default())).await;
        let _session = other.granted().await;
        three.handle.ready().await;
        let failed = three.client.generate(again()).await.unwrap_err();
        assert_eq!(failed.code(), Code::InvalidArgument);
        assert!(failed.message().contains("--resume-key-file"), "{}", failed.message());
    })
    .await;
}
