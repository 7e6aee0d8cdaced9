//! Fields of OpenAI's API and of its extensions that say how a conversation is rendered.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::protocols::http::fields::{Field, Fields, honoured};
use crate::request::message_list::check_continued;
use crate::text::{Message, PromptEnd, Rendering, TemplateArguments};

/// Fields that say how a conversation is rendered.
pub(crate) const RENDERING: &[Field] = &[
    honoured(
        "chat_template_kwargs",
        "Variables of the chat template, such as `enable_thinking`; an object of at most 64 names and 16 KiB.",
    ),
    honoured(
        "add_generation_prompt",
        "False: the prompt ends behind the last message, instead of starting the assistant's.",
    ),
    honoured("continue_final_message", "The output continues the last message, which is of the assistant."),
];

/// Note of the field `reasoning_effort`.
pub(crate) const REASONING_EFFORT: &str = "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`; for chat templates with a variable of this name, and \
     `enable_thinking` or `thinking`, which `none` switches off and others switch on. No effect with other templates.";

/// Efforts of reasoning.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Reads how a conversation of these messages is rendered.
pub(crate) fn read(fields: &Fields<'_>, messages: &[Message]) -> Result<Rendering, Outcome> {
    let mut arguments = arguments(fields.raw("chat_template_kwargs"))?;
    if let Some(effort) = fields.text("reasoning_effort")? {
        set_effort("reasoning_effort", &effort, &mut arguments)?;
    }
    let generation: Option<bool> = fields.get("add_generation_prompt", "true or false")?;
    let end = match (generation, fields.flag("continue_final_message")?) {
        (Some(true), true) => {
            let reason = "continue_final_message continues the last message and add_generation_prompt starts another; ask for one";
            return Err(Outcome::field("continue_final_message", reason));
        }
        (_, true) => {
            check_continued("continue_final_message", messages)?;
            PromptEnd::LastMessage
        }
        (Some(false), false) => PromptEnd::Messages,
        _ => PromptEnd::NextMessage,
    };
    Ok(Rendering { arguments, end })
}

/// Reads arguments of a chat template.
fn arguments(value: Option<&RawValue>) -> Result<TemplateArguments, Outcome> {
    let Some(value) = value else { return Ok(TemplateArguments::default()) };
    TemplateArguments::of_json(value.get()).map_err(|error| {
        Outcome::field("chat_template_kwargs", format!("chat_template_kwargs is invalid: {error}"))
    })
}

/// Reads `reasoning` of the Responses API, whose effort is that of `reasoning_effort`.
pub(crate) fn of_responses(fields: &Fields<'_>) -> Result<Rendering, Outcome> {
    #[derive(Deserialize)]
    struct Reasoning {
        #[serde(default)]
        effort: Option<String>,
    }
    let mut rendering = Rendering::default();
    let reasoning: Option<Reasoning> = fields.object("reasoning", "an object with effort")?;
    if let Some(effort) = reasoning.and_then(|reasoning| reasoning.effort) {
        set_effort("reasoning", &effort, &mut rendering.arguments)?;
    }
    Ok(rendering)
}

/// Sets the arguments of templates that know an effort of reasoning, or a switch of it.
fn set_effort(field: &'static str, effort: &str, arguments: &mut TemplateArguments) -> Result<(), Outcome> {
    if !EFFORTS.contains(&effort) {
        let reason = format!("{field} has the effort {effort:?}; efforts are {}", EFFORTS.join(", "));
        return Err(Outcome::field(field, reason));
    }
    arguments.set_default("reasoning_effort", effort);
    set_thinking(effort != "none", arguments);
    Ok(())
}

/// Sets the switch of reasoning, in the names that templates have for it.
pub(crate) fn set_thinking(thinks: bool, arguments: &mut TemplateArguments) {
    arguments.set_default("enable_thinking", thinks);
    arguments.set_default("thinking", thinks);
}
