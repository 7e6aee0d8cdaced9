//! Source of a chat template as the engine takes it. What Jinja reads otherwise than the engine is rewritten: line breaks, marks for
//! training, `%` on texts, loops over none, methods of dictionaries that are not called, and signs of numbers.

/// Function that takes the place of the operator `%`.
pub(super) const PERCENT: &str = "_inflight_percent";
/// Function that takes the place of the operator `+` in templates that mark texts as escaped.
pub(super) const ADD: &str = "_inflight_add";
/// Function around what a loop iterates over.
pub(super) const ITERABLE: &str = "_inflight_iterable";
/// Prefix of the method that takes the place of a dictionary's method that is not called.
pub(super) const UNCALLED: &str = "_inflight_uncalled_";
/// Methods of dictionaries: in Python, `value.items` is one, also where the dictionary has a key `items`.
const METHODS: [&str; 11] =
    ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

/// Rewrites a template; what is no valid template is left as it is, for the engine to refuse.
pub(super) fn rewrite(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let marks = ["safe", "escape", "| e", "|e"].iter().any(|filter| source.contains(filter));
    let mut out = String::with_capacity(source.len() + source.len() / 8);
    let mut rest = source.as_str();
    while let Some(at) = rest.find("{{").into_iter().chain(rest.find("{%")).chain(rest.find("{#")).min() {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = match rest.as_bytes()[1] {
            b'#' => rest.find("#}").map(|end| end + 2),
            _ if is_tag(rest, "raw") => end_of_raw(rest),
            kind => rewrite_tag(rest, kind == b'%', marks, &mut out),
        };
        let Some(end) = end else { break };
        // What has been rewritten is in the output.
        if rest.as_bytes()[1] == b'#' || is_tag(rest, "raw") {
            out.push_str(&rest[..end]);
        }
        rest = &rest[end..];
    }
    out + rest
}

/// Whether a text begins with a tag of a name.
fn is_tag(text: &str, name: &str) -> bool {
    let Some(inner) = text.strip_prefix("{%") else { return false };
    let inner = inner.trim_start_matches(['-', '+']).trim_start();
    inner.strip_prefix(name).is_some_and(|rest| !rest.starts_with(is_word))
}

fn end_of_raw(text: &str) -> Option<usize> {
    let mut from = 2;
    loop {
        let at = from + text[from..].find("{%")?;
        if is_tag(&text[at..], "endraw") {
            return Some(at + text[at..].find("%}")? + 2);
        }
        from = at + 2;
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Rewrites the tag with which a text begins; returns its length, or `None` and no output if it does not end.
fn rewrite_tag(text: &str, is_block: bool, marks: bool, out: &mut String) -> Option<usize> {
    let start = out.len();
    let end = Tag::new(text, is_block, marks, out).rewrite();
    if end.is_none() {
        out.truncate(start);
    }
    end
}

/// What the last token was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    /// An operator or an opening bracket: an operand follows.
    Operator,
    /// The end of an operand.
    Operand,
    /// `.` or `|`, which a name follows.
    Postfix,
    /// `is`, behind which a test follows.
    Is,
    /// The name of a test, which an operand may follow.
    Test,
}

/// Level of brackets.
#[derive(Debug, Default)]
struct Level {
    /// Where the operands of `+` and `-` begin in the output: behind the last operator that binds less.
    sum: usize,
    /// Where the operands of `*`, `/`, `//` and `%` begin.
    term: usize,
    /// Whether a call of [`ADD`] is open.
    add: bool,
    /// Whether a call of [`PERCENT`] is open.
    percent: bool,
}

/// Part of a template that is rewritten: an expression or a block.
struct Tag<'a> {
    text: &'a str,
    at: usize,
    is_block: bool,
    /// Whether texts may be marked as escaped.
    marks: bool,
    out: &'a mut String,
    levels: Vec<Level>,
    last: Last,
    /// End of the last operand in the output.
    operand_end: usize,
    /// Name of the block.
    block: &'a str,
    /// Whether what a loop iterates over is being read.
    iterates: bool,
    /// Whether the target of a `set` is being read.
    assigns: bool,
}

impl<'a> Tag<'a> {
    fn new(text: &'a str, is_block: bool, marks: bool, out: &'a mut String) -> Self {
        Self {
            text,
            at: 0,
            is_block,
            marks,
            operand_end: out.len(),
            out,
            levels: vec![Level::default()],
            last: Last::Operator,
            block: "",
            iterates: false,
            assigns: false,
        }
    }

    /// Rewrites the tag; returns its length, or `None` if it has no end.
    fn rewrite(mut self) -> Option<usize> {
        self.copy(2);
        let sign = self.rest().starts_with(['-', '+']);
        self.copy(usize::from(sign));
        self.start_sum();
        loop {
            let rest = self.rest();
            let next = rest.chars().next()?;
            if self.levels.len() == 1
                && let Some(length) = self.end_of_tag(rest)
            {
                self.end_sum();
                self.end_iterable();
                self.copy(length);
                return Some(self.at);
            }
            match next {
                c if c.is_whitespace() => self.copy(c.len_utf8()),
                '\'' | '"' => {
                    let length = string_length(rest)?;
                    // Adjacent strings are one.
                    if !self.out.trim_end().ends_with(['\'', '"']) {
                        self.separate();
                    }
                    self.copy(length);
                    self.end_operand();
                }
                c if c.is_ascii_digit() => self.operand(number_length(rest)),
                c if is_word(c) => self.word(rest.find(|c| !is_word(c)).unwrap_or(rest.len())),
                '(' | '[' | '{' => {
                    self.separate();
                    self.copy(1);
                    self.levels.push(Level::default());
                    self.start_sum();
                }
                ')' | ']' | '}' => {
                    self.end_sum();
                    if self.levels.len() > 1 {
                        self.levels.pop();
                    }
                    self.copy(1);
                    self.end_operand();
                }
                _ => self.operator(),
            }
        }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn copy(&mut self, length: usize) {
        self.out.push_str(&self.text[self.at..self.at + length]);
        self.at += length;
    }

    fn level(&mut self) -> &mut Level {
        self.levels.last_mut().expect("the outermost level is never removed")
    }

    /// Returns the length of the end of the tag, if it is next.
    fn end_of_tag(&self, rest: &str) -> Option<usize> {
        let end = if self.is_block { "%}" } else { "}}" };
        let signed = rest.strip_prefix(['-', '+']).unwrap_or(rest);
        signed.starts_with(end).then(|| rest.len() - signed.len() + end.len())
    }

    /// Ends a sum, as an operator does that binds less than `+`; the next one begins here.
    fn start_sum(&mut self) {
        self.end_sum();
        self.level().sum = self.out.len();
        self.start_term();
    }

    /// Ends a term, as an operator does that binds less than `%`; the next one begins here.
    fn start_term(&mut self) {
        self.end_term();
        self.level().term = self.out.len();
        self.last = Last::Operator;
    }

    /// Closes open calls of [`PERCENT`] and [`ADD`].
    fn end_sum(&mut self) {
        self.end_term();
        if std::mem::take(&mut self.level().add) {
            self.close();
        }
    }

    /// Closes an open call of [`PERCENT`].
    fn end_term(&mut self) {
        if std::mem::take(&mut self.level().percent) {
            self.close();
        }
    }

    fn end_iterable(&mut self) {
        if std::mem::take(&mut self.iterates) {
            self.close();
        }
    }

    /// Closes a call behind the last operand.
    fn close(&mut self) {
        self.out.insert(self.operand_end, ')');
        self.operand_end += 1;
    }

    fn end_operand(&mut self) {
        self.last = Last::Operand;
        self.operand_end = self.out.len();
    }

    /// Begins a term if an operand follows another, such as words of blocks. Behind an operand, brackets are of a call or an index.
    fn separate(&mut self) {
        if self.last == Last::Operand && !self.rest().starts_with(['(', '[']) {
            self.start_sum();
        }
    }

    fn operand(&mut self, length: usize) {
        self.separate();
        self.copy(length);
        self.end_operand();
    }

    /// Rewrites a word: a name, a keyword or the name of the block.
    fn word(&mut self, length: usize) {
        let word = &self.rest()[..length];
        if self.is_block && self.block.is_empty() {
            self.begin_block(word);
            return;
        }
        let is_outer = self.levels.len() == 1;
        match (self.last, word) {
            (Last::Postfix, _) => self.attribute(word),
            (Last::Is, "not") => self.copy(length),
            (Last::Is, _) => {
                self.copy(length);
                self.end_operand();
                self.last = Last::Test;
            }
            (_, "is") => {
                self.copy(length);
                self.last = Last::Is;
            }
            (_, "and" | "or" | "not" | "in" | "if" | "else") => {
                self.end_sum();
                if word == "if" && is_outer {
                    self.end_iterable();
                }
                self.copy(length);
                self.start_sum();
                if word == "in" && self.block == "for" && is_outer && !self.iterates {
                    self.block = "for in";
                    self.iterates = true;
                    self.out.push_str(&format!(" {ITERABLE}("));
                    self.start_sum();
                }
            }
            (Last::Operand, "recursive") if is_outer => {
                self.end_sum();
                self.end_iterable();
                self.operand(length);
            }
            _ => self.operand(length),
        }
    }

    fn begin_block(&mut self, word: &'a str) {
        self.block = word;
        self.assigns = word == "set";
        match word {
            "generation" => self.out.push_str("with"),
            "endgeneration" => self.out.push_str("endwith"),
            _ => self.out.push_str(word),
        }
        self.at += word.len();
        self.start_sum();
    }

    /// Rewrites the name behind a `.` or a `|`.
    fn attribute(&mut self, name: &str) {
        let is_called = self.rest()[name.len()..].trim_start().starts_with('(');
        if self.out.ends_with('.') && METHODS.contains(&name) && !is_called && !self.assigns {
            self.out.push_str(&format!("{UNCALLED}{name}()"));
            self.at += name.len();
        } else {
            self.copy(name.len());
        }
        self.end_operand();
    }

    /// Rewrites an operator.
    fn operator(&mut self) {
        let rest = self.rest();
        let is_unary = self.last == Last::Operator;
        let is_behind_operand = matches!(self.last, Last::Operand | Last::Test);
        match rest.as_bytes()[0] {
            b'.' | b'|' => {
                self.copy(1);
                self.last = Last::Postfix;
            }
            b'+' if is_unary => self.at += 1,
            b'-' if is_unary => self.copy(1),
            b'*' if rest.starts_with("**") => {
                self.copy(2);
                self.last = Last::Operator;
            }
            b'*' | b'/' => {
                self.end_term();
                self.copy(if rest.starts_with("//") { 2 } else { 1 });
                self.last = Last::Operator;
            }
            b'%' if is_behind_operand => {
                self.end_term();
                let start = self.level().term;
                self.call(PERCENT, start);
                self.level().percent = true;
                self.last = Last::Operator;
            }
            b'+' if self.marks && is_behind_operand => {
                self.end_sum();
                let start = self.level().sum;
                self.call(ADD, start);
                self.level().add = true;
                self.start_term();
            }
            b'+' | b'-' => {
                self.end_sum();
                self.copy(1);
                self.start_term();
            }
            b'~' => {
                self.end_term();
                self.copy(1);
                self.start_term();
            }
            b'=' if !rest.starts_with("==") => {
                self.assigns = false;
                self.end_sum();
                self.copy(1);
                self.start_sum();
            }
            b'=' | b'!' | b'<' | b'>' => {
                self.end_sum();
                self.copy(if rest[1..].starts_with('=') { 2 } else { 1 });
                self.start_sum();
            }
            _ => {
                self.end_sum();
                self.copy(rest.chars().next().map_or(0, char::len_utf8));
                self.start_sum();
            }
        }
    }

    /// Puts the begin of a call in place of an operator, around its left operand.
    fn call(&mut self, function: &str, start: usize) {
        let start = start + (self.out[start..].len() - self.out[start..].trim_start().len());
        self.out.insert(self.operand_end, ',');
        self.out.insert_str(start, &format!("{function}("));
        self.operand_end += function.len() + "(,".len();
        self.at += 1;
    }
}

/// Returns the length of the string literal with which a text begins.
fn string_length(text: &str) -> Option<usize> {
    let quote = text.as_bytes()[0];
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            _ if byte == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Returns the length of the number with which a text begins.
fn number_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let is_sign =
            matches!(byte, b'+' | b'-') && matches!(bytes[at - 1], b'e' | b'E') && !text.starts_with("0x");
        let is_point = *byte == b'.' && bytes.get(at + 1).is_some_and(u8::is_ascii_digit);
        if !(byte.is_ascii_alphanumeric() || *byte == b'_' || is_sign || is_point) {
            break;
        }
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_is_rewritten_and_one_without_tags_is_left_as_it_is(
            tokens in prop::collection::vec(prop::sample::select(vec![
                "{{", "}}", "{%", "%}", "{#", "#}", "-", "+", "%", "*", "/", "**", "~", "|", ".", ",", ":", "=", "==", "<", "(", ")", "[", "]",
                "{", "}", "'é'", "\"", "'", "é", "a", "1.5e-3", "for", "in", "if", "else", "is", "not", "and", "set", "safe", "items",
                "recursive", "raw", "endraw", "generation", "\r\n", "\\",
            ]), 0..40),
            spaces in any::<bool>(),
        ) {
            let text = tokens.join(if spaces { " " } else { "" });
            let rewritten = rewrite(&text);
            if !["{{", "{%", "{#", "\r"].iter().any(|tag| text.contains(tag)) {
                prop_assert_eq!(rewritten, text);
            }
        }
    }

    #[test]
    fn what_jinja_reads_otherwise_is_rewritten() {
        for (source, expected) in [
            ("a\r\nb\rc", "a\nb\nc"),
            ("{% generation %}a{%- endgeneration -%}", "{% with %}a{%- endwith -%}"),
            (
                "{# {% generation %} #}{% raw %}{{ a % b }}{%endraw-%}",
                "{# {% generation %} #}{% raw %}{{ a % b }}{%endraw-%}",
            ),
            ("{{ a % b }}", "{{ _inflight_percent(a, b) }}"),
            (
                "{{ a.b[0] % f(1 % 2) | upper ~ c }}",
                "{{ _inflight_percent(a.b[0], f(_inflight_percent(1, 2)) | upper) ~ c }}",
            ),
            (
                "{{ x + a * b % -c % d ** 2 }}",
                "{{ x + _inflight_percent(_inflight_percent(a * b, -c), d ** 2) }}",
            ),
            (
                "{{ a % b is odd and 'a' 'b' % c }}",
                "{{ _inflight_percent(a, b is odd) and _inflight_percent('a' 'b', c) }}",
            ),
            ("{{ a is divisibleby 3 % b }}", "{{ _inflight_percent(a is divisibleby 3, b) }}"),
            ("{{- {'a': b % c}['}}'] -}}", "{{- {'a': _inflight_percent(b, c)}['}}'] -}}"),
            ("{%- if a % 2 == 0 -%}", "{%- if _inflight_percent(a, 2) == 0 -%}"),
            ("{% if a == +1 %}{{ a+ +b }}", "{% if a == 1 %}{{ a+ b }}"),
            ("{% for a in b if c % 2 %}", "{% for a in  _inflight_iterable(b) if _inflight_percent(c, 2) %}"),
            (
                "{% for a, b in c.items() recursive %}",
                "{% for a, b in  _inflight_iterable(c.items()) recursive %}",
            ),
            ("{%for a in(b)%}", "{%for a in _inflight_iterable((b))%}"),
            (
                "{{ a.items.b ~ a.get('x').keys }}",
                "{{ a._inflight_uncalled_items().b ~ a.get('x')._inflight_uncalled_keys() }}",
            ),
            ("{% set ns.items = a.values %}", "{% set ns.items = a._inflight_uncalled_values() %}"),
            ("{{ a is not in [1] in b }}", "{{ a is not in [1] in b }}"),
            ("{{ a + b % c ~ d + e - f + g }}", "{{ a + _inflight_percent(b, c) ~ d + e - f + g }}"),
            (
                "{{ a | safe + b % c ~ d + -e - f + g if h + i == j + [k + l] }}",
                "{{ _inflight_add(_inflight_add(_inflight_add(a | safe, _inflight_percent(b, c) ~ d), -e) - f, g) if _inflight_add(h, i) == _inflight_add(j, [_inflight_add(k, l)]) }}",
            ),
            ("{{ 1.5e-3 % 2 }}", "{{ _inflight_percent(1.5e-3, 2) }}"),
        ] {
            let spaced = |text: &str| {
                text.split(' ')
                    .filter(|part| !part.is_empty())
                    .collect::<Vec<_>>()
                    .join(" ")
                    .replace("( ", "(")
            };
            assert_eq!(spaced(&rewrite(source)), spaced(expected), "{source}");
        }
        for same in [
            "{{ 'a }}",
            "{% for",
            "{{ a % ",
            "{#",
            "{%",
            "{{ % }}",
            "{% if %}x",
            "a {{ b }} {{ c",
            "{{ } }}",
            "}}",
        ] {
            assert_eq!(rewrite(same), same);
        }
    }
}
