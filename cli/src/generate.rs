//! `inflight generate`: a Generate call to a router, streamed to the terminal.

use std::collections::HashMap;
use std::io::{self, Read as _};
use std::time::Duration;

use inflight_net::code_name;
use inflight_proto::v1::{
    Chat, ChatMessage, GenerateRequest, ListModelsRequest, Model, SamplingParams, StopConditions,
    generate_request::Input, inference_client::InferenceClient,
};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::exit::{CommandError, Exit};
use crate::tls::ClientArgs;
use crate::transcript::{JsonTranscript, TextTranscript, Transcript};
use crate::units::Span;

/// Timeout of connecting to the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of HTTP/2 keep-alive pings.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Timeout of the response to a keep-alive ping.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Time beyond the deadline in which the router can report the exceeded deadline itself.
const DEADLINE_SLACK: Duration = Duration::from_millis(500);

const EXIT_CODES: &str = "Exit codes: 0 done; 1 failure; 2 bad flags; 3 the endpoint is unreachable or \
unavailable; 4 the request was refused (INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION, OUT_OF_RANGE); \
5 a queue or limit is full (RESOURCE_EXHAUSTED); 6 the deadline passed; 7 not allowed; 130 interrupted.";

/// Options of `inflight generate`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub struct Args {
    /// Prompt; `-` or nothing reads standard input
    pub prompt: Option<String>,
    /// Address of a router
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8650", env = "INFLIGHT_ENDPOINT")]
    pub endpoint: String,
    /// Name of the model [default: the only one served]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_MODEL")]
    pub model: Option<String>,
    /// Print events as JSON lines
    #[arg(long)]
    pub json: bool,
    /// Send the prompt as plain text, without the model's chat template
    #[arg(long)]
    pub raw: bool,
    /// System message of the conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Maximum tokens to generate for each choice [default: set by the router]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Minimum tokens before a stop condition takes effect [default: 0]
    #[arg(long, value_name = "N")]
    pub min_tokens: Option<u32>,
    /// Sampling temperature; 0 is greedy [default: the model's]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Nucleus sampling: keep the most probable tokens up to this cumulative probability [default: the
    /// model's]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep this many most probable tokens; 0 keeps all [default: the model's]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<i32>,
    /// Drop tokens less probable than this fraction of the most probable one [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Subtract this from the logit of each token generated so far [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract this from a token's logit for each time it was generated [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Divide positive and multiply negative logits of tokens in prompt and output by this [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Add BIAS to the logit of token ID, as ID=BIAS; repeatable
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Report the log probability of each token and of this many top alternatives
    #[arg(long, value_name = "N")]
    pub logprobs: Option<u32>,
    /// Number of choices to generate [default: 1]
    #[arg(long, value_name = "N")]
    pub n: Option<u32>,
    /// Random seed: the same request and seed yield the same tokens on workers with the same fingerprint
    /// [default: drawn by the router]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Run only on workers with this numerics fingerprint (shown by --json)
    #[arg(long, value_name = "FINGERPRINT")]
    pub require_fingerprint: Option<String>,
    /// Stop string; repeatable
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Stop token ids, separated by commas
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub stop_token_ids: Vec<u32>,
    /// Ignore the EOS token
    #[arg(long)]
    pub ignore_eos: bool,
    /// Return token ids too (shown by --json)
    #[arg(long)]
    pub return_token_ids: bool,
    /// Tenant of the request
    #[arg(long, value_name = "NAME", env = "INFLIGHT_TENANT")]
    pub tenant: Option<String>,
    /// Fair-share weight of the tenant [default: 1]
    #[arg(long, value_name = "W")]
    pub weight: Option<f32>,
    /// Priority; higher is more important
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub priority: i32,
    /// Request id in logs [default: generated by the router]
    #[arg(long, value_name = "ID")]
    pub request_id: Option<String>,
    /// Deadline of the request, such as 30s [default: none]
    #[arg(long, value_name = "DURATION")]
    pub timeout: Option<Span>,
    #[command(flatten)]
    pub connection: ClientArgs,
    /// W3C trace context to continue
    #[arg(long, value_name = "TRACEPARENT", env = "TRACEPARENT", hide = true)]
    pub traceparent: Option<String>,
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| "write it as a token id and a number, such as 42=-1.5".to_owned())
}

/// Sends a Generate call and prints its stream.
///
/// # Errors
/// The router is unreachable, the call fails, or the output cannot be written.
pub async fn run(args: Args) -> Result<(), CommandError> {
    let prompt = read_prompt(args.prompt.as_deref())?;
    let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
    let stdout = io::stdout();
    let mut transcript: Box<dyn Transcript> = if args.json {
        Box::new(JsonTranscript(stdout))
    } else {
        Box::new(TextTranscript::new(stdout, io::stderr(), args.n.unwrap_or(1).min(1024) as usize))
    };
    let generation = generate(&args, prompt, transcript.as_mut());
    let deadline = async {
        match args.timeout {
            Some(timeout) => tokio::time::sleep(timeout.0 + DEADLINE_SLACK).await,
            None => std::future::pending().await,
        }
    };
    let result = tokio::select! {
        result = generation => result,
        () = deadline => Err(GenerateError::Status(Status::deadline_exceeded("the deadline passed"))),
        // Dropping the call cancels it.
        _ = &mut interrupted => Err(GenerateError::Failure(CommandError::Silent(Exit::Interrupted))),
    };
    match result {
        Ok(()) => Ok(()),
        // The pipe is closed, as by `head`.
        Err(GenerateError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(GenerateError::Output(error)) => Err(CommandError::chain("cannot write", &error)),
        Err(GenerateError::Failure(failure)) => Err(failure),
        Err(GenerateError::Status(status)) => {
            let status = normalize_status(status, args.timeout);
            if args.json {
                let event = serde_json::json!({
                    "event": "error", "code": code_name(status.code()), "message": status.message(),
                });
                crate::event::emit(&event);
            }
            let message = format!("{}: {}", code_name(status.code()), status.message());
            Err(CommandError::new(exit_code(status.code()), message))
        }
    }
}

enum GenerateError {
    Status(Status),
    Output(io::Error),
    Failure(CommandError),
}

impl From<Status> for GenerateError {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

fn read_prompt(given: Option<&str>) -> Result<String, CommandError> {
    let prompt = match given {
        Some(text) if text != "-" => text.to_owned(),
        _ => {
            let mut text = Vec::new();
            io::stdin()
                .lock()
                .read_to_end(&mut text)
                .map_err(|error| CommandError::chain("standard input", &error))?;
            let text = String::from_utf8(text)
                .map_err(|_| CommandError::new(Exit::Usage, "the standard input is not UTF-8 text"))?;
            // The trailing newline of typed or echoed input is not part of the prompt.
            text.strip_suffix('\n')
                .map_or_else(|| text.clone(), |line| line.trim_end_matches('\r').to_owned())
        }
    };
    if prompt.is_empty() {
        return Err(CommandError::new(
            Exit::Usage,
            "the prompt is empty; give it as an argument or on the standard input",
        ));
    }
    Ok(prompt)
}

async fn generate(args: &Args, prompt: String, transcript: &mut dyn Transcript) -> Result<(), GenerateError> {
    let channel = connect_with(&args.endpoint, &args.connection).await.map_err(GenerateError::Failure)?;
    let key = ApiKey::new(args.connection.api_key.as_deref()).map_err(GenerateError::Failure)?;
    let mut client = InferenceClient::with_interceptor(channel, key);
    let input = if args.raw { Input::Text(prompt) } else { request_input(args, prompt, &mut client).await? };
    let mut request = Request::new(request_message(args, input));
    if let Some(timeout) = args.timeout {
        request.set_timeout(timeout.0);
    }
    if let Some(traceparent) = &args.traceparent {
        let value = traceparent.parse().map_err(|_| {
            GenerateError::Failure(CommandError::new(Exit::Usage, "--traceparent is not valid metadata"))
        })?;
        request.metadata_mut().insert("traceparent", value);
    }
    let mut stream = client.generate(request).await?.into_inner();
    while let Some(response) = stream.message().await? {
        transcript.show(&response).map_err(GenerateError::Output)?;
    }
    Ok(())
}

/// Connects to a router or worker.
///
/// # Errors
/// The URL is malformed, or the server is unreachable.
pub async fn connect(url: &str) -> Result<Channel, CommandError> {
    connect_with(url, &ClientArgs::default()).await
}

/// Connects to a router or worker, with TLS as configured by `connection`.
///
/// # Errors
/// The URL is malformed, a certificate cannot be used, or the server is unreachable.
pub async fn connect_with(url: &str, connection: &ClientArgs) -> Result<Channel, CommandError> {
    let mut endpoint = Endpoint::from_shared(url.to_owned()).map_err(|error| {
        CommandError::new(Exit::Usage, format!("--endpoint {url:?}: {error}; write it like http://HOST:PORT"))
    })?;
    if let Some(tls) = connection.tls()? {
        let config = tls.load().map_err(|error| CommandError::new(Exit::Usage, error.to_string()))?;
        endpoint =
            endpoint.tls_config(config).map_err(|error| CommandError::chain("certificates", &error))?;
    }
    let endpoint = endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    endpoint.connect().await.map_err(|error| {
        let mut cause: &dyn std::error::Error = &error;
        while let Some(deeper) = cause.source() {
            cause = deeper;
        }
        let message = format!(
            "cannot connect to {url} ({cause}); start a cluster with `inflight up`, or set another address with --endpoint"
        );
        CommandError::new(Exit::Unavailable, message)
    })
}

type AuthenticatedClient = InferenceClient<InterceptedService<Channel, ApiKey>>;

/// Interceptor that adds the API key, if any, to each call as a bearer token.
#[derive(Debug, Clone)]
struct ApiKey(Option<MetadataValue<Ascii>>);

impl ApiKey {
    fn new(key: Option<&str>) -> Result<Self, CommandError> {
        let value = key.map(|key| format!("Bearer {key}").parse()).transpose();
        let mut value: Option<MetadataValue<Ascii>> =
            value.map_err(|_| CommandError::new(Exit::Usage, "--api-key has characters that no key has"))?;
        value.iter_mut().for_each(|value| value.set_sensitive(true));
        Ok(Self(value))
    }
}

impl Interceptor for ApiKey {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

/// Returns the prompt as a chat if the model has a chat template, otherwise as plain text.
async fn request_input(
    args: &Args,
    prompt: String,
    client: &mut AuthenticatedClient,
) -> Result<Input, GenerateError> {
    let models = client.list_models(ListModelsRequest {}).await?.into_inner().models;
    // An unknown or ambiguous model is reported by the router.
    let chat = select_model(&models, args.model.as_deref())
        .map_or(args.system.is_some(), |model| model.has_chat_template);
    let message = |role: &str, content: String| ChatMessage { role: role.to_owned(), content };
    match (&args.system, chat) {
        (None, false) => Ok(Input::Text(prompt)),
        (Some(_), false) => {
            let status = Status::failed_precondition(
                "the model has no chat template, so it takes no --system message",
            );
            Err(GenerateError::Status(status))
        }
        (system, true) => {
            let system = system.iter().map(|content| message("system", content.clone()));
            Ok(Input::Chat(Chat { messages: system.chain([message("user", prompt)]).collect() }))
        }
    }
}

fn select_model<'a>(models: &'a [Model], name: Option<&str>) -> Option<&'a Model> {
    match (name, models) {
        (Some(name), _) => models.iter().find(|model| model.name == name),
        (None, [only]) => Some(only),
        // Ambiguous: the router rejects the request with a list of its models.
        (None, _) => None,
    }
}

fn request_message(args: &Args, input: Input) -> GenerateRequest {
    GenerateRequest {
        model: args.model.clone().unwrap_or_default(),
        input: Some(input),
        sampling: Some(SamplingParams {
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            min_p: args.min_p,
            presence_penalty: args.presence_penalty,
            frequency_penalty: args.frequency_penalty,
            repetition_penalty: args.repetition_penalty,
            logit_bias: args.logit_bias.iter().copied().collect::<HashMap<_, _>>().into_iter().collect(),
            logprobs: args.logprobs,
            seed: args.seed,
            n: args.n,
        }),
        stop: Some(StopConditions {
            max_tokens: args.max_tokens,
            min_tokens: args.min_tokens.unwrap_or(0),
            stop: args.stop.clone(),
            stop_token_ids: args.stop_token_ids.clone(),
            ignore_eos: args.ignore_eos,
        }),
        return_token_ids: args.return_token_ids,
        tenant: args.tenant.clone().unwrap_or_default(),
        weight: args.weight,
        priority: args.priority,
        request_id: args.request_id.clone().unwrap_or_default(),
        require_fingerprint: args.require_fingerprint.clone().unwrap_or_default(),
    }
}

/// Corrects status codes of tonic's client, which reports its timeout as CANCELLED and a broken connection as
/// UNKNOWN.
fn normalize_status(status: Status, timeout: Option<Span>) -> Status {
    match status.code() {
        Code::Cancelled if timeout.is_some() && status.message().contains("Timeout") => {
            Status::deadline_exceeded("the deadline passed before the router answered")
        }
        Code::Unknown if status.message().contains("h2 protocol error") => {
            Status::unavailable("the connection to the router broke")
        }
        _ => status,
    }
}

/// Returns the exit code for a gRPC status code.
pub fn exit_code(code: Code) -> Exit {
    match code {
        Code::Unavailable => Exit::Unavailable,
        Code::InvalidArgument | Code::NotFound | Code::FailedPrecondition | Code::OutOfRange => Exit::Refused,
        Code::ResourceExhausted => Exit::Exhausted,
        Code::DeadlineExceeded => Exit::Deadline,
        Code::Unauthenticated | Code::PermissionDenied => Exit::Denied,
        _ => Exit::Failure,
    }
}
