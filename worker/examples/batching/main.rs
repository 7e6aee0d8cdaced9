//! What batching is worth, measured on the real engine over the CPU runtime, on the real clock.
//!
//! ```text
//! cargo run --release -p inflight-worker --example batching -- continuous
//! cargo run --release -p inflight-worker --example batching -- storm
//! ```
//!
//! `continuous` serves one list of requests three times at the same cap: continuously, in static groups, and in static
//! groups whose finished members are computed as padding until the longest is done. `storm` measures the time
//! between tokens of steady streams: alone, beside long prompts in chunks under a step target, and beside long
//! prompts computed at once. What is compared comes from one run, its parts take turns, and figures are medians.
//!
//! | option | default | |
//! |---|---|---|
//! | `--model DIR` | the demo model | a Hugging Face directory |
//! | `--random WxL` | | a Llama of width W and L layers with random weights instead |
//! | `--context N` | storm: 4500 | serves so many positions whatever the model was trained for: the answers mean nothing, the work is the same |
//! | `--threads N` | all | threads of the kernels |
//! | `--runs N` | 3 | rounds |
//! | `--seed N` | 1 | of lengths and contents |
//! | `--sequences N` | 16, storm: 32 | the cap: sequences that run at once |
//! | `--batch-tokens N` | 2048, storm: 512 | tokens in an iteration |
//! | `--block-tokens N` | 16 | tokens in a KV block |
//! | `--requests N` | 480 | continuous: length of the list |
//! | `--clients N` | 3 × the cap | continuous: each sends its next request when the one before is done |
//! | `--streams N` | 8 | storm: steady streams |
//! | `--prompt N` | 4000 | storm: tokens of a long prompt |
//! | `--every S` | 3 | storm: seconds from one long prompt to the next |
//! | `--seconds S` | 15 | storm: length of each part |
//! | `--target-factor F` | 1.8 | storm: the step target, as a multiple of the 99th percentile of the time between tokens in the calm part before |

mod continuous;
mod driver;
mod model;
mod options;
mod stats;
mod storm;

use std::process::ExitCode;

use options::Options;

fn main() -> ExitCode {
    let outcome =
        Options::parse(std::env::args().skip(1)).and_then(|options| match options.scenario.as_str() {
            "continuous" => continuous::run(&options),
            "storm" => storm::run(&options),
            other => Err(format!("unknown scenario `{other}`; there are `continuous` and `storm`").into()),
        });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
