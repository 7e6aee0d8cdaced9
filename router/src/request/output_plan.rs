//! Plan of how a request's output is parsed: the model's formats, their markers, and the grammar of required calls.

use std::sync::Arc;

use inflight_contract::{Constraint, Grammar, JsonWhitespace};
use inflight_output_parser::{
    CallGrammar, CallIdStyle, CallIds, GrammarAnswer, GrammarTool, Marker, MarkerToken, OutputFormat,
    OutputParser, ReasoningFormat, ToolCallFormat, may_look_like_call,
};
use serde_json::{Value, json};

use crate::cluster::bundle::Model;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::request::draft::{Draft, Input, NamedConstraint, OutputParsing, TOOLS};
use crate::request::tool_use::{ToolChoice, ToolUse};

/// How the output of an admitted request is parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputPlan {
    format: Arc<OutputFormat>,
    ids: CallIdStyle,
    /// Random id of the stream, kept when it is resumed.
    stream: u128,
    /// Grammar of the answer, with its field, if that of the output is of calls or an answer.
    answer: Option<NamedConstraint>,
}

impl OutputPlan {
    /// Returns the plan of a request for a model with its name, and sets the constraint of its output; `None` if the output is text as it is.
    pub(crate) fn new(
        request: &mut Draft,
        (name, model): (&str, &Model),
        options: &Options,
    ) -> Result<Option<Self>, Outcome> {
        if request.parsing == OutputParsing::Off {
            return Ok(None);
        }
        let tools = request.tools.as_ref().filter(|tools| tools.is_active());
        let calls = options.tool_call_format.of(name, model.output.calls);
        let reasoning = options.reasoning_format.of(name, model.output.reasoning);
        if tools.is_some() && calls.is_none() {
            return Err(unknown_format(name));
        }
        let mut format = OutputFormat {
            calls: calls.filter(|_| tools.is_some()),
            reasoning,
            single_call: tools.is_some_and(|tools| !tools.parallel),
            whole_calls: request.parsing == OutputParsing::WholeCalls,
            tools: tools.map(|tools| Arc::new(tools.types())).unwrap_or_default(),
            ..OutputFormat::default()
        };
        if format.calls.is_none() && reasoning.is_none() {
            return Ok(None);
        }
        add_markers(&mut format, model);
        format.begins_in_reasoning =
            reasoning.is_some_and(|reasoning| opens_reasoning(model, &request.input, reasoning));
        let constraint =
            request.sampling.constraint.clone().map(|constraint| (request.constraint_field, constraint));
        let tools_constraint = tools.map(|tools| {
            let whitespace = options.json_whitespace;
            CallConstraint { tools, format: &mut format, model, whitespace }.of(constraint.as_ref())
        });
        let mut answer = None;
        match tools_constraint.transpose()?.flatten() {
            Some(CallsOrAnswer { calls, with_answer }) => {
                (request.sampling.constraint, request.constraint_field) = (Some(Arc::new(calls)), TOOLS);
                answer = constraint.filter(|_| with_answer);
            }
            None => format.constrained_answer |= constraint.is_some_and(|(_, of)| is_json(&of.grammar)),
        }
        let ids = match calls {
            Some(ToolCallFormat::Mistral) => CallIdStyle::Nine,
            _ => CallIdStyle::Prefixed,
        };
        Ok(Some(Self { format: Arc::new(format), ids, stream: 0, answer }))
    }

    /// Returns the grammar of the answer, if that of the output is of calls or an answer.
    pub(crate) fn answer(&self) -> Option<NamedConstraint> {
        self.answer.clone()
    }

    /// Sets the id of the stream.
    pub(crate) fn of_stream(self, stream: u128) -> Self {
        Self { stream, ..self }
    }

    /// Returns the parser of a choice.
    pub(crate) fn parser(&self, choice: u32) -> OutputParser {
        OutputParser::new(self.format.clone(), CallIds::new(self.stream, choice, self.ids))
    }

    /// Returns the marker that a token is.
    pub(crate) fn marker(&self, token: u32) -> Option<&MarkerToken> {
        self.format.marker(token)
    }

    /// Returns the parts of the plan that decide the events of a stream, as text.
    pub(crate) fn identity(&self) -> String {
        let OutputFormat { calls, reasoning, begins_in_reasoning, single_call, whole_calls, .. } =
            &*self.format;
        let whole = if *whole_calls { " whole" } else { "" };
        let answer = if self.format.constrained_answer { " answer" } else { "" };
        format!("{calls:?} {reasoning:?} {begins_in_reasoning} {single_call}{whole}{answer}")
    }
}

fn unknown_format(model: &str) -> Outcome {
    let reason = format!(
        "the format of the tool calls of {model:?} is unknown, as its chat template has no markers of a known one; set --tool-call-format of `inflight up` or `inflight router`"
    );
    Outcome::field("tools", reason)
}

/// Adds the markers of the formats. A marker of reasoning that is a single token is recognised as that token only; one
/// of tool calls if the token is special, because text of other tokens may be spelt.
fn add_markers(format: &mut OutputFormat, model: &Model) {
    let (calls, reasoning) = (format.calls, format.reasoning);
    let calls = calls.map(ToolCallFormat::markers).unwrap_or_default();
    let reasoning = reasoning.map(ReasoningFormat::markers).unwrap_or_default();
    for (marker, text) in reasoning.iter().chain(calls).copied() {
        let id = model.tokenizer.token_id(text);
        let special = id.is_some_and(|id| model.tokenizer.vocabulary().is_special(id));
        let of_reasoning = matches!(marker, Marker::ReasoningBegin | Marker::ReasoningEnd);
        match id.filter(|_| special || of_reasoning) {
            Some(id) => format.tokens.push(MarkerToken { id, marker, text: if special { "" } else { text } }),
            None => format.texts.push((marker, text)),
        }
    }
}

/// Whether the prompt begins the model's reasoning.
fn opens_reasoning(model: &Model, input: &Input, reasoning: ReasoningFormat) -> bool {
    let Input::Chat(conversation) = input else { return false };
    let text =
        |wanted| reasoning.markers().iter().find(|(marker, _)| *marker == wanted).map(|(_, text)| *text);
    let (begin, end) = (text(Marker::ReasoningBegin), text(Marker::ReasoningEnd));
    begin.zip(end).is_some_and(|(begin, end)| model.opens_reasoning(conversation, begin, end))
}

/// Whether a grammar is of JSON, in which a marker is text.
fn is_json(grammar: &Grammar) -> bool {
    grammar.json_whitespace().is_some()
}

/// Constraint of an output by its tools.
struct CallsOrAnswer {
    calls: Constraint,
    /// Whether the output may be an answer instead, under the request's own constraint.
    with_answer: bool,
}

/// Tools of a request, with what their constraint depends on.
struct CallConstraint<'a> {
    tools: &'a ToolUse,
    format: &'a mut OutputFormat,
    model: &'a Model,
    /// Whitespace of an answer in JSON.
    whitespace: JsonWhitespace,
}

impl CallConstraint<'_> {
    /// Returns the constraint by the tools; `None` if they set none beside `own`, the request's own constraint. JSON is the format of
    /// an answer: it does not apply to calls. Any other grammar is that of the whole output, which then has no calls.
    fn of(self, own: Option<&NamedConstraint>) -> Result<Option<CallsOrAnswer>, Outcome> {
        let Some(format) = self.format.calls else { return Ok(None) };
        let tools = self.tools;
        let named = match &tools.choice {
            ToolChoice::Named(name) => Some(name),
            ToolChoice::Auto | ToolChoice::Required | ToolChoice::None => None,
        };
        let required = named.is_some() || tools.choice == ToolChoice::Required;
        let answer = own.map(|(field, own)| answer_schema(field, &own.grammar)).transpose()?.flatten();
        let callable = || tools.callable().filter(|tool| named.is_none_or(|name| tool.name == *name));
        let is_strict = callable().any(|tool| tool.strict);
        let restricts = required || is_strict || tools.allowed.is_some();
        if own.is_some() && answer.is_none() {
            if !restricts {
                return Ok(None);
            }
            let reason = "a required, strict or allowed tool cannot be combined with a grammar of the output that is not JSON";
            return Err(Outcome::field("tool_choice", reason));
        }
        if !restricts && answer.is_none() {
            return Ok(None);
        }
        let answer = answer.filter(|_| !required);
        if let Some(((field, _), answer)) = own.zip(answer.as_ref())
            && format == ToolCallFormat::Llama3
        {
            let names: Vec<&str> = tools.tools.iter().map(|tool| tool.name.as_str()).collect();
            if is_strict && may_look_like_call(answer, &names) {
                let reason = "in this model's format of calls, llama3, JSON of the schema can look like a call of a strict tool; require a \
                    property other than name, parameters, arguments, type and id, or leave strict out";
                return Err(Outcome::field(*field, reason));
            }
            self.format.whole_calls = true;
        }
        self.format.constrained_answer |= answer.is_some();
        let shown: Vec<GrammarTool<'_>> = callable()
            .map(|tool| GrammarTool {
                name: &tool.name,
                parameters: &tool.parameters,
                // A required call has arguments that match the schema, too.
                strict: tool.strict || required,
            })
            .collect();
        let calls = self.constraint((format, &shown), required, answer.as_ref())?;
        Ok(Some(CallsOrAnswer { calls, with_answer: answer.is_some() }))
    }

    /// Returns the constraint of an output of calls, of text with calls, or of calls or an answer.
    fn constraint(
        &self,
        (calls, shown): (ToolCallFormat, &[GrammarTool<'_>]),
        required: bool,
        answer: Option<&Value>,
    ) -> Result<Constraint, Outcome> {
        let Self { tools, format, model, whitespace } = self;
        let special = |text: &str| {
            let id = model.tokenizer.token_id(text);
            id.filter(|id| model.tokenizer.vocabulary().is_special(*id))
        };
        let end = format.reasoning.and_then(|reasoning| {
            let end = reasoning.markers().iter().find(|(marker, _)| *marker == Marker::ReasoningEnd);
            end.and_then(|(_, text)| model.tokenizer.token_id(text))
        });
        let begins_after = end.filter(|_| format.begins_in_reasoning);
        let grammar = CallGrammar {
            format: calls,
            tools: shown,
            required,
            answer: answer.map(|schema| GrammarAnswer { schema, options: whitespace.compiler_options() }),
            several: tools.parallel && !matches!(tools.choice, ToolChoice::Named(_)),
            reasoning: format.reasoning.filter(|_| begins_after.is_none()),
            begins_in_reasoning: format.begins_in_reasoning,
            special: &special,
        };
        let lark = grammar.lark(Grammar::BYTES_MAX).map_err(|error| Outcome::field("tools", error))?;
        Ok(Constraint { grammar: Grammar::Lark(lark), begins_after })
    }
}

/// Returns the schema of an answer in JSON; `None` for any other grammar.
fn answer_schema(field: &'static str, grammar: &Grammar) -> Result<Option<Value>, Outcome> {
    let schema = match grammar {
        Grammar::JsonObject(_) => return Ok(Some(json!({"type": "object"}))),
        Grammar::JsonSchema(text, _) => text,
        Grammar::Regex(_) | Grammar::Choice(_) | Grammar::Lark(_) => return Ok(None),
    };
    let refused = |reason: &dyn std::fmt::Display| Err(Outcome::field(field, format!("{field}: {reason}")));
    if let Err(error) = grammar.check() {
        return refused(&error);
    }
    match serde_json::from_str(schema) {
        Ok(schema @ (Value::Object(_) | Value::Bool(true))) => Ok(Some(schema)),
        Ok(Value::Bool(false)) => refused(&"the schema `false` allows no value"),
        Ok(_) => refused(&"the JSON schema must be an object or a boolean"),
        Err(error) => refused(&format_args!("the JSON schema is not valid JSON: {error}")),
    }
}
