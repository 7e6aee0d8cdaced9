//! Cross-origin headers on responses of every kind.

use inflight_router::{HttpOptions, Options};

use crate::cluster::{bounded, tokens};
use crate::http_client::{Call, ENDPOINTS, HttpCluster, with_http};
use crate::tenants::{Folder, digest};

#[tokio::test]
async fn refusals_and_streams_have_the_headers_that_browsers_need() {
    bounded(async {
        let folder = Folder::new();
        let file = format!(
            "[tenants.acme]\nlimits = {{ concurrent_requests = 1 }}\nkeys = [{{ name = \"main\", sha256 = \"{}\" }}]\n",
            digest("acme")
        );
        for (allowed, expected) in [("*", "*"), ("https://chat.example", "https://chat.example")] {
            let cors_origins = vec!["https://other.example".to_owned(), allowed.to_owned()];
            let options = with_http(HttpOptions { cors_origins, ..HttpOptions::default() });
            let tenants_file = Some(folder.write("tenants.toml", &file));
            let mut http = HttpCluster::start(Options { tenants_file, ..options }).await;
            let address = http.address;
            let send = async |method: &'static str, path: &'static str, key: &'static str, body: String| {
                let headers = [("origin", "https://chat.example"), ("x-api-key", key)];
                Call::send(address, method, path, &headers, body.as_bytes()).await
            };
            let check = |path: &str, headers: &std::collections::BTreeMap<String, String>| {
                assert_eq!(headers["access-control-allow-origin"], expected, "{path}");
                assert_eq!(headers["vary"], "origin", "{path}");
                let exposed = &headers["access-control-expose-headers"];
                for name in ["request-id", "x-request-id", "retry-after"] {
                    assert!(exposed.split(", ").any(|exposed| exposed == name), "{path}: {exposed}");
                }
            };
            for (path, ask) in ENDPOINTS {
                let refused = send("POST", path, "wrong", format!("{ask}}}")).await.response().await;
                assert_eq!(refused.status, 401);
                check(path, &refused.headers);

                let mut stream = send("POST", path, "acme", format!("{ask},\"stream\":true}}")).await;
                let submit = http.session.submit().await;
                http.session.tokens(&submit, 0, &tokens("a"));
                let (status, headers) = stream.head().await;
                assert_eq!((status, &*headers["content-type"]), (200, "text/event-stream; charset=utf-8"));
                check(path, &headers);
                let limited = send("POST", path, "acme", format!("{ask}}}")).await.response().await;
                assert_eq!(limited.status, 429, "{limited:?}");
                check(path, &limited.headers);
                drop(stream);
                http.session.cancel().await;
                http.session.finish(&submit, 0, &[], inflight_proto::v1::FinishReason::Cancelled);
                while http.cluster.handle.stats().open > 0 {
                    tokio::task::yield_now().await;
                }

                let invalid = send("POST", path, "acme", "{".to_owned()).await.response().await;
                assert_eq!(invalid.status, 400);
                check(path, &invalid.headers);
                let wrong = send("PUT", path, "acme", String::new()).await.response().await;
                assert_eq!(wrong.status, 405);
                check(path, &wrong.headers);
            }
            let unknown = send("GET", "/v1/nothing", "acme", String::new()).await.response().await;
            assert_eq!(unknown.status, 404);
            check("/v1/nothing", &unknown.headers);
            // Without an origin there is nothing to say.
            let plain = Call::send(address, "GET", "/health", &[], b"").await.response().await;
            assert!(!plain.headers.contains_key("access-control-allow-origin"));
        }
    })
    .await;
}
