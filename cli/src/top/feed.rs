//! The watch of a router as a stream of events: it connects again, to the next router if there are several, when a
//! router goes away.

use std::time::Duration;

use inflight_net::code_name;
use inflight_proto::v1::admin_client::AdminClient;
use inflight_proto::v1::{GetRequestRequest, GetRequestResponse, WatchRequest, WatchResponse};
use tokio::sync::mpsc;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::exit::{CommandError, Exit};
use crate::generate::{ApiKey, endpoint, exit_code, normalize_status};
use crate::tls::ClientArgs;

/// Events that wait for the display; the router merges what does not fit.
const EVENTS_MAX: usize = 4;
/// Maximum size of an update: a first one of 10,000 requests with long names, and iterations of many workers.
const UPDATE_BYTES_MAX: usize = 64 << 20;
/// Time between two attempts to connect: first, and at most.
const BACKOFF_FIRST: Duration = Duration::from_millis(250);
const BACKOFF_MAX: Duration = Duration::from_secs(3);
/// Timeout of reading a request's life.
const LIFE_TIMEOUT: Duration = Duration::from_secs(5);

/// Client of a router's Admin service that sends the API key.
pub type Client = AdminClient<InterceptedService<Channel, ApiKey>>;

/// Event of a feed.
#[derive(Debug)]
pub enum FeedEvent {
    /// A watch began; other calls go to the same router.
    Watching(Client),
    /// An update; whether it is the first one of its watch.
    Update(Box<WatchResponse>, bool),
    /// The router went away, or admits no viewer now; the feed connects again.
    Lost(String),
    /// The feed ended: the router cannot be watched.
    Failed(CommandError),
}

/// Routers to watch, and how.
#[derive(Debug, Clone)]
pub struct Source {
    /// URLs of routers; the first that answers is watched.
    pub routers: Vec<String>,
    /// TLS and API key.
    pub connection: ClientArgs,
    /// Parameters of the watch.
    pub watch: WatchRequest,
}

/// Starts a feed, which ends when its receiver is dropped.
///
/// # Errors
/// The API key cannot be sent.
pub fn start(source: Source) -> Result<mpsc::Receiver<FeedEvent>, CommandError> {
    let key = ApiKey::new(source.connection.api_key.as_deref())?;
    let (sender, receiver) = mpsc::channel(EVENTS_MAX);
    tokio::spawn(feed(source, key, sender));
    Ok(receiver)
}

/// How a watch ended.
enum Ended {
    /// The receiver is gone.
    Unwanted,
    /// The router went away, or the call failed for now; whether there were updates.
    Lost { why: Status, updates: bool },
}

async fn feed(source: Source, key: ApiKey, events: mpsc::Sender<FeedEvent>) {
    let mut backoff = BACKOFF_FIRST;
    let mut ever = false;
    let mut failures = 0;
    for router in source.routers.iter().cycle() {
        let (why, updates) = match watch(router, &source, &key, &events).await {
            Err(failure) => {
                let _ = events.send(FeedEvent::Failed(failure)).await;
                return;
            }
            Ok(Ended::Unwanted) => return,
            Ok(Ended::Lost { why, updates }) => (why, updates),
        };
        ever |= updates;
        failures = if updates { 1 } else { failures + 1 };
        // Once every router has failed at the start, the user should know rather than wait; later, routers come back.
        let event = if !ever && failures >= source.routers.len() || is_final(&why) {
            FeedEvent::Failed(failure(router, &why))
        } else {
            FeedEvent::Lost(format!("no connection to {router}: {}", why.message()))
        };
        let ends = matches!(event, FeedEvent::Failed(_));
        if events.send(event).await.is_err() || ends {
            return;
        }
        if updates {
            backoff = BACKOFF_FIRST;
        }
        tokio::select! {
            () = tokio::time::sleep(backoff) => {}
            () = events.closed() => return,
        }
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

/// Watches a router until it goes away.
///
/// # Errors
/// The URL or a certificate cannot be used.
async fn watch(
    router: &str,
    source: &Source,
    key: &ApiKey,
    events: &mpsc::Sender<FeedEvent>,
) -> Result<Ended, CommandError> {
    let endpoint = endpoint(router, &source.connection)?;
    let lost = |why: Status| Ok(Ended::Lost { why, updates: false });
    let channel = match endpoint.connect().await {
        Ok(channel) => channel,
        Err(error) => {
            let mut cause: &dyn std::error::Error = &error;
            while let Some(deeper) = cause.source() {
                cause = deeper;
            }
            return lost(Status::unavailable(cause.to_string()));
        }
    };
    let mut client =
        AdminClient::with_interceptor(channel, key.clone()).max_decoding_message_size(UPDATE_BYTES_MAX);
    let mut stream = match client.watch(source.watch).await {
        Ok(response) => response.into_inner(),
        Err(status) => return lost(normalize_status(status, None)),
    };
    if events.send(FeedEvent::Watching(client)).await.is_err() {
        return Ok(Ended::Unwanted);
    }
    let mut updates = false;
    loop {
        let message = tokio::select! {
            message = stream.message() => message,
            () = events.closed() => return Ok(Ended::Unwanted),
        };
        let why = match message {
            Ok(Some(update)) => {
                if events.send(FeedEvent::Update(Box::new(update), !updates)).await.is_err() {
                    return Ok(Ended::Unwanted);
                }
                updates = true;
                continue;
            }
            Ok(None) => Status::unavailable("the router ended the watch"),
            Err(status) => normalize_status(status, None),
        };
        return Ok(Ended::Lost { why, updates });
    }
}

/// Whether waiting does not help.
fn is_final(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unimplemented
            | Code::Unauthenticated
            | Code::PermissionDenied
            | Code::InvalidArgument
            | Code::FailedPrecondition
    )
}

/// Says why a router cannot be watched, and what helps.
fn failure(router: &str, status: &Status) -> CommandError {
    let message = status.message();
    let text = match status.code() {
        // Another port of the router, which says so.
        Code::Unimplemented if message.contains("HTTP port") => format!("{router}: {message}"),
        Code::Unimplemented => {
            format!(
                "{router} serves no Admin service: start the router with `--admin read-only` or `--admin on`"
            )
        }
        Code::Unauthenticated => {
            format!("{router} requires an API key of an administrator: --api-key ({message})")
        }
        Code::PermissionDenied => {
            format!(
                "the API key is of no administrator at {router}: its tenant needs `admin = true` ({message})"
            )
        }
        Code::ResourceExhausted => format!("{router} takes no more viewers (--viewers-max): {message}"),
        Code::Unavailable => format!(
            "no connection to {router} ({message}); start a cluster with `inflight up`, or set another address with --router"
        ),
        code => format!("{router}: {}: {message}", code_name(code)),
    };
    let exit = match status.code() {
        Code::Unimplemented => Exit::Failure,
        code => exit_code(code),
    };
    CommandError::new(exit, text)
}

/// Reads the life of a request.
///
/// # Errors
/// Why it could not be read.
pub async fn life(mut client: Client, number: u64) -> Result<GetRequestResponse, String> {
    let request = GetRequestRequest { number, request_id: String::new() };
    match tokio::time::timeout(LIFE_TIMEOUT, client.get_request(request)).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) if status.code() == Code::NotFound => {
            Err("the router knows this request no more: it ended long ago".to_owned())
        }
        Ok(Err(status)) => Err(format!("{}: {}", code_name(status.code()), status.message())),
        Err(_) => Err(format!("the router did not answer within {} s", LIFE_TIMEOUT.as_secs())),
    }
}
