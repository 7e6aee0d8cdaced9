//! The served models, with the fields that OpenAI's, Anthropic's and other clients read.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tonic::body::Body;
use tonic::codegen::http::Response;

use crate::dispatcher::ServedModel;
use crate::outcome::Outcome;
use crate::protocols::http::errors::refuse;
use crate::protocols::http::{AxumResponse, HttpApi, json};

/// Served model.
#[derive(Serialize)]
struct ModelBody {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: String,
    parent: Option<()>,
    /// Longest sequence in tokens, prompt and output together, by vLLM's name.
    max_model_len: u32,
    /// The same by the name that most other clients read.
    context_length: u32,
    #[serde(rename = "type")]
    kind: &'static str,
    display_name: String,
    created_at: String,
}

#[derive(Serialize)]
struct List {
    object: &'static str,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
    data: Vec<ModelBody>,
}

impl ModelBody {
    /// Describes a model under one of its names, `id`; its first name is the root.
    fn new(served: &ServedModel, id: &str, started_at: u64) -> Self {
        let since =
            i64::try_from(started_at).ok().and_then(|at| OffsetDateTime::from_unix_timestamp(at).ok());
        let created_at = since.and_then(|at| at.format(&Rfc3339).ok()).unwrap_or_default();
        Self {
            object: "model",
            created: started_at,
            owned_by: "inflight",
            root: served.name.clone(),
            parent: None,
            max_model_len: served.limits.sequence_tokens(),
            context_length: served.limits.sequence_tokens(),
            kind: "model",
            display_name: id.to_owned(),
            created_at,
            id: id.to_owned(),
        }
    }
}

/// Lists the models with serving workers, each under all of its names.
pub(crate) async fn list(State(api): State<Arc<HttpApi>>) -> AxumResponse {
    let mut data: Vec<ModelBody> = Vec::new();
    for (served, _) in api.ingress.models() {
        let aliases = api.ingress.aliases(&served.name);
        for name in std::iter::once(&served.name).chain(&aliases) {
            data.push(ModelBody::new(&served, name, api.started_at));
        }
    }
    let id = |model: Option<&ModelBody>| model.map(|model| model.id.clone());
    let list =
        List { object: "list", first_id: id(data.first()), last_id: id(data.last()), has_more: false, data };
    finish(json(&list))
}

/// Returns one model. Names may contain slashes.
pub(crate) async fn retrieve(
    State(api): State<Arc<HttpApi>>,
    id: Result<Path<String>, PathRejection>,
) -> AxumResponse {
    let id = id.map_err(|_| Outcome::invalid("the model's name in the path is not percent-encoded UTF-8"));
    let model = id.and_then(|Path(id)| {
        let served = api.ingress.resolve(&id)?;
        json(&ModelBody::new(&served, &id, api.started_at))
    });
    finish(model)
}

fn finish(answer: Result<Response<Body>, Outcome>) -> AxumResponse {
    answer.unwrap_or_else(|outcome| refuse("/v1/models", outcome)).map(axum::body::Body::new)
}
