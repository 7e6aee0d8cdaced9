//! `inflight chat`: a conversation with a model in the terminal.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;

use inflight_client::GenerateStream;
use inflight_options::ServerAddress;
use inflight_proto::v1::{
    Chat, FinishReason, GenerateRequest, ListModelsRequest, Model, ToolCall, ToolUse,
    generate_request::Input, generate_response::Event, inference_client::InferenceClient,
};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tonic::Status;
use tonic_types::StatusExt as _;

use crate::conversation::{Conversation, Entry};
use crate::exit::{CommandError, Exit, print_stderr};
use crate::generate::{
    ApiKey, AuthenticatedClient, EXIT_CODES, connect_with, exit_code, normalize_status, select_model,
    status_error,
};
use crate::sampling::SamplingArgs;
use crate::tls::ClientArgs;
use crate::tool_file;

const HELP: &str = "\
/reset  forgets the conversation; the system message stays
/help   prints this list
/exit   ends, as does Ctrl-D
Ctrl-C  stops the current answer; what it said so far is kept
A message that starts with / needs a space before it.";

/// Options of `inflight chat`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub struct Args {
    /// Address of a router
    #[arg(long, value_name = "ADDRESS", default_value = "http://127.0.0.1:8650", env = "INFLIGHT_ENDPOINT")]
    pub endpoint: ServerAddress,
    /// Name of the model [default: the only one served]
    #[arg(long, short, value_name = "NAME", env = "INFLIGHT_MODEL")]
    pub model: Option<String>,
    /// System message of the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// JSON file with an array of tools, as in OpenAI's API; calls are printed
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Tenant of the requests
    #[arg(long, value_name = "NAME", env = "INFLIGHT_TENANT")]
    pub tenant: Option<String>,
    #[command(flatten)]
    pub connection: ClientArgs,
}

/// Way in which an answer ended without a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Complete,
    /// At the maximum tokens or the end of the context.
    Length,
    /// By Ctrl-C.
    Interrupted,
}

/// Failure of an answer.
enum AnswerError {
    Status(Status),
    Output(io::Error),
}

impl From<Status> for AnswerError {
    fn from(status: Status) -> Self {
        Self::Status(normalize_status(status, None))
    }
}

/// Reads messages from the standard input, one a line, and prints the answers. On a terminal a failed answer
/// is reported and the conversation continues; otherwise the first failure also decides the exit code.
///
/// # Errors
/// The router is unreachable, serves no model to converse with, or input or output fail.
pub async fn run(args: Args) -> Result<(), CommandError> {
    let tools = args.tools.as_deref().map(tool_file::read).transpose()?;
    let channel = connect_with(args.endpoint.url(), &args.connection).await?;
    let key = ApiKey::new(args.connection.api_key.as_deref())?;
    args.connection.warn_of_plaintext_key([args.endpoint.url()]);
    let mut client = InferenceClient::with_interceptor(channel, key);
    let model = chat_model(&mut client, args.model.as_deref()).await?;
    let terminal = io::stdin().is_terminal();
    if terminal {
        let Model { name, context_tokens, .. } = &model;
        print_stderr(format_args!("{name}, context of {context_tokens} tokens; /help lists the commands"));
    }
    let mut chat = ChatLoop {
        conversation: Conversation::new(args.system.clone()),
        interrupts: signal(SignalKind::interrupt())
            .map_err(|error| CommandError::chain("cannot watch for Ctrl-C", &error))?,
        args,
        tools,
        client,
        model: model.name,
        terminal,
        failed: None,
    };
    match chat.run().await {
        // The pipe is closed, as by `head`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(CommandError::chain("cannot read or write", &error)),
        Ok(()) => chat.failed.filter(|_| !terminal).map_or(Ok(()), |exit| Err(CommandError::Silent(exit))),
    }
}

/// Returns the model to converse with.
async fn chat_model(client: &mut AuthenticatedClient, name: Option<&str>) -> Result<Model, CommandError> {
    let listed = client.list_models(ListModelsRequest {}).await;
    let models = listed.map_err(|status| status_error(&normalize_status(status, None)))?.into_inner().models;
    let names = || models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", ");
    match (select_model(&models, name), name) {
        (Some(model), _) if model.has_chat_template => Ok(model.clone()),
        (Some(model), _) => {
            let message =
                format!("the model {:?} has no chat template; use `inflight generate --raw`", model.name);
            Err(CommandError::new(Exit::Refused, message))
        }
        (None, _) if models.is_empty() => {
            Err(CommandError::new(Exit::Unavailable, "no worker is connected to the router; try again later"))
        }
        (None, Some(name)) => {
            let message = format!("no worker serves the model {name:?}; served are: {}", names());
            Err(CommandError::new(Exit::Refused, message))
        }
        (None, None) => {
            let message = format!("several models are served; name one with --model: {}", names());
            Err(CommandError::new(Exit::Usage, message))
        }
    }
}

/// Loop of lines and answers.
struct ChatLoop {
    args: Args,
    tools: Option<ToolUse>,
    client: AuthenticatedClient,
    model: String,
    conversation: Conversation,
    interrupts: Signal,
    /// Whether the standard input is a terminal.
    terminal: bool,
    /// Exit code of the first failure.
    failed: Option<Exit>,
}

impl ChatLoop {
    /// # Errors
    /// The input cannot be read, or the output cannot be written.
    async fn run(&mut self) -> io::Result<()> {
        let mut lines = read_lines()?;
        loop {
            if self.terminal {
                // Fails only if the terminal is gone; then so is its input.
                let _ = write!(io::stderr(), "> ");
            }
            let line = tokio::select! {
                line = lines.recv() => line,
                _ = self.interrupts.recv() => {
                    if self.terminal {
                        print_stderr(format_args!("\nCtrl-D or /exit ends"));
                        continue;
                    }
                    self.failed = Some(Exit::Interrupted);
                    return Ok(());
                }
            };
            let Some(line) = line else {
                if self.terminal {
                    print_stderr(format_args!(""));
                }
                return Ok(());
            };
            let line = line?;
            match Entry::parse(&line) {
                Entry::Blank => {}
                Entry::Exit => return Ok(()),
                Entry::Reset => self.conversation.reset(),
                Entry::Help => print_stderr(format_args!("{HELP}")),
                Entry::Unknown(command) => {
                    self.fail(Exit::Usage, &format!("{command} is no command; /help lists them"));
                }
                Entry::Message(text) => self.answer(text).await?,
            }
            if self.failed == Some(Exit::Interrupted) {
                return Ok(());
            }
        }
    }

    /// Reports a failure after which the conversation continues.
    fn fail(&mut self, exit: Exit, message: &str) {
        print_stderr(format_args!("error: {message}"));
        self.failed.get_or_insert(exit);
    }

    /// Sends a message and prints the answer.
    ///
    /// # Errors
    /// The output cannot be written.
    async fn answer(&mut self, text: &str) -> io::Result<()> {
        let request = self.request(self.conversation.with(text));
        let (mut answer, mut calls) = (String::new(), Vec::new());
        let ended = {
            let streaming = stream_answer(&self.client, request, &mut answer, &mut calls);
            tokio::select! {
                ended = streaming => ended,
                // Dropping the call cancels it.
                _ = self.interrupts.recv() => Ok(Ending::Interrupted),
            }
        };
        if !answer.is_empty() || (ended.is_ok() && calls.is_empty()) {
            writeln!(io::stdout())?;
        }
        for ToolCall { name, arguments, .. } in &calls {
            writeln!(io::stdout(), "{name}({arguments})")?;
        }
        match ended {
            Ok(ending) => {
                if ending == Ending::Length {
                    print_stderr(format_args!(
                        "note: cut at the maximum tokens; raise --max-tokens, or /reset if the context is full"
                    ));
                }
                if ending == Ending::Interrupted && !self.terminal {
                    self.failed = Some(Exit::Interrupted);
                }
                if ending != Ending::Interrupted || !answer.is_empty() {
                    // Arguments that were cut off are no JSON, which the router would refuse.
                    let complete = ending == Ending::Complete;
                    self.conversation.keep(text, answer, if complete { calls } else { Vec::new() });
                }
                Ok(())
            }
            Err(AnswerError::Status(status)) => {
                self.fail(exit_code(status.code()), &self.explain(&status));
                Ok(())
            }
            Err(AnswerError::Output(error)) => Err(error),
        }
    }

    fn request(&self, chat: Chat) -> GenerateRequest {
        GenerateRequest {
            model: self.model.clone(),
            input: Some(Input::Chat(chat)),
            sampling: Some(self.args.sampling.params()),
            stop: Some(self.args.sampling.stop_conditions()),
            tenant: self.args.tenant.clone().unwrap_or_default(),
            tools: self.tools.clone(),
            ..GenerateRequest::default()
        }
    }

    /// Returns what to print for a failed answer; its message is not part of the conversation.
    fn explain(&self, status: &Status) -> String {
        let reason = status.get_details_error_info().map(|info| info.reason).unwrap_or_default();
        let outgrown = matches!(reason.as_str(), "CONTEXT_EXCEEDED" | "TOO_LARGE");
        match (outgrown, self.conversation.is_empty()) {
            (true, false) => format!(
                "the conversation has outgrown the model's context; /reset starts a new one ({})",
                status.message()
            ),
            (true, true) => format!("the message is too long for the model ({})", status.message()),
            (false, _) => status_error(status).to_string(),
        }
    }
}

/// Prints an answer while it arrives, and appends it to `answer` and its tool calls to `calls`.
async fn stream_answer(
    client: &AuthenticatedClient,
    request: GenerateRequest,
    answer: &mut String,
    calls: &mut Vec<ToolCall>,
) -> Result<Ending, AnswerError> {
    // An answer that breaks off continues when the router is back.
    let mut stream = GenerateStream::new(vec![client.clone()], request);
    let mut ending = Ending::Complete;
    while let Some(response) = stream.message().await? {
        match response.event {
            Some(Event::Delta(delta)) => {
                print_text(&delta.text).map_err(AnswerError::Output)?;
                answer.push_str(&delta.text);
                tool_file::append(calls, delta.tool_calls);
            }
            Some(Event::Finished(finished)) => {
                print_text(&finished.text).map_err(AnswerError::Output)?;
                answer.push_str(&finished.text);
                if finished.reason() == FinishReason::Length {
                    ending = Ending::Length;
                }
                tool_file::append(calls, finished.tool_calls);
            }
            _ => {}
        }
    }
    tool_file::remove_cut(calls);
    Ok(ending)
}

fn print_text(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()
}

/// Reads lines from the standard input on a thread of its own, which ends with the input or the process.
fn read_lines() -> io::Result<mpsc::Receiver<io::Result<String>>> {
    let (sender, lines) = mpsc::channel(1);
    std::thread::Builder::new().name("chat-input".to_owned()).spawn(move || {
        for line in io::stdin().lock().lines() {
            let last = line.is_err();
            if sender.blocking_send(line).is_err() || last {
                break;
            }
        }
    })?;
    Ok(lines)
}
