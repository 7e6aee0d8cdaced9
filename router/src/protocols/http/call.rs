//! Metadata of a call beside its body.

use tonic::codegen::http::header::HeaderName;
use tonic::codegen::http::{Extensions, HeaderMap};

use crate::layers::request_id::RequestId;
use crate::outcome::Outcome;
use crate::request::context::RequestContext;

/// Header of a client that resumes a stream of server-sent events.
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Metadata of a call.
pub(crate) struct Call {
    pub(crate) context: RequestContext,
    pub(crate) request_id: RequestId,
    /// Path of the request.
    pub(crate) path: String,
    /// Id of the last event that the client has received of the stream that it resumes.
    pub(crate) last_event_id: Option<String>,
}

impl Call {
    /// Returns the metadata of a call.
    ///
    /// # Errors
    /// The call has not passed the authentication layer.
    pub(crate) fn new(path: &str, extensions: &Extensions, headers: &HeaderMap) -> Result<Self, Outcome> {
        let request_id = extensions.get::<RequestId>().cloned().unwrap_or_else(RequestId::new);
        let last_event_id =
            headers.get(LAST_EVENT_ID).map(|id| String::from_utf8_lossy(id.as_bytes()).into_owned());
        let context = RequestContext::new(extensions, headers)?;
        Ok(Self { context, request_id, path: path.to_owned(), last_event_id })
    }
}
