//! Sampling options of `inflight chat` while it runs: the flags of [`SamplingArgs`], by the names of the APIs.

use std::collections::BTreeMap;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args as _, FromArgMatches as _};
use inflight_contract::SAMPLING_NUMBERS;

use super::command::nearest;
use crate::sampling::SamplingArgs;

/// Value that removes an option.
const DEFAULT: &str = "default";

/// Sampling options with their values as typed.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Values by name; an option without values is at its default.
    values: BTreeMap<String, Vec<String>>,
    parsed: SamplingArgs,
}

/// Returns the command whose flags are the options.
fn command() -> clap::Command {
    SamplingArgs::augment_args(clap::Command::new("set").no_binary_name(true).disable_help_flag(true))
}

/// Returns the names of all options.
pub fn names() -> Vec<String> {
    command().get_arguments().map(|option| option.get_id().to_string()).collect()
}

impl Settings {
    /// Creates the settings of the command line.
    pub fn new(parsed: SamplingArgs, matches: &ArgMatches) -> Self {
        let given = |option: &Arg| {
            let id = option.get_id().as_str();
            let default = matches!(matches.value_source(id), None | Some(ValueSource::DefaultValue));
            let raw = if default { None } else { matches.get_raw(id) };
            let values: Vec<String> = match raw {
                Some(raw) => raw.map(|value| value.to_string_lossy().into_owned()).collect(),
                None => Vec::new(),
            };
            (!values.is_empty()).then(|| (id.to_owned(), values))
        };
        let values = command().get_arguments().filter_map(given).collect();
        Self { values, parsed }
    }

    /// Returns the options as parsed.
    pub fn sampling(&self) -> &SamplingArgs {
        &self.parsed
    }

    /// Sets an option, or adds a value to one with several; `default` removes it. A value in quotes is a JSON string.
    ///
    /// # Errors
    /// Says which option is unknown or which value it does not take; nothing is changed then.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let command = command();
        let option = find(&command, name)?;
        let id = option.get_id().to_string();
        let value: String = if value.starts_with('"') {
            serde_json::from_str(value).map_err(|error| format!("{id}: {error}"))?
        } else {
            value.to_owned()
        };
        check_range(&id, &value)?;
        let mut values = self.values.clone();
        match option.get_action() {
            _ if value == DEFAULT => drop(values.remove(&id)),
            ArgAction::SetTrue => match value.as_str() {
                "on" | "true" => drop(values.insert(id, vec!["true".to_owned()])),
                "off" | "false" => drop(values.remove(&id)),
                _ => return Err(format!("{id} is on or off")),
            },
            ArgAction::Append => values.entry(id).or_default().push(value),
            _ => drop(values.insert(id, vec![value])),
        }
        self.parsed = parse(command.clone(), &values)?;
        self.values = values;
        Ok(())
    }

    /// Returns the value and the help of an option.
    ///
    /// # Errors
    /// Says that the option is unknown, and the nearest one.
    pub fn describe(&self, name: &str) -> Result<String, String> {
        let command = command();
        let option = find(&command, name)?;
        let help = option.get_help().map(ToString::to_string).unwrap_or_default();
        Ok(format!("{} = {}\n{help}", option.get_id(), self.value(option.get_id().as_str())))
    }

    /// Returns all options with their values, one a line.
    pub fn list(&self) -> String {
        let names = names();
        let width = names.iter().map(String::len).max().unwrap_or(0);
        let lines: Vec<String> =
            names.iter().map(|name| format!("{name:width$}  {}", self.value(name))).collect();
        lines.join("\n")
    }

    fn value(&self, id: &str) -> String {
        // Quoted if it has characters that a line cannot show.
        let shown = |value: &String| {
            if value.chars().any(char::is_control) { format!("{value:?}") } else { value.clone() }
        };
        match self.values.get(id) {
            Some(values) => values.iter().map(shown).collect::<Vec<_>>().join(", "),
            None => DEFAULT.to_owned(),
        }
    }
}

/// Returns the option of this name, with underscores or hyphens.
fn find<'a>(command: &'a clap::Command, name: &str) -> Result<&'a Arg, String> {
    let id = name.trim_start_matches('-').replace('-', "_");
    command.get_arguments().find(|option| *option.get_id() == *id).ok_or_else(|| {
        let nearest = nearest(&id, command.get_arguments().map(|option| option.get_id().as_str()));
        format!("{name} is no option; the nearest one is {}", nearest.unwrap_or("none"))
    })
}

/// Checks the value of a numeric sampling parameter, which the router would refuse.
fn check_range(id: &str, value: &str) -> Result<(), String> {
    let number = SAMPLING_NUMBERS.iter().find(|number| number.name == id);
    match (number, value.parse::<f64>()) {
        (Some(number), Ok(parsed)) if !number.allows(parsed) => {
            Err(format!("{id} {value} is out of range {}", number.range))
        }
        _ => Ok(()),
    }
}

fn parse(command: clap::Command, values: &BTreeMap<String, Vec<String>>) -> Result<SamplingArgs, String> {
    let mut arguments = Vec::new();
    for option in command.get_arguments() {
        let (Some(long), Some(values)) = (option.get_long(), values.get(option.get_id().as_str())) else {
            continue;
        };
        match option.get_action() {
            ArgAction::SetTrue => arguments.push(format!("--{long}")),
            _ => arguments.extend(values.iter().map(|value| format!("--{long}={value}"))),
        }
    }
    let parsed =
        command.try_get_matches_from(arguments).and_then(|matches| SamplingArgs::from_arg_matches(&matches));
    parsed.map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        first.strip_prefix("error: ").unwrap_or(first).to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(arguments: &[&str]) -> Settings {
        let matches = command().try_get_matches_from(arguments).unwrap();
        Settings::new(SamplingArgs::from_arg_matches(&matches).unwrap(), &matches)
    }

    #[test]
    fn options_change_one_by_one_and_refused_values_change_nothing() {
        let mut settings =
            settings(&["--temperature=0.5", "--ignore-eos", "--stop-token-ids=1,2", "--stop=x"]);
        for (name, value) in [
            ("top_p", "0.25"),
            ("--max-tokens", "12"),
            ("seed", "7"),
            ("stop", r#""a\nb""#),
            ("logit_bias", "42=-1.5"),
            ("temperature", "0"),
            ("presence_penalty", "-1"),
        ] {
            settings.set(name, value).unwrap();
        }
        let (params, stop) = (settings.sampling().params(), settings.sampling().stop_conditions());
        assert_eq!((params.temperature, params.top_p, params.seed), (Some(0.0), Some(0.25), Some(7)));
        assert_eq!((params.presence_penalty, params.logit_bias[&42]), (Some(-1.0), -1.5));
        assert_eq!((stop.max_tokens, stop.ignore_eos), (Some(12), true));
        assert_eq!((stop.stop, stop.stop_token_ids), (vec!["x".to_owned(), "a\nb".to_owned()], vec![1, 2]));
        let listed = settings.list();
        for line in [
            "temperature         0",
            "stop                x, \"a\\nb\"",
            "top_k               default",
            "ignore_eos          true",
        ] {
            assert!(listed.lines().any(|listed| listed == line), "{line}:\n{listed}");
        }

        for (name, value, reason) in [
            ("temperatur", "1", "the nearest one is temperature"),
            ("temperature", "-1", "out of range [0, 100]"),
            ("temperature", "warm", "invalid value 'warm'"),
            ("top_k", "1.5", "invalid value"),
            ("seed", "-3", "invalid value"),
            ("ignore_eos", "maybe", "on or off"),
            ("schema", "/none.json", "cannot read it"),
            ("logit_bias", "42", "write it as"),
            ("stop", "\"open", "EOF"),
        ] {
            let refused = settings.set(name, value).unwrap_err();
            assert!(refused.contains(reason), "{name} {value}: {refused}");
        }
        assert_eq!(settings.list(), listed);
        settings.set("stop", "default").unwrap();
        settings.set("ignore_eos", "off").unwrap();
        settings.set("regex", "a+").unwrap();
        let stop = settings.sampling().stop_conditions();
        assert_eq!((stop.stop.len(), stop.ignore_eos), (0, false));
        assert!(settings.describe("top-k").unwrap().contains("top_k = default\nKeep this many"));
    }

    #[test]
    fn every_flag_of_sampling_is_an_option() {
        let names = names();
        for name in
            SAMPLING_NUMBERS.iter().map(|number| number.name).chain(["max_tokens", "seed", "stop", "schema"])
        {
            assert!(names.iter().any(|option| option == name), "{name} is missing in {names:?}");
        }
    }
}
