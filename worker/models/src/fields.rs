//! Typed access to the fields of a JSON configuration, with errors that name file and field.

use serde_json::{Map, Value};

use super::error::Error;
use super::files::Files;

/// Fields of a JSON object, with the label of their file for errors.
#[derive(Clone)]
pub(super) struct Fields {
    file: String,
    map: Map<String, Value>,
}

impl Fields {
    /// Wraps fields that were converted from another format of `file`.
    pub(super) fn of(file: String, map: Map<String, Value>) -> Self {
        Self { file, map }
    }

    /// Adds a field unless it is there.
    pub(super) fn set_default(&mut self, field: &str, value: Value) {
        if self.get(field).is_none() {
            self.map.insert(field.to_owned(), value);
        }
    }

    /// Reads a JSON file; `None` if it does not exist.
    pub(super) fn read(files: &Files, name: &str) -> Result<Option<Self>, Error> {
        let Some(bytes) = files.read(name)? else { return Ok(None) };
        let file = files.label(name);
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(map)) => Ok(Some(Self { file, map })),
            Ok(_) => Err(Error::Broken { file, reason: "it is not a JSON object".to_owned() }),
            Err(error) => Err(Error::Broken { file, reason: error.to_string() }),
        }
    }

    /// Returns the value of a field; null counts as absent.
    pub(super) fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Iterates over names and values.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.map.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Returns a nested object as fields, if present.
    pub(super) fn object(&self, field: &str) -> Result<Option<Self>, Error> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { file: self.file.clone(), map: map.clone() })),
            Some(_) => Err(self.bad(field, "an object")),
        }
    }

    pub(super) fn missing(&self, field: &str) -> Error {
        Error::MissingField { file: self.file.clone(), field: field.to_owned() }
    }

    pub(super) fn bad(&self, field: &str, expected: &str) -> Error {
        let found = self.map.get(field).map_or("absent".to_owned(), Value::to_string);
        Error::Field {
            file: self.file.clone(),
            field: field.to_owned(),
            found,
            expected: expected.to_owned(),
        }
    }

    pub(super) fn unsupported(&self, field: &str, found: &str, supported: &str) -> Error {
        Error::Unsupported {
            file: self.file.clone(),
            field: field.to_owned(),
            found: found.to_owned(),
            supported: supported.to_owned(),
        }
    }

    /// Returns an integer from 1 to `most`, if present.
    pub(super) fn count(&self, field: &str, most: u32) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64() {
            Some(count) if (1..=u64::from(most)).contains(&count) => Ok(Some(count as usize)),
            _ => Err(self.bad(field, &format!("an integer from 1 to {most}"))),
        }
    }

    /// Returns an integer from 1 to `most` that must be present.
    pub(super) fn needed_count(&self, field: &str, most: u32) -> Result<usize, Error> {
        self.count(field, most)?.ok_or_else(|| self.missing(field))
    }

    pub(super) fn flag(&self, field: &str) -> Result<Option<bool>, Error> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.bad(field, "true or false")),
        }
    }

    pub(super) fn text(&self, field: &str) -> Result<Option<&str>, Error> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.bad(field, "a string")),
        }
    }

    /// Returns a finite number, if present.
    pub(super) fn number(&self, field: &str) -> Result<Option<f64>, Error> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|number| number.is_finite()) {
                Some(number) => Ok(Some(number)),
                None => Err(self.bad(field, "a finite number")),
            },
        }
    }

    /// Returns a number above 0, if present.
    pub(super) fn positive(&self, field: &str) -> Result<Option<f64>, Error> {
        match self.number(field)? {
            Some(number) if number <= 0.0 => Err(self.bad(field, "a number above 0")),
            number => Ok(number),
        }
    }

    /// Returns token ids, written as one id or a list. Negative ids, which some files use for "none", are
    /// skipped.
    pub(super) fn tokens(&self, field: &str) -> Result<Option<Vec<u32>>, Error> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let ids = match value {
            Value::Array(ids) => ids.as_slice(),
            id => std::slice::from_ref(id),
        };
        if !ids.iter().all(Value::is_i64) {
            return Err(self.bad(field, "a token id or a list of them"));
        }
        Ok(Some(ids.iter().filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()))
    }
}
