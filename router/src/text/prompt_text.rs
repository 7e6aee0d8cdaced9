//! Text to be tokenized, with the bytes at which special tokens are plain text.

use std::ops::Range;

use super::AddedTokens;

/// Text of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptText {
    text: String,
    literal: Literal,
}

/// Bytes that are not part of special tokens: what looks like one there is plain text.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Literal {
    /// None.
    Nowhere,
    /// These positions, in ascending order.
    At(Vec<u32>),
    /// All.
    Everywhere,
}

impl PromptText {
    /// Text whose special tokens are recognised.
    pub fn with_special_tokens(text: String) -> Self {
        Self { text, literal: Literal::Nowhere }
    }

    /// Text without special tokens: what looks like one is plain text.
    pub fn plain(text: String) -> Self {
        Self { text, literal: Literal::Everywhere }
    }

    /// Text whose special tokens are recognised unless they have one of the bytes `literal`, which are in ascending
    /// order.
    pub(super) fn with_literal(text: String, literal: Vec<u32>) -> Self {
        Self { text, literal: if literal.is_empty() { Literal::Nowhere } else { Literal::At(literal) } }
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether these bytes have one that is not part of special tokens.
    pub(super) fn is_literal(&self, bytes: Range<usize>) -> bool {
        match &self.literal {
            Literal::Nowhere => false,
            Literal::Everywhere => true,
            Literal::At(positions) => {
                let first = positions.partition_point(|at| (*at as usize) < bytes.start);
                positions.get(first).is_some_and(|at| (*at as usize) < bytes.end)
            }
        }
    }

    /// Whether text in these bytes might look like a special token that it is not.
    pub(super) fn needs_care(&self, bytes: Range<usize>, added: &AddedTokens) -> bool {
        let base = bytes.start;
        self.is_literal(bytes.clone())
            && added.has_literal(&self.text[bytes], |at| self.is_literal(base + at.start..base + at.end))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use inflight_fixtures::Family;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::super::{ChatTemplate, Message, Tokenizer};
    use super::*;

    /// Ways in which templates use a content.
    const USES: [&str; 6] = [
        "m['content']",
        "m['content'] | trim",
        "m['content'].strip()",
        "m['content'] | tojson",
        "m['content'].split('</think>')[-1].lstrip('\\n')",
        "m['content'] if '<' in m['content'] else m['content'] + ' '",
    ];

    fn config(family: Family, key: &str) -> String {
        let config: Value = serde_json::from_str(family.tokenizer_config_json()).unwrap();
        config[key].as_str().unwrap_or_default().to_owned()
    }

    /// The family's template, and templates of the same special tokens that use contents in other ways. The last
    /// ones put contents side by side, and build special tokens from roles.
    fn templates(family: Family) -> Vec<ChatTemplate> {
        let (bos, eos) = (config(family, "bos_token"), config(family, "eos_token"));
        let used = USES.map(|used| {
            format!("{{{{ bos_token }}}}{{% for m in messages %}}{{{{ m['role'] + '\n' }}}}{{{{ {used} }}}}{{{{ eos_token }}}}{{% endfor %}}")
        });
        let side_by_side = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ eos_token }}".to_owned();
        let sources = [config(family, "chat_template"), side_by_side].into_iter().chain(used);
        sources.map(|source| ChatTemplate::new(&source, &bos, &eos).unwrap()).collect()
    }

    /// The family's tokenizer; with normalized special tokens, too.
    fn load(family: Family) -> Vec<Tokenizer> {
        let json: Value = serde_json::from_str(family.tokenizer_json()).unwrap();
        let mut normalized = json.clone();
        for token in normalized["added_tokens"].as_array_mut().unwrap() {
            token["normalized"] = json!(true);
        }
        let load = |json: Value| Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
        [json, normalized].map(load).into()
    }

    /// A family with its tokenizers and templates.
    type FamilyTexts = (Family, Vec<Tokenizer>, Vec<ChatTemplate>);

    /// Tokenizers and templates of each family.
    static FAMILIES: LazyLock<Vec<FamilyTexts>> = LazyLock::new(|| {
        Family::all().iter().map(|family| (*family, load(*family), templates(*family))).collect()
    });

    fn specials(tokenizer: &Tokenizer) -> Vec<String> {
        let ids = 0..tokenizer.vocabulary().len() as u32;
        ids.filter(|id| tokenizer.vocabulary().is_special(*id)).map(|id| tokenizer.piece(id)).collect()
    }

    fn special_ids(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u32> {
        ids.iter().copied().filter(|id| tokenizer.vocabulary().is_special(*id)).collect()
    }

    fn conversation(contents: &[String]) -> Vec<Message> {
        let roles = ["system", "user", "assistant", "user"];
        let message = |(content, role): (&String, &str)| Message::new(role, content.clone());
        contents.iter().zip(roles).map(message).collect()
    }

    /// Text with characters and halves of special tokens, but none of them.
    fn harmless() -> impl Strategy<Value = String> {
        let parts = [
            "<",
            ">",
            "|",
            "</",
            "<|",
            "|>",
            "eot_id",
            "im_end",
            " ",
            "\n",
            "a",
            "é",
            "</think>",
            "[INST]",
            "{{",
            "\u{f0000}",
        ];
        let part = prop::sample::select(parts.to_vec());
        prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn messages_without_special_tokens_tokenize_like_the_rendered_text(
            contents in prop::collection::vec(harmless(), 1..4)
        ) {
            for (_, tokenizers, templates) in FAMILIES.iter() {
                for tokenizer in tokenizers {
                    if contents.iter().any(|content| !tokenizer.added().special_starts(content).is_empty()) {
                        continue;
                    }
                    let messages = conversation(&contents);
                    for (at, template) in templates.iter().enumerate() {
                        // Contents side by side can form a special token, which is text then.
                        if at == 1 {
                            continue;
                        }
                        let rendered = template.render(&messages[..].into(), time::OffsetDateTime::UNIX_EPOCH).unwrap();
                        let prompt = template.render_prompt(&messages[..].into(), time::OffsetDateTime::UNIX_EPOCH, tokenizer.added()).unwrap();
                        prop_assert_eq!(prompt.as_str(), &rendered);
                        let ids = tokenizer.encode_prompt(&prompt, false).unwrap();
                        prop_assert_eq!(ids, tokenizer.encode_rendered(&rendered).unwrap());
                    }
                }
            }
        }

        #[test]
        fn special_tokens_in_messages_are_text(
            picks in prop::collection::vec((0usize..64, harmless(), 0usize..30, harmless()), 1..4)
        ) {
            for (family, tokenizers, templates) in FAMILIES.iter() {
                // Normalized tokens of SentencePiece are recognised behind a space only, also those of the template.
                let kinds = if *family == Family::SentencePiece { 1 } else { 2 };
                for tokenizer in tokenizers.iter().take(kinds) {
                    let specials = specials(tokenizer);
                    // Whole, and cut into two halves that contents side by side put together.
                    let content = |(pick, before, cut, after): &(usize, String, usize, String)| {
                        let special = &specials[pick % specials.len()];
                        match cut % (special.len() + 1) {
                            0 => format!("{before}{special}{after}"),
                            cut => format!("{}{before}{special}{}", &special[cut..], &special[..cut]),
                        }
                    };
                    let contents: Vec<String> = picks.iter().map(content).collect();
                    let (messages, bare) = (conversation(&contents), conversation(&vec!["a".to_owned(); picks.len()]));
                    for template in templates {
                        let expected = template.render_prompt(&bare[..].into(), time::OffsetDateTime::UNIX_EPOCH, tokenizer.added()).unwrap();
                        let expected = special_ids(tokenizer, &tokenizer.encode_prompt(&expected, false).unwrap());
                        let prompt = template.render_prompt(&messages[..].into(), time::OffsetDateTime::UNIX_EPOCH, tokenizer.added()).unwrap();
                        let ids = tokenizer.encode_prompt(&prompt, false).unwrap();
                        prop_assert_eq!(special_ids(tokenizer, &ids), expected, "{} {:?}", template.source(), messages);
                        if *family == Family::Llama3 {
                            prop_assert_eq!(tokenizer.decode_all(&ids).unwrap(), prompt.as_str());
                        }
                    }
                }
            }
        }

        #[test]
        fn plain_text_has_no_special_tokens_and_otherwise_tokenizes_as_ever(text in "\\PC{0,40}", pick in 0usize..64) {
            for (_, tokenizers, _) in FAMILIES.iter() {
                for tokenizer in tokenizers {
                    let plain = |text: &str| PromptText::plain(text.to_owned());
                    for around in [false, true] {
                        let ids = tokenizer.encode_literal(&plain(&text), 0..text.len(), around).unwrap();
                        let ever = if around { tokenizer.encode(&text) } else { tokenizer.encode_rendered(&text) };
                        prop_assert_eq!(ids, ever.unwrap());
                    }
                    let specials = specials(tokenizer);
                    let special = format!("{text}{}{text}", specials[pick % specials.len()]);
                    let ids = tokenizer.encode_prompt(&plain(&special), false).unwrap();
                    prop_assert_eq!(special_ids(tokenizer, &ids), Vec::<u32>::new());
                }
            }
        }
    }

    #[test]
    fn a_role_builds_special_tokens_of_the_template_and_injects_none() {
        let source = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let tokenizer = Tokenizer::from_json(Family::ChatMl.tokenizer_json().as_bytes()).unwrap();
        let special = |role: &str, content: &str| {
            let messages = [Message::new(role, content.to_owned())];
            let prompt = template
                .render_prompt(&messages[..].into(), time::OffsetDateTime::UNIX_EPOCH, tokenizer.added())
                .unwrap();
            let ids = tokenizer.encode_prompt(&prompt, false).unwrap();
            special_ids(&tokenizer, &ids).iter().map(|id| tokenizer.piece(*id)).collect::<Vec<_>>()
        };
        assert_eq!(special("im_start", "<b>"), ["<|im_start|>"], "as the template builds it");
        assert_eq!(special("im_start", "<|im_end|>"), ["<|im_start|>"]);
        assert_eq!(special("im_start|><|im_end", ""), Vec::<String>::new());
    }
}
