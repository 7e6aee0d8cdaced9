//! A server under test, whichever protocol it speaks.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::grpc::Grpc;
use super::measure::Flight;
use super::openai::OpenAi;
use crate::exit::Failure;

/// What is asked for in one request.
#[derive(Debug, Clone)]
pub struct Call<'a> {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Tokens to generate.
    pub output_tokens: u32,
    /// Whom for.
    pub tenant: &'a super::tenants::Tenant,
}

/// How requests are to be answered; the same for all of a run.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Whether the model may end before it has generated all that was asked for.
    pub allow_eos: bool,
}

/// What a stream said of itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// Tokens of the prompt, if it said.
    pub prompt_tokens: Option<u32>,
    /// Tokens generated, if it said.
    pub output_tokens: Option<u32>,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It ran to its end.
    Completed(Served),
    /// The server would not take it now: a queue is full.
    Refused {
        /// What it said, as a stable name.
        kind: String,
        /// In its own words.
        message: String,
    },
    /// Anything else.
    Failed {
        /// What went wrong, as a stable name.
        kind: String,
        /// In words.
        message: String,
    },
}

impl Outcome {
    /// A failure.
    pub fn failed(kind: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Failed { kind: kind.into(), message: message.into() }
    }
}

/// What a server said before the first round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    /// Name of the model that will answer.
    pub model: String,
    /// Tokens in its vocabulary, if the server tells.
    pub vocab_size: Option<u32>,
    /// Most tokens of a request, if it tells.
    pub context_tokens: Option<u32>,
    /// Whether prompts go as text, as it takes no token ids.
    pub text: bool,
}

/// How prompts are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PromptForm {
    /// As token ids where the server takes them, else as text
    Auto,
    /// As token ids
    Ids,
    /// As text of about as many tokens
    Text,
}

/// A connection to a server.
#[derive(Debug)]
pub enum Client {
    /// Our own protocol.
    Grpc(Grpc),
    /// `/v1/completions` with server-sent events.
    OpenAi(OpenAi),
}

impl Client {
    /// Asks the server what it serves, and whether it can be asked for what the run will ask.
    ///
    /// # Errors
    /// Nobody answers, it does not know the model, or it fails.
    pub async fn greet(&mut self, model: Option<&str>, form: PromptForm) -> Result<Greeting, Failure> {
        match self {
            Self::Grpc(client) => client.greet(model, form).await,
            Self::OpenAi(client) => client.greet(model, form).await,
        }
    }

    /// Sends a request and follows its stream to the end.
    pub async fn generate(&self, call: &Call<'_>, manner: Manner, flight: &mut Flight) -> Outcome {
        match self {
            Self::Grpc(client) => client.generate(call, manner, flight).await,
            Self::OpenAi(client) => client.generate(call, manner, flight).await,
        }
    }

    /// Which protocol it is.
    pub fn protocol(&self) -> &'static str {
        match self {
            Self::Grpc(_) => "grpc",
            Self::OpenAi(_) => "openai",
        }
    }
}

/// A connection's two directions.
pub trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// How connections are made.
#[derive(Debug, Clone)]
pub enum Dial {
    /// To this `HOST:PORT`.
    Tcp(String),
    /// To a server in this process, which takes connections from the channel: no kernel in between, so that a virtual clock stands still
    /// while bytes are on their way.
    #[cfg(test)]
    Memory(tokio::sync::mpsc::UnboundedSender<tokio::io::DuplexStream>),
}

impl Dial {
    /// Makes one.
    ///
    /// # Errors
    /// Nobody answers.
    pub async fn connect(&self) -> io::Result<Box<dyn Wire>> {
        match self {
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
            #[cfg(test)]
            Self::Memory(listener) => {
                let (ours, theirs) = tokio::io::duplex(64 << 10);
                listener.send(theirs).map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
                Ok(Box::new(ours))
            }
        }
    }
}
