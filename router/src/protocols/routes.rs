//! Routes of the HTTP APIs.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::routing::{MethodRouter, get, on};
use futures::future::BoxFuture;
use inflight_net::ReservedBytes;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::{Request, Response};

use super::anthropic::messages;
use super::http::known_paths::KnownPaths;
use super::http::{AxumResponse, Call, HttpApi, body, probes, refuse};
use super::openai::{chat, completions, models, responses, tokenize};
use super::route::{JSON, JSON_OR_EVENTS, Part, Route, TEXT};
use super::{openapi, page};
use crate::outcome::Outcome;

type Answer = BoxFuture<'static, Result<Response<Body>, Outcome>>;
/// Handler of a call whose body was received.
type Handler = fn(Arc<HttpApi>, Call, Bytes) -> Answer;

/// All routes but those of the live view. The router, the OpenAPI document and the advice to callers of unknown paths follow it.
static ROUTES: [Route<Arc<HttpApi>>; 17] = [
    Route::post("/v1/chat/completions", "OpenAI's chat completions.", &chat::FIELDS, JSON_OR_EVENTS, || {
        post(|api, call, body| Box::pin(chat::create(api, call, body)))
    }),
    Route::post(
        "/v1/completions",
        "OpenAI's text completions.",
        &completions::FIELDS,
        JSON_OR_EVENTS,
        || post(|api, call, body| Box::pin(completions::create(api, call, body))),
    ),
    Route::post("/v1/responses", "OpenAI's responses.", &responses::FIELDS, JSON_OR_EVENTS, || {
        post(|api, call, body| Box::pin(responses::create(api, call, body)))
    }),
    Route::post("/v1/messages", "Anthropic's messages.", &messages::FIELDS, JSON_OR_EVENTS, || {
        post(|api, call, body| Box::pin(messages::create(api, call, body)))
    }),
    Route::post(
        "/v1/messages/count_tokens",
        "Number of prompt tokens of a message.",
        &messages::COUNT_FIELDS,
        JSON,
        || post(|api, call, body| Box::pin(messages::count_tokens(api, call, body))),
    ),
    Route::post("/tokenize", "Tokens of a text or a conversation.", &tokenize::FIELDS, JSON, || {
        post(|api, call, body| Box::pin(tokenize::tokenize(api, call, body)))
    }),
    Route::post("/detokenize", "Text of tokens.", &tokenize::DETOKENIZE_FIELDS, JSON, || {
        post(|api, call, body| Box::pin(tokenize::detokenize(api, call, body)))
    }),
    Route::get("/tokenizer_info", "Special tokens and chat template of a model.", JSON, || {
        get(tokenize::info)
    }),
    Route::get("/v1/models", "Served models.", JSON, || get(models::list)),
    Route::get("/v1/models/{*id}", "A served model.", JSON, || get(models::retrieve)),
    Route::get("/health", "Whether requests are served.", JSON, || get(probes::ready)),
    Route::get("/ready", "As /health.", JSON, || get(probes::ready)),
    Route::get("/readyz", "As /health.", JSON, || get(probes::ready)),
    Route::get("/livez", "Whether the process runs.", JSON, || get(probes::live)),
    Route::get("/version", "Version of the router.", JSON, || get(probes::version)),
    Route::get("/openapi.json", "This document.", JSON, || get(probes::openapi)),
    Route::get("/metrics", "Metrics for Prometheus.", TEXT, || get(probes::metrics)).of(Part::Metrics),
];

/// Advice to who calls a path that an option would serve.
const ADMIN_SERVES: &str = "the live view and the chat are served with --admin";
const HTTP_METRICS_SERVES: &str = "metrics are served with --http-metrics, and always at the metrics port";
/// Advice to who calls a path that the HTTP port may have.
const AT_THE_HTTP_PORT: &str =
    "this is the gRPC port: the live view, the chat and metrics are served at the HTTP port only";
/// Advice to who calls the gRPC port of a router without the HTTP APIs.
const GRPC_ONLY: &str = "this is the gRPC port, and the HTTP APIs are off; --http-listen serves them";

impl HttpApi {
    /// Returns the routes of the APIs at the HTTP port.
    pub(crate) fn routes(self) -> Router {
        let (ui, metrics) = (self.ui.is_some(), self.metrics.is_some());
        let off = [
            ("/ui", ADMIN_SERVES, ui),
            ("/ui/", ADMIN_SERVES, ui),
            (page::CHAT, ADMIN_SERVES, ui),
            ("/metrics", HTTP_METRICS_SERVES, metrics),
        ];
        let off = off.into_iter().filter(|(.., on)| !on).map(|(path, advice, _)| (path, advice));
        let parts = [(Part::Clients, true), (Part::LiveView, ui), (Part::Metrics, metrics)];
        let parts = parts.into_iter().filter(|(_, on)| *on).map(|(part, _)| part);
        self.routes_of(&parts.collect::<Vec<_>>(), off.collect())
    }

    /// Returns the routes of the APIs at the gRPC port: those of clients.
    pub(crate) fn client_routes(self) -> Router {
        let elsewhere = ["/ui", "/ui/", page::CHAT, "/metrics"].map(|path| (path, AT_THE_HTTP_PORT)).to_vec();
        self.routes_of(&[Part::Clients], elsewhere)
    }

    fn routes_of(mut self, parts: &[Part], elsewhere: Vec<(&'static str, &'static str)>) -> Router {
        let routes = || page::ROUTES.iter().chain(&ROUTES).filter(|route| parts.contains(&route.part));
        // Clients of other servers that call /api/chat or /v1/chat mean no page.
        let meant = routes().map(|route| route.path).filter(|path| *path != page::CHAT);
        self.known = KnownPaths::new(meant, elsewhere);
        self.openapi = openapi::document(routes()).into();
        let routed =
            routes().fold(Router::new(), |router, route| router.route(route.path, (route.handler)()));
        routed.method_not_allowed_fallback(wrong_method).fallback(unknown_path).with_state(Arc::new(self))
    }
}

/// Returns the routes of a gRPC port without the HTTP APIs: none, and a sentence that says so.
pub(crate) fn without_apis() -> Router {
    Router::new().fallback(async |request: Request<axum::body::Body>| unknown(&request, GRPC_ONLY.to_owned()))
}

/// Returns the route of a handler of POST requests.
fn post(handler: Handler) -> MethodRouter<Arc<HttpApi>> {
    let run = move |State(api): State<Arc<HttpApi>>, request: Request<axum::body::Body>| async move {
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        let call = Call::new(&path, &parts.extensions, &parts.headers);
        // The call gives back what its message has reserved of the receive budget, long before it ends.
        parts.extensions.remove::<Arc<ReservedBytes>>();
        let answer = async {
            let call = call?;
            body::check_headers(&parts.headers)?;
            let body = body::receive(body, &api.options).await?;
            handler(api, call, body).await
        };
        answer.await.unwrap_or_else(|outcome| refuse(&path, outcome)).map(axum::body::Body::new)
    };
    on(axum::routing::MethodFilter::POST, run)
}

async fn unknown_path(State(api): State<Arc<HttpApi>>, request: Request<axum::body::Body>) -> AxumResponse {
    let advice = api.known.advice(request.uri().path());
    unknown(&request, advice)
}

/// Returns the response to a call of an unknown path.
fn unknown(request: &Request<axum::body::Body>, instead: String) -> AxumResponse {
    let path = request.uri().path();
    let outcome = Outcome::UnknownPath { path: path.to_owned(), instead: Some(instead) };
    refuse(path, outcome).map(axum::body::Body::new)
}

async fn wrong_method(request: Request<axum::body::Body>) -> AxumResponse {
    let path = request.uri().path();
    let outcome = Outcome::WrongMethod { method: request.method().to_string(), path: path.to_owned() };
    refuse(path, outcome).map(axum::body::Body::new)
}

#[cfg(test)]
mod tests {
    use super::super::http::fields::{Fate, FieldTable};
    use super::super::http::structured;
    use super::*;

    /// Reads a body of an API and returns what it says.
    type Read = fn(&[u8]) -> Result<String, Outcome>;

    fn said(read: Result<impl std::fmt::Debug, Outcome>) -> Result<String, Outcome> {
        read.map(|read| format!("{read:?}"))
    }

    /// Every table of fields, in the order of the documentation, with the fields that a body needs, and the
    /// reader that applies the table.
    const TABLES: [(&FieldTable, &str, Read); 7] = [
        (&chat::FIELDS, r#""messages": [{"role": "user", "content": "a"}]"#, |body| said(chat::read(body))),
        (&completions::FIELDS, r#""prompt": "a""#, |body| said(completions::read(body))),
        (&responses::FIELDS, r#""input": "a""#, |body| said(responses::read(body))),
        (&messages::FIELDS, r#""max_tokens": 9, "messages": [{"role": "user", "content": "a"}]"#, |body| {
            said(messages::read(body))
        }),
        (&messages::COUNT_FIELDS, r#""messages": [{"role": "user", "content": "a"}]"#, |body| {
            said(messages::read_count(body))
        }),
        (&tokenize::FIELDS, r#""prompt": "a""#, |body| said(tokenize::read(body))),
        (&tokenize::DETOKENIZE_FIELDS, r#""tokens": [1]"#, |body| said(tokenize::read_tokens(body))),
    ];

    /// Returns the section of the documentation with the fields of an API.
    fn section<'a>(documentation: &'a str, api: &str) -> &'a str {
        let heading = format!("### Fields of {api}\n");
        let section = documentation.split(&heading).nth(1).unwrap_or_default();
        section.split("\n#").next().unwrap_or_default()
    }

    #[test]
    fn the_documentation_has_the_fate_of_every_field_and_of_no_other() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/http-api.md");
        let documentation = std::fs::read_to_string(path).unwrap();
        for (table, ..) in TABLES {
            let rows: Vec<String> = table
                .iter()
                .map(|field| {
                    let fate = match field.fate {
                        Fate::Honoured => "honoured",
                        Fate::Ignored => "ignored",
                        Fate::Refused => "refused",
                    };
                    format!("| `{}` | {fate} | {} |", field.name, field.note)
                })
                .collect();
            let documented =
                section(&documentation, table.api).lines().filter(|line| line.starts_with("| `"));
            let documented: Vec<&str> = documented.collect();
            let (missing, stale): (Vec<_>, Vec<_>) = (
                rows.iter().filter(|row| !documented.contains(&row.as_str())).collect(),
                documented.iter().filter(|row| !rows.iter().any(|known| known == **row)).collect(),
            );
            assert!(
                missing.is_empty() && stale.is_empty(),
                "docs/http-api.md, {}: lacks {missing:#?}, has {stale:#?}",
                table.api
            );
        }
    }

    #[test]
    fn every_honoured_field_is_read_null_is_absent_and_a_refusal_names_the_field() {
        let wrong = ["7.5", "true", r#""\n""#, r#"{"x": [[]]}"#, r#"[{"x": [[]]}]"#, "[[true]]", "[7]"];
        for (table, needed, read) in TABLES {
            let api = table.api;
            let absent = read(format!("{{{needed}}}").as_bytes()).unwrap();
            for field in table.iter().filter(|field| field.fate == Fate::Honoured) {
                let name = field.name;
                // A field that the body needs is missing if it is null.
                if !needed.contains(&format!("\"{name}\":")) {
                    let null = read(format!("{{{needed}, \"{name}\": null}}").as_bytes());
                    assert_eq!(null.as_ref(), Ok(&absent), "{api}: {name} is null");
                }
                let mut refused = false;
                for value in wrong {
                    match read(format!("{{{needed}, \"{name}\": {value}}}").as_bytes()) {
                        Ok(_) => {}
                        Err(Outcome::InvalidField { field, reason }) => {
                            assert_eq!(field, name, "{api}: {name} = {value}: {reason}");
                            refused = true;
                        }
                        Err(other) => panic!("{api}: {name} = {value}: {other:?} names no field"),
                    }
                }
                assert!(refused, "{api}: {name} takes any value, so it is not read");
            }
        }
    }

    #[test]
    fn the_documentation_has_every_constraint_of_other_servers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/http-api.md");
        let documentation = std::fs::read_to_string(path).unwrap();
        let section = documentation.split("### Refused constraints\n").nth(1).unwrap_or_default();
        let section = section.split("\n#").next().unwrap_or_default();
        let documented: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
        let rows: Vec<String> = structured::ELSEWHERE
            .iter()
            .map(|field| format!("| `{}` | {} |", field.name, field.note))
            .collect();
        assert_eq!(documented, rows);
    }

    /// Values of each JSON type: booleans, integers, numbers, strings, arrays and objects.
    const VALUES: [(&str, &[&str]); 6] = [
        ("boolean", &["true", "false"]),
        ("integer", &["1", "7"]),
        ("number", &["0.5"]),
        ("string", &["\"a\"", "\"root ::= \\\"a\\\"\"", "\"high\"", "\"auto\"", "\"{}\""]),
        ("array", &["[1]", "[\"a\"]", "[\"text\"]", r#"[{"role": "user", "content": "a"}]"#, "[]"]),
        (
            "object",
            &[
                "{}",
                r#"{"type": "text"}"#,
                r#"{"type": "auto"}"#,
                r#"{"1": 1}"#,
                r#"{"regex": "a"}"#,
                r#"{"type": "disabled"}"#,
            ],
        ),
    ];

    #[test]
    fn the_openapi_document_has_the_types_that_the_readers_take() {
        // Their values need another field, or another value.
        let dependent = ["prompt", "messages", "top_logprobs"];
        let mut wrong = Vec::new();
        for (table, needed, read) in TABLES {
            let api = table.api;
            for field in table.iter().filter(|field| field.fate == Fate::Honoured) {
                let name = field.name;
                let documented = openapi::types(api, name);
                let taken =
                    |value: &&&str| read(format!("{{{needed}, \"{name}\": {value}}}").as_bytes()).is_ok();
                // An integer is a number.
                let is_documented = |kind: &str| {
                    documented.contains(&kind) || (kind == "integer" && documented.contains(&"number"))
                };
                let mut values =
                    VALUES.iter().filter(|(kind, _)| is_documented(kind)).flat_map(|(_, values)| *values);
                if !values.any(|value| taken(&value)) && !dependent.contains(&name) {
                    wrong.push(format!("{api}: {name} takes no {documented:?}"));
                }
                for (kind, values) in VALUES.iter().filter(|(kind, _)| !is_documented(kind)) {
                    // An empty value may be the same as an absent one.
                    let mut filled = values.iter().filter(|value| !matches!(**value, "false" | "[]" | "{}"));
                    let found = filled.find(taken);
                    wrong.extend(
                        found.map(|value| format!("{api}: {name}, {documented:?}, takes the {kind} {value}")),
                    );
                }
            }
            for name in openapi::required(table) {
                assert!(needed.contains(&format!("\"{name}\":")), "{api}: {name}");
                let refused = read(b"{}").unwrap_err();
                assert!(matches!(refused, Outcome::InvalidField { .. }), "{api}: {refused:?}");
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn no_field_has_two_fates() {
        for (table, ..) in TABLES {
            let mut names: Vec<&str> = table.iter().map(|field| field.name).collect();
            names.sort_unstable();
            let count = names.len();
            names.dedup();
            assert_eq!(names.len(), count, "{}", table.api);
        }
    }
}
