//! Table of numeric sampling parameters. Derived from it: wire messages, fields of OpenAI's completions and of KServe, defaults of
//! generation_config.json, command-line flags, validation, and the digest of resumable streams.

/// Calls the macro `$callback` with the rows of the table.
///
/// Rows are only appended: the digests of resumable streams depend on their order.
///
/// Columns: `absent` is the default without one in generation_config.json, `range` the lowest and highest value with the text for
/// messages, `model` whether generation_config.json may set the default, `off` a value of HTTP clients that means `absent`, `http` the
/// documentation of the HTTP field, `extension` whether OpenAI's API lacks the field, `flag` the value name and the help of the
/// command line's flag.
#[macro_export]
macro_rules! sampling_numbers {
    ($callback:ident) => {
        $callback! {
            /// Divisor of the logits, in [0, 100]; 0 is greedy.
            temperature: f32 {
                absent: 1.0,
                range: 0.0, 100.0, "[0, 100]",
                model: true,
                off: None,
                http: "In [0, 100]; 0 is greedy.",
                extension: false,
                flag: "T", "Sampling temperature; 0 is greedy [default: the model's]",
            }
            /// Nucleus sampling: cumulative probability of the most probable tokens kept, in [0, 1]; 1 keeps all, 0 the most probable one.
            top_p: f32 {
                absent: 1.0,
                range: 0.0, 1.0, "[0, 1]",
                model: true,
                off: None,
                http: "In [0, 1]; 0 keeps the most probable token only.",
                extension: false,
                flag: "P", "Nucleus sampling: keep the most probable tokens up to this cumulative probability [default: the model's]",
            }
            /// Number of most probable tokens kept; 0 keeps all.
            top_k: i32 {
                absent: 0,
                range: 0.0, i32::MAX as f64, "[0, 2147483647]",
                model: true,
                off: Some(-1.0),
                http: "Extension: at least 0, or -1; 0 and -1 keep all tokens.",
                extension: true,
                flag: "K", "Keep this many most probable tokens; 0 keeps all [default: the model's]",
            }
            /// Minimum probability of a token relative to the most probable one, in [0, 1]; 0 drops none.
            min_p: f32 {
                absent: 0.0,
                range: 0.0, 1.0, "[0, 1]",
                model: true,
                off: None,
                http: "Extension: in [0, 1].",
                extension: true,
                flag: "P", "Drop tokens less probable than this fraction of the most probable one [default: 0]",
            }
            /// Subtracted once from the logit of each token generated so far, in [-2, 2].
            presence_penalty: f32 {
                absent: 0.0,
                range: -2.0, 2.0, "[-2, 2]",
                model: false,
                off: None,
                http: "In [-2, 2].",
                extension: false,
                flag: "X", "Subtract this from the logit of each token generated so far [default: 0]",
            }
            /// Subtracted from a token's logit for each time it was generated, in [-2, 2].
            frequency_penalty: f32 {
                absent: 0.0,
                range: -2.0, 2.0, "[-2, 2]",
                model: false,
                off: None,
                http: "In [-2, 2].",
                extension: false,
                flag: "X", "Subtract this from a token's logit for each time it was generated [default: 0]",
            }
            /// Divides positive and multiplies negative logits of tokens in prompt or output, in (0, 100]; 1 is off.
            repetition_penalty: f32 {
                absent: 1.0,
                range: f32::MIN_POSITIVE as f64, 100.0, "(0, 100]",
                model: true,
                off: None,
                http: "Extension: in (0, 100].",
                extension: true,
                flag: "X", "Divide positive and multiply negative logits of tokens in prompt and output by this [default: 1]",
            }
        }
    };
}

/// Type of a numeric sampling parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberKind {
    /// Number: f32.
    Float,
    /// Integer: i32.
    Integer,
}

/// Row of the table of numeric sampling parameters. Values are f64, which holds every f32 and i32.
#[derive(Debug)]
pub struct SamplingNumber {
    /// Name of the field in every API.
    pub name: &'static str,
    /// Type.
    pub kind: NumberKind,
    /// Default without one in generation_config.json.
    pub absent: f64,
    /// Allowed range, as text.
    pub range: &'static str,
    /// Whether generation_config.json may set the default.
    pub model: bool,
    /// Value of HTTP clients that means `absent`.
    pub off: Option<f64>,
    /// Documentation of the HTTP field.
    pub http: &'static str,
    /// Whether OpenAI's API lacks the field.
    pub extension: bool,
    low: f64,
    high: f64,
    /// Index of the row.
    pub(super) row: usize,
}

impl SamplingNumber {
    /// Whether a value is in the range. NaN is not.
    pub fn allows(&self, value: f64) -> bool {
        value >= self.low && value <= self.high
    }

    /// Returns the value of a JSON number; `None` if it is out of range or of another kind. The number is given in both of its
    /// readings: `float`, and `integer` if it is one.
    pub fn of_json(&self, float: Option<f64>, integer: Option<i64>) -> Option<f64> {
        let value = match self.kind {
            NumberKind::Float => float,
            NumberKind::Integer => integer.map(|integer| integer as f64),
        };
        value.filter(|value| self.allows(*value))
    }
}

trait Number {
    const KIND: NumberKind;
}

impl Number for f32 {
    const KIND: NumberKind = NumberKind::Float;
}

impl Number for i32 {
    const KIND: NumberKind = NumberKind::Integer;
}

/// Names of the rows, whose values are their indices.
#[allow(non_camel_case_types, missing_docs)]
mod index {
    macro_rules! names {
        ($($(#[$doc:meta])* $name:ident: $kind:ident { $($column:tt)* })*) => {
            pub(super) enum Row { $($name,)* }
        };
    }
    sampling_numbers!(names);
}

macro_rules! rows {
    ($($(#[$doc:meta])* $name:ident: $kind:ident {
        absent: $absent:expr, range: $low:expr, $high:expr, $range:literal, model: $model:literal, off: $off:expr,
        http: $http:literal, extension: $extension:literal, flag: $value:literal, $help:literal,
    })*) => {
        /// All numeric sampling parameters, in the order of the table.
        pub const SAMPLING_NUMBERS: &[SamplingNumber] = &[$(SamplingNumber {
            name: stringify!($name),
            kind: <$kind as Number>::KIND,
            absent: $absent as f64,
            range: $range,
            model: $model,
            off: $off,
            http: $http,
            extension: $extension,
            low: $low,
            high: $high,
            row: index::Row::$name as usize,
        }),*];
    };
}

sampling_numbers!(rows);
