//! Paths that are exempt from limits or authentication, and those of Anthropic's API.

/// KServe's bidirectional inference stream: one call carries many requests.
pub(crate) const MODEL_STREAM_INFER: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

/// Whether a path needs no authentication: health probes, metrics, reflection, the description of the APIs, and the pages of the live
/// view and of the chat, which contain no data.
pub(crate) fn is_open(path: &str) -> bool {
    path.starts_with("/grpc.")
        || matches!(
            path,
            "/inference.GRPCInferenceService/ServerLive"
                | "/inference.GRPCInferenceService/ServerReady"
                | "/chat"
                | "/health"
                | "/livez"
                | "/metrics"
                | "/openapi.json"
                | "/ready"
                | "/readyz"
                | "/ui"
                | "/version"
        )
}

/// Whether a path is one of Anthropic's API.
pub(crate) fn is_anthropic(path: &str) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/")
}

#[cfg(test)]
mod tests {
    use super::is_open;

    #[test]
    fn health_needs_no_key_and_generation_does() {
        assert!(is_open("/chat") && !is_open("/chat/completions"));
        assert!(is_open("/ui") && !is_open("/ui/events") && !is_open("/inflight.v1.Admin/Watch"));
        assert!(is_open("/health") && !is_open("/v1/models") && !is_open("/health/"));
        assert!(is_open("/grpc.health.v1.Health/Check") && !is_open("/inflight.v1.Inference/Generate"));
    }
}
