//! Chat templates of models, and expressions of their language: rendered as transformers does, of which `tests/templates/record` has
//! recorded the results. Requests are read as the API reads them.

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use inflight_fixtures::skipped;
    use inflight_output_parser::{ReasoningFormat, ToolCallFormat};
    use serde::Deserialize;
    use serde_json::value::RawValue;
    use sha2::{Digest, Sha256};
    use time::OffsetDateTime;

    use super::super::chat;
    use crate::request::draft::Input;
    use crate::text::{ChatTemplate, Conversation, Message, SpecialTokens};

    /// Environment variable with the folder of the templates.
    const FOLDER: &str = "INFLIGHT_CHAT_TEMPLATES";
    /// Results of expressions that differ from those of transformers, with the reason.
    const DIFFERENCES: [(&str, &[&str]); 10] = [
        (
            "filters and functions for web pages, of which no prompt consists: they are unknown",
            &[
                "'a long line of text here' | wordwrap(10)",
                "'abcdefghijkl' | wordwrap(5)",
                "'abcdefghijkl' | wordwrap(5, false)",
                "'<b>' | striptags",
                "'&lt;a&gt; <i>x</i>  y' | striptags",
                "'http://a.b' | urlize",
                "1000 | filesizeformat",
                "1500000 | filesizeformat(true)",
                "1 | filesizeformat",
                "{'a': 'x<', 'b': none} | xmlattr",
                "{'a': [1, {'b': 'é'}]} | pprint",
                "lipsum(1) | length > 0",
            ],
        ),
        (
            "the engine compares all values, where Python refuses those that have no order",
            &["nothing < 1", "'a' < 1", "none < 1", "nothing > 1"],
        ),
        (
            "the engine searches texts for all values, and slices undefined ones",
            &["1 in 'abc'", "nothing in 'abc'", "none in 'abc'", "nothing[1:]"],
        ),
        (
            "ranges, groups and views of dictionaries are lists when they are written",
            &[
                "range(5)",
                "{'x': range(2)}",
                "range(3) ~ ''",
                "range(3) == [0, 1, 2]",
                "{'a': 1, 'b': 2}.items()",
                "{'a': 1, 'b': 2}.keys()",
                "{'a': 1, 'b': 2}.values()",
                "[{'a': 1, 'b': 2}, {'a': 1, 'b': 3}] | groupby('a') | list",
                "{% macro m() %}{{ m.name }}{{ m.arguments }}{% endmacro %}{{ m() }}",
            ],
        ),
        (
            "macros take no other arguments than those that they name: an error",
            &["{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, x=2) }}"],
        ),
        ("numbers have no methods: an error", &["(5).bit_length()", "2.0.is_integer()"]),
        ("a tuple is in brackets where it is written: an error", &["1, 2"]),
        (
            "a namespace may be set an attribute that begins with _",
            &["{% set ns = namespace() %}{% set ns._b = 1 %}"],
        ),
        ("the operator ~ writes numbers without exponents", &["1e-7 ~ ''"]),
        (
            "kinds of digits other than those of ASCII, and characters by numbers of eight digits",
            &[
                "'²'.isdecimal()",
                "'½'.isdigit()",
                "'四'.isnumeric()",
                "['a\\u0301', '\\u00ad', '\\ue000', '\\U0001f600']",
            ],
        ),
    ];

    /// Digests of prompts.
    #[derive(Deserialize)]
    struct Recorded {
        /// Time that templates see.
        time: i64,
        /// Titles of conversations, with the suffix [`WITH_TOOLS`] if tools are given.
        situations: Vec<String>,
        /// By the name of a template: its digest, and the digest of the prompt of each situation or `error`.
        templates: BTreeMap<String, Vec<String>>,
    }

    const WITH_TOOLS: &str = " with tools";

    /// Parts of requests.
    #[derive(Deserialize)]
    struct Conversations<'a> {
        #[serde(borrow)]
        tools: &'a RawValue,
        #[serde(borrow)]
        conversations: BTreeMap<String, &'a RawValue>,
    }

    fn file(name: &str) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/templates").join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    fn template(source: &str) -> Result<ChatTemplate, String> {
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<pad>")];
        let template = ChatTemplate::with_special_tokens(source, SpecialTokens::from_iter(tokens));
        template.map_err(|error| error.to_string())
    }

    fn hex(bytes: &[u8]) -> String {
        Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns the conversations as the API reads them, in the order of their titles.
    fn conversations(titles: &[String]) -> Vec<Conversation> {
        let text = file("conversations.json");
        let sent: Conversations<'_> = serde_json::from_str(&text).unwrap();
        let read = |title: &String| {
            let (title, tools) = match title.strip_suffix(WITH_TOOLS) {
                Some(title) => (title, sent.tools.get()),
                None => (title.as_str(), "[]"),
            };
            let messages = sent.conversations[title].get();
            let body = format!(r#"{{"model": "m", "messages": {messages}, "tools": {tools}}}"#);
            match chat::read(body.as_bytes()).map(|(draft, _)| draft.input) {
                Ok(Input::Chat(conversation)) => conversation,
                Ok(_) => panic!("{title}: no chat"),
                Err(outcome) => panic!("{title}: {}", outcome.message()),
            }
        };
        titles.iter().map(read).collect()
    }

    #[test]
    fn templates_of_models_render_as_transformers_does() {
        let recorded: Recorded = serde_json::from_str(&file("digests.json")).unwrap();
        assert!(recorded.templates.len() >= 100 && recorded.situations.len() == 22);
        let conversations = conversations(&recorded.situations);
        let Ok(folder) = std::env::var(FOLDER) else {
            return skipped("chat templates of models", &format!("{FOLDER} names no folder"));
        };
        let time = OffsetDateTime::from_unix_timestamp(recorded.time).unwrap();
        let mut different = Vec::new();
        for (name, digests) in &recorded.templates {
            let path = Path::new(&folder).join(name);
            let source = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert_eq!(hex(&source), digests[0], "{name} is another version: record its prompts anew");
            let template = template(std::str::from_utf8(&source).unwrap());
            for ((title, conversation), expected) in
                recorded.situations.iter().zip(&conversations).zip(&digests[1..])
            {
                let render = |template: &ChatTemplate| {
                    let prompt = template.render(conversation, time);
                    prompt.map_err(|error| error.to_string())
                };
                let prompt = template.as_ref().map_err(Clone::clone).and_then(render);
                let found = prompt
                    .as_ref()
                    .map_or("error".to_owned(), |prompt| hex(prompt.as_bytes())[..16].to_owned());
                if found != *expected {
                    different
                        .push(format!("{name}, {title}: transformers has {expected}, here is {prompt:?}"));
                }
            }
        }
        assert!(different.is_empty(), "{} prompts differ:\n{}", different.len(), different.join("\n"));
    }

    /// The prompts of Qwen's models open the reasoning, or close it where there is to be none; calls are read in the format that they are told to
    /// write.
    #[test]
    fn templates_of_qwen_tell_calls_and_reasoning_and_switch_it() {
        let Ok(folder) = std::env::var(FOLDER) else {
            return skipped("formats of chat templates of models", &format!("{FOLDER} names no folder"));
        };
        let (closed, opened) = ("<think>\n\n</think>\n\n", "<think>\n");
        let (xml, json, think) = (ToolCallFormat::QwenXml, ToolCallFormat::Hermes, ReasoningFormat::Think);
        // Ends of prompts with reasoning, and without.
        for (name, calls, reasoning, ends) in [
            ("llama.cpp/Qwen3.5-4B.jinja", xml, Some(think), [opened, closed]),
            ("llama.cpp/Qwen-Qwen3-0.6B.jinja", json, Some(think), ["assistant\n", closed]),
            // Its template always opens the reasoning, which is closed for it.
            ("llama.cpp/Qwen-QwQ-32B.jinja", json, Some(think), [opened, "<think>\n</think>"]),
            ("llama.cpp/Qwen3-Coder.jinja", xml, None, ["assistant\n", "assistant\n"]),
        ] {
            let path = Path::new(&folder).join(name);
            let source = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
            let formats = (ToolCallFormat::of_template(&source), ReasoningFormat::of_template(&source));
            assert_eq!(formats, (Some(calls), reasoning), "{name}");
            for (thinks, end) in [true, false].into_iter().zip(ends) {
                let body = format!(
                    r#"{{"model": "m", "messages": [{{"role": "user", "content": "Hi"}}],
                        "chat_template_kwargs": {{"enable_thinking": {thinks}}}}}"#
                );
                let Ok(Input::Chat(conversation)) = chat::read(body.as_bytes()).map(|(draft, _)| draft.input)
                else {
                    panic!("{name}: no chat");
                };
                let prompt =
                    template(&source).unwrap().render(&conversation, OffsetDateTime::UNIX_EPOCH).unwrap();
                assert!(prompt.ends_with(end), "{name}, reasoning {thinks}: {prompt:?}");
            }
        }
    }

    #[test]
    fn expressions_have_the_values_that_transformers_gives_them() {
        let rows: Vec<(String, Option<String>)> = serde_json::from_str(&file("expressions.json")).unwrap();
        assert!(rows.len() > 1000);
        let recorded: Recorded = serde_json::from_str(&file("digests.json")).unwrap();
        let time = OffsetDateTime::from_unix_timestamp(recorded.time).unwrap();
        let messages = [Message::new("user", "Hi".to_owned())];
        let known: BTreeSet<&str> = DIFFERENCES.iter().flat_map(|(_, sources)| *sources).copied().collect();
        let (mut wrong, mut different) = (Vec::new(), BTreeSet::new());
        for (source, expected) in &rows {
            let is_template = ["{{", "{%", "{#", "\n"].iter().any(|part| source.contains(part));
            let full = if is_template { source.clone() } else { format!("{{{{ {source} }}}}") };
            let render = |template: ChatTemplate| {
                template.render(&messages[..].into(), time).map_err(|error| error.to_string())
            };
            let found = template(&full).and_then(render);
            if found.as_ref().ok() == expected.as_ref() {
                continue;
            }
            different.insert(source.as_str());
            if !known.contains(source.as_str()) {
                wrong.push(format!("{source:?}: transformers has {expected:?}, here is {found:?}"));
            }
        }
        assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
        assert_eq!(
            known.difference(&different).collect::<Vec<_>>(),
            Vec::<&&str>::new(),
            "these do not differ"
        );
    }
}
