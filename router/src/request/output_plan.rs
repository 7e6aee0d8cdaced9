//! Plan of how a request's output is parsed: the model's formats, their markers, and the grammar of required calls.

use std::sync::Arc;

use inflight_contract::{Constraint, Grammar};
use inflight_output_parser::{
    CallGrammar, CallIdStyle, CallIds, GrammarTool, Marker, MarkerToken, OutputFormat, OutputParser,
    ReasoningFormat, ToolCallFormat,
};

use crate::cluster::bundle::Model;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::request::draft::{Draft, Input, OutputParsing};
use crate::request::tool_use::{ToolChoice, ToolUse};

/// How the output of an admitted request is parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputPlan {
    format: Arc<OutputFormat>,
    ids: CallIdStyle,
    /// Random id of the stream, kept when it is resumed.
    stream: u128,
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
        if let Some(tools) = tools {
            constrain(request_constraint(tools, &format, model)?, request)?;
        }
        let ids = match calls {
            Some(ToolCallFormat::Mistral) => CallIdStyle::Nine,
            _ => CallIdStyle::Prefixed,
        };
        Ok(Some(Self { format: Arc::new(format), ids, stream: 0 }))
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
        format!("{calls:?} {reasoning:?} {begins_in_reasoning} {single_call}{whole}")
    }
}

fn unknown_format(model: &str) -> Outcome {
    let reason = format!(
        "the format of the tool calls of {model:?} is unknown, as its chat template has no markers of a known one; set --tool-call-format on the router"
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

/// Returns the constraint that makes the output call the chosen tools.
fn request_constraint(
    tools: &ToolUse,
    format: &OutputFormat,
    model: &Model,
) -> Result<Option<Constraint>, Outcome> {
    let (required, named) = match &tools.choice {
        ToolChoice::Required => (true, None),
        ToolChoice::Named(name) => (true, Some(name)),
        ToolChoice::Auto if tools.tools.iter().any(|tool| tool.strict) => (false, None),
        ToolChoice::Auto | ToolChoice::None => return Ok(None),
    };
    let Some(calls) = format.calls else { return Ok(None) };
    let shown = tools.tools.iter().filter(|tool| named.is_none_or(|name| tool.name == *name));
    let shown = shown.map(|tool| GrammarTool {
        name: &tool.name,
        parameters: &tool.parameters,
        // A required call has arguments that match the schema, too.
        strict: tool.strict || required,
    });
    let shown: Vec<GrammarTool<'_>> = shown.collect();
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
        tools: &shown,
        required,
        several: tools.parallel && named.is_none(),
        reasoning: format.reasoning.filter(|_| begins_after.is_none()),
        begins_in_reasoning: format.begins_in_reasoning,
        special: &special,
    };
    let lark = grammar.lark(Grammar::BYTES_MAX).map_err(|error| Outcome::field("tools", error))?;
    Ok(Some(Constraint { grammar: Grammar::Lark(lark), begins_after }))
}

/// Sets the constraint of a request.
fn constrain(constraint: Option<Constraint>, request: &mut Draft) -> Result<(), Outcome> {
    let Some(constraint) = constraint else { return Ok(()) };
    if request.sampling.constraint.is_some() {
        let reason =
            "a required or strict tool call cannot be combined with another constraint of the output";
        return Err(Outcome::field("tool_choice", reason));
    }
    request.sampling.constraint = Some(Arc::new(constraint));
    request.constraint_field = "tools";
    Ok(())
}
