//! Weight files that change while a worker loads them, or afterwards. The changes are made by the callback that
//! reports progress, at a given point of loading.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use inflight_contract::SamplingParams;
use inflight_fixtures::{Arch, Checkpoint, Dtype, Family, TempDir};
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{Batch, Runtime, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime, Error};

const OPTIONS: CpuOptions = CpuOptions {
    threads: Some(2),
    kv_bytes: 1 << 20,
    host_bytes: 0,
    block_tokens: 16,
    slots: 1,
    batch_tokens: 64,
    context_tokens: None,
    isa: None,
    quantize: None,
    kv_dtype: None,
    tensor_parallel: 1,
    mtp: false,
};

/// Model in a directory or in a GGUF file, and its weight file.
struct Model {
    _folder: TempDir,
    path: PathBuf,
    weights: PathBuf,
}

impl Model {
    fn new(gguf: bool) -> Self {
        let checkpoint = Checkpoint::new(Arch::Llama2, Dtype::Bf16);
        let folder = TempDir::new("inflight-changed").unwrap();
        let path = folder.path().to_owned();
        if !gguf {
            checkpoint.write(&path).unwrap();
            return Self { weights: path.join("model.safetensors"), path, _folder: folder };
        }
        fs::write(path.join("tokenizer.json"), Family::Llama3.tokenizer_json()).unwrap();
        let file = path.join("tiny.gguf");
        fs::write(&file, checkpoint.gguf().unwrap()).unwrap();
        Self { path: file.clone(), weights: file, _folder: folder }
    }

    fn load(
        &self,
        tensor_parallel: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<CpuRuntime, Error> {
        let model = ModelDir::open(&ModelSource::Directory(self.path.clone()))?;
        CpuRuntime::load(&model, &CpuOptions { tensor_parallel, ..OPTIONS }, progress)
    }
}

/// Change of a weight file.
type Change = fn(&Path);

/// Overwrites the second half of the file in place.
fn overwrite(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let half = bytes.len() / 2;
    bytes[half..].iter_mut().for_each(|byte| *byte ^= 1);
    // Not `fs::write`, which truncates first: another rank would see that.
    File::options().write(true).open(file).unwrap().write_all_at(&bytes, 0).unwrap();
    // As a later write would have left it, without waiting for the clock of the file system.
    let later = SystemTime::now() + Duration::from_secs(60);
    File::options().write(true).open(file).unwrap().set_modified(later).unwrap();
}

fn truncate(file: &Path) {
    File::options().write(true).open(file).unwrap().set_len(1000).unwrap();
}

fn append(file: &Path) {
    let bytes = fs::metadata(file).unwrap().len();
    File::options().write(true).open(file).unwrap().set_len(bytes + 1).unwrap();
}

/// Logits after a fixed prompt.
fn logits(runtime: &mut CpuRuntime) -> Vec<u32> {
    let setup = SlotSetup {
        sampling: Arc::new(SamplingParams::greedy()),
        choice: 0,
        prompt: &[],
        generated: &[],
        eos_token_ids: &[],
    };
    runtime.attach(0, &setup).unwrap();
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    batch.clear();
    batch.push_sequence(&(5..35).collect::<Vec<u32>>(), 0, &[0, 1]);
    batch.sample_last_row(0);
    runtime.execute(&mut batch, &mut sampled).unwrap();
    runtime.detach(0);
    runtime.logits().iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn a_weight_file_that_changes_while_it_is_loaded_is_rejected_with_the_change() {
    const SIZE: &str = "its size went from";
    let changes: [(Change, &str); 3] = [(overwrite, "it was written to"), (truncate, SIZE), (append, SIZE)];
    for gguf in [false, true] {
        for ranks in [1, 2] {
            for (change, clue) in &changes {
                // Before the first matrix is read, between two matrices, and after the last.
                for point in [0, 1, 2] {
                    let model = Model::new(gguf);
                    let once = AtomicBool::new(true);
                    let hook = |done: u64, total: u64| {
                        let reached = [done == 0, done > 0, done == total][point];
                        if reached && once.swap(false, Ordering::Relaxed) {
                            change(&model.weights);
                        }
                    };
                    let case = format!("gguf {gguf}, {ranks} ranks, {clue}, point {point}");
                    match model.load(ranks, &hook) {
                        Ok(_) => panic!("{case}: it was loaded"),
                        Err(Error::Model(error)) => {
                            let message = error.to_string();
                            // A rank may read what another one has read before the change.
                            let twice = ranks > 1 && message.contains("differ between two reads");
                            for clue in [
                                if twice { "tensor model." } else { clue },
                                "changed while the model was loaded",
                                "renaming",
                            ] {
                                assert!(message.contains(clue), "{case}: {message}");
                            }
                            assert!(message.contains(&model.weights.display().to_string()), "{message}");
                        }
                        Err(other) => panic!("{case}: {other}"),
                    }
                }
            }
        }
    }
}

#[test]
fn a_loaded_model_does_not_depend_on_its_files() {
    for gguf in [false, true] {
        for ranks in [1, 2] {
            let model = Model::new(gguf);
            let mut runtime = model.load(ranks, &|_, _| {}).unwrap();
            let before = logits(&mut runtime);
            overwrite(&model.weights);
            assert_eq!(logits(&mut runtime), before);
            truncate(&model.weights);
            assert_eq!(logits(&mut runtime), before);
        }
    }
}
