//! Default values of a struct of options.

use clap::builder::Resettable;
use clap::{Arg, Command};

/// Returns the options of an empty command line, whatever the environment says. For `impl Default`, so that each default value stands
/// once, at its field.
///
/// # Panics
/// A field has neither a default value nor a type that may be absent, or its default value is invalid: the mistake is in the struct, and
/// every call shows it.
pub fn defaults<T: clap::Args>() -> T {
    match parse(&[]) {
        Ok(options) => options,
        Err(error) => panic!("the options have no valid default values: {error}"),
    }
}

/// Returns the options that these flags give, whatever the environment says.
///
/// # Errors
/// A flag is unknown or its value is invalid.
pub fn parse<T: clap::Args>(flags: &[&str]) -> Result<T, clap::Error> {
    let command = T::augment_args(Command::new("options").no_binary_name(true));
    let command = command.mut_args(|argument: Arg| argument.env(Resettable::Reset));
    T::from_arg_matches(&command.try_get_matches_from(flags)?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[derive(Debug, PartialEq, clap::Args)]
    struct Parent {
        #[arg(long, value_name = "DURATION", default_value = "1.5s", value_parser = crate::duration, env = "PATH")]
        from_environment: Duration,
        #[command(flatten)]
        child: Child,
        #[arg(skip = 7_u32)]
        skipped: u32,
    }

    #[derive(Debug, PartialEq, clap::Args)]
    struct Child {
        #[arg(long, default_value = "2KiB", value_parser = crate::bytes::<u32>)]
        size: u32,
        #[arg(long)]
        absent: Option<String>,
    }

    #[test]
    fn defaults_are_those_of_an_empty_command_line_without_its_environment() {
        let child = Child { size: 2048, absent: None };
        let expected = Parent { from_environment: Duration::from_millis(1500), child, skipped: 7 };
        assert_eq!(defaults::<Parent>(), expected);
    }
}
