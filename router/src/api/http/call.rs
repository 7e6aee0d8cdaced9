//! Metadata of a call beside its body.

use tonic::codegen::http::{Extensions, HeaderMap};

use super::request_id::RequestId;
use crate::api::ingress::RequestContext;

/// Metadata of a call.
pub(crate) struct Call {
    pub(super) context: RequestContext,
    pub(super) request_id: String,
}

impl Call {
    pub(super) fn new(extensions: &Extensions, headers: &HeaderMap) -> Self {
        let request_id = extensions.get::<RequestId>().cloned().unwrap_or_else(RequestId::random);
        Self { context: RequestContext::new(extensions, headers), request_id: request_id.0 }
    }
}
