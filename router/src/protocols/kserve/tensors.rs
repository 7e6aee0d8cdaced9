//! Decoding of KServe input tensors and parameters into a request.

use std::collections::BTreeMap;

use inflight_contract::{NumberKind, SAMPLING_NUMBERS, SamplingNumber, SamplingOverrides, StopConditions};
use inflight_proto::kserve::infer_parameter::ParameterChoice;
use inflight_proto::kserve::model_infer_request::InferInputTensor;
use inflight_proto::kserve::{InferParameter, InferTensorContents, ModelInferRequest};
use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::protocols::kserve::constraints;
use crate::request::draft::{Draft, Input};

/// Returns the input tensors of a model: name and datatype.
pub(crate) fn inputs() -> impl Iterator<Item = (&'static str, &'static str)> {
    let datatype = |number: &SamplingNumber| match number.kind {
        NumberKind::Float => "FP32",
        NumberKind::Integer => "INT32",
    };
    let numbers = SAMPLING_NUMBERS.iter().map(move |number| (number.name, datatype(number)));
    let constraints = constraints::names().map(|name| (name, "BYTES"));
    BEFORE_NUMBERS.into_iter().chain(numbers).chain(AFTER_NUMBERS).chain(constraints)
}

/// Whether there is an input of this name.
fn is_input(name: &str) -> bool {
    inputs().any(|(known, _)| known == name)
}

const BEFORE_NUMBERS: [(&str, &str); 4] =
    [("text_input", "BYTES"), ("input_ids", "INT64"), ("max_tokens", "INT32"), ("min_tokens", "INT32")];

const AFTER_NUMBERS: [(&str, &str); 9] = [
    ("seed", "UINT64"),
    ("n", "INT32"),
    ("stop", "BYTES"),
    ("ignore_eos", "BOOL"),
    ("parse_special", "BOOL"),
    ("stream", "BOOL"),
    ("require_fingerprint", "BYTES"),
    ("exclude_input_in_output", "BOOL"),
    ("sampling_parameters", "BYTES"),
];

/// Values of one input.
#[derive(Debug, Clone, PartialEq)]
enum Value {
    Bools(Vec<bool>),
    Whole(Vec<i128>),
    Numbers(Vec<f64>),
    Texts(Vec<String>),
}

/// Decoded request.
#[derive(Debug, PartialEq)]
pub(crate) struct InferRequest {
    pub(crate) request: Draft,
    /// Whether text is streamed.
    pub(crate) stream: bool,
    /// Timeout of the request in microseconds.
    pub(crate) timeout_us: Option<u64>,
    /// Whether each text of the output has the input before it.
    pub(crate) echo: bool,
}

impl InferRequest {
    /// Decodes tensors and parameters.
    pub(crate) fn read(request: ModelInferRequest) -> Result<Self, Outcome> {
        let mut said = Said::default();
        let raw = &request.raw_input_contents;
        if !raw.is_empty() && raw.len() != request.inputs.len() {
            return Err(Outcome::Invalid(format!(
                "raw_input_contents has {} entries for {} inputs",
                raw.len(),
                request.inputs.len()
            )));
        }
        for (name, value) in &request.parameters {
            // Other parameters are ignored: clients send some for other servers. No constraint is.
            if is_input(name) || name == "timeout" {
                said.values.insert(name.clone(), of_parameter(name, value)?);
            } else if let Some(refusal) = constraints::refusal(name).filter(|_| !is_none(value)) {
                return Err(refusal);
            }
        }
        for (at, input) in request.inputs.into_iter().enumerate() {
            if !is_input(&input.name) {
                let known: Vec<_> = inputs().map(|(known, _)| known).collect();
                let reason = format!("there is no input {:?}; known are: {}", input.name, known.join(", "));
                return Err(constraints::refusal(&input.name).unwrap_or(Outcome::Invalid(reason)));
            }
            let value = match raw.get(at) {
                Some(raw) => of_raw(&input, raw)?,
                None => of_contents(&input)?,
            };
            said.values.insert(input.name, value);
        }
        if let Some(json) = said.text("sampling_parameters")? {
            said.add_json(&json)?;
        }
        for output in &request.outputs {
            if output.name != "text_output" {
                return Err(Outcome::Invalid(format!(
                    "there is no output {:?}; there is text_output",
                    output.name
                )));
            }
        }
        let input = match (said.text("text_input")?, said.whole("input_ids")?) {
            (Some(text), None) => Input::Text(text),
            (None, Some(ids)) => {
                let ids: Option<Vec<u32>> = ids.iter().map(|id| u32::try_from(*id).ok()).collect();
                let ids = ids.ok_or_else(|| Outcome::invalid("input_ids has an id that is no token's"))?;
                Input::TokenIds(ids)
            }
            (None, None) => return Err(Outcome::invalid("the input text_input is missing")),
            (Some(_), Some(_)) => {
                return Err(Outcome::invalid("both text_input and input_ids were given; give one"));
            }
        };
        let timeout = said.number::<u64>("timeout")?;
        let stream = said.flag("stream")?.unwrap_or(false);
        let echo = said.flag("exclude_input_in_output")? == Some(false);
        if stream && echo {
            let reason = "exclude_input_in_output = false with stream is refused: streams have what is generated; leave it out";
            return Err(Outcome::field("exclude_input_in_output", reason));
        }
        let mut draft = Draft {
            sampling: said.sampling()?,
            stop: StopConditions {
                max_tokens: said.number("max_tokens")?,
                min_tokens: said.number("min_tokens")?.unwrap_or(0),
                stop: said.texts("stop")?.unwrap_or_default(),
                ignore_eos: said.flag("ignore_eos")?.unwrap_or(false),
                ..StopConditions::default()
            },
            parse_special: said.flag("parse_special")?,
            request_id: request.id,
            require_fingerprint: said.text("require_fingerprint")?.unwrap_or_default(),
            resumable: false,
            resume: None,
            ..Draft::new(request.model_name, input)
        };
        constraints::read(&said.constraints()?, &mut draft)?;
        Ok(Self { request: draft, stream, timeout_us: timeout.filter(|timeout| *timeout > 0), echo })
    }
}

/// Values by input name.
#[derive(Debug, Default)]
struct Said {
    values: BTreeMap<String, Value>,
    /// Constraints that are given as JSON.
    json: BTreeMap<&'static str, Box<RawValue>>,
}

impl Said {
    /// Returns the constraints as JSON.
    fn constraints(&mut self) -> Result<BTreeMap<&'static str, Box<RawValue>>, Outcome> {
        let mut given = std::mem::take(&mut self.json);
        for name in constraints::names() {
            if let Some(texts) = self.texts(name)? {
                given.insert(name, constraints::of_texts(name, &texts)?);
            }
        }
        Ok(given)
    }

    /// Returns the sampling parameters.
    fn sampling(&self) -> Result<SamplingOverrides, Outcome> {
        let (seed, n) = (self.number("seed")?, self.number("n")?);
        let mut sampling = SamplingOverrides { seed, n, ..SamplingOverrides::default() };
        for number in SAMPLING_NUMBERS {
            let value = match number.kind {
                NumberKind::Float => self.float(number.name)?.map(f64::from),
                NumberKind::Integer => self.number::<i32>(number.name)?.map(f64::from),
            };
            if let Some(value) = value {
                sampling.set_number(number, value);
            }
        }
        Ok(sampling)
    }

    fn one<T: Clone>(name: &str, values: &[T]) -> Result<T, Outcome> {
        match values {
            [value] => Ok(value.clone()),
            _ => Err(Outcome::Invalid(format!("{name} has {} elements; give one", values.len()))),
        }
    }

    fn wrong<T>(name: &str, wanted: &str) -> Result<T, Outcome> {
        Err(Outcome::Invalid(format!("{name} is not {wanted}")))
    }

    fn texts(&self, name: &str) -> Result<Option<Vec<String>>, Outcome> {
        match self.values.get(name) {
            None => Ok(None),
            Some(Value::Texts(texts)) => Ok(Some(texts.clone())),
            Some(_) => Self::wrong(name, "BYTES"),
        }
    }

    fn text(&self, name: &str) -> Result<Option<String>, Outcome> {
        self.texts(name)?.map(|texts| Self::one(name, &texts)).transpose()
    }

    fn whole(&self, name: &str) -> Result<Option<&[i128]>, Outcome> {
        match self.values.get(name) {
            None => Ok(None),
            Some(Value::Whole(values)) => Ok(Some(values)),
            Some(_) => Self::wrong(name, "a whole number"),
        }
    }

    fn number<T: TryFrom<i128>>(&self, name: &str) -> Result<Option<T>, Outcome> {
        let Some(values) = self.whole(name)? else { return Ok(None) };
        let value = Self::one(name, values)?;
        match T::try_from(value) {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(Outcome::Invalid(format!("{name} is {value}, which is out of range"))),
        }
    }

    fn float(&self, name: &str) -> Result<Option<f32>, Outcome> {
        match self.values.get(name) {
            None => Ok(None),
            Some(Value::Numbers(values)) => Self::one(name, values).map(|value| Some(value as f32)),
            Some(Value::Whole(values)) => Self::one(name, values).map(|value| Some(value as f32)),
            Some(_) => Self::wrong(name, "a number"),
        }
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, Outcome> {
        match self.values.get(name) {
            None => Ok(None),
            Some(Value::Bools(values)) => Self::one(name, values).map(Some),
            Some(_) => Self::wrong(name, "BOOL"),
        }
    }

    /// Adds the fields of a JSON object that no tensor has set.
    fn add_json(&mut self, json: &str) -> Result<(), Outcome> {
        let invalid = |reason: &str| Outcome::Invalid(format!("sampling_parameters: {reason}"));
        let object: BTreeMap<String, Box<RawValue>> =
            serde_json::from_str(json).map_err(|error| invalid(&error.to_string()))?;
        for (name, value) in object {
            if let Some(known) = constraints::known(&name) {
                self.json.insert(known, value);
                continue;
            }
            if !is_input(&name) || name == "sampling_parameters" {
                let refusal = constraints::refusal(&name);
                return Err(refusal.unwrap_or_else(|| invalid(&format!("{name:?} is not known"))));
            }
            let value = serde_json::from_str(value.get()).ok().and_then(|value| of_json(&name, &value));
            let value = value.ok_or_else(|| invalid(&format!("{name} has a value of no use")))?;
            self.values.entry(name).or_insert(value);
        }
        Ok(())
    }
}

fn of_json(name: &str, value: &serde_json::Value) -> Option<Value> {
    use serde_json::Value as Json;
    Some(match value {
        Json::Bool(value) => Value::Bools(vec![*value]),
        // Numbers may be strings, as some clients send them.
        Json::String(text) => match inputs().find(|(known, _)| *known == name)?.1 {
            "BYTES" => Value::Texts(vec![text.clone()]),
            "BOOL" => Value::Bools(vec![text.parse().ok()?]),
            _ => match text.parse::<i128>() {
                Ok(whole) => Value::Whole(vec![whole]),
                Err(_) => Value::Numbers(vec![text.parse().ok()?]),
            },
        },
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(whole), ..) => Value::Whole(vec![whole.into()]),
            (_, Some(whole), _) => Value::Whole(vec![whole.into()]),
            (.., Some(number)) => Value::Numbers(vec![number]),
            _ => return None,
        },
        Json::Array(values) => {
            let texts: Option<Vec<_>> = values.iter().map(|text| text.as_str().map(str::to_owned)).collect();
            Value::Texts(texts?)
        }
        Json::Null | Json::Object(_) => return None,
    })
}

/// Whether a parameter is the same as an absent one.
fn is_none(parameter: &InferParameter) -> bool {
    match &parameter.parameter_choice {
        Some(ParameterChoice::BoolParam(value)) => !value,
        Some(ParameterChoice::StringParam(text)) => text.is_empty(),
        Some(_) => false,
        None => true,
    }
}

fn of_parameter(name: &str, parameter: &InferParameter) -> Result<Value, Outcome> {
    Ok(match &parameter.parameter_choice {
        Some(ParameterChoice::BoolParam(value)) => Value::Bools(vec![*value]),
        Some(ParameterChoice::Int64Param(value)) => Value::Whole(vec![(*value).into()]),
        Some(ParameterChoice::Uint64Param(value)) => Value::Whole(vec![(*value).into()]),
        Some(ParameterChoice::DoubleParam(value)) => Value::Numbers(vec![*value]),
        Some(ParameterChoice::StringParam(value)) => Value::Texts(vec![value.clone()]),
        None => return Err(Outcome::Invalid(format!("the parameter {name} has no value"))),
    })
}

fn of_contents(input: &InferInputTensor) -> Result<Value, Outcome> {
    let empty = InferTensorContents::default();
    let contents = input.contents.as_ref().unwrap_or(&empty);
    Ok(match input.datatype.as_str() {
        "BOOL" => Value::Bools(contents.bool_contents.clone()),
        "INT8" | "INT16" | "INT32" => {
            Value::Whole(contents.int_contents.iter().map(|v| (*v).into()).collect())
        }
        "INT64" => Value::Whole(contents.int64_contents.iter().map(|v| (*v).into()).collect()),
        "UINT8" | "UINT16" | "UINT32" => {
            Value::Whole(contents.uint_contents.iter().map(|v| (*v).into()).collect())
        }
        "UINT64" => Value::Whole(contents.uint64_contents.iter().map(|v| (*v).into()).collect()),
        "FP32" => Value::Numbers(contents.fp32_contents.iter().map(|v| (*v).into()).collect()),
        "FP64" => Value::Numbers(contents.fp64_contents.clone()),
        "BYTES" => texts(&input.name, contents.bytes_contents.iter().map(Vec::as_slice))?,
        other => return unknown(&input.name, other),
    })
}

fn of_raw(input: &InferInputTensor, raw: &[u8]) -> Result<Value, Outcome> {
    let whole = |width: usize, read: fn(&[u8]) -> i128| -> Result<Value, Outcome> {
        let values = elements(&input.name, raw, width)?;
        Ok(Value::Whole(values.map(read).collect()))
    };
    Ok(match input.datatype.as_str() {
        "BOOL" => Value::Bools(raw.iter().map(|byte| *byte != 0).collect()),
        "INT8" => whole(1, |b| i8::from_le_bytes(fixed(b)).into())?,
        "INT16" => whole(2, |b| i16::from_le_bytes(fixed(b)).into())?,
        "INT32" => whole(4, |b| i32::from_le_bytes(fixed(b)).into())?,
        "INT64" => whole(8, |b| i64::from_le_bytes(fixed(b)).into())?,
        "UINT8" => whole(1, |b| u8::from_le_bytes(fixed(b)).into())?,
        "UINT16" => whole(2, |b| u16::from_le_bytes(fixed(b)).into())?,
        "UINT32" => whole(4, |b| u32::from_le_bytes(fixed(b)).into())?,
        "UINT64" => whole(8, |b| u64::from_le_bytes(fixed(b)).into())?,
        "FP32" => Value::Numbers(
            elements(&input.name, raw, 4)?.map(|b| f32::from_le_bytes(fixed(b)).into()).collect(),
        ),
        "FP64" => {
            Value::Numbers(elements(&input.name, raw, 8)?.map(|b| f64::from_le_bytes(fixed(b))).collect())
        }
        "BYTES" => {
            let mut found = Vec::new();
            let mut rest = raw;
            while !rest.is_empty() {
                let cut = || Outcome::Invalid(format!("the raw contents of {} are cut short", input.name));
                let (length, behind) = rest.split_at_checked(4).ok_or_else(cut)?;
                let length = u32::from_le_bytes(fixed(length)) as usize;
                let (element, behind) = behind.split_at_checked(length).ok_or_else(cut)?;
                found.push(element);
                rest = behind;
            }
            texts(&input.name, found.into_iter())?
        }
        other => return unknown(&input.name, other),
    })
}

fn unknown<T>(name: &str, datatype: &str) -> Result<T, Outcome> {
    Err(Outcome::Invalid(format!("the input {name} has the datatype {datatype:?}, which is not taken here")))
}

fn elements<'a>(
    name: &str,
    raw: &'a [u8],
    width: usize,
) -> Result<impl Iterator<Item = &'a [u8]> + use<'a>, Outcome> {
    if !raw.len().is_multiple_of(width) {
        return Err(Outcome::Invalid(format!("the raw contents of {name} are cut short")));
    }
    Ok(raw.chunks_exact(width))
}

/// Callers pass chunks of exactly N bytes.
fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut fixed = [0; N];
    fixed.copy_from_slice(bytes);
    fixed
}

fn texts<'a>(name: &str, elements: impl Iterator<Item = &'a [u8]>) -> Result<Value, Outcome> {
    let text = |bytes: &[u8]| {
        let text = std::str::from_utf8(bytes).map(str::to_owned);
        text.map_err(|error| Outcome::Invalid(format!("{name} is not UTF-8: {error}")))
    };
    elements.map(text).collect::<Result<_, _>>().map(Value::Texts)
}

/// Encodes texts as the raw contents of a BYTES tensor.
pub(crate) fn bytes_tensor(texts: &[String]) -> Vec<u8> {
    let mut raw = Vec::with_capacity(texts.iter().map(|text| text.len() + 4).sum());
    for text in texts {
        raw.extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
        raw.extend(text.as_bytes());
    }
    raw
}

/// Entry point for fuzzing: a request of `ModelInfer`. It takes at most the memory that the codec measures; an accepted one is read
/// in the same way after another encoding, and its texts survive as raw contents. Returns whether it was accepted.
pub(crate) fn fuzz(data: &[u8]) -> bool {
    use prost::Message as _;
    let Some((message, bytes)) = inflight_proto::fuzz::decode::<ModelInferRequest>(data) else {
        return false;
    };
    let contents = message.inputs.iter().flat_map(|input| &input.contents);
    let elements = contents.map(|contents| {
        size_of_val(&*contents.int64_contents)
            + size_of_val(&*contents.bool_contents)
            + size_of_val(&*contents.bytes_contents)
    });
    let heap =
        size_of_val(&*message.inputs) + elements.sum::<usize>() + message.raw_input_contents.concat().len();
    assert!(heap <= bytes, "{heap} bytes of memory, measured as {bytes}");
    let again = ModelInferRequest::decode(message.encode_to_vec().as_slice());
    let again = again.expect("an encoded message decodes");
    // As text, because NaN differs from itself.
    let read = |message| format!("{:?}", InferRequest::read(message));
    let first = read(message.clone());
    // Of several parameters with an error, any may be reported.
    if message.parameters.len() <= 1 {
        assert_eq!(first, read(again));
    }
    let Ok(infer) = InferRequest::read(message) else { return false };
    let mut texts = infer.request.stop.stop;
    if let Input::Text(text) = infer.request.input {
        texts.push(text);
    }
    assert!(texts.iter().map(String::len).sum::<usize>() <= data.len(), "texts grow");
    let input = InferInputTensor { datatype: "BYTES".to_owned(), ..InferInputTensor::default() };
    let decoded = of_raw(&input, &bytes_tensor(&texts)).expect("encoded texts decode");
    assert_eq!(decoded, Value::Texts(texts));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(name: &str, datatype: &str) -> InferInputTensor {
        InferInputTensor {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: vec![1],
            ..Default::default()
        }
    }

    fn raw(inputs: &[(&str, &str, &[u8])]) -> ModelInferRequest {
        ModelInferRequest {
            inputs: inputs.iter().map(|(name, datatype, _)| input(name, datatype)).collect(),
            raw_input_contents: inputs.iter().map(|(.., bytes)| bytes.to_vec()).collect(),
            ..ModelInferRequest::default()
        }
    }

    fn text(text: &str) -> Vec<u8> {
        bytes_tensor(&[text.to_owned()])
    }

    #[test]
    fn raw_and_typed_contents_parameters_and_json_are_equivalent() {
        let as_raw = raw(&[
            ("text_input", "BYTES", &text("hi")),
            ("max_tokens", "INT32", &7i32.to_le_bytes()),
            ("temperature", "FP32", &0.5f32.to_le_bytes()),
            ("seed", "UINT64", &u64::MAX.to_le_bytes()),
            ("stream", "BOOL", &[1]),
            ("stop", "BYTES", &bytes_tensor(&["a".to_owned(), "b".to_owned()])),
        ]);
        let contents = |contents| Some(contents);
        let typed = ModelInferRequest {
            inputs: vec![
                InferInputTensor {
                    contents: contents(InferTensorContents {
                        bytes_contents: vec![b"hi".to_vec()],
                        ..Default::default()
                    }),
                    ..input("text_input", "BYTES")
                },
                InferInputTensor {
                    contents: contents(InferTensorContents {
                        fp64_contents: vec![0.5],
                        ..Default::default()
                    }),
                    ..input("temperature", "FP64")
                },
                InferInputTensor {
                    contents: contents(InferTensorContents {
                        bytes_contents: vec![
                            br#"{"seed": 18446744073709551615, "stop": ["a", "b"], "max_tokens": "7"}"#
                                .to_vec(),
                        ],
                        ..Default::default()
                    }),
                    ..input("sampling_parameters", "BYTES")
                },
            ],
            parameters: [
                ("stream", ParameterChoice::BoolParam(true)),
                ("sequence_id", ParameterChoice::Int64Param(3)),
            ]
            .map(|(name, value)| (name.to_owned(), InferParameter { parameter_choice: Some(value) }))
            .into(),
            ..ModelInferRequest::default()
        };
        let request = InferRequest::read(as_raw).unwrap();
        assert_eq!(request, InferRequest::read(typed).unwrap());
        assert!(request.stream && request.timeout_us.is_none());
        let sampling = request.request.sampling;
        assert_eq!((sampling.temperature, sampling.seed), (Some(0.5), Some(u64::MAX)));
        assert_eq!(request.request.stop.max_tokens, Some(7));
    }

    #[test]
    fn strings_in_sampling_parameters_become_numbers_only_for_numeric_inputs() {
        let json =
            br#"{"stop": "42", "max_tokens": "7", "temperature": "0.5", "top_p": "1", "ignore_eos": "true"}"#;
        let json = [&(json.len() as u32).to_le_bytes(), json.as_slice()].concat();
        let good = text("hi");
        let read = |json: &[u8]| {
            InferRequest::read(raw(&[("text_input", "BYTES", &good), ("sampling_parameters", "BYTES", json)]))
        };
        let request = read(&json).unwrap().request;
        let (stop, sampling) = (request.stop, request.sampling);
        assert_eq!((stop.stop, stop.max_tokens, stop.ignore_eos), (vec!["42".to_owned()], Some(7), true));
        assert_eq!((sampling.temperature, sampling.top_p), (Some(0.5), Some(1.0)));
        let wrong = br#"{"max_tokens": "many"}"#;
        let wrong = [&(wrong.len() as u32).to_le_bytes(), wrong.as_slice()].concat();
        assert!(matches!(read(&wrong), Err(Outcome::Invalid(reason)) if reason.contains("max_tokens")));
    }

    #[test]
    fn errors_name_the_invalid_input() {
        let good = text("hi");
        let table: [(ModelInferRequest, &str); 9] = [
            (raw(&[]), "text_input is missing"),
            (raw(&[("text_input", "BYTES", &good[..3])]), "raw contents of text_input are cut short"),
            (raw(&[("text_input", "BYTES", &[9, 0, 0, 0, b'a'])]), "cut short"),
            (raw(&[("text_input", "BYTES", &[1, 0, 0, 0, 0xff])]), "not UTF-8"),
            (raw(&[("text_input", "FP16", &good)]), "FP16"),
            (
                raw(&[("text_input", "BYTES", &good), ("max_tokens", "INT32", &[1, 2])]),
                "max_tokens are cut short",
            ),
            (
                raw(&[("text_input", "BYTES", &good), ("max_tokens", "INT32", &(-1i32).to_le_bytes())]),
                "max_tokens is -1",
            ),
            (raw(&[("text_input", "BYTES", &good), ("image", "BYTES", &good)]), "no input \"image\""),
            (
                raw(&[("text_input", "BYTES", &bytes_tensor(&["a".to_owned(), "b".to_owned()]))]),
                "has 2 elements",
            ),
        ];
        for (request, words) in table {
            match InferRequest::read(request) {
                Err(Outcome::Invalid(reason)) => {
                    assert!(reason.contains(words), "{words:?} is not in {reason:?}")
                }
                other => panic!("{words}: {other:?}"),
            }
        }
    }
}
