//! Chat templates (Jinja), rendered as Hugging Face transformers does.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use time::OffsetDateTime;

use super::conversation::{self, Conversation, Form, Message};
use super::marks::Marks;
use super::special_tokens::SpecialTokens;
use super::template_time::TIME;
use super::{AddedTokens, PromptEnd, PromptText};

/// Private-use characters, one of which marks the end of a message's text.
const END_MARKS: RangeInclusive<char> = '\u{E000}'..='\u{F8FF}';

/// Invalid chat template, or messages that it rejects.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// Syntax error in the template.
    #[error("the chat template does not parse: {0}")]
    Syntax(String),
    /// The messages are too many for their size.
    #[error(
        "there are {count} messages of {bytes} bytes in all; the product of the two may be at most {most}, so send fewer or shorter messages"
    )]
    TooLarge {
        /// Number of messages and tools.
        count: usize,
        /// Bytes of their texts.
        bytes: usize,
        /// Maximum product.
        most: usize,
    },
    /// Rendering failed: the template raised an error or took too many steps.
    #[error("the chat template refused the messages: {0}")]
    Render(String),
}

/// Chat template of a model, rendered as transformers does: with its syntax of Jinja, functions, filters, tests and methods of Python,
/// and with the special tokens. The time is given, so equal messages at one time always give the same prompt.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: SpecialTokens,
    /// Forms in which the template is given messages: the first one that it renders counts.
    forms: Vec<Form>,
}

impl ChatTemplate {
    /// Maximum instructions of a rendering; bounds templates that loop.
    const FUEL: u64 = 10_000_000;
    /// Maximum output of a rendering in bytes, beside [`Self::OUTPUT_FACTOR`] times the messages' bytes.
    const OUTPUT_BYTES: usize = 1 << 20;
    /// Bytes that a byte of a message may become: escapes in JSON take up to six, and templates may repeat a message.
    const OUTPUT_FACTOR: usize = 16;
    /// Maximum product of the number of messages and tools and their bytes. A template that collects messages in one string, such
    /// as all system messages, copies the string at each of them: half of this product for each `+`.
    const MESSAGES_TIMES_BYTES: usize = 1 << 31;
    const NAME: &'static str = "chat";
    /// Maximum instructions of a rendering that shows in which form a template reads messages.
    const PROBE_FUEL: u64 = 1_000_000;
    /// Text that such a rendering writes, in its context.
    const PROBE: &'static str = "a probe";

    /// Parses a template of a model with these special tokens at the start and the end of a text.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, TemplateError> {
        let tokens = [("bos_token", bos_token), ("eos_token", eos_token)];
        Self::with_special_tokens(source, tokens.into_iter().collect())
    }

    /// Parses a template of a model with special tokens.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn with_special_tokens(source: &str, special_tokens: SpecialTokens) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let trimmed = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(trimmed.map_err(|error| TemplateError::Syntax(error.to_string()))?);
        environment.set_fuel(Some(Self::PROBE_FUEL));
        super::template_functions::apply(&mut environment);
        super::template_filters::apply(&mut environment);
        super::template_methods::apply(&mut environment);
        environment
            .add_template_owned(Self::NAME, super::template_source::rewrite(source))
            .map_err(|error| TemplateError::Syntax(error.to_string()))?;
        let mut template =
            Self { environment, source: source.to_owned(), special_tokens, forms: Form::all(false) };
        template.forms = template.probe();
        template.environment.set_fuel(Some(Self::FUEL));
        Ok(template)
    }

    /// Returns the forms of messages: contents are lists of parts if the template writes these only, and the first form is one of which
    /// the template writes the calls.
    fn probe(&self) -> Vec<Form> {
        let time = OffsetDateTime::UNIX_EPOCH;
        let question = Conversation::from(vec![Message::new("user", Self::PROBE.to_owned())]);
        let writes_contents = |parts: bool| {
            let rendered = self.render_in(Form::all(parts)[0], &question, time);
            // In quotes, it is within what the template writes of a value that it does not know.
            let quoted = ['\'', '"'].map(|quote| format!("{quote}{}", Self::PROBE));
            rendered.is_ok_and(|text| {
                text.contains(Self::PROBE) && !quoted.iter().any(|quoted| text.contains(quoted))
            })
        };
        let parts = !writes_contents(false) && writes_contents(true);
        let conversation = conversation::of_a_call(Self::PROBE);
        let writes_calls = |form: &Form| {
            let rendered = self.render_in(*form, &conversation, time);
            rendered.is_ok_and(|text| text.contains(Self::PROBE))
        };
        let mut forms = Form::all(parts);
        let may_write_calls = self.source.contains("tool_calls");
        if let Some(at) = forms.iter().position(|form| may_write_calls && writes_calls(form)) {
            forms[..=at].rotate_right(1);
        }
        forms
    }

    /// Returns the text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the token that starts a text; empty if there is none.
    pub fn bos_token(&self) -> &str {
        self.special_tokens.get("bos_token").unwrap_or_default()
    }

    /// Returns the token that ends a text; empty if there is none.
    pub fn eos_token(&self) -> &str {
        self.special_tokens.get("eos_token").unwrap_or_default()
    }

    /// Renders the prompt of a conversation, up to the start of the assistant's message. Special tokens are those of
    /// the template: what looks like one in a message, in a definition, a call or a result of a tool is plain text.
    ///
    /// The messages are rendered once more with placeholders, single characters that appear nowhere else, for the
    /// characters with which special tokens begin and end; so the bytes that come from messages are known, and a
    /// special token with one of them is none of the template's. If the template's output depends on these
    /// characters (it searches a content for `</think>`, say), only those that begin a whole special token in a
    /// message are replaced; the template then does not see that token.
    ///
    /// # Errors
    /// [`TemplateError::TooLarge`]; [`TemplateError::Render`] with the template's own message.
    pub fn render_prompt(
        &self,
        conversation: &Conversation,
        time: OffsetDateTime,
        added: &AddedTokens,
    ) -> Result<PromptText, TemplateError> {
        let (text, form) = self.render_forms(conversation, time)?;
        let edges = added.edges();
        let mut texts = Vec::new();
        let mut keep = |part: &str| {
            // Only these matter for the choice of placeholders.
            if part.contains(edges) || part.contains(Marks::is_private) {
                texts.push(part.to_owned());
            }
        };
        conversation.visit(&mut keep);
        if !texts.iter().any(|part| part.contains(edges)) {
            return Ok(PromptText::with_special_tokens(text));
        }
        let all = || texts.iter().map(String::as_str).chain([text.as_str()]);
        let Some(marks) = Marks::new(edges, all) else {
            let reason = "the messages have every private-use character; remove some";
            return Err(TemplateError::Render(reason.to_owned()));
        };
        let render = |mark: &dyn Fn(&str) -> String| {
            self.render_to_end(form, &conversation.map(mark), time).map(|marked| marks.restore(&marked))
        };
        if let Ok((restored, literal)) = render(&|part| marks.mark(part, |_| true))
            && restored == text
        {
            return Ok(PromptText::with_literal(text, literal));
        }
        let (restored, literal) = render(&|part| {
            let starts = added.special_starts(part);
            marks.mark(part, |at| starts.binary_search(&at).is_ok())
        })?;
        Ok(PromptText::with_literal(restored, literal))
    }

    /// Renders the text of a conversation, up to the end that its rendering asks for. As transformers does, a message without a text is given
    /// without a content, and arguments of calls are objects. A template that fails on this or that would not write the calls is given
    /// a content of none, an empty content, or the arguments as JSON texts.
    ///
    /// # Errors
    /// [`TemplateError::TooLarge`]; [`TemplateError::Render`] with the template's own message.
    pub fn render(&self, conversation: &Conversation, time: OffsetDateTime) -> Result<String, TemplateError> {
        self.render_forms(conversation, time).map(|(text, _)| text)
    }

    /// Renders the text of a conversation; returns it with the form of the messages that the template has rendered.
    fn render_forms(
        &self,
        conversation: &Conversation,
        time: OffsetDateTime,
    ) -> Result<(String, Form), TemplateError> {
        let mut refused = TemplateError::Render(String::new());
        for (at, form) in self.forms.iter().enumerate() {
            if self.forms[..at].iter().any(|earlier| form.is_same(*earlier, &conversation.messages)) {
                continue;
            }
            match self.render_to_end(*form, conversation, time) {
                Err(error @ TemplateError::Render(_)) => refused = error,
                rendered => return rendered.map(|text| (text, *form)),
            }
        }
        Err(refused)
    }

    /// Renders the text up to its end. One within the last message is found by a character behind the message's text that no other text has;
    /// the space behind that shows whether the template keeps whitespace there.
    fn render_to_end(
        &self,
        form: Form,
        conversation: &Conversation,
        time: OffsetDateTime,
    ) -> Result<String, TemplateError> {
        if conversation.rendering.end != PromptEnd::LastMessage {
            return self.render_in(form, conversation, time);
        }
        let mut used = BTreeSet::new();
        conversation.visit(&mut |text| used.extend(text.chars().filter(|c| END_MARKS.contains(c))));
        self.source.chars().filter(|c| END_MARKS.contains(c)).for_each(|c| _ = used.insert(c));
        let mut marked = conversation.clone();
        let (Some(mark), Some(last)) =
            (END_MARKS.clone().find(|c| !used.contains(c)), marked.messages.last_mut())
        else {
            let reason = "the messages have every private-use character; remove some";
            return Err(TemplateError::Render(reason.to_owned()));
        };
        last.content = Some(format!("{}{mark} ", last.text()));
        let mut text = self.render_in(form, &marked, time)?;
        let Some(end) = text.rfind(mark) else {
            let reason = "it does not write the text of the last message, so that it cannot be continued";
            return Err(TemplateError::Render(reason.to_owned()));
        };
        let keeps_whitespace = text[end + mark.len_utf8()..].starts_with(' ');
        text.truncate(end);
        if !keeps_whitespace {
            text.truncate(text.trim_end().len());
        }
        Ok(text)
    }

    fn render_in(
        &self,
        form: Form,
        conversation: &Conversation,
        time: OffsetDateTime,
    ) -> Result<String, TemplateError> {
        let Conversation { messages, tools, rendering } = conversation;
        let (count, bytes) = (messages.len() + tools.len(), conversation.bytes());
        if bytes.saturating_mul(count) > Self::MESSAGES_TIMES_BYTES {
            return Err(TemplateError::TooLarge { count, bytes, most: Self::MESSAGES_TIMES_BYTES });
        }
        // Templates tell none from an empty list.
        let tools = if tools.is_empty() { Value::from(()) } else { tools.iter().cloned().collect() };
        let given = [
            ("messages", messages.iter().map(|message| message.to_value(form)).collect()),
            ("tools", tools),
            ("documents", Value::from(())),
            ("add_generation_prompt", (rendering.end == PromptEnd::NextMessage).into()),
            (TIME, time.unix_timestamp().into()),
        ];
        let tokens = self.special_tokens.iter().map(|(name, token)| (name, token.into()));
        // Arguments have other names than these.
        let arguments = rendering.arguments.iter().map(|(name, value)| (name, value.clone()));
        let context = Value::from_pairs(given.into_iter().chain(tokens).chain(arguments));
        let most = Self::OUTPUT_BYTES.saturating_add(bytes.saturating_mul(Self::OUTPUT_FACTOR));
        let mut output = BoundedOutput { bytes: Vec::new(), most, exceeded: false };
        let rendered = self
            .environment
            .get_template(Self::NAME)
            .and_then(|template| template.render_captured_to(context, &mut output).map(drop));
        match rendered {
            _ if output.exceeded => Err(TemplateError::Render(format!("its output exceeds {most} bytes"))),
            Err(error) => Err(TemplateError::Render(cause(&error))),
            Ok(()) => {
                String::from_utf8(output.bytes).map_err(|error| TemplateError::Render(error.to_string()))
            }
        }
    }
}

/// Output of a rendering, bounded so that a template that repeats its output is stopped before its fuel is used up.
struct BoundedOutput {
    bytes: Vec<u8>,
    most: usize,
    exceeded: bool,
}

impl std::io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.most {
            self.exceeded = true;
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns the innermost message of an error, which is the template's own.
fn cause(error: &Error) -> String {
    match error.detail() {
        Some(detail) if error.kind() == ErrorKind::InvalidOperation => detail.to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{Rendering, TemplateArguments};

    fn message(role: &str, content: &str) -> Message {
        Message::new(role, content.to_owned())
    }

    #[test]
    fn renders_as_transformers_does() {
        let source = "{{ bos_token }}\n{%- for message in messages %}\n  {%- if loop.first and message.role != \
                      'user' %}{{ raise_exception('start with user, not ' + message['role']) }}{% endif %}\n\
                      <|{{ message['role'] }}|>{{ message['content'].strip() | tojson }}{{ eos_token }}\n\
                      {%- endfor %}\n{% if add_generation_prompt %}\n<|assistant|>\n{%- endif %}";
        let template = ChatTemplate::new(source, "<s>", "</s>").unwrap();
        let prompt =
            template.render(&[message("user", "  <b> é\n")][..].into(), OffsetDateTime::UNIX_EPOCH).unwrap();
        assert_eq!(prompt, "<s><|user|>\"<b> é\"</s><|assistant|>");
        let refused =
            template.render(&[message("tool", "x")][..].into(), OffsetDateTime::UNIX_EPOCH).unwrap_err();
        assert_eq!(refused.to_string(), "the chat template refused the messages: start with user, not tool");
    }

    #[test]
    fn an_endless_template_is_stopped_and_an_invalid_one_rejected() {
        let endless = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}";
        let template = ChatTemplate::new(endless, "", "").unwrap();
        assert!(matches!(
            template.render(&Conversation::default(), OffsetDateTime::UNIX_EPOCH),
            Err(TemplateError::Render(_))
        ));
        assert!(matches!(ChatTemplate::new("{% if %}", "", ""), Err(TemplateError::Syntax(_))));
        let long = "{% for i in range(100) %}{{ 'x' * 100000 }}{% endfor %}";
        let refused = ChatTemplate::new(long, "", "")
            .unwrap()
            .render(&Conversation::default(), OffsetDateTime::UNIX_EPOCH)
            .unwrap_err();
        assert!(refused.to_string().contains("its output exceeds 1048576 bytes"), "{refused}");
    }

    /// Templates of this kind exist; what they copy grows with the square of the conversation.
    #[test]
    fn a_template_that_collects_messages_copies_a_bounded_number_of_bytes() {
        let source = "{% set ns = namespace(system='') %}{% for message in messages %}{% set ns.system = ns.system + \
                      '\n' + message['content'] %}{% endfor %}{{ ns.system }}";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let conversation = |count: usize, bytes: usize| {
            template.render(
                &vec![message("system", &"x".repeat(bytes / count - "system".len())); count].into(),
                time::OffsetDateTime::UNIX_EPOCH,
            )
        };
        assert!(conversation(1 << 10, 1 << 18).is_ok());
        let refused = conversation(1 << 14, 1 << 18).unwrap_err().to_string();
        assert!(
            refused.starts_with("there are 16384 messages of 262144 bytes in all; the product"),
            "{refused}"
        );
    }

    fn rendered(source: &str, messages: &[Message], tools: &[Value], seconds: i64) -> Result<String, String> {
        let time = OffsetDateTime::from_unix_timestamp(seconds).unwrap();
        let template = ChatTemplate::new(source, "<s>", "</s>").map_err(|error| error.to_string())?;
        let conversation = Conversation { tools: tools.to_vec(), ..messages.into() };
        template.render(&conversation, time).map_err(|error| error.to_string())
    }

    fn ended(source: &str, messages: &[Message], rendering: Rendering) -> Result<String, String> {
        let template = ChatTemplate::new(source, "<s>", "</s>").map_err(|error| error.to_string())?;
        let conversation = Conversation { rendering, ..messages.into() };
        template.render(&conversation, OffsetDateTime::UNIX_EPOCH).map_err(|error| error.to_string())
    }

    #[test]
    fn arguments_are_variables_of_the_template() {
        let source = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ effort }}\
                      {{ messages | length }}";
        let rendering = |text: &str| Rendering {
            arguments: TemplateArguments::of_json(text).unwrap(),
            ..Rendering::default()
        };
        let messages = [message("user", "a")];
        assert_eq!(ended(source, &messages, Rendering::default()).unwrap(), "1");
        assert_eq!(ended(source, &messages, rendering(r#"{"enable_thinking": true}"#)).unwrap(), "1");
        let off = rendering(r#"{"enable_thinking": false, "effort": "low"}"#);
        assert_eq!(ended(source, &messages, off).unwrap(), "<think></think>low1");
        // One with the name of a variable of the template changes nothing else.
        assert!(TemplateArguments::of_json(r#"{"messages": []}"#).is_err());
    }

    #[test]
    fn a_prompt_ends_behind_the_start_of_a_message_the_messages_or_the_text_of_the_last_one() {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>\
                      {% endif %}";
        let stripping = source.replace("m.content", "m.content | trim");
        let messages = [message("user", "a"), message("assistant", "Sure: \n")];
        let end = |end| Rendering { end, ..Rendering::default() };
        let all = "<user>a</><assistant>Sure: \n</>";
        assert_eq!(
            ended(source, &messages, end(PromptEnd::NextMessage)).unwrap(),
            format!("{all}<assistant>")
        );
        assert_eq!(ended(source, &messages, end(PromptEnd::Messages)).unwrap(), all);
        let continued =
            |source: &str, messages: &[Message]| ended(source, messages, end(PromptEnd::LastMessage));
        assert_eq!(continued(source, &messages).unwrap(), "<user>a</><assistant>Sure: \n");
        assert_eq!(continued(&stripping, &messages).unwrap(), "<user>a</><assistant>Sure:");
        // The end is that of the last message, also where its text occurs before.
        let twice = [message("user", "Sure"), message("assistant", "Sure")];
        assert_eq!(continued(source, &twice).unwrap(), "<user>Sure</><assistant>Sure");
        let private = [message("user", "\u{E000}\u{E001}"), message("assistant", "b\u{E002}")];
        assert_eq!(continued(source, &private).unwrap(), "<user>\u{E000}\u{E001}</><assistant>b\u{E002}");
        let silent = continued("{{ messages[0].content }}", &messages).unwrap_err();
        assert!(silent.contains("does not write the text of the last message"), "{silent}");
    }

    #[test]
    fn templates_write_the_date_of_the_stream() {
        let date =
            |format: &str| rendered(&format!("{{{{ strftime_now('{format}') }}}}"), &[], &[], 1_764_412_800);
        assert_eq!(date("%Y-%m-%d").unwrap(), "2025-11-29");
        assert_eq!(date("%d %b %Y, %B %A %H:%M").unwrap(), "29 Nov 2025, November Saturday 10:40");
        assert_eq!(date("%d%").unwrap(), "29%");
    }

    #[test]
    fn absent_tools_are_none() {
        let tools = "{% if tools is iterable and tools | length > 0 %}tools{% else %}none{% endif %}";
        assert_eq!(rendered(tools, &[], &[], 0).unwrap(), "none");
        assert_eq!(rendered(tools, &[], &[Value::from_pairs([("a", 1)])], 0).unwrap(), "tools");
    }

    #[test]
    fn marks_for_training_are_left_out_and_odd_tags_are_no_panics() {
        let source = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration %}{{ '{% x' }}{% endfor %}";
        assert_eq!(rendered(source, &[message("assistant", "hi")], &[], 0).unwrap(), "hi{% x");
        for source in ["{%}", "{# {% #}{% generation %}a{% endgeneration %}", "{#", "{{ '{%}' }}"] {
            let shown = rendered(source, &[], &[], 0);
            assert!(
                source != "{# {% #}{% generation %}a{% endgeneration %}" || shown == Ok("a".to_owned()),
                "{shown:?}"
            );
        }
    }

    #[test]
    fn a_template_is_given_messages_in_a_form_that_it_reads() {
        let call = conversation::MessageCall {
            id: "c".into(),
            name: "f".into(),
            arguments: Value::from_pairs([("a", "é")]),
        };
        let calls = [Message::of_calls(vec![call])];
        let calls_as = |source: &str| {
            rendered(&format!("{{% for m in messages %}}{source}{{% endfor %}}"), &calls, &[], 0)
        };
        let written = "{{ m.tool_calls[0].function.arguments | tojson if m.tool_calls }}";
        // Without a content, as transformers gives it.
        let described =
            "{{ m.content is defined }} {{ m.content is none }} {{ m.content is string }} {{ m.content }}";
        assert_eq!(calls_as(&format!("{described}{written}")).unwrap(), r#"False False False {"a": "é"}"#);
        // One that tells a call by a content of none would not write it otherwise.
        let by_none =
            format!("{{% if m.content is none %}}{written}{{% else %}}<{{{{ m.content }}}}>{{% endif %}}");
        assert_eq!(calls_as(&by_none).unwrap(), r#"{"a": "é"}"#);
        let named = "{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% endif %}";
        assert_eq!(calls_as(named).unwrap(), "f");
        assert_eq!(calls_as("{{ '<' + m.content + '>' }}").unwrap(), "<>");
        let texts =
            "{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments if m.tool_calls }}";
        assert_eq!(calls_as(texts).unwrap(), r#"f{"a": "é"}"#);
        let parts = "{% for m in messages %}{% for part in m.content if part is mapping %}{{ part.text }}{% endfor %}{% endfor %}";
        assert_eq!(rendered(parts, &[message("user", "a"), message("user", "")], &[], 0).unwrap(), "a");
        let refused = calls_as("{{ m.content.nothing() }}").unwrap_err();
        assert!(refused.contains("has no method named nothing"), "{refused}");
    }

    #[test]
    fn special_tokens_are_those_of_the_model() {
        let tokens =
            [("bos_token", "<s>"), ("pad_token", "<pad>"), ("other_token", "x")].into_iter().collect();
        let source =
            "{{ bos_token }}{{ pad_token }}{{ eos_token }}{{ eos_token is defined }}{{ other_token }}";
        let template = ChatTemplate::with_special_tokens(source, tokens).unwrap();
        assert_eq!((template.bos_token(), template.eos_token()), ("<s>", ""));
        assert_eq!(
            template.render(&Conversation::default(), OffsetDateTime::UNIX_EPOCH).unwrap(),
            "<s><pad>False"
        );
    }
}
