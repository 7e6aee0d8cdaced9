//! Parts of generated schemas.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::{Json, Random};

/// Schema with values at its edges, of which some are valid. Objects among them have their names in the order of the schema.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) schema: Value,
    pub(crate) values: Vec<Json>,
}

impl Part {
    pub(crate) fn new(schema: Value, values: Vec<Json>) -> Self {
        Self { schema, values }
    }
}

/// Maker of one schema.
#[derive(Debug)]
pub(crate) struct Maker {
    pub(crate) random: Random,
    /// Kinds of what was made.
    pub(crate) kinds: BTreeSet<&'static str>,
    /// Definitions that parts refer to.
    pub(crate) definitions: Vec<(String, Value)>,
    /// Levels of containers that may still be opened.
    pub(crate) depth: u32,
}

impl Maker {
    pub(crate) fn new(seed: u64) -> Self {
        Self { random: Random::new(seed), kinds: BTreeSet::new(), definitions: Vec::new(), depth: 2 }
    }

    /// Notes a kind.
    pub(crate) fn kind(&mut self, kind: &'static str) {
        self.kinds.insert(kind);
    }

    pub(crate) fn once_in(&mut self, of: usize) -> bool {
        self.random.once_in(of)
    }

    /// Returns one of some values.
    pub(crate) fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        self.random.pick(of)
    }

    /// Returns one of the values of a part.
    pub(crate) fn value(&mut self, part: &Part) -> Json {
        if part.values.is_empty() { Json::Null } else { self.pick(&part.values) }
    }

    /// Returns at most `most` of the values of a part.
    pub(crate) fn some(&mut self, part: &Part, most: usize) -> Vec<Json> {
        let mut values = part.values.clone();
        while values.len() > most {
            let at = self.random.below(values.len());
            values.swap_remove(at);
        }
        values
    }

    /// Moves a schema to the definitions. Returns a reference to it.
    pub(crate) fn define(&mut self, schema: Value) -> Value {
        let (name, pointer) = match self.random.below(5) {
            0 => ("a/b", "a~1b"),
            1 => ("50%", "50%25"),
            _ => ("part", "part"),
        };
        let at = self.definitions.len();
        self.definitions.push((format!("{name}{at}"), schema));
        json!({"$ref": format!("#/$defs/{pointer}{at}")})
    }
}
