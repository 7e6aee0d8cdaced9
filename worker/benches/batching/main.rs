//! Benchmark of batching policies on the engine with the CPU runtime, in real time.
//!
//! ```text
//! cargo bench -p inflight-worker --bench batching -- continuous
//! cargo bench -p inflight-worker --bench batching -- drafts --random 1024x16
//! cargo bench -p inflight-worker --bench batching -- storm
//! cargo bench -p inflight-worker --bench batching -- structured --random 1024x16 --vocab 131072
//! ```
//!
//! `continuous` serves one list of requests three times with the same number of slots: with continuous
//! batching, with static batching, and with static batching whose finished sequences are computed as padding
//! until the longest is done. `storm` measures the inter-token latency of steady streams: alone, beside long
//! prompts with chunked prefill under a step target, and beside long prompts without chunking. `drafts` compares
//! drafts by prompt lookup with none, where the output repeats itself and where it does not. `structured` compares
//! masks with none, and tokens forced by a grammar as drafts with none. Compared
//! variants alternate within one run; results are medians.
//!
//! | option | default | |
//! |---|---|---|
//! | `--model DIR` | the demo model | a Hugging Face directory |
//! | `--random WxL` | | a Llama of width W and L layers with random weights instead |
//! | `--vocab N` | 2048 | tokens of the vocabulary of `--random` |
//! | `--context N` | storm: 4500 | overrides the model's context length; output is then meaningless, the work realistic |
//! | `--threads N` | all | threads of the kernels |
//! | `--runs N` | 3, drafts, structured: 10 | rounds |
//! | `--seed N` | 1 | seed of lengths and contents |
//! | `--sequences N` | 16, storm: 32 | slots |
//! | `--batch-tokens N` | 2048, storm: 512 | token budget of an iteration |
//! | `--block-tokens N` | 16 | tokens per KV block |
//! | `--requests N` | 480 | continuous: length of the list |
//! | `--clients N` | 3 × slots | continuous: closed-loop clients |
//! | `--streams N` | 8 | storm: steady streams |
//! | `--prompt N` | 4000 | storm: tokens of a long prompt |
//! | `--every S` | 3 | storm: seconds between long prompts |
//! | `--seconds S` | 15 | storm: duration of each phase |
//! | `--output N` | 200, structured: 100 | drafts, structured: tokens of each stream |
//! | `--drafts-max N` | 8 | drafts, structured: maximum drafts of a stream and iteration |
//! | `--only TEXT` | | structured: workloads whose name contains it |
//! | `--target-factor F` | 1.8 | storm: step target as a multiple of the P99 inter-token latency of the calm phase before |

mod continuous;
mod drafts;
mod engine_driver;
mod model;
mod options;
mod stats;
mod storm;
mod structured;

use std::process::ExitCode;

use options::Options;

fn main() -> ExitCode {
    let outcome =
        // `cargo bench` appends `--bench`.
        Options::parse(std::env::args().skip(1).filter(|argument| argument != "--bench")).and_then(|options| match options.scenario.as_str() {
            "continuous" => continuous::run(&options),
            "drafts" => drafts::run(&options),
            "storm" => storm::run(&options),
            "structured" => structured::run(&options),
            other => Err(format!("unknown scenario `{other}`; there are `continuous`, `drafts`, `storm` and `structured`").into()),
        });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
