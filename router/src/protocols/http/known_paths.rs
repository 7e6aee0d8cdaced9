//! Known paths of a port, and advice to a client that calls another one.

/// Longest path, in bytes, that is compared with the known ones.
const COMPARED_BYTES_MAX: usize = 128;
/// Paths at which clients of other servers look for a description or a root.
const DESCRIPTIONS: [&str; 15] = [
    "",
    "/api",
    "/api-docs",
    "/docs",
    "/documentation",
    "/help",
    "/openapi",
    "/openapi.yaml",
    "/openapi.yml",
    "/redoc",
    "/swagger",
    "/swagger-ui",
    "/swagger.json",
    "/v1",
    "/v1/openapi.json",
];
/// Prefixes of gRPC methods.
const GRPC_PREFIXES: [&str; 3] = ["/inflight.v1.", "/inference.", "/grpc."];
/// Path of the description.
const OPENAPI: &str = "/openapi.json";

/// Known paths of a port.
#[derive(Debug, Default)]
pub(crate) struct KnownPaths {
    /// Paths without parameters.
    paths: Vec<&'static str>,
    /// Paths that other options or ports serve, with advice; one that ends with a slash stands for those below it.
    elsewhere: Vec<(&'static str, &'static str)>,
}

impl KnownPaths {
    /// Returns the known paths of a port, of which those with parameters are left out.
    pub(crate) fn new(
        paths: impl IntoIterator<Item = &'static str>,
        elsewhere: Vec<(&'static str, &'static str)>,
    ) -> Self {
        Self { paths: paths.into_iter().filter(|path| !path.contains('{')).collect(), elsewhere }
    }

    /// Returns advice to the caller of a path that is not known.
    pub(crate) fn advice(&self, path: &str) -> String {
        if GRPC_PREFIXES.iter().any(|prefix| path.starts_with(prefix)) {
            return "it is a gRPC method: call it over HTTP/2 with content-type: application/grpc".to_owned();
        }
        let is_elsewhere = |known: &str| known == path || (known.ends_with('/') && path.starts_with(known));
        if let Some((_, advice)) = self.elsewhere.iter().find(|(known, _)| is_elsewhere(known)) {
            return (*advice).to_owned();
        }
        match self.nearest(path) {
            Some(nearest) => format!("the nearest path is {nearest}"),
            None => format!("GET {OPENAPI} lists the paths"),
        }
    }

    /// Returns the known path that a client may have meant.
    fn nearest(&self, path: &str) -> Option<&'static str> {
        if path.len() > COMPARED_BYTES_MAX {
            return None;
        }
        let path = normalized(path);
        if DESCRIPTIONS.contains(&&*path) {
            return Some(OPENAPI);
        }
        self.with_tail(&path).or_else(|| self.similar(&path)).or_else(|| {
            // Behind a prefix, such as that of another server or of a proxy.
            let tails = path.match_indices('/').skip(1).map(|(at, _)| &path[at..]);
            tails.filter(|tail| tail.len() > 1).find_map(|tail| self.with_tail(tail))
        })
    }

    /// Returns the shortest known path that ends with `tail`, which begins with a slash.
    fn with_tail(&self, tail: &str) -> Option<&'static str> {
        let ending = self.paths.iter().copied().filter(|known| tail.len() > 1 && known.ends_with(tail));
        ending.min_by_key(|known| known.len())
    }

    /// Returns the known path that differs in the fewest characters, at most in a quarter of its own.
    fn similar(&self, path: &str) -> Option<&'static str> {
        let distances =
            self.paths.iter().map(|known| (edit_distance(known.as_bytes(), path.as_bytes()), *known));
        let near = distances.filter(|(distance, known)| distance * 4 <= known.len());
        near.min_by_key(|(distance, _)| *distance).map(|(_, known)| known)
    }
}

/// Returns a path in lower case, without empty segments and a slash at its end.
fn normalized(path: &str) -> String {
    let segments = path.split('/').filter(|segment| !segment.is_empty());
    segments.map(|segment| format!("/{}", segment.to_ascii_lowercase())).collect()
}

/// Returns the number of bytes to insert, remove or replace (Levenshtein).
fn edit_distance(left: &[u8], right: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (at, byte) in left.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, other) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(byte != other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn known() -> KnownPaths {
        let paths = [
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/models",
            "/v1/models/{*id}",
            "/tokenize",
            "/detokenize",
            "/health",
            "/openapi.json",
        ];
        KnownPaths::new(paths, vec![("/ui/", "the live view is off"), ("/chat", "the chat is off")])
    }

    #[test]
    fn a_client_is_told_the_path_that_it_meant() {
        for (asked, nearest) in [
            ("/chat/completions", "/v1/chat/completions"),
            ("/completions", "/v1/completions"),
            ("/v1/chat/completion", "/v1/chat/completions"),
            ("/v1/Chat/Completions/", "/v1/chat/completions"),
            ("/v1//chat/completions", "/v1/chat/completions"),
            ("/v1/v1/chat/completions", "/v1/chat/completions"),
            ("/v2/chat/completions", "/v1/chat/completions"),
            ("/openai/deployments/gpt/chat/completions", "/v1/chat/completions"),
            ("/v1/message", "/v1/messages"),
            ("/messages/count_tokens", "/v1/messages/count_tokens"),
            ("/v1/tokenize", "/tokenize"),
            ("/models", "/v1/models"),
            ("/healthz", "/health"),
            ("/", "/openapi.json"),
            ("/v1", "/openapi.json"),
            ("/v1/", "/openapi.json"),
            ("/docs", "/openapi.json"),
        ] {
            assert_eq!(known().advice(asked), format!("the nearest path is {nearest}"), "{asked}");
        }
        for unlike in ["/v1/embeddings", "/generate", "/\u{e9}", "//", "*", &"/chat/completions".repeat(1000)]
        {
            let advice = known().advice(unlike);
            let described = unlike.trim_matches('/').is_empty();
            assert!(advice == "GET /openapi.json lists the paths" || described, "{unlike}: {advice}");
        }
        assert_eq!(known().advice("/ui/events"), "the live view is off");
        assert_eq!(known().advice("/chat"), "the chat is off");
        assert!(known().advice("/uix").contains("lists the paths"));
        assert!(known().advice("/inflight.v1.Inference/Generate").contains("gRPC method"));
    }

    proptest! {
        #[test]
        fn the_edit_distance_is_a_metric_that_counts_edits(
            left in "[abc]{0,8}", right in "[abc]{0,8}", other in "[abc]{0,8}", at in 0..9_usize
        ) {
            let distance = |left: &str, right: &str| edit_distance(left.as_bytes(), right.as_bytes());
            prop_assert_eq!(distance(&left, &right), distance(&right, &left));
            prop_assert_eq!(distance(&left, &right) == 0, left == right);
            prop_assert!(distance(&left, &right) <= distance(&left, &other) + distance(&other, &right));
            let mut longer = left.clone();
            longer.insert(at.min(left.len()), 'x');
            prop_assert_eq!(distance(&left, &longer), 1);
        }
    }
}
