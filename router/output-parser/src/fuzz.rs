//! Entry point for fuzzing: any text as the output of a model.

use std::sync::Arc;

use crate::{
    CallIdStyle, CallIds, OutputEnd, OutputEvent, OutputFormat, OutputParser, ReasoningFormat,
    ToolCallFormat, ToolTypes,
};

/// Parses a text behind a byte that chooses the format and what the prompt has opened: calls are begun, continued and ended in
/// order, the arguments of those that were made, and of no others, are JSON objects, the events do not depend on how the text is divided,
/// and text without calls is not lost. Returns whether it has a call.
///
/// # Panics
/// If one of these does not hold.
pub fn output_parser(data: &[u8]) -> bool {
    let Some((first, text)) = data.split_first() else { return false };
    let text = String::from_utf8_lossy(text);
    let calls = ToolCallFormat::ALL[usize::from(first % 4)];
    let reasoning = (first & 4 != 0).then_some(ReasoningFormat::Think);
    let markers = reasoning.map(ReasoningFormat::markers).unwrap_or_default();
    let mut tools = ToolTypes::default();
    let schema =
        serde_json::json!({"properties": {"n": {"type": "integer"}, "s": {"type": ["string", "null"]}}});
    tools.add("f", &schema);
    let format = Arc::new(OutputFormat {
        calls: Some(calls),
        reasoning,
        texts: calls.markers().iter().chain(markers).copied().collect(),
        begins_in_reasoning: reasoning.is_some() && first & 8 != 0,
        single_call: first & 16 != 0,
        whole_calls: first & 32 != 0,
        tools: Arc::new(tools),
        ..OutputFormat::default()
    });
    let parser = || OutputParser::new(format.clone(), CallIds::new(1, 0, CallIdStyle::Nine));
    let (mut whole, mut divided) = (parser(), parser());
    let mut events = whole.push_text(&text);
    events.extend(whole.finish(OutputEnd::Cut));
    let mut pieces: Vec<OutputEvent> = Vec::new();
    let mut buffer = [0; 4];
    for c in text.chars() {
        pieces.extend(divided.push_text(c.encode_utf8(&mut buffer)));
    }
    pieces.extend(divided.finish(OutputEnd::Cut));
    let (events, pieces) = (OutputEvent::merged(events), OutputEvent::merged(pieces));
    assert_eq!(events, pieces, "the events depend on the division");
    let mut open = None;
    let (mut content, mut arguments) = (String::new(), String::new());
    for event in &events {
        match event {
            OutputEvent::CallBegin { index, .. } => {
                assert_eq!(open.replace(*index), None, "a call is open");
                arguments.clear();
            }
            OutputEvent::CallArguments { index, fragment } => {
                assert_eq!(open, Some(*index), "arguments without a call");
                arguments += fragment;
            }
            OutputEvent::CallEnd { index, whole } => {
                assert_eq!(open.take(), Some(*index), "the end of another call");
                let is_json = serde_json::from_str::<serde::de::IgnoredAny>(&arguments).is_ok();
                assert_eq!(*whole, is_json && arguments.trim_start().starts_with('{'), "{arguments}");
                assert!(*whole || !format.whole_calls, "a call that was not made");
            }
            OutputEvent::Content(text) => content.push_str(text),
            OutputEvent::Reasoning(_) => {}
        }
    }
    assert_eq!(open, None, "a call has no end");
    if whole.calls() == 0 && reasoning.is_none() {
        assert_eq!(content, text, "text is lost");
    }
    whole.calls() > 0
}
