//! Kubernetes discovery: watches the EndpointSlices of a service.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch;

use super::{Endpoints, failed, publish};

/// Label of an EndpointSlice that names its service.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// Watches the endpoints of a service, with the pod's credentials or a kubeconfig.
pub(crate) async fn follow(
    namespace: &str,
    service: &str,
    port: u16,
    interval: Duration,
    found: watch::Sender<Endpoints>,
) {
    let client = loop {
        match Client::try_default().await {
            Ok(client) => break client,
            Err(error) => {
                failed("kubernetes");
                tracing::warn!(%error, "cannot reach the Kubernetes API; retrying");
                tokio::time::sleep(interval).await;
            }
        }
    };
    track(endpoints(client, namespace, service), port, &found).await;
}

/// Returns the changes of a service's slices. Lists, watches, relists after a lost watch, and backs off
/// between failures.
fn endpoints(
    client: Client,
    namespace: &str,
    service: &str,
) -> impl Stream<Item = watcher::Result<Event<EndpointSlice>>> + Send + use<> {
    let slices: Api<EndpointSlice> = Api::namespaced(client, namespace);
    let of_service = watcher::Config::default().labels(&format!("{SERVICE_LABEL}={service}"));
    watcher(slices, of_service).default_backoff()
}

/// Publishes the addresses of the ready endpoints of all slices to `found`.
async fn track(
    events: impl Stream<Item = watcher::Result<Event<EndpointSlice>>>,
    port: u16,
    found: &watch::Sender<Endpoints>,
) {
    let mut events = std::pin::pin!(events);
    let mut slices: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut listed = BTreeMap::new();
    let mut listing = false;
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => {
                listed.clear();
                listing = true;
            }
            Ok(Event::InitApply(slice)) => {
                listed.insert(slice.name_any(), ready(&slice, port));
            }
            // Slices that are missing in a list were deleted.
            Ok(Event::InitDone) => {
                slices = std::mem::take(&mut listed);
                listing = false;
            }
            Ok(Event::Apply(slice)) => {
                slices.insert(slice.name_any(), ready(&slice, port));
            }
            Ok(Event::Delete(slice)) => {
                slices.remove(&slice.name_any());
            }
            Err(error) => {
                failed("kubernetes");
                tracing::warn!(%error, "watch of EndpointSlices failed; keeping known workers");
                continue;
            }
        }
        if !listing {
            publish(found, slices.values().flatten().cloned().collect());
        }
    }
}

/// Returns the addresses of a slice's ready endpoints, without terminating ones.
fn ready(slice: &EndpointSlice, port: u16) -> BTreeSet<String> {
    let takes = |conditions: Option<&k8s_openapi::api::discovery::v1::EndpointConditions>| {
        conditions.is_none_or(|c| c.ready.unwrap_or(true) && !c.terminating.unwrap_or(false))
    };
    let endpoints = slice.endpoints.iter().flatten().filter(|endpoint| takes(endpoint.conditions.as_ref()));
    // The addresses of one endpoint are interchangeable.
    let addresses = endpoints.filter_map(|endpoint| endpoint.addresses.first());
    addresses
        .map(
            |address| {
                if address.contains(':') {
                    format!("[{address}]:{port}")
                } else {
                    format!("{address}:{port}")
                }
            },
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use futures::stream::BoxStream;
    use http_body_util::StreamBody;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tonic::codegen::Bytes;
    use tonic::codegen::http::{Request, Response};

    /// Response of the API server to one request: status and body lines.
    type Answer = (u16, BoxStream<'static, Value>);

    fn slice(name: &str, endpoints: &[(&str, Option<bool>, bool)]) -> Value {
        let endpoint = |(address, ready, terminating): &(&str, Option<bool>, bool)| json!({ "addresses": [address], "conditions": { "ready": ready, "terminating": terminating } });
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": { "name": name, "namespace": "prod", "resourceVersion": "1" },
            "addressType": "IPv4",
            "endpoints": endpoints.iter().map(endpoint).collect::<Vec<_>>(),
        })
    }

    fn list(slices: &[Value]) -> Answer {
        let list = json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSliceList",
            "metadata": { "resourceVersion": "1" },
            "items": slices,
        });
        (200, futures::stream::iter([list]).boxed())
    }

    fn watched(events: &[(&str, Value)], ends: bool) -> Answer {
        let lines: Vec<_> =
            events.iter().map(|(kind, object)| json!({ "type": kind, "object": object })).collect();
        let rest = if ends { futures::stream::empty().boxed() } else { futures::stream::pending().boxed() };
        (200, futures::stream::iter(lines).chain(rest).boxed())
    }

    fn gone() -> Value {
        json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410,
            "message": "too old resource version", "metadata": {} })
    }

    /// Returns a client of an API server that gives these responses in order and records its requests.
    fn server(answers: Vec<Answer>, asked: Arc<Mutex<Vec<String>>>) -> Client {
        let answers = Arc::new(Mutex::new(VecDeque::from(answers)));
        let service = tower::service_fn(move |request: Request<Body>| {
            asked.lock().unwrap().push(request.uri().to_string());
            let answer = answers.lock().unwrap().pop_front();
            async move {
                let Some((status, lines)) = answer else { std::future::pending().await };
                let frames = lines.map(|line| {
                    let text = format!("{line}\n");
                    Ok::<_, Infallible>(http_body::Frame::data(Bytes::from(text)))
                });
                Ok::<_, Infallible>(Response::builder().status(status).body(StreamBody::new(frames)).unwrap())
            }
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn endpoints_are_followed_through_lists_watches_expiry_and_failures() {
        let ready = Some(true);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let answers = vec![
            list(&[
                slice(
                    "a",
                    &[
                        ("10.0.0.1", ready, false),
                        ("10.0.0.2", None, false),
                        ("10.0.0.9", Some(false), false),
                    ],
                ),
                slice("b", &[("fd00::1", ready, false)]),
            ]),
            watched(
                &[
                    ("MODIFIED", slice("a", &[("10.0.0.1", ready, true), ("10.0.0.2", ready, false)])),
                    ("ADDED", slice("c", &[("10.0.0.3", ready, false)])),
                    ("DELETED", slice("b", &[])),
                    ("ERROR", gone()),
                ],
                true,
            ),
            (500, futures::stream::iter([json!({ "kind": "Status", "code": 500, "metadata": {} })]).boxed()),
            list(&[slice("c", &[("10.0.0.3", ready, false), ("10.0.0.4", ready, false)])]),
            watched(&[], false),
        ];
        let client = server(answers, asked.clone());
        let (sender, mut found) = watch::channel(None);
        let mut seen = Vec::new();
        let seeing = async {
            while seen.len() < 5 {
                seen.push(super::super::changed(&mut found).await.unwrap().unwrap());
            }
        };
        // Both run in one task, the tracking first, so that each change is observed.
        let events = endpoints(client, "prod", "inflight-worker").then(|event| async {
            tokio::task::yield_now().await;
            event
        });
        tokio::select! {
            biased;
            () = seeing => {}
            () = track(events, 8652, &sender) => unreachable!("the watch goes on for ever"),
        }
        let set = |list: &[&str]| list.iter().map(|a| format!("{a}:8652")).collect::<BTreeSet<_>>();
        assert_eq!(
            seen,
            [
                set(&["10.0.0.1", "10.0.0.2", "[fd00::1]"]),
                set(&["10.0.0.2", "[fd00::1]"]),
                set(&["10.0.0.2", "10.0.0.3", "[fd00::1]"]),
                set(&["10.0.0.2", "10.0.0.3"]),
                set(&["10.0.0.3", "10.0.0.4"]),
            ]
        );
        let asked = asked.lock().unwrap();
        assert!(
            asked[0].starts_with("/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"),
            "{asked:?}"
        );
        let labelled =
            |uri: &String| uri.contains("labelSelector=kubernetes.io%2Fservice-name%3Dinflight-worker");
        assert!(asked.iter().all(labelled), "{asked:?}");
    }
}
