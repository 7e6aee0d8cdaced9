//! Stream of the RPC Generate that is continued at another router when a call breaks off.

use std::time::Duration;

use bytes::Bytes;
use http_body::Body as HttpBody;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{GenerateRequest, GenerateResponse, Resume, TokenIds};
use tokio::time::Instant;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codegen::StdError;
use tonic::metadata::MetadataMap;
use tonic::{Request, Status, Streaming};

use crate::ResumePolicy;

/// Stream of a generation over several routers. Dropping it cancels the request.
#[derive(Debug)]
pub struct GenerateStream<T> {
    /// One client for each router; the first is that of the current call.
    clients: Vec<InferenceClient<T>>,
    request: GenerateRequest,
    metadata: MetadataMap,
    deadline: Option<Instant>,
    policy: ResumePolicy,
    /// Whether the caller wants token ids.
    token_ids: bool,
    call: Option<Streaming<GenerateResponse>>,
    /// Cursor of the last message; empty before the first.
    cursor: Vec<u8>,
    /// Received tokens of each choice.
    choices: Vec<Vec<u32>>,
    started: bool,
    completed: bool,
    /// Time of the first failure since the last message.
    failing_since: Option<Instant>,
    failures: u32,
    resumed: u32,
}

impl<T> GenerateStream<T>
where
    T: GrpcService<Body> + Clone,
    T::Error: Into<StdError>,
    T::ResponseBody: HttpBody<Data = Bytes> + Send + 'static,
    <T::ResponseBody as HttpBody>::Error: Into<StdError> + Send,
{
    /// Creates the stream of a request, which is sent at the first [`message`](Self::message). Each client is
    /// connected to one router; a call that breaks off is resumed at the next.
    pub fn new(clients: Vec<InferenceClient<T>>, request: GenerateRequest) -> Self {
        let choices = request.sampling.as_ref().and_then(|sampling| sampling.n).unwrap_or(1) as usize;
        Self {
            clients,
            metadata: MetadataMap::new(),
            deadline: None,
            policy: ResumePolicy::default(),
            token_ids: request.return_token_ids,
            call: None,
            cursor: Vec::new(),
            choices: vec![Vec::new(); choices],
            started: false,
            completed: false,
            failing_since: None,
            failures: 0,
            resumed: 0,
            request: GenerateRequest { resumable: true, ..request },
        }
    }

    /// Sends these metadata with each call.
    #[must_use]
    pub fn with_metadata(mut self, metadata: MetadataMap) -> Self {
        self.metadata = metadata;
        self
    }

    /// Sets the deadline of the whole stream.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.deadline = Some(Instant::now() + timeout);
        self
    }

    /// Sets the policy of resuming.
    #[must_use]
    pub fn with_policy(mut self, policy: ResumePolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Returns how often the stream was continued by another call.
    pub fn resumed(&self) -> u32 {
        self.resumed
    }

    /// Receives the next message; `None` after `completed`.
    ///
    /// # Errors
    /// The status of a call that no router can continue, or that none has continued in time.
    pub async fn message(&mut self) -> Result<Option<GenerateResponse>, Status> {
        while !self.completed {
            let received = match &mut self.call {
                Some(call) => call.message().await,
                None => {
                    self.open().await?;
                    continue;
                }
            };
            match received {
                Ok(Some(response)) => {
                    (self.failing_since, self.failures) = (None, 0);
                    if let Some(response) = self.take(response) {
                        return Ok(Some(response));
                    }
                }
                Ok(None) => self.fail(Status::unavailable("the stream ended before it was complete")).await?,
                Err(status) => self.fail(status).await?,
            }
        }
        Ok(None)
    }

    /// Calls the first router.
    async fn open(&mut self) -> Result<(), Status> {
        let Some(client) = self.clients.first_mut() else {
            return Err(Status::invalid_argument("no router is given"));
        };
        let mut message = self.request.clone();
        if !self.cursor.is_empty() {
            let choices = self.choices.iter().map(|ids| TokenIds { ids: ids.clone() }).collect();
            message.resume = Some(Resume { cursor: self.cursor.clone(), choices });
        }
        let mut request = Request::new(message);
        *request.metadata_mut() = self.metadata.clone();
        if let Some(deadline) = self.deadline {
            request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        match client.generate(request).await {
            Ok(response) => self.call = Some(response.into_inner()),
            Err(status) => self.fail(status).await?,
        }
        Ok(())
    }

    /// Ends the call and, if another may continue it, selects the next router and waits for its turn.
    async fn fail(&mut self, status: Status) -> Result<(), Status> {
        self.call = None;
        let begun = !self.cursor.is_empty();
        let now = Instant::now();
        let since = *self.failing_since.get_or_insert(now);
        self.failures = self.failures.saturating_add(1);
        let pause = self.policy.backoff(self.failures);
        let late = now + pause > since + self.policy.patience
            || self.deadline.is_some_and(|deadline| now + pause > deadline);
        // Without a cursor the router cannot resume it, as with log probabilities of the prompt.
        let lost = self.started && !begun;
        if !ResumePolicy::retries(&status, begun) || late || lost {
            return Err(status);
        }
        self.clients.rotate_left(1);
        self.resumed += u32::from(begun && self.failures == 1);
        // The next of several routers is tried at once.
        if self.failures as usize >= self.clients.len() {
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    /// Follows a message. Returns what the caller sees of it.
    fn take(&mut self, mut response: GenerateResponse) -> Option<GenerateResponse> {
        match response.event.as_mut()? {
            Event::Started(started) => {
                self.cursor.clone_from(&started.cursor);
                if std::mem::replace(&mut self.started, true) {
                    return None;
                }
            }
            Event::Delta(delta) => {
                self.cursor.clone_from(&delta.cursor);
                let choice = self.choices.get_mut(delta.choice as usize);
                match choice {
                    Some(choice) if !self.token_ids => choice.append(&mut delta.token_ids),
                    Some(choice) => choice.extend_from_slice(&delta.token_ids),
                    None => {}
                }
                if delta.text.is_empty() && delta.token_ids.is_empty() && delta.logprobs.is_empty() {
                    return None;
                }
            }
            Event::Finished(finished) => self.cursor.clone_from(&finished.cursor),
            Event::Completed(_) => self.completed = true,
            Event::FingerprintChanged(_) | Event::PromptLogprobs(_) => {}
        }
        Some(response)
    }
}
