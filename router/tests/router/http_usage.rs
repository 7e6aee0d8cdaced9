//! Usage of the HTTP APIs: in streams, and in the usage log.

use inflight_proto::v1;
use inflight_router::usage::{UsageRecord, read_usage};
use inflight_router::{HttpOptions, Options};
use serde_json::{Value, json};

use crate::cluster::{bounded, tokens};
use crate::http_client::{Call, ENDPOINTS, HttpCluster, parse_events, with_http};
use crate::tenants::Folder;

const LENGTH: v1::FinishReason = v1::FinishReason::Length;

/// Both endpoints whose streams have usage by option, with the beginning of their bodies.
fn optional() -> [(&'static str, &'static str); 2] {
    [ENDPOINTS[0], ENDPOINTS[1]]
}

#[tokio::test]
async fn streamed_usage_comes_only_when_asked_for_between_the_last_finish_and_done() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        for (path, ask) in optional() {
            for options in ["", r#","stream_options":null"#, r#","stream_options":{"include_usage":false}"#] {
                let call = http.post(path, &format!("{ask},\"n\":2,\"stream\":true{options}}}")).await;
                let submit = http.session.submit().await;
                http.session.finish(&submit, 1, &tokens("b"), LENGTH);
                http.session.finish(&submit, 0, &tokens("a"), LENGTH);
                let events = call.events().await;
                let (done, chunks) = events.split_last().unwrap();
                assert_eq!(done.data, "[DONE]", "{path}");
                for chunk in chunks {
                    let chunk = chunk.json();
                    assert!(chunk.get("usage").is_none(), "{path} {options}: {chunk}");
                    assert_eq!(chunk["choices"].as_array().unwrap().len(), 1, "{path} {options}: {chunk}");
                }
            }
            let options = r#""stream":true,"stream_options":{"include_usage":true}"#;
            let call = http.post(path, &format!("{ask},\"n\":2,{options}}}")).await;
            let submit = http.session.submit().await;
            http.session.finish(&submit, 1, &tokens("bcd"), LENGTH);
            http.session.finish(&submit, 0, &tokens("a"), LENGTH);
            let events = call.events().await;
            let [chunks @ .., finish, usage, done] = &events[..] else { panic!("{path}: {events:?}") };
            assert_eq!(done.data, "[DONE]", "{path}");
            assert!(chunks.iter().chain([finish]).all(|chunk| chunk.json()["usage"].is_null()), "{path}");
            assert_eq!(finish.json()["choices"][0]["finish_reason"], "length", "{path}");
            let usage = usage.json();
            assert_eq!(usage["choices"], json!([]), "{path}");
            let prompt = submit.prompt_token_ids.len();
            let counts =
                ["prompt_tokens", "completion_tokens", "total_tokens"].map(|name| &usage["usage"][name]);
            assert_eq!(counts, [&json!(prompt), &json!(4), &json!(prompt + 4)], "{path}");
        }
    })
    .await;
}

#[tokio::test]
async fn continuous_usage_never_decreases_and_ends_at_the_final_counts() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        for (path, ask) in optional() {
            let options = r#""stream_options":{"include_usage":true,"continuous_usage_stats":true}"#;
            let body = format!("{ask},\"n\":2,\"stop\":\"END\",\"stream\":true,{options}}}");
            let mut call = http.post(path, &body).await;
            let submit = http.session.submit().await;
            // A character split over tokens, and a stop string split over updates. Each update is read before
            // the next one is sent.
            let emoji = tokens("🙂");
            let updates = [
                (0, tokens("one"), "one"),
                (1, [tokens("a"), emoji[..1].to_vec()].concat(), "a"),
                (1, [emoji[1..].to_vec(), tokens("E")].concat(), "🙂"),
                (0, tokens("twoE"), "two"),
                (0, tokens("ND and more"), "\"finish_reason\":\"stop\""),
            ];
            let mut read = String::new();
            for (at, (choice, update, seen)) in updates.into_iter().enumerate() {
                http.session.tokens(&submit, choice, &update);
                if at == 0 {
                    assert_eq!(call.head().await.0, 200);
                }
                let start = read.len();
                while !read[start..].contains(seen) {
                    read.push_str(&call.chunk().await.unwrap());
                }
            }
            assert_eq!(http.session.cancel().await.choice, Some(0), "the stop string ends the choice");
            http.session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
            http.session.finish(&submit, 1, &tokens("nd"), LENGTH);
            let events = [parse_events(&read), call.rest().await].concat();
            let chunks: Vec<Value> = events[..events.len() - 1].iter().map(|event| event.json()).collect();
            let counts = |chunk: &Value| {
                ["prompt_tokens", "completion_tokens", "total_tokens"].map(|name| {
                    chunk["usage"][name].as_u64().unwrap_or_else(|| panic!("{path}: no {name} in {chunk}"))
                })
            };
            let so_far: Vec<[u64; 3]> = chunks.iter().map(counts).collect();
            assert!(so_far.is_sorted_by(|one, other| one.iter().zip(other).all(|(one, other)| one <= other)));
            for [prompt, completion, total] in &so_far {
                assert_eq!((*prompt, *total), (submit.prompt_token_ids.len() as u64, prompt + completion));
            }
            let [.., last, end] = &so_far[..] else { panic!("{chunks:?}") };
            assert_eq!(chunks.last().unwrap()["choices"], json!([]), "{path}");
            assert_eq!(last, end, "{path}: the last chunk of a choice, and the final one");
            let distinct: std::collections::BTreeSet<u64> = so_far.iter().map(|counts| counts[1]).collect();
            assert!(distinct.len() >= 5, "{path}: counts grow with the output: {distinct:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn every_prompt_of_a_call_has_one_line_however_the_call_ends() {
    bounded(async {
        let folder = Folder::new();
        let usage_log = Some(folder.0.clone());
        let options = Options { usage_log, ..with_http(HttpOptions::default()) };
        let mut http = HttpCluster::start(options).await;
        let mut expected = Vec::new();
        let mut expect = |request: &str, submit: &v1::Submit, outcome: &'static str, output: u64| {
            expected.push((
                request.to_owned(),
                outcome.to_owned(),
                submit.prompt_token_ids.len() as u64,
                output,
            ));
        };
        let address = http.address;
        let send = async |request: &str, path: &str, body: String| {
            let headers = [("x-request-id", request)];
            Call::send(address, "POST", path, &headers, body.as_bytes()).await
        };
        // Several prompts, streamed and not, of several choices.
        for (name, stream) in [("whole", false), ("streamed", true)] {
            let body = format!(r#"{{"prompt":["a","bb","ccc"],"n":2,"stream":{stream}}}"#);
            let call = send(name, "/v1/completions", body).await;
            for prompt in 0..3 {
                let submit = http.session.submit().await;
                http.session.finish(&submit, 0, &tokens("xyz")[..=prompt], LENGTH);
                http.session.finish(&submit, 1, &tokens("x"), LENGTH);
                let request = if prompt == 0 { name.to_owned() } else { format!("{name}-{prompt}") };
                expect(&request, &submit, "completed", prompt as u64 + 2);
            }
            assert_eq!(call.response().await.status, 200);
        }
        for (at, (path, ask)) in ENDPOINTS.into_iter().enumerate() {
            let call = send(&format!("one-{at}"), path, format!("{ask}}}")).await;
            let submit = http.session.submit().await;
            http.session.finish(&submit, 0, &tokens("xy"), LENGTH);
            assert_eq!(call.response().await.status, 200);
            expect(&format!("one-{at}"), &submit, "completed", 2);

            let streamed = format!("{ask},\"stream\":true}}");
            let call = send(&format!("fails-{at}"), path, streamed.clone()).await;
            let submit = http.session.submit().await;
            http.session.tokens(&submit, 0, &tokens("xyz"));
            http.session.fail(&submit, 0, tonic::Code::Internal);
            assert!(call.events().await.iter().any(|event| event.data.contains("scripted")));
            expect(&format!("fails-{at}"), &submit, "worker_error", 3);

            let mut call = send(&format!("gone-{at}"), path, streamed.clone()).await;
            let submit = http.session.submit().await;
            http.session.tokens(&submit, 0, &tokens("wxyz"));
            assert_eq!(call.head().await.0, 200);
            let mut received = String::new();
            while !received.contains("\"wxyz\"") {
                received.push_str(&call.chunk().await.unwrap());
            }
            drop(call);
            http.session.cancel().await;
            http.session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
            expect(&format!("gone-{at}"), &submit, "cancelled", 4);

            // A client that leaves a call that is not streamed has received nothing.
            let call = send(&format!("left-{at}"), path, format!("{ask}}}")).await;
            let submit = http.session.submit().await;
            drop(call);
            http.session.cancel().await;
            http.session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
            expect(&format!("left-{at}"), &submit, "cancelled", 0);

            // Refused calls have none.
            let refused = send(&format!("refused-{at}"), path, format!("{ask},\"temperature\":-1}}")).await;
            assert_eq!(refused.response().await.status, 400);
        }
        http.cluster.drain.cancel();
        http.cluster.serving.await.unwrap().unwrap();
        let mut records: Vec<UsageRecord> = Vec::new();
        let reading =
            read_usage(std::slice::from_ref(&folder.0), None, |record| records.push(record)).unwrap();
        assert_eq!((reading.lines, reading.duplicates), (expected.len() as u64, 0));
        assert_eq!((reading.resumed, reading.torn, reading.damaged), (0, 0, 0));
        let mut found: Vec<_> = records
            .into_iter()
            .map(|line| (line.request, line.outcome, line.prompt_tokens, line.completion_tokens))
            .collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
    })
    .await;
}
