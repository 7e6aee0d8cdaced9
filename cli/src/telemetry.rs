//! Set-up of logs, OpenTelemetry traces and Prometheus metrics of a role.

use std::io::{self, IsTerminal as _};
use std::net::SocketAddr;
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, fmt};

use crate::exit::{CommandError, Exit};
use crate::metrics_endpoint;
use crate::units::ListenAt;

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Human-readable lines.
    Text,
    /// JSON lines.
    Json,
}

/// Options of logs and traces, the same for every role.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Telemetry")]
pub struct Args {
    /// Log filter: a level, or per-module directives such as `info,inflight_router=debug`; logs go to stderr
    #[arg(long, value_name = "FILTER", default_value = "info", env = "INFLIGHT_LOG")]
    pub log: String,
    /// Log format
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text, env = "INFLIGHT_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// OTLP/gRPC endpoint to export trace spans to, such as http://127.0.0.1:4317 [default: none]
    #[arg(long, value_name = "URL", env = "INFLIGHT_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// Sampling ratio of traces that start here; the caller's sampling decision is respected
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, env = "INFLIGHT_OTLP_SAMPLE_RATIO")]
    pub otlp_sample_ratio: f64,
}

/// Telemetry of the process, shut down by [`Telemetry::stop`].
#[derive(Debug)]
pub struct Telemetry {
    provider: Option<SdkTracerProvider>,
    /// Listen address of the Prometheus endpoint, if enabled.
    pub metrics: Option<SocketAddr>,
}

/// Sets up logs, traces and the Prometheus endpoint of this process. Must be called within a Tokio runtime.
///
/// `service` is the OpenTelemetry service name, `instance` its instance id; `histograms` lists metric names
/// with their buckets.
///
/// # Errors
/// The filter or the OTLP endpoint does not parse, or the metrics port is taken.
pub async fn start(
    args: &Args,
    service: &'static str,
    instance: &str,
    metrics: ListenAt,
    histograms: &[(&str, &[f64])],
) -> Result<Telemetry, CommandError> {
    let filter = EnvFilter::builder().parse(&args.log).map_err(|error| {
        CommandError::new(Exit::Usage, format!("--log {:?} is not a filter: {error}", args.log))
    })?;
    let provider =
        args.otlp_endpoint.as_deref().map(|url| exporter(url, args, service, instance)).transpose()?;
    let traces = provider.as_ref().map(|provider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("inflight"))
            .with_location(false)
            .with_threads(false)
            // Only spans of this workspace: the exporter's HTTP client would otherwise trace its own calls.
            .with_filter(filter_fn(|metadata| {
                metadata.target().starts_with("inflight") && *metadata.level() <= LevelFilter::INFO
            }))
    });
    let logs = match args.log_format {
        LogFormat::Text => fmt::layer()
            .with_writer(io::stderr)
            .with_ansi(io::stderr().is_terminal())
            .with_filter(filter)
            .boxed(),
        LogFormat::Json => {
            fmt::layer().json().with_writer(io::stderr).with_current_span(false).with_filter(filter).boxed()
        }
    };
    opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
    if let Some(provider) = &provider {
        opentelemetry::global::set_tracer_provider(provider.clone());
    }
    tracing_subscriber::registry()
        .with(traces)
        .with(logs)
        .try_init()
        .map_err(|error| CommandError::chain("cannot set up logging", &error))?;
    log_panics();
    let metrics = match metrics {
        ListenAt::Off => None,
        ListenAt::Address(address) => Some(metrics_endpoint::start(address, histograms).await?),
    };
    Ok(Telemetry { provider, metrics })
}

fn exporter(
    url: &str,
    args: &Args,
    service: &'static str,
    instance: &str,
) -> Result<SdkTracerProvider, CommandError> {
    if !(0.0..=1.0).contains(&args.otlp_sample_ratio) {
        let message = format!("--otlp-sample-ratio is {}; it must be in [0, 1]", args.otlp_sample_ratio);
        return Err(CommandError::new(Exit::Usage, message));
    }
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_endpoint(url)
        .with_timeout(Duration::from_secs(5))
        .build()
        .map_err(|error| CommandError::new(Exit::Usage, format!("--otlp-endpoint {url:?}: {error}")))?;
    let resource = Resource::builder()
        .with_service_name(service)
        .with_attribute(opentelemetry::KeyValue::new("service.instance.id", instance.to_owned()))
        .with_attribute(opentelemetry::KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build();
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(args.otlp_sample_ratio))))
        .with_resource(resource)
        .build())
}

/// Logs panics with a backtrace: a panic in a task ends the task, not the process.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let thread = std::thread::current();
        let message = panic.payload_as_str().unwrap_or("no message");
        let backtrace = std::backtrace::Backtrace::capture();
        tracing::error!(place, thread = thread.name().unwrap_or("unnamed"), %backtrace, "panic: {message}");
    }));
}

impl Telemetry {
    /// Exports the remaining spans, for at most 5 seconds.
    pub async fn stop(self) {
        let Some(provider) = self.provider else { return };
        // The shutdown blocks until the exporter has finished, which needs the runtime's threads.
        let flushed =
            tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(Duration::from_secs(5))).await;
        if let Ok(Err(error)) = flushed {
            tracing::warn!(%error, "failed to export the last spans");
        }
    }
}
