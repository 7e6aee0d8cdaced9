use inflight_kernels::cuda::{
    CopyParams, EmbeddingParams, NormParams, QkvParams, SwigluParams, copy_blocks, embedding, finish_qkv,
    norm, swiglu,
};
use proptest::prelude::*;

use crate::machine::Machine;
use crate::{Dice, half, on_harness, unit, widen};

fn close(got: f64, exact: f64, relative: f64) -> bool {
    (got - exact).abs() <= relative * exact.abs().max(1e-2)
}

#[test]
fn embedding_takes_rows_of_the_table_and_tokens_fed_back() {
    on_harness(24, (any::<u32>(), half(), 1usize..20, 1usize..40), |(seed, half, rows, eights)| {
        let (device, mut dice) = (Machine::new(), Dice::new(seed));
        let (width, vocabulary) = (eights * 8, 50);
        let table = dice.halves(half, vocabulary * width, 2.0);
        let sampled: Vec<u32> = (0..5).map(|_| dice.below(vocabulary) as u32).collect();
        let tokens: Vec<u32> = (0..rows)
            .map(|_| match dice.below(3) {
                0 => 1 << 31 | dice.below(5) as u32,
                _ => dice.below(vocabulary) as u32,
            })
            .collect();
        let (table_at, tokens_at) = (device.upload(&table), device.upload(&tokens));
        let (sampled_at, hidden) = (device.upload(&sampled), device.alloc(rows * width * 4));
        let p = EmbeddingParams {
            table: table_at.address(),
            tokens: tokens_at.address(),
            sampled: sampled_at.address(),
            hidden: hidden.address(),
            rows: rows as u32,
            width: width as u32,
        };
        unsafe { embedding(&device, half, &p) }.unwrap();
        let got = hidden.read::<f32>(rows * width);
        for (row, token) in tokens.iter().enumerate() {
            let token = if token >> 31 == 1 { sampled[(token & 0x7fff_ffff) as usize] } else { *token };
            for i in 0..width {
                prop_assert_eq!(got[row * width + i], half.widen(table[token as usize * width + i]));
            }
        }
        Ok(())
    });
}

#[test]
fn norm_adds_and_normalises_every_row_alike() {
    let picks = prop::option::of(prop::collection::vec(0usize..30, 0..10));
    let shape = (any::<u32>(), half(), 1usize..30, 1usize..200, any::<bool>(), picks);
    on_harness(32, shape, |(seed, half, rows, eights, with_delta, picks)| {
        let (device, mut dice) = (Machine::new(), Dice::new(seed));
        let width = eights * 8;
        let residual = dice.numbers(rows * width, 3.0);
        let delta = dice.halves(half, rows * width, 2.0);
        let weight = dice.numbers(width, 2.0);
        let picks: Option<Vec<u32>> = picks.map(|p| p.into_iter().map(|row| (row % rows) as u32).collect());
        let outs = picks.as_ref().map_or(rows, Vec::len);
        let (residual_at, delta_at, weight_at) =
            (device.upload(&residual), device.upload(&delta), device.upload(&weight));
        let pick_at = picks.as_ref().map(|picks| device.upload(picks));
        let out = device.alloc(outs * width * 2);
        let p = NormParams {
            residual: residual_at.address(),
            delta: if with_delta { delta_at.address() } else { 0 },
            weight: weight_at.address(),
            out: out.address(),
            pick: pick_at.as_ref().map_or(0, |pick| pick.address()),
            rows: outs as u32,
            width: width as u32,
            eps: 1e-5,
            unused: 0,
        };
        unsafe { norm(&device, half, &p) }.unwrap();
        let (got, sums) = (widen(half, &out, outs * width), residual_at.read::<f32>(rows * width));
        let sum = |i: usize| residual[i] + if with_delta { half.widen(delta[i]) } else { 0.0 };
        for i in 0..rows * width {
            prop_assert_eq!(sums[i], if picks.is_some() { residual[i] } else { sum(i) });
        }
        for at in 0..outs {
            let row = picks.as_ref().map_or(at, |picks| picks[at] as usize);
            let x: Vec<f64> = (0..width).map(|i| f64::from(sum(row * width + i))).collect();
            let mean = x.iter().map(|v| v * v).sum::<f64>() / width as f64;
            for i in 0..width {
                let exact = x[i] / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                let value = f64::from(got[at * width + i]);
                prop_assert!(close(value, exact, 1.1 * unit(half)), "{value} is not {exact}");
            }
        }
        Ok(())
    });
}

#[test]
fn swiglu_is_the_gated_activation() {
    on_harness(24, (any::<u32>(), half(), 1usize..20, 1usize..60), |(seed, half, rows, eights)| {
        let (device, mut dice) = (Machine::new(), Dice::new(seed));
        let width = eights * 8;
        let gate_up = dice.halves(half, rows * width * 2, 12.0);
        let (gate_up_at, out) = (device.upload(&gate_up), device.alloc(rows * width * 2));
        let p = SwigluParams {
            gate_up: gate_up_at.address(),
            out: out.address(),
            rows: rows as u32,
            width: width as u32,
        };
        unsafe { swiglu(&device, half, &p) }.unwrap();
        let got = widen(half, &out, rows * width);
        for row in 0..rows {
            for i in 0..width {
                let gate = f64::from(half.widen(gate_up[row * 2 * width + i]));
                let up = f64::from(half.widen(gate_up[(row * 2 + 1) * width + i]));
                let exact = gate / (1.0 + (-gate).exp()) * up;
                prop_assert!(close(f64::from(got[row * width + i]), exact, 1.1 * unit(half)));
            }
        }
        Ok(())
    });
}

#[test]
fn finishing_qkv_normalises_rotates_and_writes_to_the_pool_and_nowhere_else() {
    let shape = (any::<u32>(), half(), 1usize..6, 1usize..4, 1usize..5, 0usize..5, any::<bool>(), 0u32..6);
    on_harness(32, shape, |(seed, half, rows, kv_heads, group, dim, norms, shift)| {
        let (device, mut dice) = (Machine::new(), Dice::new(seed));
        let head_dim = [6, 64, 96, 128, 256][dim];
        let (heads, block_tokens, layers, layer) = (kv_heads * group, 1usize << shift, 3, 1);
        let width = (heads + 2 * kv_heads) * head_dim;
        let qkv = dice.halves(half, rows * width, 2.0);
        let (q_norm, k_norm) = (dice.numbers(head_dim, 2.0), dice.numbers(head_dim, 2.0));
        let context = 40;
        let angles: Vec<f32> = (0..context * head_dim / 2)
            .flat_map(|_| {
                let angle = dice.number() * 3.0;
                [angle.cos(), angle.sin()]
            })
            .collect();
        let positions: Vec<u32> = (0..rows).map(|_| dice.below(context) as u32).collect();
        let blocks = rows + 2;
        // Padding rows have no place, all others differ.
        let slots = dice.shuffled(blocks * block_tokens);
        let places: Vec<u32> =
            (0..rows).map(|row| if dice.below(4) == 0 { u32::MAX } else { slots[row] }).collect();
        let head_numbers = block_tokens * head_dim;
        let block_numbers = layers * 2 * kv_heads * head_numbers;
        let before = dice.halves(half, blocks * block_numbers, 1.0);
        let (qkv_at, kv_at) = (device.upload(&qkv), device.upload(&before));
        let (q_at, k_at, angles_at) =
            (device.upload(&q_norm), device.upload(&k_norm), device.upload(&angles));
        let (positions_at, places_at) = (device.upload(&positions), device.upload(&places));
        let p = QkvParams {
            qkv: qkv_at.address(),
            q_norm: if norms { q_at.address() } else { 0 },
            k_norm: if norms { k_at.address() } else { 0 },
            angles: angles_at.address(),
            positions: positions_at.address(),
            places: places_at.address(),
            kv: kv_at.address(),
            block_numbers: block_numbers as u64,
            layer_offset: (layer * 2 * kv_heads * head_numbers) as u64,
            rows: rows as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            block_tokens: block_tokens as u32,
            eps: 1e-6,
        };
        unsafe { finish_qkv(&device, half, &p) }.unwrap();
        let (got, pool) = (qkv_at.read::<u16>(rows * width), kv_at.read::<u16>(blocks * block_numbers));
        let mut expected: Vec<Option<f64>> = vec![None; blocks * block_numbers];
        for row in 0..rows {
            for head in 0..heads + 2 * kv_heads {
                let at = row * width + head * head_dim;
                let mut x: Vec<f64> = (0..head_dim).map(|i| f64::from(half.widen(qkv[at + i]))).collect();
                let is_value = head >= heads + kv_heads;
                if !is_value {
                    if norms {
                        let mean = x.iter().map(|v| v * v).sum::<f64>() / head_dim as f64;
                        let weight = if head < heads { &q_norm } else { &k_norm };
                        for i in 0..head_dim {
                            x[i] *= f64::from(weight[i]) / (mean + 1e-6).sqrt();
                        }
                    }
                    let half_dim = head_dim / 2;
                    for i in 0..half_dim {
                        let entry = (positions[row] as usize * half_dim + i) * 2;
                        let (cos, sin) = (f64::from(angles[entry]), f64::from(angles[entry + 1]));
                        let (a, b) = (x[i], x[i + half_dim]);
                        (x[i], x[i + half_dim]) = (a * cos - b * sin, b * cos + a * sin);
                    }
                }
                let padding = places[row] == u32::MAX;
                for i in 0..head_dim {
                    if head < heads && !padding {
                        let value = f64::from(half.widen(got[at + i]));
                        prop_assert!((value - x[i]).abs() <= 2.0 * unit(half) * x[i].abs().max(1.0));
                    } else {
                        prop_assert_eq!(got[at + i], qkv[at + i], "only queries are finished in place");
                    }
                }
                if head >= heads && !padding {
                    let (block, offset) =
                        (places[row] as usize / block_tokens, places[row] as usize % block_tokens);
                    let line = layer * 2 * kv_heads + (head - heads);
                    let to = block * block_numbers + line * head_numbers + offset * head_dim;
                    (0..head_dim).for_each(|i| expected[to + i] = Some(x[i]));
                }
            }
        }
        for (i, expected) in expected.iter().enumerate() {
            match expected {
                None => prop_assert_eq!(pool[i], before[i]),
                Some(x) => {
                    let value = f64::from(half.widen(pool[i]));
                    prop_assert!((value - x).abs() <= 2.0 * unit(half) * x.abs().max(1.0));
                }
            }
        }
        Ok(())
    });
}

#[test]
fn blocks_are_copied_whole_and_others_stay() {
    on_harness(24, (any::<u32>(), 1usize..700, 0usize..5), |(seed, vectors, pairs)| {
        let (device, mut dice) = (Machine::new(), Dice::new(seed));
        let (blocks, words) = (12, vectors * 4);
        let before: Vec<u32> = (0..blocks * words).map(|_| dice.word()).collect();
        let order = dice.shuffled(blocks);
        // Sources may repeat, targets not.
        let list: Vec<u32> = (0..pairs).flat_map(|i| [order[dice.below(6)], order[6 + i]]).collect();
        let (pool, pairs_at) = (device.upload(&before), device.upload(&list));
        let p = CopyParams { pool: pool.address(), pairs: pairs_at.address(), block_bytes: words as u64 * 4 };
        unsafe { copy_blocks(&device, pairs as u32, &p) }.unwrap();
        let mut expected = before.clone();
        for pair in list.chunks(2) {
            let (from, to) = (pair[0] as usize * words, pair[1] as usize * words);
            expected[to..to + words].copy_from_slice(&before[from..from + words]);
        }
        prop_assert_eq!(pool.read::<u32>(blocks * words), expected);
        Ok(())
    });
}
