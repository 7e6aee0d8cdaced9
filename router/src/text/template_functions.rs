//! Functions and tests of chat templates, as in Hugging Face transformers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, escape_formatter};

use super::template_filters::{escaped, iterable};
use super::template_source::{ADD, ITERABLE, PERCENT};
use super::template_time::strftime_now;
use super::template_values::{invalid, is_namespace, text};
use super::{template_format, template_limits};

/// Sets the functions and tests that transformers adds to Jinja, and those that Jinja has beside the engine's own.
pub(super) fn apply(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_function("cycler", cycler);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_function("dict", dict);
    environment.add_function(PERCENT, percent);
    environment.add_function(ADD, add);
    environment.add_function(ITERABLE, looped);
    let engine = Environment::new();
    if let Some(namespace) = engine.empty_state().lookup("namespace") {
        environment.add_function("namespace", move |state: &mut State, values: Rest<Value>, args: Kwargs| {
            let values = dict(values, args)?;
            if values.try_iter()?.any(|name| name.as_str().is_some_and(|name| name.starts_with('_'))) {
                return Err(invalid("names of a namespace must not begin with an underscore"));
            }
            namespace.call(state, &[values])
        });
    }
    environment.remove_global("debug");
    for name in ["safe", "startingwith", "endingwith"] {
        environment.remove_test(name);
    }
    // Python's None is not iterable, and templates tell absent tools from a list by that.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && !is_namespace(value) && value.try_iter().is_ok()
    });
    environment.add_test("sequence", |value: &Value| {
        value.is_undefined()
            || matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
            || value.kind() == ValueKind::Iterable && value.len().is_some()
    });
    environment.add_test("mapping", |value: &Value| value.kind() == ValueKind::Map && !is_namespace(value));
    environment.add_test("divisibleby", |value: &Value, by: &Value| {
        Ok::<_, Error>(percent(value, by)? == Value::from(0))
    });
    environment
        .add_test("even", |value: &Value| Ok::<_, Error>(percent(value, &2.into())? == Value::from(0)));
    environment.add_test("odd", |value: &Value| Ok::<_, Error>(percent(value, &2.into())? == Value::from(1)));
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    environment.set_formatter(|out, state, value| match value.kind() {
        ValueKind::String | ValueKind::Undefined | ValueKind::Invalid => escape_formatter(out, state, value),
        _ => Ok(out.write_str(&text(value)?)?),
    });
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(invalid(message))
}

/// The operator `+` in a template that marks texts as escaped: another text that is added to one is escaped.
fn add(left: Value, right: Value) -> Result<Value, Error> {
    if let (Some(_), Some(_), true) = (left.as_str(), right.as_str(), left.is_safe() || right.is_safe()) {
        return Ok(Value::from_safe_string(escaped(&left)? + &escaped(&right)?));
    }
    template_limits::add(left, right)
}

/// Returns what a loop iterates over: what can be read once as a list, so that the loop knows its last item.
fn looped(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Iterable if value.len().is_none() => Ok(value.try_iter()?.collect()),
        _ => iterable(value),
    }
}

/// The operator `%`: formats a text, or returns the remainder of a division, which has the sign of the divisor.
fn percent(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        return template_format::percent(text, right).map(Value::from);
    }
    let is_number = |value: &Value| value.is_number() || value.kind() == ValueKind::Bool;
    if !is_number(left) || !is_number(right) {
        let reason =
            format!("tried to use % operator on unsupported types {} and {}", left.kind(), right.kind());
        return Err(invalid(reason));
    }
    let is_integer = |value: &Value| value.is_integer() || value.kind() == ValueKind::Bool;
    if is_integer(left) && is_integer(right) {
        let (left, right) = (i128::try_from(left.clone())?, i128::try_from(right.clone())?);
        let rest = left.checked_rem(right).ok_or_else(|| invalid("division by zero"))?;
        return Ok(Value::from(if rest != 0 && (rest < 0) != (right < 0) { rest + right } else { rest }));
    }
    let float = |value: &Value| match value.kind() {
        ValueKind::Bool => Ok(f64::from(u8::from(value.is_true()))),
        _ => f64::try_from(value.clone()),
    };
    let (left, right) = (float(left)?, float(right)?);
    if right == 0.0 {
        return Err(invalid("division by zero"));
    }
    Ok(Value::from(match left % right {
        0.0 => 0.0f64.copysign(right),
        rest if (rest < 0.0) != (right < 0.0) => rest + right,
        rest => rest,
    }))
}

/// Returns a dictionary of the items of another one or of pairs, and of named arguments.
fn dict(values: Rest<Value>, args: Kwargs) -> Result<Value, Error> {
    let mut pairs = Vec::new();
    if values.len() > 1 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    for values in values.0 {
        for item in iterable(values.clone())?.try_iter()? {
            if values.kind() == ValueKind::Map {
                let value = values.get_item(&item)?;
                pairs.push([item, value]);
            } else {
                let pair: Vec<Value> = item.try_iter()?.collect();
                pairs.push(pair.try_into().map_err(|_| invalid("dict: an item is no pair"))?);
            }
        }
    }
    for name in args.args() {
        pairs.push([name.into(), args.peek(name)?]);
    }
    Ok(Value::from_pairs(pairs.into_iter().map(<(Value, Value)>::from)))
}

/// Values in turn.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    at: AtomicUsize,
}

fn cycler(items: Rest<Value>) -> Result<Value, Error> {
    if items.is_empty() {
        return Err(invalid("cycler: at least one value is needed"));
    }
    Ok(Value::from_object(Cycler { items: items.0, at: AtomicUsize::new(0) }))
}

impl Cycler {
    fn current(&self) -> Value {
        self.items[self.at.load(Ordering::Relaxed) % self.items.len()].clone()
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current")).then(|| self.current())
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        let current = match method {
            "next" => self.current(),
            "reset" => Value::from(()),
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        };
        let () = from_args(args)?;
        let next =
            if method == "next" { (self.at.load(Ordering::Relaxed) + 1) % self.items.len() } else { 0 };
        self.at.store(next, Ordering::Relaxed);
        Ok(current)
    }
}
