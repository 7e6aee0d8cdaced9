//! Tests of the collectives: bit-exact sums, gathers, failures.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use proptest::prelude::*;

use super::*;

/// Pseudo-random elements of a rank, of many magnitudes, so that another summation order changes the bits.
fn elements(seed: u32, rank: usize, count: usize) -> Vec<f32> {
    let word = |i: u32| inflight_kernels::philox4x32([i, rank as u32, 0, 0], [seed, 0])[0];
    (0..count as u32).map(|i| (word(i) as f32 - 2e9) * 2f32.powi((word(!i) % 60) as i32 - 60)).collect()
}

/// Runs `work` on every rank, each on its own thread, and returns the results by rank.
fn on_all<T: Send>(world: usize, work: impl Fn(&dyn Collective) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let handles = host_group(world).into_iter();
        let threads: Vec<_> = handles.map(|handle| scope.spawn(move || work(&*handle))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sums_have_the_bits_of_the_rank_order_on_every_rank(
        seed in any::<u32>(), world in 1usize..6, counts in prop::collection::vec(0usize..5000, 1..8),
    ) {
        let sums = on_all(world, |handle| {
            let all = counts.iter().map(|count| {
                let mut own = elements(seed, handle.rank(), *count);
                handle.all_reduce(&mut own).unwrap();
                own.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
            all.collect::<Vec<_>>()
        });
        let expected: Vec<Vec<u32>> = counts.iter().map(|count| {
            let mut sum = elements(seed, 0, *count);
            for rank in 1..world {
                sum.iter_mut().zip(elements(seed, rank, *count)).for_each(|(sum, x)| *sum += x);
            }
            sum.iter().map(|x| x.to_bits()).collect()
        }).collect();
        for sums in sums {
            prop_assert_eq!(&sums, &expected);
        }
    }

    #[test]
    fn gathered_columns_are_in_rank_order_on_every_rank_that_requests_them(
        seed in any::<u32>(), rows in 1usize..20, columns in prop::collection::vec(0usize..40, 1..6),
        wanted in prop::collection::vec(any::<bool>(), 6),
    ) {
        let width: usize = columns.iter().sum();
        let parts: Vec<Vec<f32>> =
            columns.iter().enumerate().map(|(rank, n)| elements(seed, rank, rows * n)).collect();
        let mut expected = Vec::new();
        for row in 0..rows {
            for (part, n) in parts.iter().zip(&columns) {
                expected.extend_from_slice(&part[row * n..(row + 1) * n]);
            }
        }
        let got = on_all(columns.len(), |handle| {
            let mut whole = vec![f32::NAN; rows * width];
            handle.gather(&parts[handle.rank()], rows, wanted[handle.rank()].then_some(&mut whole)).unwrap();
            whole
        });
        for (rank, whole) in got.into_iter().enumerate().filter(|(rank, _)| wanted[*rank]) {
            prop_assert_eq!(&whole, &expected, "rank {}", rank);
        }
    }
}

#[test]
fn a_rank_that_fails_or_panics_fails_all_ranks_with_its_reason() {
    for world in [2, 3, 5] {
        for culprit in 0..world {
            for (calls, panics) in [(0, false), (1, true), (7, false)] {
                let outcomes = on_all(world, |handle| {
                    let run = || {
                        for call in 0.. {
                            if handle.rank() == culprit && call == calls {
                                assert!(!panics, "on purpose");
                                handle.fail("it is out of luck");
                            }
                            match call % 3 {
                                0 => handle.all_reduce(&mut elements(1, handle.rank(), 100))?,
                                1 => handle.gather(&elements(1, handle.rank(), 100), 10, None)?,
                                _ => handle.barrier()?,
                            }
                        }
                        Ok(())
                    };
                    let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
                        handle.fail("it is out of luck");
                        handle.barrier()
                    });
                    // The group stays failed.
                    assert_eq!(handle.barrier(), outcome);
                    (outcome.unwrap_err(), handle.failure())
                });
                let expected = GroupFailed { rank: culprit, reason: "it is out of luck".to_owned() };
                assert!(expected.to_string().contains(&format!("rank {culprit}")));
                for outcome in outcomes {
                    assert_eq!(outcome, (expected.clone(), Some(expected.clone())));
                }
            }
        }
    }
}

#[test]
fn mismatched_calls_fail_on_every_rank() {
    type Wrong = fn(&dyn Collective) -> Result<(), GroupFailed>;
    let wrong: [(Wrong, &str); 5] = [
        (|handle| handle.all_reduce(&mut vec![1.0; 5 + handle.rank()]), "adds"),
        (|handle| handle.gather(&[1.0; 6], 2 + handle.rank(), None), "another call"),
        (|handle| handle.gather(&[1.0; 5], 2, None), "shapes"),
        (|handle| handle.gather(&[1.0; 6], 2, Some(&mut [0.0; 5])), "shapes"),
        (
            |handle| if handle.rank() == 1 { handle.barrier() } else { handle.all_reduce(&mut [1.0; 5]) },
            "another call",
        ),
    ];
    for (call, clue) in wrong {
        for outcome in on_all(3, call) {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(clue), "{error}");
        }
    }
    assert!(SingleRank.gather(&[1.0; 5], 1, Some(&mut [0.0; 4])).is_err());
}
