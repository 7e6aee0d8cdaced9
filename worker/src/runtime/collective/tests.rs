use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use proptest::prelude::*;

use super::*;

fn numbers(seed: u32, rank: usize, count: usize) -> Vec<f32> {
    let word = |i: u32| inflight_kernels::philox4x32([i, rank as u32, 0, 0], [seed, 0])[0];
    // Of all magnitudes, so that another order of summation shows.
    (0..count as u32).map(|i| (word(i) as f32 - 2e9) * 2f32.powi((word(!i) % 60) as i32 - 60)).collect()
}

/// Runs `work` on every rank, each on a thread of its own, and returns what came of it by rank.
fn on_all<T: Send>(world: usize, work: impl Fn(&dyn Collective) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let ends = host_group(world).into_iter();
        let threads: Vec<_> = ends.map(|end| scope.spawn(move || work(&*end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sums_have_the_bits_of_the_ranks_order_on_every_rank_time_after_time(
        seed in any::<u32>(), world in 1usize..6, counts in prop::collection::vec(0usize..5000, 1..8),
    ) {
        let sums = on_all(world, |end| {
            let all = counts.iter().map(|count| {
                let mut own = numbers(seed, end.rank(), *count);
                end.all_reduce(&mut own).unwrap();
                own.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
            all.collect::<Vec<_>>()
        });
        let expected: Vec<Vec<u32>> = counts.iter().map(|count| {
            let mut sum = numbers(seed, 0, *count);
            for rank in 1..world {
                sum.iter_mut().zip(numbers(seed, rank, *count)).for_each(|(sum, x)| *sum += x);
            }
            sum.iter().map(|x| x.to_bits()).collect()
        }).collect();
        for sums in sums {
            prop_assert_eq!(&sums, &expected);
        }
    }

    #[test]
    fn gathered_columns_lie_in_the_order_of_the_ranks_wherever_they_are_wanted(
        seed in any::<u32>(), rows in 1usize..20, columns in prop::collection::vec(0usize..40, 1..6),
        wanted in prop::collection::vec(any::<bool>(), 6),
    ) {
        let width: usize = columns.iter().sum();
        let parts: Vec<Vec<f32>> =
            columns.iter().enumerate().map(|(rank, n)| numbers(seed, rank, rows * n)).collect();
        let mut expected = Vec::new();
        for row in 0..rows {
            for (part, n) in parts.iter().zip(&columns) {
                expected.extend_from_slice(&part[row * n..(row + 1) * n]);
            }
        }
        let got = on_all(columns.len(), |end| {
            let mut whole = vec![f32::NAN; rows * width];
            end.gather(&parts[end.rank()], rows, wanted[end.rank()].then_some(&mut whole)).unwrap();
            whole
        });
        for (rank, whole) in got.into_iter().enumerate().filter(|(rank, _)| wanted[*rank]) {
            prop_assert_eq!(&whole, &expected, "rank {}", rank);
        }
    }
}

#[test]
fn a_rank_that_fails_or_panics_fails_all_with_its_words_wherever_they_are() {
    for world in [2, 3, 5] {
        for culprit in 0..world {
            for (calls, panics) in [(0, false), (1, true), (7, false)] {
                let outcomes = on_all(world, |end| {
                    let run = || {
                        for call in 0.. {
                            if end.rank() == culprit && call == calls {
                                assert!(!panics, "on purpose");
                                end.fail("it is out of luck");
                            }
                            match call % 3 {
                                0 => end.all_reduce(&mut numbers(1, end.rank(), 100))?,
                                1 => end.gather(&numbers(1, end.rank(), 100), 10, None)?,
                                _ => end.barrier()?,
                            }
                        }
                        Ok(())
                    };
                    let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
                        end.fail("it is out of luck");
                        end.barrier()
                    });
                    // Nothing works any more.
                    assert_eq!(end.barrier(), outcome);
                    (outcome.unwrap_err(), end.failure())
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
fn calls_that_do_not_match_fail_on_every_rank_and_touch_nothing() {
    type Wrong = fn(&dyn Collective) -> Result<(), GroupFailed>;
    let wrong: [(Wrong, &str); 5] = [
        (|end| end.all_reduce(&mut vec![1.0; 5 + end.rank()]), "adds"),
        (|end| end.gather(&[1.0; 6], 2 + end.rank(), None), "another call"),
        (|end| end.gather(&[1.0; 5], 2, None), "shapes"),
        (|end| end.gather(&[1.0; 6], 2, Some(&mut [0.0; 5])), "shapes"),
        (|end| if end.rank() == 1 { end.barrier() } else { end.all_reduce(&mut [1.0; 5]) }, "another call"),
    ];
    for (call, clue) in wrong {
        for outcome in on_all(3, call) {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(clue), "{error}");
        }
    }
    assert!(Alone.gather(&[1.0; 5], 1, Some(&mut [0.0; 4])).is_err());
}
