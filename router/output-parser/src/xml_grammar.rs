//! Rules of calls with a tag for each parameter.
//!
//! What stands between the tags of a parameter is what the parser of these calls reads there ([`ParameterKind`]): text as it is, or
//! JSON. A text has no tag in it that would end it ([`crate::qwen_xml`]).

use std::fmt::{self, Write};

use serde_json::{Value, json};

use crate::call_part::NAME_BYTES_MAX;
use crate::grammar::{CallGrammarError, GrammarTool, Rules, escaped, literal};
use crate::parameters::{Parameter, Parameters};
use crate::tool_types::ParameterKind;

/// End of a value.
const END: &str = r#""\n</parameter>\n""#;

/// Writes the rules of a tool.
pub(crate) fn write_tool(
    rules: &mut Rules,
    at: usize,
    tool: &GrammarTool<'_>,
) -> Result<(), CallGrammarError> {
    let parameters = Parameters::of_schema(tool.parameters);
    let refused =
        |keyword: &str| CallGrammarError::NotKept { tool: tool.name.to_owned(), keyword: keyword.to_owned() };
    if let Some(keyword) = parameters.not_kept.filter(|_| tool.strict) {
        return Err(refused(keyword));
    }
    let mut body = literal(&format!("<function={}>\n", tool.name));
    let mut names = Vec::new();
    for (index, parameter) in parameters.all.iter().enumerate() {
        let Parameter { name, schema, .. } = parameter;
        let is_required = parameters.required.contains(name);
        if !is_writable(name) || **schema == Value::Bool(false) {
            if is_required && tool.strict {
                return Err(refused(&format!("the required property {}", literal(name))));
            }
            continue;
        }
        names.push(escaped(name));
        write!(body, " param_{at}_{index}{}", if is_required { "" } else { "?" })?;
        let open = literal(&format!("<parameter={name}>\n"));
        writeln!(rules, "param_{at}_{index}: {open} value_{at}_{index}")?;
        write_value(rules, (at, index), parameter, tool)?;
    }
    if parameters.all.is_empty() && !tool.strict {
        body.push_str(" any_param*");
        if !std::mem::replace(&mut rules.has_any_param, true) {
            rules.write_str("any_param: \"<parameter=\" KEY \">\\n\" any_value\n")?;
            writeln!(rules, "any_value[lazy]: {} {END}\nKEY: /[A-Za-z0-9_]{{1,64}}/", untagged(&[]))?;
        }
    }
    if !names.is_empty() {
        writeln!(rules, "UNTAGGED_{at}: {}", untagged(&names))?;
    }
    writeln!(rules, "tool_{at}: {body} \"</function>\"")?;
    Ok(())
}

/// Whether a name can stand in a tag.
fn is_writable(name: &str) -> bool {
    name.trim() == name && name.len() <= NAME_BYTES_MAX && !name.contains(['<', '>', '\n'])
}

/// Returns the expression of the texts that have no tag in them which ends a value. `names` are those of the parameters, escaped.
fn untagged(names: &[String]) -> String {
    let mut tags = vec![r"<\/parameter>".to_owned(), r"<\/function>\s*<".to_owned()];
    if !names.is_empty() {
        tags.push(format!(r"<parameter=\s*({})\s*>", names.join("|")));
    }
    format!(r"(/(?s:.)*/ & ~/(?s:.)*({})(?s:.)*/)", tags.join("|"))
}

/// Writes the rules of a value and its end.
fn write_value(
    rules: &mut Rules,
    (at, index): (usize, usize),
    parameter: &Parameter<'_>,
    tool: &GrammarTool<'_>,
) -> fmt::Result {
    let (root, schema) = (tool.parameters, &*parameter.schema);
    let text = |rules: &mut Rules, name: &str, options: Value| {
        write!(rules, "{name}_{at}_{index}[lazy]: (UNTAGGED_{at}")?;
        if tool.strict {
            rules.write_str(" & %text ")?;
            rules.schema(schema, root, ("x-text", options))?;
        }
        writeln!(rules, ") {END}")
    };
    match parameter.kind {
        ParameterKind::Text => text(rules, "value", json!({})),
        ParameterKind::NullableText => text(rules, "value", json!({"null": true})),
        ParameterKind::Json => {
            let others = json!({"allOf": [schema], "type": ["null", "boolean", "number", "array", "object"]});
            let has_texts = tool.strict && parameter.has_texts;
            let any = json!({});
            let json = if !tool.strict {
                &any
            } else if has_texts {
                &others
            } else {
                schema
            };
            let or_text = if has_texts { format!(" | text_{at}_{index}") } else { String::new() };
            writeln!(rules, "value_{at}_{index}: json_{at}_{index} {END}{or_text}")?;
            write!(rules, "json_{at}_{index}: ")?;
            rules.json(json, root)?;
            if has_texts { text(rules, "text", json!({"empty": true})) } else { Ok(()) }
        }
    }
}
