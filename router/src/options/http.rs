//! Options of the HTTP APIs.

use std::time::Duration;

use inflight_options::{ListenAt, duration};

/// Options of the HTTP APIs.
#[derive(Debug, Clone, clap::Args)]
pub struct HttpOptions {
    /// Address on which to listen for HTTP clients (OpenAI's and Anthropic's APIs), or `off`; port 0 picks a
    /// free one. The gRPC port then takes these clients, too
    #[arg(
        id = "http_listen",
        long = "http-listen",
        value_name = "ADDRESS",
        default_value = "off",
        env = "INFLIGHT_ROUTER_HTTP_LISTEN"
    )]
    pub listen: ListenAt,
    /// Origins of browsers that may call the HTTP APIs, separated by commas; `*` is any
    #[arg(
        id = "http_cors",
        long = "http-cors",
        value_name = "ORIGIN",
        value_delimiter = ',',
        env = "INFLIGHT_ROUTER_HTTP_CORS"
    )]
    pub cors_origins: Vec<String>,
    /// Names under which callers without a key reach the HTTP APIs on a loopback address, beside localhost and addresses, separated
    /// by commas; `*` is any. For a reverse proxy on the same machine that passes on the host
    #[arg(
        id = "http_hosts",
        long = "http-hosts",
        value_name = "NAME",
        value_delimiter = ',',
        env = "INFLIGHT_ROUTER_HTTP_HOSTS"
    )]
    pub hosts: Vec<String>,
    /// Serve /metrics on the address of the HTTP APIs too, to every client
    #[arg(
        id = "http_metrics",
        long = "http-metrics",
        value_name = "BOOL",
        default_value_t = false,
        action = clap::ArgAction::Set,
        env = "INFLIGHT_ROUTER_HTTP_METRICS"
    )]
    pub metrics: bool,
    /// Add the timings of each request to its HTTP response
    #[arg(
        id = "http_timings",
        long = "http-timings",
        value_name = "BOOL",
        default_value_t = false,
        action = clap::ArgAction::Set,
        env = "INFLIGHT_ROUTER_HTTP_TIMINGS"
    )]
    pub timings: bool,
    /// Time without output after which an HTTP stream gets a comment that keeps its connection alive
    // Headers of a stream without output are sent after that time too.
    #[arg(
        id = "http_keepalive",
        long = "http-keepalive",
        value_name = "DURATION",
        default_value = "10s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_HTTP_KEEPALIVE"
    )]
    pub keepalive: Duration,
}

impl Default for HttpOptions {
    fn default() -> Self {
        inflight_options::defaults()
    }
}
