//! Block encodings against ggml's.

use super::*;

/// Expected values come from ggml's Python package on bytes by formula: some elements, and the sum of all elements weighted 2, 3, 4, 5, 6, 7,
/// 1, 2 and so on.
#[test]
fn blocks_are_widened_as_ggml_does() {
    type Values = &'static [(usize, f32)];
    let cases: [(Encoding, Values, Values, f64); BLOCKS.len()] = [
        (Encoding::Q4_0, &[(0, 0.25)], &[(0, 0.75), (17, 1.25), (31, -1.25)], -11.25),
        (Encoding::Q4_1, &[(0, 0.25), (2, -1.5)], &[(0, 2.0), (17, 1.75), (31, 1.0)], 23.5),
        (Encoding::Q5_0, &[(0, 0.25)], &[(0, 2.25), (17, 0.75), (31, 1.5)], 91.0),
        (Encoding::Q5_1, &[(0, 0.25), (2, -1.5)], &[(0, -1.25), (17, 2.0), (31, 0.75)], 311.75),
        (Encoding::Q8_0, &[(0, 0.25)], &[(0, 30.75), (17, -23.75), (31, -25.75)], 493.5),
        (
            Encoding::Q2K,
            &[(80, 0.25), (82, 0.125)],
            &[(0, 2.5), (17, 0.875), (127, 0.625), (128, 0.25), (197, 4.375), (255, -0.125)],
            2198.75,
        ),
        (
            Encoding::Q3K,
            &[(108, 0.25)],
            &[(0, 7.5), (17, -17.25), (127, -3.0), (128, 12.0), (197, -4.0), (255, 1.0)],
            -130.5,
        ),
        (
            Encoding::Q4K,
            &[(0, 0.25), (2, 0.125)],
            &[(0, 20.875), (17, 31.375), (127, 19.375), (128, 56.125), (197, 80.25), (255, 0.875)],
            57_222.875,
        ),
        (
            Encoding::Q5K,
            &[(0, 0.25), (2, 0.125)],
            &[(0, 3.375), (17, 108.375), (127, 256.875), (128, 118.625), (197, 161.5), (255, 46.375)],
            124_639.625,
        ),
        (
            Encoding::Q6K,
            &[(208, 0.125)],
            &[(0, 49.5), (17, -62.0), (127, 66.625), (128, 15.375), (197, -108.75), (255, 296.875)],
            3278.125,
        ),
        (Encoding::Iq4Nl, &[(0, 0.25)], &[(0, 9.5), (17, 17.25), (31, -16.25)], -147.25),
        (
            Encoding::Iq4Xs,
            &[(0, 0.25)],
            &[(0, -780.0), (17, 667.5), (127, 16.5), (128, 556.25), (197, 364.0), (255, 61.75)],
            -2551.25,
        ),
        (Encoding::Mxfp4, &[], &[(0, 0.375), (17, 0.75), (31, -0.0625)], 4.6875),
    ];
    for (encoding, scales, expected, total) in cases {
        let byte = |i: usize| ((i * 37 + i * i * 11 + 5) % 251) as u8;
        let mut raw: Vec<u8> = (0..encoding.block_bytes()).map(byte).collect();
        for (at, scale) in scales {
            raw[*at..at + 2].copy_from_slice(&f16::from_f32(*scale).to_le_bytes());
        }
        if encoding == Encoding::Mxfp4 {
            raw[0] = 124;
        }
        let mut out = vec![0.0; encoding.block()];
        encoding.widen(&raw, &mut out);
        assert!(expected.iter().all(|(at, value)| out[*at] == *value), "{encoding}: {out:?}");
        let sum: f64 = out.iter().enumerate().map(|(i, x)| f64::from(*x) * ((i + 1) % 7 + 1) as f64).sum();
        assert_eq!(sum, total, "{encoding}");
        // Integers that are taken as they are stored give the same elements.
        let mut integers = [0; BLOCK];
        if let Some(scale) = encoding.stored_integers(&raw, &mut integers) {
            let elements = integers.map(|q| scale.to_f32() * f32::from(q));
            assert_eq!(elements.as_slice(), out, "{encoding}");
        }
    }
}

#[test]
fn scales_that_are_not_finite_are_found() {
    for encoding in Encoding::blocks() {
        let (elements, bytes) = (encoding.block(), encoding.block_bytes());
        let clean = vec![0x11u8; 3 * bytes];
        assert_eq!(encoding.first_non_finite(&clean), None, "{encoding}");
        let halves = encoding.spec().unwrap().halves;
        let damages = halves.iter().map(|at| (*at, vec![0x00, 0x7c])).chain([(0, vec![0xff])]);
        for (at, damage) in damages.take(if encoding == Encoding::Mxfp4 { 1 } else { halves.len() }) {
            let mut raw = clean.clone();
            raw[bytes + at..][..damage.len()].copy_from_slice(&damage);
            assert_eq!(encoding.first_non_finite(&raw), Some(elements), "{encoding} at {at}");
        }
    }
}

#[test]
fn exponents_beyond_the_scales_of_groups_are_left_to_the_rounding_of_elements() {
    let stored = |exponent: u8| {
        let mut raw = [0x77u8; 17];
        raw[0] = exponent;
        Encoding::Mxfp4.stored_integers(&raw, &mut [0; BLOCK])
    };
    // 2^-24 to 2^15, of twice the elements.
    assert_eq!(stored(104).map(f16::to_f32), Some(2f32.powi(-24)));
    assert_eq!(stored(143).map(f16::to_f32), Some(32_768.0));
    assert_eq!([stored(103), stored(144)], [None, None]);
    // The largest exponent with which all elements are finite.
    for (exponent, found) in [(252, None), (253, Some(0)), (255, Some(0))] {
        let mut raw = [0x77u8; 17];
        raw[0] = exponent;
        assert_eq!(Encoding::Mxfp4.first_non_finite(&raw), found, "{exponent}");
        let mut out = [0.0; BLOCK];
        Encoding::Mxfp4.widen(&raw, &mut out);
        assert_eq!(out.iter().all(|x| x.is_finite()), found.is_none(), "{exponent}: {out:?}");
    }
}
