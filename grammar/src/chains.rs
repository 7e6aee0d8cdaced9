//! Bound on chains of names: parsers descend into a referenced definition, rule or terminal as into a bracket, so a chain of names takes
//! as much of the stack as nested brackets do, and [`crate::nesting`] does not see it.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::GrammarError;
use crate::rewrite::References;

pub(crate) mod lark;

/// Maximum levels of nesting along any chain of names.
pub(crate) const LEVELS_MAX: usize = 4_000;

/// Names of a grammar: for each, how many levels its definition nests, and the names that it leads to.
#[derive(Debug, Default)]
struct Names {
    numbers: HashMap<String, usize>,
    levels: Vec<usize>,
    leads_to: Vec<Vec<usize>>,
}

impl Names {
    /// Adds a name without a text of its own.
    fn add(&mut self) -> usize {
        self.levels.push(1);
        self.leads_to.push(Vec::new());
        self.levels.len() - 1
    }

    /// Returns the number of a name, which is added if it is new.
    fn number(&mut self, name: &str) -> usize {
        if let Some(known) = self.numbers.get(name) {
            return *known;
        }
        let number = self.add();
        self.numbers.insert(name.to_owned(), number);
        number
    }

    /// Records that a definition nests at least so many levels.
    fn nests(&mut self, name: usize, levels: usize) {
        self.levels[name] = self.levels[name].max(levels);
    }

    /// Checks the levels along the longest chain.
    ///
    /// # Errors
    /// [`GrammarError::Chain`].
    fn check(&self) -> Result<(), GrammarError> {
        let levels = self.longest();
        if levels > LEVELS_MAX { Err(GrammarError::Chain { levels, most: LEVELS_MAX }) } else { Ok(()) }
    }

    /// Levels along the longest chain. Names that lead to each other count once each, as parsers follow a name once. Strongly connected
    /// components by Tarjan's algorithm (SIAM Journal on Computing 1, 1972), without recursion; it ends each component after all that it leads to.
    fn longest(&self) -> usize {
        const NEW: usize = usize::MAX;
        let count = self.levels.len();
        let (mut order, mut low, mut open) = (vec![NEW; count], vec![NEW; count], vec![false; count]);
        let (mut component, mut path, mut visited, mut longest) = (Vec::new(), Vec::new(), 0, vec![0; count]);
        for first in 0..count {
            if order[first] != NEW {
                continue;
            }
            path.push((first, 0));
            while let Some((name, at)) = path.pop() {
                if at == 0 {
                    (order[name], low[name], open[name]) = (visited, visited, true);
                    visited += 1;
                    component.push(name);
                }
                if let Some(next) = self.leads_to[name].get(at) {
                    path.push((name, at + 1));
                    if order[*next] == NEW {
                        path.push((*next, 0));
                    }
                    continue;
                }
                for next in &self.leads_to[name] {
                    if open[*next] {
                        low[name] = low[name].min(low[*next]);
                    }
                }
                if low[name] != order[name] {
                    continue;
                }
                let begin = component.iter().rposition(|member| *member == name).unwrap_or(0);
                let members = component.split_off(begin);
                members.iter().for_each(|member| open[*member] = false);
                let own: usize = members.iter().map(|member| self.levels[*member]).sum();
                let leads_to = members.iter().flat_map(|member| &self.leads_to[*member]);
                // Zero for the members themselves, whose length is not known yet.
                let behind = leads_to.map(|next| longest[*next]).max().unwrap_or(0);
                members.iter().for_each(|member| longest[*member] = own + behind);
            }
        }
        longest.into_iter().max().unwrap_or(0)
    }
}

/// Checks the chains of references of a JSON schema, whose nesting is bounded.
///
/// # Errors
/// [`GrammarError::Chain`].
pub(crate) fn check_schema(schema: &Map<String, Value>) -> Result<(), GrammarError> {
    let mut names = Names::default();
    SchemaNames::new(schema, &mut names).add(schema);
    names.check()
}

/// Checks the chains of rules and terminals of a Lark grammar, and of the references in its JSON schemas.
///
/// # Errors
/// [`GrammarError::Chain`].
pub(crate) fn check_lark(text: &str) -> Result<(), GrammarError> {
    let mut names = Names::default();
    lark::add(text, &mut names);
    names.check()
}

/// Names of a JSON schema: the values that references lead to.
struct SchemaNames<'a, 'n> {
    names: &'n mut Names,
    references: References<'a>,
    root: usize,
    /// Numbers of the values that references lead to, by address.
    targets: HashMap<*const Value, usize>,
    /// Levels of the references whose targets are not known: in the worst case, one leads to the next.
    unresolved: usize,
}

impl<'a, 'n> SchemaNames<'a, 'n> {
    fn new(root: &'a Map<String, Value>, names: &'n mut Names) -> Self {
        let number = names.add();
        Self {
            names,
            references: References::new(root),
            root: number,
            targets: HashMap::new(),
            unresolved: 0,
        }
    }

    /// Adds the names of a schema. Returns the number of the schema itself.
    fn add(mut self, schema: &'a Map<String, Value>) -> usize {
        self.find_targets(schema);
        let mut within = vec![(self.root, 0)];
        for value in schema.values() {
            self.visit(value, 1, &mut within);
        }
        self.visit_reference(schema, 1, &within);
        let all = self.names.levels[self.root] + self.unresolved;
        self.names.nests(self.root, all);
        self.root
    }

    /// Numbers the values that references lead to.
    fn find_targets(&mut self, object: &'a Map<String, Value>) {
        for reference in references_of(object) {
            if let Some(target) = self.references.resolve(reference) {
                let names = &mut *self.names;
                self.targets.entry(target).or_insert_with(|| names.add());
            }
        }
        let mut values: Vec<&Value> = object.values().collect();
        while let Some(value) = values.pop() {
            match value {
                Value::Object(object) => self.find_targets(object),
                Value::Array(inner) => values.extend(inner),
                _ => {}
            }
        }
    }

    /// Visits a value at a level of the schema. `within` are the names that it lies in, with their levels.
    fn visit(&mut self, value: &'a Value, level: usize, within: &mut Vec<(usize, usize)>) {
        let own = self.targets.get(&std::ptr::from_ref(value)).copied();
        within.extend(own.map(|number| (number, level)));
        for (number, begin) in &*within {
            self.names.nests(*number, level - begin + 1);
        }
        match value {
            Value::Object(object) => {
                self.visit_reference(object, level, within);
                object.values().for_each(|value| self.visit(value, level + 1, within));
            }
            Value::Array(values) => values.iter().for_each(|value| self.visit(value, level + 1, within)),
            _ => {}
        }
        if own.is_some() {
            within.pop();
        }
    }

    fn visit_reference(&mut self, object: &Map<String, Value>, level: usize, within: &[(usize, usize)]) {
        for reference in references_of(object) {
            let target = match self.references.resolve(reference) {
                Some(target) => self.targets.get(&std::ptr::from_ref(target)).copied(),
                None => (reference == "#").then_some(self.root),
            };
            match target {
                Some(target) => {
                    within.iter().for_each(|(number, _)| self.names.leads_to[*number].push(target))
                }
                None => self.unresolved += level,
            }
        }
    }
}

/// Returns the references of an object.
fn references_of(object: &Map<String, Value>) -> impl Iterator<Item = &str> {
    ["$ref", "$dynamicRef", "$recursiveRef"].into_iter().filter_map(|keyword| object.get(keyword)?.as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn longest_of_schema(schema: &Value) -> usize {
        let mut names = Names::default();
        let schema = schema.as_object().unwrap();
        SchemaNames::new(schema, &mut names).add(schema);
        names.longest()
    }

    #[test]
    fn a_chain_is_as_long_as_the_levels_of_its_names() {
        let names = |levels: &[usize], leads_to: &[&[usize]]| Names {
            numbers: HashMap::new(),
            levels: levels.to_vec(),
            leads_to: leads_to.iter().map(|next| next.to_vec()).collect(),
        };
        assert_eq!(names(&[], &[]).longest(), 0);
        assert_eq!(names(&[1, 2, 4], &[&[1, 2], &[2], &[]]).longest(), 7);
        // What leads to each other counts once each, with what it leads to and what leads to it.
        assert_eq!(names(&[1, 2, 4, 8, 16], &[&[1], &[2], &[1, 3], &[], &[4, 2]]).longest(), 30);
        assert_eq!(names(&[5], &[&[0]]).longest(), 5);
        let long = 200_000;
        let chain = Names {
            numbers: HashMap::new(),
            levels: vec![1; long],
            leads_to: (1..=long).map(|next| if next < long { vec![next] } else { vec![] }).collect(),
        };
        assert_eq!(chain.longest(), long);
    }

    #[test]
    fn references_count_with_the_levels_on_the_way_to_them() {
        assert_eq!(longest_of_schema(&json!({"type": "object"})), 2);
        let tree = json!({"$defs": {"node": {"items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"});
        assert_eq!(longest_of_schema(&tree), 5 + 3);
        let root = json!({"items": {"$ref": "#"}});
        assert_eq!(longest_of_schema(&root), 3);
        // The target of an `$id` of its own is not known: both references may lead to each other.
        let nested = json!({"items": {"$id": "a", "items": {"$ref": "#/b"}}, "not": {"$ref": "#/c"}});
        assert_eq!(longest_of_schema(&nested), 4 + 2 + 1);
    }

    #[test]
    fn rules_and_terminals_count_wherever_they_are_named() {
        let longest = |text: &str| {
            let mut names = Names::default();
            lark::add(text, &mut names);
            names.longest()
        };
        let chained =
            "start: a\na: (b | \"x\")\nb: C~1..2\nC: /[a-z]\\/[^\\]]/ D // D: E\nD: \"E: \\\" F\"\n";
        // Three brackets are within strings or comments, two count with their rules; the text before the first name counts, too.
        assert_eq!(longest(chained), 1 + 1 + 2 + 1 + 1 + 1);
        assert_eq!(longest("start: a\na: b\nb: a | c\nc: \"x\"\n"), 5);
        let json = r##"start: %json {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {}}}"##;
        assert!(longest(json) >= 2 + 5 + 3, "{}", longest(json));
        assert!(longest("start: %lark { start: b\n b: c\n c: \"x\" }\n") >= 4);
    }
}
