//! Bytes that earlier releases put on the wire still mean the same: `wire/VERSION.txt`, made by `examples/record_wire`.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use inflight_proto::v1;
use inflight_proto::v1::session_request::Message as FromRouter;
use inflight_proto::v1::session_response::Message as FromWorker;
use inflight_tests::RecordedMessage;
use prost::Message;

const RELEASES: [(&str, &str); 1] = [("0.1.0", include_str!("../wire/0.1.0.txt"))];

/// Decodes and encodes again: a field that is gone, or whose number or type has changed, leaves other bytes.
fn again<M: Message + Default>(bytes: &[u8]) -> Result<(M, Vec<u8>)> {
    let message = M::decode(bytes)?;
    let encoded = message.encode_to_vec();
    Ok((message, encoded))
}

fn plain<M: Message + Default>(bytes: &[u8]) -> Result<Vec<u8>> {
    Ok(again::<M>(bytes)?.1)
}

#[test]
fn bytes_of_earlier_releases_decode_to_what_they_meant() -> Result<()> {
    for (release, recording) in RELEASES {
        let (mut requests, mut seen) = (Vec::new(), BTreeSet::new());
        for (number, line) in recording.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
            let at = || format!("{release}, line {}", number + 1);
            let RecordedMessage { method, request, bytes } = RecordedMessage::parse(line).with_context(at)?;
            let (_, method) = method.rsplit_once('/').with_context(at)?;
            let encoded = match (method, request) {
                ("Generate", true) => {
                    let (message, encoded) = again::<v1::GenerateRequest>(&bytes)?;
                    requests.push(message);
                    encoded
                }
                ("Generate", false) => plain::<v1::GenerateResponse>(&bytes)?,
                ("ListModels", true) => plain::<v1::ListModelsRequest>(&bytes)?,
                ("ListModels", false) => plain::<v1::ListModelsResponse>(&bytes)?,
                ("Tokenize", true) => plain::<v1::TokenizeRequest>(&bytes)?,
                ("Tokenize", false) => plain::<v1::TokenizeResponse>(&bytes)?,
                ("Diagnose", true) => plain::<v1::DiagnoseRequest>(&bytes)?,
                ("Diagnose", false) => plain::<v1::DiagnoseResponse>(&bytes)?,
                ("FetchBundle", true) => plain::<v1::FetchBundleRequest>(&bytes)?,
                ("FetchBundle", false) => plain::<v1::FetchBundleResponse>(&bytes)?,
                ("Session", true) => {
                    let (message, encoded) = again::<v1::SessionRequest>(&bytes)?;
                    seen.insert(match message.message.with_context(at)? {
                        FromRouter::Open(_) => "open",
                        FromRouter::Submit(submit) if !submit.resumed.is_empty() => "resumed",
                        FromRouter::Submit(_) => "submit",
                        FromRouter::Cancel(_) => "cancel",
                        FromRouter::ServiceTable(_) => "services",
                        FromRouter::Backlog(_) => "backlog",
                        FromRouter::ResyncPrefixCache(_) => "resync",
                    });
                    encoded
                }
                ("Session", false) => {
                    let (message, encoded) = again::<v1::SessionResponse>(&bytes)?;
                    match message.message.with_context(at)? {
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
                    encoded
                }
                other => anyhow::bail!("{}: a method that is gone: {other:?}", at()),
            };
            ensure!(encoded == bytes, "{}: {method} has lost something", at());
        }
        for kind in [
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
        ] {
            ensure!(seen.contains(kind), "{release} has no {kind}: the recording shows less than it should");
        }
        check_request(requests.first().with_context(|| format!("{release} has no request"))?)?;
    }
    Ok(())
}

/// The request that `record_wire` makes first, field by field: fields of one type that changed places would show here.
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
