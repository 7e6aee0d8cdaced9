//! Seeds of the decoders of protobuf messages: recorded sessions, and requests of KServe.

use inflight_proto::kserve::infer_parameter::ParameterChoice;
use inflight_proto::kserve::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use inflight_proto::kserve::{InferParameter, InferTensorContents, ModelInferRequest};
use prost::Message as _;

use super::{Result, Seeds};

/// Messages recorded from 0.1.0; see `tests/tests/wire.rs`.
const RECORDED: &str = include_str!("../../../../wire/0.1.0.txt");
/// Messages of one seed, and its maximum length in bytes.
const MESSAGES: usize = 4;
const BYTES_MAX: usize = 2048;

/// Recorded messages of sessions, length-delimited, a few in each seed: those of the router, or those of the worker.
pub fn sessions(of_router: bool) -> Result<Seeds> {
    let mut messages = Vec::new();
    for line in RECORDED.lines() {
        let mut words = line.split(' ');
        let (direction, method, hex) = (words.next(), words.next(), words.next().unwrap_or_default());
        let wanted = if of_router { ">" } else { "<" };
        if direction != Some(wanted) || method != Some("/inflight.v1.Worker/Session") {
            continue;
        }
        let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16);
        let message = (0..hex.len() / 2).map(byte).collect::<std::result::Result<Vec<_>, _>>()?;
        messages.push(message);
    }
    let mut seeds = Seeds::new();
    for (at, group) in messages.chunks(MESSAGES).enumerate() {
        let mut content = Vec::new();
        for message in group {
            prost::encode_length_delimiter(message.len(), &mut content)?;
            content.extend(message);
        }
        // Large ones are like each other.
        if content.len() <= BYTES_MAX {
            seeds.push((format!("{at:02}"), content));
        }
    }
    Ok(seeds)
}

/// Requests with tensors in both representations, with parameters, and with sampling parameters as JSON.
pub fn kserve() -> Seeds {
    let input = |name: &str, datatype: &str, contents: InferTensorContents| InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: vec![1],
        contents: Some(contents),
        ..InferInputTensor::default()
    };
    let bytes = |text: &str| InferTensorContents {
        bytes_contents: vec![text.as_bytes().to_vec()],
        ..InferTensorContents::default()
    };
    let request = |inputs: Vec<InferInputTensor>| ModelInferRequest {
        model_name: "m".to_owned(),
        id: "7".to_owned(),
        inputs,
        ..ModelInferRequest::default()
    };
    let whole =
        |value: i32| InferTensorContents { int_contents: vec![value], ..InferTensorContents::default() };
    let number =
        |value: f32| InferTensorContents { fp32_contents: vec![value], ..InferTensorContents::default() };
    let flag = InferTensorContents { bool_contents: vec![true], ..InferTensorContents::default() };
    let ids = InferTensorContents { int64_contents: vec![1, 2, 3], ..InferTensorContents::default() };
    let seed = InferTensorContents { uint64_contents: vec![u64::MAX], ..InferTensorContents::default() };
    let text = || input("text_input", "BYTES", bytes("Hi"));
    let contents = request(vec![
        text(),
        input("max_tokens", "INT32", whole(5)),
        input("temperature", "FP32", number(0.5)),
        input("stream", "BOOL", flag),
        input("seed", "UINT64", seed),
        input("stop", "BYTES", bytes("x")),
    ]);
    let tokens = request(vec![input("input_ids", "INT64", ids), input("n", "INT32", whole(2))]);
    let json = r#"{"temperature": "0.5", "top_k": 3, "ignore_eos": true, "stop": ["a", "b"], "min_p": 0.25}"#;
    let json = request(vec![text(), input("sampling_parameters", "BYTES", bytes(json))]);
    let mut raw = request(vec![
        InferInputTensor { contents: None, ..text() },
        InferInputTensor { contents: None, ..input("max_tokens", "INT32", whole(5)) },
        InferInputTensor { contents: None, ..input("top_p", "FP64", number(0.5)) },
    ]);
    let mut text_bytes = 2u32.to_le_bytes().to_vec();
    text_bytes.extend(b"Hi");
    raw.raw_input_contents = vec![text_bytes, 5u32.to_le_bytes().to_vec(), 0.5f64.to_le_bytes().to_vec()];
    let mut parameters = request(vec![text()]);
    parameters.outputs =
        vec![InferRequestedOutputTensor { name: "text_output".to_owned(), ..Default::default() }];
    for (name, value) in [
        ("timeout", ParameterChoice::Int64Param(1000)),
        ("top_k", ParameterChoice::Uint64Param(3)),
        ("temperature", ParameterChoice::DoubleParam(0.5)),
        ("stop", ParameterChoice::StringParam("x".to_owned())),
        ("ignore_eos", ParameterChoice::BoolParam(true)),
    ] {
        let value = InferParameter { parameter_choice: Some(value) };
        parameters.parameters.insert(name.to_owned(), value);
    }
    let mut one = request(vec![text()]);
    let value = InferParameter { parameter_choice: Some(ParameterChoice::DoubleParam(f64::NAN)) };
    one.parameters.insert("temperature".to_owned(), value);
    [
        ("contents", contents),
        ("tokens", tokens),
        ("json", json),
        ("raw", raw),
        ("parameters", parameters),
        ("nan", one),
    ]
    .map(|(name, request)| (name.to_owned(), request.encode_to_vec()))
    .into()
}
