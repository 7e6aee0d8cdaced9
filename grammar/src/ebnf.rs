//! Grammars in EBNF, as llama.cpp (GBNF), xgrammar and SGLang write them: `root ::= "yes" | "no"`. Those that are regular become
//! one regular expression.
//!
//! The grammar compiler divides text into terminals, each as long as possible, so rules over characters would match other texts
//! in it than in EBNF. A regular expression matches the same texts. Rules may refer to themselves and to each other at the end
//! of an alternative only, which Arden's rule turns into repetition; any other recursion is refused.

mod parser;

use std::collections::BTreeMap;

use crate::nesting::NESTING_MAX;
use parser::Node;

/// Reason for which a grammar in EBNF cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EbnfError {
    /// The text is no grammar.
    #[error("line {line} of the EBNF grammar {reason}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// No rule has the name of the first one.
    #[error("the EBNF grammar has no rule `root`; it begins with `root ::= ...`")]
    NoRoot,
    /// A rule is named but not defined.
    #[error("the EBNF grammar names the rule `{rule}`, which it does not define")]
    Undefined {
        /// Name of the rule.
        rule: String,
    },
    /// Two rules have one name.
    #[error("the EBNF grammar defines the rule `{rule}` twice")]
    Twice {
        /// Name of the rule.
        rule: String,
    },
    /// The grammar is not regular.
    #[error(
        "the rule `{rule}` of the EBNF grammar contains itself before the end of an alternative; only regular grammars can be \
         converted exactly: send a JSON schema (response_format), or a grammar in Lark (guided_grammar)"
    )]
    Nested {
        /// Name of the rule.
        rule: String,
    },
    /// Too many rules refer to each other in a circle.
    #[error("the EBNF grammar has {rules} rules that lead back to themselves; at most {most} are allowed")]
    Circle {
        /// Number of rules.
        rules: usize,
        /// Maximum number of rules.
        most: usize,
    },
    /// No text matches.
    #[error("the EBNF grammar matches no text")]
    Nothing,
    /// The regular expression is too long.
    #[error(
        "the EBNF grammar is too large: as a regular expression it has more than {most} bytes; repeat rules less often"
    )]
    TooLarge {
        /// Maximum number of bytes.
        most: usize,
    },
}

/// Maximum bytes of the regular expression of any rule.
const BYTES_MAX: usize = inflight_contract::Grammar::BYTES_MAX;
/// Maximum rules that are solved together.
const CIRCLE_MAX: usize = 200;
/// Maximum bytes that are written in all on the way.
const WRITTEN_MAX: usize = 16 * BYTES_MAX;

/// Whether a text is a grammar in EBNF rather than in Lark: outside of strings, classes and comments it has `::=` behind the name of a
/// rule at the begin of a line.
pub fn is_ebnf(text: &str) -> bool {
    let begins_rule = |line: &str| {
        let line = line.trim_start();
        let name = line.find(|c: char| !parser::is_of_name(c)).unwrap_or(line.len());
        name > 0 && line[name..].trim_start().starts_with("::=")
    };
    text.lines().any(begins_rule)
}

/// Returns the regular expression that matches the same texts as a grammar in EBNF.
///
/// # Errors
/// [`EbnfError`]: the text is no grammar, or the grammar is not regular.
pub fn to_regex(text: &str) -> Result<String, EbnfError> {
    let rules = parser::parse(text)?;
    let root = rules.number("root").ok_or(EbnfError::NoRoot)?;
    let mut solver = Solver {
        names: &rules.names,
        nodes: &rules.nodes,
        solved: vec![None; rules.names.len()],
        written: 0,
    };
    for component in components(&rules.nodes, root) {
        solver.solve(&component)?;
    }
    solver.solved.swap_remove(root).ok_or(EbnfError::Nothing)
}

/// Returns the strongly connected components of the rules that `root` leads to, each after all that it leads to: Tarjan's algorithm (SIAM
/// Journal on Computing 1, 1972), without recursion.
fn components(nodes: &[Node], root: usize) -> Vec<Vec<usize>> {
    const NEW: usize = usize::MAX;
    let (mut order, mut low) = (vec![NEW; nodes.len()], vec![NEW; nodes.len()]);
    let (mut open, mut is_open, mut visited) = (Vec::new(), vec![false; nodes.len()], 0);
    let (mut path, mut found) = (Vec::<(usize, Vec<usize>)>::new(), Vec::new());
    let enter = |rule: usize| (rule, nodes[rule].names());
    path.push(enter(root));
    while let Some((rule, left)) = path.last_mut() {
        let rule = *rule;
        if order[rule] == NEW {
            (order[rule], low[rule], is_open[rule]) = (visited, visited, true);
            visited += 1;
            open.push(rule);
        }
        match left.pop() {
            Some(next) if order[next] == NEW => path.push(enter(next)),
            Some(next) if is_open[next] => low[rule] = low[rule].min(order[next]),
            Some(_) => {}
            None => {
                path.pop();
                if let Some((before, _)) = path.last() {
                    low[*before] = low[*before].min(low[rule]);
                }
                if low[rule] == order[rule] {
                    let from = open.iter().rposition(|other| *other == rule).unwrap_or(0);
                    let component = open.split_off(from);
                    component.iter().for_each(|member| is_open[*member] = false);
                    found.push(component);
                }
            }
        }
    }
    found
}

/// Texts that a part of a rule matches: regular expressions before the rules that may come last, and one of the texts without them. `None`
/// matches no text.
#[derive(Debug, Default)]
struct Linear {
    before: BTreeMap<usize, String>,
    rest: Option<String>,
}

/// Rules on the way to regular expressions.
struct Solver<'a> {
    names: &'a [String],
    nodes: &'a [Node],
    /// Regular expressions of rules; `None`: not solved, or matches no text.
    solved: Vec<Option<String>>,
    /// Bytes written so far.
    written: usize,
}

impl Solver<'_> {
    /// Solves rules that lead to each other, by elimination: `x = a x | b` is `a* b`.
    fn solve(&mut self, component: &[usize]) -> Result<(), EbnfError> {
        if component.len() > CIRCLE_MAX {
            return Err(EbnfError::Circle { rules: component.len(), most: CIRCLE_MAX });
        }
        let mut equations = Vec::with_capacity(component.len());
        for rule in component {
            let equation = self.linear(&self.nodes[*rule], component)?;
            equations.push(equation.ok_or_else(|| EbnfError::Nested { rule: self.names[*rule].clone() })?);
        }
        for (at, rule) in component.iter().enumerate() {
            let mut equation = std::mem::take(&mut equations[at]);
            if let Some(repeated) = equation.before.remove(rule) {
                let star = self.repeat(&repeated, 0, None)?;
                equation = self.behind(&star, equation)?;
            }
            for other in (0..equations.len()).filter(|other| *other != at) {
                let Some(before) = equations[other].before.remove(rule) else { continue };
                let replaced = Linear { before: equation.before.clone(), rest: equation.rest.clone() };
                let replaced = self.behind(&before, replaced)?;
                let rest = std::mem::take(&mut equations[other]);
                equations[other] = self.either(rest, replaced)?;
            }
            equations[at] = equation;
        }
        for (rule, equation) in component.iter().zip(equations) {
            self.solved[*rule] = equation.rest;
        }
        Ok(())
    }

    /// Returns a part of a rule of `component`; `None` if it is not linear.
    fn linear(&mut self, node: &Node, component: &[usize]) -> Result<Option<Linear>, EbnfError> {
        Ok(Some(match node {
            Node::Text(text) => Linear { rest: Some(text.clone()), ..Linear::default() },
            Node::Name(rule) if component.contains(rule) => {
                Linear { before: BTreeMap::from([(*rule, String::new())]), rest: None }
            }
            Node::Name(rule) => Linear { rest: self.solved[*rule].clone(), ..Linear::default() },
            Node::All(nodes) => {
                let mut whole = Linear { rest: Some(String::new()), ..Linear::default() };
                for node in nodes {
                    let Some(next) = self.linear(node, component)? else { return Ok(None) };
                    if !whole.before.is_empty() {
                        return Ok(None);
                    }
                    whole = match whole.rest {
                        Some(before) => self.behind(&before, next)?,
                        None => Linear::default(),
                    };
                }
                whole
            }
            Node::Any(nodes) => {
                let mut whole = Linear::default();
                for node in nodes {
                    let Some(next) = self.linear(node, component)? else { return Ok(None) };
                    whole = self.either(whole, next)?;
                }
                whole
            }
            Node::Repeat(node, least, most) => {
                let Some(mut once) = self.linear(node, component)? else { return Ok(None) };
                if once.before.is_empty() {
                    once.rest = match once.rest {
                        Some(text) => Some(self.repeat(&text, *least, *most)?),
                        None => (*least == 0).then(String::new),
                    };
                    return Ok(Some(once));
                }
                match (least, most) {
                    (0, Some(1)) => {
                        let nothing = Linear { rest: Some(String::new()), ..Linear::default() };
                        self.either(once, nothing)?
                    }
                    (1, Some(1)) => once,
                    _ => return Ok(None),
                }
            }
        }))
    }

    /// Returns what matches a text of `before` and then one of `linear`.
    fn behind(&mut self, before: &str, linear: Linear) -> Result<Linear, EbnfError> {
        let mut whole = Linear::default();
        for (rule, text) in linear.before {
            whole.before.insert(rule, self.note(format!("{before}{text}"))?);
        }
        if let Some(text) = linear.rest {
            whole.rest = Some(self.note(format!("{before}{text}"))?);
        }
        Ok(whole)
    }

    /// Returns what matches a text of either.
    fn either(&mut self, mut first: Linear, second: Linear) -> Result<Linear, EbnfError> {
        for (rule, text) in second.before {
            let text = match first.before.remove(&rule) {
                Some(other) => self.note(format!("(?:{other}|{text})"))?,
                None => text,
            };
            first.before.insert(rule, text);
        }
        first.rest = match (first.rest, second.rest) {
            (Some(first), Some(second)) => Some(self.note(format!("(?:{first}|{second})"))?),
            (first, second) => first.or(second),
        };
        Ok(first)
    }

    fn repeat(&mut self, text: &str, least: u32, most: Option<u32>) -> Result<String, EbnfError> {
        let count = match (least, most) {
            (0, None) => "*".to_owned(),
            (1, None) => "+".to_owned(),
            (0, Some(1)) => "?".to_owned(),
            (least, None) => format!("{{{least},}}"),
            (least, Some(most)) => format!("{{{least},{most}}}"),
        };
        self.note(if text.is_empty() { String::new() } else { format!("(?:{text}){count}") })
    }

    /// Counts a text that was written.
    fn note(&mut self, text: String) -> Result<String, EbnfError> {
        self.written += text.len();
        if text.len() > BYTES_MAX || self.written > WRITTEN_MAX {
            return Err(EbnfError::TooLarge { most: BYTES_MAX });
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests;
