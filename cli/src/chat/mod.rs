//! `inflight chat`: a conversation with a model in the terminal.

mod assembly;
mod command;
mod conversation;
mod editor;
mod input;
mod saved;
mod settings;
mod stats;

use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::Instant;

use clap::ArgMatches;
use inflight_client::GenerateStream;
use inflight_options::ServerAddress;
use inflight_proto::v1::{
    Chat, FinishReason, GenerateRequest, ListModelsRequest, Model, ToolCall, ToolUse,
    generate_request::Input as RequestInput, generate_response::Event, inference_client::InferenceClient,
};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tonic::Status;
use tonic_types::StatusExt as _;

use self::assembly::Assembler;
use self::command::{Command, Entry};
use self::conversation::Conversation;
use self::input::{Input, Line};
use self::settings::Settings;
use self::stats::AnswerStats;
use crate::exit::{CommandError, Exit, print_stderr};
use crate::generate::{
    ApiKey, AuthenticatedClient, EXIT_CODES, connect_with, exit_code, normalize_status, select_model,
    status_error,
};
use crate::sampling::SamplingArgs;
use crate::tls::ClientArgs;
use crate::tool_file;

/// Prompt of a message.
const PROMPT: &str = "> ";
/// Prompt of the further lines of a message.
const CONTINUATION_PROMPT: &str = ". ";

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

/// Reads messages and commands from the standard input and prints the answers. On a terminal a failed answer is reported and the
/// conversation continues; otherwise a message is a line, and the first failure also decides the exit code. `matches` are those
/// of the arguments.
///
/// # Errors
/// The router is unreachable, serves no model to converse with, input or output fail, or a signal ended the conversation.
pub async fn run(args: Args, matches: &ArgMatches) -> Result<(), CommandError> {
    let tools = args.tools.as_deref().map(tool_file::read).transpose()?;
    let channel = connect_with(args.endpoint.url(), &args.connection).await?;
    let key = ApiKey::new(args.connection.api_key.as_deref())?;
    args.connection.warn_of_plaintext_key([args.endpoint.url()]);
    let mut client = InferenceClient::with_interceptor(channel, key);
    let models = served_models(&mut client).await?;
    let model = chat_model(&models, args.model.as_deref())?;
    let terminal = io::stdin().is_terminal();
    if terminal {
        let Model { name, context_tokens, .. } = model;
        print_stderr(format_args!("{name}, context of {context_tokens} tokens; /help lists the commands"));
    }
    let watch = |kind| signal(kind).map_err(|error| CommandError::chain("cannot watch for signals", &error));
    let interrupts = watch(SignalKind::interrupt())?;
    let names = models.iter().map(|model| model.name.clone()).collect();
    let input = Input::open(settings::names(), names)
        .map_err(|error| CommandError::chain("cannot use the terminal", &error))?;
    let edited = matches!(input, Input::Editor(_));
    let mut chat = ChatLoop {
        conversation: Conversation::new(args.system.clone()),
        settings: Settings::new(args.sampling.clone(), matches),
        model: model.name.clone(),
        input,
        interrupts,
        args,
        tools,
        client,
        terminal,
        unanswered: None,
        stats: None,
        stats_shown: false,
        failed: None,
    };
    let ended = if edited {
        // The default action would leave the terminal in raw mode.
        let (mut terminate, mut hangup) = (watch(SignalKind::terminate())?, watch(SignalKind::hangup())?);
        tokio::select! {
            ended = chat.run() => ended,
            _ = terminate.recv() => return Err(CommandError::Silent(Exit::Interrupted)),
            _ = hangup.recv() => return Err(CommandError::Silent(Exit::Interrupted)),
        }
    } else {
        chat.run().await
    };
    match ended {
        // The pipe is closed, as by `head`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(CommandError::chain("cannot read or write", &error)),
        Ok(()) => chat.failed.filter(|_| !terminal).map_or(Ok(()), |exit| Err(CommandError::Silent(exit))),
    }
}

async fn served_models(client: &mut AuthenticatedClient) -> Result<Vec<Model>, CommandError> {
    let listed = client.list_models(ListModelsRequest {}).await;
    Ok(listed.map_err(|status| status_error(&normalize_status(status, None)))?.into_inner().models)
}

fn model_names(models: &[Model]) -> String {
    models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// Returns the model to converse with.
fn chat_model<'a>(models: &'a [Model], name: Option<&str>) -> Result<&'a Model, CommandError> {
    match (select_model(models, name), name) {
        (Some(model), _) if model.has_chat_template => Ok(model),
        (Some(model), _) => {
            let message =
                format!("the model {:?} has no chat template; use `inflight generate --raw`", model.name);
            Err(CommandError::new(Exit::Refused, message))
        }
        (None, _) if models.is_empty() => {
            Err(CommandError::new(Exit::Unavailable, "no worker is connected to the router; try again later"))
        }
        (None, Some(name)) => {
            let names = model_names(models);
            let message = format!("no worker serves the model {name:?}; served are: {names}");
            Err(CommandError::new(Exit::Refused, message))
        }
        (None, None) => {
            let names = model_names(models);
            let message = format!("several models are served; name one with --model: {names}");
            Err(CommandError::new(Exit::Usage, message))
        }
    }
}

/// Loop of messages, commands and answers.
struct ChatLoop {
    args: Args,
    settings: Settings,
    tools: Option<ToolUse>,
    client: AuthenticatedClient,
    model: String,
    conversation: Conversation,
    input: Input,
    interrupts: Signal,
    /// Whether the standard input is a terminal.
    terminal: bool,
    /// Message whose answer failed or was stopped before its first text.
    unanswered: Option<String>,
    /// Figures of the last answer.
    stats: Option<AnswerStats>,
    /// Whether the figures of each answer are printed.
    stats_shown: bool,
    /// Exit code of the first failure.
    failed: Option<Exit>,
}

impl ChatLoop {
    /// # Errors
    /// The input cannot be read, or the output cannot be written.
    async fn run(&mut self) -> io::Result<()> {
        let mut assembler = Assembler::default();
        loop {
            let prompt = if assembler.is_open() { CONTINUATION_PROMPT } else { PROMPT };
            let text = match self.input.read(prompt, &mut self.interrupts).await? {
                // A line of a pipe is a message, whatever it ends in.
                Line::Text(line) if !self.terminal => assembly::Text { text: line, block: false },
                Line::Text(line) => match assembler.push(&line) {
                    Some(text) => text,
                    None => continue,
                },
                Line::Interrupted if self.terminal => {
                    let edited = matches!(self.input, Input::Editor(_));
                    print_stderr(format_args!("{}Ctrl-D or /exit ends", if edited { "" } else { "\n" }));
                    assembler.clear();
                    continue;
                }
                Line::Interrupted => {
                    self.failed = Some(Exit::Interrupted);
                    return Ok(());
                }
                Line::End => {
                    if matches!(self.input, Input::Lines(_)) && self.terminal {
                        print_stderr(format_args!(""));
                    }
                    return Ok(());
                }
            };
            self.input.remember(&text.text);
            let entry = if text.block { Entry::Message(&text.text) } else { Entry::parse(&text.text) };
            match entry {
                Entry::Blank => {}
                Entry::Message(text) => {
                    self.answer(text).await?;
                }
                Entry::Command(Command::Exit, _) => return Ok(()),
                Entry::Command(command, argument) => {
                    if let Err((exit, message)) = self.command(command, argument).await? {
                        self.fail(exit, &message);
                    }
                }
                Entry::WrongArgument(row) => {
                    self.fail(Exit::Usage, &format!("write it as {}", row.usage()));
                }
                Entry::Unknown(name) => {
                    let nearest = command::nearest_command(name).unwrap_or("/help");
                    let message =
                        format!("{name} is no command; the nearest one is {nearest}, /help lists them");
                    self.fail(Exit::Usage, &message);
                }
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

    /// Runs a command. Returns its failure, after which the conversation continues.
    ///
    /// # Errors
    /// The output of an answer cannot be written.
    async fn command(&mut self, command: Command, argument: &str) -> io::Result<Result<(), (Exit, String)>> {
        let done = match command {
            Command::Help => {
                print_stderr(format_args!("{}", command::help()));
                Ok(())
            }
            Command::Exit => Ok(()),
            Command::System => {
                if argument.is_empty() {
                    print_stderr(format_args!(
                        "{}",
                        self.conversation.system().unwrap_or("no system message")
                    ));
                } else {
                    self.conversation.set_system(argument.to_owned());
                }
                Ok(())
            }
            Command::Set => self.set(argument).map_err(|reason| (Exit::Usage, reason)),
            Command::Save => self.save(argument).map_err(|reason| (Exit::Failure, reason)),
            Command::Load => self.load(argument).map_err(|reason| (Exit::Failure, reason)),
            Command::Stats => self.stats(argument).map_err(|reason| (Exit::Usage, reason)),
            Command::Model => self.select(argument).await,
            Command::Reset => {
                self.conversation.reset();
                self.unanswered = None;
                Ok(())
            }
            Command::Undo => match self.conversation.pop_turn() {
                Some(_) => {
                    print_stderr(format_args!("removed the last message and its answer"));
                    Ok(())
                }
                None => Err((Exit::Usage, "there is no message to remove".to_owned())),
            },
            Command::Retry => return self.retry().await,
        };
        Ok(done)
    }

    fn set(&mut self, argument: &str) -> Result<(), String> {
        let (name, value) = argument.split_once(char::is_whitespace).unwrap_or((argument, ""));
        match (name, value.trim()) {
            ("", _) => print_stderr(format_args!("{}", self.settings.list())),
            (_, "") => print_stderr(format_args!("{}", self.settings.describe(name)?)),
            (_, value) => self.settings.set(name, value)?,
        }
        Ok(())
    }

    fn save(&self, file: &str) -> Result<(), String> {
        let path = saved::path(file);
        saved::save(&path, self.conversation.messages())?;
        let count = self.conversation.messages().count();
        print_stderr(format_args!("wrote {count} messages to {}", path.display()));
        Ok(())
    }

    fn load(&mut self, file: &str) -> Result<(), String> {
        let path = saved::path(file);
        self.conversation = Conversation::of(saved::load(&path)?);
        self.unanswered = None;
        let count = self.conversation.messages().count();
        print_stderr(format_args!("read {count} messages from {}", path.display()));
        Ok(())
    }

    fn stats(&mut self, argument: &str) -> Result<(), String> {
        match argument {
            "on" => self.stats_shown = true,
            "off" => self.stats_shown = false,
            "" => {
                let line = self.stats.as_ref().map(AnswerStats::line);
                print_stderr(format_args!("{}", line.as_deref().unwrap_or("there is no answer yet")));
            }
            _ => return Err("write it as /stats, /stats on or /stats off".to_owned()),
        }
        Ok(())
    }

    /// Selects a model, or lists those served.
    async fn select(&mut self, name: &str) -> Result<(), (Exit, String)> {
        let failed = |error: CommandError| match error {
            CommandError::Message(exit, message) => (exit, message),
            error => (Exit::Failure, error.to_string()),
        };
        let models = served_models(&mut self.client).await.map_err(failed)?;
        if name.is_empty() {
            let names = model_names(&models);
            print_stderr(format_args!("{}; served are: {names}", self.model));
            return Ok(());
        }
        let model = chat_model(&models, Some(name)).map_err(failed)?;
        self.model.clone_from(&model.name);
        print_stderr(format_args!("{}, context of {} tokens", model.name, model.context_tokens));
        Ok(())
    }

    /// Generates the last answer anew. The old one stays if that fails.
    ///
    /// # Errors
    /// The output cannot be written.
    async fn retry(&mut self) -> io::Result<Result<(), (Exit, String)>> {
        if let Some(text) = self.unanswered.clone() {
            self.answer(&text).await?;
            return Ok(Ok(()));
        }
        let Some(turn) = self.conversation.pop_turn() else {
            return Ok(Err((Exit::Usage, "there is no message to answer".to_owned())));
        };
        let text = turn.first().map(|message| message.content.clone()).unwrap_or_default();
        if !self.answer(&text).await? {
            self.conversation.push_turn(turn);
            self.unanswered = None;
        }
        Ok(Ok(()))
    }

    /// Sends a message and prints the answer. Returns whether both are kept.
    ///
    /// # Errors
    /// The output cannot be written.
    async fn answer(&mut self, text: &str) -> io::Result<bool> {
        let request = self.request(self.conversation.with(text));
        let mut answer = Answer::default();
        let ended = {
            let streaming = answer.stream(&self.client, request);
            tokio::select! {
                ended = streaming => ended,
                // Dropping the call cancels it.
                _ = self.interrupts.recv() => Ok(Ending::Interrupted),
            }
        };
        let Answer { text: answered, calls, stats } = answer;
        if !answered.is_empty() || (ended.is_ok() && calls.is_empty()) {
            writeln!(io::stdout())?;
        }
        for ToolCall { name, arguments, .. } in &calls {
            writeln!(io::stdout(), "{name}({arguments})")?;
        }
        if self.stats_shown {
            print_stderr(format_args!("{}", stats.line()));
        }
        self.stats = Some(stats);
        self.unanswered = None;
        match ended {
            Ok(ending) => {
                if ending == Ending::Length {
                    print_stderr(format_args!(
                        "note: cut at the maximum tokens; raise --max-tokens (/set max_tokens N), or /reset if the context is full"
                    ));
                }
                if ending == Ending::Interrupted && !self.terminal {
                    self.failed = Some(Exit::Interrupted);
                }
                let kept = ending != Ending::Interrupted || !answered.is_empty();
                if kept {
                    // Arguments that were cut off are no JSON, which the router would refuse.
                    let complete = ending == Ending::Complete;
                    self.conversation.keep(text, answered, if complete { calls } else { Vec::new() });
                } else {
                    self.unanswered = Some(text.to_owned());
                }
                Ok(kept)
            }
            Err(AnswerError::Status(status)) => {
                self.unanswered = Some(text.to_owned());
                self.fail(exit_code(status.code()), &self.explain(&status));
                Ok(false)
            }
            Err(AnswerError::Output(error)) => Err(error),
        }
    }

    fn request(&self, chat: Chat) -> GenerateRequest {
        let sampling = self.settings.sampling();
        GenerateRequest {
            model: self.model.clone(),
            input: Some(RequestInput::Chat(chat)),
            sampling: Some(sampling.params()),
            stop: Some(sampling.stop_conditions()),
            tenant: self.args.tenant.clone().unwrap_or_default(),
            tools: self.tools.clone(),
            // Counted.
            return_token_ids: true,
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

/// Answer so far.
#[derive(Default)]
struct Answer {
    text: String,
    calls: Vec<ToolCall>,
    stats: AnswerStats,
}

impl Answer {
    /// Prints the answer while it arrives.
    async fn stream(
        &mut self,
        client: &AuthenticatedClient,
        request: GenerateRequest,
    ) -> Result<Ending, AnswerError> {
        let sent = Instant::now();
        // An answer that breaks off continues when the router is back.
        let mut stream = GenerateStream::new(vec![client.clone()], request);
        let mut ending = Ending::Complete;
        while let Some(response) = stream.message().await? {
            let Some(event) = response.event else { continue };
            self.stats.take(sent.elapsed(), &event);
            match event {
                Event::Delta(delta) => {
                    self.print(&delta.text).map_err(AnswerError::Output)?;
                    tool_file::append(&mut self.calls, delta.tool_calls);
                }
                Event::Finished(finished) => {
                    self.print(&finished.text).map_err(AnswerError::Output)?;
                    if finished.reason() == FinishReason::Length {
                        ending = Ending::Length;
                    }
                    tool_file::append(&mut self.calls, finished.tool_calls);
                }
                _ => {}
            }
        }
        tool_file::remove_cut(&mut self.calls);
        Ok(ending)
    }

    fn print(&mut self, text: &str) -> io::Result<()> {
        self.text.push_str(text);
        let mut output = io::stdout().lock();
        output.write_all(text.as_bytes())?;
        output.flush()
    }
}
