use std::future::Future;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use inflight_fixtures::Family;
use inflight_proto::v1;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_router::text::Tokenizer;
use inflight_router::{DispatcherOptions, Handle, Options, Router};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};

use inflight_scripted::ScriptedWorker;

/// Options of a dispatcher whose queue holds this many requests.
pub fn queue_of(requests: usize) -> DispatcherOptions {
    let mut options = DispatcherOptions::default();
    options.queue.limits.requests = requests;
    options
}

/// Running router with a client.
pub struct Cluster {
    pub client: InferenceClient<Channel>,
    pub channel: Channel,
    pub address: std::net::SocketAddr,
    /// Address of the HTTP APIs, if the options have them.
    pub http: Option<std::net::SocketAddr>,
    pub handle: Handle,
    pub drain: CancellationToken,
    pub serving: tokio::task::JoinHandle<Result<(), inflight_router::Error>>,
}

impl Cluster {
    /// Starts a router over these workers.
    pub async fn start(workers: &[&ScriptedWorker], options: Options) -> Self {
        Self::of(workers.iter().map(|worker| worker.address), options).await
    }

    /// Starts a router over the workers at these addresses.
    pub async fn of(workers: impl IntoIterator<Item = std::net::SocketAddr>, options: Options) -> Self {
        let _ = (metrics(), spans());
        let workers = workers.into_iter().map(|worker| worker.to_string()).collect();
        let listen = "127.0.0.1:0".parse().unwrap();
        let fast = Duration::from_millis(20);
        let options = Options { listen, workers, reconnect_backoff_max: fast, ..options };
        let router = Router::bind(options).await.unwrap();
        let router = router.with_metrics(Arc::new(|| metrics().render()));
        let http = router.http_address();
        let (handle, drain) = (router.handle(), CancellationToken::new());
        let endpoint =
            tonic::transport::Endpoint::from_shared(format!("http://{}", router.address())).unwrap();
        // A small buffer, so that a client that does not read soon blocks its stream.
        let endpoint = endpoint.initial_stream_window_size(65_535);
        let address = router.address();
        let serving = tokio::spawn(router.serve(drain.clone()));
        // With TLS, the test opens its own channel.
        let channel = endpoint.connect_lazy();
        let client = InferenceClient::new(channel.clone());
        Self { client, channel, address, http, handle, drain, serving }
    }

    /// Starts a generation.
    pub async fn generate(&mut self, request: v1::GenerateRequest) -> Result<Generated, Status> {
        let stream = self.client.generate(request).await?.into_inner();
        Ok(Generated::from(stream))
    }

    /// Starts a generation with a deadline.
    pub async fn generate_within(&mut self, request: v1::GenerateRequest, timeout: Duration) -> Generated {
        let mut request = Request::new(request);
        let value = format!("{}m", timeout.as_millis()).parse().unwrap();
        request.metadata_mut().insert("grpc-timeout", value);
        Generated::from(self.client.generate(request).await.unwrap().into_inner())
    }
}

/// Returns the ended spans of a trace. All tests of the process share one subscriber.
pub fn spans_of(trace: &str) -> Vec<SpanData> {
    let spans = spans().0.lock().unwrap();
    spans.iter().filter(|span| span.span_context.trace_id().to_string() == trace).cloned().collect()
}

fn spans() -> &'static Spans {
    static SPANS: OnceLock<Spans> = OnceLock::new();
    SPANS.get_or_init(|| {
        let spans = Spans::default();
        opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
        let provider = SdkTracerProvider::builder().with_simple_exporter(spans.clone()).build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let filter = tracing_subscriber::filter::LevelFilter::INFO;
        let subscriber = tracing_subscriber::registry().with(layer.with_filter(filter));
        tracing::subscriber::set_global_default(subscriber).unwrap();
        spans
    })
}

/// Collects ended spans.
#[derive(Debug, Clone, Default)]
struct Spans(Arc<Mutex<Vec<SpanData>>>);

impl SpanExporter for Spans {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.0.lock().unwrap().extend(batch);
        Ok(())
    }
}

/// Renders the metrics of the process for Prometheus.
pub fn metrics() -> &'static PrometheusHandle {
    static METRICS: OnceLock<PrometheusHandle> = OnceLock::new();
    METRICS.get_or_init(|| {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        metrics::set_global_recorder(recorder).unwrap();
        inflight_router::metrics::describe();
        handle
    })
}

/// Stream as its client receives it.
pub struct Generated {
    stream: Streaming<v1::GenerateResponse>,
    /// Text so far, by choice.
    pub text: Vec<String>,
    pub token_ids: Vec<Vec<u32>>,
    pub logprobs: Vec<v1::PositionLogprobs>,
    pub prompt_logprobs: Vec<v1::PromptLogprobs>,
    pub started: Option<v1::GenerationStarted>,
    pub changes: Vec<v1::FingerprintChanged>,
    pub finished: Vec<v1::ChoiceFinished>,
    pub completed: Option<v1::GenerationCompleted>,
}

impl From<Streaming<v1::GenerateResponse>> for Generated {
    fn from(stream: Streaming<v1::GenerateResponse>) -> Self {
        Self {
            stream,
            text: vec![String::new(); 16],
            token_ids: vec![Vec::new(); 16],
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            started: None,
            changes: Vec::new(),
            finished: Vec::new(),
            completed: None,
        }
    }
}

impl Generated {
    /// Receives the next message; returns false at the end of the stream.
    pub async fn advance(&mut self) -> Result<bool, Status> {
        let Some(message) = self.stream.message().await? else { return Ok(false) };
        assert!(self.completed.is_none(), "nothing follows `completed`");
        match message.event.unwrap() {
            Event::Started(started) => {
                assert!(self.started.replace(started).is_none(), "`started` comes once");
            }
            Event::Delta(delta) => {
                assert!(self.started.is_some(), "`started` comes first");
                let choice = delta.choice as usize;
                self.text[choice].push_str(&delta.text);
                self.token_ids[choice].extend(delta.token_ids);
                self.logprobs.extend(delta.logprobs);
            }
            Event::PromptLogprobs(prompt) => {
                assert!(self.token_ids.iter().all(Vec::is_empty), "they come before the output");
                self.prompt_logprobs.push(prompt);
            }
            Event::Finished(finished) => self.finished.push(finished),
            Event::FingerprintChanged(changed) => self.changes.push(changed),
            Event::Completed(completed) => self.completed = Some(completed),
        }
        Ok(true)
    }

    /// Reads until `text` of the first choice has arrived.
    pub async fn until_text(&mut self, text: &str) {
        while self.text[0] != text {
            assert!(text.starts_with(&self.text[0]), "got {:?} on the way to {text:?}", self.text[0]);
            assert!(self.advance().await.unwrap(), "the stream ended at {:?}", self.text[0]);
        }
    }

    /// Reads to the end.
    pub async fn read_to_end(&mut self) -> Result<(), Status> {
        while self.advance().await? {}
        assert!(self.completed.is_some(), "a stream without an error ends with `completed`");
        Ok(())
    }

    pub fn usage(&self) -> v1::Usage {
        self.completed.as_ref().unwrap().usage.clone().unwrap()
    }
}

/// Returns a request to continue a text.
pub fn text(text: &str) -> v1::GenerateRequest {
    v1::GenerateRequest { input: Some(Input::Text(text.to_owned())), ..Default::default() }
}

/// Returns the tokens of a text in the vocabulary of the scripted workers.
pub fn tokens(text: &str) -> Vec<u32> {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let load = || Tokenizer::from_json(Family::Llama3.tokenizer_json().as_bytes()).unwrap();
    TOKENIZER.get_or_init(load).encode_rendered(text).unwrap()
}

/// Fails a test that hangs.
pub async fn bounded(test: impl Future<Output = ()>) {
    tokio::time::timeout(Duration::from_secs(60), test).await.expect("the test hangs");
}

/// Returns the sum of a counter over its labels.
pub fn count(name: &str, label: &str) -> f64 {
    let rendered = metrics().render();
    let lines = rendered.lines().filter(|line| line.starts_with(name) && line.contains(label));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
