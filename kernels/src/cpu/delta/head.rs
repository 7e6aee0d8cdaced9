//! The delta rule of a value head, for all rows of a sequence.

use std::cell::Cell as Slot;

use super::super::rows::{GateFn as _, Silu, rms_scale};
use super::super::simd::{self, Kernel, Simd};
use super::job::{CELL, DeltaJob, DeltaSequence, DeltaShape, HEADER};
use super::projections::{Inputs, convolve};

/// Rows of a cell whose products with the state are computed together.
const TILE: usize = 4;

/// Values and outputs of a value head, for all rows of a sequence.
pub(super) struct HeadRows<'a> {
    pub job: &'a DeltaJob<'a>,
    pub sequence: usize,
    pub head: usize,
}

/// State, log and convolution inputs of a value head, in the blocks of a sequence.
struct Kept {
    header: *mut f32,
    state: *mut f32,
    /// [log, value_dim].
    updates: *mut f32,
    /// [log].
    decays: *mut f32,
    /// Convolution inputs of the positions just before the state, then those of the most recent positions.
    before: *mut f32,
    inputs: *mut f32,
}

/// Log of one chunk of [`CELL`] positions, and the products of its rows with the state before it.
struct Cell {
    /// Position of its state.
    base: usize,
    /// [CELL, value_dim].
    updates: Vec<f32>,
    /// Sums of the decays, from the first position on.
    sums: [f32; CELL],
    /// Products of the state with keys and queries; [CELL, 2, value_dim].
    products: Vec<f32>,
}

/// Buffers that a thread keeps from head to head, so that they are allocated once.
#[derive(Default)]
struct Scratch {
    updates: Vec<f32>,
    products: Vec<f32>,
    /// State after drafts.
    tentative: Vec<f32>,
}

thread_local! {
    static SCRATCH: Slot<Scratch> = Slot::new(Scratch::default());
}

impl Kernel for HeadRows<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let DeltaShape { key_heads, key_dim, value_dim, .. } = self.job.shape;
        let DeltaSequence { ref rows, position, drafts, .. } = self.job.sequences[self.sequence];
        let (end, certain) = (position + rows.len(), position + rows.len() - drafts);
        let keep = self.job.keep(self.sequence);
        let column = 2 * key_heads * key_dim + self.head * value_dim;
        // SAFETY: the caller guarantees the instruction set; `check` has bounded all places, and the head's belong to this task.
        unsafe {
            let kept = self.kept();
            let state_at = (*kept.header).to_bits() as usize;
            let inputs = Inputs { log: kept.inputs, state: kept.before, state_at, stride: value_dim };
            convolve::<S>(self.job, self.sequence, column, value_dim, &inputs);
            let mut base = 0;
            if position == 0 {
                kept.state.write_bytes(0, key_dim * value_dim);
            } else {
                base = state_at;
                // Nothing else bounds the log's indices.
                let known =
                    base.is_multiple_of(CELL) && base <= position && position - base < self.job.shape.log();
                assert!(known, "a state at {base} does not precede position {position}");
            }
            // What a thread's last head left is overwritten before it is read.
            let Scratch { mut updates, mut products, mut tentative } = SCRATCH.take();
            updates.resize(CELL * value_dim, 0.0);
            products.resize(2 * CELL * value_dim, 0.0);
            let mut cell = Cell { base, updates, sums: [0.0; CELL], products };
            self.load(&kept, &mut cell, position);
            // Drafts that were accepted since.
            while cell.base + CELL <= position {
                self.fold::<S>(&cell, kept.state, kept.state);
                cell.base += CELL;
                self.load(&kept, &mut cell, position);
            }
            // Becomes that after drafts, which may be rejected.
            let mut state = kept.state;
            let mut at = position;
            while at < end {
                let stop = end.min(cell.base + CELL);
                self.rows::<S>(&kept, &mut cell, state, at..stop, keep);
                at = stop;
                if at < cell.base + CELL {
                    break;
                }
                if at <= certain {
                    self.fold::<S>(&cell, kept.state, kept.state);
                } else if at < end {
                    tentative.resize(key_dim * value_dim, 0.0);
                    self.fold::<S>(&cell, state, tentative.as_mut_ptr());
                    state = tentative.as_mut_ptr();
                }
                cell.base += CELL;
            }
            *kept.header = f32::from_bits(keep as u32);
            SCRATCH.set(Scratch { updates: cell.updates, products: cell.products, tentative });
        }
    }
}

impl HeadRows<'_> {
    fn kept(&self) -> Kept {
        let shape = &self.job.shape;
        let header = self.job.state(self.sequence, shape.key_heads + self.head);
        let updates = self.job.log(self.sequence, shape.key_heads + self.head);
        // SAFETY: offsets within the pieces, see `DeltaShape::state_pieces` and `DeltaShape::log_pieces`.
        unsafe {
            let state = self.job.matrix(self.sequence, self.head);
            let before = header.add(HEADER);
            let decays = updates.add(shape.log() * shape.value_dim);
            Kept {
                header,
                state,
                updates,
                decays,
                before,
                inputs: decays.add(shape.log().next_multiple_of(16)),
            }
        }
    }

    /// Loads the log of a cell, as far as it is before `position`.
    ///
    /// # Safety
    /// `kept` is the head's.
    unsafe fn load(&self, kept: &Kept, cell: &mut Cell, position: usize) {
        let (width, log) = (self.job.shape.value_dim, self.job.shape.log());
        let mut sum = 0.0;
        for (nth, at) in (cell.base..position.min(cell.base + CELL)).enumerate() {
            // SAFETY: the log has `log` positions.
            unsafe {
                sum += *kept.decays.add(at % log);
                let update = kept.updates.add(at % log * width);
                std::ptr::copy_nonoverlapping(update, cell.updates.as_mut_ptr().add(nth * width), width);
            }
            cell.sums[nth] = sum;
        }
    }

    /// Returns the key of a position: of the log before the first row, else of the rows.
    fn key(&self, at: usize) -> *const f32 {
        let DeltaShape { key_heads, key_dim, .. } = self.job.shape;
        let head = self.job.shape.key_head(self.head);
        let DeltaSequence { ref rows, position, .. } = self.job.sequences[self.sequence];
        match at.checked_sub(position) {
            Some(nth) => self.job.channels(rows.start + nth, (key_heads + head) * key_dim),
            // SAFETY: the log of keys is at the start of the key head's piece.
            None => unsafe { self.job.log(self.sequence, head).add(at % self.job.shape.log() * key_dim) },
        }
    }

    fn query(&self, at: usize) -> *const f32 {
        let DeltaShape { key_dim, .. } = self.job.shape;
        let head = self.job.shape.key_head(self.head);
        let DeltaSequence { ref rows, position, .. } = self.job.sequences[self.sequence];
        self.job.channels(rows.start + at - position, head * key_dim)
    }

    /// Computes the rows of these positions of a cell.
    ///
    /// # Safety
    /// The machine supports `S`'s instruction set; `kept` is the head's, and `state` that of the cell.
    #[inline(always)]
    unsafe fn rows<S: Simd>(
        &self,
        kept: &Kept,
        cell: &mut Cell,
        state: *const f32,
        positions: std::ops::Range<usize>,
        keep: usize,
    ) {
        // SAFETY: as the caller guarantees.
        unsafe {
            let mut at = positions.start;
            while at < positions.end {
                if positions.end - at >= TILE {
                    self.products::<S, TILE>(cell, state, at);
                    at += TILE;
                } else {
                    self.products::<S, 1>(cell, state, at);
                    at += 1;
                }
            }
            for at in positions {
                self.row::<S>(kept, cell, at, keep);
            }
        }
    }

    /// Computes the products of the state with keys and queries of `R` rows from the position `at` on.
    ///
    /// # Safety
    /// As for [`HeadRows::rows`].
    #[inline(always)]
    unsafe fn products<S: Simd, const R: usize>(&self, cell: &mut Cell, state: *const f32, at: usize) {
        let DeltaShape { key_dim, value_dim, .. } = self.job.shape;
        let keys: [*const f32; R] = std::array::from_fn(|row| self.key(at + row));
        let queries: [*const f32; R] = std::array::from_fn(|row| self.query(at + row));
        let first = cell.products.as_mut_ptr();
        // SAFETY: as the caller guarantees.
        unsafe {
            let mut column = 0;
            while column < value_dim {
                let out = first.add((at - cell.base) * 2 * value_dim + column);
                let strip = Strip { keys, queries, state: state.add(column), key_dim, value_dim, out };
                // The widest strip whose accumulators fit the registers.
                if S::REGISTERS >= 32 && R == 1 && column + 4 * S::LANES <= value_dim {
                    strip.run::<S, 4>();
                    column += 4 * S::LANES;
                } else if column + 2 * S::LANES <= value_dim && (S::REGISTERS >= 32 || R == 1) {
                    strip.run::<S, 2>();
                    column += 2 * S::LANES;
                } else {
                    strip.run::<S, 1>();
                    column += S::LANES;
                }
            }
        }
    }

    /// Computes update and output of a row.
    ///
    /// # Safety
    /// As for [`HeadRows::rows`].
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, kept: &Kept, cell: &mut Cell, at: usize, keep: usize) {
        let DeltaShape { key_heads, key_dim, value_heads, value_dim, .. } = self.job.shape;
        let DeltaSequence { ref rows, position, .. } = self.job.sequences[self.sequence];
        let (row, nth, log) = (rows.start + at - position, at - cell.base, self.job.shape.log());
        let weights = self.job.weights;
        let scalars = &self.job.scalars[row * 2 * value_heads..(row + 1) * 2 * value_heads];
        let beta = 1.0 / (1.0 + libm::expf(-scalars[self.head]));
        let decay_input = scalars[value_heads + self.head] + weights.decay_bias[self.head];
        // softplus, without overflow
        let softplus = decay_input.max(0.0) + libm::log1pf(libm::expf(-decay_input.abs()));
        let decay = -weights.decay[self.head] * softplus;
        let sum = if nth == 0 { decay } else { cell.sums[nth - 1] + decay };
        cell.sums[nth] = sum;
        let mut factors = [0.0f32; CELL];
        // SAFETY: as the caller guarantees; all vectors are whole.
        unsafe {
            for first in (0..=nth).step_by(S::LANES) {
                // From one position to this one; those behind it are not used.
                let differences = S::sub(S::splat(sum), S::load(cell.sums.as_ptr().add(first)));
                S::store(factors.as_mut_ptr().add(first), simd::exp::<S>(differences));
            }
            let whole = simd::exp::<S>(S::splat(sum));
            let (key, query) = (self.key(at), self.query(at));
            let (mut by_key, mut by_query) = ([0.0f32; CELL], [0.0f32; CELL]);
            for other in 0..=nth {
                let before = self.key(cell.base + other);
                let (mut keys, mut queries) = (S::splat(0.0), S::splat(0.0));
                for i in (0..key_dim).step_by(S::LANES) {
                    let before = S::load(before.add(i));
                    keys = S::fma(S::load(key.add(i)), before, keys);
                    queries = S::fma(S::load(query.add(i)), before, queries);
                }
                by_key[other] = factors[other] * S::sum(keys);
                by_query[other] = factors[other] * S::sum(queries);
            }
            let value = self.job.channels(row, 2 * key_heads * key_dim + self.head * value_dim).cast_const();
            let out = self.job.y.get().add(row * value_heads * value_dim + self.head * value_dim);
            let gates = self.job.gates.as_ptr().add(row * value_heads * value_dim + self.head * value_dim);
            let updates = cell.updates.as_mut_ptr();
            let products = cell.products.as_ptr().add(nth * 2 * value_dim);
            for column in (0..value_dim).step_by(S::LANES) {
                let mut known = S::mul(whole, S::load(products.add(column)));
                let mut output = S::mul(whole, S::load(products.add(value_dim + column)));
                for other in 0..nth {
                    let update = S::load(updates.add(other * value_dim + column));
                    known = S::fma(S::splat(by_key[other]), update, known);
                    output = S::fma(S::splat(by_query[other]), update, output);
                }
                let update = S::mul(S::splat(beta), S::sub(S::load(value.add(column)), known));
                S::store(updates.add(nth * value_dim + column), update);
                S::store(out.add(column), S::fma(S::splat(by_query[nth]), update, output));
            }
            if at >= keep {
                *kept.decays.add(at % log) = decay;
                let from = updates.add(nth * value_dim).cast_const();
                std::ptr::copy_nonoverlapping(from, kept.updates.add(at % log * value_dim), value_dim);
            }
            let scale =
                S::splat(rms_scale::<S>(std::slice::from_raw_parts(out, value_dim), weights.norm_eps));
            for column in (0..value_dim).step_by(S::LANES) {
                let weight = S::load(weights.norm.as_ptr().add(column));
                let normed = S::mul(S::mul(S::load(out.add(column)), scale), weight);
                S::store(out.add(column), Silu::mul::<S>(S::load(gates.add(column)), normed));
            }
        }
    }

    /// Computes the state behind a cell whose rows are all known, from the one before it.
    ///
    /// # Safety
    /// As for [`HeadRows::rows`]; `to` is valid for writes of a state, and may be `from`.
    #[inline(always)]
    unsafe fn fold<S: Simd>(&self, cell: &Cell, from: *const f32, to: *mut f32) {
        let DeltaShape { key_dim, value_dim, .. } = self.job.shape;
        let last = cell.sums[CELL - 1];
        let mut factors = [0.0f32; CELL];
        let keys: [*const f32; CELL] = std::array::from_fn(|nth| self.key(cell.base + nth));
        // SAFETY: as the caller guarantees.
        unsafe {
            for first in (0..CELL).step_by(S::LANES) {
                let differences = S::sub(S::splat(last), S::load(cell.sums.as_ptr().add(first)));
                S::store(factors.as_mut_ptr().add(first), simd::exp::<S>(differences));
            }
            let whole = simd::exp::<S>(S::splat(last));
            for i in 0..key_dim {
                let scaled: [f32; CELL] = std::array::from_fn(|nth| factors[nth] * *keys[nth].add(i));
                for column in (0..value_dim).step_by(S::LANES) {
                    let mut sum = S::mul(whole, S::load(from.add(i * value_dim + column)));
                    for (nth, scaled) in scaled.iter().enumerate() {
                        let update = S::load(cell.updates.as_ptr().add(nth * value_dim + column));
                        sum = S::fma(S::splat(*scaled), update, sum);
                    }
                    S::store(to.add(i * value_dim + column), sum);
                }
            }
        }
    }
}

/// Columns of the products of a state with keys and queries of `R` rows.
struct Strip<const R: usize> {
    keys: [*const f32; R],
    queries: [*const f32; R],
    state: *const f32,
    key_dim: usize,
    value_dim: usize,
    out: *mut f32,
}

impl<const R: usize> Strip<R> {
    /// Computes `V` vectors of columns.
    ///
    /// # Safety
    /// The machine supports `S`'s instruction set, and all pointers are valid for the shape.
    #[inline(always)]
    unsafe fn run<S: Simd, const V: usize>(&self) {
        // SAFETY: as the caller guarantees.
        unsafe {
            let mut by_key = [[S::splat(0.0); V]; R];
            let mut by_query = [[S::splat(0.0); V]; R];
            for i in 0..self.key_dim {
                let mut states = [S::splat(0.0); V];
                for (v, state) in states.iter_mut().enumerate() {
                    *state = S::load(self.state.add(i * self.value_dim + v * S::LANES));
                }
                for row in 0..R {
                    let (key, query) =
                        (S::splat(*self.keys[row].add(i)), S::splat(*self.queries[row].add(i)));
                    for v in 0..V {
                        by_key[row][v] = S::fma(states[v], key, by_key[row][v]);
                        by_query[row][v] = S::fma(states[v], query, by_query[row][v]);
                    }
                }
            }
            for row in 0..R {
                let out = self.out.add(row * 2 * self.value_dim);
                for v in 0..V {
                    S::store(out.add(v * S::LANES), by_key[row][v]);
                    S::store(out.add(self.value_dim + v * S::LANES), by_query[row][v]);
                }
            }
        }
    }
}
