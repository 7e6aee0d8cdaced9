//! Refusals of the HTTP APIs outside of a request's fields: paths, methods, limits and faults of the router, in the
//! envelope and with the headers of the API that was called.

use std::sync::Arc;
use std::time::Duration;

use inflight_router::{HttpOptions, Options, Router};
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::cluster::{bounded, tokens};
use crate::http_client::{Call, HttpCluster, Response, with_http};
use crate::tenants::{Folder, digest};
use inflight_scripted::WorkerProfile;

/// Checks a refusal in Anthropic's envelope, with its id.
fn check(refused: &Response, status: u16, kind: &str) {
    assert_eq!(refused.status, status, "{refused:?}");
    assert_eq!(refused.headers["content-type"], "application/json");
    let body = refused.json();
    assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
    assert!(body["error"]["message"].is_string(), "{body}");
    assert_eq!(refused.headers["request-id"], refused.headers["x-request-id"]);
}

#[tokio::test]
async fn refusals_of_the_layers_below_v1_messages_are_anthropics() {
    bounded(async {
        let folder = Folder::new();
        let file = format!(
            "[tenants.acme]\nlimits = {{ concurrent_requests = 1 }}\nkeys = [{{ name = \"main\", sha256 = \"{}\" }}]\n",
            digest("acme")
        );
        let tenants_file = Some(folder.write("tenants.toml", &file));
        let message_time_max = Duration::from_millis(200);
        let options = Options { tenants_file, message_time_max, ..with_http(HttpOptions::default()) };
        let mut http = HttpCluster::start(options).await;
        let key = [("x-api-key", "acme")];
        let address = http.address;
        let send = async |method: &'static str, path: &'static str, body: &'static str| {
            Call::send(address, method, path, &key, body.as_bytes()).await
        };
        let unknown = send("POST", "/v1/messages/batches", "{}").await.response().await;
        check(&unknown, 404, "not_found_error");
        let wrong = send("GET", "/v1/messages", "").await.response().await;
        check(&wrong, 405, "invalid_request_error");
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = "POST /v1/messages HTTP/1.1\r\nhost: localhost\r\nx-api-key: acme\r\ncontent-length: 10\r\n\r\n{";
        stream.write_all(head.as_bytes()).await.unwrap();
        check(&Call::over(stream).response().await, 408, "invalid_request_error");
        let ask = r#"{"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}"#;
        let first = send("POST", "/v1/messages", ask).await;
        let submit = http.session.submit().await;
        let limited = send("POST", "/v1/messages", ask).await.response().await;
        check(&limited, 429, "rate_limit_error");
        assert!(limited.headers["retry-after"].parse::<u64>().unwrap() >= 1);
        http.session.finish(&submit, 0, &tokens("a"), inflight_proto::v1::FinishReason::Length);
        assert_eq!(first.response().await.status, 200);
    })
    .await;
}

#[tokio::test]
async fn a_name_in_a_path_or_query_is_decoded_or_refused_in_the_envelope() {
    bounded(async {
        let profile = WorkerProfile { model: "meta/tiny v1", ..WorkerProfile::default() };
        let http = HttpCluster::over(profile, with_http(HttpOptions::default())).await;
        let refused = http.get("/v1/models/%ff").await;
        assert_eq!(refused.status, 400, "{refused:?}");
        assert_eq!(refused.headers["content-type"], "application/json");
        assert_eq!(refused.json()["error"]["type"], "invalid_request_error");
        for path in ["/v1/models/meta/tiny%20v1", "/v1/models/meta%2Ftiny%20v1"] {
            assert_eq!(http.get(path).await.json()["id"], "meta/tiny v1", "{path}");
        }
        for query in ["model=meta%2Ftiny%20v1", "x=1&model=meta/tiny+v1", "", "model="] {
            let info = http.get(&format!("/tokenizer_info?{query}")).await;
            assert_eq!(info.status, 200, "{query}: {info:?}");
            assert_eq!(info.json()["bos_token"], "<|begin_of_text|>", "{query}");
        }
        let unknown = http.get("/tokenizer_info?model=meta%2Fother").await;
        assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("model_not_found")));
        assert!(unknown.body.contains("meta/other"), "{unknown:?}");
        assert_eq!(http.get("/tokenizer_info?model=%ff").await.status, 400);
    })
    .await;
}

#[tokio::test]
async fn a_fault_of_the_router_has_the_headers_of_every_response() {
    bounded(async {
        let http = HttpOptions {
            metrics: true,
            cors_origins: vec!["https://chat.example".to_owned()],
            ..HttpOptions::default()
        };
        let listen = "127.0.0.1:0".parse().unwrap();
        let options = Options { listen, workers: vec!["127.0.0.1:1".to_owned()], ..with_http(http) };
        let router = Router::bind(options).await.unwrap();
        let router = router.with_metrics(Arc::new(|| panic!("a fault for the test")));
        let address = router.http_address().unwrap();
        let serving = tokio::spawn(router.serve(Default::default()));
        let headers = [("origin", "https://chat.example"), ("x-request-id", "mine")];
        let fault = Call::send(address, "GET", "/metrics", &headers, b"").await.response().await;
        assert_eq!((fault.status, &fault.json()["error"]["type"]), (500, &json!("server_error")));
        assert_eq!(fault.headers["x-request-id"], "mine");
        assert_eq!(fault.headers["access-control-allow-origin"], "https://chat.example");
        assert!(!fault.body.contains("a fault for the test"), "{fault:?}");
        serving.abort();
    })
    .await;
}
