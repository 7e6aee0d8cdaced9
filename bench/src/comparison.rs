//! Measurement of several servers under the same load, in turns.

use std::sync::Arc;
use std::time::Duration;

use crate::client::{BenchClient, GenerationSettings};
use crate::error::{BenchError, ErrorKind};
use crate::load::{self, BenchRound, LoadPattern};
use crate::measure::{Meter, Quota, RoundMeasurements, Slo};
use crate::report::LoadPoint;
use crate::workload::{BenchWorkload, PromptKeys};

/// Servers under test and what all load points have in common.
#[derive(Debug)]
pub struct Comparison {
    /// Clients of the servers, probed.
    pub clients: Vec<Arc<BenchClient>>,
    /// Names of the servers in messages and reports.
    pub names: Vec<String>,
    /// Requests to send.
    pub workload: Arc<BenchWorkload>,
    /// Keys of the prompts.
    pub keys: PromptKeys,
    /// Sampling and stop settings.
    pub settings: GenerationSettings,
    /// Timeout of a request.
    pub timeout: Duration,
    /// Objectives that define goodput.
    pub slo: Slo,
    /// Number of rounds.
    pub rounds: u32,
}

/// Load pattern with the numbers of its requests.
#[derive(Debug, Clone, Copy)]
pub struct PlannedLoad {
    /// Load pattern.
    pub load: LoadPattern,
    /// Warm-up requests of a round.
    pub warmup: u64,
    /// Measured requests of a round.
    pub quota: Quota,
}

impl Comparison {
    /// Runs the rounds of load point `index`. Each round visits every server, starting with another one.
    /// `watch` is called with a round's title and meter; what it returns is dropped at the end of the round.
    ///
    /// # Errors
    /// Too many consecutive requests failed, or none was measured.
    pub async fn point<Watch>(
        &self,
        index: u64,
        planned: PlannedLoad,
        watch: impl Fn(String, Meter) -> Watch,
    ) -> Result<LoadPoint, BenchError> {
        let PlannedLoad { load, warmup, quota } = planned;
        let servers = self.clients.len();
        let mut rounds: Vec<Vec<RoundMeasurements>> = vec![Vec::new(); servers];
        for round in 0..self.rounds {
            for offset in 0..servers {
                let server = (offset + round as usize) % servers;
                let meter = Meter::new(warmup, quota, self.slo, self.workload.tenants.len());
                let bench_round = BenchRound {
                    client: Arc::clone(&self.clients[server]),
                    workload: Arc::clone(&self.workload),
                    // The same prompts for all servers, different ones in each round.
                    key: self.keys.key(index, round),
                    settings: self.settings,
                    timeout: self.timeout,
                    meter: meter.clone(),
                };
                let name = &self.names[server];
                let title = format!("{name}: {}, round {} of {}", load.short(), round + 1, self.rounds);
                let watch = watch(title, meter);
                let measured = load::run(Arc::new(bench_round), load, quota).await;
                drop(watch);
                let measured = measured.map_err(|failure| failure.at(name))?;
                if measured.started == 0 {
                    let message = "no request counted: the trace has no more than the requests to warm up";
                    return Err(BenchError::new(ErrorKind::Usage, message));
                }
                rounds[server].push(measured);
            }
        }
        Ok(LoadPoint { load, rounds })
    }
}
