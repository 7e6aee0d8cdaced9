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
    fn new(served: ServedModel, started_at: u64) -> Self {
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
            display_name: served.name.clone(),
            created_at,
            id: served.name,
        }
    }
}

/// Lists the models with serving workers.
pub(crate) async fn list(State(api): State<Arc<HttpApi>>) -> AxumResponse {
    let models = api.ingress.models().into_iter();
    let data: Vec<_> = models.map(|(served, _)| ModelBody::new(served, api.started_at)).collect();
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
    let served = id.and_then(|Path(id)| api.ingress.resolve(&id));
    finish(served.and_then(|served| json(&ModelBody::new(served, api.started_at))))
}

fn finish(answer: Result<Response<Body>, Outcome>) -> AxumResponse {
    answer.unwrap_or_else(|outcome| refuse("/v1/models", outcome)).map(axum::body::Body::new)
}
