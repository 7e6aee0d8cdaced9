//! Constraints of the output on every surface: each field of this server and of others either becomes a grammar, which allows what
//! the field says and nothing else, or is refused by its name. None is ignored.

use std::collections::BTreeMap;

use inflight_contract::JsonWhitespace;
use inflight_grammar::{Compiler, Vocabulary};
use inflight_proto::kserve;
use inflight_proto::kserve::grpc_inference_service_client::GrpcInferenceServiceClient;
use inflight_proto::kserve::infer_parameter::ParameterChoice;
use inflight_proto::kserve::model_infer_request::InferInputTensor;
use inflight_proto::v1;
use inflight_proto::v1::constraint::Grammar as Wire;
use inflight_router::{HttpOptions, Options};
use serde_json::{Value, json};
use tonic::Code;

use crate::cluster::{bounded, tokens};
use crate::http_client::{HttpCluster, with_http};
use crate::http_fields::documented;

/// Field of a request with a value, texts that the output may be, and others that it may not.
struct Case {
    field: &'static str,
    value: Value,
    good: &'static [&'static str],
    bad: &'static [&'static str],
}

const JSON_GOOD: &[&str] = &[r#"{"a":1}"#, r#"{"a": 23}"#];
const JSON_BAD: &[&str] = &["{}", "[]", r#"{"a":"1"}"#, "yes", "1", JSON_LINES, r#"{"a" : 1}"#];
/// Allowed by a router with any whitespace.
const JSON_LINES: &str = "{\n  \"a\" : 1\r\n}";
const TEXT_GOOD: &[&str] = &["yes", "no"];
const TEXT_BAD: &[&str] = &["maybe", "yesno", "{}"];

fn schema() -> Value {
    json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false})
}

/// Formats, which APIs have under different names.
fn formats() -> Vec<(Value, &'static [&'static str], &'static [&'static str])> {
    let of = |kind: &str, key: &str, value: Value| json!({"type": kind, key: value});
    vec![
        (of("json_schema", "json_schema", json!({"name": "n", "schema": schema()})), JSON_GOOD, JSON_BAD),
        (of("json_schema", "schema", schema()), JSON_GOOD, JSON_BAD),
        (of("json_object", "schema", schema()), JSON_GOOD, JSON_BAD),
        (of("json_object", "value", schema()), JSON_GOOD, JSON_BAD),
        (json!({"type": "json_object"}), &["{}", r#"{"a":[]}"#], &["[]", "yes"]),
    ]
}

/// Values of the fields that every surface has.
fn cases() -> Vec<Case> {
    let json = |field, value| Case { field, value, good: JSON_GOOD, bad: JSON_BAD };
    let text = |field, value| Case { field, value, good: TEXT_GOOD, bad: TEXT_BAD };
    let (lark, ebnf) = (json!("start: \"yes\" | \"no\""), json!("root ::= \"yes\" | no\nno ::= [n] \"o\""));
    vec![
        json("guided_json", schema()),
        json("guided_json", json!(schema().to_string())),
        json("json_schema", schema()),
        text("guided_regex", json!("yes|no")),
        text("regex", json!("yes|no")),
        text("guided_choice", json!(["yes", "no"])),
        text("guided_grammar", lark.clone()),
        text("guided_grammar", ebnf.clone()),
        json("guided_grammar", json!(format!("start: %json {}", schema()))),
        text("ebnf", ebnf.clone()),
        text("grammar", ebnf.clone()),
        text("grammar", json!({"type": "regex", "value": "yes|no"})),
        text("grammar", json!({"type": "lark", "value": lark})),
        json("grammar", json!({"type": "json", "value": schema()})),
        json("structured_outputs", json!({"json": schema()})),
        text(
            "structured_outputs",
            json!({"regex": "yes|no", "disable_fallback": true, "json_object": false}),
        ),
        text("structured_outputs", json!({"choice": ["yes", "no"]})),
        text("structured_outputs", json!({"grammar": ebnf})),
        Case { field: "structured_outputs", value: json!({"json_object": true}), good: &["{}"], bad: &["1"] },
        json("nvext", json!({"guided_json": schema(), "annotations": []})),
        text("nvext", json!({"guided_choice": ["yes", "no"]})),
    ]
}

/// Values that are refused by the name of their field, with words of the reason.
fn refusals() -> Vec<(&'static str, Value, &'static str)> {
    let recursive = json!("root ::= \"(\" root \")\" | \"x\"");
    vec![
        ("guided_json", json!({"name": "n", "schema": schema()}), "give its schema"),
        ("guided_json", json!("{"), "not valid JSON"),
        ("guided_regex", json!("(["), ""),
        ("guided_grammar", recursive.clone(), "contains itself"),
        ("grammar", recursive.clone(), "contains itself"),
        ("grammar", json!("start: \"a\""), "EBNF"),
        ("grammar", json!({"type": "gbnf", "value": "x"}), "types are"),
        ("ebnf", recursive, "contains itself"),
        ("structured_outputs", json!({"regex": "a", "choice": ["b"]}), "several grammars"),
        ("structured_outputs", json!({"json": {}, "whitespace_pattern": " "}), "whitespace_pattern"),
        ("structured_outputs", json!({"json": {}, "disable_any_whitespace": true}), "disable_any_whitespace"),
        (
            "structured_outputs",
            json!({"json": {}, "disable_additional_properties": true}),
            "additionalProperties",
        ),
        ("structured_outputs", json!({"structural_tag": "{}"}), "structural_tag"),
        ("nvext", json!({"guided_regex": 7}), "nvext.guided_regex must be a string"),
    ]
}

/// Compiler of single bytes.
fn compiler() -> Compiler {
    let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
    let tokens = bytes.iter().map(|byte| (&byte[..], false));
    let vocabulary = Vocabulary::from_tokens(tokens.chain([(&b"<end>"[..], true)]));
    Compiler::new(&vocabulary, 257, &[256]).unwrap()
}

/// Checks that what a worker received allows texts and no others.
fn check(compiler: &Compiler, submit: v1::Submit, good: &[&str], bad: &[&str], place: &str) {
    let constraint = submit.sampling.unwrap().constraint.unwrap_or_else(|| panic!("{place}: no constraint"));
    let is_json = matches!(constraint.grammar, Some(Wire::JsonSchema(_) | Wire::JsonObject(_)));
    let says = constraint.json_whitespace() != v1::JsonWhitespace::Unspecified;
    assert_eq!(says, is_json, "{place}: {constraint:?}");
    let compiled = compiler.compile(&constraint.to_contract().grammar).unwrap();
    let matches = |text: &&str| {
        let mut matcher = compiled.matcher(None);
        text.bytes().all(|byte| matcher.consume(byte.into()).is_ok()) && matcher.is_accepting().unwrap()
    };
    assert!(good.iter().all(matches) && !bad.iter().any(matches), "{place}");
}

/// Generating endpoints: name in the documentation, path, body, and the path of the format in it.
fn apis() -> [(&'static str, &'static str, Value, &'static [&'static str]); 4] {
    let messages = json!([{"role": "user", "content": "a"}]);
    [
        ("chat completions", "/v1/chat/completions", json!({"messages": messages}), &["response_format"]),
        ("completions", "/v1/completions", json!({"prompt": "a"}), &["response_format"]),
        ("responses", "/v1/responses", json!({"input": "a"}), &["text", "format"]),
        (
            "messages",
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 9}),
            &["output_config", "format"],
        ),
    ]
}

/// Names of the constraints that are refused, by the documentation, which a unit test compares with the code.
fn elsewhere() -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/http-api.md");
    let text = std::fs::read_to_string(path).unwrap();
    let section = text.split("### Refused constraints\n").nth(1).unwrap();
    let names = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    names.map(str::to_owned).collect()
}

#[tokio::test]
async fn every_constraint_is_honoured_or_refused_by_name_over_http() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let compiler = compiler();
        for (api, path, body, format) in apis() {
            let with = |field: &str, value: &Value| {
                let mut body = body.clone();
                body[field] = value.clone();
                body.to_string()
            };
            let nested = |value: &Value| match format {
                [outer, inner] => (*outer, json!({(*inner): value})),
                _ => (format[0], value.clone()),
            };
            let own = formats().into_iter().map(|(value, good, bad)| (nested(&value), good, bad));
            let all = cases().into_iter().map(|case| ((case.field, case.value), case.good, case.bad));
            for ((field, value), good, bad) in own.chain(all) {
                let place = format!("{path} {field}: {value}");
                let call = http.post(path, &with(field, &value)).await;
                let mut response = Box::pin(call.response());
                let submit = tokio::select! {
                    submit = http.session.submit() => submit,
                    response = &mut response => panic!("{place}: {response:?}"),
                };
                http.session.finish(&submit, 0, &tokens("a"), v1::FinishReason::Stop);
                assert_eq!(response.await.status, 200, "{place}");
                check(&compiler, submit, good, bad, &place);
            }
            let own = [json!({"type": "regex", "pattern": "a"}), json!({"type": "text", "schema": {}})];
            let own = own.iter().map(nested).map(|(field, value)| (field, value, ""));
            for (field, value, words) in own.chain(refusals()) {
                let refused = http.post(path, &with(field, &value)).await.response().await;
                let error = refused.json()["error"].clone();
                let message = error["message"].as_str().unwrap();
                assert!(
                    refused.status == 400 && message.contains(words),
                    "{path} {field} {value}: {message}"
                );
                let named = message.contains(field) && (path == "/v1/messages" || error["param"] == field);
                assert!(named, "{path} {field} {value}: {error}");
            }
            let own = documented(api);
            for name in elsewhere().iter().filter(|name| !own.contains_key(name.as_str())) {
                let refused = http.post(path, &with(name, &json!({"a": 1}))).await.response().await;
                let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
                assert!(
                    refused.status == 400 && message.starts_with(&format!("{name} is refused: ")),
                    "{path}: {message}"
                );
            }
        }
        assert!(http.session.try_command().is_none());
    })
    .await;
}

/// Request of KServe's API with an input of text.
fn infer(name: &str, texts: &[&str]) -> kserve::ModelInferRequest {
    let bytes = |texts: &[&str]| {
        let contents = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
        Some(kserve::InferTensorContents { bytes_contents: contents, ..Default::default() })
    };
    let input = |name: &str, texts: &[&str]| InferInputTensor {
        name: name.to_owned(),
        datatype: "BYTES".to_owned(),
        shape: vec![texts.len() as i64],
        contents: bytes(texts),
        ..Default::default()
    };
    let mut inputs = vec![input("text_input", &["a"])];
    if !name.is_empty() {
        inputs.push(input(name, texts));
    }
    kserve::ModelInferRequest { model_name: "tiny".to_owned(), inputs, ..Default::default() }
}

/// The three ways to give a value: an input, a parameter, and a field of `sampling_parameters`.
fn ways(field: &str, value: &Value) -> Vec<kserve::ModelInferRequest> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let choice = Some(ParameterChoice::StringParam(text.clone()));
    let parameter = kserve::InferParameter { parameter_choice: choice };
    let parameters = BTreeMap::from([(field.to_owned(), parameter)]);
    vec![
        infer(field, &[&text]),
        kserve::ModelInferRequest { parameters, ..infer("", &[]) },
        infer("sampling_parameters", &[&json!({field: value}).to_string()]),
    ]
}

#[tokio::test]
async fn every_constraint_is_honoured_or_refused_by_name_over_kserve() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let mut client = GrpcInferenceServiceClient::new(http.cluster.channel.clone());
        let compiler = compiler();
        let format = |(value, good, bad)| Case { field: "response_format", value, good, bad };
        for case in cases().into_iter().chain(formats().into_iter().map(format)) {
            let mut requests = ways(case.field, &case.value);
            if case.field == "guided_choice" {
                requests.push(infer("guided_choice", &["yes", "no"]));
            }
            for request in requests {
                let place = format!("{request:?}");
                let mut calling = client.clone();
                let mut call = tokio::spawn(async move { calling.model_infer(request).await });
                let submit = tokio::select! {
                    submit = http.session.submit() => submit,
                    answer = &mut call => panic!("{place}: {answer:?}"),
                };
                http.session.finish(&submit, 0, &tokens("a"), v1::FinishReason::Stop);
                call.await.unwrap().unwrap();
                check(&compiler, submit, case.good, case.bad, &place);
            }
        }
        let elsewhere = elsewhere().into_iter().filter(|name| name != "response_format");
        let elsewhere: Vec<_> =
            elsewhere.map(|name| (name.clone(), json!("x"), format!("{name} is refused: "))).collect();
        let own =
            refusals().into_iter().map(|(field, value, words)| (field.to_owned(), value, words.to_owned()));
        for (field, value, words) in own.chain(elsewhere) {
            for request in ways(&field, &value) {
                let refused = tokio::select! {
                    submit = http.session.submit() => panic!("{field} {value}: {submit:?}"),
                    refused = client.model_infer(request) => refused.unwrap_err(),
                };
                assert_eq!(refused.code(), Code::InvalidArgument, "{field}: {refused}");
                assert!(refused.message().contains(&words), "{field} {value}: {refused}");
            }
        }
        assert!(http.session.try_command().is_none());
    })
    .await;
}

#[tokio::test]
async fn every_grammar_of_grpc_reaches_the_worker() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let compiler = compiler();
        let texts = ["yes", "no"].map(str::to_owned).to_vec();
        for (grammar, good, bad) in [
            (Wire::JsonSchema(schema().to_string()), JSON_GOOD, JSON_BAD),
            (Wire::JsonObject(v1::JsonObject {}), &["{}"][..], &["1"][..]),
            (Wire::Regex("yes|no".to_owned()), TEXT_GOOD, TEXT_BAD),
            (Wire::Choice(v1::ChoiceGrammar { texts }), TEXT_GOOD, TEXT_BAD),
            (Wire::Lark("start: \"yes\" | \"no\"".to_owned()), TEXT_GOOD, TEXT_BAD),
        ] {
            let mut constraint = v1::Constraint { grammar: Some(grammar), ..v1::Constraint::default() };
            // The router's options say it.
            constraint.set_json_whitespace(v1::JsonWhitespace::Any);
            let constraint = Some(constraint);
            let sampling = Some(v1::SamplingParams { constraint, ..Default::default() });
            let request = v1::GenerateRequest { sampling, ..crate::cluster::text("a") };
            let mut calling = http.cluster.client.clone();
            let call = tokio::spawn(async move { calling.generate_unary(request).await });
            let submit = http.session.submit().await;
            http.session.finish(&submit, 0, &tokens("a"), v1::FinishReason::Stop);
            call.await.unwrap().unwrap();
            check(&compiler, submit, good, bad, "gRPC");
        }
    })
    .await;
}

#[tokio::test]
async fn the_whitespace_that_a_router_allows_reaches_the_worker_from_every_surface() {
    bounded(async {
        let options = Options {
            json_whitespace: JsonWhitespace::Any,
            tool_call_format: "hermes".parse().unwrap(),
            ..with_http(HttpOptions::default())
        };
        let mut http = HttpCluster::start(options).await;
        let compiler = compiler();
        let good = [JSON_GOOD, &[JSON_LINES]].concat();
        let bad = ["{}", r#"{"a":  1}"#, "{\n\n\"a\": 1}"];
        for (_, path, mut body, format) in apis() {
            let named = json!({"type": "json_schema", "name": "n", "schema": schema()});
            match format {
                [outer, inner] => body[*outer] = json!({(*inner): named}),
                _ => body[format[0]] = json!({"type": "json_object", "schema": schema()}),
            }
            // Its prompts share the grammar.
            let prompts = if path == "/v1/completions" { 2 } else { 1 };
            if prompts == 2 {
                body["prompt"] = json!(["a", "b"]);
            }
            let call = http.post(path, &body.to_string()).await;
            for _ in 0..prompts {
                let submit = http.session.submit().await;
                http.session.finish(&submit, 0, &tokens("a"), v1::FinishReason::Stop);
                check(&compiler, submit, &good, &bad, path);
            }
            assert_eq!(call.response().await.status, 200, "{path}");
        }
        // Beside tools.
        let tool = json!({"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}});
        let body = json!({"messages": [{"role": "user", "content": "a"}], "tools": [tool], "response_format": {"type": "json_object"}});
        let call = http.post("/v1/chat/completions", &body.to_string()).await;
        let submit = http.session.submit().await;
        http.session.finish(&submit, 0, &tokens("{}"), v1::FinishReason::Stop);
        assert_eq!(call.response().await.status, 200);
        let Some(Wire::Lark(lark)) = submit.sampling.unwrap().constraint.unwrap().grammar else { panic!() };
        assert!(lark.contains(JsonWhitespace::Any.compiler_options()), "{lark}");
        let grammar = Some(Wire::JsonSchema(schema().to_string()));
        let mut constraint = v1::Constraint { grammar, ..v1::Constraint::default() };
        constraint.set_json_whitespace(v1::JsonWhitespace::OneLine);
        let sampling = Some(v1::SamplingParams { constraint: Some(constraint), ..Default::default() });
        let request = v1::GenerateRequest { sampling, ..crate::cluster::text("a") };
        let mut client = http.cluster.client.clone();
        let call = tokio::spawn(async move { client.generate_unary(request).await });
        let submit = http.session.submit().await;
        http.session.finish(&submit, 0, &tokens("a"), v1::FinishReason::Stop);
        call.await.unwrap().unwrap();
        check(&compiler, submit, &good, &bad, "gRPC");
        let mut client = GrpcInferenceServiceClient::new(http.cluster.channel.clone());
        let request = infer("guided_json", &[&schema().to_string()]);
        let call = tokio::spawn(async move { client.model_infer(request).await });
        let submit = http.session.submit().await;
        http.session.finish(&submit, 0, &tokens("a"), v1::FinishReason::Stop);
        call.await.unwrap().unwrap();
        check(&compiler, submit, &good, &bad, "KServe");
    })
    .await;
}
