//! What KServe's and Triton's clients ask of models: versions, tensors, configuration, statistics and the list of those served.

use std::time::Duration;

use inflight_proto::kserve::model_metadata_response::TensorMetadata;
use inflight_proto::kserve::repository_index_response::ModelIndex;
use inflight_proto::kserve::{
    DataType, InferStatistics, ModelConfig, ModelInput, ModelMetadataResponse, ModelOutput, ModelStatistics,
    ModelTransactionPolicy, StatisticDuration,
};

use super::tensors;
use crate::dispatcher::ServedModel;
use crate::dispatcher::model_counters::{ModelCounters, TimeSum};
use crate::outcome::Outcome;

/// The only version of a model.
pub(super) const VERSION: &str = "1";
/// Outputs of a model.
const OUTPUTS: [(&str, &str); 1] = [("text_output", "BYTES")];

/// Whether a model has a version; empty is the only one.
pub(super) fn has_version(version: &str) -> bool {
    version.is_empty() || version == VERSION
}

/// Checks the version of a model.
///
/// # Errors
/// [`Outcome::UnknownVersion`].
pub(super) fn check_version(model: &str, version: &str) -> Result<(), Outcome> {
    if has_version(version) {
        return Ok(());
    }
    Err(Outcome::UnknownVersion { model: model.to_owned(), version: version.to_owned(), served: VERSION })
}

/// Returns the tensors of a model.
pub(super) fn metadata(served: ServedModel) -> ModelMetadataResponse {
    let tensor = |(name, datatype): (&str, &str)| TensorMetadata {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: vec![-1],
    };
    ModelMetadataResponse {
        name: served.name,
        versions: vec![VERSION.to_owned()],
        platform: served.architecture,
        inputs: tensors::inputs().map(tensor).collect(),
        outputs: OUTPUTS.into_iter().map(tensor).collect(),
    }
}

/// Returns the configuration of a model.
pub(super) fn config(served: ServedModel) -> ModelConfig {
    let input = |(name, datatype): (&str, &str)| ModelInput {
        name: name.to_owned(),
        data_type: data_type(datatype).into(),
        dims: vec![-1],
        // Either the text or the ids are given.
        optional: true,
    };
    let output = |(name, datatype): (&str, &str)| ModelOutput {
        name: name.to_owned(),
        data_type: data_type(datatype).into(),
        dims: vec![-1],
    };
    ModelConfig {
        name: served.name,
        platform: served.architecture,
        max_batch_size: 0,
        input: tensors::inputs().map(input).collect(),
        output: OUTPUTS.into_iter().map(output).collect(),
        backend: "inflight".to_owned(),
        model_transaction_policy: Some(ModelTransactionPolicy { decoupled: true }),
    }
}

fn data_type(datatype: &str) -> DataType {
    match datatype {
        "BOOL" => DataType::TypeBool,
        "BYTES" => DataType::TypeString,
        "FP32" => DataType::TypeFp32,
        "INT32" => DataType::TypeInt32,
        "INT64" => DataType::TypeInt64,
        "UINT64" => DataType::TypeUint64,
        _ => DataType::TypeInvalid,
    }
}

/// Returns the statistics of a model.
pub(super) fn statistics(name: String, counters: &ModelCounters) -> ModelStatistics {
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let sum = |times: TimeSum| Some(StatisticDuration { count: times.count, ns: nanoseconds(times.sum) });
    ModelStatistics {
        name,
        version: VERSION.to_owned(),
        last_inference: u64::try_from(counters.last_arrived.as_millis()).unwrap_or(u64::MAX),
        inference_count: counters.completed.count,
        execution_count: 0,
        inference_stats: Some(InferStatistics {
            success: sum(counters.completed),
            fail: sum(counters.failed),
            queue: sum(counters.queued),
            compute_input: Some(StatisticDuration::default()),
            compute_infer: sum(counters.computed),
            compute_output: Some(StatisticDuration::default()),
        }),
    }
}

/// Returns the entry of a served model in the list of models.
pub(super) fn index(served: ServedModel) -> ModelIndex {
    let reason = String::new();
    ModelIndex { name: served.name, version: VERSION.to_owned(), state: "READY".to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tensor_has_a_type_in_the_configuration() {
        for (name, datatype) in tensors::inputs().chain(OUTPUTS) {
            assert_ne!(data_type(datatype), DataType::TypeInvalid, "{name} {datatype}");
        }
    }

    #[test]
    fn a_model_has_one_version() {
        assert_eq!((check_version("m", ""), check_version("m", "1")), (Ok(()), Ok(())));
        for version in ["0", "2", "01", "latest"] {
            let refused = check_version("m", version).unwrap_err().message();
            assert_eq!(refused, format!("the model \"m\" has no version {version:?}; its only version is 1"));
        }
    }
}
