//! Wire compatibility: messages recorded from earlier releases (`wire/VERSION.txt`, by
//! `examples/record_wire`) decode.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use inflight_harness::RecordedMessage;
use inflight_proto::v1;
use inflight_proto::v1::session_request::Message as FromRouter;
use inflight_proto::v1::session_response::Message as FromWorker;
use prost::Message;

/// Recording of a release, and what must be in it.
struct Release {
    version: &'static str,
    recording: &'static str,
    /// What it must contain, by the release that introduced it: message types, message fields, and RPCs with a response.
    kinds: &'static [&'static [&'static str]],
}

const RELEASES: [Release; 2] = [
    Release { version: "0.1.0", recording: include_str!("../wire/0.1.0.txt"), kinds: &[&SINCE_0_1] },
    Release {
        version: "0.2.0",
        recording: include_str!("../wire/0.2.0.txt"),
        kinds: &[&SINCE_0_1, &SINCE_0_2],
    },
];
const SINCE_0_1: [&str; 14] = [
    "open",
    "submit",
    "resumed",
    "cancel",
    "hello",
    "tokens",
    "logprobs",
    "ends",
    "load",
    "grant",
    "kv events",
    "kv snapshot",
    "cost",
    "charges",
];
const SINCE_0_2: [&str; 10] = [
    "prompt logprobs",
    "constraint",
    "tools",
    "resume",
    "GenerateUnary",
    "Observe",
    "ListRequests",
    "GetRequest",
    "Watch",
    "DiagnoseCluster",
];

/// Decodes a message and encodes it again: a removed, renumbered or retyped field changes the bytes.
fn round_trip<M: Message + Default>(bytes: &[u8]) -> Result<(M, Vec<u8>)> {
    let message = M::decode(bytes)?;
    let encoded = message.encode_to_vec();
    Ok((message, encoded))
}

fn reencoded<M: Message + Default>(bytes: &[u8]) -> Result<Vec<u8>> {
    Ok(round_trip::<M>(bytes)?.1)
}

/// Decodes and encodes again a message of any method but `Session`; adds a request for tokens to `requests`.
fn reencoded_by_method(
    method: &str,
    is_request: bool,
    bytes: &[u8],
    requests: &mut Vec<v1::GenerateRequest>,
) -> Result<Vec<u8>> {
    match (method, is_request) {
        ("Generate" | "GenerateUnary", true) => {
            let (message, encoded) = round_trip::<v1::GenerateRequest>(bytes)?;
            requests.push(message);
            Ok(encoded)
        }
        ("Generate", false) => reencoded::<v1::GenerateResponse>(bytes),
        ("GenerateUnary", false) => reencoded::<v1::GenerateUnaryResponse>(bytes),
        ("ListModels", true) => reencoded::<v1::ListModelsRequest>(bytes),
        ("ListModels", false) => reencoded::<v1::ListModelsResponse>(bytes),
        ("Tokenize", true) => reencoded::<v1::TokenizeRequest>(bytes),
        ("Tokenize", false) => reencoded::<v1::TokenizeResponse>(bytes),
        ("Diagnose", true) => reencoded::<v1::DiagnoseRequest>(bytes),
        ("Diagnose", false) => reencoded::<v1::DiagnoseResponse>(bytes),
        ("FetchBundle", true) => reencoded::<v1::FetchBundleRequest>(bytes),
        ("FetchBundle", false) => reencoded::<v1::FetchBundleResponse>(bytes),
        ("Challenge", true) => reencoded::<v1::ChallengeRequest>(bytes),
        ("Challenge", false) => reencoded::<v1::ChallengeResponse>(bytes),
        ("Observe", true) => reencoded::<v1::ObserveRequest>(bytes),
        ("Observe", false) => reencoded::<v1::ObserveResponse>(bytes),
        ("ListRequests", true) => reencoded::<v1::ListRequestsRequest>(bytes),
        ("ListRequests", false) => reencoded::<v1::ListRequestsResponse>(bytes),
        ("GetRequest", true) => reencoded::<v1::GetRequestRequest>(bytes),
        ("GetRequest", false) => reencoded::<v1::GetRequestResponse>(bytes),
        ("Watch", true) => reencoded::<v1::WatchRequest>(bytes),
        ("Watch", false) => reencoded::<v1::WatchResponse>(bytes),
        ("DiagnoseCluster", true) => reencoded::<v1::DiagnoseClusterRequest>(bytes),
        ("DiagnoseCluster", false) => reencoded::<v1::DiagnoseClusterResponse>(bytes),
        other => anyhow::bail!("unknown method: {other:?}"),
    }
}

/// The same for a message of a session between router and worker; adds its kinds to `seen`.
fn reencoded_of_session(
    is_request: bool,
    bytes: &[u8],
    seen: &mut BTreeSet<&'static str>,
) -> Result<Vec<u8>> {
    if is_request {
        let (message, encoded) = round_trip::<v1::SessionRequest>(bytes)?;
        seen.insert(match message.message.context("an empty message")? {
            FromRouter::Open(_) => "open",
            FromRouter::Submit(submit) if !submit.resumed.is_empty() => "resumed",
            FromRouter::Submit(_) => "submit",
            FromRouter::Cancel(_) => "cancel",
            FromRouter::ServiceTable(_) => "services",
            FromRouter::Backlog(_) => "backlog",
            FromRouter::ResyncPrefixCache(_) => "resync",
        });
        return Ok(encoded);
    }
    let (message, encoded) = round_trip::<v1::SessionResponse>(bytes)?;
    match message.message.context("an empty message")? {
        FromWorker::Hello(_) => _ = seen.insert("hello"),
        FromWorker::Update(update) => {
            let has = [
                ("tokens", update.sequences.iter().any(|s| !s.token_ids.is_empty())),
                ("logprobs", update.sequences.iter().any(|s| !s.logprobs.is_empty())),
                ("ends", update.sequences.iter().any(|s| s.finish_reason != 0)),
                ("load", update.load.is_some()),
                ("grant", update.grant.is_some()),
                ("kv events", update.kv_events.is_some()),
                ("kv snapshot", update.kv_snapshot.is_some()),
                ("cost", update.cost.is_some()),
                ("charges", !update.services.is_empty()),
            ];
            seen.extend(has.into_iter().filter(|(_, has)| *has).map(|(what, _)| what));
        }
    }
    Ok(encoded)
}

#[test]
fn messages_of_earlier_releases_decode_without_loss() -> Result<()> {
    for Release { version, recording, kinds } in RELEASES {
        let kinds = kinds.concat();
        let (mut requests, mut seen) = (Vec::new(), BTreeSet::new());
        for (number, line) in recording.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
            let at = || format!("{version}, line {}", number + 1);
            let RecordedMessage { method, request, bytes } = RecordedMessage::parse(line).with_context(at)?;
            let (_, method) = method.rsplit_once('/').with_context(at)?;
            let encoded = if method == "Session" {
                reencoded_of_session(request, &bytes, &mut seen).with_context(at)?
            } else {
                seen.extend(kinds.iter().copied().filter(|kind| !request && *kind == method));
                reencoded_by_method(method, request, &bytes, &mut requests).with_context(at)?
            };
            ensure!(encoded == bytes, "{}: {method} changed in the round trip", at());
        }
        for request in &requests {
            let sampling = request.sampling.as_ref();
            let has = [
                ("prompt logprobs", sampling.is_some_and(|sampling| sampling.prompt_logprobs.is_some())),
                ("constraint", sampling.is_some_and(|sampling| sampling.constraint.is_some())),
                ("tools", request.tools.is_some()),
                ("resume", request.resume.is_some()),
            ];
            seen.extend(has.into_iter().filter(|(_, has)| *has).map(|(what, _)| what));
        }
        for kind in kinds {
            ensure!(seen.contains(kind), "{version} has no {kind}: the recording shows less than it should");
        }
        check_request(requests.first().with_context(|| format!("{version} has no request"))?)?;
    }
    Ok(())
}

/// Compares the first request of `record_wire` field by field, which detects swapped fields of one type.
fn check_request(request: &v1::GenerateRequest) -> Result<()> {
    let expected = v1::GenerateRequest {
        model: String::new(),
        input: Some(v1::generate_request::Input::Text("Once upon a time".to_owned())),
        sampling: Some(v1::SamplingParams {
            temperature: Some(0.9),
            top_p: Some(0.95),
            top_k: Some(50),
            min_p: Some(0.01),
            presence_penalty: Some(0.1),
            frequency_penalty: Some(0.2),
            repetition_penalty: Some(1.1),
            logit_bias: [(17, -1.5)].into(),
            logprobs: Some(2),
            seed: Some(7),
            n: Some(2),
            ..v1::SamplingParams::default()
        }),
        stop: Some(v1::StopConditions {
            max_tokens: Some(24),
            min_tokens: 2,
            stop: vec!["###".to_owned()],
            stop_token_ids: vec![1000],
            ignore_eos: true,
        }),
        return_token_ids: true,
        tenant: "acme".to_owned(),
        weight: Some(2.0),
        priority: 3,
        request_id: "recorded".to_owned(),
        ..v1::GenerateRequest::default()
    };
    ensure!(*request == expected, "{request:?}");
    Ok(())
}
