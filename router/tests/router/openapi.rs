//! OpenAPI document: its structure, and that it describes the paths that are served and documented, and no others.

use std::collections::BTreeSet;

use inflight_router::{Admin, HttpOptions, Options};
use serde_json::Value;

use crate::cluster::bounded;
use crate::http_client::{Call, HttpCluster, with_http};

/// Largest document, in bytes.
const DOCUMENT_BYTES_MAX: usize = 128 << 10;

async fn everything() -> HttpCluster {
    let http = HttpOptions { metrics: true, ..HttpOptions::default() };
    HttpCluster::start(Options { admin: Admin::On, ..with_http(http) }).await
}

/// Every operation of a document: path, method, and what it says.
fn operations(document: &Value) -> impl Iterator<Item = (&str, &str, &Value)> {
    document["paths"].as_object().unwrap().iter().flat_map(|(path, methods)| {
        methods.as_object().unwrap().iter().map(|(method, operation)| (&**path, &**method, operation))
    })
}

/// Every object within a value.
fn objects<'a>(value: &'a Value, found: &mut Vec<&'a Value>) {
    match value {
        Value::Object(members) => {
            found.push(value);
            members.values().for_each(|member| objects(member, found));
        }
        Value::Array(elements) => elements.iter().for_each(|element| objects(element, found)),
        _ => {}
    }
}

/// Checks what the OpenAPI specification 3.1 requires of the members that the document has.
fn check_structure(document: &Value) {
    assert_eq!(document["openapi"], "3.1.0");
    assert!(document["info"]["title"].is_string() && document["info"]["version"].is_string());
    let schemes = document["components"]["securitySchemes"].as_object().unwrap();
    for scheme in schemes.values() {
        match scheme["type"].as_str().unwrap() {
            "http" => assert!(scheme["scheme"].is_string()),
            "apiKey" => assert!(scheme["name"].is_string() && scheme["in"] == "header"),
            other => panic!("{other}"),
        }
    }
    let mut ids = BTreeSet::new();
    for (path, method, operation) in operations(document) {
        assert!(path.starts_with('/'), "{path}");
        assert!(matches!(method, "get" | "post"), "{path} {method}");
        assert!(ids.insert(operation["operationId"].as_str().unwrap()), "{path} {method}");
        assert!(operation["summary"].as_str().is_some_and(|summary| summary.ends_with('.')), "{path}");
        let named: BTreeSet<&str> =
            path.split('{').skip(1).map(|rest| rest.split('}').next().unwrap()).collect();
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        let described: BTreeSet<&str> =
            parameters.iter().map(|parameter| parameter["name"].as_str().unwrap()).collect();
        assert_eq!(named, described, "{path}");
        for parameter in &parameters {
            assert!(
                parameter["in"] == "path" && parameter["required"] == true && parameter["schema"].is_object()
            );
        }
        let responses = operation["responses"].as_object().unwrap();
        assert!(responses.contains_key("default") && responses.len() == 2, "{path}");
        for (status, response) in responses {
            assert!(
                status == "default" || status.parse::<u16>().is_ok_and(|status| status < 400),
                "{path} {status}"
            );
            assert!(response["description"].is_string(), "{path} {status}");
        }
        if let Some(body) = operation.get("requestBody") {
            assert!(method == "post" && body["content"]["application/json"]["schema"]["$ref"].is_string());
        }
        for requirement in operation.get("security").unwrap_or(&document["security"]).as_array().unwrap() {
            assert!(requirement.as_object().unwrap().keys().all(|name| schemes.contains_key(name)), "{path}");
        }
    }
    let mut all = Vec::new();
    objects(document, &mut all);
    for object in all {
        if let Some(reference) = object.get("$ref").and_then(Value::as_str) {
            let target = document.pointer(reference.strip_prefix('#').unwrap());
            assert!(target.is_some_and(Value::is_object), "{reference}");
        }
    }
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        assert_eq!(schema["type"], "object", "{name}");
        let properties = schema["properties"].as_object().unwrap();
        for required in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
            assert!(properties.contains_key(required.as_str().unwrap()), "{name}: {required}");
        }
        for (field, property) in properties {
            let types = property.get("type").and_then(Value::as_array).into_iter().flatten();
            let known = ["array", "boolean", "integer", "null", "number", "object", "string"];
            assert!(types.clone().all(|kind| known.contains(&kind.as_str().unwrap())), "{name}.{field}");
            let has_array = types.clone().any(|kind| kind == "array");
            assert_eq!(has_array, property.get("items").is_some(), "{name}.{field}");
        }
    }
}

/// Endpoints of the table in the documentation, as method and path with `{}` for each parameter.
fn documented() -> BTreeSet<(String, String)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/http-api.md");
    let text = std::fs::read_to_string(path).unwrap();
    let section = text.split("\n## Endpoints\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let mut found = BTreeSet::new();
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        let cell = row.split(" | ").next().unwrap();
        let mut method = String::new();
        for name in cell.split('`').skip(1).step_by(2) {
            let path = match name.split_once(' ') {
                Some((of, path)) => {
                    method = of.to_ascii_lowercase();
                    path
                }
                None => name,
            };
            let path = path.split('?').next().unwrap();
            let is_parameter =
                |segment: &str| !segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_uppercase());
            let segments: Vec<&str> =
                path.split('/').map(|segment| if is_parameter(segment) { "{}" } else { segment }).collect();
            found.insert((method.clone(), segments.join("/")));
        }
    }
    found
}

/// Replaces the parameters of a path template (`{name}`) by values.
fn with_parameters(path: &str, value: &str) -> String {
    let mut parts = path.split('{');
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |out, part| format!("{out}{value}{}", part.split_once('}').unwrap().1))
}

#[tokio::test]
async fn the_document_is_openapi_and_has_the_documented_paths_and_no_others() {
    bounded(async {
        let http = everything().await;
        let response = http.get("/openapi.json").await;
        assert_eq!((response.status, &*response.headers["content-type"]), (200, "application/json"));
        assert_eq!(response.headers["x-content-type-options"], "nosniff");
        assert!(response.body.len() < DOCUMENT_BYTES_MAX, "{} bytes", response.body.len());
        let document = response.json();
        check_structure(&document);
        let described: BTreeSet<(String, String)> = operations(&document)
            .map(|(path, method, _)| (method.to_owned(), with_parameters(path, "{}")))
            .collect();
        assert_eq!(described, documented());
        // The fields of a request, with their types and what a body needs.
        let chat = &document["components"]["schemas"]["ChatCompletionsRequest"];
        assert_eq!(chat["required"], serde_json::json!(["messages"]));
        assert_eq!(chat["properties"]["top_k"]["type"], serde_json::json!(["integer", "null"]));
        // What is off is not described.
        let plain = HttpCluster::start(with_http(HttpOptions::default())).await;
        let document = plain.get("/openapi.json").await.json();
        check_structure(&document);
        assert!(operations(&document).all(|(path, ..)| !path.starts_with("/ui") && path != "/metrics"));
    })
    .await;
}

#[tokio::test]
async fn each_described_path_is_answered_and_others_name_the_nearest() {
    bounded(async {
        let http = everything().await;
        let document = http.get("/openapi.json").await.json();
        for (path, method, operation) in operations(&document) {
            let path = with_parameters(path, "1");
            let call =
                async |method: &str, body: &[u8]| Call::send(http.address, method, &path, &[], body).await;
            let method = method.to_ascii_uppercase();
            if path == "/ui/events" {
                assert_eq!(call(&method, b"").await.head().await.0, 200);
            } else {
                let body: &[u8] = if method == "POST" { b"[]" } else { b"" };
                let response = call(&method, body).await.response().await;
                assert_ne!(response.status, 405, "{method} {path}");
                // Of routed paths, only those whose parameter names nothing are 404, without advice.
                let is_routed = response.status != 404 || !response.body.contains("in this API;");
                assert!(is_routed, "{method} {path}: {response:?}");
                if operation.get("requestBody").is_some() {
                    assert_eq!(response.status, 400, "{path}: the body is no object");
                }
            }
            assert_eq!(call("PUT", b"").await.response().await.status, 405, "{path}");
        }
        for (asked, nearest) in [
            ("/chat/completions", "/v1/chat/completions"),
            ("/v1/chat/completion", "/v1/chat/completions"),
            ("/v1/message", "/v1/messages"),
            ("/v1", "/openapi.json"),
            ("/docs", "/openapi.json"),
        ] {
            let refused = http.get(asked).await;
            assert_eq!(refused.status, 404);
            let expected = format!("there is no {asked:?} in this API; the nearest path is {nearest}");
            assert_eq!(refused.json()["error"]["message"], expected);
        }
        let long = http.get(&format!("/{}", "x".repeat(7000))).await;
        let message = long.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(long.status == 404 && message.ends_with("GET /openapi.json lists the paths"), "{message}");
    })
    .await;
}
