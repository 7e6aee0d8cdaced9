//! Worker discovery: fixed addresses, DNS, or Kubernetes EndpointSlices. A source publishes the whole set of
//! addresses on each change; a failing source keeps its last set.

pub(crate) mod kubernetes;

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use tokio::sync::watch;

use crate::metrics as names;
use crate::options::worker_endpoint;

/// Addresses published by a source, each `host:port`; `None` before its first answer.
pub(crate) type Endpoints = Option<BTreeSet<String>>;

/// Discovery source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// One worker, `host:port`.
    Fixed(String),
    /// All addresses of a name, `dns://host:port`; resolved periodically.
    Dns {
        /// DNS name.
        host: String,
        /// Port of the workers.
        port: u16,
    },
    /// Endpoints of a service, `kubernetes://namespace/service:port`; watched.
    Kubernetes {
        /// Namespace of the service.
        namespace: String,
        /// Name of the service.
        service: String,
        /// Port of the workers.
        port: u16,
    },
}

/// Invalid discovery source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Malformed text.
    #[error(
        "{text:?} names no workers: {reason}; give host:port, dns://host:port or kubernetes://namespace/service:port"
    )]
    Malformed {
        /// The given text.
        text: String,
        /// The reason.
        reason: String,
    },
}

impl FromStr for Source {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<Self, SourceError> {
        let malformed =
            |reason: &str| SourceError::Malformed { text: text.to_owned(), reason: reason.to_owned() };
        let named = |rest: &str| {
            let (name, port) = rest.rsplit_once(':').ok_or_else(|| malformed("the port is missing"))?;
            let port = port.parse().ok().filter(|port| *port > 0);
            let port: u16 = port.ok_or_else(|| malformed("the port is no number from 1 to 65535"))?;
            if name.is_empty() {
                return Err(malformed("the name is missing"));
            }
            Ok((name.to_owned(), port))
        };
        if let Some(rest) = text.strip_prefix("dns://") {
            let (host, port) = named(rest)?;
            worker_endpoint(rest).map_err(|error| malformed(&error.to_string()))?;
            return Ok(Self::Dns { host, port });
        }
        if let Some(rest) = text.strip_prefix("kubernetes://") {
            let (name, port) = named(rest)?;
            let (namespace, service) =
                name.split_once('/').ok_or_else(|| malformed("the namespace is missing"))?;
            // Restricted to valid Kubernetes names, so that nothing else gets into an API request.
            let label = |name: &str| {
                !name.is_empty()
                    && name.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-')
            };
            if !label(namespace) || !label(service) {
                return Err(malformed("names have lower-case letters, digits and hyphens"));
            }
            let (namespace, service) = (namespace.to_owned(), service.to_owned());
            return Ok(Self::Kubernetes { namespace, service, port });
        }
        worker_endpoint(text).map_err(|error| malformed(&error.to_string()))?;
        Ok(Self::Fixed(text.to_owned()))
    }
}

impl Source {
    /// Returns a stable label for metrics.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Fixed(_) => "fixed",
            Self::Dns { .. } => "dns",
            Self::Kubernetes { .. } => "kubernetes",
        }
    }

    /// Updates `found` while polled.
    pub(crate) async fn follow(self, interval: Duration, found: watch::Sender<Endpoints>) {
        match self {
            Self::Fixed(address) => {
                found.send_replace(Some(BTreeSet::from([address])));
                std::future::pending().await
            }
            Self::Dns { host, port } => {
                let lookup = async |host: &str, port| {
                    tokio::net::lookup_host((host, port)).await.map(Iterator::collect)
                };
                resolve(&host, port, interval, lookup, found).await;
            }
            Self::Kubernetes { namespace, service, port } => {
                kubernetes::follow(&namespace, &service, port, interval, found).await;
            }
        }
    }
}

/// Resolves a name periodically. An empty answer counts as a failure: a name server that has lost its data
/// must not remove all workers.
async fn resolve<L>(host: &str, port: u16, interval: Duration, lookup: L, found: watch::Sender<Endpoints>)
where
    L: AsyncFn(&str, u16) -> io::Result<Vec<SocketAddr>>,
{
    let mut failing = false;
    loop {
        let answer =
            match tokio::time::timeout(interval.max(Duration::from_secs(1)), lookup(host, port)).await {
                Ok(Ok(addresses)) if addresses.is_empty() => Err("it has no address".to_owned()),
                Ok(Ok(addresses)) => Ok(addresses.iter().map(SocketAddr::to_string).collect()),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("no answer in time".to_owned()),
            };
        match answer {
            Ok(addresses) => {
                failing = false;
                publish(&found, addresses);
            }
            Err(reason) => {
                failed("dns");
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(host, reason, "worker discovery lookup failed; keeping known workers");
                }
            }
        }
        tokio::time::sleep(interval).await;
    }
}

/// Publishes a set of addresses if it has changed.
pub(crate) fn publish(found: &watch::Sender<Endpoints>, addresses: BTreeSet<String>) {
    found.send_if_modified(|before| {
        let differs = before.as_ref() != Some(&addresses);
        if differs {
            *before = Some(addresses);
        }
        differs
    });
}

pub(crate) fn failed(source: &'static str) {
    metrics::counter!(names::DISCOVERY_FAILURES, "source" => source).increment(1);
}

/// Waits for a changed set of addresses; `None` if the source has ended.
pub(crate) async fn changed(found: &mut watch::Receiver<Endpoints>) -> Option<Endpoints> {
    found.changed().await.ok()?;
    Some(found.borrow_and_update().clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn sources_are_parsed() {
        let parse = |text: &str| text.parse::<Source>();
        assert_eq!(parse("worker-1:8652"), Ok(Source::Fixed("worker-1:8652".to_owned())));
        assert_eq!(
            parse("dns://workers.default.svc:8652"),
            Ok(Source::Dns { host: "workers.default.svc".to_owned(), port: 8652 })
        );
        let kubernetes = parse("kubernetes://prod/inflight-worker:8652");
        let (namespace, service) = ("prod".to_owned(), "inflight-worker".to_owned());
        assert_eq!(kubernetes, Ok(Source::Kubernetes { namespace, service, port: 8652 }));
        for bad in [
            "",
            "worker",
            "dns://",
            "dns://name",
            "dns://name:0",
            "dns://na me:1",
            "dns://name:1/path",
            "kubernetes://service:1",
            "kubernetes://a/b",
            "kubernetes://a/b/c:1",
            "kubernetes://A/b:1",
            "etcd://a:1",
        ] {
            assert!(matches!(parse(bad), Err(SourceError::Malformed { .. })), "{bad:?}: {:?}", parse(bad));
        }
    }

    #[tokio::test]
    async fn a_name_is_resolved_periodically_and_a_failure_removes_no_worker() {
        let answers: Vec<io::Result<Vec<&str>>> = vec![
            Err(io::Error::other("no such name")),
            Ok(vec!["10.0.0.1:7", "10.0.0.2:7"]),
            Ok(vec!["10.0.0.2:7", "10.0.0.1:7"]),
            Ok(vec![]),
            Err(io::Error::other("server failed")),
            Ok(vec!["10.0.0.2:7", "10.0.0.3:7"]),
        ];
        let answers = Mutex::new(answers.into_iter());
        let lookup = async |_: &str, _: u16| {
            let next = answers.lock().unwrap().next();
            match next {
                Some(answer) => answer.map(|list| list.iter().map(|a| a.parse().unwrap()).collect()),
                None => std::future::pending().await,
            }
        };
        let (sender, mut found) = watch::channel(None);
        let followed = async {
            let mut seen = Vec::new();
            while seen.len() < 2 {
                seen.push(changed(&mut found).await.unwrap().unwrap());
            }
            seen
        };
        let seen = tokio::select! {
            biased;
            () = resolve("workers", 7, Duration::from_millis(1), lookup, sender) => unreachable!(),
            seen = followed => seen,
        };
        let set = |list: &[&str]| list.iter().map(|a| (*a).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(seen, [set(&["10.0.0.1:7", "10.0.0.2:7"]), set(&["10.0.0.2:7", "10.0.0.3:7"])]);
    }
}
