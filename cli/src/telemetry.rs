//! Set-up of logs, Prometheus metrics, and the export of traces, metrics and logs over OTLP of a role.

use std::io::{self, IsTerminal as _};
use std::net::SocketAddr;
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_appender_tracing::layer::OpenTelemetryTracingBridge;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::logs::SdkLoggerProvider;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::{FilterExt as _, filter_fn};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, fmt};

use crate::exit::{CommandError, Exit};
use crate::metrics_compat::MetricsCompat;
use crate::metrics_endpoint;
use crate::otlp_metrics::MetricsExport;
use crate::trace_sampler::{RemoteParent, TraceSampler};
use inflight_options::{ListenAt, Span};

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Human-readable lines.
    Text,
    /// JSON lines.
    Json,
}

/// Kind of telemetry that is exported over OTLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum OtlpSignal {
    /// Spans of requests.
    Traces,
    /// All metrics.
    Metrics,
    /// Log events.
    Logs,
}

/// Options of logs, traces and metrics, the same for every role.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Telemetry")]
// Without a group: clap names it after the struct, and commands have several of the name `Args`.
#[group(skip)]
pub struct Args {
    /// Log filter: a level, or per-module directives such as `info,inflight_router=debug`; logs go to stderr
    #[arg(long, value_name = "FILTER", default_value = "info", env = "INFLIGHT_LOG")]
    pub log: String,
    /// Log format
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text, env = "INFLIGHT_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// OTLP/gRPC endpoint of a collector, such as http://127.0.0.1:4317 [default: none]
    #[arg(long, value_name = "URL", env = "INFLIGHT_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// Sampling ratio of traces: of a worker, of those that start there; of a router, of all, whatever their `traceparent` says
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, env = "INFLIGHT_OTLP_SAMPLE_RATIO")]
    pub otlp_sample_ratio: f64,
    /// Export the requests whose `traceparent` says so, and no others that have one, whatever the ratio: for routers whose callers
    /// are trusted with what their traces cost
    #[arg(long, value_name = "BOOL", default_value_t = false, action = clap::ArgAction::Set, env = "INFLIGHT_OTLP_TRUST_PARENT")]
    pub otlp_trust_parent: bool,
    /// Signals exported to --otlp-endpoint: traces, metrics, logs, separated by commas
    #[arg(
        long,
        value_name = "SIGNAL,...",
        value_enum,
        value_delimiter = ',',
        default_value = "traces",
        env = "INFLIGHT_OTLP_SIGNALS"
    )]
    pub otlp_signals: Vec<OtlpSignal>,
    /// Interval of the export of metrics to --otlp-endpoint
    #[arg(long, value_name = "DURATION", default_value = "15s", env = "INFLIGHT_OTLP_METRICS_INTERVAL")]
    pub otlp_metrics_interval: Span,
    /// Serve metrics under the names of another engine too, for autoscalers, gateways and dashboards that read those
    /// [default: none]
    #[arg(long, value_name = "ENGINE", value_enum, env = "INFLIGHT_METRICS_COMPAT")]
    pub metrics_compat: Option<MetricsCompat>,
}

impl Args {
    fn validate(&self) -> Result<(), CommandError> {
        let wrong = |message: String| Err(CommandError::new(Exit::Usage, message));
        if !(0.0..=1.0).contains(&self.otlp_sample_ratio) {
            return wrong(format!("--otlp-sample-ratio is {}; it must be in [0, 1]", self.otlp_sample_ratio));
        }
        let beyond_traces = self.otlp_signals.iter().any(|signal| *signal != OtlpSignal::Traces);
        match self.otlp_endpoint.as_deref() {
            None if beyond_traces => {
                wrong("--otlp-signals needs --otlp-endpoint, to which it exports".to_owned())
            }
            Some(url) if url.starts_with("https:") => wrong(format!(
                "--otlp-endpoint {url:?}: TLS to a collector is not supported; use one on this host"
            )),
            _ => {
                let allowed = Duration::from_secs(1)..=Duration::from_secs(3600);
                if allowed.contains(&self.otlp_metrics_interval.0) {
                    return Ok(());
                }
                wrong(format!(
                    "--otlp-metrics-interval is {}; it must be from 1 s to 1 h",
                    self.otlp_metrics_interval
                ))
            }
        }
    }

    /// Returns what a client's sampling flag counts.
    pub fn client_sampling(&self) -> RemoteParent {
        if self.otlp_trust_parent { RemoteParent::Decides } else { RemoteParent::Draws }
    }

    /// Returns the collector's URL if `signal` is exported to it.
    fn endpoint_of(&self, signal: OtlpSignal) -> Option<&str> {
        self.otlp_endpoint.as_deref().filter(|_| self.otlp_signals.contains(&signal))
    }
}

/// Telemetry of the process, shut down by [`Telemetry::stop`].
#[derive(Debug)]
pub struct Telemetry {
    traces: Option<SdkTracerProvider>,
    logs: Option<SdkLoggerProvider>,
    exported_metrics: Option<MetricsExport>,
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
    remote: RemoteParent,
) -> Result<Telemetry, CommandError> {
    let filter = || {
        EnvFilter::builder().parse(&args.log).map_err(|error| {
            CommandError::new(Exit::Usage, format!("--log {:?} is not a filter: {error}", args.log))
        })
    };
    let (filter, export_filter) = (filter()?, filter()?);
    args.validate()?;
    let attributes = [
        ("service.name", service),
        ("service.instance.id", instance),
        ("service.version", env!("CARGO_PKG_VERSION")),
    ];
    let resource = {
        let key_values = attributes.map(|(name, value)| opentelemetry::KeyValue::new(name, value.to_owned()));
        Resource::builder().with_attributes(key_values).build()
    };
    let url = args.endpoint_of(OtlpSignal::Traces);
    let provider = url.map(|url| span_exporter(url, args, resource.clone(), remote)).transpose()?;
    let url = args.endpoint_of(OtlpSignal::Logs);
    let log_provider = url.map(|url| log_exporter(url, resource)).transpose()?;
    // Events of this workspace that standard error gets, too. Others could be about the export itself.
    let exported_logs = log_provider.as_ref().map(|provider| {
        let own = filter_fn(|metadata| metadata.target().starts_with("inflight"));
        OpenTelemetryTracingBridge::new(provider).with_filter(own.and(export_filter))
    });
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
        .with(exported_logs)
        .with(logs)
        .try_init()
        .map_err(|error| CommandError::chain("cannot set up logging", &error))?;
    log_panics();
    let url = args.endpoint_of(OtlpSignal::Metrics);
    if url.is_some() || metrics != ListenAt::Off {
        metrics_endpoint::install(histograms, args.metrics_compat)?;
    }
    let metrics = match metrics {
        ListenAt::Off => None,
        ListenAt::Address(address) => Some(metrics_endpoint::start(address).await?),
    };
    let exported_metrics = url
        .map(|url| {
            let export = MetricsExport::start(url, args.otlp_metrics_interval.0, &attributes);
            export.map_err(|error| wrong_endpoint(url, &error))
        })
        .transpose()?;
    Ok(Telemetry { traces: provider, logs: log_provider, exported_metrics, metrics })
}

/// Timeout of an export of spans or logs.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

fn wrong_endpoint(url: &str, error: &dyn std::error::Error) -> CommandError {
    CommandError::new(Exit::Usage, format!("--otlp-endpoint {url:?}: {error}"))
}

/// Returns the exporter of logs, which drops events beyond the 2048 that wait for the collector.
fn log_exporter(url: &str, resource: Resource) -> Result<SdkLoggerProvider, CommandError> {
    let exporter = opentelemetry_otlp::LogExporter::builder()
        .with_tonic()
        .with_endpoint(url)
        .with_timeout(EXPORT_TIMEOUT)
        .build()
        .map_err(|error| wrong_endpoint(url, &error))?;
    Ok(SdkLoggerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}

/// Returns the exporter of spans, which drops those beyond the 2048 that wait for the collector.
fn span_exporter(
    url: &str,
    args: &Args,
    resource: Resource,
    remote: RemoteParent,
) -> Result<SdkTracerProvider, CommandError> {
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_endpoint(url)
        .with_timeout(EXPORT_TIMEOUT)
        .build()
        .map_err(|error| wrong_endpoint(url, &error))?;
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_sampler(TraceSampler { ratio: args.otlp_sample_ratio, remote })
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
    /// Flushes spans, logs and metrics to the collector, within 5 seconds in total.
    pub async fn stop(self) {
        let metrics = async {
            if let Some(metrics) = self.exported_metrics {
                metrics.stop().await;
            }
        };
        // A shutdown blocks until the exporter has finished, which needs the runtime's threads.
        let traces = tokio::task::spawn_blocking(move || {
            self.traces.map_or(Ok(()), |traces| traces.shutdown_with_timeout(EXPORT_TIMEOUT))
        });
        let logs = tokio::task::spawn_blocking(move || {
            self.logs.map_or(Ok(()), |logs| logs.shutdown_with_timeout(EXPORT_TIMEOUT))
        });
        // At once: where the collector does not answer, each takes its whole timeout.
        let ((), traces, logs) = tokio::join!(metrics, traces, logs);
        if let Ok(Err(error)) = traces {
            tracing::warn!(%error, "failed to export the last spans");
        }
        if let Ok(Err(error)) = logs {
            tracing::warn!(%error, "failed to export the last logs");
        }
    }
}
