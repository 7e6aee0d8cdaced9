//! Models of the kernels' thread pool.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::check;
use crate::pool::Pool;

/// Every unit of every job runs exactly once, its writes are visible to the caller, and neither the caller nor the end of the
/// pool waits for ever.
///
/// # Panics
/// If not.
pub fn thread_pool() {
    check(3, || {
        let pool = start(2);
        for _ in 0..2 {
            run_job(&pool, 2);
        }
    });
    check(2, || run_job(&start(3), 3));
}

/// A job of a second thread runs beside the first without touching its units.
///
/// # Panics
/// If not.
pub fn concurrent_callers() {
    check(2, || {
        let pool = Arc::new(start(2));
        let other = {
            let pool = pool.clone();
            thread::spawn(move || run_job(&pool, 2))
        };
        run_job(&pool, 2);
        other.join().unwrap_or_else(|_| unreachable!("a panic ends the model"));
    });
}

fn start(threads: usize) -> Pool {
    Pool::new(threads).unwrap_or_else(|_| unreachable!("loom's threads always start"))
}

/// Runs a job whose units each write their number to a cell without synchronization; loom detects races.
fn run_job(pool: &Pool, units: usize) {
    let cells: Vec<_> = (0..units).map(|_| Cell(UnsafeCell::new(0))).collect();
    // SAFETY: loom panics before two threads access a cell at a time.
    pool.each(units, &|unit| cells[unit].0.with_mut(|cell| unsafe { *cell += unit + 1 }));
    for (unit, cell) in cells.iter().enumerate() {
        // SAFETY: as above.
        assert_eq!(cell.0.with(|cell| unsafe { *cell }), unit + 1, "unit {unit} runs exactly once");
    }
}

struct Cell(UnsafeCell<usize>);

// SAFETY: loom's cell checks every access.
unsafe impl Sync for Cell {}
