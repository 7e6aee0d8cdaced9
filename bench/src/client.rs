//! Client of a server under test, independent of the protocol.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::error::BenchError;
use crate::grpc::Grpc;
use crate::measure::InFlightRequest;
use crate::openai::OpenAi;
use crate::outcome::RequestOutcome;

/// Completion request to a server under test.
#[derive(Debug, Clone)]
pub struct CompletionRequest<'a> {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Number of tokens to generate.
    pub output_tokens: u32,
    /// Tenant of the request.
    pub tenant: &'a crate::tenants::Tenant,
}

/// Sampling and stop settings of all requests of a run.
#[derive(Debug, Clone, Copy)]
pub struct GenerationSettings {
    /// Sampling temperature; 0 is greedy.
    pub temperature: f32,
    /// Whether an EOS token may end the output before its requested length.
    pub allow_eos: bool,
}

/// Model and limits of a server, as probed before the first round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerInfo {
    /// Name of the model under test.
    pub model: String,
    /// Vocabulary size in tokens, if reported.
    pub vocab_size: Option<u32>,
    /// Context length in tokens, if reported.
    pub context_tokens: Option<u32>,
    /// Whether prompts are sent as text instead of token ids.
    pub text: bool,
}

/// Form in which prompts are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptForm {
    /// As token ids where the server takes them, else as text.
    Auto,
    /// As token ids.
    Ids,
    /// As text of about as many tokens.
    Text,
}

/// Client of a server under test.
#[derive(Debug)]
pub enum BenchClient {
    /// Client of the `inflight.v1` gRPC API.
    Grpc(Grpc),
    /// Client of an OpenAI-compatible API.
    OpenAi(OpenAi),
}

impl BenchClient {
    /// Selects the model and determines its limits and the form of prompts.
    ///
    /// # Errors
    /// The server is unreachable, does not serve the model, or fails.
    pub async fn probe(&mut self, model: Option<&str>, form: PromptForm) -> Result<ServerInfo, BenchError> {
        match self {
            Self::Grpc(client) => client.probe(model, form).await,
            Self::OpenAi(client) => client.probe(model, form).await,
        }
    }

    /// Sends a request and reads its stream to the end, recording tokens as they arrive.
    pub async fn generate(
        &self,
        call: &CompletionRequest<'_>,
        settings: GenerationSettings,
        in_flight: &mut InFlightRequest,
    ) -> RequestOutcome {
        match self {
            Self::Grpc(client) => client.generate(call, settings, in_flight).await,
            Self::OpenAi(client) => client.generate(call, settings, in_flight).await,
        }
    }

    /// Returns the name of the protocol: `grpc` or `openai`.
    pub fn protocol(&self) -> &'static str {
        match self {
            Self::Grpc(_) => "grpc",
            Self::OpenAi(_) => "openai",
        }
    }
}

/// Bidirectional byte stream of a connection.
pub trait ConnectionIo: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ConnectionIo for T {}

/// Connector that opens connections to a server.
#[derive(Debug, Clone)]
pub enum Connector {
    /// TCP to this `HOST:PORT`.
    Tcp(String),
    /// In-memory streams to a server in this process, which receives them from the channel. Without the
    /// kernel in between, a paused clock does not advance while bytes are in transit.
    #[cfg(test)]
    Memory(tokio::sync::mpsc::UnboundedSender<tokio::io::DuplexStream>),
}

impl Connector {
    /// Opens a connection.
    ///
    /// # Errors
    /// The server is unreachable.
    pub async fn connect(&self) -> io::Result<Box<dyn ConnectionIo>> {
        match self {
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
            #[cfg(test)]
            Self::Memory(listener) => {
                let (client, server) = tokio::io::duplex(64 << 10);
                listener.send(server).map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
                Ok(Box::new(client))
            }
        }
    }
}
