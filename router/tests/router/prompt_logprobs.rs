//! Log probabilities of prompts: order and failover, workers that break the rules, the HTTP APIs.

use inflight_proto::v1;
use inflight_router::{HttpOptions, Options, RouterStats};
use serde_json::{Value, json};

use crate::cluster::{Cluster, bounded, text, tokens};
use crate::http_client::{HttpCluster, with_http};
use inflight_scripted::{ScriptedWorker, WorkerProfile, sequence};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;
const RUNNING: v1::FinishReason = v1::FinishReason::Unspecified;

/// Returns the scores of the prompt tokens from `first` to `end`: the logprob of each is its negative position,
/// its rank twice the position, and its one alternative is token 9.
fn scores(submit: &v1::Submit, first: usize, end: usize) -> Vec<v1::PromptTokenLogprobs> {
    let score = |at: usize| v1::PromptTokenLogprobs {
        token: Some(v1::TokenLogprob { token_id: submit.prompt_token_ids[at], logprob: -(at as f32) }),
        rank: 2 * at as u32,
        top: vec![v1::TokenLogprob { token_id: 9, logprob: -0.5 }],
    };
    (first..end).map(score).collect()
}

/// Returns an update with scores and output.
fn scored(
    submit: &v1::Submit,
    prompt_logprobs: Vec<v1::PromptTokenLogprobs>,
    output: &[u32],
    reason: v1::FinishReason,
) -> v1::SequenceUpdate {
    v1::SequenceUpdate { prompt_logprobs, ..sequence(submit, 0, output, reason) }
}

fn request(n: u32) -> v1::GenerateRequest {
    let sampling = v1::SamplingParams { prompt_logprobs: Some(1), n: Some(n), ..Default::default() };
    v1::GenerateRequest { sampling: Some(sampling), ..text("abcdefgh") }
}

#[tokio::test]
async fn each_position_is_delivered_once_and_before_the_output_whatever_happens_to_workers() {
    bounded(async {
        let mut workers = [
            ScriptedWorker::start(WorkerProfile::default()).await,
            ScriptedWorker::start(WorkerProfile::default()).await,
        ];
        let mut cluster = Cluster::start(&[&workers[0], &workers[1]], Options::default()).await;
        let (mut first, mut second) = (workers[0].granted().await, workers[1].session().await);
        cluster.handle.ready().await;
        let mut stream = cluster.generate(request(2)).await.unwrap();
        let submit = first.submit().await;
        let end = submit.prompt_token_ids.len();
        assert_eq!(submit.sampling.as_ref().unwrap().prompt_logprobs, Some(1));
        first.sequence(scored(&submit, scores(&submit, 1, 3), &[], RUNNING));
        // The second choice has computed the prompt itself, as the first was preempted.
        first.tokens(&submit, 1, &tokens("x"));
        first.sequence(scored(&submit, scores(&submit, 3, 4), &[], RUNNING));
        while stream.prompt_logprobs.iter().map(|part| part.positions.len()).sum::<usize>() < 3 {
            stream.advance().await.unwrap();
        }
        assert!(stream.text[1].is_empty(), "the output waits for the whole prompt");
        first.break_stream();

        second.grant(64, 1000);
        let again = second.submit().await;
        assert_eq!((again.prompt_logprobs_received, again.resumed.len()), (3, 1));
        second.sequence(scored(&again, scores(&again, 4, end), &tokens("y"), LENGTH));
        second.finish(&again, 1, &tokens("z"), LENGTH);
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[..2], ["y", "xz"]);
        let mut next = 1;
        for part in &stream.prompt_logprobs {
            assert_eq!(part.first_position, next);
            next += part.positions.len() as u32;
        }
        let got: Vec<_> = stream.prompt_logprobs.iter().flat_map(|part| part.positions.clone()).collect();
        assert_eq!(got, scores(&submit, 1, end));

        // In one message, and without any output.
        let stop = Some(v1::StopConditions { max_tokens: Some(0), ..Default::default() });
        let mut client = cluster.client.clone();
        let call =
            tokio::spawn(
                async move { client.generate_unary(v1::GenerateRequest { stop, ..request(1) }).await },
            );
        let submit = second.submit().await;
        assert_eq!(submit.stop.as_ref().unwrap().max_tokens, Some(1));
        second.sequence(scored(&submit, scores(&submit, 1, end), &tokens("y"), LENGTH));
        let response = call.await.unwrap().unwrap().into_inner();
        assert_eq!(response.prompt_logprobs, scores(&submit, 1, end));
        let usage = response.usage.unwrap();
        assert_eq!((response.choices[0].text.as_str(), usage.completion_tokens), ("", 0));
        assert_eq!(response.choices[0].reason(), LENGTH);
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_breaks_the_rules_of_the_prompt_loses_its_session() {
    type Break = fn(&v1::Submit) -> v1::SequenceUpdate;
    let breaks: [(&str, Break); 4] = [
        ("more than the prompt has", |submit| {
            let twice = [scores(submit, 1, 9), scores(submit, 1, 9)].concat();
            scored(submit, twice, &[], RUNNING)
        }),
        ("output before they are complete", |submit| scored(submit, scores(submit, 1, 3), &[7], RUNNING)),
        ("too many alternatives", |submit| {
            let mut many = scores(submit, 1, 3);
            many[1].top = vec![v1::TokenLogprob::default(); 2];
            scored(submit, many, &[], RUNNING)
        }),
        ("a token outside the vocabulary", |submit| {
            let mut unknown = scores(submit, 1, 3);
            unknown[0].top[0].token_id = 285;
            scored(submit, unknown, &[], RUNNING)
        }),
    ];
    bounded(async {
        for (what, broken) in breaks {
            let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
            let mut cluster = Cluster::start(&[&worker], Options::default()).await;
            let mut session = worker.granted().await;
            cluster.handle.ready().await;
            let _stream = cluster.generate(request(1)).await.unwrap();
            let submit = session.submit().await;
            session.sequence(broken(&submit));
            assert!(session.closed().await, "{what}");
        }
    })
    .await;
}

/// Posts a body and answers its one prompt, with the output "!".
async fn answer(http: &mut HttpCluster, path: &str, body: &str) -> (Value, v1::Submit) {
    let call = http.post(path, body).await;
    let submit = http.session.submit().await;
    let end = submit.prompt_token_ids.len();
    let logprobs = vec![v1::PositionLogprobs {
        chosen: Some(v1::TokenLogprob { token_id: tokens("!")[0], logprob: -0.25 }),
        top: Vec::new(),
    }];
    let update = scored(&submit, scores(&submit, 1, end), &tokens("!"), LENGTH);
    let wanted = submit.sampling.as_ref().unwrap().logprobs.is_some();
    http.session
        .sequence(v1::SequenceUpdate { logprobs: if wanted { logprobs } else { Vec::new() }, ..update });
    let response = call.response().await;
    assert_eq!(response.status, 200, "{response:?}");
    let body = match response.body.strip_prefix("data: ") {
        // The first event of a stream.
        Some(events) => serde_json::from_str(events.split("\n\n").next().unwrap()).unwrap(),
        None => response.json(),
    };
    (body, submit)
}

#[tokio::test]
async fn log_probabilities_of_more_prompt_tokens_in_all_choices_than_a_response_has_are_refused() {
    bounded(async {
        let http = HttpCluster::ungranted(WorkerProfile::default(), with_http(HttpOptions::default())).await;
        let prompts = json!(vec![vec![97; 7]; 128]);
        for (more, param) in [
            (r#""echo": true, "logprobs": 20"#, "logprobs"),
            (r#""echo": true, "logprobs": 20, "stream": true"#, "logprobs"),
            (r#""prompt_logprobs": 20"#, "prompt_logprobs"),
        ] {
            let body = format!(r#"{{"prompt": {prompts}, "max_tokens": 1, "n": 16, {more}}}"#);
            let (status, error) = http.refused("/v1/completions", &body).await;
            assert_eq!((status, &error["param"]), (400, &json!(param)), "{more}: {error}");
            let words = "of 896 prompt tokens in each of 16 choices; at most 12288 are returned";
            assert!(error["message"].as_str().unwrap().contains(words), "{error}");
            // Its requests leave the queue.
            while http.cluster.handle.stats() != RouterStats::default() {
                tokio::task::yield_now().await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn echoed_prompts_and_the_field_of_vllm_have_the_log_probabilities_of_the_prompt() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        for stream in [false, true] {
            let body = format!(
                r#"{{"prompt": "n\u00e9!", "echo": true, "logprobs": 1, "max_tokens": 1, "stream": {stream}}}"#
            );
            let (response, submit) = answer(&mut http, "/v1/completions", &body).await;
            assert_eq!(submit.sampling.unwrap().prompt_logprobs, Some(1));
            let choice = &response["choices"][0];
            assert_eq!(choice["text"], "n\u{e9}!!");
            let logprobs = &choice["logprobs"];
            // A special token, then n, the two bytes of é, the prompt's ! and the output.
            assert_eq!(submit.prompt_token_ids.len(), 5);
            let names = ["<|begin_of_text|>", "n", "bytes:\\xc3", "bytes:\\xa9", "!", "!"];
            assert_eq!(logprobs["tokens"], json!(names));
            assert_eq!(logprobs["token_logprobs"], json!([null, -1.0, -2.0, -3.0, -4.0, -0.25]));
            assert_eq!(logprobs["text_offset"], json!([0, 0, 1, 1, 2, 3]));
            let alternatives = logprobs["top_logprobs"].as_array().unwrap();
            assert_eq!((&alternatives[0], alternatives.len()), (&Value::Null, 6));
            assert_eq!(alternatives[1]["n"], -1.0);
            assert_eq!(alternatives[1].as_object().unwrap().len(), 2);
            assert_eq!(choice.get("prompt_logprobs"), None);
        }

        // Scoring alone: lm-eval's and OpenAI's older form.
        let body = r#"{"prompt": "ab", "echo": true, "logprobs": 0, "prompt_logprobs": 1, "max_tokens": 0}"#;
        let (response, submit) = answer(&mut http, "/v1/completions", body).await;
        let (choice, usage) = (&response["choices"][0], &response["usage"]);
        assert_eq!((choice["text"].as_str(), usage["completion_tokens"].as_u64()), (Some("ab"), Some(0)));
        assert_eq!(choice["finish_reason"], "length");
        let tokens = submit.prompt_token_ids.len();
        assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), tokens);
        assert_eq!(choice["logprobs"]["top_logprobs"][1].as_object().unwrap().len(), 1);
        assert_eq!(choice["prompt_logprobs"].as_array().unwrap().len(), tokens);

        let body = r#"{"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1}"#;
        let (response, submit) = answer(&mut http, "/v1/chat/completions", body).await;
        let prompt = response["prompt_logprobs"].as_array().unwrap();
        assert_eq!((prompt.len(), &prompt[0]), (submit.prompt_token_ids.len(), &Value::Null));
        let second = submit.prompt_token_ids[1].to_string();
        assert_eq!(prompt[1][&second]["logprob"], -1.0);
        assert_eq!(prompt[1][&second]["rank"], 2);
        assert_eq!(prompt[1]["9"]["rank"], 1);
        assert!(prompt[1]["9"]["decoded_token"].is_string());
    })
    .await;
}

#[tokio::test]
async fn a_scored_prompt_that_fills_the_context_is_refused_with_what_was_sent() {
    bounded(async {
        let profile = WorkerProfile { context_tokens: 8, ..WorkerProfile::default() };
        let http = HttpCluster::over(profile, with_http(HttpOptions::default())).await;
        let body = json!({"prompt": [1, 2, 3, 4, 5, 6, 7, 8], "max_tokens": 0, "echo": true, "logprobs": 1, "top_p": 0});
        let response = http.post("/v1/completions", &body.to_string()).await.response().await;
        let message = response.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert_eq!(response.status, 400, "{message}");
        assert!(message.contains("8 tokens; with max_tokens = 0 it has at most 7"), "{message}");
    })
    .await;
}
