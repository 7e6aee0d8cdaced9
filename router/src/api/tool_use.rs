//! Tools of a request: their definitions, and which of them the output may or must call.

use std::collections::BTreeSet;

use inflight_output_parser::ToolTypes;
use minijinja::value::Value as TemplateValue;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::outcome::Outcome;

/// Tool that the model may call: a function.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// Definition as templates read it: OpenAI's object with type and function.
    pub(crate) definition: TemplateValue,
    /// JSON schema of its arguments, an object.
    pub(crate) parameters: Value,
    /// Whether the arguments must match the schema.
    pub(crate) strict: bool,
}

/// Which tools the output calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// Any or none, as the model decides.
    #[default]
    Auto,
    /// None: the model does not see the tools.
    None,
    /// At least one of them.
    Required,
    /// This one.
    Named(String),
}

/// Tools of a request. All have different names, and the chosen one is among them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ToolUse {
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    /// Whether the output may have several calls.
    pub(crate) parallel: bool,
}

/// Definition of a tool as its client gives it.
pub(crate) struct ToolDefinition<'a> {
    /// Place in the request, for error messages.
    pub(crate) place: &'a str,
    pub(crate) name: Option<String>,
    pub(crate) description: Option<String>,
    /// JSON schema of the arguments; absent: no arguments.
    pub(crate) parameters: Option<&'a RawValue>,
    pub(crate) strict: bool,
}

impl Tool {
    /// Maximum bytes of a name.
    pub(crate) const NAME_BYTES_MAX: usize = 128;

    /// Checks a definition. Error messages name `field`.
    pub(crate) fn new(definition: ToolDefinition<'_>) -> Result<Self, Outcome> {
        let ToolDefinition { place, name, description, parameters, strict } = definition;
        let refused = |reason: String| Err(Outcome::field("tools", reason));
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return refused(format!("{place} has no name; name each tool"));
        };
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
        if name.len() > Self::NAME_BYTES_MAX || !name.chars().all(known) {
            return refused(format!(
                "{place} has a name that is not 1 to {} letters, digits and _ - . : /",
                Self::NAME_BYTES_MAX
            ));
        }
        let empty = r#"{"type": "object", "properties": {}}"#;
        let text = parameters.map(RawValue::get).filter(|text| *text != "null");
        let parsed =
            (serde_json::from_str(text.unwrap_or(empty)), serde_json::from_str(text.unwrap_or(empty)));
        let (Ok(parameters @ Value::Object(_)), Ok(template_parameters)) = parsed else {
            return refused(format!("{place} has parameters that are no JSON schema of type object"));
        };
        let kind = &parameters["type"];
        if !kind.is_null() && kind != "object" {
            return refused(format!("{place} has parameters of type {kind}; arguments are an object"));
        }
        let template_parameters: TemplateValue = template_parameters;
        let function = [
            ("name", Some(TemplateValue::from(name.as_str()))),
            ("description", description.map(TemplateValue::from)),
            ("parameters", Some(template_parameters)),
        ];
        let function = function.into_iter().filter_map(|(key, value)| Some((key, value?)));
        let definition = TemplateValue::from_pairs([
            ("type", TemplateValue::from("function")),
            ("function", TemplateValue::from_pairs(function)),
        ]);
        Ok(Self { name, definition, parameters, strict })
    }
}

impl ToolUse {
    /// Maximum tools of a request.
    pub(crate) const TOOLS_MAX: usize = 512;

    /// Checks the tools of a request; `None` if there are none.
    pub(crate) fn new(tools: Vec<Tool>, choice: ToolChoice, parallel: bool) -> Result<Option<Self>, Outcome> {
        let mut names = BTreeSet::new();
        if let Some(tool) = tools.iter().find(|tool| !names.insert(tool.name.as_str())) {
            return Err(Outcome::field("tools", format!("tools has two tools of the name {:?}", tool.name)));
        }
        match &choice {
            ToolChoice::Named(name) if !names.contains(name.as_str()) => {
                return Err(Outcome::field(
                    "tool_choice",
                    format!("tool_choice names {name:?}, which is no tool in tools"),
                ));
            }
            ToolChoice::Required if tools.is_empty() => {
                return Err(Outcome::field("tool_choice", "tool_choice requires a call, but tools is empty"));
            }
            _ => {}
        }
        Ok((!tools.is_empty()).then_some(Self { tools, choice, parallel }))
    }

    /// Checks the number of tools before they are read.
    pub(crate) fn check_count(count: usize) -> Result<(), Outcome> {
        if count <= Self::TOOLS_MAX {
            return Ok(());
        }
        let most = Self::TOOLS_MAX;
        Err(Outcome::field("tools", format!("tools has {count} tools; at most {most} are allowed")))
    }

    /// Whether the model sees the tools, and its calls are parsed.
    pub(crate) fn is_active(&self) -> bool {
        self.choice != ToolChoice::None
    }

    /// Returns the definitions that templates render.
    pub(crate) fn definitions(&self) -> Vec<TemplateValue> {
        let shown = self.tools.iter().filter(|_| self.is_active());
        shown.map(|tool| tool.definition.clone()).collect()
    }

    /// Returns the types of the tools' parameters.
    pub(crate) fn types(&self) -> ToolTypes {
        let mut types = ToolTypes::default();
        self.tools.iter().for_each(|tool| types.add(&tool.name, &tool.parameters));
        types
    }
}
