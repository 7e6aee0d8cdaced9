//! GEMM autotuning at load: each candidate algorithm is captured for several layers and timed by CUDA events.
//! Choices are kept in a cache directory, so that the next start with the same GPU and libraries has them at once and
//! computes the same bits. Without one, another start may choose differently, as may another rank of a group.
//!
//! Ranks need not agree: each computes its own shard, collectives give all ranks the same bits, and all
//! sample from the same logits.

use std::time::{Duration, Instant};

use inflight_kernels::cuda::{DeviceError, HalfDtype};

use super::algorithm_search::{GemmTimer, Selection, launches_per_timing, tune_all};
use super::cublaslt::{CublasLt, CublasLtAlgorithm, plan_rows};
use super::device_memory::{DeviceMemory, PinnedMemory};
use super::driver::{CudaDevice, CudaGraph};
use super::gemm::{GemmAlgorithm, GemmKernel};
use super::gemm_cache::{CachedAlgorithm, CachedChoice, GemmCache, TunedShape};
use super::gpu::{Gpu, GpuMemory, Matmul};
use super::model_gemms::ModelGemm;
use super::stream::CudaEvent;

/// Maximum number of cuBLASLt algorithms timed per GEMM.
const ALGORITHMS_MAX: usize = 8;
/// Time limit of autotuning per start, without a cache directory and with one, where it is spent once.
const BUDGET: Duration = Duration::from_secs(4);
const CACHED_BUDGET: Duration = Duration::from_secs(20);
/// Rows at either end of a GEMM's output that a chosen algorithm is checked by, and the largest difference from the built-in kernel's as a
/// part of the largest element: the rounding of 16-bit outputs and other orders of sums are below it.
const CHECKED_ROWS: u32 = 32;
const DIFFERENCE_MAX: f32 = 0.02;
/// Elements of the random pattern that inputs are filled with.
const PATTERN: usize = 4 << 20;

/// Autotuning result of a GEMM shape.
#[derive(Debug, Clone, PartialEq)]
pub struct GemmTuning {
    /// Rows.
    pub m: u32,
    /// Output columns.
    pub n: u32,
    /// Reduction dimension.
    pub k: u32,
    /// Number of candidate algorithms.
    pub ways: usize,
    /// Index of the chosen algorithm; 0 is the heuristic's first.
    pub way: usize,
    /// Implementation of the chosen algorithm: `cublaslt` or a built-in kernel's name.
    pub by: &'static str,
    /// Whether the chosen algorithm is a built-in kernel.
    pub own: bool,
    /// Whether the built-in kernel is used since the chosen algorithm computes something else; times are that algorithm's.
    pub rejected: bool,
    /// Seconds per GEMM with the chosen algorithm, launched from a graph.
    pub seconds: f64,
    /// Seconds per GEMM with the heuristic's first algorithm; `None`: it rejects the shape.
    pub first_seconds: Option<f64>,
}

/// Input and output buffers for timing, freed after autotuning; no larger than those of steps.
pub(super) struct GemmBench<'a> {
    device: &'a CudaDevice,
    cublaslt: &'a CublasLt,
    half: HalfDtype,
    x: DeviceMemory,
    y: DeviceMemory,
}

impl<'a> GemmBench<'a> {
    /// Allocates buffers for `rows` rows of the layers' GEMMs and `samples` rows of the head. `None` without
    /// cuBLASLt.
    pub(super) fn new(
        device: &'a CudaDevice,
        half: HalfDtype,
        gemms: &[ModelGemm],
        rows: u32,
        samples: u32,
    ) -> Result<Option<Self>, DeviceError> {
        let Some(cublaslt) = device.cublaslt() else { return Ok(None) };
        let bytes = gemms.iter().map(|gemm| gemm.bytes(max_rows(gemm, rows, samples).into()));
        let (x, y) = bytes.fold((0, 0), |max, bytes| (max.0.max(bytes.0), max.1.max(bytes.1)));
        let bench =
            Self { device, cublaslt, half, x: device.alloc(x as usize)?, y: device.alloc(y as usize)? };
        bench.fill()?;
        Ok(Some(bench))
    }

    /// Fills the input with random values: zeros draw less power and so run faster than real activations.
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
            let chunk = pattern.len().min(self.x.bytes() - at);
            self.device.upload(&self.x, at, &pattern[..chunk])?;
        }
        self.device.stream.synchronize()
    }

    fn matmul(&self, gemm: &ModelGemm, layer: usize, m: u32) -> Matmul {
        gemm.of_layer(layer, m, self.x.address(), self.y.address())
    }

    /// Selects the fastest algorithm for each GEMM and row count, within the time limit.
    pub(super) fn tune(
        &self,
        gemms: &[ModelGemm],
        row_counts: &[u32],
        samples: u32,
        mut cache: GemmCache,
    ) -> Result<Vec<GemmTuning>, DeviceError> {
        let shapes = row_counts.iter().flat_map(|m| gemms.iter().map(move |gemm| (gemm, *m)));
        let shapes = shapes.filter(|(gemm, m)| !gemm.f32_out || *m <= samples);
        let (mut tuned, mut left, mut seen) = (Vec::new(), Vec::new(), Vec::new());
        for (gemm, m) in shapes {
            // GEMMs of one shape share a plan.
            let shape = self.tuned_shape(gemm, m);
            if seen.contains(&shape) {
                continue;
            }
            seen.push(shape);
            let cached = cache.get(&shape);
            match cached.map(|choice| self.apply_cached(gemm, m, &choice)).transpose()?.flatten() {
                Some(tuning) => tuned.push(tuning),
                None => left.push((gemm, m)),
            }
        }
        let shapes = left;
        let budget = if cache.is_kept() { CACHED_BUDGET } else { BUDGET };
        if shapes.is_empty() {
            tracing::info!(cached = tuned.len(), "GEMM algorithms are those of an earlier start");
            return Ok(tuned);
        }
        tracing::info!(
            gemms = shapes.len(),
            cached = tuned.len(),
            budget_seconds = budget.as_secs(),
            "autotuning GEMM algorithms"
        );
        let mut timer = GpuTimer {
            bench: self,
            shapes: &shapes,
            shape: 0,
            candidates: Vec::new(),
            graphs: Vec::new(),
            launches: 0,
            begin: CudaEvent::new(&self.device.context)?,
            end: CudaEvent::new(&self.device.context)?,
            begun: Instant::now(),
            cache: &mut cache,
            tuned: Vec::new(),
        };
        tune_all(&mut timer, shapes.len(), budget)?;
        let GpuTimer { begun, tuned: timed, .. } = timer;
        cache.save();
        let (first, chosen) = total_seconds(&timed);
        tracing::info!(
            timed = timed.len(),
            untimed = shapes.len() - timed.len(),
            cached = tuned.len(),
            replaced = timed.iter().filter(|tuned| tuned.way > 0).count(),
            built_in = timed.iter().filter(|tuned| tuned.own).count(),
            faster_percent = format!("{:.1}", 100.0 * (first / chosen.max(f64::MIN_POSITIVE) - 1.0).max(0.0)),
            seconds = format!("{:.1}", begun.elapsed().as_secs_f64()),
            "GEMM autotuning done"
        );
        tuned.extend(timed);
        Ok(tuned)
    }

    /// Returns an algorithm if the first and the last rows of its GEMM are about what the built-in kernel computes, else that kernel and
    /// true.
    fn checked(
        &self,
        algorithm: GemmAlgorithm,
        matmul: &Matmul,
    ) -> Result<(GemmAlgorithm, bool), DeviceError> {
        let built_in = GemmAlgorithm::BuiltIn(GemmKernel::Tiled);
        let run = |algorithm, matmul: &Matmul, first: u32, count: u32| -> Result<Vec<f32>, DeviceError> {
            // NaN: what another algorithm has written must not pass for this one's.
            self.device.fill(&self.y, 0xff)?;
            // SAFETY: the buffers have room for the maximum rows, and the weights are on the device.
            match unsafe { self.device.matmul_with(algorithm, self.half, matmul) }? {
                true => self.output_rows(matmul, first, count),
                false => Ok(Vec::new()),
            }
        };
        let count = CHECKED_ROWS.min(matmul.m);
        let ends = [0, matmul.m - count];
        for first in &ends[..if count < matmul.m { 2 } else { 1 }] {
            let first = *first;
            let part =
                Matmul { x: matmul.x + u64::from(first) * u64::from(matmul.k) * 2, m: count, ..*matmul };
            let (found, expected) = (run(algorithm, matmul, first, count)?, run(built_in, &part, 0, count)?);
            if !agree(&found, &expected) {
                let Matmul { m, n, k, .. } = *matmul;
                let algorithm = algorithm.name();
                tracing::error!(
                    m,
                    n,
                    k,
                    algorithm,
                    "a GEMM algorithm computes something else than the built-in kernel, which is used in its place"
                );
                return Ok((built_in, true));
            }
        }
        Ok((algorithm, false))
    }

    /// Returns `count` rows of the output from the `first` on.
    fn output_rows(&self, matmul: &Matmul, first: u32, count: u32) -> Result<Vec<f32>, DeviceError> {
        let size = if matmul.f32_out { 4 } else { 2 };
        let stride = matmul.stride as usize;
        // The last row may end with the buffer.
        let elements = (count as usize - 1) * stride + matmul.n as usize;
        let pinned = PinnedMemory::new(&self.device.context, elements * size)?;
        let from = matmul.y + (first as usize * stride * size) as u64;
        let stream = &self.device.stream;
        // SAFETY: the rows are within the output buffer, and `pinned` is read once the stream was synchronized.
        unsafe { stream.copy_to_host(pinned.as_ptr(), from, elements * size) }?;
        stream.synchronize()?;
        // SAFETY: no copy is in flight.
        let bytes = unsafe { pinned.as_slice() };
        let element = |bytes: &[u8]| match *bytes {
            [a, b, c, d] => f32::from_ne_bytes([a, b, c, d]),
            [a, b] => self.half.widen(u16::from_ne_bytes([a, b])),
            _ => f32::NAN,
        };
        let all: Vec<f32> = bytes[..elements * size].chunks_exact(size).map(element).collect();
        Ok(all.chunks(stride).flat_map(|row| &row[..matmul.n as usize]).copied().collect())
    }

    fn tuned_shape(&self, gemm: &ModelGemm, m: u32) -> TunedShape {
        let ModelGemm { n, k, stride, f32_out, .. } = *gemm;
        TunedShape { m, n, k, stride, f32_out, bias: gemm.operands[0].bias.is_some() }
    }

    /// Uses the choice of an earlier start; `None` if the algorithm does not run.
    fn apply_cached(
        &self,
        gemm: &ModelGemm,
        m: u32,
        choice: &CachedChoice,
    ) -> Result<Option<GemmTuning>, DeviceError> {
        let matmul = self.matmul(gemm, 0, m);
        let algorithm = match choice.algorithm {
            CachedAlgorithm::CublasLt(data) => GemmAlgorithm::CublasLt(CublasLtAlgorithm::from_data(data)),
            CachedAlgorithm::Tiled => GemmAlgorithm::BuiltIn(GemmKernel::Tiled),
            CachedAlgorithm::Skinny => GemmAlgorithm::BuiltIn(GemmKernel::Skinny),
        };
        if let GemmAlgorithm::BuiltIn(kernel) = algorithm
            && !kernel.supports(&matmul)
        {
            return Ok(None);
        }
        // SAFETY: the buffers have room for the maximum rows, and the weights are on the device.
        let ran = unsafe { self.device.matmul_with(algorithm, self.half, &matmul) };
        if !matches!(ran, Ok(true)) {
            tracing::warn!(m, n = gemm.n, k = gemm.k, "a cached GEMM choice does not run; timing it anew");
            // An error here means that the device itself has failed.
            return self.device.stream.synchronize().map(|()| None);
        }
        let (algorithm, rejected) = self.checked(algorithm, &matmul)?;
        let first = self.cublaslt.candidates(self.half, &matmul, 1)?.into_iter().next();
        let fallback = first.filter(|_| choice.way > 0 && choice.first_seconds.is_some());
        self.cublaslt.set_algorithm(self.half, &matmul, algorithm, fallback)?;
        Ok(Some(GemmTuning {
            m,
            n: gemm.n,
            k: gemm.k,
            ways: choice.ways,
            way: choice.way,
            by: algorithm.name(),
            own: matches!(algorithm, GemmAlgorithm::BuiltIn(_)),
            rejected,
            seconds: choice.seconds,
            first_seconds: choice.first_seconds,
        }))
    }

    /// Runs every GEMM that steps of up to `rows` rows can need once, with the fewest and the most rows of
    /// each class: cuBLASLt then loads no kernels later, for which memory might be missing.
    pub(super) fn run_all(&self, gemms: &[ModelGemm], rows: u32, samples: u32) -> Result<(), DeviceError> {
        let (begun, mut plans) = (Instant::now(), 0);
        for gemm in gemms {
            let (mut m, max) = (1, max_rows(gemm, rows, samples));
            while m <= max {
                let last = (m..=max).take_while(|rows| plan_rows(*rows) == plan_rows(m)).last().unwrap_or(m);
                for m in [m, last] {
                    // SAFETY: the buffers have room for the maximum rows, and the weights are on the device.
                    unsafe { self.device.matmul(self.half, &self.matmul(gemm, 0, m)) }?;
                }
                (m, plans) = (last + 1, plans + 1);
            }
        }
        self.device.stream.synchronize()?;
        let seconds = format!("{:.1}", begun.elapsed().as_secs_f64());
        tracing::info!(plans, seconds, "GEMM plans ready");
        Ok(())
    }
}

/// Whether two outputs are equal but for rounding; not if one is not finite.
fn agree(found: &[f32], expected: &[f32]) -> bool {
    let scale = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    found.len() == expected.len()
        && found
            .iter()
            .zip(expected)
            .all(|(found, expected)| (found - expected).abs() <= DIFFERENCE_MAX * scale)
}

/// Returns the maximum rows of a GEMM.
fn max_rows(gemm: &ModelGemm, rows: u32, samples: u32) -> u32 {
    if gemm.f32_out { samples } else { rows }
}

/// Sums the seconds of all GEMMs, with the heuristic's first algorithms and with the chosen ones.
fn total_seconds(tuned: &[GemmTuning]) -> (f64, f64) {
    let seconds = tuned.iter().filter_map(|tuned| Some((tuned.first_seconds?, tuned.seconds)));
    seconds.fold((0.0, 0.0), |sum, seconds| (sum.0 + seconds.0, sum.1 + seconds.1))
}

/// Times candidate algorithms on the GPU.
struct GpuTimer<'a> {
    bench: &'a GemmBench<'a>,
    /// GEMMs with their row counts.
    shapes: &'a [(&'a ModelGemm, u32)],
    /// Index of the GEMM shape being timed.
    shape: usize,
    candidates: Vec<GemmAlgorithm>,
    /// Captured graphs by algorithm, created on first use.
    graphs: Vec<Option<CudaGraph>>,
    launches: usize,
    begin: CudaEvent,
    end: CudaEvent,
    begun: Instant,
    cache: &'a mut GemmCache,
    tuned: Vec<GemmTuning>,
}

impl GpuTimer<'_> {
    /// Enqueues a layer's GEMM with one algorithm; false if it rejects the shape.
    fn run(&self, algorithm: GemmAlgorithm, layer: usize) -> Result<bool, DeviceError> {
        let (gemm, m) = self.shapes[self.shape];
        let GemmBench { device, half, .. } = self.bench;
        // SAFETY: the buffers have room for the maximum rows, and the weights are on the device.
        unsafe { device.matmul_with(algorithm, *half, &self.bench.matmul(gemm, layer, m)) }
    }

    /// Captures several launches into a graph, as steps launch them, so that timing excludes host overhead.
    fn graph(&self, algorithm: GemmAlgorithm) -> Result<Option<CudaGraph>, DeviceError> {
        let device = self.bench.device;
        // Run outside capture first: nothing may be loaded while capturing, and rejections show here.
        match self.run(algorithm, 0) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => {
                tracing::debug!(%error, algorithm = algorithm.name(), "GEMM algorithm failed during autotuning");
                // An error here means that the device itself has failed.
                return device.stream.synchronize().map(|()| None);
            }
        }
        device.stream.synchronize()?;
        // Built-in kernels overlap with themselves here and with other built-in kernels in a step, which is
        // close.
        let launch = || {
            (0..self.launches).try_for_each(|layer| match self.run(algorithm, layer)? {
                true => Ok(()),
                // An algorithm that skips layers would look faster than it is.
                false => {
                    let (what, reason) = ("timing a GEMM algorithm", "it rejects another layer's GEMM");
                    Err(DeviceError::Failed { what: what.to_owned(), reason: reason.to_owned() })
                }
            })
        };
        let graph = match device.capture(launch) {
            Ok(graph) => graph,
            Err(error) => {
                tracing::debug!(%error, algorithm = algorithm.name(), "GEMM algorithm cannot be captured in a CUDA graph");
                return device.stream.synchronize().map(|()| None);
            }
        };
        // A graph's first launch takes longer.
        device.replay(&graph)?;
        Ok(Some(graph))
    }
}

impl GemmTimer for GpuTimer<'_> {
    type Error = DeviceError;

    fn select_shape(&mut self, shape: usize) -> Result<usize, DeviceError> {
        let (gemm, m) = self.shapes[shape];
        let GemmBench { cublaslt, half, .. } = self.bench;
        self.shape = shape;
        self.launches = launches_per_timing(m, gemm.n, gemm.k, gemm.operands.len());
        self.candidates = cublaslt.candidates(*half, &self.bench.matmul(gemm, 0, m), ALGORITHMS_MAX)?;
        self.graphs = self.candidates.iter().map(|_| None).collect();
        Ok(self.candidates.len())
    }

    fn time(&mut self, algorithm: usize) -> Result<Option<f64>, DeviceError> {
        if self.graphs[algorithm].is_none() {
            self.graphs[algorithm] = self.graph(self.candidates[algorithm])?;
        }
        let (Some(graph), device) = (&self.graphs[algorithm], self.bench.device) else { return Ok(None) };
        self.begin.record(&device.stream)?;
        device.replay(graph)?;
        self.end.record(&device.stream)?;
        self.end.synchronize()?;
        Ok(Some(f64::from(self.end.milliseconds_since(&self.begin)) / 1e3 / self.launches as f64))
    }

    fn apply(&mut self, selection: Selection) -> Result<(), DeviceError> {
        let (gemm, m) = self.shapes[self.shape];
        let GemmBench { cublaslt, half, .. } = self.bench;
        let (chosen, rejected) =
            self.bench.checked(self.candidates[selection.algorithm], &self.bench.matmul(gemm, 0, m))?;
        // An algorithm that failed here is no fallback.
        let fallback = selection.first.filter(|_| selection.algorithm > 0).map(|_| self.candidates[0]);
        cublaslt.set_algorithm(*half, &self.bench.matmul(gemm, 0, m), chosen, fallback)?;
        self.cache.put(CachedChoice {
            shape: self.bench.tuned_shape(gemm, m),
            algorithm: match chosen {
                GemmAlgorithm::CublasLt(algorithm) => CachedAlgorithm::CublasLt(algorithm.data()),
                GemmAlgorithm::BuiltIn(GemmKernel::Tiled) => CachedAlgorithm::Tiled,
                GemmAlgorithm::BuiltIn(GemmKernel::Skinny) => CachedAlgorithm::Skinny,
            },
            ways: self.candidates.len(),
            way: selection.algorithm,
            seconds: selection.seconds,
            first_seconds: selection.first,
        });
        self.tuned.push(GemmTuning {
            m,
            n: gemm.n,
            k: gemm.k,
            ways: self.candidates.len(),
            way: selection.algorithm,
            by: chosen.name(),
            own: matches!(chosen, GemmAlgorithm::BuiltIn(_)),
            rejected,
            seconds: selection.seconds,
            first_seconds: selection.first,
        });
        Ok(())
    }

    fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_agree_within_rounding_and_not_with_nan_or_other_lengths() {
        let expected = [1.0, -100.0, 0.0];
        assert!(agree(&[1.5, -99.0, -1.0], &expected));
        assert!(!agree(&[1.0, -100.0, 2.5], &expected));
        assert!(!agree(&[1.0, f32::NAN, 0.0], &expected));
        assert!(!agree(&[f32::NAN; 3], &[f32::NAN; 3]));
        assert!(!agree(&[], &expected));
    }
}
