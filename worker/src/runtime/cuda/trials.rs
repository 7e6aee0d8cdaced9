//! Trials of products on the GPU at load: each way to make one is captured for many layers and timed by events. It is done
//! once, so a worker's choice holds for its life; another start, and another rank of a group, may choose otherwise.
//!
//! Ranks need not agree: each has shards of its own, what they tell each other is the same on all of them whoever computed
//! it, and all sample from the same logits.

use std::time::{Duration, Instant};

use inflight_kernels::cuda::{DeviceError, Half};

use super::catalog::Product;
use super::driver::{DeviceMemory, Driver, Event, Graph};
use super::gpu::{Gpu, Matmul, Memory};
use super::products::{Products, Way, rows_class};
use super::tuning::{Trials, Verdict, launches, tune};

/// The library's algorithms that are tried for a product, at most.
const ALGORITHMS_MAX: usize = 8;
/// How long a start may take for it.
const BUDGET: Duration = Duration::from_secs(4);
/// Numbers of the pattern that inputs are filled with.
const PATTERN: usize = 4 << 20;

/// What was found for a product of a number of rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuned {
    /// Rows.
    pub m: u32,
    /// Columns of the output.
    pub n: u32,
    /// What is summed over.
    pub k: u32,
    /// Ways that there were.
    pub ways: usize,
    /// Which was chosen; 0 is the library's first.
    pub way: usize,
    /// Whose it is: `cublaslt` or one of our own kernels.
    pub by: &'static str,
    /// It is one of our own.
    pub own: bool,
    /// Seconds that one takes, launched from a graph.
    pub seconds: f64,
    /// Seconds that the library's first takes; `None`: it can't make the product.
    pub first_seconds: Option<f64>,
}

/// Buffers that trials work on, freed when all is chosen: no larger than those that steps will have.
pub(super) struct Bench<'a> {
    driver: &'a Driver,
    products: &'a Products,
    half: Half,
    x: DeviceMemory,
    y: DeviceMemory,
}

impl<'a> Bench<'a> {
    /// Room for `rows` rows of the layers' products, and `samples` of the head. `None` where nobody but us makes products.
    pub(super) fn new(
        driver: &'a Driver,
        half: Half,
        catalog: &[Product],
        rows: u32,
        samples: u32,
    ) -> Result<Option<Self>, DeviceError> {
        let Some(products) = driver.library() else { return Ok(None) };
        let bytes = catalog.iter().map(|product| product.bytes(most(product, rows, samples).into()));
        let (x, y) = bytes.fold((0, 0), |most, bytes| (most.0.max(bytes.0), most.1.max(bytes.1)));
        let bench =
            Self { driver, products, half, x: driver.alloc(x as usize)?, y: driver.alloc(y as usize)? };
        bench.fill()?;
        Ok(Some(bench))
    }

    /// Numbers as random as activations are: a product of zeros takes less power, so it is faster than it should be.
    fn fill(&self) -> Result<(), DeviceError> {
        let mut word = 1u32;
        let pattern: Vec<u8> = std::iter::repeat_with(|| {
            word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            self.half.narrow((word >> 8) as f32 / (1 << 23) as f32 - 1.0).to_ne_bytes()
        })
        .take(PATTERN.min(self.x.bytes() / 2))
        .flatten()
        .collect();
        for at in (0..self.x.bytes()).step_by(pattern.len().max(1)) {
            let piece = pattern.len().min(self.x.bytes() - at);
            self.driver.upload(&self.x, at, &pattern[..piece])?;
        }
        self.driver.stream.wait()
    }

    fn matmul(&self, product: &Product, layer: usize, m: u32) -> Matmul {
        product.at(layer, m, self.x.address(), self.y.address())
    }

    /// Chooses the fastest way for each of the catalog's products of each of the agenda's numbers of rows, as long as there is
    /// time.
    pub(super) fn tune(
        &self,
        catalog: &[Product],
        agenda: &[u32],
        samples: u32,
    ) -> Result<Vec<Tuned>, DeviceError> {
        let rounds = agenda.iter().flat_map(|m| catalog.iter().map(move |product| (product, *m)));
        let rounds: Vec<_> = rounds.filter(|(product, m)| !product.wide || *m <= samples).collect();
        tracing::info!(
            products = rounds.len(),
            budget_seconds = BUDGET.as_secs(),
            "autotuning GEMM algorithms"
        );
        let mut trials = OnDevice {
            bench: self,
            rounds: &rounds,
            round: 0,
            ways: Vec::new(),
            graphs: Vec::new(),
            launches: 0,
            begin: Event::new(&self.driver.context)?,
            end: Event::new(&self.driver.context)?,
            begun: Instant::now(),
            tuned: Vec::new(),
        };
        tune(&mut trials, rounds.len(), BUDGET)?;
        let OnDevice { begun, tuned, .. } = trials;
        let (first, chosen) = both(&tuned);
        tracing::info!(
            timed = tuned.len(),
            untimed = rounds.len() - tuned.len(),
            replaced = tuned.iter().filter(|tuned| tuned.way > 0).count(),
            own = tuned.iter().filter(|tuned| tuned.own).count(),
            faster_percent = format!("{:.1}", 100.0 * (first / chosen.max(f64::MIN_POSITIVE) - 1.0).max(0.0)),
            seconds = format!("{:.1}", begun.elapsed().as_secs_f64()),
            "GEMM autotuning done"
        );
        Ok(tuned)
    }

    /// Plans and makes every product that steps of up to `rows` rows can ask for once, of the fewest and of the most rows
    /// of each class: the library then loads no kernel any more, for which there might be no memory left.
    pub(super) fn make_all(&self, catalog: &[Product], rows: u32, samples: u32) -> Result<(), DeviceError> {
        let (begun, mut made) = (Instant::now(), 0);
        for product in catalog {
            let (mut m, most) = (1, most(product, rows, samples));
            while m <= most {
                let last =
                    (m..=most).take_while(|rows| rows_class(*rows) == rows_class(m)).last().unwrap_or(m);
                for m in [m, last] {
                    // SAFETY: there is room for the most rows, and the weights are on the device.
                    unsafe { self.driver.matmul(self.half, &self.matmul(product, 0, m)) }?;
                }
                (m, made) = (last + 1, made + 1);
            }
        }
        self.driver.stream.wait()?;
        let seconds = format!("{:.1}", begun.elapsed().as_secs_f64());
        tracing::info!(products = made, seconds, "GEMM plans ready");
        Ok(())
    }
}

/// Most rows of a product.
fn most(product: &Product, rows: u32, samples: u32) -> u32 {
    if product.wide { samples } else { rows }
}

/// Seconds of one of each product, with the library's first algorithms and with those chosen.
fn both(tuned: &[Tuned]) -> (f64, f64) {
    let both = tuned.iter().filter_map(|tuned| Some((tuned.first_seconds?, tuned.seconds)));
    both.fold((0.0, 0.0), |sum, both| (sum.0 + both.0, sum.1 + both.1))
}

struct OnDevice<'a> {
    bench: &'a Bench<'a>,
    rounds: &'a [(&'a Product, u32)],
    /// Whose ways are timed.
    round: usize,
    ways: Vec<Way>,
    /// Of each way, once it was asked for.
    graphs: Vec<Option<Graph>>,
    launches: usize,
    begin: Event,
    end: Event,
    begun: Instant,
    tuned: Vec<Tuned>,
}

impl OnDevice<'_> {
    /// Makes a layer's product in one way; false if that can't.
    fn run(&self, way: Way, layer: usize) -> Result<bool, DeviceError> {
        let (product, m) = self.rounds[self.round];
        let Bench { driver, half, .. } = self.bench;
        // SAFETY: there is room for the most rows, and the weights are on the device.
        unsafe { driver.matmul_by(way, *half, &self.bench.matmul(product, layer, m)) }
    }

    /// Many of them as a graph, as steps launch them, so that the clock shows the device's time and not the host's.
    fn graph(&self, way: Way) -> Result<Option<Graph>, DeviceError> {
        let driver = self.bench.driver;
        // For real first: nothing may be loaded while work is captured, and who can't says so here.
        match self.run(way, 0) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => {
                tracing::debug!(%error, way = way.name(), "GEMM algorithm failed during autotuning");
                // Not of this way alone, if the device itself has failed.
                return driver.stream.wait().map(|()| None);
            }
        }
        driver.stream.wait()?;
        // Our own kernels overlap with themselves here, and in a step with the kernels of ours beside them: that comes close.
        let launch = || {
            (0..self.launches).try_for_each(|layer| match self.run(way, layer)? {
                true => Ok(()),
                // One that takes some layers only would look faster than it is.
                false => {
                    let (what, reason) = ("a product of another layer", "the way does not take it");
                    Err(DeviceError::Failed { what: what.to_owned(), reason: reason.to_owned() })
                }
            })
        };
        let graph = match driver.capture(launch) {
            Ok(graph) => graph,
            Err(error) => {
                tracing::debug!(%error, way = way.name(), "GEMM algorithm cannot be captured in a CUDA graph");
                return driver.stream.wait().map(|()| None);
            }
        };
        // Its first launch takes longer.
        driver.replay(&graph)?;
        Ok(Some(graph))
    }
}

impl Trials for OnDevice<'_> {
    type Error = DeviceError;

    fn ways(&mut self, round: usize) -> Result<usize, DeviceError> {
        let (product, m) = self.rounds[round];
        let Bench { products, half, .. } = self.bench;
        self.round = round;
        self.launches = launches(m, product.n, product.k, product.operands.len());
        self.ways = products.ways(*half, &self.bench.matmul(product, 0, m), ALGORITHMS_MAX)?;
        self.graphs = self.ways.iter().map(|_| None).collect();
        Ok(self.ways.len())
    }

    fn time(&mut self, way: usize) -> Result<Option<f64>, DeviceError> {
        if self.graphs[way].is_none() {
            self.graphs[way] = self.graph(self.ways[way])?;
        }
        let (Some(graph), driver) = (&self.graphs[way], self.bench.driver) else { return Ok(None) };
        self.begin.record(&driver.stream)?;
        driver.replay(graph)?;
        self.end.record(&driver.stream)?;
        self.end.wait()?;
        Ok(Some(f64::from(self.end.since(&self.begin)) / 1e3 / self.launches as f64))
    }

    fn settle(&mut self, verdict: Verdict) -> Result<(), DeviceError> {
        let (product, m) = self.rounds[self.round];
        let Bench { products, half, .. } = self.bench;
        let chosen = self.ways[verdict.way];
        // What failed here is not fallen back to.
        let first = verdict.first.filter(|_| verdict.way > 0).map(|_| self.ways[0]);
        products.settle(*half, &self.bench.matmul(product, 0, m), chosen, first)?;
        self.tuned.push(Tuned {
            m,
            n: product.n,
            k: product.k,
            ways: self.ways.len(),
            way: verdict.way,
            by: chosen.name(),
            own: matches!(chosen, Way::Own(_)),
            seconds: verdict.seconds,
            first_seconds: verdict.first,
        });
        Ok(())
    }

    fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}
