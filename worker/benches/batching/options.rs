//! Command-line options.

use std::collections::BTreeMap;
use std::str::FromStr;

pub type BenchResult<T> = Result<T, Box<dyn std::error::Error>>;

const NAMES: [&str; 20] = [
    "model",
    "random",
    "context",
    "threads",
    "runs",
    "seed",
    "sequences",
    "batch-tokens",
    "block-tokens",
    "requests",
    "clients",
    "streams",
    "prompt",
    "every",
    "seconds",
    "target-factor",
    "output",
    "drafts-max",
    "vocab",
    "only",
];

/// Scenario with its options, `--name value`.
pub struct Options {
    pub scenario: String,
    given: BTreeMap<String, String>,
}

impl Options {
    pub fn parse(arguments: impl Iterator<Item = String>) -> BenchResult<Self> {
        let mut arguments = arguments.peekable();
        let scenario =
            arguments.next().ok_or("name a scenario: `continuous`, `drafts`, `storm` or `structured`")?;
        let mut given = BTreeMap::new();
        while let Some(argument) = arguments.next() {
            let name = argument.strip_prefix("--").unwrap_or_default();
            if !NAMES.contains(&name) {
                let known = NAMES.map(|name| format!("--{name}")).join(", ");
                return Err(format!("unknown option `{argument}`; there are {known}").into());
            }
            let value = arguments.next().ok_or_else(|| format!("{argument} needs a value"))?;
            given.insert(name.to_owned(), value);
        }
        Ok(Self { scenario, given })
    }

    /// Returns the value of `--name`, if given.
    pub fn get<T: FromStr>(&self, name: &str) -> BenchResult<Option<T>> {
        let parse = |value: &String| {
            value.parse().map_err(|_| format!("--{name} is `{value}`, which is not what it takes"))
        };
        Ok(self.given.get(name).map(parse).transpose()?)
    }

    /// Returns the value of `--name` or `default`; an error if it is less than `least`.
    pub fn number<T: FromStr + PartialOrd + std::fmt::Display>(
        &self,
        name: &str,
        default: T,
        least: T,
    ) -> BenchResult<T> {
        let value = self.get(name)?.unwrap_or(default);
        if value >= least { Ok(value) } else { Err(format!("--{name} is {value}, less than {least}").into()) }
    }
}
