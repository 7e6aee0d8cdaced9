//! Who may use the Admin service and the page of the live view, and what they may do.

use inflight_proto::v1;
use inflight_router::{Admin, HttpOptions, Options};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixListener;
use tonic::{Code, Status};

use crate::cluster::bounded;
use crate::http_client::{Call, HttpCluster, with_http};
use crate::live::{Viewer, operator};
use crate::tenants::{Folder, digest, started, with_key};

fn code_of<T>(answer: Result<T, Status>) -> Code {
    answer.err().map_or(Code::Ok, |status| status.code())
}

#[tokio::test]
async fn only_administrators_look_and_one_that_is_no_more_is_sent_away() {
    bounded(async {
        let file = |admin: bool| {
            let keys = |name| format!("[tenants.{name}]\nkeys = [{{ sha256 = \"{}\" }}]\n", digest(name));
            format!("{}admin = {admin}\n{}", keys("boss"), keys("guest"))
        };
        // Nothing listens on the supervisor's socket.
        let supervisor = Some(Folder::new().0.join("control"));
        let options = Options { admin: Admin::On, supervisor, ..with_http(HttpOptions::default()) };
        let (cluster, _session, folder, _worker) = started(&file(true), options).await;
        let list = v1::ListRequestsRequest::default();
        let life = v1::GetRequestRequest { number: 1, ..Default::default() };
        let denied = [("guest", Code::PermissionDenied), ("nobody", Code::Unauthenticated)];
        for (key, wanted) in [("boss", Code::Ok)].into_iter().chain(denied) {
            let mut operator = operator(&cluster);
            let found = if wanted == Code::Ok { Code::NotFound } else { wanted };
            let diagnose = with_key(v1::DiagnoseClusterRequest::default(), key);
            let codes = [
                code_of(operator.list_requests(with_key(list.clone(), key)).await),
                code_of(operator.get_request(with_key(life.clone(), key)).await),
                code_of(operator.watch(with_key(v1::WatchRequest::default(), key)).await),
                code_of(operator.diagnose_cluster(diagnose).await),
            ];
            assert_eq!(codes, [wanted, found, wanted, wanted], "{key}");
        }
        assert_eq!(operator(&cluster).list_requests(list).await.unwrap_err().code(), Code::Unauthenticated);
        let http = cluster.http.unwrap();
        for (key, [life, events, killed]) in
            [("boss", [404, 200, 500]), ("guest", [403; 3]), ("nobody", [401; 3])]
        {
            let bearer = format!("Bearer {key}");
            let key = [("authorization", bearer.as_str())];
            let got = Call::send(http, "GET", "/ui/requests/1", &key, b"").await.response().await.status;
            assert_eq!(got, life, "{bearer}");
            let mut watch = Call::send(http, "GET", "/ui/events", &key, b"").await;
            assert_eq!(watch.head().await.0, events, "{bearer}");
            let as_page = [("host", "127.0.0.1"), ("x-inflight-ui", "1"), key[0]];
            assert_eq!(kill(http, "/ui/workers/0/kill", &as_page).await, killed, "{bearer}");
        }
        // The pages themselves show nothing; each may run its own script alone.
        let mut policies = Vec::new();
        for path in ["/ui", "/chat"] {
            let page = Call::send(http, "GET", path, &[], b"").await.response().await;
            assert_eq!(page.status, 200);
            policies.push(page.headers["content-security-policy"].clone());
            assert_eq!(page.headers["x-frame-options"], "DENY");
        }
        assert!(policies.iter().all(|policy| policy.contains("script-src 'sha256-")), "{policies:?}");
        assert_ne!(policies[0], policies[1]);

        let watch = with_key(v1::WatchRequest::default(), "boss");
        let mut watch = operator(&cluster).watch(watch).await.unwrap().into_inner();
        watch.message().await.unwrap().unwrap();
        folder.write("tenants.toml", &file(false));
        let status = loop {
            if let Err(status) = watch.message().await {
                break status;
            }
        };
        assert_eq!(status.code(), Code::PermissionDenied);
        // Nor does one whose key was taken away.
        folder.write("tenants.toml", &file(true));
        let watch = async || operator(&cluster).watch(with_key(v1::WatchRequest::default(), "boss")).await;
        let mut watch = loop {
            if let Ok(watch) = watch().await {
                break watch.into_inner();
            }
        };
        folder.write("tenants.toml", &file(true).replace(&digest("boss"), &digest("successor")));
        let status = loop {
            if let Err(status) = watch.message().await {
                break status;
            }
        };
        assert_eq!(status.code(), Code::Unauthenticated);
    })
    .await;
}

#[tokio::test]
async fn without_admin_there_is_neither_service_nor_page() {
    bounded(async {
        let http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let status = Viewer::enter(&http.cluster, true).await.err().unwrap();
        assert_eq!(status.code(), Code::Unimplemented);
        for path in ["/chat", "/ui", "/ui/events", "/ui/requests/1"] {
            assert_eq!(http.get(path).await.status, 404, "{path}");
        }
    })
    .await;
}

/// Posts to a path with these headers alone; returns the status.
async fn kill(address: std::net::SocketAddr, path: &str, headers: &[(&str, &str)]) -> u16 {
    status_of(address, "POST", path, headers).await
}

/// Returns the status of a call with these headers alone. The host header of other calls is the address.
async fn status_of(address: std::net::SocketAddr, method: &str, path: &str, headers: &[(&str, &str)]) -> u16 {
    let mut head = format!("{method} {path} HTTP/1.1\r\ncontent-length: 0\r\n");
    headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
    Call::over(stream).head().await.0
}

#[tokio::test]
async fn without_keys_a_page_whose_name_was_rebound_to_this_machine_reads_nothing() {
    bounded(async {
        let options = Options { admin: Admin::On, ..with_http(HttpOptions::default()) };
        let http = HttpCluster::start(options.clone()).await;
        let keyed = format!("[tenants.boss]\nadmin = true\nkeys = [{{ sha256 = \"{}\" }}]\n", digest("boss"));
        let (with_keys, _session, _folder, _worker) = started(&keyed, options).await;
        let own = http.address.to_string();
        let key = ("authorization", "Bearer boss");
        for (host, allowed) in [("rebound.example", false), (own.as_str(), true), ("localhost", true)] {
            for (path, found) in [("/ui/events", 200), ("/ui/requests/1", 404)] {
                let got = status_of(http.address, "GET", path, &[("host", host)]).await;
                assert_eq!(got, if allowed { found } else { 403 }, "{path} as {host}");
                // Another site's page does not have the key.
                let got = status_of(with_keys.http.unwrap(), "GET", path, &[("host", host), key]).await;
                assert_eq!(got, found, "{path} as {host} with a key");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_worker_is_killed_only_as_the_page_asks_and_only_under_up() {
    bounded(async {
        let header = [("host", "127.0.0.1"), ("x-inflight-ui", "1")];
        let plain = Options { admin: Admin::On, ..with_http(HttpOptions::default()) };
        let http = HttpCluster::start(plain.clone()).await;
        assert_eq!(kill(http.address, "/ui/workers/0/kill", &header).await, 403, "not under `up`");

        let folder = Folder::new();
        let supervisor = folder.0.join("control");
        let listener = UnixListener::bind(&supervisor).unwrap();
        let read_only =
            Options { admin: Admin::ReadOnly, supervisor: Some(supervisor.clone()), ..plain.clone() };
        let http = HttpCluster::start(read_only).await;
        assert_eq!(kill(http.address, "/ui/workers/0/kill", &header).await, 403, "read-only");

        let http = HttpCluster::start(Options { supervisor: Some(supervisor), ..plain }).await;
        let rebound = [("host", "rebound.example"), ("x-inflight-ui", "1")];
        for (path, headers, wanted) in [
            ("/ui/workers/0/kill", &header[..1], 403),
            ("/ui/workers/0/kill", &rebound[..], 403),
            ("/ui/workers/1/kill", &header[..], 404),
            ("/ui/workers/-1/kill", &header[..], 404),
        ] {
            assert_eq!(kill(http.address, path, headers).await, wanted, "{path} {headers:?}");
        }
        let supervise = async {
            for answer in ["ok\n", "the worker does not run now\n"] {
                let (stream, _) = listener.accept().await.unwrap();
                let (reader, mut writer) = stream.into_split();
                let mut line = String::new();
                BufReader::new(reader).read_line(&mut line).await.unwrap();
                assert_eq!(line, "kill 1\n");
                writer.write_all(answer.as_bytes()).await.unwrap();
            }
        };
        let ask = async {
            assert_eq!(kill(http.address, "/ui/workers/0/kill", &header).await, 204);
            assert_eq!(kill(http.address, "/ui/workers/0/kill", &header).await, 500);
        };
        futures::join!(supervise, ask);
        let viewer = Viewer::enter(&http.cluster, true).await;
        let mut viewer = viewer.unwrap();
        viewer.advance().await;
        assert!(viewer.last.cluster.as_ref().unwrap().can_kill_workers);
        assert_eq!(viewer.worker("scripted").up_number, 1);
    })
    .await;
}
