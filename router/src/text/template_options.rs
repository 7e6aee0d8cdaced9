//! Arguments of filters that may be given by position or by name.

use minijinja::Error;
use minijinja::value::{Kwargs, Value};

use super::template_values::invalid;

/// Returns the arguments of a filter in the order of their names; those that are not given are undefined.
///
/// # Errors
/// There are others, or one is given twice.
pub(super) fn options<const COUNT: usize>(
    filter: &str,
    names: [&str; COUNT],
    args: &[Value],
    named: &Kwargs,
) -> Result<[Value; COUNT], Error> {
    if args.len() > COUNT {
        return Err(invalid(format!("{filter} takes at most {COUNT} arguments, {names:?}")));
    }
    let mut options = [const { Value::UNDEFINED }; COUNT];
    options.iter_mut().zip(args).for_each(|(option, given)| *option = given.clone());
    for name in named.args() {
        match names.iter().position(|known| *known == name) {
            Some(at) if at >= args.len() => options[at] = named.peek(name)?,
            Some(_) => return Err(invalid(format!("{filter} is given {name} twice"))),
            None => return Err(invalid(format!("{filter} has no argument {name}; it has {names:?}"))),
        }
    }
    Ok(options)
}
