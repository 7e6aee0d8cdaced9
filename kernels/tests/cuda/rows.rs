use inflight_kernels::cuda::{
    CopyParams, EmbeddingParams, HalfDtype, KvStore, NormParams, QkvParams, SwigluParams, copy_blocks,
    embedding, finish_qkv, geglu, norm, norm_after, swiglu,
};
use proptest::prelude::*;

use crate::conversions::nearest_e4m3;
use crate::device::TestDevice;
use crate::{SeededRng, e4m3, half, on_harness, store, unit, widen};

fn close(got: f64, exact: f64, relative: f64) -> bool {
    (got - exact).abs() <= relative * exact.abs().max(1e-2)
}

#[test]
fn embedding_gathers_rows_for_given_and_sampled_tokens() {
    on_harness(
        24,
        (any::<u32>(), half(), 1usize..20, 1usize..40, any::<bool>()),
        |(seed, half, rows, eights, scaled)| {
            let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
            let (width, vocabulary) = (eights * 8, 50);
            let table = rng.halves(half, vocabulary * width, 2.0);
            let sampled: Vec<u32> = (0..5).map(|_| rng.below(vocabulary) as u32).collect();
            let tokens: Vec<u32> = (0..rows)
                .map(|_| match rng.below(3) {
                    0 => 1 << 31 | rng.below(5) as u32,
                    _ => rng.below(vocabulary) as u32,
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
                scale: 33.75,
                unused: 0,
            };
            unsafe { embedding(&device, half, scaled, &p) }.unwrap();
            let got = hidden.read::<f32>(rows * width);
            for (row, token) in tokens.iter().enumerate() {
                let token = if token >> 31 == 1 { sampled[(token & 0x7fff_ffff) as usize] } else { *token };
                for i in 0..width {
                    let factor = if scaled { 33.75 } else { 1.0 };
                    prop_assert_eq!(
                        got[row * width + i],
                        half.widen(table[token as usize * width + i]) * factor
                    );
                }
            }
            Ok(())
        },
    );
}

#[test]
fn norm_adds_the_residual_and_normalises_every_row() {
    let picks = prop::option::of(prop::collection::vec(0usize..30, 0..10));
    let shape = (any::<u32>(), half(), 1usize..30, 1usize..200, any::<bool>(), picks);
    on_harness(32, shape, |(seed, half, rows, eights, with_delta, picks)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let width = eights * 8;
        let residual = rng.values(rows * width, 3.0);
        let delta = rng.halves(half, rows * width, 2.0);
        let weight = rng.values(width, 2.0);
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
fn norm_after_adds_the_norm_of_every_row_to_the_residual() {
    on_harness(24, (any::<u32>(), half(), 1usize..20, 1usize..700), |(seed, half, rows, eights)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let width = eights * 8;
        let residual = rng.values(rows * width, 3.0);
        let delta = rng.halves(half, rows * width, 2.0);
        let weight = rng.values(width, 2.0);
        let (residual_at, delta_at, weight_at) =
            (device.upload(&residual), device.upload(&delta), device.upload(&weight));
        let p = NormParams {
            residual: residual_at.address(),
            delta: delta_at.address(),
            weight: weight_at.address(),
            rows: rows as u32,
            width: width as u32,
            eps: 1e-5,
            ..NormParams::default()
        };
        unsafe { norm_after(&device, half, &p) }.unwrap();
        let got = residual_at.read::<f32>(rows * width);
        for row in 0..rows {
            let x: Vec<f64> = (0..width).map(|i| f64::from(half.widen(delta[row * width + i]))).collect();
            let mean = x.iter().map(|v| v * v).sum::<f64>() / width as f64;
            for i in 0..width {
                let normed = x[i] / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                let exact = f64::from(residual[row * width + i]) + normed;
                let value = f64::from(got[row * width + i]);
                let error = 1e-6 * (1.0 + f64::from(residual[row * width + i]).abs() + normed.abs());
                prop_assert!((value - exact).abs() <= error, "{value} is not {exact}");
            }
        }
        Ok(())
    });
}

#[test]
fn swiglu_and_geglu_equal_the_activation_of_the_gate_times_up() {
    let shape = (any::<u32>(), half(), 1usize..20, 1usize..60, any::<bool>());
    on_harness(32, shape, |(seed, half, rows, eights, gelu)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let width = eights * 8;
        let gate_up = rng.halves(half, rows * width * 2, 12.0);
        let (gate_up_at, out) = (device.upload(&gate_up), device.alloc(rows * width * 2));
        let p = SwigluParams {
            gate_up: gate_up_at.address(),
            out: out.address(),
            rows: rows as u32,
            width: width as u32,
        };
        match gelu {
            false => unsafe { swiglu(&device, half, &p) }.unwrap(),
            true => unsafe { geglu(&device, half, &p) }.unwrap(),
        }
        let got = widen(half, &out, rows * width);
        for row in 0..rows {
            for i in 0..width {
                let gate = f64::from(half.widen(gate_up[row * 2 * width + i]));
                let up = f64::from(half.widen(gate_up[(row * 2 + 1) * width + i]));
                let silu = gate / (1.0 + (-gate).exp());
                let tanh = ((2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3))).tanh();
                let exact = if gelu { 0.5 * gate * (1.0 + tanh) } else { silu } * up;
                let value = f64::from(got[row * width + i]);
                prop_assert!(close(value, exact, 1.1 * unit(half)), "{value} is not {exact}");
            }
        }
        Ok(())
    });
}

#[test]
fn f16_outputs_saturate_and_what_is_not_finite_stays_so() {
    on_harness(1, Just(()), |()| {
        let device = TestDevice::new();
        // silu(512) is 512 in f16, so the output is 512 * `up`.
        let ups = [512.0, -512.0, 127.0, 128.0, f32::NAN, -128.0, f32::INFINITY, 0.0];
        let gate_up: Vec<u16> = [512.0; 8].into_iter().chain(ups).map(|x| HalfDtype::F16.narrow(x)).collect();
        let (gate_up_at, out) = (device.upload(&gate_up), device.alloc(8 * 2));
        let p = SwigluParams { gate_up: gate_up_at.address(), out: out.address(), rows: 1, width: 8 };
        unsafe { swiglu(&device, HalfDtype::F16, &p) }.unwrap();
        let got = widen(HalfDtype::F16, &out, 8);
        let held = [65504.0, -65504.0, 65024.0, 65504.0, f32::NAN, -65504.0, f32::INFINITY, 0.0];
        for (got, held) in got.into_iter().zip(held) {
            prop_assert!(got == held || got.is_nan() && held.is_nan(), "{got}, not {held}");
        }
        Ok(())
    });
}

#[test]
fn finish_qkv_applies_norm_and_rope_and_writes_only_its_places() {
    let sizes = (1usize..6, 1usize..4, 1usize..5, 0usize..5, 0u32..6);
    let shape = (any::<u32>(), half(), store(), sizes, any::<bool>());
    on_harness(48, shape, |(seed, half, store, (rows, kv_heads, group, dim, shift), norms)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let head_dim = [16, 64, 96, 128, 256][dim];
        let (heads, layers, layer) = (kv_heads * group, 3, 1);
        let block_tokens = (1usize << shift).max(store.block_tokens_min() as usize);
        let width = (heads + 2 * kv_heads) * head_dim;
        let qkv = rng.halves(half, rows * width, 2.0);
        let (q_norm, k_norm) = (rng.values(head_dim, 2.0), rng.values(head_dim, 2.0));
        let context = 40;
        let angles: Vec<f32> = (0..context * head_dim / 2)
            .flat_map(|_| {
                let angle = rng.value() * 3.0;
                [angle.cos(), angle.sin()]
            })
            .collect();
        let positions: Vec<u32> = (0..rows).map(|_| rng.below(context) as u32).collect();
        let blocks = rows + 2;
        // Padding rows have no place; all other places differ.
        let slots = rng.shuffled(blocks * block_tokens);
        let places: Vec<u32> =
            (0..rows).map(|row| if rng.below(4) == 0 { u32::MAX } else { slots[row] }).collect();
        let layer_bytes = store.layer_bytes(kv_heads as u64, block_tokens as u64, head_dim as u64) as usize;
        let block_bytes = layers * layer_bytes;
        let before: Vec<u8> = (0..blocks * block_bytes).map(|_| rng.word() as u8).collect();
        let (qkv_at, kv_at) = (device.upload(&qkv), device.upload(&before));
        let (q_at, k_at, angles_at) =
            (device.upload(&q_norm), device.upload(&k_norm), device.upload_constant(&angles));
        let (positions_at, places_at) = (device.upload_constant(&positions), device.upload_constant(&places));
        let p = QkvParams {
            qkv: qkv_at.address(),
            q_norm: if norms { q_at.address() } else { 0 },
            k_norm: if norms { k_at.address() } else { 0 },
            angles: angles_at.address(),
            positions: positions_at.address(),
            places: places_at.address(),
            kv: kv_at.address(),
            block_numbers: block_bytes as u64 / store.unit(),
            layer_offset: (layer * layer_bytes) as u64 / store.unit(),
            rows: rows as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            block_tokens: block_tokens as u32,
            eps: 1e-6,
        };
        unsafe { finish_qkv(&device, half, store, &p) }.unwrap();
        let (got, pool) = (qkv_at.read::<u16>(rows * width), kv_at.read::<u8>(blocks * block_bytes));
        let mut written = vec![false; pool.len()];
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
                    let line = (head - heads) * block_tokens + offset;
                    let in_layer = block * block_bytes + layer * layer_bytes;
                    let bytes = head_dim * store.unit() as usize;
                    let at = in_layer + line * bytes;
                    written[at..at + bytes].fill(true);
                    let stored = &pool[at..at + bytes];
                    if store == KvStore::Half {
                        for (pair, x) in stored.chunks(2).zip(&x) {
                            let value = f64::from(half.widen(u16::from_ne_bytes([pair[0], pair[1]])));
                            prop_assert!((value - x).abs() <= 2.0 * unit(half) * x.abs().max(1.0));
                        }
                        continue;
                    }
                    let at = in_layer + 2 * kv_heads * block_tokens * head_dim + line * 4;
                    written[at..at + 4].fill(true);
                    let scale = f64::from(f32::from_ne_bytes(pool[at..at + 4].try_into().unwrap()));
                    let largest = x.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                    prop_assert!((scale * 448.0 - largest).abs() <= 1e-5 * largest, "{scale} for {largest}");
                    for (byte, x) in stored.iter().zip(&x) {
                        let error = (e4m3::value(*byte) * scale - x).abs();
                        // No value is nearer, except for f32 rounding of the computed element.
                        prop_assert!(error <= e4m3::distance(x / scale) * scale + 1e-5 * largest);
                        // Half a step of E4M3, which below 2^-6 is 2^-10.
                        prop_assert!(error <= x.abs() / 16.0 + scale / 1024.0 + 1e-5 * largest);
                    }
                }
            }
        }
        for (i, written) in written.iter().enumerate() {
            prop_assert!(*written || pool[i] == before[i], "byte {i} belongs to no place");
        }
        // A row's stored bits do not depend on the rows beside it.
        let row = rng.below(rows);
        let alone_at = device.upload(&before);
        let line_at = device.upload(&qkv[row * width..(row + 1) * width]);
        let (position_at, place_at) =
            (device.upload_constant(&positions[row..=row]), device.upload_constant(&places[row..=row]));
        let alone = QkvParams {
            qkv: line_at.address(),
            positions: position_at.address(),
            places: place_at.address(),
            kv: alone_at.address(),
            rows: 1,
            ..p
        };
        unsafe { finish_qkv(&device, half, store, &alone) }.unwrap();
        for (byte, (alone, before)) in alone_at.read::<u8>(pool.len()).iter().zip(&before).enumerate() {
            prop_assert!(alone == before || *alone == pool[byte], "byte {byte} of row {row}");
        }
        Ok(())
    });
}

#[test]
fn blocks_are_copied_whole_and_others_are_unchanged() {
    on_harness(24, (any::<u32>(), 1usize..700, 0usize..5), |(seed, vectors, pairs)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let (blocks, words) = (12, vectors * 4);
        let before: Vec<u32> = (0..blocks * words).map(|_| rng.word()).collect();
        let order = rng.shuffled(blocks);
        // Sources may repeat, targets must not.
        let list: Vec<u32> = (0..pairs).flat_map(|i| [order[rng.below(6)], order[6 + i]]).collect();
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

/// GPUs from sm_89 on round by an instruction, others by bit operations.
#[test]
fn finish_qkv_stores_the_nearest_e4m3_values() {
    if !TestDevice::available() {
        return;
    }
    let (head_dim, block_tokens) = (256, 4);
    for half in [HalfDtype::Bf16, HalfDtype::F16] {
        // All values up to 448, which as the maximum of each head makes the scale 1.
        let in_range: Vec<u16> = (0..=u16::MAX).filter(|bits| half.widen(*bits).abs() <= 448.0).collect();
        let top = half.narrow(448.0);
        let values: Vec<Vec<u16>> = in_range
            .chunks(head_dim - 1)
            .map(|some| {
                let mut all = some.to_vec();
                all.resize(head_dim, top);
                all
            })
            .collect();
        let rows = values.len();
        let qkv: Vec<u16> =
            values.iter().flat_map(|value| [vec![top; 2 * head_dim], value.clone()].concat()).collect();
        let device = TestDevice::new();
        let layer = KvStore::Fp8.layer_bytes(1, block_tokens as u64, head_dim as u64) as usize;
        let blocks = rows.div_ceil(block_tokens);
        let (qkv, kv) = (device.upload(&qkv), device.upload(&vec![0u8; blocks * layer]));
        let angles = device.upload_constant(&[1.0f32, 0.0].repeat(head_dim / 2));
        let positions = device.upload_constant(&vec![0u32; rows]);
        let places = device.upload_constant(&(0..rows as u32).collect::<Vec<_>>());
        let p = QkvParams {
            qkv: qkv.address(),
            q_norm: 0,
            k_norm: 0,
            angles: angles.address(),
            positions: positions.address(),
            places: places.address(),
            kv: kv.address(),
            block_numbers: layer as u64,
            layer_offset: 0,
            rows: rows as u32,
            heads: 1,
            kv_heads: 1,
            head_dim: head_dim as u32,
            block_tokens: block_tokens as u32,
            eps: 1e-6,
        };
        unsafe { finish_qkv(&device, half, KvStore::Fp8, &p) }.unwrap();
        let pool = kv.read::<u8>(blocks * layer);
        for (row, value) in values.iter().enumerate() {
            // Values follow the keys.
            let at = row / block_tokens * layer + (block_tokens + row % block_tokens) * head_dim;
            for (bits, byte) in value.iter().zip(&pool[at..at + head_dim]) {
                let x = half.widen(*bits);
                assert_eq!(*byte, nearest_e4m3(x), "{half:?} {x:e}");
            }
        }
    }
}
