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
use super::http::{AxumResponse, Call, HttpApi, body, probes, refuse};
use super::openai::{chat, completions, models, responses, tokenize};
use super::page;
use crate::outcome::Outcome;

type Answer = BoxFuture<'static, Result<Response<Body>, Outcome>>;
/// Handler of a call whose body was received.
type Handler = fn(Arc<HttpApi>, Call, Bytes) -> Answer;

impl HttpApi {
    /// Returns the routes of the APIs.
    pub(crate) fn routes(self) -> Router {
        let api = Arc::new(self);
        let router = if api.ui.is_some() { page::routes(Router::new()) } else { Router::new() };
        router
            .route("/v1/chat/completions", post(|api, call, body| Box::pin(chat::create(api, call, body))))
            .route("/v1/completions", post(|api, call, body| Box::pin(completions::create(api, call, body))))
            .route("/v1/responses", post(|api, call, body| Box::pin(responses::create(api, call, body))))
            .route("/v1/messages", post(|api, call, body| Box::pin(messages::create(api, call, body))))
            .route(
                "/v1/messages/count_tokens",
                post(|api, call, body| Box::pin(messages::count_tokens(api, call, body))),
            )
            .route("/tokenize", post(|api, call, body| Box::pin(tokenize::tokenize(api, call, body))))
            .route("/detokenize", post(|api, call, body| Box::pin(tokenize::detokenize(api, call, body))))
            .route("/tokenizer_info", get(tokenize::info))
            .route("/v1/models", get(models::list))
            .route("/v1/models/{*id}", get(models::retrieve))
            .route("/health", get(probes::ready))
            .route("/ready", get(probes::ready))
            .route("/readyz", get(probes::ready))
            .route("/livez", get(probes::live))
            .route("/version", get(probes::version))
            .route("/metrics", get(probes::metrics))
            .method_not_allowed_fallback(wrong_method)
            .fallback(unknown_path)
            .with_state(api)
    }
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

async fn unknown_path(request: Request<axum::body::Body>) -> AxumResponse {
    let path = request.uri().path();
    refuse(path, Outcome::UnknownPath { path: path.to_owned() }).map(axum::body::Body::new)
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
